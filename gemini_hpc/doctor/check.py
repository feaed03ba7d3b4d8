"""A check: its name, the rule behind it, the hosts that it is for, its function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gemini_hpc.doctor.facts import CONTROLLER, LOGIN, NODE, Facts
from gemini_hpc.doctor.finding import Outcome

ANYWHERE = frozenset((CONTROLLER, NODE, LOGIN))
ON_NODE = frozenset((NODE,))
ON_CONTROLLER = frozenset((CONTROLLER,))


@dataclass(frozen=True, slots=True)
class Check:
    """`look` may raise `Unavailable` (skipped); any other exception makes the check `wrong`, and only that one."""

    name: str
    rule: str
    roles: frozenset[str]
    look: Callable[[Facts], Outcome]
