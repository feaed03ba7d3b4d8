"""The ledger of flaky tests: what it covers, what it refuses; and that ours names what exists, and is fresh."""

from __future__ import annotations

import ast
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests import ledger
from tests.ledger import Flake, LedgerError

DAY = date(2026, 3, 1)
LINE = '{ test = "tests/a/test_b.py::test_c", date = 2026-03-01, reason = "slow" },'


def test_one_parametrisation_or_all_of_them() -> None:
    every, one = Flake("tests/a.py::test_b", DAY, "slow"), Flake("tests/a.py::test_b[x]", DAY, "slow")
    tests = [
        "tests/a.py::test_b",
        "tests/a.py::test_b[x]",
        "tests/a.py::test_b[y]",
        "tests/a.py::test_bc",
        "tests/a.py",
    ]
    assert ledger.missing(tests, [every]) == ["tests/a.py::test_bc", "tests/a.py"]
    assert ledger.missing(tests, [one]) == [test for test in tests if test != "tests/a.py::test_b[x]"]
    assert ledger.missing(tests, []) == tests


def test_what_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "flakes.toml").write_text(f"flakes = [\n  {LINE}\n]\n")
    assert ledger.read(path) == [Flake("tests/a/test_b.py::test_c", DAY, "slow")]


def test_the_line_that_is_advised_can_be_read(tmp_path: Path) -> None:
    (path := tmp_path / "flakes.toml").write_text(f"flakes = [{ledger.line_for('tests/a.py::test_b[x]', DAY)}]")
    assert ledger.missing(["tests/a.py::test_b[x]"], ledger.read(path)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"flakes = [{LINE}{LINE}]", "tests/a/test_b.py::test_c stands there twice"),
        (f"flakes = [{LINE.replace('::test_c', '')}]", "found {'test': 'tests/a/test_b.py'"),
        (f"flakes = [{LINE.replace('slow', ' ')}]", "found"),
        (f"flakes = [{LINE.replace('2026-03-01', '2026-03-01T10:00:00')}]", "found"),
        (f"flakes = [{LINE.replace('2026-03-01', chr(34) + 'today' + chr(34))}]", "found"),
        (f"flakes = [{LINE.replace('reason', 'cause')}]", "found"),
        (f"flakes = [{LINE.replace('reason', 'owner = 1, reason')}]", "found"),
        (f"flake = [{LINE}]", "wanted one list `flakes`, found flake"),
        ("flakes = 3", "wanted one list `flakes`"),
        ("flakes = [", "flakes.toml: "),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (path := tmp_path / "flakes.toml").write_text(text)
    with pytest.raises(LedgerError) as refused:
        ledger.read(path)
    assert said in str(refused.value)


@pytest.mark.parametrize(("days", "overdue"), [(-1, True), (0, False), (60, False), (61, True)])
def test_an_entry_keeps_for_sixty_days(days: int, overdue: bool) -> None:
    assert Flake("tests/a.py::test_b", DAY, "slow").overdue(DAY + timedelta(days)) is overdue


def defined(path: Path) -> set[str]:
    """The names of a file's tests, as pytest's ids have them behind the file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_ours_names_tests_that_exist() -> None:
    for flake in ledger.read():
        file, _, name = flake.test.partition("::")
        path = ledger.ROOT / file
        assert path.is_file() and name.partition("[")[0] in defined(path), f"{flake.test}: there is no such test"


def test_no_entry_of_ours_is_overdue() -> None:
    advice = "mend it and take the entry out of tests/flakes.toml, or look again and renew the date"
    overdue = [flake for flake in ledger.read() if flake.overdue(date.today())]
    assert not overdue, "\n".join(f"{flake.test}: dated {flake.since}; {advice}" for flake in overdue)
