"""The site's health check of a node, run beside a rank that has failed, before another one begins there.

The launcher runs it, not the agent: it is in the job's cgroup, which has the job's GPUs.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress

from gemini_hpc import clock

LIMIT_S = 30.0
_LOOK_S = 0.2
_END_S = 2.0
_MOST_BYTES = 4096
_CHARS = 150
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


def unhealthy(path: str, stop: Callable[[], bool], say: Callable[[str], None], limit_s: float = LIMIT_S) -> str:
    """Why this node is not healthy: the first line of what the program says, if its status is not 0, or that it does
    not end in time; "" where it is, where the program cannot be run (which is said), or when `stop` says so."""
    if not os.path.isabs(path):
        say(f"health_check: wanted an absolute path, found {path[:200]!r}")
        return ""
    try:
        process = subprocess.Popen(
            [path],
            env=_ENVIRONMENT,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        say(f"health_check: {path[:200]}: {error.strerror}")
        return ""
    try:
        text = _output(process, stop, clock.monotonic() + limit_s)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()
        with suppress(subprocess.TimeoutExpired):  # a driver may hold it for good
            process.wait(_END_S)
    if text is None:
        return "" if stop() else f"the health check does not end within {limit_s:g} s"
    if not process.returncode:
        return ""
    return _first_line(text) or f"the health check ended with {process.returncode}"


def _output(process: subprocess.Popen[bytes], stop: Callable[[], bool], deadline: float) -> bytes | None:
    """What it says until it ends; None where that takes too long."""
    assert process.stdout is not None
    fd, text, said_all = process.stdout.fileno(), b"", False
    while clock.monotonic() < deadline and not stop():
        if not said_all and select.select([fd], [], [], _LOOK_S)[0]:
            chunk = os.read(fd, 1 << 16)
            said_all = not chunk
            text = (text + chunk)[:_MOST_BYTES]
        elif said_all:
            clock.sleep(0.01)
        if process.poll() is not None:
            if not said_all:  # what it has left in the pipe; who else holds that end is not waited for
                os.set_blocking(fd, False)
                with suppress(BlockingIOError):
                    text = (text + os.read(fd, _MOST_BYTES))[:_MOST_BYTES]
            return text
    return None


def _first_line(text: bytes) -> str:
    line = next((line for line in text.decode("utf-8", "replace").splitlines() if line.strip()), "")
    return "".join(c if c.isprintable() else "?" for c in line.strip())[:_CHARS]
