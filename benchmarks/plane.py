"""Measure what agents do with bytes against the same cores' plain threads and sockets: hashing, sealing, pushing."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import threading
import time

import numpy as np
import xxhash

from benchmarks.bench import MeasureError, Options, program
from benchmarks.rows import Row, median_row
from gemini_hpc.agent.replicas.digest_pool import DigestPool, Urgency
from gemini_hpc.agent.replicas.memory import Budget
from gemini_hpc.agent.replicas.store import Shard, Store
from gemini_hpc.config import Settings
from gemini_hpc.core.digest import PIECE_BYTES
from gemini_hpc.core.slots import Stamp

_SHARDS = 3
_RANKS = 4  # on a node
_ENOUGH_CORES = 8  # with fewer, both ends of two nodes take turns on them, and speeds say little


def measure(options: Options) -> list[Row]:
    """Return all rows of the family; slots of 512 MiB, or one rank's state."""
    size, runs = options.pick(512 << 20, 4 << 20), options.count(9)
    options.progress.say("plane", f"{2 * _SHARDS} slots of {size >> 20} MiB")
    pool_s, plain_s, inventory_s, threads = asyncio.run(_hashing(size, runs))
    options.progress.say("plane", f"{runs} versions of {options.gb:g} GB, m = 1, beside memcpy")
    own = _program("sealer.py", options.state_bytes, runs)
    options.progress.say("plane", f"{runs} versions of {options.gb:g} GB, m = 2, beside plain sockets")
    pushed = _program("pusher.py", options.state_bytes, runs, 1)
    options.progress.say("plane", f"{runs} versions of {options.gb:g} GB, m = 2, {_RANKS} ranks a node")
    shared = _program("pusher.py", options.state_bytes, runs, _RANKS)
    cores = f"{threads} threads on {os.cpu_count()} cores"
    rates = [size / s / 1e9 for s in pool_s]
    return [
        median_row(
            "plane.digest_ratio",
            f"the agent's pool over a slot, {cores}, against as many plain threads of its priority that call xxh3 on "
            "pieces, in turns: speed",
            "x",
            [plain / ours for plain, ours in zip(plain_s, pool_s, strict=True)],
            limit=0.9,
            at_least=True,
        ),
        median_row("plane.digest_gbs", "the same: bytes hashed", "GB/s", rates),
        median_row(
            "plane.own_ratio",
            f"step() to sealed with m = 1, {options.gb:g} GB, against memcpy of the same bytes, in turns",
            "x",
            [line["sealed_s"] / line["memcpy_s"] for line in own],
            limit=1.5,
        ),
        median_row("plane.own_s", "the same: step() to sealed", "s", [line["sealed_s"] for line in own]),
        median_row(
            "plane.inventory_ratio",
            f"all copies verified for a recovery, {2 * _SHARDS} slots, against the pool's rate over one, in turns",
            "x",
            [all_s / (2 * _SHARDS * one_s) for all_s, one_s in zip(inventory_s, pool_s, strict=True)],
            limit=1.3,
        ),
        *_pushes(options, pushed, shared),
    ]


def _pushes(options: Options, pushed: list[dict[str, float]], shared: list[dict[str, float]]) -> list[Row]:
    """The rows of versions that travel between two nodes, both ways at once."""
    cores = len(os.sched_getaffinity(0))
    are_enough, both = cores >= _ENOUGH_CORES, 2 * options.gb
    alone_s = statistics.median(line["push_s"] for line in pushed)
    return [
        median_row(
            "plane.push_ratio",
            f"bytes of a version over the time from copied to sealed, m = 2, {options.gb:g} GB both ways, on {cores} "
            "cores, against plain sockets with sendfile, recv_into and xxh3, in turns: speed",
            "x",
            [line["plain_s"] / line["push_s"] for line in pushed],
            limit=0.9 if are_enough else None,
            at_least=True,
        ),
        median_row("plane.push_gbs", "the same: each way", "GB/s", [options.gb / line["push_s"] for line in pushed]),
        median_row(
            "plane.push_cpu_ratio",
            "the same: CPU of both agents against that of the plain sockets' processes",
            "x",
            [line["cpu_s"] / line["plain_cpu_s"] for line in pushed],
            limit=1.25,
        ),
        median_row(
            "plane.push_cpu",
            "the same: CPU of both agents for each GB that went",
            "core-s/GB",
            [line["cpu_s"] / both for line in pushed],
        ),
        median_row(
            "plane.ranks_ratio",
            f"the same bytes from {_RANKS} ranks a node against one: speed, {cores} cores",
            "x",
            [alone_s / line["push_s"] for line in shared],
            limit=1.0 if are_enough else None,
            at_least=True,
        ),
        median_row(
            "plane.wakes",
            f"voluntary switches of a rank's threads for a version of {options.gb:g} GB, m = 2, without gloo's loops",
            "",
            [line["wakes"] for line in pushed],
            limit=200,
        ),
    ]


async def _hashing(size: int, runs: int) -> tuple[list[float], list[float], list[float], int]:
    """Seconds of the pool and of plain threads over one slot, and of an inventory; the pool's threads."""
    store = Store(Budget(Settings(cluster_name="bench", memory_cap_bytes=4 * _SHARDS * size, memory_floor_bytes=0)))
    shards = [await store.make_shard("default", rank, _SHARDS, 0, size) for rank in range(_SHARDS)]
    for shard in shards:
        for index in (0, 1):
            with shard.memory[index].view() as view:
                seed = 2 * shard.rank + index
                np.frombuffer(view, np.uint64)[:] = np.arange(size // 8, dtype=np.uint64) * np.uint64(2 * seed + 1)
            stamp = Stamp(1, index + 1)
            shard.pair.begin_version(stamp, None, frozenset(), voted=frozenset())
            found = await store.pool.digest(shard.memory[index], size, urgency=Urgency.OWN)
            shard.pair.complete_slot(index, stamp, found, size)
    pool_s, plain_s, inventory_s = [], [], []
    for _ in range(runs):
        began = time.perf_counter()
        store.pool.read(shards[0].memory[0], size, urgency=Urgency.OWN).result()
        pool_s.append(time.perf_counter() - began)
        plain_s.append(_plain(shards[0], size, store.pool))
        began = time.perf_counter()
        if await store.verify():
            raise MeasureError("copies were damaged")
        inventory_s.append(time.perf_counter() - began)
    threads = store.pool.size
    store.pool.close()
    store.clear()
    return pool_s, plain_s, inventory_s, threads


def _plain(shard: Shard, size: int, pool: DigestPool) -> float:
    """Seconds of plain threads over the same slot."""
    found = [b""] * -(-size // PIECE_BYTES)
    with shard.memory[0].view() as view:

        def run(first: int) -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            for number in range(first, len(found), pool.size):
                found[number] = xxhash.xxh3_128_digest(view[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])

        threads = [threading.Thread(target=run, args=(first,)) for first in range(pool.size)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        xxhash.xxh3_128_hexdigest(b"".join(found))
        return time.perf_counter() - began


def _program(name: str, *words: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="gemini-plane-") as directory:
        return program(900, name, directory, *words)
