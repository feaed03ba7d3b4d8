"""Starting training processes for the tests, and reading what they print."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from leaks import machine
from waiting import until
from zygote import ROOT, Child

from .fake_agent import FakeJob

__all__ = ["ROOT", "Process", "Run", "environments", "free_port", "train"]
_ZYGOTE = Path(__file__).with_name("zygote.py")

# Below those that the kernel gives to whoever asks for any; other test processes begin elsewhere.
_ports = islice(cycle(range(10000, 18000)), os.getpid() * 613 % 8000, None)


def free_port() -> int:
    """Nobody listens there, and nobody gets it by chance before it is used."""
    for port in _ports:
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there are always more")


def environments(world: int) -> list[dict[str, str]]:
    """What a launcher like torchrun sets for each rank of one launch on this machine."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [{**common, "RANK": str(rank)} for rank in range(world)]


def _remove(directory: str, owner: int) -> None:
    """Not at the end of a child that a test has forked."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


@cache
def _outputs() -> str:
    """One directory for what the processes print; gone when the tests are over."""
    directory = tempfile.mkdtemp(prefix="gemini-test-")
    atexit.register(_remove, directory, os.getpid())
    machine.keep(Path(directory))
    return directory


class Process(Child):
    """One training process."""

    def __init__(self, env: dict[str, str], options: dict[str, Any] | None = None, **more: Any) -> None:
        """options: of worker.py; more: see zygote.py."""
        directory = Path(tempfile.mkdtemp(dir=_outputs()))
        self._out, self._err = directory / "out", directory / "err"
        super().__init__(_ZYGOTE, out=self._out, err=self._err, env=env, options=options, **more)

    def read(self) -> tuple[str, str]:
        return (
            self._out.read_text() if self._out.exists() else "",
            self._err.read_text() if self._err.exists() else "",
        )


class Run:
    """Training processes of one launch; ranks are dealt to the job's nodes in blocks."""

    def __init__(
        self, job: FakeJob | None, world: int, options: dict[str, Any], node_ranks: Sequence[int] = ()
    ) -> None:
        """node_ranks: the nodes that have ranks; default all. Option `rate`: bytes a second of each push."""
        nodes = [job.nodes[r] for r in node_ranks or range(len(job.nodes))] if job is not None else []
        self.job, self.processes = job, []
        if job is not None:
            job.rate = options.get("rate", 0.0)
        self.stderr: list[str] = []
        for rank, env in enumerate(environments(world)):
            if job is not None:
                env["GEMINI_SOCKET"] = nodes[rank * len(nodes) // world].path
                env["GEMINI_STEP"] = f"1.{job.restart}"
            self.processes.append(Process(env, options))

    def wait(self, timeout_s: float = 120.0, codes: tuple[int, ...] = (0,)) -> list[dict[str, Any]]:
        """Results by rank."""
        results: list[dict[str, Any]] = []
        failures = []
        deadline = time.monotonic() + timeout_s
        for rank, process in enumerate(self.processes):
            code = process.wait(max(0.0, deadline - time.monotonic()))
            if code is None:
                failures.append(f"rank {rank} hangs")
                for p in self.processes:
                    p.signal(signal.SIGKILL)
                process.wait(10.0)
            elif code not in codes:
                failures.append(f"rank {rank} ended with {code}")
            out, err = process.read()
            self.stderr.append(err)
            # gloo writes to the same file, sometimes into the same line.
            at = out.rfind('{"rank"')
            results.append(json.JSONDecoder().raw_decode(out[at:])[0] if at >= 0 else {})
        assert not failures, "; ".join(failures) + "\n" + "\n".join(self.stderr)
        if isinstance(job := self.job, FakeJob):  # the agents may still look at the last copies
            until(lambda: not job.unverified, what="verified")
        return results


def train(job: FakeJob | None, world: int, **options: Any) -> list[dict[str, Any]]:
    """One launch to its end; every rank must succeed."""
    return Run(job, world, options).wait()
