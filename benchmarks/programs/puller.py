"""The two ends of a pull between agents, and of the same bytes through a plain socket.

    python puller.py serve HOST BYTES                 prints one JSON line: ports and the copy's record
    python puller.py fetch HOST TARGET ADDRESS RUNS   reads that line from stdin; prints one JSON line a transfer

Memory, handshake (MUNGE), frames, transfer and digest are the agent's own: `gemini_hpc.agent.transfer.pull` from the
accepted or made connection on. A plain transfer does the least of the same: one stream with `sendfile` into the same
kind of memory, received and hashed (xxh3_128) in steps of the same size. `pull` and `plain` are one shard; `pulls`
and `plains` are eight shards at once, each an eighth of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event

import msgspec
import xxhash

from gemini_hpc.agent.replicas.digest_pool import DigestPool
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.transfer import pull, pull_source
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.handshake import Caller, HandshakeClient
from gemini_hpc.wire.link import accept

JOB = 1
STEP_BYTES = 512 << 10
SHARDS = 8


@dataclass(frozen=True)
class Offer:
    """What the serving end says of itself."""

    agent_port: int
    plain_port: int
    copies: tuple[Copy, Copy]  # the whole, and an eighth of it


def _fill(memory: Memfd) -> None:
    pattern = os.urandom(1 << 20)
    with memory.view() as view:
        for at in range(0, len(view), len(pattern)):
            part = view[at : at + len(pattern)]
            part[:] = pattern[: len(part)]


def _send_plain(sock: socket.socket, memory: Memfd) -> None:
    with sock:
        at, size = 0, int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "big")
        while at < size:
            at += os.sendfile(sock.fileno(), memory.fd, at, size - at)


def _serve_plain(listener: socket.socket, memory: Memfd) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_send_plain, args=(sock, memory), daemon=True).start()


async def serve(host: str, size: int) -> None:
    """Serve until killed."""
    memory = Memfd("gemini:bench", size)
    memory.reserve(lambda: 1 << 60)
    _fill(memory)
    whole = Copy("default", 0, 2, 0, size, size, Stamp(1, 1), memory.digest(size))
    part = size // SHARDS
    copies = whole, Copy("default", 1, 2, 0, part, part, Stamp(1, 1), memory.digest(part))

    pool = DigestPool()

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = await accept(reader, writer, lambda greeting: "", host=host, read_restart=lambda: 0, instance="source")
        await pull_source.serve(link, pool, lambda ask: (copies[ask.rank], memory))

    server = await asyncio.start_server(call, "0.0.0.0", 0)
    listener = socket.create_server(("0.0.0.0", 0))
    threading.Thread(target=_serve_plain, args=(listener, memory), daemon=True).start()
    offer = Offer(server.sockets[0].getsockname()[1], listener.getsockname()[1], copies)
    print(msgspec.json.encode(offer).decode(), flush=True)
    await server.serve_forever()


def _plain(view: memoryview, address: str, port: int) -> None:
    hasher = xxhash.xxh3_128()
    with socket.create_connection((address, port)) as sock:
        sock.sendall(len(view).to_bytes(8, "big"))
        at = 0
        while at < len(view):
            n = sock.recv_into(view[at : at + STEP_BYTES])
            if not n:
                raise SystemExit(f"the plain transfer ended after {at} bytes")
            hasher.update(view[at : at + n])
            at += n


def _reserved(size: int) -> Memfd:
    memory = Memfd("gemini:bench", size)
    memory.reserve(lambda: 1 << 60)
    return memory


def fetch(host: str, target: str, address: str, runs: int) -> None:
    """The transfers in turns, each into memory of its own that is reserved beforehand."""
    offer = msgspec.json.decode(sys.stdin.readline(), type=Offer)
    whole, eighth = offer.copies

    def pulled(copy: Copy, memory: Memfd, connections: int) -> None:
        caller = Caller("bench", host, "replacement")
        client = HandshakeClient(caller, purpose="pull", job=JOB, target=target, server_uid=os.geteuid())
        source = pull.Source(target, address, offer.agent_port, client, copy.stamp)
        pull.fetch(copy, memory, [source], Event(), connections)

    def plain(copy: Copy, memory: Memfd, connections: int) -> None:
        with memory.view() as view:
            _plain(view, address, offer.plain_port)

    ways = [("plain", plain, whole, 1), ("pull", pulled, whole, 1)]
    ways += [("plains", plain, eighth, SHARDS), ("pulls", pulled, eighth, SHARDS)]
    for turn in range(runs + 1):
        for how, transfer, copy, count in ways:
            began = time.perf_counter()
            memories = [_reserved(copy.used) for _ in range(count)]
            reserved, cpu = time.perf_counter(), time.process_time()
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(partial(transfer, copy, connections=pull.AT_ONCE // count), memories))
            ended, cpu = time.perf_counter(), time.process_time() - cpu
            for memory in memories:
                memory.close()
            if turn:  # the first turn warms up
                line = {"how": how, "seconds": ended - reserved, "reserve_s": reserved - began, "cpu_s": cpu}
                print(json.dumps(line | {"bytes": count * copy.used}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve(sys.argv[2], int(sys.argv[3])))
    else:
        fetch(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
