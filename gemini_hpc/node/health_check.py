"""The runner of the site's health check of this node.

A launcher runs the check beside a rank that has failed, as the job's owner, in the job's cgroup and with the job's
GPUs. Its result decides whether this job leaves the node. Root runs the check after the job (`health_report`). Only
that result drains the node.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gemini_hpc import clock
from gemini_hpc.lines import replace_unprintable

LIMIT_S = 30.0  # a check that takes longer is red
_LOOK_S = 0.2  # pause between two checks of `stop`
_END_S = 2.0  # a check that SIGKILL has not ended by then is left to the kernel
_MOST_BYTES = 4096
_CHARS = 150
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A red result of the health check.

    Attributes:
        text: The first line of the check's output, or a description of the failure.
        hangs: Whether the check did not end.
    """

    text: str
    hangs: bool = False


def find_problem(
    path: str, stop: Callable[[], bool], say: Callable[[str], None], limit_s: float = LIMIT_S
) -> Problem | None:
    """Run the health check. Return why this node is not healthy.

    Args:
        path: Absolute path of the check's program.
        stop: Return whether the result is no longer needed.
        say: Called with the reason why the program cannot be run.
        limit_s: Time limit in seconds; a check that takes longer is red.

    Returns:
        None for a healthy node, for a program that cannot be run, and after `stop` returned true.
    """
    if not os.path.isabs(path):
        say(f"health_check: wanted an absolute path, found {path[:200]!r}")
        return None
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
        return None
    try:
        text = _read_output(process, stop, clock.monotonic() + limit_s)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()
        with suppress(subprocess.TimeoutExpired):  # a driver may keep the process from dying
            process.wait(_END_S)
    if text is None:
        return None if stop() else Problem(f"the health check does not end within {limit_s:g} s", hangs=True)
    if not process.returncode:
        return None
    status = process.returncode if process.returncode > 0 else 128 - process.returncode  # as a shell shows it
    return Problem(_extract_first_line(text) or f"the health check ended with status {status}")


def _read_output(process: subprocess.Popen[bytes], stop: Callable[[], bool], deadline: float) -> bytes | None:
    """Return the check's output until its end; None if it takes too long."""
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
            if not said_all:  # read the rest in the pipe without waiting for other processes that hold its write end
                os.set_blocking(fd, False)
                with suppress(BlockingIOError):
                    text = (text + os.read(fd, _MOST_BYTES))[:_MOST_BYTES]
            return text
    return None


def _extract_first_line(text: bytes) -> str:
    line = next((line for line in text.decode("utf-8", "replace").splitlines() if line.strip()), "")
    return replace_unprintable(line.strip()[:_CHARS])
