"""Which losses of nodes a training would not survive, from the slots that agents hold: copies, and parity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.inspect_schema import HeldSlot

Slots = Sequence[tuple[str, HeldSlot]]  # each with its host
_NOBODY: frozenset[str] = frozenset()


class Losses:
    """Of one set. by_rank: slots with copies of each rank's shard; parity: slots with parity."""

    def __init__(self, by_rank: Mapping[int, Slots], parity: Slots) -> None:
        self._by_rank, self._parity = by_rank, parity

    def counted(self) -> Stamp | None:
        """The version whose copies are counted: the one that every shard has on the most nodes, what it can be made
        of counting as one more, the newest of equals.

        The parts were not taken at one instant: one holder may have recycled the sealed version's slot already, while
        another does not have the next one yet.
        """
        slots = [slot for copies in self._by_rank.values() for _, slot in copies]
        stamps = {slot.stamp for slot in slots if slot.stamp and slot.state == "complete"}

        def score(stamp: Stamp) -> tuple[int, int, Stamp]:
            again = self._again(stamp)
            counts = [len(_hosts(copies, stamp)) + (rank in again) for rank, copies in self._by_rank.items()]
            return (min(counts), sum(counts), stamp)

        return max(stamps, key=score, default=None)

    def fatal(self, stamp: Stamp | None, live: Mapping[int, Iterable[str]] | None = None) -> list[frozenset[str]]:
        """Losses each of which, and every larger one, takes some shard. live: by rank, nodes that have its shard in
        their tensors as well."""
        again, found = self._again(stamp), list[frozenset[str]]()
        for rank, copies in self._by_rank.items():
            hosts = _hosts(copies, stamp)
            if hosts and live is not None:
                hosts |= set(live.get(rank, ()))
            needed = again.get(rank, _NOBODY)
            found += [hosts | {host} for host in needed] if needed else [hosts]
        return found

    def _again(self, stamp: Stamp | None) -> dict[int, frozenset[str]]:
        """By rank, where its shard can be made again: the nodes that are all needed for that."""
        beside: dict[int, tuple[str, frozenset[int]]] = {}
        for host, slot in self._parity:
            if slot.state == "complete" and slot.stamp == stamp and slot.of:
                beside[slot.rank] = host, frozenset(rank for rank, _ in slot.of)
        found: dict[int, frozenset[str]] = {}
        for rank in self._by_rank:
            holders = {other: host for other, (host, of) in beside.items() if rank in of}
            stripes = {of | {other} for other, (_, of) in beside.items() if rank in of}
            if len(stripes) != 1 or next(iter(stripes)) != {rank, *holders}:
                continue
            nodes = set(holders.values())
            for other in holders:
                nodes |= set(sorted(_hosts(self._by_rank.get(other, ()), stamp))[:1] or {""})
            if "" not in nodes:
                found[rank] = frozenset(nodes)
        return found


def _hosts(copies: Slots, stamp: Stamp | None) -> frozenset[str]:
    return frozenset(host for host, slot in copies if slot.state == "complete" and slot.stamp == stamp)
