"""A single request to the job's agent, as prolog and epilog send it.

The module uses only the standard library: an interpreter that imports msgspec takes three times as long to start.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from typing import Any

from gemini_hpc import clock

MAX_PACKET_BYTES = 64 * 1024
SOCKET_NAME = "agent.sock"


class NobodyAnswersError(Exception):
    """An error for an absent agent: no socket, no listener, or an agent that ended before it answered."""


class ListenerError(Exception):
    """An error for a listener (the agent, or an impostor) that did not answer as it should."""


def connect(directory: str, uid: int, deadline: float) -> socket.socket:
    """Connect to the agent in `directory`, which must run as `uid`.

    Args:
        directory: The job's directory, which contains the socket.
        uid: The uid that the listener must have.
        deadline: Latest time for the connection, on the clock of `clock.monotonic`.

    Raises:
        NobodyAnswersError: No agent listens there.
        ListenerError: The listener has another uid, or could not be reached in time.
    """
    path = f"{directory}/{SOCKET_NAME}"
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise NobodyAnswersError(f"{path} is not a socket")
    except OSError as exc:
        raise NobodyAnswersError(f"{path}: {exc.strerror}") from None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        _set_timeout(sock, deadline)
        try:
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError) as exc:
            raise NobodyAnswersError(f"{path}: {exc.strerror}") from None
        except OSError as exc:
            raise ListenerError(f"{path}: {exc.strerror or exc}") from None
        found = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if found != uid:
            raise ListenerError(f"{path}: wanted an agent of uid {uid}, found one of uid {found}")
    except BaseException:
        sock.close()
        raise
    return sock


def read_peer_pid(sock: socket.socket) -> int:
    """Return the pid of the process that listens at the other end."""
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def ask(sock: socket.socket, question: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Send one packet and return the reply.

    Args:
        sock: The connection from `connect`.
        question: The request, sent as JSON.
        deadline: Latest time for the reply, on the clock of `clock.monotonic`.

    Raises:
        NobodyAnswersError: The agent closed the connection before it answered.
        ListenerError: The request is too long, or the agent refused it, or its reply is late or not valid.
    """
    packet = json.dumps(question).encode()
    if len(packet) > MAX_PACKET_BYTES:
        raise ListenerError(f"a request of {len(packet)} bytes is too long; at most {MAX_PACKET_BYTES} are")
    try:
        _set_timeout(sock, deadline)
        sock.send(packet)
        _set_timeout(sock, deadline)
        reply, _, flags, _ = sock.recvmsg(MAX_PACKET_BYTES)
    except TimeoutError:
        raise ListenerError("the agent did not answer in time") from None
    except (BrokenPipeError, ConnectionResetError):
        reply, flags = b"", 0
    except OSError as exc:
        raise ListenerError(f"the agent could not be asked: {exc.strerror or exc}") from None
    if not reply:
        raise NobodyAnswersError("the agent ended before it answered")
    if flags & socket.MSG_TRUNC:
        raise ListenerError(f"the agent's reply is longer than {MAX_PACKET_BYTES} bytes")
    try:
        answer = json.loads(reply)
    except (ValueError, RecursionError):
        raise ListenerError("the agent's reply is not JSON") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("op"), str):
        raise ListenerError("the agent's reply is not a message")
    if answer["op"] == "error":
        raise ListenerError(f"the agent refused: {answer.get('error')!s:.300}")
    return answer


def wait_until_gone(sock: socket.socket, deadline: float) -> None:
    """Wait until the agent has closed the connection, at the latest until `deadline`."""
    try:
        while True:
            _set_timeout(sock, deadline)
            if not sock.recv(MAX_PACKET_BYTES):
                return
    except (OSError, ListenerError):
        return


def _set_timeout(sock: socket.socket, deadline: float) -> None:
    left = deadline - clock.monotonic()
    if left <= 0:
        raise ListenerError("the agent did not answer in time")
    sock.settimeout(left)
