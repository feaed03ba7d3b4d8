"""Processes that are forked from one that has their modules already: an import costs up to seconds."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

from leaks import machine

ROOT = Path(__file__).resolve().parents[1]
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class _Zygote:
    """A script that calls `forking.serve`; started at first use, ends with this process."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._pids: list[int] = []
        self._changed = threading.Condition()

    def _start(self) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_"))}
        env.update(PYTHONPATH=str(ROOT), **_THREADS)
        process = subprocess.Popen(
            [sys.executable, str(self._script)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
                assert self._changed.wait_for(lambda: bool(self._pids), 240), f"{self._script} does not answer"
                return self._pids.pop()

    def code(self, pid: int, timeout_s: float) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes, timeout_s)
            return self._codes.get(pid)


_zygote = cache(_Zygote)


class Child:
    """A process of a zygote."""

    def __init__(self, script: Path, *, out: Path, err: Path, env: dict[str, str] | None = None, **more: Any) -> None:
        """script: the zygote's; out, err: files to write to; more: for the function that it gives to `serve`."""
        self._zygote = _zygote(script)
        self.pid = self._zygote.fork(out=str(out), err=str(err), env=env or {}, **more)

    def poll(self) -> int | None:
        return self._zygote.code(self.pid, 0.0)

    def signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code; None where it has not ended in time."""
        return self._zygote.code(self.pid, timeout_s)
