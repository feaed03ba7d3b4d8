"""Pure rules that detect a hanging training and the rank that holds it up, from the progress of its ranks.

A training *hangs* under two conditions. No rank has completed a step or launched a collective for longer than the
patience, and some rank waits for another rank. Waiting means that ranks are not at the same place, or are in a
collective that does not end. Ranks that are all at the same place and in no collective evaluate, load data or
compile, for any length of time. The ranks wait for the rank behind all others (just-in-time checkpointing, section
3.1).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gemini_hpc.core.numbers import Count, Version

Span = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # seconds
Host = Annotated[str, msgspec.Meta(max_length=255)]
Name = Annotated[str, msgspec.Meta(max_length=32)]
Calls = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]

USUAL, PAUSES = 10.0, 2.0  # patience as multiples of the usual iteration and of the longest wait that ended by itself
EARLY = 4.0  # patience factor before ranks have a usual iteration: one may compile or prepare its data
MOST_DOUBLED = 2  # hangs of a job after which its patience grows no more


class Place(msgspec.Struct, frozen=True):
    """The position of a rank in the training.

    Attributes:
        version: Completed `step()` calls.
        launched: Collectives launched since then.
        usual: Usual number of collectives in an iteration.
        rank: Rank of the process.
        host: Host of the rank.
        collective: Name of the newest collective.
        runs: True if the process shows signs of life.
    """

    version: Version
    launched: Calls
    usual: Calls
    rank: Count
    host: Host
    collective: Name = ""
    runs: bool = True

    @property
    def reached(self) -> tuple[int, float]:
        """Return the progress of the rank, comparable across ranks.

        Ranks of several groups (stages of a pipeline, for example) launch different numbers of collectives. In the
        first iteration their number is not yet known.
        """
        return self.version, self.launched / max(self.launched, self.usual or self.launched + 1)


class HangStanding(msgspec.Struct, frozen=True):
    """The standing of some ranks of one training of `world` ranks.

    Attributes:
        world: Number of ranks of the training.
        ranks: Number of ranks included.
        silent_s: Seconds since any of them has made progress.
        unseen_s: Seconds since any of them has shown a sign of life.
        awake_s: Seconds for which such signs came continuously, so that a suspended job loses no patience.
        usual_s: Usual iteration of the ranks in seconds.
        least: Place of the rank behind all others.
        most: Place of the rank ahead of all others.
        waiting: True if a collective is on the network.
        early: True if the ranks have not completed two steps of this launch yet.
    """

    world: Count
    ranks: Count
    silent_s: Span
    unseen_s: Span
    awake_s: Span
    usual_s: Span
    least: Place
    most: Place
    waiting: bool
    early: bool = False

    def join(self, other: HangStanding) -> HangStanding:
        """Return the standing of both sets of ranks together."""
        return HangStanding(
            max(self.world, other.world),
            self.ranks + other.ranks,
            min(self.silent_s, other.silent_s),
            min(self.unseen_s, other.unseen_s),
            max(self.awake_s, other.awake_s),
            max(self.usual_s, other.usual_s),
            min(self.least, other.least, key=_measure_progress),
            max(self.most, other.most, key=_measure_progress),
            self.waiting or other.waiting,
            self.early or other.early,
        )

    @property
    def held_s(self) -> float:
        """Return how long some rank has kept the others waiting, in seconds.

        The result is 0.0 if no rank keeps others waiting, or if ranks are missing.
        """
        waits = self.waiting or self.least.reached != self.most.reached
        held_s = min(self.silent_s - self.unseen_s, self.awake_s)
        return max(0.0, held_s) if waits and self.ranks == self.world else 0.0


def _measure_progress(place: Place) -> tuple[tuple[int, float], bool, int, str]:
    """Return a sort key by progress; among equals a rank that does not run comes first, then the lowest rank."""
    return place.reached, place.runs, place.rank, place.host


class Judge:
    """The detector of hangs of one training, which receives all knowledge about its ranks."""

    def __init__(self, hang_s: float) -> None:
        """Create a detector.

        Args:
            hang_s: Least patience in seconds.
        """
        self._hang_s = hang_s
        self._held_s = self._longest_s = 0.0
        self._hangs = 0
        self._hung = self._early = False

    def compute_patience_s(self, usual_s: float, *, early: bool = False) -> float:
        """Return how long a rank may keep the others waiting, in seconds."""
        doubled = 2.0 ** min(self._hangs - self._hung, MOST_DOUBLED)
        least_s = self._hang_s * EARLY if early else self._hang_s
        return doubled * max(least_s, USUAL * usual_s, PAUSES * self._longest_s)

    def begin_launch(self) -> None:
        """Start a new launch of the training. Only the hangs of the previous launch are kept."""
        self._held_s = self._longest_s = 0.0
        self._hung = self._early = False

    def is_hung(self, standing: HangStanding | None) -> bool:
        """Return whether the training hangs now. `standing` is None if some agent does not report its ranks."""
        held_s = standing.held_s if standing is not None else 0.0
        if held_s < self._held_s:
            if not self._early:  # an early wait predicts nothing for later steps
                self._longest_s = max(self._longest_s, self._held_s)
            self._hung = False
        self._held_s, self._early = held_s, standing is not None and standing.early
        if standing is None or held_s <= self.compute_patience_s(standing.usual_s, early=standing.early):
            return False
        self._hangs += not self._hung
        self._hung = True
        return True


def describe_hang(standing: HangStanding) -> str:
    """Return a sentence that describes a hang."""
    least, most = standing.least, standing.most
    usual = "before the second step" if standing.early else f"usually {standing.usual_s:.3g} s a step"
    head = f"rank {least.rank}: no progress for {standing.held_s:.0f} s, {usual}"
    if least.reached == most.reached:
        which = f"number {most.launched} of step {most.version + 1}"
        stopped = "" if least.runs else f", and rank {least.rank} does not run"
        return f"{head}; all ranks are in {most.collective or 'a collective'}, {which}{stopped}"
    stopped = "" if least.runs else ", and does not run"
    if least.version < most.version:
        return f"{head}; it has not completed step {least.version + 1}, others have{stopped}"
    waits = f", which wait in {most.collective}" if most.collective else ""
    return (
        f"{head}; it has launched {least.launched} collectives of step {least.version + 1}, "
        f"others {most.launched}{waits}{stopped}"
    )


def shorten_stack(stack: str, most_chars: int) -> str:
    """Return a traceback of faulthandler as one line, the innermost call first, with as many calls as fit."""
    calls = []
    for line in stack.splitlines():
        before, _, function = line.strip().rpartition(" in ")
        if before.startswith('File "') and '", line ' in before:
            path, _, number = before[6:].rpartition('", line ')
            calls.append(f"{function} ({path.rpartition('/')[2]}:{number})")
    text = ""
    for call in calls:
        longer = f"{text} < {call}" if text else call
        if len(longer) > most_chars:
            return f"{text} < ..." if text else call[:most_chars]
        text = longer
    return text
