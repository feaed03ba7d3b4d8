"""Chunks from agent to agent: this process only says which part of its own slot may go, and when.

The transport needs neither a second communicator nor device memory, and no thread of the training uses the network.
The agent knows the slot, because the agent has assigned it to the version. The chunks are the slot's leading bytes in
order, so only their lengths are sent to the agent.

Each holder has a channel of its own (`wire.local.OpenPush`). A channel ends when an agent restarts or a holder does
not answer. The next version opens another.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from gemini_hpc.client.agent_connection import AgentClient, AgentLost, AgentRefused
from gemini_hpc.core import ranges
from gemini_hpc.train.state.collectives import own_group
from gemini_hpc.train.transport.base import Head, LinkBroken, Outbox, VersionLost
from gemini_hpc.wire import local

ANSWER_TIMEOUT_S = 15.0  # longer than all timeouts of the agents together: only a hung agent is silent for so long
_CONTROL_TIMEOUT = timedelta(days=1)  # of the group, practically infinite: its users have timeouts of their own


class _Pushed:
    """A chunk whose answer is awaited."""

    def __init__(self, box: _HostOutbox, number: int) -> None:
        self._box, self._number = box, number

    def wait(self) -> None:
        self._box.answered(self._number)


class _Channel:
    """A descriptor from the agent, whose requests are numbered from 1."""

    def __init__(self, fd: int) -> None:
        self.sock = socket.socket(fileno=fd)
        self.sock.settimeout(ANSWER_TIMEOUT_S)
        self.asked = self.answered = 0
        self.over = False


class _HostOutbox(Outbox):
    free = True

    def __init__(self, transport: HostTransport, rank: int) -> None:
        self._transport, self._rank = transport, rank
        self._channel: _Channel | None = None
        self._lock = threading.Lock()  # one thread at a time reads answers

    def offer(self, head: Head) -> bool:
        offer = local.PushOffer(head.version, head.used_bytes, head.base, head.kept)
        if self._channel is not None and not self._channel.over:
            with suppress(VersionLost):  # the agent may have closed the channel long ago
                return self._accepted(self._ask(offer), head.used_bytes)
        self.close()
        self._channel = _Channel(self._transport.open(self._rank))
        return self._accepted(self._ask(offer), head.used_bytes)

    def _accepted(self, reply: local.Reply | None, used_bytes: int) -> bool:
        self.there = reply.there if isinstance(reply, local.Taken) else ()
        if reason := ranges.fault(self.there, used_bytes):
            raise self._lost(reason)
        return isinstance(reply, (local.Ok, local.Taken))

    def send(self, chunk: torch.Tensor) -> _Pushed:
        return _Pushed(self, self._say(local.PushChunk(chunk.numel())))

    def finish(self, digest: str) -> None:
        self._ask(local.PushDone())

    def bye(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel. Chunks under way are lost. Call from the thread that sends."""
        channel, self._channel = self._channel, None
        if channel is not None:
            self._shut(channel)
            with self._lock:
                channel.sock.close()

    def interrupt(self) -> None:
        """Shut the channel down, from any thread."""
        if (channel := self._channel) is not None:
            self._shut(channel)

    @staticmethod
    def _shut(channel: _Channel) -> None:
        with suppress(OSError):
            channel.sock.shutdown(socket.SHUT_RDWR)

    def _say(self, message: local.Message) -> int:
        channel = self._channel
        if channel is None:
            raise self._lost("the agent has ended the transfer")
        try:
            channel.sock.send(local.encode(message))
        except OSError as error:
            raise self._lost(str(error)) from None
        channel.asked += 1
        return channel.asked

    def _ask(self, message: local.Message) -> local.Reply | None:
        return self.answered(self._say(message))

    def answered(self, number: int) -> local.Reply | None:
        """Wait for the answer to request `number` and return it.

        Return None where the answer has been read before.

        Raises:
            LinkBroken: The agent has ended the transfer, reports an error, or does not answer.
        """
        reply: local.Reply | None = None
        with self._lock:
            channel = self._channel
            if channel is None:
                raise self._lost("the agent has ended the transfer")
            try:
                while channel.answered < number:
                    data = channel.sock.recv(local.MAX_PACKET_BYTES)
                    if not data:
                        raise self._lost("the agent has ended the transfer")
                    reply = local.reply_decoder.decode(data)
                    if isinstance(reply, local.Error):
                        raise self._lost(reply.error)
                    channel.answered += 1
            except (OSError, msgspec.MsgspecError) as error:
                if isinstance(error, LinkBroken):
                    raise
                raise self._lost(f"the agent does not answer: {error}") from None
        return reply

    def _lost(self, reason: str) -> LinkBroken:
        if self._channel is not None:
            self._channel.over = True
        if self._transport.interrupted:
            return LinkBroken("interrupted")
        return VersionLost(reason)


class HostTransport:
    """Pushes by this node's agent.

    The small collectives of the main thread go over a gloo group of our own.
    """

    def __init__(
        self,
        client: AgentClient,
        set_name: str,
        rank: int,
        homes: Sequence[int],
        within: dist.ProcessGroup | None = None,
    ) -> None:
        """Connect this rank. The call is collective over the training's ranks (those of `within`).

        Args:
            client: The connection to this node's agent.
            set_name: Name of the training.
            rank: This training rank.
            homes: Node rank of each training rank.
            within: Process group of the training's ranks; None for all ranks.
        """
        self._client, self._set, self._me, self._homes = client, set_name, rank, homes
        self._boxes: list[_HostOutbox] = []
        self.group = own_group(within, _CONTROL_TIMEOUT)
        self.interrupted = False

    def joined_anew(self, client: AgentClient) -> None:
        """Use the rank's new connection to its agent."""
        self._client = client

    def open(self, rank: int) -> int:
        """Open a new channel to the holder where `rank` runs and return its descriptor.

        Raises:
            LinkBroken: The transport was interrupted, or the agent opens no channel.
        """
        if self.interrupted:
            raise LinkBroken("interrupted")
        message = local.OpenPush(set=self._set, rank=self._me, holder=self._homes[rank])
        try:
            _, fds = self._client.request(message)
        except (AgentLost, AgentRefused) as error:
            raise VersionLost(str(error)) from None
        for fd in fds[1:]:
            os.close(fd)
        if not fds:
            raise VersionLost("the agent does not support pushes")
        return fds[0]

    def outbox(self, rank: int) -> Outbox:
        """Create the link to a rank. Call once for each rank."""
        self._boxes.append(_HostOutbox(self, rank))
        return self._boxes[-1]

    def interrupt(self) -> None:
        """Make every blocked and later call raise LinkBroken soon.

        The call may come from any thread, and more than once. It is made when the process ends or the checkpointer
        gives up.
        """
        self.interrupted = True
        for box in self._boxes:
            box.interrupt()
