"""Versions that a training has loaded and found bad (`Checkpointer.reject`). No agent offers them again.

A rejection covers the loaded version and all versions derived from it. The agent of a rejecting rank writes the
rejection to disk before it answers. Inventories carry the rejection to the root, and the plan carries it to every
agent. The rejection therefore holds in later rounds and incarnations, as long as one agent lives. On the tier the
version is marked (`tier.worker`).

The root ignores copies and seals in the rejected range and reads the tier.
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

MOST = 3  # rejections of one training in a job's life: with more, the fault is probably elsewhere
_KEPT = 256  # rejections of all trainings; the oldest beyond that are forgotten
_NEWEST = (1 << VERSION_BITS) - 1


class Rejections:
    """The rejections that one agent knows of, on disk (`pledges`) as long as the agent lives."""

    def __init__(self, pledges: Pledges, log: Log) -> None:
        self._pledges, self._log = pledges, log

    @property
    def all(self) -> tuple[Rejection, ...]:
        """Return all rejections that this agent knows of."""
        return self._pledges.now.rejections

    def list_rejections(self, name: str) -> list[Rejection]:
        """Return the rejections of a training, sorted by version."""
        return sorted(found for found in self.all if found.training == name)

    def may_start_over(self, name: str) -> bool:
        """Return whether the training may begin anew if no version is left."""
        return any(found.fresh for found in self.list_rejections(name))

    def list_sentences(self, name: str) -> tuple[str, ...]:
        """Return a sentence for the user about each rejection of a training."""
        return tuple(found.sentence for found in self.list_rejections(name))

    def reject(self, training: Training, epoch: int, reason: str, *, fresh: bool) -> str:
        """Reject the loaded version and its descendants. Return the reason for a refusal, or "".

        Beyond `MOST` rejections of a training, only beginning anew is possible.

        Args:
            training: The training whose loaded version is bad.
            epoch: Versions of epochs up to this one are rejected.
            reason: The user's reason.
            fresh: The training may begin anew.
        """
        name, chosen = training.name, training.chosen
        assert chosen is not None
        before = self.list_rejections(name)
        high = Stamp(epoch, _NEWEST)
        if not any(found.high == high for found in before):  # else another rank of this node has already rejected it
            if len(before) >= MOST and not fresh:
                reasons = "; ".join(one.sentence for one in before)
                return f"{len(before)} earlier versions were rejected too, so the fault may lie elsewhere: {reasons}"
            low = chosen if len(before) < MOST else Stamp(0, 0)
            self.learn((Rejection(name, low, high, reason, fresh),))
            self._log("rejected", version=chosen.version, detail=f"{name}: {reason}")
        return ""

    def learn(self, found: Iterable[Rejection]) -> tuple[Rejection, ...]:
        """Record more rejections on disk. Return all that are known now."""
        known = {(r.training, r.low, r.high): r for r in self.all}
        for rejection in found:
            known.setdefault((rejection.training, rejection.low, rejection.high), rejection)
        for wide in [r for r in known.values() if r.low == (0, 0)]:  # covers all older rejections
            for key in [k for k, r in known.items() if r.training == wide.training and r.high < wide.high]:
                del known[key]
        pledges = self._pledges
        if not pledges.put(msgspec.structs.replace(pledges.now, rejections=tuple(known.values())[-_KEPT:])):
            self._log(
                "unwritten",
                detail="cannot write the list of rejected versions to disk: this node forgets it if its agent dies",
            )
        return self.all

    def is_rejected(self, name: str, stamp: Stamp) -> bool:
        """Return whether this version is rejected."""
        return any(found.covers(name, stamp) for found in self.all)
