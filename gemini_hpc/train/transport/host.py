"""Chunks from agent to agent: this process only says which part of its own slot may go, and when.

Neither a second communicator nor memory of the device is needed, and no thread of the training is on the network. The
agent knows the slot: it is the one that it has given out for the version, and the chunks are its leading bytes in
order, so only their lengths are said. Over a channel of its own for each holder (`wire.local.OpenPush`); when that
ends, because an agent was started again or a holder did not answer, the next version opens another.
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

ANSWER_TIMEOUT_S = 15.0  # longer than all bounds of the agents together: only a hung agent is silent for so long
_CONTROL_TIMEOUT = timedelta(days=1)  # of the group; those who use it have bounds of their own


class _Pushed:
    """A chunk of which the answer is awaited."""

    def __init__(self, box: _HostOutbox, number: int) -> None:
        self._box, self._number = box, number

    def wait(self) -> None:
        self._box.answered(self._number)


class _Channel:
    """One descriptor from the agent; requests are numbered from 1."""

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
        self._lock = threading.Lock()  # one reads answers at a time

    def offer(self, head: Head) -> bool:
        offer = local.PushOffer(head.version, head.used_bytes, head.base, head.kept)
        if self._channel is not None and not self._channel.over:
            with suppress(VersionLost):  # the agent may have ended it long ago
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
        """What is on its way is lost. By the thread that sends."""
        channel, self._channel = self._channel, None
        if channel is not None:
            self._shut(channel)
            with self._lock:
                channel.sock.close()

    def interrupt(self) -> None:
        """From any thread."""
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
        """The answer to request `number`; None where it has been read before. Raises LinkBroken."""
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
    """Pushes by this node's agent. Making one is collective over the training's ranks, those of `within`: the small
    collectives of the main thread go over a gloo group of our own. homes: node rank of each training rank."""

    def __init__(
        self,
        client: AgentClient,
        set_name: str,
        rank: int,
        homes: Sequence[int],
        within: dist.ProcessGroup | None = None,
    ) -> None:
        self._client, self._set, self._me, self._homes = client, set_name, rank, homes
        self._boxes: list[_HostOutbox] = []
        self.group = own_group(within, _CONTROL_TIMEOUT)
        self.interrupted = False

    def joined_anew(self, client: AgentClient) -> None:
        """The rank has another connection to its agent."""
        self._client = client

    def open(self, rank: int) -> int:
        """A new channel to the holder where `rank` is. Raises LinkBroken."""
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
        """The link to a rank; called once for each."""
        self._boxes.append(_HostOutbox(self, rank))
        return self._boxes[-1]

    def interrupt(self) -> None:
        """Make every blocked and later call raise LinkBroken soon. From any thread, also more than once; called when
        the process ends or the checkpointer gives up."""
        self.interrupted = True
        for box in self._boxes:
            box.interrupt()
