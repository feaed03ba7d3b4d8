"""One question to the job's agent, as prolog and epilog put it: with nothing but the standard library,
because an interpreter with msgspec takes three times as long to start."""

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
    """There is no agent: no socket, nobody behind it, or it went away before it answered."""


class AskError(Exception):
    """There is an agent, or somebody in its place, and it did not answer as it should."""


def connect(directory: str, uid: int, deadline: float) -> socket.socket:
    """A connection to the agent in `directory`, if it runs as `uid`; `deadline` is of `clock.monotonic`.

    Raises `NobodyAnswersError` and `AskError`.
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
            raise AskError(f"{path}: {exc.strerror or exc}") from None
        found = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if found != uid:
            raise AskError(f"{path}: wanted an agent of uid {uid}, found one of uid {found}")
    except BaseException:
        sock.close()
        raise
    return sock


def peer_pid(sock: socket.socket) -> int:
    """pid of the process that listens at the other end."""
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def ask(sock: socket.socket, question: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Sends one packet and returns the one that comes back. Raises `NobodyAnswersError` and `AskError`."""
    packet = json.dumps(question).encode()
    if len(packet) > MAX_PACKET_BYTES:
        raise AskError(f"a request of {len(packet)} bytes is too long; at most {MAX_PACKET_BYTES} are")
    try:
        _set_timeout(sock, deadline)
        sock.send(packet)
        _set_timeout(sock, deadline)
        reply, _, flags, _ = sock.recvmsg(MAX_PACKET_BYTES)
    except TimeoutError:
        raise AskError("the agent did not answer in time") from None
    except (BrokenPipeError, ConnectionResetError):
        reply, flags = b"", 0
    except OSError as exc:
        raise AskError(f"the agent could not be asked: {exc.strerror or exc}") from None
    if not reply:
        raise NobodyAnswersError("the agent went away before it answered")
    if flags & socket.MSG_TRUNC:
        raise AskError(f"the agent's reply is longer than {MAX_PACKET_BYTES} bytes")
    try:
        answer = json.loads(reply)
    except (ValueError, RecursionError):
        raise AskError("the agent's reply is not JSON") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("op"), str):
        raise AskError("the agent's reply is not a message")
    if answer["op"] == "error":
        raise AskError(f"the agent refused: {answer.get('error')!s:.300}")
    return answer


def wait_until_gone(sock: socket.socket, deadline: float) -> None:
    """Returns when the agent has closed the connection, at the latest at `deadline`."""
    try:
        while True:
            _set_timeout(sock, deadline)
            if not sock.recv(MAX_PACKET_BYTES):
                return
    except (OSError, AskError):
        return


def _set_timeout(sock: socket.socket, deadline: float) -> None:
    left = deadline - clock.monotonic()
    if left <= 0:
        raise AskError("the agent did not answer in time")
    sock.settimeout(left)
