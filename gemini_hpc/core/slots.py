"""The two slots that a holder has per shard, and when one of them may be overwritten (docs/protocol.md, R1).

A pair always keeps the newest sealed version that it has held until a newer one is sealed: one slot is the last
complete version, the other is being filled. What the pair knows of sealing comes from outside (see `votes`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gemini_hpc.core.moments import UNCOUNTED, Moment
from gemini_hpc.core.numbers import Epoch, Version

SlotState = Literal["empty", "filling", "complete"]


class Stamp(NamedTuple):
    """What names a stored version; the order is lexicographic, so a later epoch outranks every version before."""

    epoch: Epoch
    version: Version

    def __str__(self) -> str:
        return f"{self.epoch}.{self.version}"


class Refused(Exception):
    """A slot cannot be given out now. `reason` is a sentence for the trainer's log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class Slot:
    """One buffer of a pair. `stamp` is None exactly when it is empty; `digest`, `bytes_used` and `moment` only count
    when it is complete. `busy`: somebody writes or reads its bytes on the agent's side (a pull, a digest), so that it
    is given to no writer until that has ended. `moment`: of the shard's rank at this version (`core.moments`)."""

    state: SlotState = "empty"
    stamp: Stamp | None = None
    digest: str | None = None
    bytes_used: int = 0
    busy: bool = False
    moment: Moment = UNCOUNTED


@dataclass(slots=True)
class SlotPair:
    """Both slots of one shard on one holder.

    `high` is the newest stamp ever begun since the last recovery, `passed` the newest one that its writer has told
    that it skips. A pair never goes back below the one, nor to the other: that is what makes "this pair will never
    have s" a lasting fact, on which abandoning stands.
    """

    slots: list[Slot] = field(default_factory=lambda: [Slot(), Slot()])
    high: Stamp | None = None
    passed: Stamp | None = None

    def begin(
        self, stamp: Stamp, sealed: Stamp | None, abandoned: frozenset[Stamp], *, voted: frozenset[Stamp]
    ) -> int:
        """Index of the slot to fill with `stamp`, marked as filling. Raises Refused, and then changed nothing.

        `sealed` and `abandoned` are the root's last word as this agent knows it (an older word only refuses
        more), `voted` the stamps that this agent has reported as complete. An agent that has lost its memory of
        that (crash and hand-back) passes every complete stamp. In this order:

        1. A filling slot whose own writer has gone on to a newer version (same epoch). A slot that is being
           restored from a peer bears an older epoch: it is left alone until it is abandoned or a later stamp sealed.
        2. An empty slot.
        3. The older of two complete slots, if the newer one or a later stamp is sealed (R1).
        4. The newer one, if the root has abandoned it, or if it was never voted for and the older is sealed.
        """
        if (present := self.find(stamp)) is not None:
            raise Refused(f"version {stamp} is already {self.slots[present].state} here")
        if self.high is not None and stamp < self.high:
            raise Refused(f"version {stamp} is older than {self.high}, which was already begun")
        if self.passed is not None and stamp <= self.passed:
            raise Refused(f"version {stamp} is not newer than {self.passed}, which was skipped")
        index = self._room(stamp, sealed, abandoned, voted)
        self.slots[index] = Slot("filling", stamp)
        self.high = stamp
        return index

    def pass_over(self, stamp: Stamp) -> None:
        """The writer skips this version: nothing up to it will be begun any more."""
        if self.find(stamp) is None and (self.passed is None or stamp > self.passed):
            self.passed = stamp

    @property
    def floor(self) -> Stamp | None:
        """Of the stamps that are not in its slots, the pair can still have those above this one."""
        return max((s for s in (self.high, self.passed) if s is not None), default=None)

    @property
    def kept(self) -> frozenset[Stamp]:
        """Those up to `floor` that it has, is filling, or can begin once more."""
        again = {self.high} if self.high is not None and (self.passed is None or self.high > self.passed) else set()
        return frozenset(again | {slot.stamp for slot in self.slots if slot.stamp is not None})

    def _room(self, stamp: Stamp, sealed: Stamp | None, abandoned: frozenset[Stamp], voted: frozenset[Stamp]) -> int:
        for index, slot in enumerate(self.slots):
            if slot.state == "filling" and not slot.busy:
                filling = _stamp(slot)
                overtaken = filling in abandoned or (sealed is not None and filling < sealed)
                if filling.epoch == stamp.epoch or overtaken:
                    return index
        for index, slot in enumerate(self.slots):
            if slot.state == "empty":
                return index
        for slot in self.slots:
            if slot.state == "filling":
                raise Refused(
                    f"version {slot.stamp} is still being {'verified or ' if slot.busy else ''}restored here"
                )
        older, newer = (0, 1) if _stamp(self.slots[0]) < _stamp(self.slots[1]) else (1, 0)
        if _is_sealed(self.slots[newer], sealed):
            return older
        undecided = _stamp(self.slots[newer])
        if undecided in abandoned:
            return newer
        if not _is_sealed(self.slots[older], sealed):
            raise Refused(f"neither {_stamp(self.slots[older])} nor {undecided} is sealed")
        if undecided in voted:
            raise Refused(f"version {undecided} is complete and reported, but not yet sealed or abandoned")
        return newer

    def complete(self, index: int, stamp: Stamp, digest: str, bytes_used: int, moment: Moment = UNCOUNTED) -> None:
        """The slot's bytes have been verified. Raises ValueError if it no longer is being filled with `stamp`
        (a late arrival: the slot has gone to a newer version, or was voided)."""
        slot = self.slots[index]
        if slot.state != "filling" or slot.stamp != stamp:
            raise ValueError(f"slot {index} is {slot.state} {slot.stamp or ''}: it cannot complete {stamp}")
        self.slots[index] = Slot("complete", stamp, digest, bytes_used, moment=moment)

    def restore(self, index: int, stamp: Stamp, digest: str, bytes_used: int, moment: Moment = UNCOUNTED) -> None:
        """A verified copy comes back into an empty slot (handed back after its agent's death). Raises ValueError."""
        if self.slots[index].state != "empty" or self.find(stamp) is not None:
            raise ValueError(f"slot {index} is {self.slots[index].state}: it cannot take {stamp} back")
        self.slots[index] = Slot("complete", stamp, digest, bytes_used, moment=moment)
        self.high = stamp if self.high is None else max(self.high, stamp)

    def void(self, index: int) -> None:
        """Give up on what one slot holds. A transfer that will be tried again does not void: it refills."""
        self.slots[index] = Slot()

    def void_filling(self) -> None:
        """Give up on everything incomplete, as when its writer has died."""
        for index, slot in enumerate(self.slots):
            if slot.state == "filling":
                self.void(index)

    def void_except(self, *keep: Stamp) -> tuple[Stamp, ...]:
        """R4, at recovery: keep only complete copies of these stamps (`recovery_plan.SetPlan.keep`). Returns what was
        voided, in slot order. The pair then belongs to the new epoch: it may go back to a kept stamp."""
        voided = []
        for index, slot in enumerate(self.slots):
            if slot.stamp is not None and (slot.state != "complete" or slot.stamp not in keep):
                voided.append(slot.stamp)
                self.void(index)
        self.high, self.passed = self.newest(), None
        return tuple(voided)

    def complete_stamps(self) -> frozenset[Stamp]:
        return frozenset(slot.stamp for slot in self.slots if slot.state == "complete" and slot.stamp is not None)

    def newest(self) -> Stamp | None:
        """The newest stamp in the pair, complete or being filled."""
        return max((slot.stamp for slot in self.slots if slot.stamp is not None), default=None)

    def find(self, stamp: Stamp) -> int | None:
        """Index of the slot that holds `stamp`, complete or being filled."""
        for index, slot in enumerate(self.slots):
            if slot.stamp == stamp:
                return index
        return None


def _stamp(slot: Slot) -> Stamp:
    assert slot.stamp is not None
    return slot.stamp


def _is_sealed(slot: Slot, sealed: Stamp | None) -> bool:
    return sealed is not None and _stamp(slot) <= sealed
