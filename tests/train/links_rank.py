"""One rank of a team that tries the links: does what the test says, scenario by scenario, and tells how it went.

Reads one JSON command a line from the unix socket that it was given: {"scenario", "arguments"}; answers {"value"} or
{"error"}. Each scenario gets new links.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import traceback
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.train.nccl.gloo_links import GlooLinks
from tests.train.links_scenarios import HANG_S, SCENARIOS, Site


def main(o: dict[str, Any]) -> None:
    """Run scenarios until the test hangs up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(o["links"])
        stream = sock.makefile("rw")
        _answer(stream, {"rank": rank, "pid": os.getpid()})
        links: GlooLinks | None = None
        while line := stream.readline():
            command = json.loads(line)
            if command["scenario"] == "over":
                if links is not None:
                    links.interrupt()
                links = None
                _answer(stream, {"value": None})
                continue
            faulthandler.dump_traceback_later(HANG_S)
            try:
                links = GlooLinks()
                site = Site(rank, world, links)
                answer = {"value": SCENARIOS[command["scenario"]](site, **command["arguments"])}
            except Exception:
                answer = {"error": traceback.format_exc()}
            faulthandler.cancel_dump_traceback_later()
            _answer(stream, answer)
    if links is not None:
        links.interrupt()


def _answer(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
