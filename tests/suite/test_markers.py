"""Markers say at the test what docs/dev/promises.md lists; few tests are flaky, and none of them shows a promise."""

from __future__ import annotations

from collections import Counter
from datetime import date

from tests import promises

MOST_WITNESSES, MOST_FLAKY = 75, 5


def test_the_page_lists_the_promises() -> None:
    assert promises.PAGE.read_text() == promises.page(), "python -m tests.promises writes docs/dev/promises.md"


def test_each_promise_is_shown_once() -> None:
    found = promises.marked("witness")
    assert 0 < len(found) <= MOST_WITNESSES, "make test has ten minutes: to add a witness, take one out"
    twice = [what for what, count in Counter(m.words[0] for m in found).items() if count > 1]
    assert not twice


def test_few_tests_are_flaky_and_each_has_a_reason_and_a_date() -> None:
    found = promises.marked("flaky")
    assert len(found) <= MOST_FLAKY, "mend one first"
    for use in found:
        reason, since = use.words
        assert reason and date.fromisoformat(since)
    assert not {(m.file, m.test) for m in found} & {(m.file, m.test) for m in promises.marked("witness")}
