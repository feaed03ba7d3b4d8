"""The ledger of flaky tests, tests/flakes.toml: tests that may fail beside others, if they pass alone."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEDGER = Path(__file__).with_name("flakes.toml")
# After that an entry is renewed by somebody who has looked at the test again, or the test is mended.
KEEPS = timedelta(days=60)


class LedgerError(ValueError):
    """The ledger cannot be read; the text names the entry and what it lacks."""


@dataclass(frozen=True)
class Flake:
    """One entry: `test` is `file::test`, for every parametrisation of it unless it names one."""

    test: str
    since: date
    reason: str

    def covers(self, test: str) -> bool:
        return test == self.test or test.partition("[")[0] == self.test

    def overdue(self, today: date) -> bool:
        return not timedelta(0) <= today - self.since <= KEEPS


def read(path: Path = LEDGER) -> list[Flake]:
    """Raises LedgerError."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as exc:
        raise LedgerError(f"{path.name}: {exc}") from exc
    entries = table.get("flakes", [])
    if table.keys() - {"flakes"} or not isinstance(entries, list):
        raise LedgerError(f"{path.name}: wanted one list `flakes`, found {', '.join(table)}")
    found = [_entry(path.name, entry) for entry in entries]
    tests = [flake.test for flake in found]
    if twice := sorted({test for test in tests if tests.count(test) > 1}):
        raise LedgerError(f"{path.name}: {twice[0]} stands there twice")
    return found


def _entry(name: str, entry: Any) -> Flake:
    match entry:
        case {"test": str(test), "date": date() as since, "reason": str(reason), **more} if (
            "::" in test and reason.strip() and not more and not isinstance(since, datetime)
        ):
            return Flake(test, since, reason)
    raise LedgerError(f"{name}: wanted {line_for('tests/x/test_y.py::test_z', date(2026, 1, 31))} found {entry}")


def line_for(test: str, today: date) -> str:
    """The line that enters `test`, every parametrisation of it."""
    return f'{{ test = "{test.partition("[")[0]}", date = {today}, reason = "WHY" }},'


def missing(tests: Iterable[str], flakes: Iterable[Flake]) -> list[str]:
    """Those of `tests` that no entry covers."""
    entries = list(flakes)
    return [test for test in tests if not any(flake.covers(test) for flake in entries)]
