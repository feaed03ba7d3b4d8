"""The two slots that a holder has per shard, and the rule for overwriting one (docs/dev/protocol.md, R1).

A pair always keeps the newest sealed version that it has held until a newer version is sealed. One slot is the last
complete version, the other slot is being filled. The seals are learnt from outside (see `votes`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gemini_hpc.core.moments import UNCOUNTED, Moment
from gemini_hpc.core.numbers import Epoch, Version

SlotState = Literal["empty", "filling", "complete"]


class Stamp(NamedTuple):
    """The identity of a stored version.

    The order is lexicographic, so a later epoch outranks every earlier version.
    """

    epoch: Epoch
    version: Version

    def __str__(self) -> str:
        return f"{self.epoch}.{self.version}"


class Refused(Exception):
    """Raised if a slot cannot be given out now. `reason` is a sentence for the trainer's log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class Slot:
    """A buffer of a pair.

    Attributes:
        state: Whether the slot is empty, being filled, or complete.
        stamp: Version in the slot; None exactly if the slot is empty.
        digest: Digest of the used bytes. Valid only if the slot is complete.
        bytes_used: Number of leading bytes that count. Valid only if the slot is complete.
        busy: True while the agent writes or reads the bytes (a pull, a digest). The slot is given to no writer
            meanwhile.
        moment: Moment of the shard's rank at this version (`core.moments`). Valid only if the slot is complete.
    """

    state: SlotState = "empty"
    stamp: Stamp | None = None
    digest: str | None = None
    bytes_used: int = 0
    busy: bool = False
    moment: Moment = UNCOUNTED


@dataclass(slots=True)
class SlotPair:
    """Both slots of one shard on one holder.

    `high` is the newest stamp begun since the last recovery. `passed` is the newest stamp that the writer reported
    as skipped. A pair never begins a version below `high`, nor a version up to `passed`. Hence "this pair will never
    hold s" is permanent, which makes abandoning s safe.
    """

    slots: list[Slot] = field(default_factory=lambda: [Slot(), Slot()])
    high: Stamp | None = None
    passed: Stamp | None = None

    def begin_version(
        self, stamp: Stamp, sealed: Stamp | None, abandoned: frozenset[Stamp], *, voted: frozenset[Stamp]
    ) -> int:
        """Reserve a slot for `stamp`, mark it as filling, and return its index.

        `sealed` and `abandoned` are the root's latest decision that this agent knows. An older decision only refuses
        more. `voted` are the stamps that this agent has reported as complete. An agent that lost this memory (crash
        and hand-back) passes every complete stamp. The slot is chosen in this order:

        1. A filling slot whose own writer now writes a newer version (same epoch). A slot that is being restored
           from a peer has an older epoch. Such a slot is untouched until its stamp is abandoned or a later stamp is
           sealed.
        2. An empty slot.
        3. The older of two complete slots, if the newer stamp or a later one is sealed (R1).
        4. The newer one, if the root has abandoned it, or if it was never voted for and the older is sealed.

        Raises:
            Refused: No slot can be given out; nothing is changed then.
        """
        if (present := self.find_slot(stamp)) is not None:
            raise Refused(f"version {stamp} is already {self.slots[present].state} here")
        if self.high is not None and stamp < self.high:
            raise Refused(f"version {stamp} is older than {self.high}, which was already begun")
        if self.passed is not None and stamp <= self.passed:
            raise Refused(f"version {stamp} is not newer than {self.passed}, which was skipped")
        index = self._choose_slot(stamp, sealed, abandoned, voted)
        self.slots[index] = Slot("filling", stamp)
        self.high = stamp
        return index

    def pass_over(self, stamp: Stamp) -> None:
        """Record that the writer skips this version. No version up to this stamp can be begun afterwards."""
        if self.find_slot(stamp) is None and (self.passed is None or stamp > self.passed):
            self.passed = stamp

    @property
    def floor(self) -> Stamp | None:
        """Return the stamp above which the pair can still hold stamps that are not in its slots."""
        return max((s for s in (self.high, self.passed) if s is not None), default=None)

    @property
    def kept(self) -> frozenset[Stamp]:
        """Return the stamps up to `floor` that the pair holds, is filling, or can begin once more."""
        again = {self.high} if self.high is not None and (self.passed is None or self.high > self.passed) else set()
        return frozenset(again | {slot.stamp for slot in self.slots if slot.stamp is not None})

    def _choose_slot(
        self, stamp: Stamp, sealed: Stamp | None, abandoned: frozenset[Stamp], voted: frozenset[Stamp]
    ) -> int:
        for index, slot in enumerate(self.slots):
            if slot.state == "filling" and not slot.busy:
                filling = _require_stamp(slot)
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
        older, newer = (0, 1) if _require_stamp(self.slots[0]) < _require_stamp(self.slots[1]) else (1, 0)
        if _is_sealed(self.slots[newer], sealed):
            return older
        undecided = _require_stamp(self.slots[newer])
        if undecided in abandoned:
            return newer
        if not _is_sealed(self.slots[older], sealed):
            raise Refused(f"neither {_require_stamp(self.slots[older])} nor {undecided} is sealed")
        if undecided in voted:
            raise Refused(f"version {undecided} is complete and reported, but not yet sealed or abandoned")
        return newer

    def complete_slot(
        self, index: int, stamp: Stamp, digest: str, bytes_used: int, moment: Moment = UNCOUNTED
    ) -> None:
        """Mark the slot as complete, because its bytes have been verified.

        Raises:
            ValueError: The slot is no longer being filled with `stamp`. The report is late: the slot was given to a
                newer version or voided.
        """
        slot = self.slots[index]
        if slot.state != "filling" or slot.stamp != stamp:
            raise ValueError(f"slot {index} is {slot.state} {slot.stamp or ''}: it cannot complete {stamp}")
        self.slots[index] = Slot("complete", stamp, digest, bytes_used, moment=moment)

    def restore_slot(
        self, index: int, stamp: Stamp, digest: str, bytes_used: int, moment: Moment = UNCOUNTED
    ) -> None:
        """Put a verified copy into an empty slot (handed back after its agent's death).

        Raises:
            ValueError: The slot is not empty, or another slot holds this stamp.
        """
        if self.slots[index].state != "empty" or self.find_slot(stamp) is not None:
            raise ValueError(f"slot {index} is {self.slots[index].state}: it cannot take {stamp} back")
        self.slots[index] = Slot("complete", stamp, digest, bytes_used, moment=moment)
        self.high = stamp if self.high is None else max(self.high, stamp)

    def empty_slot(self, index: int) -> None:
        """Empty one slot. A transfer that will be tried again does not void its slot: it refills it."""
        self.slots[index] = Slot()

    def empty_filling(self) -> None:
        """Empty every slot that is being filled, for example because its writer has died."""
        for index, slot in enumerate(self.slots):
            if slot.state == "filling":
                self.empty_slot(index)

    def empty_except(self, *keep: Stamp) -> tuple[Stamp, ...]:
        """Empty all slots but complete copies of these stamps (R4). Return the voided stamps in slot order.

        The stamps to keep are those of `recovery_plan.TrainingPlan.keep`. The pair belongs to the new epoch
        afterwards, so it may go back to a kept stamp.
        """
        voided = []
        for index, slot in enumerate(self.slots):
            if slot.stamp is not None and (slot.state != "complete" or slot.stamp not in keep):
                voided.append(slot.stamp)
                self.empty_slot(index)
        self.high, self.passed = self.find_newest(), None
        return tuple(voided)

    def list_complete_stamps(self) -> frozenset[Stamp]:
        """Return the stamps of the complete slots."""
        return frozenset(slot.stamp for slot in self.slots if slot.state == "complete" and slot.stamp is not None)

    def find_newest(self) -> Stamp | None:
        """Return the newest stamp in the pair, complete or being filled."""
        return max((slot.stamp for slot in self.slots if slot.stamp is not None), default=None)

    def find_slot(self, stamp: Stamp) -> int | None:
        """Return the index of the slot that holds `stamp`, complete or being filled."""
        for index, slot in enumerate(self.slots):
            if slot.stamp == stamp:
                return index
        return None


def _require_stamp(slot: Slot) -> Stamp:
    assert slot.stamp is not None
    return slot.stamp


def _is_sealed(slot: Slot, sealed: Stamp | None) -> bool:
    return sealed is not None and _require_stamp(slot) <= sealed
