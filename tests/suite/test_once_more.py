"""What failed beside others runs once more, alone: when the whole is green, and what is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import pytest

from tests import once_more

KNOWN, UNKNOWN = "tests/a/test_b.py::test_known[x]", "tests/a/test_b.py::test_unknown[y]"
BOOK = 'flakes = [{ test = "tests/a/test_b.py::test_known", date = 2026-03-01, reason = "slow" }]'


@dataclass
class Suite:
    """A run whose `failed` tests failed beside others; of these `still` fail alone, with pytest's `code`, if any."""

    directory: Path
    asked: list[str] = field(default_factory=list)

    def run(self, *failed: str, still: Sequence[str] = (), code: int | None = None, beside: int = 1) -> int:
        cache, book = self.directory / "lastfailed", self.directory / "flakes.toml"
        cache.write_text(json.dumps(dict.fromkeys(failed, True)))
        if not book.exists():
            book.write_text(BOOK)

        def again(tests: Sequence[str]) -> int:
            self.asked += tests
            cache.write_text(json.dumps(dict.fromkeys(still, True)))
            return code if code is not None else int(bool(still))

        return once_more.main(beside, cache, book, again)


Said = Callable[[], str]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return lambda: capsys.readouterr().out


def test_a_known_flake_that_passes_alone_is_green(suite: Suite, said: Said) -> None:
    assert suite.run(KNOWN) == 0 and suite.asked == [KNOWN]
    last = said().splitlines()[-1]
    assert last == (
        "once more: 1 failed beside others; alone 0 failed and 1 passed, 0 of them not in tests/flakes.toml: passed"
    )


def test_an_unknown_one_is_red_and_told_what_to_do(suite: Suite, said: Said) -> None:
    assert suite.run(KNOWN, UNKNOWN) == 1
    text = said()
    assert f"  {UNKNOWN}\nfailed beside other workers, passed alone, and is not in tests/flakes.toml" in text
    assert f'{{ test = "tests/a/test_b.py::test_unknown", date = {date.today()}, reason = "WHY" }},' in text
    assert "second best" in text and 'test_known", date' not in text
    assert text.splitlines()[-1].endswith("2 passed, 1 of them not in tests/flakes.toml: FAILED")


def test_what_fails_alone_too_is_red_and_not_for_the_ledger(suite: Suite, said: Said) -> None:
    assert suite.run(KNOWN, UNKNOWN, still=[UNKNOWN]) == 1
    text = said()
    assert "WHY" not in text and "alone 1 failed and 1 passed, 0 of them" in text and text.endswith("FAILED\n")


def test_an_unknown_one_is_told_also_where_another_fails_alone(suite: Suite, said: Said) -> None:
    assert suite.run(KNOWN, UNKNOWN, still=[KNOWN]) == 1
    assert "WHY" in said()


@pytest.mark.parametrize("code", [2, 3, 4, 5])
def test_a_run_alone_that_pytest_could_not_finish_is_no_pass(suite: Suite, code: int) -> None:
    assert suite.run(KNOWN, code=code) == code


@pytest.mark.parametrize("beside", [0, 2, 3, 4, 5, 130])
def test_only_failed_tests_run_once_more(suite: Suite, beside: int) -> None:
    assert suite.run(KNOWN, beside=beside) == beside and not suite.asked


@pytest.mark.parametrize("count", [0, once_more.MOST + 1])
def test_none_or_many_are_a_verdict(suite: Suite, count: int) -> None:
    """None: the run failed by what is looked at after all tests."""
    assert suite.run(*(f"tests/a.py::test_{n}" for n in range(count))) == 1 and not suite.asked


def test_a_ledger_that_cannot_be_read_is_red(suite: Suite, said: Said) -> None:
    (suite.directory / "flakes.toml").write_text("flakes = 3")
    assert suite.run(KNOWN) == 1 and "wanted one list `flakes`" in said()
