"""Versions that a training has loaded and found bad (`Checkpointer.reject`): no agent offers them again.

What is rejected is the version that was loaded, and all that came of it. Each agent whose rank says so has it on disk
before it answers; inventories carry it to the root, and the plan to everybody. So it holds in later rounds and
incarnations, for as long as one agent lives; on the tier it is marked (`tier.worker`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gemini_hpc.agent.peers.event_log import Log
from gemini_hpc.agent.replicas.pledges import Pledges
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.core.numbers import VERSION_BITS
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.stored import Rejection

MOST = 3  # of one set, in the life of a job: then the fault is elsewhere
_KEPT = 256  # of all sets; beyond that the oldest are forgotten
_NEWEST = (1 << VERSION_BITS) - 1


class Rejections:
    """One agent's knowledge of them; it lives as long as the agent, and is on disk (`pledges`)."""

    def __init__(self, pledges: Pledges, log: Log) -> None:
        self._pledges, self._log = pledges, log

    @property
    def all(self) -> tuple[Rejection, ...]:
        """All that this agent knows of."""
        return self._pledges.now.rejections

    def of_set(self, name: str) -> list[Rejection]:
        """Those of a set, in the order of their versions."""
        return sorted(found for found in self.all if found.set == name)

    def fresh(self, name: str) -> bool:
        """Whether the training may begin anew where nothing else is left."""
        return any(found.fresh for found in self.of_set(name))

    def sentences(self, name: str) -> tuple[str, ...]:
        """For the user."""
        return tuple(found.sentence for found in self.of_set(name))

    def reject(self, training: Training, epoch: int, reason: str, *, fresh: bool) -> str:
        """What was loaded is bad, and so is what came of it, in epochs up to this one; why it is not rejected, or "".
        fresh: the training may begin anew. Beyond `MOST` that is all that can be had."""
        name, chosen = training.name, training.chosen
        assert chosen is not None
        before = self.of_set(name)
        high = Stamp(epoch, _NEWEST)
        if not any(found.high == high for found in before):  # else another rank of this node has said so
            if len(before) >= MOST and not fresh:
                said = "; ".join(one.sentence for one in before)
                return f"{len(before)} earlier versions were rejected too, so the fault may lie elsewhere: {said}"
            low = chosen if len(before) < MOST else Stamp(0, 0)
            self.learn((Rejection(name, low, high, reason, fresh),))
            self._log("rejected", version=chosen.version, detail=f"{name}: {reason}")
        return ""

    def learn(self, found: Iterable[Rejection]) -> tuple[Rejection, ...]:
        """Know of these, too, on disk; all that are known now."""
        known = {(r.set, r.low, r.high): r for r in self.all}
        for rejection in found:
            known.setdefault((rejection.set, rejection.low, rejection.high), rejection)
        for wide in [r for r in known.values() if r.low == (0, 0)]:  # one that says it all
            for key in [k for k, r in known.items() if r.set == wide.set and r.high < wide.high]:
                del known[key]
        pledges = self._pledges
        if not pledges.put(msgspec.structs.replace(pledges.now, rejections=tuple(known.values())[-_KEPT:])):
            self._log("unwritten", detail="cannot write the list of rejected versions to this node's disk")
        return self.all

    def covers(self, name: str, stamp: Stamp) -> bool:
        """Whether this version is rejected."""
        return any(found.covers(name, stamp) for found in self.all)
