"""The result of a check: the found state, the wanted state, the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

OK, WARNING, ACCEPTED, WRONG, SKIPPED = "ok", "warning", "accepted", "wrong", "skipped"
STATUSES = (OK, WARNING, ACCEPTED, WRONG, SKIPPED)
_SHOWN = 6
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a check's function.

    `found` is a sentence. `wanted` and `fix` are empty if all is well.
    """

    status: str
    found: str
    wanted: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check on one host.

    Attributes:
        check: `group.name` of the check.
        rule: Reason of the check: a requirement, a word or two, or a CVE of the same kind.
        status: `ok`; `warning`: works, but an administrator should know; `accepted`: a warning that is in
            `accepted_warnings`; `wrong`: does not work, or is dangerous; `skipped`: could not run here.
        found: What is there; if skipped, why the check could not run.
        wanted: What should be there; "" if ok or skipped.
        fix: What to do; "" if ok or skipped.
        seconds: Duration.
    """

    check: str
    rule: str
    status: str
    found: str
    wanted: str
    fix: str
    seconds: float


class Unavailable(Exception):
    """The error that a fact is not visible from here; its text gives the reason.

    The check is skipped then, and never reported as good.
    """


def read_or(otherwise: T, look: Callable[[], T]) -> T:
    """Return a fact, or `otherwise` if it is not visible from here."""
    try:
        return look()
    except Unavailable:
        return otherwise


def report_ok(found: str) -> Outcome:
    """Return an outcome for a good state."""
    return Outcome(OK, found)


def report_warning(found: str, wanted: str, fix: str) -> Outcome:
    """Return an outcome for a state that works, but that an administrator should know of."""
    return Outcome(WARNING, found, wanted, fix)


def report_wrong(found: str, wanted: str, fix: str) -> Outcome:
    """Return an outcome for a state that does not work, or is dangerous."""
    return Outcome(WRONG, found, wanted, fix)


def combine_outcomes(outcomes: Iterable[Outcome]) -> Outcome:
    """Return one outcome for several of the same check: the worst status, with all findings of that status."""
    all_outcomes = list(outcomes)
    for status in (WRONG, WARNING):
        bad = [o for o in all_outcomes if o.status == status]
        if bad:
            return Outcome(status, join_some(o.found for o in bad), bad[0].wanted, bad[0].fix)
    return report_ok(join_some(o.found for o in all_outcomes))


def join_some(texts: Iterable[str], separator: str = "; ") -> str:
    """Join the first few of many texts, and add how many more there are."""
    distinct = list(dict.fromkeys(texts))
    more = f"{separator}and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
    return separator.join(distinct[:_SHOWN]) + more
