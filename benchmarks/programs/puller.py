"""The two ends of a pull between agents, and of the same bytes through a plain socket.

    python puller.py serve HOST BYTES                 prints one JSON line: ports and the copy's record
    python puller.py fetch HOST TARGET ADDRESS RUNS   reads that line from stdin; prints one JSON line a transfer

Memory, handshake (MUNGE), frames, transfer and digest are the agent's own: `gemini_hpc.agent.transfer.pull` from the
accepted or made connection on. The plain transfer uses the same kind of memory and pieces of the same size, and
checks nothing; `raw` is the same into ordinary memory that has been written before, so that no page is new.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from threading import Event

import msgspec

from gemini_hpc.agent.replicas.digest_pool import DigestPool
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.transfer import pull
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.handshake import HandshakeClient
from gemini_hpc.wire.link import accept

JOB = 1
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Offer:
    """What the serving end says of itself."""

    agent_port: int
    plain_port: int
    copy: Copy


def _fill(memory: Memfd) -> None:
    pattern = os.urandom(1 << 20)
    with memory.view() as view:
        for at in range(0, len(view), len(pattern)):
            part = view[at : at + len(pattern)]
            part[:] = pattern[: len(part)]


def _serve_plain(listener: socket.socket, memory: Memfd) -> None:
    while True:
        sock, _ = listener.accept()
        with sock, memory.view() as view:
            for at in range(0, len(view), PIECE_BYTES):
                sock.sendall(view[at : at + PIECE_BYTES])


async def serve(host: str, size: int) -> None:
    """Serve until killed."""
    memory = Memfd("gemini:bench", size)
    memory.reserve(lambda: 1 << 60)
    _fill(memory)
    copy = Copy("default", 0, 1, 0, size, size, Stamp(1, 1), memory.digest(size))

    pool = DigestPool()

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = await accept(reader, writer, lambda greeting: "", host=host, restart=lambda: 0, instance="source")
        await pull.serve(link, pool, lambda ask: (copy, memory))

    server = await asyncio.start_server(call, "0.0.0.0", 0)
    listener = socket.create_server(("0.0.0.0", 0))
    threading.Thread(target=_serve_plain, args=(listener, memory), daemon=True).start()
    offer = Offer(server.sockets[0].getsockname()[1], listener.getsockname()[1], copy)
    print(msgspec.json.encode(offer).decode(), flush=True)
    await server.serve_forever()


def _plain(view: memoryview, address: str, port: int) -> None:
    with socket.create_connection((address, port)) as sock:
        at = 0
        while at < len(view):
            n = sock.recv_into(view[at : at + PIECE_BYTES])
            if not n:
                raise SystemExit(f"the plain transfer ended after {at} bytes")
            at += n


def fetch(host: str, target: str, address: str, runs: int) -> None:
    """The transfers in turns; pull and plain each into memory of their own that is reserved beforehand."""
    offer = msgspec.json.decode(sys.stdin.readline(), type=Offer)
    touched = memoryview(bytearray(offer.copy.used))
    for turn in range(3 * runs + 3):
        how = ("plain", "pull", "raw")[turn % 3]
        memory = Memfd("gemini:bench", offer.copy.used)
        began = time.perf_counter()
        memory.reserve(lambda: 1 << 60)
        reserved = time.perf_counter()
        if how == "raw":
            _plain(touched, address, offer.plain_port)
        elif how == "plain":
            with memory.view() as view:
                _plain(view, address, offer.plain_port)
        else:
            client = HandshakeClient(
                purpose="pull",
                cluster="bench",
                job=JOB,
                restart=0,
                source=host,
                target=target,
                instance="replacement",
                server_uid=os.geteuid(),
            )
            source = pull.Source(target, address, offer.agent_port, client, offer.copy.stamp)
            pull.fetch(offer.copy, memory, [source], Event())
        ended = time.perf_counter()
        memory.close()
        if turn > 2:  # the first ones warm up
            line = {"how": how, "seconds": ended - reserved, "reserve_s": reserved - began, "bytes": offer.copy.used}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve(sys.argv[2], int(sys.argv[3])))
    else:
        fetch(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
