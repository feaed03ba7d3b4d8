"""Forking on request, in a process that has imported what its children need.

Reads a JSON object a line: {"out", "err", "env", ...}; answers with {"pid"}, and {"pid", "code"} at its end.
See zygote.py for the other side.
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]


def serve(child: Callable[[Request], object], prepare: Callable[[Request], object] = bool) -> None:
    """Fork until standard input ends; `prepare` runs before each fork. A child returns from here when it has run
    `child`, and ends as any Python process does: hooks, atexit, finalization."""
    request = _fork(prepare)
    if request is None:
        return
    try:
        child(request)
    except SystemExit:
        raise
    except BaseException as error:
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exc()
            sys.exit(1)
        raise error


def _fork(prepare: Callable[[Request], object]) -> Request | None:
    """Fork for each request; return the request in the child, None where there are no more."""
    gc.collect()
    gc.freeze()
    children: dict[int, int] = {}  # by the descriptor that tells of its end
    buffer = b""
    while True:
        ready, _, _ = select.select([0, *children], [], [])
        for fd in children.keys() & ready:
            pid = children.pop(fd)
            os.close(fd)
            print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)
        if 0 not in ready:
            continue
        part = os.read(0, 1 << 20)
        if not part:
            return None
        *lines, buffer = (buffer + part).split(b"\n")
        for line in lines:
            request = json.loads(line)
            prepare(request)
            pid = os.fork()
            if pid == 0:
                for fd in children:
                    os.close(fd)
                _begin(request)
                return request
            children[os.pidfd_open(pid)] = pid
            print(json.dumps({"pid": pid}), flush=True)


def _begin(request: Request) -> None:
    for path, number, how in [
        (os.devnull, 0, os.O_RDONLY),
        (request["out"], 1, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (request["err"], 2, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ]:
        fd = os.open(path, how)
        os.dup2(fd, number)
        os.close(fd)
    for name in [n for n in os.environ if n.startswith(("GEMINI_", "SLURM_"))]:
        del os.environ[name]
    os.environ.update(request["env"])
