"""What the quick check leaves out, what it stops at, and what it tells of time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import quick

from .test_ledger import defined


def test_what_is_left_out_exists() -> None:
    """A directory or file that was renamed would come back into the quick check unnoticed."""
    for name in quick.LATER:
        file, _, test = name.partition("::")
        path = quick.TESTS / file
        assert path.exists(), f"{name} in tests/quick.py: there is no {path}"
        assert not test or test.partition("[")[0] in defined(path), f"{name} in tests/quick.py: there is no such test"


@pytest.mark.parametrize(
    ("path", "out"),
    [
        ("a", True),
        ("tests/a/test_b.py::test_c", True),
        ("ab/test_b.py", False),
        ("d/test_e.py", True),
        ("tests/d/test_e.py::test_f[1]", True),
        ("d", False),
        ("d/test_ee.py", False),
        ("tests/g/test_h.py::test_i[1]", True),
        ("tests/g/test_h.py::test_ii", False),
        ("tests/g/test_h.py::test_j[1]", True),
        ("tests/g/test_h.py::test_j[2]", False),
        ("g/test_h.py", False),
    ],
)
def test_directories_files_tests_and_single_parameters(monkeypatch: pytest.MonkeyPatch, path: str, out: bool) -> None:
    names = ("a", "d/test_e.py", "g/test_h.py::test_i", "g/test_h.py::test_j[1]")
    monkeypatch.setattr(quick, "LATER", dict.fromkeys(names, "why"))
    assert quick.later(path) == ("why" if out else "")


@pytest.mark.parametrize(
    ("program", "words", "why"),
    [
        ("/usr/bin/unshare", ["unshare", "-m"], "no unshare"),
        (b"mount", [b"mount"], "no mount"),
        ("/usr/bin/python3", ["python3", Path("/a/tests/train/zygote.py")], "no training"),
    ],
)
def test_a_program_that_is_not_started(program: object, words: list[object], why: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=why):
        quick.guard("subprocess.Popen", (program, words, None, None))


def test_programs_that_are_started(tmp_path: Path) -> None:
    """Among them a test's own stand-in for one of those."""
    quick.guard("subprocess.Popen", ("/usr/bin/env", ["env"], None, None))
    (tmp_path / "sbatch").touch(0o755)
    quick.guard("subprocess.Popen", ("sbatch", ["sbatch"], None, {"PATH": f"{tmp_path}:/usr/bin"}))
    quick.guard("subprocess.Popen", (str(tmp_path / "sbatch"), ["sbatch"], None, None))


def test_no_file_is_given_away() -> None:
    with pytest.raises(pytest.skip.Exception, match="another user"):
        quick.guard("os.chown", ("/a", os.geteuid() + 1, -1, -1))
    quick.guard("os.chown", ("/a", os.geteuid(), -1, -1))


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("os.mkdir", ("/var/lib/gemini-x", 0o777, -1)),
        ("open", ("/sys/fs/cgroup/x", "w", os.O_WRONLY)),
        ("open", (Path("/etc/x"), None, os.O_RDWR)),
    ],
)
def test_no_file_of_roots_is_made(event: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(pytest.skip.Exception, match="makes no /"):
        quick.guard(event, arguments)


def test_files_are_read_and_a_users_own_are_made() -> None:
    quick.guard("open", ("/sys/fs/cgroup/x", "r", os.O_RDONLY))
    quick.guard("open", ("/tmp/x", "w", os.O_WRONLY | os.O_CREAT))
    quick.guard("open", (7, "w", os.O_WRONLY))
    quick.guard("os.mkdir", ("/tmp/x", 0o777, -1))


def test_what_takes_too_long_is_told() -> None:
    phases = [("a", 2.0), ("b", 2.9), ("a", 1.5), ("c", 9.0)]
    told = quick.over_budget(phases)
    assert [line.split() for line in told[1:]] == [["9.0", "s", "c"], ["3.5", "s", "a"]]
    assert "tests/quick.py" in told[0]
    assert quick.over_budget(phases[:2]) == ["no test took longer than 3 s"]


def test_what_was_skipped_is_counted() -> None:
    assert quick.skipped(["Skipped: no a", "Skipped: no b", "Skipped: no a"]) == [
        "skipped: 2 no a",
        "skipped: 1 no b",
    ]


def test_a_campaign_is_whole_unless_it_is_the_quick_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for on, parts in ((False, (200, 5)), (True, (20, 1))):
        monkeypatch.setattr(quick, "_on", on)
        assert (quick.part(200), quick.part(5)) == parts
