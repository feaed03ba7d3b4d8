"""Runs of the simulation, each in a process of its own: what a run patches ends with it."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

CPU_S = 60  # no run takes so long; a busy machine does not change that
Told = tuple[str, str]  # what went wrong or "", the story


@dataclass(frozen=True)
class Ended:
    """The result of a run."""

    problem: str
    story: str
    cpu_s: float


def apart(run: Callable[[], Told]) -> Ended:
    """Call `run` in a child of this process."""
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            faulthandler.register(signal.SIGXCPU, chain=True)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
            with os.fdopen(write, "wb") as out:
                out.write(msgspec.json.encode(run()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as found:
        told = found.read()
    _, status, used = os.wait4(pid, 0)
    problem, story = msgspec.json.decode(told, type=Told) if status == 0 else (f"ended with status {status}", "")
    return Ended(problem, story, used.ru_utime + used.ru_stime)


def with_equal_hashes(module: str) -> None:
    """Start this program anew unless strings hash alike in each process, and temporary paths are of one length: the
    order of sets and the sizes of simulated files are part of a run."""
    alike = {"PYTHONHASHSEED": "0", "TMPDIR": "/tmp"}
    if any(os.environ.get(name) != value for name, value in alike.items()):
        os.environ.update(alike)
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
