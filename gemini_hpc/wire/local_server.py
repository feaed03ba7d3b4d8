"""The local socket server: ranks, the prolog and the epilog send requests to the agent, one a packet."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from gemini_hpc.wire import credentials, local

_MAX_FDS = 4
_SO_PEERPIDFD = 77
MAX_CLIENTS = 1024
_ACCEPT_PAUSE_S = 0.2  # without descriptors, accepting at once again would only spin


class LocalClient:
    """A client's connection to the local socket."""

    def __init__(self, sock: socket.socket, pid: int, uid: int) -> None:
        self._sock, self.pid, self.uid = sock, pid, uid
        self.closed = asyncio.Event()
        self._process = _open_process(sock, pid)

    def signal(self, number: int) -> None:
        """Send a signal to exactly the process that connected.

        The call has no effect if the process has ended or belongs to another user.
        """
        with suppress(OSError):
            if self._process >= 0:
                signal.pidfd_send_signal(self._process, number)

    def is_alive(self) -> bool:
        """Return whether the process that connected still exists, even if its connection has ended."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass
        return True

    def forget(self) -> None:
        """Close the descriptor of the process, after the connection has ended."""
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def drop(self) -> None:
        """Close the connection; the other end reads the end of file."""
        if not self.closed.is_set():
            self.closed.set()
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)


def _open_process(sock: socket.socket, pid: int) -> int:
    """Return a descriptor of the process that connected, or -1 if it has ended or is not visible from here.

    A child of the process can keep the connection open after the process ends. The pid may then belong to another
    process, so the pid alone is not enough.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as exc:
        if exc.errno != errno.ENOPROTOOPT:
            return -1
    with suppress(OSError):  # Linux before 6.5 has no SO_PEERPIDFD
        return os.pidfd_open(pid) if pid > 0 else -1
    return -1


Reply = tuple[local.Message, list[int]]
Handle = Callable[[LocalClient, local.Request, list[int]], Awaitable[Reply]]


class LocalServer:
    """A SEQPACKET socket server that accepts clients of one uid (and root) and answers requests in order."""

    def __init__(
        self,
        path: str,
        uid: int,
        handle: Handle,
        on_disconnect: Callable[[LocalClient], None],
        complain: Callable[[str], None],
    ) -> None:
        """Create the server and listen.

        Args:
            path: Path of the socket.
            uid: Owner of the job; only this user and root are accepted.
            handle: Called with each request and its descriptors, which the handler closes. Returns the reply and the
                descriptors to send, which the server closes after sending.
            on_disconnect: Called when a client's connection ends.
            complain: Called with a sentence for each rejected client, and for each request that failed inside the
                agent.
        """
        self._path, self._uid, self._handle, self._on_disconnect, self._complain = (
            path,
            uid,
            handle,
            on_disconnect,
            complain,
        )
        self._clients: set[LocalClient] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._sock = self._bind_socket()

    def _bind_socket(self) -> socket.socket:
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
        """Listen on a new socket with the same path; connected clients stay.

        Raises:
            OSError: The new socket could not be made; the server is unchanged.
        """
        before, self._sock = self._sock, self._bind_socket()
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
                # The client stays in the queue, so without a pause this would be a busy loop.
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._sock)
                self._pause = loop.call_later(_ACCEPT_PAUSE_S, loop.add_reader, self._sock, self._accept)
                self._complain(f"cannot accept local clients: {exc.strerror}")
            return
        with suppress(OSError):
            sock.setblocking(False)
            pid, uid = credentials.read_peer(sock)
            if uid not in (self._uid, 0) or len(self._clients) >= MAX_CLIENTS:
                sock.close()
                self._complain(f"local client of uid {uid} turned away")
                return
            client = LocalClient(sock, pid, uid)
            self._clients.add(client)
            task = asyncio.ensure_future(self._serve(client, sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: LocalClient, sock: socket.socket) -> None:
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
            self._on_disconnect(client)

    async def _answer(self, client: LocalClient, data: bytes, fds: list[int], flags: int) -> Reply:
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
            return local.Error(f"the agent could not serve this {kind}: see its agent.log"), []

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

    def drop(self, should_drop: Callable[[LocalClient], bool]) -> None:
        """Close every client for which `should_drop` returns true."""
        for client in list(self._clients):
            if should_drop(client):
                client.drop()

    def close(self) -> None:
        """Stop listening, close all clients, and remove the socket."""
        self._deafen(self._sock)
        with suppress(OSError):
            os.unlink(self._path)
        for task in list(self._tasks):
            task.cancel()
