"""Copies from live replicas, used when every holder of a shard has died.

The method is just-in-time checkpointing (EuroSys '24, section 3), for cases that the replicas of an agent group
cannot serve. If state is replicated (DDP, HSDP), the healthy ranks have the lost shards as well.

Each agent acts by itself. The agent has outlines of shards (`replicas.outlines`), and its ranks stand still at a
version. A copy made by a rank counts only if it has, bit for bit, the digest made by the shard's home (R5). If the
home had not made one yet, the copy counts only if no other replica's copy contradicts it.

The living ranks' own shards of that version may still be on their way, and are completed, too. So are the shards of
which this node is the first living holder: a version counts only with all its shards. The step is not ended
meanwhile, for at most `LIMIT_S`.

The controller is told, and sets nothing DOWN meanwhile. This agent enters no other view. The next round finds the
copies like any other. They stay until then, unless a newer version is sealed: the last votes of the dead may seal the
version that was copied.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

import msgspec

from gemini_hpc import clock
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.replicas.digest_pool import Urgency
from gemini_hpc.agent.replicas.memory import NoMemory
from gemini_hpc.agent.replicas.outlines import KeptOutline
from gemini_hpc.agent.replicas.replicas import Replicas
from gemini_hpc.agent.replicas.store import Key, Shard
from gemini_hpc.core.rescue import LIMIT_S
from gemini_hpc.core.slots import Refused, Stamp
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.local_server import LocalClient

_TOGETHER_S = 0.05  # seconds after which simultaneous deaths are known
_STILL_S = 2.0  # seconds for a rank that is in the middle of an optimizer step
_COPY_S = _COMPLETE_S = 15.0  # tens of gigabytes leave a device, or arrive from a peer, in this time
_AGAIN_S = 0.2  # pause before a rank that has just begun to change its tensors is asked again


class RescueChannel:
    """A channel to one rank, which copies shards on request."""

    def __init__(self, client: LocalClient, rank: int, sock: socket.socket) -> None:
        self.client, self.rank, self._sock = client, rank, sock

    def close(self) -> None:
        """Close the channel. May be called from any thread."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def ask(self, message: local.Message, timeout_s: float, fd: int = -1) -> local.Message | None:
        """Send a request and return the answer, or None without one in time. Runs in a thread."""
        try:
            self._sock.settimeout(timeout_s)
            socket.send_fds(self._sock, [local.encode(message)], [fd] if fd >= 0 else [])
            data = self._sock.recv(local.MAX_PACKET_BYTES)
            return local.rescued_decoder.decode(data) if data else None
        except (OSError, msgspec.MsgspecError):
            self.close()  # a late answer would count as the next request's
            return None

    def send_message(self, message: local.Message) -> None:
        """Send a message that has no answer."""
        with suppress(OSError):
            self._sock.settimeout(0.2)
            self._sock.send(local.encode(message))


class Rescue:
    """The rescues of one agent."""

    def __init__(
        self,
        context: AgentContext,
        replicas: Replicas,
        end_transfers: Callable[[set[str]], Awaitable[None]],
        report_rescue: Callable[[], None],
    ) -> None:
        """Create the rescue service.

        Args:
            context: The agent's context.
            replicas: The agent's copies.
            end_transfers: Ends all transfers from these hosts.
            report_rescue: Reports to the controller that a rescue has begun or is over.
        """
        self._membership, self._log, self._spawn = context.membership, context.log, context.spawn
        self._store, self._trainings, self._outlines = replicas.store, replicas.trainings, replicas.outlines
        self._filling, self._end_transfers, self._report_rescue = replicas.filling, end_transfers, report_rescue
        self._channels: dict[str, dict[int, RescueChannel]] = {}
        self._tried: set[tuple[Key, Stamp]] = set()
        self._again = False
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- ranks -----------------------------------------------------------------------------------------

    def open(self, client: LocalClient, name: str, rank: int) -> int:
        """Create a channel to a rank and return the rank's end."""
        own_end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        older = self._channels.setdefault(name, {}).get(rank)
        if older is not None:
            older.close()
        self._channels[name][rank] = RescueChannel(client, rank, own_end)
        return theirs.detach()

    def on_disconnect(self, client: LocalClient) -> None:
        """Close the channels of a rank whose connection has ended."""
        for of_training in self._channels.values():
            for rank, channel in list(of_training.items()):
                if channel.client is client:
                    del of_training[rank]
                    channel.close()

    def list_live_ranks(self, name: str) -> tuple[int, ...]:
        """Return the ranks whose shards could be copied here."""
        return self._outlines.list_ranks_without_copy(name) if self._channels.get(name) else ()

    def are_sole_holders(self, dead: Collection[str]) -> bool:
        """Return whether these nodes alone have some sealed state.

        No other node then holds a copy, or has live ranks with the same state.
        """
        membership = self._membership
        lost = set(dead).union(membership.lost)  # lost nodes keep their old node ranks until a new view has its plan
        gone = {rank for host, rank in membership.noderanks.items() if host in lost}
        if not gone or membership.redundancy.can_survive(gone):
            return False
        return any(training.sealed and not self.list_live_ranks(training.name) for training in self._trainings)

    # ---- deaths ----------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether ranks stand still to be copied from."""
        return not self._idle.is_set()

    async def wait_idle(self) -> None:
        """Wait until no rescue is in progress, for at most `LIMIT_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                await self._idle.wait()

    def _list_without_holders(self) -> list[Key]:
        incarnation = self._membership.training
        if incarnation is None or incarnation.live is False:
            return []
        return [
            key for key in self._outlines.list_without_holders(incarnation.mesh.dead) if self._channels.get(key[0])
        ]

    def _list_affected_trainings(self) -> list[str]:
        """Return the trainings with ranks here of which some shards have no living holder."""
        membership, incarnation = self._membership, self._membership.training
        if incarnation is None or incarnation.live is False:
            return []
        gone = {rank for host, rank in membership.noderanks.items() if host in incarnation.mesh.dead}
        if membership.redundancy.parity or not any(
            gone.issuperset(membership.redundancy.list_holders(rank)) for rank in gone
        ):
            return []
        return sorted(name for name, channels in self._channels.items() if channels)

    def on_death(self) -> None:
        """Begin a rescue, if needed: a peer counts as dead."""
        if not self._list_affected_trainings():
            return
        if self.busy:
            self._again = True
            return
        self._idle.clear()
        self._report_rescue()
        self._spawn(self._run())

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                await asyncio.sleep(_TOGETHER_S)
                while True:
                    self._again = False
                    for name in self._list_affected_trainings():
                        await self._rescue_training(name)
                    if not self._again:
                        break
        except TimeoutError:
            self._log("unrescued", detail=f"live state was not copied within {LIMIT_S:g} s")
        finally:
            self._idle.set()
            self._report_rescue()

    async def _rescue_training(self, name: str) -> None:
        """Hold a training's ranks on this node, copy lost shards, complete the ranks' own, and let them go on."""
        channels = list(self._channels.get(name, {}).values())
        try:
            standing = await self._stop_ranks(channels)
            epoch, version = self._membership.epoch, max(standing.values(), default=0)
            if not version:
                self._log("unrescued", detail="no rank of this node stands still, so its state cannot be copied")
                return
            able = [channel for channel in channels if standing.get(channel) == version]
            stamp = Stamp(epoch, version)
            without_holders = [key for key in self._list_without_holders() if key[0] == name]
            await self._copy_in_parallel(able, without_holders, stamp, "whose holders are dead")
            at_work = set(await asyncio.gather(*(self._wait_for_own_slot(channel) for channel in able)))
            if (incarnation := self._membership.training) is not None:
                dead = set(incarnation.mesh.dead)
                await self._end_transfers(dead)
                lacking = [key for key in self._outlines.list_shards_to_rebuild(dead, stamp) if key[0] == name]
                await self._copy_in_parallel(
                    able, [k for k in lacking if k[1] not in at_work], stamp, "not complete here"
                )
        finally:
            for channel in channels:
                await asyncio.to_thread(channel.send_message, local.GoOn())

    async def _stop_ranks(self, channels: list[RescueChannel]) -> dict[RescueChannel, int]:
        """Return the versions at which the ranks stand still. Ranks that cannot stop are left out."""
        deadline, found = clock.monotonic() + _STILL_S, dict[RescueChannel, int]()
        while True:
            asked = [channel for channel in channels if channel not in found]
            still = local.Still(LIMIT_S)
            answers = await asyncio.gather(*(asyncio.to_thread(c.ask, still, _STILL_S) for c in asked))
            for channel, answer in zip(asked, answers, strict=True):
                if isinstance(answer, local.Standing) and answer.version:
                    found[channel] = answer.version
            if len(found) == len(channels) or clock.monotonic() > deadline:
                return found
            await asyncio.sleep(_AGAIN_S)

    async def _wait_for_own_slot(self, channel: RescueChannel) -> int:
        """Wait until the transfer into the rank's own slot has ended.

        Return the rank if it may still be writing, otherwise -1.
        """
        answer = await asyncio.to_thread(channel.ask, local.Complete(_COMPLETE_S), _COMPLETE_S + _STILL_S)
        return -1 if isinstance(answer, local.Copied) else channel.rank

    async def _copy_in_parallel(self, able: list[RescueChannel], keys: list[Key], stamp: Stamp, cause: str) -> None:
        """Copy these shards, each rank some of them."""
        await asyncio.gather(
            *(
                self._copy_in_turn(able[number:] + able[:number], keys[number :: len(able)], stamp, cause)
                for number in range(len(able))
            )
        )

    async def _copy_in_turn(self, channels: list[RescueChannel], keys: list[Key], stamp: Stamp, cause: str) -> None:
        """Copy shards one after the other, each from the first rank that has it."""
        for name, rank in keys:
            kept = self._outlines.find(name, rank, stamp)
            found = self._store.find_version(name, rank, stamp)
            if ((name, rank), stamp) in self._tried or (found and found[0].pair.slots[found[1]].state == "complete"):
                continue
            self._tried.add(((name, rank), stamp))
            why = "this node has not received its small state of that version" if kept is None else ""
            for channel in channels if kept is not None else ():
                assert kept is not None
                why = await self._copy_shard(channel, kept, cause)
                if not why:
                    break
            if why:
                self._log("unrescued", version=stamp.version, detail=f"shard {rank}, {cause}: {why}")

    async def _prepare_slot(self, o: peer.Outline) -> tuple[Shard, int]:
        """Return the slot for a copy.

        The slot belongs to the shard that a rank here has registered, or to a new one.

        Raises:
            NoMemory: There is no room for the shard.
            Refused: No slot can take the version.
        """
        present, training = self._store.get(o.training, o.rank), self._trainings.get(o.training)
        if present is not None and training is not None and present.bytes == o.slot_bytes:
            return present, self._filling.begin_again(training, present, o.stamp.version)
        shard = await self._store.make_shard(o.training, o.rank, o.world, o.home, o.slot_bytes)
        shard.rescued_round = self._membership.round
        return shard, shard.begin_copy(o.stamp)

    def _discard_copy(self, shard: Shard, index: int) -> None:
        """Discard a failed copy."""
        number = self._membership.round
        if shard.rescued_round == number and shard.registered_round != number:
            self._store.drop(shard)
        else:
            self._filling.empty_slot(shard, index)

    async def _copy_shard(self, channel: RescueChannel, kept: KeptOutline, cause: str) -> str:
        """Copy a shard out of a rank's tensors. Return the reason of a failure, or ""."""
        o = kept.outline
        try:
            shard, index = await self._prepare_slot(o)
        except (NoMemory, Refused) as exc:
            return str(exc)
        shard.pair.slots[index].busy = True
        memory = shard.memory[index]
        try:
            with memory.view() as view:
                await asyncio.to_thread(kept.fill, view)
        except ValueError as exc:
            self._discard_copy(shard, index)
            return f"its outline cannot be used: {exc}"
        fd = os.dup(memory.fd)
        try:
            ask = local.CopyLive(o.rank, o.stamp.version, o.slot_bytes)
            answer = await asyncio.to_thread(channel.ask, ask, _COPY_S, fd)
        finally:
            os.close(fd)
        if not isinstance(answer, local.Copied) or not answer.whole:
            self._discard_copy(shard, index)
            return f"rank {channel.rank}: {answer.why if isinstance(answer, local.Copied) else 'no answer'}"
        found = await self._store.pool.digest(memory, kept.used_bytes, urgency=Urgency.OWN)
        if kept.digest and found != kept.digest:
            self._discard_copy(shard, index)
            return f"the tensors of rank {channel.rank} hold another state"
        shard.unproven = None if kept.digest else o.stamp
        self._filling.complete_slot(shard, index, Committed(o.stamp, kept.used_bytes, found), found)
        how = "" if kept.digest else ", with no digest to check it by"
        detail = f"shard {o.rank}, {cause}: copied from the live state of rank {channel.rank}{how}"
        self._log("rescued", version=o.stamp.version, detail=detail)
        return ""
