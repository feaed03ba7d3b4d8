"""The record of a check: its name, its rule, the kinds of hosts that it applies to, its function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gemini_hpc.doctor.facts import CONTROLLER, LOGIN, NODE, HostFacts
from gemini_hpc.doctor.finding import Outcome

ANYWHERE = frozenset((CONTROLLER, NODE, LOGIN))
ON_NODE = frozenset((NODE,))
ON_CONTROLLER = frozenset((CONTROLLER,))


@dataclass(frozen=True, slots=True)
class Check:
    """A check of the doctor.

    `look` may raise `Unavailable`, which skips the check. Any other exception makes only this check `wrong`.
    """

    name: str
    rule: str
    roles: frozenset[str]
    look: Callable[[HostFacts], Outcome]
