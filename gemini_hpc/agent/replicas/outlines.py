"""Outlines of shards: all of a version except its tensors, kept on nodes that have the tensors.

A shard with replicated state has its tensors also on nodes that hold no copy of the shard. These nodes lack only
small parts: the directory, the rank's small state (generators, counters), and the digest. The shard's home sends them
these parts as soon as they exist. If all holders die, such a node can make a copy that equals the home's copy bit for
bit (`agent.rescue`).

Holders also get the outline, long before their copy. Their home may die before the copy arrives, together with a
group whose only remaining version is this one.

Receivers without a copy are a few nodes, evenly around the ring (`core.placement.choose_others`). The outline goes
with `step()`. The digest follows when the home's copy is complete.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import xxhash

from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.agent.replicas.store import Shard
from gemini_hpc.core import placement
from gemini_hpc.core.moments import Moment
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format import shard_manifest
from gemini_hpc.format.slot_header import HEADER_BYTES, SlotLayout, pack_header
from gemini_hpc.wire import peer

_VERSIONS = 3  # newest versions kept of a shard: a survivor may lag behind the home by a step or a seal
_MOST_BYTES = 256 << 20  # of all outlines kept here
_MOST_SHARDS = 4096
_LINK_S = 2.0  # time limit to connect to a peer


class KeptOutline(NamedTuple):
    """The outline of one version of one shard."""

    outline: peer.Outline
    directory: bytes
    digest: str = ""  # made by the shard's home; empty until it arrives

    @property
    def layout(self) -> SlotLayout:
        """Return the layout of the version's slot.

        Raises:
            ValueError: The sizes in the outline contradict each other.
        """
        o, layout = self.outline, SlotLayout.plan(*self.outline.areas)
        if layout.total != o.slot_bytes or len(o.small) > layout.small_capacity:
            raise ValueError("its sizes do not fit each other")
        if layout.manifest_bytes != len(self.directory):
            raise ValueError("its directory has another size")
        return layout

    @property
    def used_bytes(self) -> int:
        """Return the used bytes of the slot.

        Raises:
            ValueError: The sizes in the outline contradict each other.
        """
        return self.layout.small_offset + len(self.outline.small)

    def fill(self, memory: memoryview) -> None:
        """Write all parts except the tensors into a slot of zeros.

        Raises:
            ValueError: The outline is inconsistent.
        """
        o, layout = self.outline, self.layout
        shard_manifest.unpack(self.directory, layout.tensor_bytes)
        memory[:HEADER_BYTES] = pack_header(layout, len(o.small), o.stamp, o.rank, o.world, o.moment)
        memory[layout.manifest_offset : layout.manifest_offset + len(self.directory)] = self.directory
        memory[layout.small_offset : layout.small_offset + len(o.small)] = o.small


class Outlines:
    """The outlines of one agent: sent outlines of its own shards, and kept outlines of other shards."""

    def __init__(self, context: AgentContext) -> None:
        self._node, self._membership, self._spawn = context.node, context.membership, context.spawn
        self._live: dict[tuple[str, int], tuple[int, ...]] = {}  # nodes with the tensors of own shards
        self._sent_keys: dict[
            tuple[str, str, int], str
        ] = {}  # key of the directory that a peer has, by peer and shard
        self._sent: dict[tuple[str, int], tuple[Stamp, list[str]]] = {}  # the newest outline, and its receivers
        self._kept: dict[tuple[str, int], list[KeptOutline]] = {}
        self._bytes = 0
        self._linking: set[str] = set()

    # ---- outlines of own shards ------------------------------------------------------------------------

    def record_live_nodes(self, name: str, rank: int, nodes: tuple[int, ...]) -> None:
        """Record that the tensors of this node's shard are on these nodes too, as its rank reports."""
        self._live[name, rank] = nodes
        for host in self._choose_hosts(nodes):
            self._ensure_link(host)

    def _choose_hosts(self, nodes: tuple[int, ...]) -> list[str]:
        noderanks, redundancy = self._membership.noderanks, self._membership.redundancy
        own_noderank = noderanks.get(self._node)
        if own_noderank is None or redundancy.parity:  # with parity no shard is rescued from live tensors
            return []
        by_rank = {rank: host for host, rank in noderanks.items()}
        others = placement.choose_others(own_noderank, redundancy.N, redundancy.m, nodes, order=redundancy.order)
        holders = [rank for rank in redundancy.list_receivers(own_noderank % redundancy.N) if rank in nodes]
        return [by_rank[rank] for rank in (*others, *holders) if rank in by_rank]

    def _ensure_link(self, host: str) -> None:
        incarnation = self._membership.incarnation
        if incarnation is not None and host not in incarnation.mesh.links and host not in self._linking:
            self._linking.add(host)
            self._spawn(self._dial(incarnation.mesh, host))

    async def _dial(self, mesh: Mesh, host: str) -> None:
        try:
            await mesh.ensure_link(host, _LINK_S)
        finally:
            self._linking.discard(host)

    def on_written(
        self, shard: Shard, index: int, small_bytes: int, areas: tuple[int, int, int], moment: Moment
    ) -> None:
        """Send an outline to the nodes that have the shard's tensors.

        A rank of this node reports that the slot, in progress or complete, contains its directory and small state.
        """
        hosts, stamp = (
            self._choose_hosts(self._live.get((shard.training, shard.rank), ())),
            shard.pair.slots[index].stamp,
        )
        try:
            layout = SlotLayout.plan(*areas)
        except ValueError:
            return
        fits = layout.total == shard.bytes and small_bytes <= min(layout.small_capacity, peer.MAX_SMALL_BYTES)
        if not hosts or stamp is None or not fits or layout.manifest_bytes > peer.MAX_DIRECTORY_BYTES:
            return
        with shard.memory[index].view() as memory:
            directory = bytes(memory[layout.manifest_offset : layout.manifest_offset + layout.manifest_bytes])
            small = bytes(memory[layout.small_offset : layout.small_offset + small_bytes])
        key, number = xxhash.xxh3_128(directory).hexdigest(), self._membership.round
        self._sent[shard.training, shard.rank] = stamp, hosts
        outline = peer.Outline(
            number,
            shard.training,
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
        self.on_outline(self._node, outline)
        without_directory = msgspec.structs.replace(outline, directory=b"")
        for host in hosts:
            known = self._sent_keys.get((host, shard.training, shard.rank)) == key
            if self._membership.send(host, without_directory if known else outline):
                self._sent_keys[host, shard.training, shard.rank] = key
            else:
                self._ensure_link(host)
        self.send_digest(shard, index)

    def send_digest(self, shard: Shard, index: int) -> None:
        """Send the digest of a complete slot to the nodes that have its outline."""
        slot = shard.pair.slots[index]
        stamp, hosts = self._sent.get((shard.training, shard.rank), (None, ()))
        if slot.stamp != stamp or stamp is None or slot.digest is None or shard.pushed:
            return
        for host in hosts:
            digest = peer.OutlineDigest(self._membership.round, shard.training, shard.rank, stamp, slot.digest)
            self._membership.send(host, digest)

    def on_link(self, host: str) -> None:
        """Forget the directories sent to this host: the other end of a new link may be a new, empty agent."""
        for known in [k for k in self._sent_keys if k[0] == host]:
            del self._sent_keys[known]

    # ---- outlines of others' shards --------------------------------------------------------------------

    def on_outline(self, host: str, message: peer.Outline | peer.OutlineDigest) -> None:
        """Keep an outline or its digest, sent by the shard's home. The home may be this node."""
        membership = self._membership
        if message.round != membership.round or membership.live is None or message.stamp.epoch != membership.epoch:
            return
        key = message.training, message.rank
        versions = self._kept.get(key, [])
        if isinstance(message, peer.OutlineDigest):
            for number, known in enumerate(versions):
                if known.outline.stamp == message.stamp and membership.noderanks.get(host) == known.outline.home:
                    versions[number] = known._replace(digest=message.digest)
            return
        if membership.noderanks.get(host) != message.home:
            return
        directory = message.directory
        if directory and xxhash.xxh3_128(directory).hexdigest() != message.key:
            return
        if not directory:
            directory = next((k.directory for k in versions if k.outline.key == message.key), b"")
        if not directory or (key not in self._kept and len(self._kept) >= _MOST_SHARDS):
            return
        newer = [k for k in versions if k.outline.stamp != message.stamp]
        newer.append(KeptOutline(msgspec.structs.replace(message, directory=b""), directory))
        newer = sorted(newer, key=lambda k: k.outline.stamp)[-_VERSIONS:]
        bytes_now = self._bytes + _count_bytes(newer) - _count_bytes(versions)
        if bytes_now <= _MOST_BYTES:
            self._kept[key], self._bytes = newer, bytes_now

    def list_without_holders(self, dead: set[str]) -> list[tuple[str, int]]:
        """Return the shards (training, rank) with an outline here, all holders dead, and no copy here."""
        membership = self._membership
        gone = {rank for host, rank in membership.noderanks.items() if host in dead}
        return [
            key
            for key, versions in sorted(self._kept.items())
            if versions[-1].outline.stamp.epoch == membership.epoch
            and gone.issuperset(self._list_holders(versions[-1]))
        ]

    def list_shards_to_rebuild(self, dead: set[str], stamp: Stamp) -> list[tuple[str, int]]:
        """Return the shards with an outline of this version here whose first living holder is this node."""
        membership, found = self._membership, list[tuple[str, int]]()
        hosts = {rank: host for host, rank in membership.noderanks.items()}
        for key in sorted(self._kept):
            kept = self.find(*key, stamp)
            if kept is not None:
                living = [hosts.get(rank) for rank in self._list_holders(kept) if hosts.get(rank) not in dead]
                if living[:1] == [self._node]:
                    found.append(key)
        return found

    def _list_holders(self, kept: KeptOutline) -> tuple[int, ...]:
        redundancy = self._membership.redundancy
        return redundancy.list_holders(kept.outline.home % redundancy.N)

    def list_ranks_without_copy(self, name: str) -> tuple[int, ...]:
        """Return the ranks whose shards have an outline of this epoch here and are to have no copy here."""
        epoch, own_noderank = self._membership.epoch, self._membership.noderanks.get(self._node)
        return tuple(
            rank
            for (training_name, rank), versions in sorted(self._kept.items())
            if training_name == name
            and versions[-1].outline.stamp.epoch == epoch
            and own_noderank not in self._list_holders(versions[-1])
        )

    def find(self, name: str, rank: int, stamp: Stamp) -> KeptOutline | None:
        """Return the outline of exactly this version, or None."""
        return next((k for k in self._kept.get((name, rank), ()) if k.outline.stamp == stamp), None)


def _count_bytes(versions: list[KeptOutline]) -> int:
    """Return the bytes of these versions. A directory that several share counts once."""
    directories = {k.outline.key: len(k.directory) for k in versions}
    return sum(directories.values()) + sum(len(k.outline.small) + 512 for k in versions)
