"""Authenticated connections: `Link` for asyncio, `BlockingLink` for threads and command-line tools."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import ParamSpec, TypeVar

import msgspec

from gemini_hpc import clock
from gemini_hpc.wire import endpoint, handshake, hostname, protocol, version
from gemini_hpc.wire.frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    FrameError,
    Sealer,
    pack_bare,
    parse_length,
    read_bare,
    read_exact,
)
from gemini_hpc.wire.handshake import Greeting, HandshakeClient, HandshakeError, LinkSession, OtherView
from gemini_hpc.wire.message import Message

HANDSHAKE_TIMEOUT_S = 5.0  # one round trip, and munged may be busy
SEND_BUFFER_BYTES = 32 << 20
WAKE_BYTES = 512 << 10
M = TypeVar("M", bound=Message)
P = ParamSpec("P")
R = TypeVar("R")
_MUNGE_THREADS = 4
_SILENT_S = 0.2  # a port that answers does so within milliseconds


@cache
def _get_munge_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MUNGE_THREADS, "gemini-munge")


async def _run_in_pool(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a call that needs MUNGE in a thread pool of its own.

    A munged that hangs then delays handshakes only, never the digests and pulls that share asyncio's threads.
    """
    return await asyncio.get_running_loop().run_in_executor(_get_munge_threads(), partial(call, *args, **kwargs))


class LinkClosed(Exception):
    """An exception: the other end has closed, or sent data that was not authentic or not understood."""


class Link:
    """A connection between two authenticated ends on the event loop.

    Attributes:
        last_heard: Time of the last received message, in monotonic seconds.
        limit_bytes: Longest frame that is accepted; lower it if the other end only sends short messages.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: LinkSession) -> None:
        self._reader, self._writer = reader, writer
        self._out, self._in = Sealer(session.send_key), Sealer(session.receive_key)
        self.session = session
        self.last_heard = clock.monotonic()
        self.limit_bytes = MAX_FRAME_BYTES
        self._finished = False

    def send(self, message: Message) -> None:
        """Queue a message. A peer that does not drain its side is cut off, never waited for."""
        transport = self._writer.transport
        if self.closed:
            return
        try:
            self._writer.write(self._out.seal(protocol.encode(message)))
        except FrameError:
            self.close()
            raise
        if transport.get_write_buffer_size() > SEND_BUFFER_BYTES:
            transport.abort()

    async def receive(self) -> protocol.AnyMessage:
        """Return the next message.

        Raises:
            LinkClosed: The connection ended, or the frame is not authentic or not understood.
        """
        try:
            head = await self._reader.readexactly(LENGTH_BYTES)
            body = await self._reader.readexactly(parse_length(head, self.limit_bytes))
            message = protocol.decoder.decode(self._in.open(body))
        except (OSError, EOFError, FrameError, msgspec.MsgspecError) as exc:
            self.close()
            raise LinkClosed(str(exc)) from None
        self.last_heard = clock.monotonic()
        return message

    @property
    def address(self) -> str:
        """Return the source address of the other end's packets, or "" if unknown."""
        return str((self._writer.transport.get_extra_info("peername") or ("",))[0])

    def fail_after(self, silent_s: float) -> None:
        """Close the link if the other host acknowledges no data for this long.

        Without this limit the kernel waits a quarter of an hour or longer.

        Args:
            silent_s: Limit in seconds.
        """
        sock = self._writer.transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))

    async def flush(self, message: Message) -> None:
        """Send a message and wait, with a time limit, until it has left."""
        self.send(message)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            while self._writer.transport.get_write_buffer_size():
                await asyncio.sleep(0.001)

    def finish(self, message: Message) -> None:
        """Send a last message and end this direction of the connection; `receive` still works.

        After a close, incoming bytes could reset the connection before the other end reads the message. `is_read`
        reports that the other end has read the message.
        """
        self.send(message)
        if not self.closed:
            self._finished = True
            self._writer.write_eof()

    @property
    def is_read(self) -> bool:
        """Return whether the other end has closed in order, after the last message."""
        return self._finished and self._reader.exception() is None and self._reader.at_eof()

    async def block(self, message: Message | None = None) -> BlockingLink:
        """Send a last message, then return this connection as a link for a thread.

        The other end must have sent nothing that has not been received.
        """
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # the answer to the message belongs to the thread
        if message is not None:
            await self.flush(message)
        plain = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self.abort()
        plain.setblocking(True)
        return BlockingLink(plain, self.session, self._out, self._in)

    @property
    def closed(self) -> bool:
        """Return whether either side has closed, or this side has sent its last message."""
        return self._finished or self._writer.transport.is_closing()

    def close(self) -> None:
        """Close at once; queued messages may be lost."""
        self._writer.close()

    def abort(self) -> None:
        """Drop the connection without waiting for queued messages."""
        self._writer.transport.abort()


async def _read_bare(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(LENGTH_BYTES)
    return await reader.readexactly(parse_length(head, handshake.MAX_HELLO_BYTES))


async def connect(
    address: str,
    port: int,
    client: HandshakeClient,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
    opened: asyncio.Event | None = None,
) -> Link:
    """Dial and authenticate.

    Args:
        address: Host name or address.
        port: TCP port.
        client: Calling side of the handshake.
        timeout_s: Limit for connection and handshake, in seconds.
        opened: Event that is set once the connection exists.

    Raises:
        OSError: The connection failed.
        TimeoutError: The limit passed.
        HandshakeError: The handshake failed.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(await hostname.resolve_in_thread(address), port)
        if opened is not None:
            opened.set()
        try:
            sock = writer.transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = await _run_in_pool(client.build_greeting, endpoint.read_remote(sock))
            writer.write(pack_bare(greeting))
            reply = await _read_bare(reader)
            session = await _run_in_pool(client.finish, reply)
            return Link(reader, writer, session)
        except (EOFError, FrameError) as exc:
            writer.close()
            raise HandshakeError(str(exc) or "connection closed") from None
        except BaseException:
            writer.close()
            raise


async def connect_any(
    address: str,
    ports: Iterable[int],
    build_client: Callable[[], HandshakeClient],
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
    *,
    wordy: bool = False,
) -> tuple[Link, int]:
    """Dial these ports of a host in order; return the first link that succeeds, and its port.

    Ports follow from the job's id, so any user on that host can listen on one and stay silent. The next port is
    therefore tried once this one has been open for `_SILENT_S` without an answer. The last port's failure is raised.

    Args:
        address: Host name or address.
        ports: Ports in the order to try.
        build_client: Factory of the calling side of a handshake.
        timeout_s: Limit for all ports together, in seconds.
        wordy: Prefer a refusal with a reason over a later port without a listener. Agents of other jobs refuse as
            well, so to find out whether an agent is alive, leave this off: the last port counts.

    Raises:
        OSError: The last port could not be connected to.
        HandshakeError: The last port's handshake failed.
        OtherView: The right agent answered but has another view; raised at once.
        TimeoutError: No connection succeeded, or no listener spoke, within `timeout_s`.
    """
    attempts: dict[asyncio.Task[Link], int] = {}
    failure: Exception = OSError("no port")
    try:
        async with asyncio.timeout(timeout_s):
            for port in [*ports, None]:
                newest: asyncio.Task[Link] | None = None
                opened = asyncio.Event()
                if port is not None:
                    newest = asyncio.ensure_future(connect(address, port, build_client(), 2 * timeout_s, opened))
                    attempts[newest] = port
                silent = asyncio.ensure_future(_wait_for_silence(opened))
                try:
                    while attempts:
                        done, _ = await asyncio.wait({*attempts, silent}, return_when=asyncio.FIRST_COMPLETED)
                        for task in [t for t in attempts if t in done]:
                            port_of = attempts.pop(task)
                            try:
                                return task.result(), port_of
                            except OtherView:  # the right agent has answered
                                raise
                            except (OSError, HandshakeError) as exc:
                                if not (wordy and isinstance(failure, HandshakeError) and isinstance(exc, OSError)):
                                    failure = exc
                        if newest is not None and (newest in done or silent in done):
                            break
                finally:
                    silent.cancel()
    finally:
        for task in attempts:
            task.cancel()
            task.add_done_callback(_discard)
    raise failure


async def _wait_for_silence(opened: asyncio.Event) -> None:
    await opened.wait()
    await asyncio.sleep(_SILENT_S)


def _discard(task: asyncio.Task[Link]) -> None:
    """Abort a surplus link; two may succeed at the same moment and one is enough."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()


async def accept(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    admit: Callable[[Greeting], str | Awaitable[str]],
    *,
    host: str,
    read_restart: Callable[[], int],
    instance: str,
    list_lost: Callable[[], tuple[str, ...]] = tuple,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> Link:
    """Authenticate a caller.

    Args:
        reader: Stream from the caller.
        writer: Stream to the caller.
        admit: Returns "" or the reason for rejecting the caller.
        host: Name of this host.
        read_restart: Returns the restart count of the job's incarnation here.
        instance: Identity of this process.
        list_lost: Returns the nodes that this agent continues without.
        timeout_s: Limit for the handshake, in seconds.

    Raises:
        HandshakeError: The caller is rejected, or the handshake failed or timed out.
    """
    try:
        async with asyncio.timeout(timeout_s):
            sock = writer.transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own_endpoint = endpoint.read_local(sock)
            greeting = await _run_in_pool(handshake.receive, await _read_bare(reader))
            hello = greeting.hello
            verdict = admit(greeting) if greeting.proto else version.describe_mismatch(hello.least, hello.most)
            reason = verdict if isinstance(verdict, str) else await verdict
            reason = reason or endpoint.find_mismatch(hello.dialled, own_endpoint)
            if reason:
                writer.write(pack_bare(handshake.encode_refusal(reason)))
                await writer.drain()
                raise HandshakeError(reason)
            answer = partial(handshake.answer, restart=read_restart(), lost=list_lost())
            reply, session = await _run_in_pool(
                answer, greeting, host=host, instance=instance, listening=own_endpoint
            )
            writer.write(pack_bare(reply))
            return Link(reader, writer, session)
    except (OSError, EOFError, FrameError, TimeoutError) as exc:
        writer.close()
        raise HandshakeError(str(exc) or type(exc).__name__) from None
    except HandshakeError:
        writer.close()
        raise


class BlockingLink:
    """An authenticated connection on a plain blocking socket.

    Pulls, pushes (raw bytes follow a frame) and command-line tools use it.
    """

    def __init__(
        self, sock: socket.socket, session: LinkSession, out: Sealer | None = None, into: Sealer | None = None
    ) -> None:
        """Create a link on an authenticated socket.

        Args:
            sock: Connected socket.
            session: Result of the handshake.
            out: Sealer of an earlier link that continues here; None: a new one.
            into: Opener of an earlier link that continues here; None: a new one.
        """
        self.sock, self.session = sock, session
        self._out, self._in = out or Sealer(session.send_key), into or Sealer(session.receive_key)

    @classmethod
    def connect(
        cls, address: str, port: int, client: HandshakeClient, timeout_s: float = HANDSHAKE_TIMEOUT_S
    ) -> BlockingLink:
        """Dial and authenticate.

        Raises:
            OSError: The connection failed or timed out.
            HandshakeError: The handshake failed.
        """
        sock = socket.create_connection((hostname.resolve_hostname(address), port), timeout=timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(pack_bare(client.build_greeting(endpoint.read_remote(sock))))
            return cls(sock, client.finish(read_bare(sock, handshake.MAX_HELLO_BYTES)))
        except FrameError as exc:
            sock.close()
            raise HandshakeError(str(exc)) from None
        except BaseException:
            sock.close()
            raise

    def send(self, message: Message, *, more: bool = False) -> None:
        """Send one message.

        Args:
            message: The message.
            more: Raw bytes follow at once and share a packet with the message.

        Raises:
            OSError: The send timed out or the connection is closed.
        """
        self.sock.sendall(self._out.seal(protocol.encode(message)), socket.MSG_MORE if more else 0)

    def send_file(self, fd: int, offset: int, length: int) -> None:
        """Send raw bytes of a file after `limit_silence`, without copying them into this process.

        The bytes must not change before the other end has received them.

        Args:
            fd: Descriptor of the file.
            offset: First byte.
            length: Number of bytes.

        Raises:
            OSError: The send timed out, the connection is closed, or the file ends too early.
        """
        end = offset + length
        while offset < end:
            n = os.sendfile(self.sock.fileno(), fd, offset, end - offset)
            if n == 0:
                raise OSError("the file ends too early")
            offset += n

    def fill(
        self, view: memoryview, silent_s: float, process_part: Callable[[memoryview], object] = lambda part: None
    ) -> None:
        """Receive exactly as many raw bytes as fit into the view.

        The thread wakes up once for many bytes, or once fewer bytes have waited for `silent_s`.

        Args:
            view: Destination of the bytes.
            silent_s: Longest silence in seconds; up to twice as long after such a short remainder.
            process_part: Called with each part in order, while the part is in the processor's cache.

        Raises:
            LinkClosed: The connection ended or was silent for too long.
        """
        at, size, awaited = 0, len(view), 1
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        try:
            while at < size:
                # never wait for more than still follows; a blocking receive would wait for this many bytes on top
                if (wanted := min(WAKE_BYTES, size - at)) != awaited:
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
                    awaited = wanted
                ready = poll.poll(silent_s * 1000)
                try:
                    n = self.sock.recv_into(view[at : at + WAKE_BYTES], 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    if not ready:
                        raise LinkClosed(f"silent after {at} of {size} bytes") from None
                    continue
                if n == 0:
                    raise LinkClosed(f"closed after {at} of {size} bytes")
                with view[at : at + n] as part:
                    process_part(part)
                at += n
        except OSError as exc:
            raise LinkClosed(str(exc)) from None
        finally:
            if awaited != 1:
                with suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def receive(self, kind: type[M]) -> M:
        """Return the next message, which must be of `kind`.

        Raises:
            LinkClosed: The connection ended, or the message is of another kind.
        """
        message = self.receive_any()
        if not isinstance(message, kind):
            raise LinkClosed(f"wanted {kind.__name__}, got {type(message).__name__}")
        return message

    def receive_any(self) -> protocol.AnyMessage:
        """Return the next message of any kind.

        Raises:
            LinkClosed: The connection ended, or the frame is not authentic or not understood.
        """
        try:
            body = read_exact(self.sock, parse_length(read_exact(self.sock, LENGTH_BYTES)))
            message = protocol.decoder.decode(self._in.open(body))
        except (OSError, FrameError, msgspec.MsgspecError) as exc:
            raise LinkClosed(str(exc)) from None
        return message

    def limit_silence(self, silent_s: float) -> None:
        """Limit each call on the socket, and the detection of a dead host, to about `silent_s` seconds.

        The kernel does the waiting, so a whole chunk passes in one call. The socket is blocking from here on.
        """
        self.sock.settimeout(None)
        bound = struct.pack("@ll", int(silent_s), int(silent_s % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self.sock.setsockopt(socket.SOL_SOCKET, option, bound)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_USER_TIMEOUT, int(silent_s * 1000)),
            (socket.TCP_KEEPIDLE, max(1, int(silent_s))),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, 5),
        ):
            self.sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def wait(self, timeout_s: float | None) -> bool:
        """Return whether data arrived or the connection ended within `timeout_s` seconds (None: no limit)."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    @staticmethod
    def find_ready(links: Sequence[BlockingLink], timeout_s: float) -> list[BlockingLink]:
        """Return the links where data arrived, or that ended, within `timeout_s` seconds."""
        poll = select.poll()
        found = {link.sock.fileno(): link for link in links}
        for fd in found:
            poll.register(fd, select.POLLIN)
        return [found[fd] for fd, _ in poll.poll(timeout_s * 1000)]

    def shut(self) -> None:
        """End the connection; safe to call from a thread other than the link's user."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
