"""Starting training processes for the tests, and reading what they print."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from leaks import machine
from waiting import until

from .fake_agent import FakeJob

ROOT = Path(__file__).resolve().parents[2]
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


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


class _Zygote:
    """See zygote.py; started at first use, ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._pids: list[int] = []
        self._changed = threading.Condition()

    def _start(self) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_"))}
        env.update(PYTHONPATH=str(ROOT), **_THREADS)
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        atexit.register(process.kill)
        machine.keep(process.pid)
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            with self._changed:
                if "code" in answer:
                    self._codes[answer["pid"]] = answer["code"]
                else:
                    self._codes.pop(answer["pid"], None)  # of an earlier process with this number
                    self._pids.append(answer["pid"])
                self._changed.notify_all()

    def fork(self, **request: Any) -> int:
        with self._lock:
            if self._process is None:
                self._process = self._start()
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            with self._changed:
                assert self._changed.wait_for(lambda: bool(self._pids), 240), "the zygote does not answer"
                return self._pids.pop()

    def code(self, pid: int, timeout_s: float) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes, timeout_s)
            return self._codes.get(pid)


_zygote = _Zygote()


@cache
def _outputs() -> str:
    """One directory for what the processes print; gone when the tests are over."""
    directory = tempfile.mkdtemp(prefix="gemini-test-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    machine.keep(Path(directory))
    return directory


class Process:
    """One training process."""

    def __init__(self, env: dict[str, str], options: dict[str, Any] | None = None, **more: Any) -> None:
        """options: of worker.py; more: see zygote.py."""
        self._directory = Path(tempfile.mkdtemp(dir=_outputs()))
        self._out, self._err = self._directory / "out", self._directory / "err"
        self.pid = _zygote.fork(env=env, options=options, out=str(self._out), err=str(self._err), **more)

    def poll(self) -> int | None:
        return _zygote.code(self.pid, 0.0)

    def signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int | None:
        return _zygote.code(self.pid, timeout_s)

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
        """node_ranks: the nodes that have ranks; default all."""
        if isinstance(job, FakeJob):  # its agents bring no copies
            options = {**options, "kwargs": {"transport": "gloo", **options.get("kwargs", {})}}
        nodes = [job.nodes[r] for r in node_ranks or range(len(job.nodes))] if job is not None else []
        self.job, self.processes = job, []
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
