"""Rules for `recovery_plan` that find the shards and the parity to rebuild. Pure.

The home rebuilds a lost shard, and each node the parity that it lacks. The chosen version can then be sealed, and the
next loss survived, before the first new version. A job of another size has other stripes. If their parity cannot be
made, the chosen version counts as sealed, and the next version has parity again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gemini_hpc.core import parity
from gemini_hpc.core.copy import Copy, Member
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.core.slots import Stamp

Held = Mapping[tuple[str, int], Mapping[str, Copy]]  # (digest, used bytes) -> host -> its copy


@dataclass(frozen=True, slots=True)
class RebuiltCopy:
    """A copy or parity that `dest_host` rebuilds.

    `parts` are the copies and parities of its stripe, each with its host. The digest of a parity is "", because the
    node that rebuilds the parity computes it.
    """

    dest_host: str
    copy: Copy
    parts: tuple[tuple[str, Copy], ...]


class Parities:
    """The parities that agents hold.

    The key is the training, the stamp, the number of ranks, and the rank beside whose shard a parity lies.
    """

    def __init__(self, held: Iterable[tuple[str, Copy]]) -> None:
        """Create the index of parities, leaving out any parity whose description is impossible.

        Args:
            held: Parities with their hosts. A host listed earlier takes precedence.
        """
        self._found: dict[tuple[str, Stamp, int], dict[int, dict[str, Copy]]] = {}
        for host, copy in held:
            ranks = {copy.rank, *(member.rank for member in copy.members)}
            apart = len(ranks) == len(copy.members) + 1 and max(ranks) < copy.world
            if apart and copy.blocks < len(ranks) <= parity.MAX_MEMBERS:
                of_training = self._found.setdefault((copy.training, copy.stamp, copy.world), {})
                of_training.setdefault(copy.rank, {})[host] = copy

    def find_rebuildable(
        self, name: str, stamp: Stamp, world: int, ranks: Mapping[int, Held]
    ) -> dict[int, RebuiltCopy]:
        """Return, by rank, shards without a copy that can be rebuilt. The caller sets `dest_host` to the home."""
        parities = self._found.get((name, stamp, world), {})
        wanted: dict[int, Member] = {}
        for by_host in parities.values():
            for copy in by_host.values():
                wanted.update({member.rank: member for member in copy.members if member.rank not in ranks})
        found = {
            rank: self._plan_rebuild(name, stamp, world, member, parities, ranks) for rank, member in wanted.items()
        }
        return {rank: made for rank, made in found.items() if made is not None}

    def find_lacking(
        self,
        shards: Sequence[Copy],
        holders: Mapping[int, Sequence[str]],
        by_rank: Mapping[int, str],
        redundancy: Redundancy,
    ) -> tuple[list[RebuiltCopy], bool]:
        """Return the parities that the nodes lack of a version, and whether they will then have all of it.

        Args:
            shards: Shards of the version, in rank order.
            holders: By rank, the hosts that have the shard.
            by_rank: Host of each node rank.
            redundancy: Redundancy of the job.
        """
        N = redundancy.N
        try:
            found = parity.build_stripes([shard.home % N for shard in shards], redundancy.list_groups())
        except ValueError:
            return [], False
        made, whole = [], True
        for shard, ranks in zip(shards, found, strict=True):
            dest = by_rank[shard.home % N]
            others = _list_others(shard.rank, ranks, shards)
            if dest in self._find_matching(shard, others, redundancy.parity):
                continue
            beside = {
                rank: next(iter(held.items()))
                for rank in ranks
                if (held := self._find_matching(shards[rank], _list_others(rank, ranks, shards), redundancy.parity))
            }
            stripe = parity.Stripe(ranks, redundancy.parity)
            room = max(stripe.compute_block_bytes(member.bytes) for member in others)
            used = {rank: shards[rank].used for rank in ranks}
            available = {rank: (holders[rank][0], shards[rank]) for rank in ranks if rank in holders}
            rooms = {rank: copy.room for rank, (_, copy) in beside.items()}
            try:
                folds = stripe.derive_encoding_without(shard.rank, used, available.keys(), rooms, room)
            except ValueError:
                whole = False
                continue
            copy = Copy(
                shard.training,
                shard.rank,
                shard.world,
                shard.home,
                redundancy.parity * room,
                stripe.compute_parity_bytes(shard.rank, used, room),
                shard.stamp,
                "",
                members=others,
                blocks=redundancy.parity,
                room=room,
            )
            made.append(RebuiltCopy(dest, copy, _list_parts(folds, available, beside)))
        return made, whole

    def _find_matching(self, shard: Copy, members: tuple[Member, ...], blocks: int) -> dict[str, Copy]:
        """Return, by host, the parities beside a shard that are made of these other members."""
        held = self._found.get((shard.training, shard.stamp, shard.world), {}).get(shard.rank, {})
        return {host: copy for host, copy in held.items() if (copy.members, copy.blocks) == (members, blocks)}

    @staticmethod
    def _plan_rebuild(
        name: str,
        stamp: Stamp,
        world: int,
        lost: Member,
        parities: Mapping[int, Mapping[str, Copy]],
        ranks: Mapping[int, Held],
    ) -> RebuiltCopy | None:
        beside = {
            rank: (host, copy)
            for rank, by_host in parities.items()
            for host, copy in by_host.items()
            if lost in copy.members
        }
        stripes = {_find_stripe(copy) for _, copy in beside.values()}
        if len(stripes) != 1:
            return None
        [stripe] = stripes
        members: dict[int, set[Member]] = {}
        for _, copy in beside.values():
            for member in copy.members:
                members.setdefault(member.rank, set()).add(member)
        shards: dict[int, tuple[str, Copy]] = {}
        for rank in stripe.ranks:
            stated, contents = members.get(rank, set()), ranks.get(rank, {})
            if len(stated) > 1:
                return None
            known = {(member.digest, member.used) for member in stated}
            # in a stripe of two no other parity states the remaining member's content
            if found := next((kept for key, kept in contents.items() if key in known or not known), None):
                shards[rank] = next(iter(found.items()))
        used = {rank: member.used for rank, stated in members.items() for member in stated}
        used |= {rank: copy.used for rank, (_, copy) in shards.items()}
        rooms = {rank: copy.room for rank, (_, copy) in beside.items()}
        try:
            folds = stripe.derive_decoding(lost.rank, used, shards.keys(), rooms)
        except (ValueError, KeyError):
            return None
        parts = _list_parts(folds, shards, beside)
        copy = Copy(name, lost.rank, world, lost.home, lost.bytes, lost.used, stamp, lost.digest, mark=lost.mark)
        return RebuiltCopy("", copy, parts) if parts else None


def _find_stripe(copy: Copy) -> parity.Stripe:
    return parity.Stripe(tuple(sorted({copy.rank, *(member.rank for member in copy.members)})), copy.blocks)


def _list_others(rank: int, ranks: Sequence[int], shards: Sequence[Copy]) -> tuple[Member, ...]:
    others = (shards[other] for other in ranks if other != rank)
    return tuple(Member(o.rank, o.home, o.bytes, o.used, o.digest, o.mark) for o in others)


def _list_parts(
    folds: Iterable[parity.ParityTerm], shards: Mapping[int, tuple[str, Copy]], beside: Mapping[int, tuple[str, Copy]]
) -> tuple[tuple[str, Copy], ...]:
    wanted = sorted({(fold.rank, fold.parity) for fold in folds})
    return tuple((beside if of_parity else shards)[rank] for rank, of_parity in wanted)
