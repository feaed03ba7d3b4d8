"""An authenticated connection: `Link` for asyncio, `BlockingLink` for threads and command-line tools."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
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
    bare,
    length_of,
    read_bare,
    read_exact,
)
from gemini_hpc.wire.handshake import Client, Greeting, HandshakeError, OtherView, Session
from gemini_hpc.wire.message import Message

HANDSHAKE_TIMEOUT_S = 5.0
SEND_BUFFER_BYTES = 32 << 20
WAKE_BYTES = 512 << 10
M = TypeVar("M", bound=Message)
P = ParamSpec("P")
R = TypeVar("R")
_MUNGE_THREADS = 4
_SILENT_S = 0.2


@cache
def _munge_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MUNGE_THREADS, "gemini-munge")


async def _beside(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run what asks MUNGE in threads of its own: a munged that hangs must hold up handshakes only, and never the
    digests and pulls that share asyncio's threads."""
    return await asyncio.get_running_loop().run_in_executor(_munge_threads(), partial(call, *args, **kwargs))


class LinkClosed(Exception):
    """The other end has gone, or what it sent was not authentic or not understood."""


class Link:
    """A connection between two authenticated ends on the event loop; `last_heard` is in monotonic seconds.

    `limit_bytes`: the longest frame that is taken; lower it where the other end has nothing long to say.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session) -> None:
        self._reader, self._writer = reader, writer
        self._out, self._in = Sealer(session.send_key), Sealer(session.receive_key)
        self.session = session
        self.last_heard = clock.monotonic()
        self.limit_bytes = MAX_FRAME_BYTES
        self._finished = False

    def send(self, message: Message) -> None:
        """Queue a message; a peer that does not drain its side is cut off, never waited for."""
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
        """The next message. Raises `LinkClosed`."""
        try:
            head = await self._reader.readexactly(LENGTH_BYTES)
            body = await self._reader.readexactly(length_of(head, self.limit_bytes))
            message = protocol.decoder.decode(self._in.open(body))
        except (OSError, EOFError, FrameError, msgspec.MsgspecError) as exc:
            self.close()
            raise LinkClosed(str(exc)) from None
        self.last_heard = clock.monotonic()
        return message

    @property
    def address(self) -> str:
        """Where the other end's packets come from; "" where that is not known."""
        return str((self._writer.transport.get_extra_info("peername") or ("",))[0])

    def fail_after(self, silent_s: float) -> None:
        """Close when what was sent has not been acknowledged by the other host for so long (else: quarter hours)."""
        sock = self._writer.transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))

    async def flush(self, message: Message) -> None:
        """Send a message and wait (bounded) until it has left."""
        self.send(message)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            while self._writer.transport.get_write_buffer_size():
                await asyncio.sleep(0.001)

    def finish(self, message: Message) -> None:
        """Send a last message and end this direction of the connection; `receive` goes on.

        A close would let bytes that are still on their way here reset the connection, and the other end might never
        read the message. That it has read it is known once `is_read`.
        """
        self.send(message)
        if not self.closed:
            self._finished = True
            self._writer.write_eof()

    @property
    def is_read(self) -> bool:
        """Return whether the other end has closed in order, after the last message."""
        return self._finished and self._reader.exception() is None and self._reader.at_eof()

    async def hand_over(self, message: Message) -> socket.socket:
        """Send a last message, then give the connection away as a blocking socket for raw bytes."""
        return (await self.block(message)).sock

    async def block(self, message: Message | None = None) -> BlockingLink:
        """Send a last message, then go on with this connection as a link for a thread. The other end must have said
        nothing that has not been received."""
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # what comes in answer to the message is for the thread
        if message is not None:
            await self.flush(message)
        plain = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self.abort()
        plain.setblocking(True)
        return BlockingLink(plain, self.session, self._out, self._in)

    @property
    def closed(self) -> bool:
        """True once either side has closed, or this one has said its last."""
        return self._finished or self._writer.transport.is_closing()

    def close(self) -> None:
        """Close at once; what is queued may be lost."""
        self._writer.close()

    def abort(self) -> None:
        """Drop the connection without waiting for what is queued."""
        self._writer.transport.abort()


async def _read_bare(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(LENGTH_BYTES)
    return await reader.readexactly(length_of(head, handshake.MAX_HELLO_BYTES))


async def connect(
    address: str,
    port: int,
    client: Client,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
    opened: asyncio.Event | None = None,
) -> Link:
    """Dial and authenticate; `opened` is set when there is a connection. Raises OSError, TimeoutError or
    `HandshakeError`."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(await hostname.dialled_beside(address), port)
        if opened is not None:
            opened.set()
        try:
            sock = writer.transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = await _beside(client.greeting, endpoint.dialled(sock))
            writer.write(bare(greeting))
            reply = await _read_bare(reader)
            session = await _beside(client.finish, reply)
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
    client: Callable[[], Client],
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
    *,
    wordy: bool = False,
) -> tuple[Link, int]:
    """Dial these ports of a host in order; the first link that is made, and its port.

    Ports follow from the job's id, so anybody on that host can listen on one, and say nothing: the next port is
    tried when this one has been open for `_SILENT_S`. Raises what the last port did: OSError, `HandshakeError`; at
    once `OtherView`; or TimeoutError where no connection could be made, or none spoke, within `timeout_s`. wordy: who
    says why not counts for more than a port behind it where nobody is. (Others' agents refuse, too: to know whether
    one lives, the last port counts.)
    """
    attempts: dict[asyncio.Task[Link], int] = {}
    failure: Exception = OSError("no port")
    try:
        async with asyncio.timeout(timeout_s):
            for port in [*ports, None]:
                newest: asyncio.Task[Link] | None = None
                opened = asyncio.Event()
                if port is not None:
                    newest = asyncio.ensure_future(connect(address, port, client(), 2 * timeout_s, opened))
                    attempts[newest] = port
                silent = asyncio.ensure_future(_silent(opened))
                try:
                    while attempts:
                        done, _ = await asyncio.wait({*attempts, silent}, return_when=asyncio.FIRST_COMPLETED)
                        for task in [t for t in attempts if t in done]:
                            port_of = attempts.pop(task)
                            try:
                                return task.result(), port_of
                            except OtherView:  # the right one has answered
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


async def _silent(opened: asyncio.Event) -> None:
    await opened.wait()
    await asyncio.sleep(_SILENT_S)


def _discard(task: asyncio.Task[Link]) -> None:
    """Two were made at the same moment: one is enough."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()


async def accept(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    admit: Callable[[Greeting], str | Awaitable[str]],
    *,
    host: str,
    restart: Callable[[], int],
    instance: str,
    lost: Callable[[], tuple[str, ...]] = tuple,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> Link:
    """Authenticate a caller. `admit` returns "" or the reason for turning it away. Raises `HandshakeError`."""
    try:
        async with asyncio.timeout(timeout_s):
            sock = writer.transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            here = endpoint.listening(sock)
            greeting = await _beside(handshake.receive, await _read_bare(reader))
            hello = greeting.hello
            said = admit(greeting) if greeting.proto else version.mismatch(hello.least, hello.most)
            reason = said if isinstance(said, str) else await said
            reason = reason or endpoint.mismatch(hello.dialled, here)
            if reason:
                writer.write(bare(handshake.refusal(reason)))
                await writer.drain()
                raise HandshakeError(reason)
            answer = partial(handshake.answer, restart=restart(), lost=lost())
            reply, session = await _beside(answer, greeting, host=host, instance=instance, listening=here)
            writer.write(bare(reply))
            return Link(reader, writer, session)
    except (OSError, EOFError, FrameError, TimeoutError) as exc:
        writer.close()
        raise HandshakeError(str(exc) or type(exc).__name__) from None
    except HandshakeError:
        writer.close()
        raise


class BlockingLink:
    """The same for plain sockets; used by pulls and pushes (raw bytes follow a frame) and by command-line tools."""

    def __init__(
        self, sock: socket.socket, session: Session, out: Sealer | None = None, into: Sealer | None = None
    ) -> None:
        """out, into: those of a link that goes on here; default new ones."""
        self.sock, self.session = sock, session
        self._out, self._in = out or Sealer(session.send_key), into or Sealer(session.receive_key)

    @classmethod
    def connect(cls, address: str, port: int, client: Client, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> BlockingLink:
        """Dial and authenticate. Raises OSError or `HandshakeError`."""
        sock = socket.create_connection((hostname.dialled(address), port), timeout=timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(bare(client.greeting(endpoint.dialled(sock))))
            return cls(sock, client.finish(read_bare(sock, handshake.MAX_HELLO_BYTES)))
        except FrameError as exc:
            sock.close()
            raise HandshakeError(str(exc)) from None
        except BaseException:
            sock.close()
            raise

    def send(self, message: Message, *, more: bool = False) -> None:
        """Send one message; OSError on time-out or a closed connection. more: bytes follow at once, and take it along
        in their packet."""
        self.sock.sendall(self._out.seal(protocol.encode(message)), socket.MSG_MORE if more else 0)

    def send_file(self, fd: int, offset: int, length: int) -> None:
        """Send raw bytes of a file, without a copy of them in this process; of a `bound` link. They must not change
        before the other end has them. OSError on time-out, a closed connection or a file that ends too early."""
        end = offset + length
        while offset < end:
            n = os.sendfile(self.sock.fileno(), fd, offset, end - offset)
            if n == 0:
                raise OSError("the file ends too early")
            offset += n

    def fill(
        self, view: memoryview, silent_s: float, take: Callable[[memoryview], object] = lambda part: None
    ) -> None:
        """Receive raw bytes, exactly as many as fit; `take` gets them in order, while the processor's cache has them.
        The thread is woken for many of them at a time, or when fewer have waited for `silent_s`. Raises LinkClosed
        where they do not come, also when nothing does for so long (up to twice as long behind such few)."""
        at, size, awaited = 0, len(view), 1
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        try:
            while at < size:
                # never more than is to come; and a receive that blocks would wait for so much beyond what it has
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
                    take(part)
                at += n
        except OSError as exc:
            raise LinkClosed(str(exc)) from None
        finally:
            if awaited != 1:
                with suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def receive(self, kind: type[M]) -> M:
        """The next message, which must be of `kind`. Raises `LinkClosed`."""
        message = self.take()
        if not isinstance(message, kind):
            raise LinkClosed(f"wanted {kind.__name__}, got {type(message).__name__}")
        return message

    def take(self) -> protocol.AnyMessage:
        """The next message, whatever it is. Raises `LinkClosed`."""
        try:
            body = read_exact(self.sock, length_of(read_exact(self.sock, LENGTH_BYTES)))
            message = protocol.decoder.decode(self._in.open(body))
        except (OSError, FrameError, msgspec.MsgspecError) as exc:
            raise LinkClosed(str(exc)) from None
        return message

    def bound(self, silent_s: float) -> None:
        """Block no longer than that in one call, notice within about the same that the other host is gone, and leave
        the waiting to the kernel (a chunk in one call). The socket is a blocking one from here on."""
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
        """Whether something has come, or the connection has ended, within timeout_s (None: for as long as it
        takes)."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def shut(self) -> None:
        """End the connection, from another thread than the one that uses it."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


Handler = Callable[[Link], Awaitable[None]]
