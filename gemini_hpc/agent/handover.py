"""The transfer of a copy's memory from an ended job's agent to its successor's agent on the same node.

The successor uses it if the node has no room for a second copy.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import msgspec

from gemini_hpc.agent.peers.event_log import Log
from gemini_hpc.agent.replicas.memory import Memfd, adopt
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import credentials, local
from gemini_hpc.wire.local_server import Reply

_ANSWER_S = 5.0  # an agent on this node answers within milliseconds unless its node is overloaded


def give_copy(m: local.TakeOver, store: Store, explain_refusal: Callable[[], str], log: Log) -> Reply:
    """Give away a copy's memory, if the copy is here and this job no longer needs it."""
    stamp = Stamp(m.epoch, m.version)
    found = store.find_version(m.training, m.rank, stamp)
    if why := explain_refusal():
        return local.Error(why), []
    copy = found[0].describe_copy(found[1]) if found is not None else None
    if found is None or copy is None or copy.digest != m.digest or any(slot.busy for slot in found[0].pair.slots):
        return local.Error("this copy is not held here, or is in use"), []
    fd = store.release_memory(*found)
    log("handed_over", version=m.version, detail=f"the memory of shard {m.rank}, to job {m.successor}")
    return local.Copy(m.epoch, m.version, copy.bytes, copy.used, copy.digest), [fd]


def request_memory(path: str, uid: int, copy: Copy, stamp: Stamp, successor: int) -> Memfd:
    """Return the memory of a copy from the agent behind a socket (blocking). Its bytes are not checked.

    Args:
        path: Path of the agent's socket.
        uid: The expected owner of the agent.
        copy: The copy, as this job names it.
        stamp: The copy's stamp at that agent.
        successor: This job's id.

    Raises:
        OSError: The agent cannot be reached.
        ValueError: The agent refuses, belongs to another user, or gives a wrong answer.
    """
    wanted = local.TakeOver(copy.training, copy.rank, successor, stamp.epoch, stamp.version, copy.digest)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(_ANSWER_S)
        sock.connect(path)
        _, owner = credentials.read_peer(sock)
        if owner != uid:
            raise ValueError(f"uid {owner} listens there")
        sock.send(local.encode(wanted))
        data, fds, _, _ = socket.recv_fds(sock, local.MAX_PACKET_BYTES, 4)
    try:
        answer = local.reply_decoder.decode(data)
        if isinstance(answer, local.Error):
            raise ValueError(answer.error)
        if not isinstance(answer, local.Copy) or len(fds) != 1 or answer.bytes != copy.bytes:
            raise ValueError("its answer is not the copy that was asked for")
        return adopt(fds[0], copy.bytes)
    except msgspec.MsgspecError as exc:
        raise ValueError(str(exc)) from None
    finally:
        for fd in fds:
            os.close(fd)
