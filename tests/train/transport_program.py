"""One rank of a team that tries a transport: does what the test says, scenario by scenario, and tells how it went.

Reads one JSON command a line from the unix socket that it was given: {"scenario", "parts", "part_bytes", "inboxes",
"arguments"}; answers {"value"} or {"error"}. Each scenario gets a new transport.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.train.transport import messages
from gemini_hpc.train.transport.base import Transport
from gemini_hpc.train.transport.gloo import GlooTransport
from gemini_hpc.train.transport.landing import Landing
from tests.train.transport_scenarios import SCENARIOS
from tests.train.transport_site import HANG_S, Copying, Library, Site


def _enter_mpi() -> None:
    """Torch's ranks are not MPI's: nothing may rely on that."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    os.environ.update(RANK=str((world.rank + 1) % world.size), WORLD_SIZE=str(world.size))


def _make_mpi(landing: Landing | None) -> Transport:
    from gemini_hpc.train.transport.mpi import MpiTransport

    return MpiTransport(landing)


def _spoil_messages() -> Callable[[], None]:
    good, messages._MAGIC = messages._MAGIC, b"GEMCHNK\x01"

    def restore() -> None:
        messages._MAGIC = good

    return restore


LIBRARIES = {
    "gloo": Library(GlooTransport, spoil=_spoil_messages),
    "mpi": Library(_make_mpi, _enter_mpi, _spoil_messages),
}


def main(control: str, library_name: str) -> None:
    """Until the test hangs up."""
    torch.set_num_threads(1)
    library = LIBRARIES[library_name]
    if library.enter:
        library.enter()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(control)
        stream = sock.makefile("rw")
        _answer(stream, {"rank": rank, "pid": os.getpid()})
        transport: Transport | None = None
        while line := stream.readline():
            command = json.loads(line)
            if command["scenario"] == "over":
                if transport is not None:
                    transport.interrupt()
                transport = None
                _answer(stream, {"value": None})
                continue
            faulthandler.dump_traceback_later(HANG_S)
            try:
                copying, landing = Copying(), None
                copying.go.set()
                if command["parts"]:
                    landing = Landing(
                        command["parts"], command["part_bytes"], inboxes=command["inboxes"], copy=copying
                    )
                transport = library.make(landing)
                site = Site(rank, world, transport, library, landing, copying)
                answer = {"value": SCENARIOS[command["scenario"]](site, **command["arguments"])}
            except Exception:
                answer = {"error": traceback.format_exc()}
            faulthandler.cancel_dump_traceback_later()
            _answer(stream, answer)
    if transport is not None:
        transport.interrupt()


def _answer(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
