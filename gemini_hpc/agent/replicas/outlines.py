"""Outlines of shards: all of a version but its tensors, kept where the tensors live as well.

A shard whose state is replicated has its tensors on nodes that hold no copy of it. What these lack is small: the
directory, the rank's small state (generators, counters), and the digest. The shard's home sends them that as soon as
it is there, and when all holders have died a copy can be made there that is, bit for bit, what the home had
(`agent.rescue`). Holders get it, too, long before the copy that they are to have: their home may die before that is
there, beside a group whose only version left it is.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import xxhash

from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.agent.peers.tasks import Spawn
from gemini_hpc.agent.replicas.store import Shard
from gemini_hpc.core import placement
from gemini_hpc.core.moments import Moment
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format import shard_manifest
from gemini_hpc.format.slot_header import HEADER_BYTES, Layout, pack_header
from gemini_hpc.wire import peer

_VERSIONS = 3  # of a shard, the newest: a survivor may be a step behind the home, or a seal
_MOST_BYTES = 256 << 20  # of all that is kept here
_MOST_SHARDS = 4096
_LINK_S = 2.0


class Kept(NamedTuple):
    """One version of one shard."""

    outline: peer.Outline
    directory: bytes
    digest: str = ""  # that its home has made, where that had come so far

    @property
    def layout(self) -> Layout:
        """Of its slot. Raises ValueError."""
        o, layout = self.outline, Layout.plan(*self.outline.areas)
        if layout.total != o.slot_bytes or len(o.small) > layout.small_capacity:
            raise ValueError("its sizes do not fit each other")
        if layout.manifest_bytes != len(self.directory):
            raise ValueError("its directory has another size")
        return layout

    @property
    def used_bytes(self) -> int:
        """Of the slot. Raises ValueError."""
        return self.layout.small_offset + len(self.outline.small)

    def fill(self, memory: memoryview) -> None:
        """Write all but the tensors into a slot of zeros. Raises ValueError."""
        o, layout = self.outline, self.layout
        shard_manifest.unpack(self.directory, layout.tensor_bytes)
        memory[:HEADER_BYTES] = pack_header(layout, len(o.small), o.stamp, o.rank, o.world, o.moment)
        memory[layout.manifest_offset : layout.manifest_offset + len(self.directory)] = self.directory
        memory[layout.small_offset : layout.small_offset + len(o.small)] = o.small


class Outlines:
    """Of one agent: those that it sends, and those that it keeps."""

    def __init__(self, node: str, membership: Membership, spawn: Spawn) -> None:
        self._node, self._membership, self._spawn = node, membership, spawn
        self._live: dict[tuple[str, int], tuple[int, ...]] = {}  # own shards: the nodes that have their tensors
        self._told: dict[tuple[str, str, int], str] = {}  # by peer and shard: the directory that it has
        self._sent: dict[tuple[str, int], tuple[Stamp, list[str]]] = {}  # the newest outline, and who has it
        self._kept: dict[tuple[str, int], list[Kept]] = {}
        self._bytes = 0
        self._linking: set[str] = set()

    # ---- of own shards ---------------------------------------------------------------------------------

    def lives_on(self, name: str, rank: int, nodes: tuple[int, ...]) -> None:
        """The tensors of a shard of this node are on these nodes as well, its rank says."""
        self._live[name, rank] = nodes
        for host in self._hosts(nodes):
            self._link(host)

    def _hosts(self, nodes: tuple[int, ...]) -> list[str]:
        here = self._membership
        mine = here.noderanks.get(self._node)
        if mine is None or here.redundancy.parity:  # then nothing is rescued from live tensors
            return []
        by_rank = {rank: host for host, rank in here.noderanks.items()}
        chosen = [
            *placement.beyond(mine, here.nodes, here.replicas, nodes, order=here.order),
            *(
                rank
                for rank in placement.holders(mine % here.nodes, here.nodes, here.replicas, here.order)[1:]
                if rank in nodes
            ),
        ]
        return [by_rank[rank] for rank in chosen if rank in by_rank]

    def _link(self, host: str) -> None:
        incarnation = self._membership.incarnation
        if incarnation is not None and host not in incarnation.mesh.links and host not in self._linking:
            self._linking.add(host)
            self._spawn(self._reach(incarnation.mesh, host))

    async def _reach(self, mesh: Mesh, host: str) -> None:
        try:
            await mesh.reach(host, _LINK_S)
        finally:
            self._linking.discard(host)

    def sketched(
        self, shard: Shard, index: int, small_bytes: int, areas: tuple[int, int, int], moment: Moment
    ) -> None:
        """A rank of this node says that the slot, which it fills or has filled, has directory and small state: tell
        the nodes that have its tensors."""
        hosts, stamp = self._hosts(self._live.get((shard.set, shard.rank), ())), shard.pair.slots[index].stamp
        try:
            layout = Layout.plan(*areas)
        except ValueError:
            return
        fits = layout.total == shard.bytes and small_bytes <= min(layout.small_capacity, peer.MAX_SMALL_BYTES)
        if not hosts or stamp is None or not fits or layout.manifest_bytes > peer.MAX_DIRECTORY_BYTES:
            return
        with shard.memory[index].view() as memory:
            directory = bytes(memory[layout.manifest_offset : layout.manifest_offset + layout.manifest_bytes])
            small = bytes(memory[layout.small_offset : layout.small_offset + small_bytes])
        key, number = xxhash.xxh3_128(directory).hexdigest(), self._membership.round
        self._sent[shard.set, shard.rank] = stamp, hosts
        outline = peer.Outline(
            number,
            shard.set,
            shard.rank,
            shard.world,
            shard.home,
            shard.bytes,
            stamp,
            areas,
            small,
            key,
            directory,
            moment,
        )
        self.heard(self._node, outline)
        brief = msgspec.structs.replace(outline, directory=b"")
        for host in hosts:
            known = self._told.get((host, shard.set, shard.rank)) == key
            if self._membership.send(host, brief if known else outline):
                self._told[host, shard.set, shard.rank] = key
            else:
                self._link(host)
        self.completed(shard, index)

    def completed(self, shard: Shard, index: int) -> None:
        """A slot is complete: who has its outline is to know the digest."""
        slot = shard.pair.slots[index]
        stamp, hosts = self._sent.get((shard.set, shard.rank), (None, ()))
        if slot.stamp != stamp or stamp is None or slot.digest is None or shard.pushed:
            return
        for host in hosts:
            digest = peer.OutlineDigest(self._membership.round, shard.set, shard.rank, stamp, slot.digest)
            self._membership.send(host, digest)

    def on_link(self, host: str) -> None:
        """A link is new: its other end may be a new agent, which knows nothing."""
        for known in [k for k in self._told if k[0] == host]:
            del self._told[known]

    # ---- of others' shards -----------------------------------------------------------------------------

    def heard(self, host: str, message: peer.Outline | peer.OutlineDigest) -> None:
        """A node's word of a shard of its own, also of this one."""
        here = self._membership
        if message.round != here.round or here.live is None or message.stamp.epoch != here.epoch:
            return
        key = message.set, message.rank
        versions = self._kept.get(key, [])
        if isinstance(message, peer.OutlineDigest):
            for number, known in enumerate(versions):
                if known.outline.stamp == message.stamp and here.noderanks.get(host) == known.outline.home:
                    versions[number] = known._replace(digest=message.digest)
            return
        if here.noderanks.get(host) != message.home:
            return
        directory = message.directory
        if directory and xxhash.xxh3_128(directory).hexdigest() != message.key:
            return
        if not directory:
            directory = next((k.directory for k in versions if k.outline.key == message.key), b"")
        if not directory or (key not in self._kept and len(self._kept) >= _MOST_SHARDS):
            return
        newer = [k for k in versions if k.outline.stamp != message.stamp]
        newer.append(Kept(msgspec.structs.replace(message, directory=b""), directory))
        newer = sorted(newer, key=lambda k: k.outline.stamp)[-_VERSIONS:]
        bytes_now = self._bytes + _size(newer) - _size(versions)
        if bytes_now <= _MOST_BYTES:
            self._kept[key], self._bytes = newer, bytes_now

    def orphans(self, dead: set[str]) -> list[tuple[str, int]]:
        """Shards (set, rank) that are known here, of which every holder is dead, and of which there is no copy
        here."""
        here = self._membership
        gone = {rank for host, rank in here.noderanks.items() if host in dead}
        return [
            key
            for key, versions in sorted(self._kept.items())
            if versions[-1].outline.stamp.epoch == here.epoch and gone.issuperset(self._holders(versions[-1]))
        ]

    def lacking(self, dead: set[str], stamp: Stamp) -> list[tuple[str, int]]:
        """Shards of which this node is the first living holder, where the outline of this version is here."""
        here, found = self._membership, list[tuple[str, int]]()
        hosts = {rank: host for host, rank in here.noderanks.items()}
        for key in sorted(self._kept):
            kept = self.find(*key, stamp)
            if kept is not None:
                living = [hosts.get(rank) for rank in self._holders(kept) if hosts.get(rank) not in dead]
                if living[:1] == [self._node]:
                    found.append(key)
        return found

    def _holders(self, kept: Kept) -> tuple[int, ...]:
        here = self._membership
        return placement.holders(kept.outline.home % here.nodes, here.nodes, here.replicas, here.order)

    def ranks(self, name: str) -> tuple[int, ...]:
        """Of whose shards there is an outline of this epoch, and is to be no copy."""
        epoch, mine = self._membership.epoch, self._membership.noderanks.get(self._node)
        return tuple(
            rank
            for (of, rank), versions in sorted(self._kept.items())
            if of == name and versions[-1].outline.stamp.epoch == epoch and mine not in self._holders(versions[-1])
        )

    def find(self, name: str, rank: int, stamp: Stamp) -> Kept | None:
        """This very version."""
        return next((k for k in self._kept.get((name, rank), ()) if k.outline.stamp == stamp), None)


def _size(versions: list[Kept]) -> int:
    """Bytes, a directory that several share counted once."""
    directories = {k.outline.key: len(k.directory) for k in versions}
    return sum(directories.values()) + sum(len(k.outline.small) + 512 for k in versions)
