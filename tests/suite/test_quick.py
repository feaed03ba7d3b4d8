"""The quick check refuses what needs root, a cluster or much time, and reports the tests that take too long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import quick


@pytest.mark.parametrize(
    ("event", "arguments", "why"),
    [
        ("subprocess.Popen", ("/usr/bin/unshare", ["unshare", "-m"], None, None), "starts unshare"),
        ("subprocess.Popen", (b"mount", [b"mount"], None, None), "starts mount"),
        ("subprocess.Popen", ("python3", ["python3", Path("/a/train/zygote.py")], None, None), "starts trainings"),
        ("os.chown", ("/a", os.geteuid() + 1, -1, -1), "another user"),
        ("os.mkdir", ("/var/lib/gemini-x", 0o777, -1), "makes /var"),
        ("open", ("/sys/fs/cgroup/x", "w", os.O_WRONLY), "makes /sys"),
        ("open", (Path("/etc/x"), None, os.O_RDWR), "makes /etc"),
    ],
)
def test_a_test_that_is_not_quick_fails(event: str, arguments: tuple[object, ...], why: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=why):
        quick.guard(event, arguments)


def test_what_any_user_may_do_passes(tmp_path: Path) -> None:
    """A test's own stand-in for one of those programs is among it."""
    (tmp_path / "sbatch").touch(0o755)
    for event, arguments in [
        ("subprocess.Popen", ("/usr/bin/env", ["env"], None, None)),
        ("subprocess.Popen", ("sbatch", ["sbatch"], None, {"PATH": f"{tmp_path}:/usr/bin"})),
        ("subprocess.Popen", (str(tmp_path / "sbatch"), ["sbatch"], None, None)),
        ("os.chown", ("/a", os.geteuid(), -1, -1)),
        ("open", ("/sys/fs/cgroup/x", "r", os.O_RDONLY)),
        ("open", ("/tmp/x", "w", os.O_WRONLY | os.O_CREAT)),
        ("open", (7, "w", os.O_WRONLY)),
        ("os.mkdir", ("/tmp/x", 0o777, -1)),
    ]:
        quick.guard(event, arguments)


def test_slow_tests_are_named_the_slowest_first() -> None:
    phases = [("a", 2.0), ("b", 2.9), ("a", 1.5), ("c", 9.0)]
    assert [line.split() for line in quick.over_budget(phases)[1:]] == [["9.0", "s", "c"], ["3.5", "s", "a"]]
    assert len(quick.over_budget(phases[:2])) == 1
