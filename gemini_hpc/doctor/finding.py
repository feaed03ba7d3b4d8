"""What one check says: what was found, what was wanted, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, WARNING, WRONG, SKIPPED = "ok", "warning", "wrong", "skipped"
STATUSES = (OK, WARNING, WRONG, SKIPPED)
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check's function returns. `found` is a sentence; `wanted` and `fix` are empty where all is well."""

    status: str
    found: str
    wanted: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check on one host. `rule` is what it stands for: a word or two, or a CVE whose like it looks for."""

    check: str
    rule: str
    status: str
    found: str
    wanted: str
    fix: str
    seconds: float


class Unavailable(Exception):
    """This cannot be looked at from here; the message says why. The check is then skipped, never green."""


def ok(found: str) -> Outcome:
    """As it should be."""
    return Outcome(OK, found)


def warning(found: str, wanted: str, fix: str) -> Outcome:
    """It works, and an administrator should know."""
    return Outcome(WARNING, found, wanted, fix)


def wrong(found: str, wanted: str, fix: str) -> Outcome:
    """It does not work, or is dangerous."""
    return Outcome(WRONG, found, wanted, fix)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """One outcome for several of the same check: the worst of them rules, with all of its kind told."""
    told = list(outcomes)
    for status in (WRONG, WARNING):
        bad = [o for o in told if o.status == status]
        if bad:
            return Outcome(status, some(o.found for o in bad), bad[0].wanted, bad[0].fix)
    return ok(some(o.found for o in told))


def some(texts: Iterable[str], separator: str = "; ") -> str:
    """The first few of many, and how many more there are."""
    told = list(dict.fromkeys(texts))
    more = f"{separator}and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return separator.join(told[:_SHOWN]) + more
