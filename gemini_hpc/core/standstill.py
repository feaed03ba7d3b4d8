"""Whether a training that makes no progress hangs, and which rank holds it up: pure rules over what its ranks show.

A training *hangs* when no rank of it has completed a step or launched a collective for longer than its patience, and
some rank waits for another: they are not at the same place, or they are in a collective that does not end. Ranks that
are all at the same place, in no collective, evaluate, load data or compile: for how long is their own business. The
rank that is behind all others is the one that they wait for (just-in-time checkpointing, section 3.1).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gemini_hpc.core.numbers import Count, Version

Span = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # seconds
Host = Annotated[str, msgspec.Meta(max_length=255)]
Name = Annotated[str, msgspec.Meta(max_length=32)]
Calls = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]

USUAL, PAUSES = 10.0, 2.0  # iterations, and the longest wait for a rank so far that ended by itself
EARLY = 4.0  # patience before ranks have a usual iteration: one of them may compile, or prepare its data
MOST_DOUBLED = 2  # after so many hangs of a job its patience grows no more


class Place(msgspec.Struct, frozen=True):
    """Where a rank is. version: completed `step()` calls; launched: collectives since then, of `usual` in an
    iteration; collective: the newest one's name; runs: whether its process gives signs of life."""

    version: Version
    launched: Calls
    usual: Calls
    rank: Count
    host: Host
    collective: Name = ""
    runs: bool = True

    @property
    def reached(self) -> tuple[int, float]:
        """How far it is; ranks of several groups (stages of a pipeline, say) launch different numbers. In the first
        iteration nobody knows how many there are."""
        return self.version, self.launched / max(self.launched, self.usual or self.launched + 1)


class Standing(msgspec.Struct, frozen=True):
    """Of some ranks of one training of `world`. silent_s: since any of them has come on; unseen_s: since any of them
    has given a sign of life, awake_s: for how long there were such signs all the time, so that a suspended job loses
    no patience; usual_s: their usual iteration; least, most: the one that is behind, and the one that is ahead;
    waiting: a collective is on the network; early: they have not completed two steps of this launch yet."""

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

    def join(self, other: Standing) -> Standing:
        """Of both."""
        return Standing(
            max(self.world, other.world),
            self.ranks + other.ranks,
            min(self.silent_s, other.silent_s),
            min(self.unseen_s, other.unseen_s),
            max(self.awake_s, other.awake_s),
            max(self.usual_s, other.usual_s),
            min(self.least, other.least, key=_behind),
            max(self.most, other.most, key=_behind),
            self.waiting or other.waiting,
            self.early or other.early,
        )

    @property
    def held_s(self) -> float:
        """For how long some rank has kept the others waiting; 0.0: none does, or ranks are missing."""
        waits = self.waiting or self.least.reached != self.most.reached
        held_s = min(self.silent_s - self.unseen_s, self.awake_s)
        return max(0.0, held_s) if waits and self.ranks == self.world else 0.0


def _behind(place: Place) -> tuple[tuple[int, float], bool, int, str]:
    """Of equals one that does not run, then the lowest rank."""
    return place.reached, place.runs, place.rank, place.host


class Judge:
    """Of one training, where all that is known of its ranks comes together. hang_s: the least patience."""

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._held_s = self._longest_s = 0.0
        self._hangs = 0
        self._hung = self._early = False

    def patience_s(self, usual_s: float, *, early: bool = False) -> float:
        """For so long a rank may keep the others waiting."""
        doubled = 2.0 ** min(self._hangs - self._hung, MOST_DOUBLED)
        least_s = self._hang_s * EARLY if early else self._hang_s
        return doubled * max(least_s, USUAL * usual_s, PAUSES * self._longest_s)

    def begin(self) -> None:
        """A new launch of the training: of the one before only its hangs count."""
        self._held_s = self._longest_s = 0.0
        self._hung = self._early = False

    def look(self, standing: Standing | None) -> bool:
        """Whether the training hangs, as of now; None: somebody does not say how its ranks stand."""
        held_s = standing.held_s if standing is not None else 0.0
        if held_s < self._held_s:
            if not self._early:  # it says nothing of what comes later
                self._longest_s = max(self._longest_s, self._held_s)
            self._hung = False
        self._held_s, self._early = held_s, standing is not None and standing.early
        if standing is None or held_s <= self.patience_s(standing.usual_s, early=standing.early):
            return False
        self._hangs += not self._hung
        self._hung = True
        return True


def told(standing: Standing) -> str:
    """What is known of a hang, in a sentence."""
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


def shortened(stack: str, most_chars: int) -> str:
    """A traceback of faulthandler in one line, innermost call first, as many of them as have room."""
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
