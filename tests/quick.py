"""The quick check, `pytest --quick`, which `make check` runs: the tests that any user's machine passes in a minute.

A test is in it unless a marker says otherwise (`LATER`). What needs root, a cluster, or a program that may be absent
fails at the very call that needs it (`guard`), so that a missing marker shows on every machine.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

# Markers of tests that the quick check leaves out.
LATER = frozenset({"slow", "cluster", "alone", "long", "flaky"})
BUDGET_S = 3.0
# Programs that need root, or Debian packages that the quick check does without.
PROGRAMS = {
    *("unshare", "nsenter", "setpriv", "mount", "umount", "ip", "debootstrap"),
    *("munged", "slurmctld", "slurmd", "slurmdbd", "sbatch", "srun", "mariadbd"),
    *("gcc", "cc", "make", "mpiexec", "mpirun", "strace"),
}
# Where only root makes files.
ROOTS = ("/etc/", "/opt/gemini", "/sys/", "/var/lib/gemini")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# From it the tests' trainings are forked: seconds each, and more on a busy machine.
TRAININGS = "zygote.py"


def begin() -> None:
    """Install the guard. Called once, before any test is imported."""
    sys.addaudithook(guard)


def is_left_out(item: pytest.Item) -> bool:
    """Return whether a marker keeps the test out of the quick check."""
    return any(marker.name in LATER for marker in item.iter_markers())


def guard(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail the test that is about to do what needs root, such a program, or much time. An audit hook."""
    if event == "subprocess.Popen":
        path, words, _, environment = arguments
        program = os.path.basename(os.fsdecode(path))
        if program in PROGRAMS and not _is_stand_in(os.fsdecode(path), environment):
            _refuse(f"starts {program}")
        if not isinstance(words, str) and any(os.path.basename(os.fsdecode(word)) == TRAININGS for word in words):
            _refuse("starts trainings")
    elif event == "os.chown" and not {arguments[1], arguments[2]} <= {-1, os.geteuid(), os.getegid()}:
        _refuse("gives a file to another user")
    elif (event == "os.mkdir" or (event == "open" and arguments[2] & WRITES)) and str(arguments[0]).startswith(ROOTS):
        _refuse(f"makes {arguments[0]}")


def _refuse(what: str) -> None:
    pytest.fail(f"this test {what}: mark it slow (or cluster); the quick check runs as any user")


def _is_stand_in(program: str, environment: Any) -> bool:
    """Return whether a program is the test's own, by its path or by the first of that name in PATH."""
    found = shutil.which(program, path=(os.environ if environment is None else environment).get("PATH"))
    return found is not None and not found.startswith(("/usr/", "/bin/", "/sbin/"))


def over_budget(durations: Iterable[tuple[str, float]]) -> list[str]:
    """Return lines that name the tests which took too long, from the seconds of each of their phases."""
    total: dict[str, float] = defaultdict(float)
    for test, duration_s in durations:
        total[test] += duration_s
    slow = sorted((test for test in total if total[test] > BUDGET_S), key=lambda test: -total[test])
    if not slow:
        return [f"no test took longer than {BUDGET_S:g} s"]
    return [
        f"longer than {BUDGET_S:g} s: make it quicker, or mark it slow (a busy machine, or the first test of a file, "
        "takes longer):",
        *(f"{total[test]:6.1f} s  {test}" for test in slow),
    ]
