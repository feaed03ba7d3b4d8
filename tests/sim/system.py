"""What production code asks the system for, where asyncio does not: MUNGE, memory, local sockets, threads.

`install` puts these in their places for the rest of the process, which is therefore one of its own.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import IO, Any

import msgspec
import xxhash

from gemini_hpc import clock
from gemini_hpc.agent import daemon as agent_module
from gemini_hpc.agent import rescue, restart_state
from gemini_hpc.agent.peers import failure_domains
from gemini_hpc.agent.replicas import memory
from gemini_hpc.agent.replicas import store as store_module
from gemini_hpc.agent.replicas.digest_pool import DigestPool
from gemini_hpc.agent.transfer import pull, push_sender, rdma, stripes, threads
from gemini_hpc.client import seal_wait
from gemini_hpc.core.digest import Pieces
from gemini_hpc.node import out_of_memory
from gemini_hpc.wire import link, local, munge
from gemini_hpc.wire.frames import pack_bare, read_bare
from gemini_hpc.wire.handshake import MAX_HELLO_BYTES

from . import kernel
from .kernel import Process, SimLoop, current
from .network import Network, Socket

OWNER, SLURM = 1000, 990
GIB = 1 << 30
STRIPES = 2  # connections of a pair of agents


class World:
    """What all parts of one simulation share."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = SimLoop(seed)
        self.rng = self.loop.rng
        self.wire = random.Random(seed ^ 0xD16E57)
        self.damaged = 0.0  # share of the chunks, behind TCP's back: in a switch's memory, say
        self.network = Network(self.loop)
        self.clock = kernel.Clock(self.loop)
        self.story: list[tuple[float, str]] = []
        self.paths: dict[str, str] = {}  # of this run, and what the story calls them
        self.listeners: dict[str, LocalServer] = {}
        self.locks: dict[tuple[int, int], Process] = {}
        self.handles: dict[tuple[int, int], IO[str]] = {}  # through which a lock is held
        self.uids: dict[str, int] = {}  # of processes, by name; else the owner's
        self.owners: dict[int, int] = {}  # of jobs that are not that owner's
        self.free_bytes: dict[str, int] = {}
        self.domains: dict[str, str] = {}  # what the site's file says of nodes
        self.munged: set[str] = set()  # hosts on which it does not answer
        self.full: set[str] = set()  # hosts on which jobs' directories have no room
        self.packets: dict[int, Packets] = {}
        self.put: Callable[[Any, bytes], None] = lambda file, data: None

    def tell(self, text: str) -> None:
        """A line of the story."""
        for path, name in self.paths.items():
            text = text.replace(path, name)
        self.story.append((self.loop.now, text))


_world: list[World] = []


def world() -> World:
    """The one that has been installed."""
    return _world[0]


def user_of(process: Process) -> int:
    """Who runs it."""
    return world().uids.get(process.name, OWNER) if process.user_id is None else process.user_id


# ---- MUNGE ---------------------------------------------------------------------------------------------


def _encode(payload: bytes, *, for_uid: int) -> bytes:
    if current().host in world().munged:
        raise munge.MungeError("munged does not answer")
    uid = user_of(current())
    return msgspec.msgpack.encode((uid, for_uid, payload))


def _decode(credential: bytes) -> tuple[bytes, int, int]:
    if current().host in world().munged:
        raise munge.MungeError("munged does not answer")
    uid, for_uid, payload = msgspec.msgpack.decode(credential, type=tuple[int, int, bytes])
    if for_uid not in (user_of(current()), -1):
        raise munge.MungeError("Unauthorized credential for client")
    return payload, uid, 0


# ---- connections for threads ---------------------------------------------------------------------------


class BlockingLink(link.BlockingLink):
    """The production one on a simulated socket."""

    sock: Any

    def send_file(self, fd: int, offset: int, length: int) -> None:
        data = bytearray(os.pread(fd, length, offset))
        if world().wire.random() < world().damaged:
            data[world().wire.randrange(len(data))] ^= 1
        self.sock.sendall(data)

    def fill(
        self, view: memoryview, silent_s: float, take: Callable[[memoryview], object] = lambda part: None
    ) -> None:
        at = 0
        while at < len(view):
            if not self.sock.readable(silent_s):
                raise link.LinkClosed(f"silent after {at} of {len(view)} bytes")
            try:
                n = self.sock.recv_into(view[at:])
            except OSError as error:
                raise link.LinkClosed(str(error)) from None
            if n == 0:
                raise link.LinkClosed(f"closed after {at} of {len(view)} bytes")
            take(view[at : at + n])
            at += n

    def limit_silence(self, silent_s: float) -> None:
        self.sock.settimeout(silent_s)
        self.sock.user_timeout_s = silent_s
        self.sock.setsockopt(link.socket.SOL_SOCKET, link.socket.SO_KEEPALIVE, 1)

    def wait(self, timeout_s: float | None) -> bool:
        return bool(self.sock.readable(timeout_s))

    @staticmethod
    def find_ready(links: Sequence[link.BlockingLink], timeout_s: float) -> list[link.BlockingLink]:
        def readable() -> list[link.BlockingLink]:
            return [one for one in links if one.wait(0)]

        def wait(go_on: Callable[[], None]) -> None:
            for one in links:
                one.sock.waiting.append(go_on)  # type: ignore[attr-defined]

        if not (found := readable()) and timeout_s > 0:
            world().loop.block(wait, timeout_s)
            found = readable()
        return found

    def shut(self) -> None:
        self.sock.shutdown(link.socket.SHUT_RDWR)


async def _block(me: link.Link, message: Any = None) -> link.BlockingLink:
    transport: Any = me._writer.transport
    transport.pause_reading()
    if message is not None:
        await me.flush(message)
    sock: Socket = transport.detach()
    sock.timeout_s = None
    return BlockingLink(sock, me.session, me._out, me._in)  # type: ignore[arg-type]


def _connect(address: str, port: int, client: Any, timeout_s: float = link.HANDSHAKE_TIMEOUT_S) -> link.BlockingLink:
    sock: Any = world().network.dial(address, port, timeout_s)
    try:
        sock.sendall(pack_bare(client.build_greeting(link.endpoint.read_remote(sock))))
        return BlockingLink(sock, client.finish(read_bare(sock, MAX_HELLO_BYTES)))
    except link.FrameError as error:
        sock.close()
        raise link.HandshakeError(str(error)) from None
    except BaseException:
        sock.close()
        raise


# ---- packets between a rank and its agent --------------------------------------------------------------


class Packets:
    """One end of a pair of SEQPACKET sockets."""

    def __init__(self, process: Process) -> None:
        self.process, self.other = process, self
        self.inbox: deque[bytes] = deque()
        self.fds: deque[list[int]] = deque()  # beside each of these
        self._timeout_s: float | None = None
        self.ended = False
        self._waiting: list[Callable[[], None]] = []
        process.on_kill.append(self.close)

    def recv(self, count: int) -> bytes:
        """The next packet; b"" at the end. Raises TimeoutError."""
        data, fds = self.recv_fds()
        for fd in fds:
            os.close(fd)
        return data

    def recv_fds(self) -> tuple[bytes, list[int]]:
        """The same, and the descriptors beside it."""
        while not self.inbox and not self.ended:
            if not world().loop.block(self._waiting.append, self._timeout_s):
                raise TimeoutError("timed out")
        return (self.inbox.popleft(), self.fds.popleft()) if self.inbox else (b"", [])

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def send(self, data: bytes, flags: int = 0) -> None:
        """One packet. Raises OSError."""
        if self.other.ended or self.ended:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self._bring(data, [])

    def send_fds(self, data: bytes, fds: list[int]) -> None:
        """The same, with descriptors."""
        if self.other.ended or self.ended:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self._bring(data, [os.dup(fd) for fd in fds])

    def _bring(self, data: bytes, fds: list[int]) -> None:
        self.other.inbox.append(bytes(data))
        self.other.fds.append(fds)
        self.other.woken()

    def woken(self) -> None:
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def shutdown(self, how: int) -> None:
        self.close()

    def close(self) -> None:
        """At both ends."""
        for end in (self, self.other):
            end.ended = True
            end.woken()

    def detach(self) -> int:
        """A number by which the other process finds its end."""
        number = (1 << 24) + len(world().packets)
        world().packets[number] = self
        return number


def _send_fds(sock: Packets, parts: list[bytes], fds: list[int]) -> None:
    sock.send_fds(b"".join(parts), fds)


def _pair(*_: Any) -> tuple[Packets, Packets]:
    a, b = Packets(current()), Packets(current())
    a.other, b.other = b, a
    return a, b


# ---- the local socket ----------------------------------------------------------------------------------


class Client:
    """One connection to the local socket, as the agent has it."""

    def __init__(self, process: Process, uid: int, hung_up: Callable[[], None]) -> None:
        self.process, self.pid, self.uid = process, id(process) % 100000, uid
        self.closed = asyncio.Event()
        self._hung_up = hung_up

    def signal(self, number: Any) -> None:
        self.process.kill()

    def is_alive(self) -> bool:
        return self.process.alive

    def drop(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            self._hung_up()


class LocalServer:
    """In place of the agent's: the same four callbacks."""

    def __init__(self, path: str, uid: int, handle: Any, gone: Any, complain: Any) -> None:
        self.path, self.uid, self._handle, self._gone, self._complain = path, uid, handle, gone, complain
        self.process = current()
        self.connections: list[Connection] = []
        world().listeners[path] = self
        self.process.on_kill.append(self._killed)

    def _killed(self) -> None:
        self.close()

    def close(self) -> None:
        """No more connections; those that there are end."""
        if world().listeners.get(self.path) is self:
            del world().listeners[self.path]
        for connection in list(self.connections):
            connection.lost()

    def drop(self, wanted: Callable[[Any], bool]) -> None:
        for connection in list(self.connections):
            if wanted(connection.client):
                connection.client.drop()

    async def serve(self, connection: Connection, packet: bytes, fds: list[int]) -> None:
        """One request."""
        client = connection.client
        if client.closed.is_set():
            return
        try:
            request = local.request_decoder.decode(packet)
        except msgspec.MsgspecError as error:
            connection.replied(local.Error(f"cannot decode the message: {error}"), [])
            return
        try:
            reply, out = await self._handle(client, request, fds)
        except Exception as error:
            self._complain(f"{type(request).__name__} failed: {error!r}")
            world().tell(f"FAILED {self.process}: {type(request).__name__}: {error!r}")
            reply, out = local.Error(f"the agent could not serve this {type(request).__name__}"), []
        connection.replied(reply, out)

    def hung_up(self, connection: Connection) -> None:
        """It has ended, whoever ended it."""
        if connection in self.connections:
            self.connections.remove(connection)
            connection.client.closed.set()
            self._gone(connection.client)


class Connection:
    """A process's connection to an agent, for one of its threads. Raises ConnectionError where there is no agent."""

    def __init__(self, path: str) -> None:
        self._process = current()
        server = world().listeners.get(path)
        if server is None:
            raise ConnectionError(f"no agent at {path}")
        self._server, self.over = server, False
        self.client = Client(self._process, user_of(self._process), self._dropped)
        self._answer: tuple[local.Reply, list[int]] | None = None
        self._go_on: Callable[[], None] | None = None
        server.connections.append(self)
        self._process.on_kill.append(self.close)

    def _wake(self) -> None:
        go_on, self._go_on = self._go_on, None
        if go_on is not None and self._process.alive:
            go_on()

    def lost(self) -> None:
        """The agent has gone, or has hung up."""
        self.over = True
        self._wake()

    def _dropped(self) -> None:
        self.lost()
        self._server.process.soon(self._server.hung_up, self)

    def close(self) -> None:
        """Hang up."""
        if not self.over:
            self.over = True
            self._server.process.soon(self._server.hung_up, self)

    def replied(self, reply: local.Message, fds: list[int]) -> None:
        """By the agent."""
        if self.over:
            _close(fds)
            return
        self._answer = local.reply_decoder.decode(local.encode(reply)), fds
        self._wake()

    def ask(
        self, request: local.Message, fds: list[int] | None = None, timeout_s: float = 120.0
    ) -> tuple[local.Reply, list[int]]:
        """One request and its answer. Raises ConnectionError, TimeoutError."""
        if self.over or not self._server.process.alive:
            raise ConnectionError("the agent has gone")
        self._answer = None
        server, loop = self._server, world().loop
        copies = [os.dup(fd) for fd in fds or ()]

        def arrive() -> None:
            task = server.process.spawn(server.serve(self, local.encode(request), copies))
            assert task is not None

        loop.call_at(loop.now + loop.rng.uniform(0.00002, 0.0005), arrive, context=server.process.context.copy())

        def wait(go_on: Callable[[], None]) -> None:
            self._go_on = go_on

        in_time = loop.block(wait, timeout_s)
        if self._answer is not None:
            return self._answer
        if not in_time:
            self.close()
            raise TimeoutError("the agent does not answer")
        raise ConnectionError("the agent has gone")


def _close(fds: list[int]) -> None:
    for fd in fds:
        if fd >= 1 << 24:
            world().packets[fd].close()
        else:
            os.close(fd)


# ---- the rest ------------------------------------------------------------------------------------------


class _Room:
    """No cgroup."""

    path = ""

    def __init__(self, settings: Any) -> None:
        pass

    def read_share_bytes(self) -> int | None:
        return None

    def count_free_bytes(self) -> tuple[int, str] | None:
        return None


def _meminfo() -> dict[str, int]:
    return {"MemTotal": 64 * GIB, "MemAvailable": world().free_bytes.get(current().host, 32 * GIB)}


def flock(file: int | IO[str], operation: int) -> None:
    """A lock ends with its process, or when the file is closed."""
    info = os.fstat(file if isinstance(file, int) else file.fileno())
    key, holder = (info.st_dev, info.st_ino), world().locks.get((info.st_dev, info.st_ino))
    handle = world().handles.get(key)
    free = holder is None or not holder.alive or (handle is not None and handle.closed)
    if not free and holder is not current():
        raise BlockingIOError(errno.EAGAIN, "locked")
    world().locks[key] = current()
    if not isinstance(file, int):
        world().handles[key] = file


class OwnDirectory:
    """In place of the agent's: nobody unmounts anything here."""

    def __init__(self, path: str, uid: int) -> None:
        self._path = path

    def lock_directory(self) -> bool:
        held = os.open(self._path, os.O_RDONLY)
        try:
            flock(held, 0)
        except BlockingIOError:
            return False
        return True

    def check_directory(self) -> str:
        return "here"


class Pool(DigestPool):
    """A pool in place of the agent's: a thread of the simulation for each reading."""

    def hash(
        self, memory: Any, pieces: Pieces, first: int, last: int, start: int = 0, *, urgency: Any
    ) -> kernel.Joined:
        over, loop, view = kernel.Joined(), current().loop, memory.view()

        def work() -> None:
            for number, begin, end in pieces.enumerate_bounds(first, last):
                pieces.put(number, xxhash.xxh3_128_digest(view[start + begin : start + end]))
            view.release()
            if over.set_running_or_notify_cancel():
                over.set_result(pieces.compute_digest())

        loop.thread(current(), work, loop.rng.uniform(0.0, 0.002))
        return over

    def close(self) -> None: ...


def _put(file: Any, data: bytes) -> None:
    if current().host in world().full:
        raise OSError(errno.ENOSPC, "No space left on device")
    world().put(file, data)


def install(made: World) -> None:
    """For the rest of this process."""
    _world[:] = [made]
    clock.use(made.clock)
    asyncio.set_event_loop(made.loop)
    asyncio.run_coroutine_threadsafe = kernel.run_coroutine_threadsafe  # type: ignore[assignment]
    os.urandom = made.rng.randbytes  # type: ignore[assignment]
    munge.encode, munge.decode = _encode, _decode
    link.Link.block = _block  # type: ignore[method-assign]
    link.BlockingLink.connect = staticmethod(_connect)  # type: ignore[assignment, method-assign]
    agent_module.LocalServer = LocalServer  # type: ignore[assignment, misc]
    agent_module.OwnDirectory = OwnDirectory  # type: ignore[assignment, misc]
    shim: Any = SimpleNamespace(Thread=kernel.Thread, Lock=threading.Lock, Condition=kernel.Condition)
    threads.threading = push_sender.threading = stripes.threading = pull.threading = shim
    rdma.threading = shim
    threads.priority = SimpleNamespace(lower=lambda: None)  # type: ignore[assignment]
    stripes.count_connections = lambda: STRIPES
    packets: Any = SimpleNamespace(**{**vars(push_sender.socket), "socketpair": _pair})
    push_sender.socket = packets
    rescue.socket = SimpleNamespace(**{**vars(packets), "send_fds": _send_fds})  # type: ignore[assignment]
    memory.read_meminfo = _meminfo
    store_module.DigestPool = Pool  # type: ignore[misc]
    # tests beside this one may make the kernel of this machine kill
    out_of_memory._read_kills = lambda path: 0
    failure_domains.read = lambda setting: dict(world().domains)  # type: ignore[assignment]
    seal_wait._POLL_S = 0.002  # a look costs as much as a message here
    made.put = restart_state.StateFile._put
    restart_state.StateFile._put = _put  # type: ignore[method-assign, assignment]
    memory.cgroup = SimpleNamespace(Room=_Room, compute_cap_bytes=memory.cgroup.compute_cap_bytes)  # type: ignore[assignment]


def story(made: World) -> str:
    """As text."""
    return "\n".join(f"{t - 1000:10.4f} {text}" for t, text in made.story)


def shown(message: Any) -> str:
    """A message in a line."""
    return json.dumps(msgspec.to_builtins(message), default=str)[:300]
