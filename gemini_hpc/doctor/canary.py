"""The state of a canary: which node was taken away, and the guard that brings it back.

The guard is a process of its own. It acts as soon as the canary ends in any way: done, failed, interrupted or killed;
and without its end after `LONGEST_S`, should it hang in a file system.
It starts slurmd again and clears the node's DOWN if that is the canary's own. A file tells a later canary what a
reboot of this host has left.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from gemini_hpc import clock
from gemini_hpc.controller.fencing import REASON
from gemini_hpc.files import read_regular_file, replace_file
from gemini_hpc.slurm import Slurm, SlurmError
from gemini_hpc.slurm.client import find_tool
from gemini_hpc.slurm.facts import Node

FILE = "/run/gemini-hpc.canary"  # of root's; Slurm forgets the node's state no sooner than this host does
PROGRAM_S = 60.0  # the site's program starts or stops one daemon over the network
TRIES = 5  # to start slurmd again
TRY_PAUSE_S = 2.0  # a slurmd that ends needs a moment to free its port
BACK_S = 120.0  # a slurmd that starts registers within seconds, on a busy controller within a minute
LOOK_S = 1.0  # each look asks slurmctld
LONGEST_S = 1800.0  # longer than a canary, whose parts are bounded at five minutes each
OWN_REASON = "gemini-hpc doctor --canary"
SLURMS_REASON = "Not responding"  # what slurmctld itself writes after SlurmdTimeout


class Taken(msgspec.Struct, frozen=True):
    """A node that was taken away.

    Attributes:
        node: The node.
        job: Slurm's id of the canary's job.
        program: The setting `canary_program`.
        t: Unix time in seconds.
    """

    node: str
    job: int
    program: str
    t: float

    @property
    def reason(self) -> str:
        """Return the reason with which the canary sets the node DOWN."""
        return f"{OWN_REASON}, job {self.job}"


def is_own(taken: Taken, node: Node) -> bool:
    """Return whether a node is out of service because of the canary, and for no other reason."""
    ours = (taken.reason, f"{REASON}, job {taken.job} ", SLURMS_REASON)
    return node.is_withheld and node.reason.startswith(ours)


def call_program(program: str, verb: str, node: str, job: int) -> str:
    """Run the site's program. Return what went wrong, "" if nothing did."""
    try:
        done = subprocess.run(
            [program, verb, node, str(job)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{program} {verb} {node}: no end within {PROGRAM_S:g} s"
    except OSError as exc:
        return f"{program}: {exc.strerror}"
    text = " ".join(done.stderr.split())[-200:]
    return f"{program} {verb} {node} exits with {done.returncode}: {text}" if done.returncode else ""


def read_taken(path: str = FILE) -> Taken | None:
    """Return what an earlier canary has left taken away; None if nothing."""
    try:
        if os.lstat(path).st_uid != 0:
            return None
        return msgspec.json.decode(read_regular_file(path, 1 << 16), type=Taken)
    except (OSError, msgspec.MsgspecError):
        return None


def undo(taken: Taken, say: Callable[[str], None], path: str = FILE) -> bool:
    """Bring the node back. Return whether all of it is undone; the file stays if not.

    Args:
        taken: What was taken away.
        say: Prints a line.
        path: The file that tells of it.
    """
    for left_tries in range(TRIES - 1, -1, -1):
        problem = call_program(taken.program, "start", taken.node, taken.job)
        if not problem:
            break
        say(f"slurmd on {taken.node} could not be started: {problem}")
        if left_tries:
            clock.sleep(TRY_PAUSE_S)
    with suppress(OSError, SlurmError, subprocess.SubprocessError):
        subprocess.run([find_tool("scancel"), str(taken.job)], timeout=PROGRAM_S, check=False, capture_output=True)
    reason = problem or asyncio.run(_wait_until_back(taken))
    if reason:
        say(f"NOT undone: {reason}. See `scontrol show node {taken.node}`")
        return False
    say(f"{taken.node} is back: slurmd runs, and no DOWN of the canary's is left")
    with suppress(FileNotFoundError):
        os.unlink(path)
    return True


async def _wait_until_back(taken: Taken) -> str:
    """Wait until slurmd has registered, and resume the node if its state is the canary's own."""
    slurm, end, why = Slurm(), clock.monotonic() + BACK_S, "Slurm does not answer"
    while clock.monotonic() < end:
        try:
            node = (await slurm.read_nodes())[taken.node]
            if is_own(taken, node) and node.slurmd_start >= int(taken.t):
                await slurm.resume_node(taken.node)
            elif node.is_withheld and not is_own(taken, node):
                return ""  # somebody else has put it aside, and keeps it
            elif not node.is_withheld and "NOT_RESPONDING" not in node.flags and node.slurmd_start >= int(taken.t):
                return ""
            why = f"{taken.node} is {node.state}, {node.reason or 'without a reason'}"
        except (SlurmError, KeyError) as exc:
            why = str(exc)
        await asyncio.sleep(LOOK_S)
    return f"{why} after {BACK_S:g} s"


class Guard:
    """The process that undoes. It lives from before the node is taken away until all is undone."""

    def __init__(self, taken: Taken, path: str = FILE) -> None:
        """Write the file, and start the process.

        Raises:
            OSError: The file cannot be written. Nothing was taken away then.
        """
        self._write(taken, path)
        watched, self._alive = os.pipe()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._alive)
            _guard(watched, taken, path)
        os.close(watched)

    @staticmethod
    def _write(taken: Taken, path: str) -> None:
        replace_file(path, msgspec.json.encode(taken), mode=0o600, durable=True)

    def undo(self) -> bool:
        """Have all undone, and wait. Return whether it is."""
        os.close(self._alive)
        _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status) == 0


def _guard(watched: int, taken: Taken, path: str) -> None:
    """Wait until the canary closes its end of the pipe, or is overdue, and undo. Never return."""
    status = 1
    try:
        os.setsid()  # a Ctrl-C of the terminal is for the canary
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        select.select([watched], [], [], LONGEST_S)
        status = 0 if undo(taken, _say, path) else 1
    finally:
        os._exit(status)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        print(f"  {text}", flush=True)
