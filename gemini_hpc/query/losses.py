"""The node losses that a training would not survive, from the slots that agents hold: copies and parity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from gemini_hpc.core import survival
from gemini_hpc.core.parity import Stripe
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.inspect_schema import HeldSlot

Slots = Sequence[tuple[str, HeldSlot]]  # each slot with its host
_NOBODY: frozenset[str] = frozenset()
_COUNTED = survival.MAX_K - 1  # the shard's home is lost in addition


class Losses:
    """The node losses that one training would not survive.

    `by_rank` holds the slots with copies of each rank's shard. `parity` holds the slots with parity.
    """

    def __init__(self, by_rank: Mapping[int, Slots], parity: Slots) -> None:
        self._by_rank, self._parity = by_rank, parity

    def choose_counted_version(self) -> Stamp | None:
        """Return the version whose copies are counted.

        The version is the one that every shard has on the most nodes. A shard that parity can restore counts
        as one more node. The newest of equals is returned. The agents' reports were not made at one instant.
        One holder may already have recycled the sealed version's slot, while another does not have the next
        version yet.
        """
        slots = [slot for copies in self._by_rank.values() for _, slot in copies]
        stamps = {slot.stamp for slot in slots if slot.stamp and slot.state == "complete"}

        def weigh_stamp(stamp: Stamp) -> tuple[int, int, Stamp]:
            again = self._find_parity_losses(stamp)
            counts = [len(_find_holders(copies, stamp)) + (rank in again) for rank, copies in self._by_rank.items()]
            return (min(counts), sum(counts), stamp)

        return max(stamps, key=weigh_stamp, default=None)

    def list_fatal_losses(
        self, stamp: Stamp | None, live: Mapping[int, Iterable[str]] | None = None
    ) -> list[frozenset[str]]:
        """Return node losses each of which, like every larger loss, loses some shard.

        `live` holds, by rank, the nodes that have the rank's shard in their tensors as well.
        """
        again, found = self._find_parity_losses(stamp), list[frozenset[str]]()
        for rank, copies in self._by_rank.items():
            hosts = _find_holders(copies, stamp)
            if hosts and live is not None:
                hosts |= set(live.get(rank, ()))
            found += [hosts | others for others in again.get(rank, (_NOBODY,))]
        return found

    def _find_parity_losses(self, stamp: Stamp | None) -> dict[int, list[frozenset[str]]]:
        """Return, by rank, the losses of other nodes after which a restorable shard can no longer be restored."""
        beside: dict[int, tuple[str, frozenset[int], int]] = {}
        for host, slot in self._parity:
            if slot.state == "complete" and slot.stamp == stamp and slot.members:
                beside[slot.rank] = host, frozenset(rank for rank, _ in slot.members), slot.blocks
        copies = {rank: min(hosts) for rank, slots in self._by_rank.items() if (hosts := _find_holders(slots, stamp))}
        found = {}
        for rank in self._by_rank:
            covering = {other: members for other, members in beside.items() if rank in members[1]}
            stripes = {
                Stripe(tuple(sorted(members | {other})), blocks) for other, (_, members, blocks) in covering.items()
            }
            if len(stripes) == 1:
                [stripe] = stripes
                parities = {other: host for other, (host, _, _) in covering.items()}
                if losses := _list_stripe_losses(stripe, rank, copies, parities):
                    found[rank] = losses
        return found


def _list_stripe_losses(
    stripe: Stripe, rank: int, copies: Mapping[int, str], parities: Mapping[int, str]
) -> list[frozenset[str]]:
    """Return the losses of nodes after which a lost shard cannot be restored from its stripe.

    Only losses of at most two nodes, or else of all nodes, are listed. The list is empty if the shard cannot
    be restored even now. `copies` and `parities` give each rank's node.
    """

    def can_restore(lost: Iterable[str]) -> bool:
        whole = {other for other in stripe.ranks if copies.get(other, "") not in ("", *lost)}
        beside = {other for other, host in parities.items() if host not in lost}
        return stripe.can_decode(rank, whole, beside)

    others = [other for other in stripe.ranks if other != rank]
    nodes = sorted({host for other in others for host in (copies.get(other), parities.get(other)) if host})
    if not can_restore(()):
        return []
    if len(nodes) == len(others) and all(copies.get(other) == parities.get(other) for other in others):
        # the stripe is complete: any loss of that many is fatal
        sizes: tuple[int, ...] = (stripe.blocks,) if stripe.blocks <= _COUNTED else ()
    else:
        sizes = tuple(range(1, _COUNTED + 1))
    found: list[frozenset[str]] = []
    for size in sizes:
        for lost in map(frozenset, combinations(nodes, size)):
            if not any(known <= lost for known in found) and (len(sizes) == 1 or not can_restore(lost)):
                found.append(lost)
    return found or [frozenset(nodes)]


def _find_holders(copies: Slots, stamp: Stamp | None) -> frozenset[str]:
    return frozenset(host for host, slot in copies if slot.state == "complete" and slot.stamp == stamp)
