"""The connection of one training rank to its node's agent, and its renewal after the agent dies."""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gemini_hpc import clock
from gemini_hpc.client.own_progress import OwnProgress
from gemini_hpc.wire import local
from gemini_hpc.wire.control_page import ControlPage

REQUEST_TIMEOUT_S = 30.0  # for an answer from a living agent on a busy node
WELCOME_TIMEOUT_S = 120.0  # a recovery round waits for every node; pulls of large shards continue after it
CONNECT_TIMEOUT_S = 5.0  # an agent may just be restarting
REJOIN_TIMEOUT_S = 30.0  # a new agent first learns from its peers that its round is live
RECALL_TIMEOUT_S = 5.0  # the cached bytes only save time
FLUSH_TIMEOUT_S = 2.0  # for events that wait; losing them harms nobody
NOT_YET_S = 900.0  # a file system's failover may take this long
EVENTS_KEPT = 256
# a new agent starts within a second; after a minute its node is not likely to get one
RETRY_FAST_S, RETRY_FAST_FOR_S, RETRY_SLOW_S = 0.2, 60.0, 5.0

Reply = tuple[local.Reply, list[int]]
Posted = local.Traffic | local.Timeline | local.CacheBytes | local.OutlineWritten | local.Unfilled
Exchange = Callable[..., Reply]


class AgentLost(ConnectionError):
    """An error: no agent is at the other end now."""


class Unsent(AgentLost):
    """An error: the request has not been sent on any connection."""


class AgentRefused(RuntimeError):
    """An error: the agent answered with a refusal."""


class RefusedForNow(AgentRefused):
    """A refusal of a request that may succeed later."""


class AgentSocket(socket.socket):
    """A socket that reports a closed other end as an error.

    The error comes even if the script has reset SIGPIPE to its default effect, which ends the process.
    """

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send data without raising SIGPIPE."""
        return super().send(data, flags | socket.MSG_NOSIGNAL)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """Send all data without raising SIGPIPE."""
        super().sendall(data, flags | socket.MSG_NOSIGNAL)

    def sendmsg(self, buffers: Any, ancillary: Any = (), flags: int = 0, address: Any = None, /) -> int:
        """Send buffers and ancillary data without raising SIGPIPE."""
        return super().sendmsg(buffers, ancillary, flags | socket.MSG_NOSIGNAL, address)


def ask_once(path: str, message: local.Message, timeout_s: float) -> local.Reply:
    """Send one request on a connection of its own and return the reply.

    Raises:
        AgentLost: No agent answers.
    """
    sock = connect(path, timeout_s)
    try:
        reply, fds = _exchange(sock, message, timeout_s)
        for fd in fds:
            os.close(fd)
        return reply
    finally:
        sock.close()


def ask_verdict(path: str, timeout_s: float = 2.0) -> local.Verdict | None:
    """Return the agent's view of the job's nodes, or None if no agent answers."""
    try:
        reply = ask_once(path, local.VerdictRequest(), timeout_s)
    except AgentLost:
        return None
    return reply if isinstance(reply, local.Verdict) else None


def connect(path: str, timeout_s: float = REQUEST_TIMEOUT_S) -> socket.socket:
    """Connect to the agent that listens at `path`.

    Raises:
        AgentLost: No agent listens there.
    """
    sock = AgentSocket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise AgentLost(f"no agent at {path}: {error.strerror or error}") from None
    return sock


def _exchange(sock: socket.socket, message: local.Message, timeout_s: float, fds: Sequence[int] = ()) -> Reply:
    _send(sock, message, timeout_s, fds)
    return _receive(sock)


def _send(sock: socket.socket, message: local.Message, timeout_s: float, fds: Sequence[int]) -> None:
    try:
        sock.settimeout(timeout_s)
        socket.send_fds(sock, [local.encode(message)], list(fds))
    except OSError as error:
        raise AgentLost(f"the agent does not answer: {error.strerror or error}") from None


def _receive(sock: socket.socket) -> Reply:
    try:
        data, got, _, _ = socket.recv_fds(sock, local.MAX_PACKET_BYTES, 8)
    except OSError as error:
        raise AgentLost(f"the agent does not answer: {error.strerror or error}") from None
    if not data:
        raise AgentLost("the agent has closed the connection")
    try:
        return local.reply_decoder.decode(data), list(got)
    except msgspec.MsgspecError as error:
        for fd in got:
            os.close(fd)
        raise AgentLost(f"cannot decode the agent's answer: {error}") from None


_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()


def _forget_clients() -> None:
    for client in list(_clients):
        client.forget()


os.register_at_fork(after_in_child=_forget_clients)


class AgentClient:
    """A rank's connection to the agent; any thread may send requests, one at a time.

    A watcher thread notices the agent's death at once: `lost` becomes true and requests raise AgentLost. A request
    that is not answered in time ends the connection, too. The watcher then reconnects in the background without a
    time limit.
    """

    def __init__(
        self,
        path: str,
        rejoin: Callable[[local.Welcome, Exchange], bool],
        on_lost: Callable[[], None],
        say: Callable[[str], None] = lambda note: None,
        progress: OwnProgress | None = None,
    ) -> None:
        """Create a client; `join_training` connects it.

        Args:
            path: Path of the agent's socket.
            rejoin: Called after a reconnect to hand the memory back over the new connection; returns whether to go
                on.
            on_lost: Called when the agent is lost.
            say: Called with lines for the user.
            progress: Page that is sent with each `Hello` and written as long as it exists.
        """
        self._path, self._rejoin, self._on_lost, self._say = path, rejoin, on_lost, say
        self._progress = progress
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._closed = threading.Event()
        self._hello: local.Hello | None = None
        self.first: local.Welcome | None = None  # an agent that comes back must belong to the same round
        self._page: ControlPage | None = None
        self._events: deque[local.Event] = deque(maxlen=EVENTS_KEPT)
        self._resent: local.Message | None = None  # the last event that was queued again
        self._posted: dict[type[Posted], Posted] = {}
        self._events_changed = threading.Condition()
        self._sending_event = False
        _clients.add(self)

    def forget(self) -> None:
        """Abandon the connection in a forked process, because it belongs to the parent.

        The function takes no lock, because threads of the parent may have held them at the fork.
        """
        sock, self._sock = self._sock, None
        self._lock, self._events_changed = threading.Lock(), threading.Condition()
        self._closed = threading.Event()
        self._closed.set()
        if sock is not None:
            sock.close()

    @property
    def lost(self) -> bool:
        """Return whether there is no usable connection now."""
        return self._sock is None

    @property
    def page(self) -> ControlPage | None:
        """Return the control page of the current agent, or None before the welcome."""
        return self._page

    def join_training(self, hello: local.Hello, on_wait: Callable[[float, str], None]) -> local.Welcome:
        """Join the training and return the welcome.

        The wait is limited to WELCOME_TIMEOUT_S, and to NOT_YET_S if the agent explains the delay. If the agent dies
        meanwhile, the request is sent again, because the agent's supervisor starts another one.

        Args:
            hello: Greeting of this rank.
            on_wait: Called from time to time with the seconds waited and the agent's reason for the delay.

        Raises:
            AgentLost: No agent answers within the limit.
            AgentRefused: The agent refuses this rank.
            NotYet: The agent still asks for patience after NOT_YET_S.
        """
        first, why = clock.monotonic(), ""
        while True:
            try:
                return self._join(hello, on_wait, why)
            except RefusedForNow as error:
                waited_s, why = clock.monotonic() - first, str(error)
                if waited_s > NOT_YET_S:
                    raise
                on_wait(waited_s, why)
                clock.sleep(RETRY_FAST_S)

    def _join(self, hello: local.Hello, on_wait: Callable[[float, str], None], why: str) -> local.Welcome:
        started = clock.monotonic()
        patience_s = CONNECT_TIMEOUT_S
        while True:
            try:
                sock = connect(self._path)
                patience_s = WELCOME_TIMEOUT_S
                try:
                    left_s = started + patience_s - clock.monotonic()
                    welcome = self._greet(sock, hello, left_s, lambda waited_s: on_wait(waited_s, why))
                except BaseException:
                    sock.close()
                    raise
                break
            except AgentLost:
                if clock.monotonic() - started + RETRY_FAST_S > patience_s:
                    raise
                clock.sleep(RETRY_FAST_S)
        self._hello = msgspec.structs.replace(hello, rejoin=True)
        self.first = welcome
        self._sock = sock
        threading.Thread(target=self._watch, args=(sock,), name="gemini-agent", daemon=True).start()
        threading.Thread(target=self._send_events, name="gemini-events", daemon=True).start()
        return welcome

    def _greet(
        self, sock: socket.socket, hello: local.Hello, timeout_s: float, on_wait: Callable[[float], None] | None
    ) -> local.Welcome:
        started = clock.monotonic()
        _send(sock, hello, REQUEST_TIMEOUT_S, [self._progress.fd] if self._progress is not None else [])
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not poll.poll(1000):
            waited = clock.monotonic() - started
            if waited > timeout_s:
                raise AgentLost(f"the agent did not welcome this rank within {timeout_s:.0f} s")
            if on_wait is not None:
                on_wait(waited)
        reply, fds = _receive(sock)
        try:
            if isinstance(reply, local.Error):
                raise (RefusedForNow if reply.later else AgentRefused)(reply.error)
            if not isinstance(reply, local.Welcome) or len(fds) != 1:
                raise AgentLost("the agent did not welcome this rank")
            try:
                self._page = ControlPage(fds[0], writable=False)
            except (OSError, ValueError) as error:
                raise AgentLost(f"the agent's control page cannot be used: {error}") from None
            return reply
        finally:
            for fd in fds:
                os.close(fd)

    def request(self, message: local.Message, *, timeout_s: float = REQUEST_TIMEOUT_S) -> Reply:
        """Send a message and return the reply with its descriptors, which the caller closes.

        Raises:
            Unsent: There is no agent, or an earlier request still waits after `timeout_s` seconds.
            AgentLost: The agent does not answer within `timeout_s` seconds.
            AgentRefused: The agent answered with an error.
        """
        if not self._lock.acquire(timeout=timeout_s):
            raise Unsent("the agent has not answered an earlier request")
        try:
            sock = self._sock
            if sock is None:
                raise Unsent("the agent of this node is gone")
            try:
                reply, fds = _exchange(sock, message, timeout_s)
            except AgentLost:
                # a late answer would be read as the next request's, so end this connection
                self._sock = None
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                raise
        finally:
            self._lock.release()
        if isinstance(reply, local.Error):
            for fd in fds:
                os.close(fd)
            raise AgentRefused(reply.error)
        if isinstance(reply, local.Begun) and reply.note:
            self._say(reply.note)
        return reply, fds

    def queue_event(self, name: str, version: int, detail: str = "", t: float | None = None) -> None:
        """Queue an entry for the event log without waiting for its transmission.

        The oldest entry is dropped if the agent is slower than the events. Without an agent the entry waits for the
        next one: a version that this rank has skipped must not be waited for. An entry whose connection ends before
        the answer is sent once more, on the next connection.
        """
        event = local.Event(name=name, version=version, t=clock.time() if t is None else t, detail=detail)
        with self._events_changed:
            self._events.append(event)
            self._events_changed.notify_all()

    def post(self, message: Posted) -> None:
        """Queue a message to the agent without waiting for its transmission.

        Only the newest message of each type is sent. A message is dropped silently if the agent is lost meanwhile, if
        its version does not know the type, or if the message exceeds a packet.
        """
        with self._events_changed:
            self._posted[type(message)] = message
            self._events_changed.notify_all()

    def recall(self, training: str, rank: int, key: str) -> bytes | None:
        """Return the bytes that this rank gave to the agent under this key (`local.CacheBytes`).

        Returns None if there are none, or no agent that knows the request.
        """
        try:
            reply, fds = self.request(local.FetchCached(training, rank, key), timeout_s=RECALL_TIMEOUT_S)
        except (AgentLost, AgentRefused):
            return None
        for fd in fds:
            os.close(fd)
        return reply.data if isinstance(reply, local.CachedBytes) else None

    def _send_events(self) -> None:
        while True:
            with self._events_changed:
                self._sending_event = False
                self._events_changed.notify_all()
                self._events_changed.wait_for(
                    lambda: self._closed.is_set() or (self._waiting and self._sock is not None)
                )
                if self._closed.is_set():
                    return
                message = self._events.popleft() if self._events else self._posted.pop(next(iter(self._posted)))
                self._sending_event = True
            # A message larger than a packet would end the connection.
            if isinstance(message, local.Event) or len(local.encode(message)) <= local.MAX_PACKET_BYTES:
                try:
                    self.request(message)
                except Unsent:
                    self._keep_event(message)
                except AgentLost:
                    # at most once: the event itself may have ended the connection
                    if message is not self._resent:
                        self._resent = message
                        self._keep_event(message)
                except AgentRefused:
                    pass

    def _keep_event(self, message: local.Message) -> None:
        """Queue an event again that the agent has not answered, ahead of the newer ones."""
        with self._events_changed:
            if isinstance(message, local.Event) and len(self._events) < EVENTS_KEPT:
                self._events.appendleft(message)

    @property
    def _waiting(self) -> bool:
        return bool(self._events or self._posted)

    def flush(self) -> None:
        """Wait, for at most FLUSH_TIMEOUT_S, until all events and posted messages are sent."""
        with self._events_changed:
            if not self.lost:
                self._events_changed.wait_for(
                    lambda: self.lost or not (self._waiting or self._sending_event), FLUSH_TIMEOUT_S
                )

    def close(self) -> None:
        """Send the remaining events (see `flush`), then end the connection and the threads."""
        self.flush()
        with self._events_changed:
            self._closed.set()
            self._events_changed.notify_all()
        sock = self._sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _watch(self, sock: socket.socket | None) -> None:
        while sock is not None and not self._closed.is_set():
            poll = select.poll()
            poll.register(sock, select.POLLRDHUP)  # data belongs to the requesting thread; watch only for the end
            while not self._closed.is_set() and not poll.poll(1000):
                if self._progress is not None:
                    self._progress.beat()
            self._sock = None
            if not self._closed.is_set():
                self._on_lost()
            with self._lock:
                sock.close()
            sock = self._reconnect()

    def _reconnect(self) -> socket.socket | None:
        """Return the new connection; None if closed, or if the agent belongs to another incarnation."""
        assert self._hello is not None
        started = clock.monotonic()
        while not self._closed.is_set():
            fast = clock.monotonic() - started < RETRY_FAST_FOR_S
            if self._closed.wait(RETRY_FAST_S if fast else RETRY_SLOW_S):
                return None
            try:
                sock = connect(self._path)
            except AgentLost:
                continue
            try:
                welcome = self._greet(sock, self._hello, REJOIN_TIMEOUT_S, None)

                def exchange(message: local.Message, fds: Sequence[int] = (), sock: socket.socket = sock) -> Reply:
                    return _exchange(sock, message, REQUEST_TIMEOUT_S, fds)

                if not self._rejoin(welcome, exchange):
                    sock.close()
                    return None
            except (AgentLost, AgentRefused):
                sock.close()
                continue
            with self._events_changed:
                self._sock = sock
                self._events_changed.notify_all()
            return sock
        return None
