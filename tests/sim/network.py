"""Hosts, the links between them, and TCP connections as processes see them (`kernel`).

A cut link loses nothing: what was sent waits and goes on when the link is back, or until a side gives up. A host that
loses power is silent; one that is up again answers with a reset. When a process ends its host closes its connections.
Bytes come in order, in pieces of any size, after a time that is drawn for each piece.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from .kernel import Process, SimLoop, current

WINDOW_BYTES = 1 << 20  # on its way, before a sender has to wait
CONNECT_S = 127.0
_KEEPALIVE_S = 10.0


class Host:
    """A machine on the network."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address, self.up = name, address, True
        self.listeners: dict[int, Server] = {}
        self.sockets: dict[Socket, None] = {}  # in order, so that a seed repeats a run
        self.next_port = 40000


class Socket:
    """One end of a connection, as a process has it: `reader` is told when something has come."""

    def __init__(self, network: Network, process: Process, host: Host, port: int) -> None:
        self.network, self.process, self.host, self.port = network, process, host, port
        self.peer: Socket | None = None
        self.inbox = bytearray()
        self.ended = False  # the other end sends no more
        self.failure: OSError | None = None
        self.closed = False
        self.under_way: deque[tuple[bytes | None, float]] = deque()  # None: no more comes after this
        self.unseen = 0  # bytes that the other end has not
        self.quiet_since = 0.0
        self.user_timeout_s = 0.0
        self.timeout_s: float | None = None
        self.watching = False
        self.sending = False
        self.waiting: list[Callable[[], None]] = []
        self.reader: Callable[[], None] | None = None
        host.sockets[self] = None
        process.on_kill.append(self.close)

    # ---- for the transport and for threads -------------------------------------------------------------

    def transmit(self, data: bytes | None) -> None:
        """Send; None: nothing comes after this."""
        if self.closed or self.peer is None:
            return
        now = self.network.loop.now
        if not self.under_way:
            self.quiet_since = now
        pieces: list[bytes | None] = [data]
        if data and len(data) > 1 and self.network.rng.random() < 0.1:
            cut = self.network.rng.randrange(1, len(data))
            pieces = [data[:cut], data[cut:]]
        self.unseen += len(data or b"")
        for piece in pieces:
            self.under_way.append((piece, now))
        self.network.carry(self)

    def told(self) -> None:
        """Something has come, or there is room: whoever waits is called."""
        waiting, self.waiting = self.waiting, []
        for go_on in waiting:
            go_on()
        if self.reader is not None and self.process.alive:
            self.process.soon(self._read)

    def _read(self) -> None:
        if self.reader is not None:
            self.reader()

    def fail(self, number: int) -> None:
        """The connection is lost."""
        if not self.failure and not self.closed:
            self.failure = OSError(number, os.strerror(number))
            self.under_way.clear()
            self.told()

    def close(self, *, reset: bool = False) -> None:
        """No more of it here. reset: what is on its way is lost."""
        if self.closed:
            return
        reset = reset or bool(self.inbox)
        if reset:
            self.under_way.clear()
        else:
            self.transmit(None)
        self.closed = True
        self.host.sockets.pop(self, None)
        peer = self.peer
        if peer is not None and reset:
            self.network.reset(self, peer)
        if not self.under_way and self in self.network.open:
            self.network.open.pop(self, None)

    # ---- as socket.socket ------------------------------------------------------------------------------

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
            self.user_timeout_s = value / 1000
        elif (level, option) == (socket.SOL_SOCKET, socket.SO_KEEPALIVE) and value and not self.watching:
            self.watching = True
            self.network.watch(self)

    def getsockname(self) -> tuple[str, int]:
        return self.host.address, self.port

    def getpeername(self) -> tuple[str, int]:
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self.peer.host.address, self.peer.port

    def settimeout(self, seconds: float | None) -> None:
        self.timeout_s = seconds

    def _wait(self, timeout_s: float | None) -> bool:
        return self.network.loop.block(self.waiting.append, timeout_s)

    def readable(self, timeout_s: float | None) -> bool:
        """From a thread: whether something is there, or the end is, within that time."""
        deadline = None if timeout_s is None else self.network.loop.now + timeout_s
        while not (self.inbox or self.ended or self.failure or self.closed):
            left = None if deadline is None else deadline - self.network.loop.now
            if (left is not None and left <= 0) or not self._wait(left):
                return bool(self.inbox or self.ended or self.failure or self.closed)
        return True

    def recv(self, count: int, flags: int = 0) -> bytes:
        if not self.readable(self.timeout_s):
            raise TimeoutError("timed out")
        if self.failure is not None:
            raise self.failure
        if self.closed:
            return b""
        found = bytes(self.inbox[:count])
        if not flags & socket.MSG_PEEK:
            del self.inbox[:count]
        return found

    def recv_into(self, view: memoryview, count: int = 0, flags: int = 0) -> int:
        found = self.recv(count or len(view), flags)
        view[: len(found)] = found
        return len(found)

    def sendall(self, data: bytes | memoryview, flags: int = 0) -> None:
        if self.closed or (self.failure is None and self.peer is None):
            raise OSError(errno.EBADF, "closed")
        if self.failure is None:
            self.transmit(bytes(data))
        deadline = None if self.timeout_s is None else self.network.loop.now + self.timeout_s
        while self.unseen > WINDOW_BYTES and self.failure is None and not self.closed:
            left = None if deadline is None else deadline - self.network.loop.now
            if (left is not None and left <= 0) or not self._wait(left):
                raise TimeoutError("timed out")
        if self.failure is not None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe") from self.failure

    def shutdown(self, how: int) -> None:
        if not self.closed:
            self.transmit(None)
            self.ended = True
            self.told()

    def setblocking(self, flag: bool) -> None: ...

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Server:
    """As asyncio's: what `start_server` gives."""

    def __init__(self, host: Host, port: int, process: Process, factory: Callable[[], Any]) -> None:
        self.host, self.port, self.process, self.factory = host, port, process, factory
        self.sockets = [self]
        process.on_kill.append(self.close)

    def getsockname(self) -> tuple[str, int]:
        return self.host.address, self.port

    def close(self) -> None:
        if self.host.listeners.get(self.port) is self:
            del self.host.listeners[self.port]

    def is_serving(self) -> bool:
        return self.host.listeners.get(self.port) is self

    async def wait_closed(self) -> None: ...

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Transport(asyncio.Transport):
    """Between a socket and an asyncio protocol."""

    def __init__(self, sock: Socket, protocol: Any) -> None:
        super().__init__({"socket": sock, "peername": sock.getpeername(), "sockname": sock.getsockname()})
        self.sock, self._protocol = sock, protocol
        self._closing = self._paused = self._told_end = False
        self._over = False
        sock.process.soon(protocol.connection_made, self)
        sock.reader = self._look
        sock.process.soon(self._look)

    def _look(self) -> None:
        if self._over or self.sock.reader is None:
            return
        if self.sock.failure is not None:
            self._lost(self.sock.failure)
            return
        if self._paused or self._closing:
            return
        if self.sock.inbox:
            data = bytes(self.sock.inbox)
            self.sock.inbox.clear()
            self._protocol.data_received(data)
        if self.sock.ended and not self._told_end and not self.sock.inbox:
            self._told_end = True
            if not self._protocol.eof_received():
                self.close()

    def _lost(self, failure: Exception | None) -> None:
        if not self._over:
            self._over = self._closing = True
            self.sock.close()
            self._protocol.connection_lost(failure)

    def detach(self) -> Socket:
        """The socket; nothing is told of it here any more."""
        self.sock.reader = None
        self._over = self._closing = True
        self.sock.process.soon(self._protocol.connection_lost, None)
        return self.sock

    # ---- as asyncio's ----------------------------------------------------------------------------------

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: Any) -> None:
        if not self._over and not self._closing:
            self.sock.transmit(bytes(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.sock.transmit(None)

    def get_write_buffer_size(self) -> int:
        return max(0, self.sock.unseen - WINDOW_BYTES)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self.sock.process.soon(self._look)

    def is_reading(self) -> bool:
        return not self._paused

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.sock.process.soon(self._lost, None)

    def abort(self) -> None:
        if not self._over:
            self._closing = True
            self.sock.close(reset=True)
            self.sock.process.soon(self._lost, None)


class Network:
    """All hosts, and which of them hear each other."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop, self.rng = loop, loop.rng
        self.hosts: dict[str, Host] = {}
        self.deaf: set[tuple[str, str]] = set()  # (from, to): nothing passes
        self.slow_s: dict[str, float] = {}  # by host: so much later
        self.open: dict[Socket, None] = {}
        self.unknown: set[str] = set()  # names that nobody resolves now
        self._nobody = contextvars.Context()
        loop.network = self

    def at(self, when: float, call: Callable[..., object], *args: Any) -> None:
        """The network does something then, whoever has died meanwhile."""
        self.loop.call_at(when, call, *args, context=self._nobody)

    def soon(self, a: Host, b: Host, call: Callable[..., object], *args: Any) -> None:
        """The same after the time that a packet takes."""
        self.at(self.loop.now + self._takes_s(a, b), call, *args)

    def add(self, name: str) -> Host:
        """A new host."""
        count = len(self.hosts) + 1
        host = self.hosts[name] = Host(name, f"10.0.{count // 250}.{count % 250}")
        return host

    def here(self) -> Host:
        """The host at work."""
        return self.hosts[current().host]

    def find(self, name: str) -> Host | None:
        """By name or address."""
        if name in ("127.0.0.1", "localhost", "::1"):
            return self.here()
        found = self.hosts.get(name)
        return found or next((h for h in self.hosts.values() if h.address == name), None)

    def addresses(self, name: str, port: Any) -> list[Any]:
        """As getaddrinfo. Raises OSError."""
        host = self.find(name) if name not in self.unknown else None
        if host is None:
            raise socket.gaierror(socket.EAI_NONAME, f"{name} is not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host.address, port or 0))]

    # ---- links -----------------------------------------------------------------------------------------

    def hears(self, a: Host, b: Host) -> bool:
        """Whether what a sends arrives at b now."""
        return a.up and b.up and (a is b or (a.name, b.name) not in self.deaf)

    def cut(self, a: str, b: str, *, both: bool = True) -> None:
        """Nothing passes from a to b; both: nor back."""
        self.deaf.add((a, b))
        if both:
            self.deaf.add((b, a))

    def mend(self, a: str, b: str) -> None:
        """This link is there again, both ways."""
        self.deaf -= {(a, b), (b, a)}
        for sock in list(self.open):
            self.carry(sock)

    def heal(self) -> None:
        """All links are there again."""
        self.deaf.clear()
        for sock in list(self.open):
            self.carry(sock)

    def _takes_s(self, a: Host, b: Host) -> float:
        if a is b:
            return self.rng.uniform(0.00002, 0.0002)
        base = self.rng.uniform(0.0001, 0.001) if self.rng.random() < 0.9 else self.rng.uniform(0.001, 0.03)
        return base + self.slow_s.get(a.name, 0.0) + self.slow_s.get(b.name, 0.0)

    def carry(self, sock: Socket) -> None:
        """Bring what a socket has sent to its peer, piece by piece."""
        peer = sock.peer
        if peer is None or sock.sending or not sock.under_way:
            return
        self.open[sock] = None
        if not self.hears(sock.host, peer.host) or not self.hears(peer.host, sock.host):
            self._unanswered(sock)
            return
        sock.sending = True
        self.soon(sock.host, peer.host, self._arrive, sock, peer)

    def _unanswered(self, sock: Socket) -> None:
        """Nobody says that it has come: the sender gives up after its user timeout."""
        if sock.user_timeout_s and not sock.closed and sock.host.up:
            at = sock.quiet_since + sock.user_timeout_s
            if self.loop.now >= at:
                sock.fail(errno.ETIMEDOUT)
                return
            self.at(at, self.carry, sock)

    def _arrive(self, sock: Socket, peer: Socket) -> None:
        sock.sending = False
        if not sock.under_way:
            return
        if not self.hears(sock.host, peer.host):
            self.carry(sock)
            return
        if peer not in peer.host.sockets and not peer.closed:  # that host has been without power meanwhile
            peer.closed = True
        piece, _ = sock.under_way.popleft()
        sock.unseen -= len(piece or b"")
        sock.quiet_since = self.loop.now
        if peer.closed:
            if piece is not None:
                self.reset(peer, sock)
        elif not peer.failure:
            if piece is None:
                peer.ended = True
            elif not peer.ended:
                peer.inbox += piece
            peer.told()
        if sock.unseen <= WINDOW_BYTES and sock.waiting:
            sock.told()
        if sock.under_way:
            self.carry(sock)
        else:
            self.open.pop(sock, None)

    def reset(self, source: Socket, target: Socket) -> None:
        """The host of one end says that there is no connection (any more)."""

        def arrive() -> None:
            if self.hears(source.host, target.host):
                target.fail(errno.ECONNRESET)

        self.soon(source.host, target.host, arrive)

    def watch(self, sock: Socket) -> None:
        """Keepalive: notice within some seconds that the other host does not answer."""
        silent_since: list[float] = []

        def look() -> None:
            peer = sock.peer
            if sock.closed or sock.failure or not sock.host.up or peer is None:
                return
            if self.hears(sock.host, peer.host) and self.hears(peer.host, sock.host):
                silent_since.clear()
                if peer not in peer.host.sockets and not peer.closed:
                    sock.fail(errno.ECONNRESET)
            else:
                silent_since.append(self.loop.now)
                if self.loop.now - silent_since[0] >= _KEEPALIVE_S:
                    sock.fail(errno.ETIMEDOUT)
            self.at(self.loop.now + 2.5, look)

        self.at(self.loop.now + 2.5, look)

    def power_off(self, host: Host) -> None:
        """Everything on it is gone, and nobody hears of that."""
        host.up = False
        for sock in list(host.sockets):
            sock.reader, sock.under_way = None, deque()
            self.open.pop(sock, None)
        host.sockets.clear()
        host.listeners.clear()

    def power_on(self, host: Host) -> None:
        """It is there again, empty."""
        host.up = True
        for sock in list(self.open):
            self.carry(sock)

    # ---- connections -----------------------------------------------------------------------------------

    def listen(self, factory: Callable[[], Any], port: int) -> Server:
        """From now on connections to this port of this host are taken. Raises OSError."""
        host = self.here()
        if port in host.listeners:
            raise OSError(errno.EADDRINUSE, "address already in use")
        server = host.listeners[port] = Server(host, port, current(), factory)
        return server

    async def connect(self, factory: Callable[[], Any], name: str, port: int) -> Any:
        """As `loop.create_connection`. Raises OSError."""
        sock = await self._open(name, port)
        protocol = factory()
        transport = Transport(sock, protocol)
        try:
            await asyncio.sleep(0)
        except BaseException:
            transport.abort()
            raise
        return transport, protocol

    async def _open(self, name: str, port: int) -> Socket:
        made: asyncio.Future[Socket] = self.loop.create_future()
        self._dial(current(), name, port, made.set_result, made.set_exception, made.done)
        return await made

    def dial(self, name: str, port: int, timeout_s: float) -> Socket:
        """From a thread. Raises OSError."""
        found: list[Any] = []
        go: list[Callable[[], None]] = []

        def over(result: Any) -> None:
            found.append(result)
            for go_on in go:
                go_on()

        self._dial(current(), name, port, over, over, lambda: bool(found))
        if not found and not self.loop.block(go.append, timeout_s):
            found.append(None)
            raise TimeoutError("timed out")
        if isinstance(found[0], BaseException):
            raise found[0]
        sock: Socket = found[0]
        sock.timeout_s = timeout_s
        return sock

    def _dial(
        self,
        process: Process,
        name: str,
        port: int,
        made: Callable[[Socket], object],
        failed: Callable[[OSError], object],
        gone: Callable[[], bool],
    ) -> None:
        host = self.hosts[process.host]
        target = self.find(name) if name not in self.unknown else None
        if target is None:
            failed(socket.gaierror(socket.EAI_NONAME, f"{name} is not known"))
            return
        host.next_port += 1
        context = process.context.copy()

        def tell(what: Callable[..., object], value: Any) -> None:
            if process.alive and not gone():
                what(value)

        def later(call: Callable[..., object], *args: Any) -> None:
            self.soon(host, target, call, *args)

        def syn() -> None:
            if not self.hears(host, target) or not self.hears(target, host):
                if self.loop.now < began + CONNECT_S and process.alive and not gone():
                    self.at(self.loop.now + 1.0, syn)
                elif not gone():
                    self.loop.call_soon(tell, failed, TimeoutError(errno.ETIMEDOUT, "timed out"), context=context)
                return
            server = target.listeners.get(port)
            if server is None:
                later(refuse)
                return
            far = Socket(self, server.process, target, port)
            near = Socket(self, process, host, host.next_port)
            far.peer, near.peer = near, far
            server.process.soon(accept, server, far)
            later(established, near)

        def accept(server: Server, far: Socket) -> None:
            if server.is_serving():
                Transport(far, server.factory())
            else:
                far.close(reset=True)

        def refuse() -> None:
            error = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            self.loop.call_soon(tell, failed, error, context=context)

        def established(near: Socket) -> None:
            if gone() or not process.alive:
                near.close()
            else:
                self.loop.call_soon(tell, made, near, context=context)

        began = self.loop.now
        later(syn)
