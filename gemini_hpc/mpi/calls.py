"""Comparison of the collective calls in which the ranks of a program meet.

Without it, a rank that leaves out a call would meet other ranks in another call, whose messages mean something else.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gemini_hpc.client.session import RankSession
from gemini_hpc.core.moments import name_ranks
from gemini_hpc.mpi.collectives import MpiRanks
from gemini_hpc.mpi.interval import Need


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A rank's first message in a collective call.

    Attributes:
        name: Name of the call, with its brackets.
        made: `step()` calls of this rank, including the present one; 0 if they do not count.
        ready: This rank has slots for a version.
        lost: Reason why its protection has ended; "": not ended.
        need: How rarely versions must be saved for this rank.
    """

    name: str
    made: int = 0
    ready: bool = True
    lost: str = ""
    need: Need = Need()

    @property
    def place(self) -> tuple[str, int]:
        """Return the part that must be equal on all ranks."""
        return self.name, self.made


class Calls:
    """The collective calls of one rank.

    Attributes:
        apart: The ranks have met in different calls, so later calls no longer match either.
    """

    def __init__(self, ranks: MpiRanks, session: RankSession) -> None:
        self._ranks, self._session = ranks, session
        self.apart = False

    def meet(
        self, name: str, *, ready: bool = True, counts: bool = True, lost: str = "", need: Need | None = None
    ) -> list[Call]:
        """Begin a call and return each rank's message (collective).

        If the calls' names differ, protection ends on all ranks.

        Args:
            name: Name of the call.
            ready: This rank has slots for a version.
            counts: The ranks must have made equally many `step()` calls, as long as versions are saved.
            lost: Reason why this rank's protection has ended.
            need: How rarely versions must be saved for this rank.
        """
        session = self._session
        made = session.version if counts and session.protected else 0
        word = msgspec.msgpack.encode(Call(name, made, ready, lost, need or Need()))
        calls = [msgspec.msgpack.decode(raw, type=Call) for raw in self._ranks.gather_data(word)]
        if len({call.name for call in calls}) > 1:
            self.apart = True
            session.verdict.reject()
        return calls

    def report_difference(self, calls: Sequence[Call]) -> bool:
        """Return whether the ranks disagree about this version, and report the difference once."""
        session, difference = self._session, describe_difference(calls)
        if not difference:
            return False
        version = max(call.made for call in calls)
        if "void" not in session.unsaved:
            end = "this program is no longer protected" if self.apart else "nothing is sealed until they agree again"
            session.say_once(
                (f"version {version} is void, and versions before it may mix iterations: " if version else "")
                + f"{difference}. Call step() once in each iteration on every rank; {end}"
            )
        session.count_unsaved("void")
        session.report_version("void", version, difference)
        return True


def describe_difference(calls: Sequence[Call]) -> str:
    """Return which rank is in which call if the calls differ, else ""."""
    found: dict[tuple[str, int], list[int]] = {}
    for rank, call in enumerate(calls):
        found.setdefault(call.place, []).append(rank)
    if len(found) < 2:
        return ""
    parts = []
    for (name, made), ranks in found.items():
        verb, counted = "is" if len(ranks) == 1 else "are", f"{made} step() call{'' if made == 1 else 's'}"
        parts.append(f"{name_ranks(ranks)} {verb} in {name}{f', with {counted} made' if made else ''}")
    return "; ".join(parts)
