"""What can be made again from parity, and which parity is to be made anew: for `recovery_plan`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gemini_hpc.core import parity
from gemini_hpc.core.copy import Copy, Member
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.core.slots import Stamp

Held = Mapping[tuple[str, int], Mapping[str, Copy]]  # (digest, used bytes) -> host -> its copy


@dataclass(frozen=True, slots=True)
class Made:
    """`dest_host` makes a copy, or a parity, of these copies and parities of its stripe, each at its host. A parity's
    digest is "": whoever makes it finds out."""

    dest_host: str
    copy: Copy
    parts: tuple[tuple[str, Copy], ...]


class Parities:
    """The parities that agents hold, by set, stamp, number of ranks, and the rank beside whose shard one lies."""

    def __init__(self, held: Iterable[tuple[str, Copy]]) -> None:
        """held: each with its host, those of hosts that come first first. What cannot be what it says is left out."""
        self._found: dict[tuple[str, Stamp, int], dict[int, dict[str, Copy]]] = {}
        for host, copy in held:
            ranks = {copy.rank, *(member.rank for member in copy.of)}
            if len(ranks) == len(copy.of) + 1 and max(ranks) < copy.world:
                of_set = self._found.setdefault((copy.set, copy.stamp, copy.world), {})
                of_set.setdefault(copy.rank, {})[host] = copy

    def made(self, name: str, stamp: Stamp, world: int, ranks: Mapping[int, Held]) -> dict[int, Made]:
        """By rank, shards without a copy that can be made again; for `dest_host` the caller knows the home."""
        parities = self._found.get((name, stamp, world), {})
        wanted: dict[int, Member] = {}
        for by_host in parities.values():
            for copy in by_host.values():
                wanted.update({member.rank: member for member in copy.of if member.rank not in ranks})
        found = {rank: self._make(name, stamp, world, member, parities, ranks) for rank, member in wanted.items()}
        return {rank: made for rank, made in found.items() if made is not None}

    def lacking(
        self, shards: Sequence[Copy], where: Mapping[int, Sequence[str]], by_rank: Mapping[int, str], of: Redundancy
    ) -> tuple[list[Made], bool]:
        """What the nodes lack of a version's parity; whether they will then have all of it. shards: of the version,
        in rank order; where: by rank the hosts that have one; by_rank: the host of each node rank."""
        N = of.N
        try:
            stripes = parity.stripes([shard.home % N for shard in shards], of.groups())
        except ValueError:
            return [], False
        made, whole = [], True
        for shard, stripe in zip(shards, stripes, strict=True):
            dest = by_rank[shard.home % N]
            others = [shards[rank] for rank in stripe if rank != shard.rank]
            members = tuple(Member(o.rank, o.home, o.bytes, o.used, o.digest) for o in others)
            held = self._found.get((shard.set, shard.stamp, shard.world), {}).get(shard.rank, {}).get(dest)
            if held is not None and held.of == members:
                continue
            parts = [(where[o.rank][0], o) for o in others if o.rank in where]
            if len(parts) < len(others):
                whole = False
                continue
            used = {o.rank: o.used for o in others}
            length = parity.parity_bytes(stripe, shard.rank, used)
            size = max(parity.block_bytes(o.bytes, len(stripe)) for o in others)
            copy = Copy(shard.set, shard.rank, shard.world, shard.home, size, length, shard.stamp, "", of=members)
            made.append(Made(dest, copy, tuple(parts)))
        return made, whole

    @staticmethod
    def _make(
        name: str,
        stamp: Stamp,
        world: int,
        lost: Member,
        parities: Mapping[int, Mapping[str, Copy]],
        ranks: Mapping[int, Held],
    ) -> Made | None:
        with_it = {
            rank: (host, copy)
            for rank, by_host in parities.items()
            for host, copy in by_host.items()
            if lost in copy.of
        }
        parts: list[tuple[str, Copy]] = []
        for rank, (host, copy) in sorted(with_it.items()):
            stripe = {rank, *(member.rank for member in copy.of)}
            if stripe != {lost.rank, *with_it}:
                return None
            for member in copy.of:
                if member != lost and (member.digest, member.used) not in ranks.get(member.rank, {}):
                    return None
            others = next((found for _, other in with_it.values() for found in other.of if found.rank == rank), None)
            if others is None and len(stripe) > 2:
                return None
            contents = ranks.get(rank, {})
            keepers = contents.get((others.digest, others.used)) if others else next(iter(contents.values()), None)
            if not keepers:
                return None
            parts += [(host, copy), next(iter(keepers.items()))]
        copy = Copy(name, lost.rank, world, lost.home, lost.bytes, lost.used, stamp, lost.digest)
        return Made("", copy, tuple(parts)) if parts else None
