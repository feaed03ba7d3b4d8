"""Bytes from agent to agent: this process only says how much of its own slot may go, and until when.

The transport needs neither a second communicator nor device memory, and no thread of the training uses the network.
The agent knows the slot, because the agent has assigned it to the version. The slot's leading bytes go in order.

Each holder has a channel of its own (`wire.local.OpenPush`), with a grant page. A channel ends when an agent restarts
or a holder does not answer. The next version opens another.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress

import msgspec

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.session import RankSession
from gemini_hpc.core import ranges
from gemini_hpc.train.transport.base import GrantOutbox, Head, LinkBroken, VersionLost
from gemini_hpc.wire import local
from gemini_hpc.wire.grant_page import Grant, GrantWriter, Spell

ANSWER_TIMEOUT_S = 15.0  # longer than all timeouts of the agents together: only a hung agent is silent for so long


class _Channel:
    """The descriptors from the agent: a socket and the grant page."""

    def __init__(self, fd: int, page: GrantWriter) -> None:
        self.sock, self.page = socket.socket(fileno=fd), page
        self.sock.settimeout(ANSWER_TIMEOUT_S)
        self.over = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def is_readable(self) -> bool:
        return bool(self._poll.poll(0))


class _HostOutbox(GrantOutbox):
    def __init__(self, transport: HostTransport, rank: int) -> None:
        self._transport, self._rank = transport, rank
        self._channel: _Channel | None = None

    def offer(self, head: Head) -> bool:
        offer = local.PushOffer(head.version, head.used_bytes, head.base, head.kept)
        if self._channel is not None and not self._channel.over:
            with suppress(VersionLost):  # the agent may have closed the channel long ago
                return self._send_offer(offer)
        self.close()
        self._channel = _Channel(*self._transport.open_channel(self._rank))
        return self._send_offer(offer)

    def _send_offer(self, offer: local.PushOffer) -> bool:
        self._open.page.withdraw()
        reply = self._request(offer)
        self.present = reply.present if isinstance(reply, local.PresentRanges) else ()
        if reason := ranges.find_fault(self.present, offer.used):
            raise self._record_loss(reason)
        return isinstance(reply, (local.Ok, local.PresentRanges))

    def grant(self, grant: Grant) -> None:
        channel = self._open
        if channel.page.write(grant):
            self._send(channel, local.PushGo())

    def withdraw(self) -> None:
        self._open.page.withdraw()

    def check(self) -> None:
        channel = self._open
        if channel.is_readable():  # no answer is due: an error, or the end
            self._receive_reply(channel)

    @property
    def sent(self) -> int:
        return self._open.page.sent

    @property
    def arrived(self) -> int:
        return self._open.page.arrived

    @property
    def moved_at(self) -> float:
        channel = self._channel
        return channel.page.moved_at if channel is not None else 0.0

    def read_spells(self) -> list[Spell]:
        return self._open.page.read_spells()

    def finish(self, digest: str) -> None:
        self._request(local.PushDone())

    def announce_end(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel. Bytes under way are lost. Call from the thread that sends."""
        channel, self._channel = self._channel, None
        if channel is not None:
            self._shut(channel)
            channel.sock.close()

    def interrupt(self) -> None:
        """Shut the channel down, from any thread."""
        if (channel := self._channel) is not None:
            self._shut(channel)

    @staticmethod
    def _shut(channel: _Channel) -> None:
        with suppress(OSError):
            channel.sock.shutdown(socket.SHUT_RDWR)

    @property
    def _open(self) -> _Channel:
        if self._channel is None:
            raise self._record_loss("the agent has ended the transfer")
        return self._channel

    def _send(self, channel: _Channel, message: local.Message) -> None:
        try:
            channel.sock.send(local.encode(message))
        except OSError as error:
            raise self._record_loss(str(error)) from None

    def _request(self, message: local.Message) -> local.Reply:
        """Send a request and return its answer.

        Raises:
            LinkBroken: The agent has ended the transfer, reports an error, or neither answers nor sends.
        """
        channel = self._open
        self._send(channel, message)
        while True:
            asked_at = clock.monotonic()
            try:
                return self._receive_reply(channel)
            except TimeoutError:
                if channel.page.moved_at < asked_at:
                    raise self._record_loss("the agent does not answer") from None

    def _receive_reply(self, channel: _Channel) -> local.Reply:
        try:
            data = channel.sock.recv(local.MAX_PACKET_BYTES)
            if not data:
                raise self._record_loss("the agent has ended the transfer")
            reply = local.reply_decoder.decode(data)
        except (TimeoutError, LinkBroken):
            raise
        except (OSError, msgspec.MsgspecError) as error:
            raise self._record_loss(f"the agent does not answer: {error}") from None
        if isinstance(reply, local.Error):
            raise self._record_loss(reply.error)
        return reply

    def _record_loss(self, reason: str) -> LinkBroken:
        if self._channel is not None:
            self._channel.over = True
        if self._transport.interrupted:
            return LinkBroken("interrupted")
        return VersionLost(reason)


class HostTransport:
    """Pushes by this node's agent."""

    def __init__(self, session: RankSession) -> None:
        """Create the transport of one rank, without links.

        Args:
            session: The rank's session. Channels are opened by the agent that it has then.
        """
        self._session = session
        self._boxes: list[_HostOutbox] = []
        self.interrupted = False

    def open_channel(self, rank: int) -> tuple[int, GrantWriter]:
        """Open a new channel to the holder where `rank` runs. Return its descriptor and its grant page.

        Raises:
            LinkBroken: The transport was interrupted, or the agent opens no channel.
        """
        if self.interrupted:
            raise LinkBroken("interrupted")
        session = self._session
        message = local.OpenPush(training=session.name, rank=session.rank, holder=session.homes[rank])
        try:
            _, fds = session.require_agent().request(message)
        except (AgentLost, AgentRefused) as error:
            raise VersionLost(str(error)) from None
        try:
            if len(fds) != 2:
                raise ValueError("it passes no grant page")
            page = GrantWriter(fds[1])
        except (ValueError, OSError) as error:
            for fd in fds:
                os.close(fd)
            raise VersionLost(f"the agent does not support pushes: {error}") from None
        os.close(fds[1])
        return fds[0], page

    def build_outbox(self, rank: int) -> GrantOutbox:
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
