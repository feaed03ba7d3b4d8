"""The local socket: training ranks, the prolog and the epilog speak to the agent here, one packet a message."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from gemini_hpc.wire import local

_CREDENTIALS = struct.Struct("3i")
_MAX_FDS = 4
_SO_PEERPIDFD = 77
MAX_CLIENTS = 1024
_ACCEPT_PAUSE_S = 0.2


class Client:
    """One connection to the local socket."""

    def __init__(self, sock: socket.socket, pid: int, uid: int) -> None:
        self._sock, self.pid, self.uid = sock, pid, uid
        self.closed = asyncio.Event()
        self._process = _process(sock, pid)

    def signal(self, number: int) -> None:
        """Send a signal to the very process that called; nothing where it has ended, or is not this user's."""
        with suppress(OSError):
            if self._process >= 0:
                signal.pidfd_send_signal(self._process, number)

    def lives(self) -> bool:
        """Whether the process that called is there, also when its connection has ended."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass
        return True

    def forget(self) -> None:
        """The connection has ended, and with it the claim on the process."""
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def drop(self) -> None:
        """Close: the other end sees the end of file."""
        if not self.closed.is_set():
            self.closed.set()
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)


def _process(sock: socket.socket, pid: int) -> int:
    """A descriptor of the process that called, -1 where it has ended or is not seen from here. A child of it can hold
    the connection for longer than it lives, and its number then be that of another process."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as exc:
        if exc.errno != errno.ENOPROTOOPT:
            return -1
    with suppress(OSError):  # Linux before 6.5
        return os.pidfd_open(pid) if pid > 0 else -1
    return -1


Reply = tuple[local.Message, list[int]]
Handle = Callable[[Client, local.Request, list[int]], Awaitable[Reply]]


class LocalServer:
    """Accepts clients of one uid (and root) on a SEQPACKET socket and answers their requests in order.

    `handle` gets each request with the descriptors beside it (its to close) and returns the reply with the
    descriptors to send (closed here after sending). `gone` is told when a client's connection ends, `complain` of who
    was turned away and of requests that could not be served for reasons of our own.
    """

    def __init__(
        self,
        path: str,
        uid: int,
        handle: Handle,
        gone: Callable[[Client], None],
        complain: Callable[[str], None],
    ) -> None:
        self._path, self._uid, self._handle, self._gone, self._complain = path, uid, handle, gone, complain
        self._clients: set[Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._sock = self._bound()

    def _bound(self) -> socket.socket:
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            sock.bind(self._path)
            os.chmod(self._path, 0o600)
            sock.listen(128)
        except BaseException:
            sock.close()
            raise
        asyncio.get_running_loop().add_reader(sock, self._accept)
        return sock

    def bind_again(self) -> None:
        """Listen on another socket of the same name: clients stay. Raises OSError, and nothing has changed."""
        before, self._sock = self._sock, self._bound()
        self._deafen(before)

    def _deafen(self, sock: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(sock)
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # The caller stays in the queue: without a pause this would be a busy loop.
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._sock)
                self._pause = loop.call_later(_ACCEPT_PAUSE_S, loop.add_reader, self._sock, self._accept)
                self._complain(f"cannot accept local clients: {exc.strerror}")
            return
        with suppress(OSError):
            sock.setblocking(False)
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _gid = _CREDENTIALS.unpack(raw)
            if uid not in (self._uid, 0) or len(self._clients) >= MAX_CLIENTS:
                sock.close()
                self._complain(f"local client of uid {uid} turned away")
                return
            client = Client(sock, pid, uid)
            self._clients.add(client)
            task = asyncio.ensure_future(self._serve(client, sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: Client, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(sock, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                try:
                    data, fds, flags, _ = socket.recv_fds(sock, local.MAX_PACKET_BYTES + 1, _MAX_FDS)
                except BlockingIOError:
                    continue
                for fd in fds:
                    os.set_inheritable(fd, False)
                if not data:
                    for fd in fds:
                        os.close(fd)
                    return
                readable.set()
                reply, out = await self._answer(client, data, fds, flags)
                try:
                    await self._send(sock, local.encode(reply), out)
                finally:
                    for fd in out:
                        os.close(fd)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            loop.remove_reader(sock)
            sock.close()
            client.closed.set()
            client.forget()
            self._clients.discard(client)
            self._gone(client)

    async def _answer(self, client: Client, data: bytes, fds: list[int], flags: int) -> Reply:
        if len(data) > local.MAX_PACKET_BYTES or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            return self._refuse(
                fds, f"a message has at most {local.MAX_PACKET_BYTES} bytes and {_MAX_FDS} descriptors"
            )
        try:
            request = local.request_decoder.decode(data)
        except msgspec.MsgspecError as exc:
            return self._refuse(fds, f"cannot decode the message: {exc}")
        try:
            return await self._handle(client, request, fds)
        except Exception as exc:
            kind = type(request).__name__
            self._complain(f"{kind} of pid {client.pid} failed: {exc!r}")
            return local.Error(f"the agent could not serve this {kind}"), []

    @staticmethod
    def _refuse(fds: list[int], reason: str) -> Reply:
        for fd in fds:
            os.close(fd)
        return local.Error(reason[:500]), []

    @staticmethod
    async def _send(sock: socket.socket, data: bytes, fds: list[int]) -> None:
        loop = asyncio.get_running_loop()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                sock.sendmsg([data], ancillary)
                return
            except BlockingIOError:
                writable = asyncio.Event()
                loop.add_writer(sock, writable.set)
                try:
                    async with asyncio.timeout(10.0):
                        await writable.wait()
                except TimeoutError:
                    raise OSError("client does not read") from None
                finally:
                    loop.remove_writer(sock)

    def drop(self, wanted: Callable[[Client], bool]) -> None:
        """Close every client for which `wanted` is true."""
        for client in list(self._clients):
            if wanted(client):
                client.drop()

    def close(self) -> None:
        """Stop listening, close all clients, remove the socket."""
        self._deafen(self._sock)
        with suppress(OSError):
            os.unlink(self._path)
        for task in list(self._tasks):
            task.cancel()
