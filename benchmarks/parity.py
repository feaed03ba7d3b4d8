"""What parity costs an agent's processors: folding bytes in as they come, and taking them out again; no network."""

from __future__ import annotations

import statistics
import time
from threading import Event

import numpy as np

from benchmarks.bench import Options
from benchmarks.rows import Row, median_row
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.replicas.parity import ParityFold
from gemini_hpc.agent.transfer import making
from gemini_hpc.core import parity
from gemini_hpc.core.copy import Copy, Member
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Stamp

SHARD, MEMBERS = 256 << 20, 4
_PIECE = 1 << 20
_STAMP = Stamp(1, 1)


def measure(options: Options) -> list[Row]:
    """All rows of the family: shards of 256 MiB, groups of four."""
    ratios, encoded, decoded = measured(options, "xor", MEMBERS, 1)
    what = "folding three members' bytes into parity, in pieces of 1 MiB: speed against NumPy's xor of the same bytes"
    return [
        Row("xor.encode_ratio", what, "x", statistics.median(ratios), tuple(ratios), limit=0.7, at_least=True),
        median_row("xor.encode_gbps", "the same: bytes folded in", "GB/s", encoded),
        median_row("xor.decode_gbps", "a lost shard made again of what is here, digest included", "GB/s", decoded),
    ]


def measured(
    options: Options, family: str, members: int, blocks: int
) -> tuple[list[float], list[float], list[float]]:
    """Against NumPy's exclusive or; bytes folded in a second, and made again, in 10^9."""
    size = options.pick(SHARD, 1 << 20)
    options.progress.say(family, f"{members} shards of {size >> 20} MiB")
    stripe = tuple(range(members))
    data = {rank: _memory(rank, size) for rank in stripe}
    used = dict.fromkeys(stripe, size)
    ratios, encoded, decoded = [], [], []
    for _ in range(options.count(5)):
        ours, raw, moved = _encode(stripe, used, data, blocks)
        ratios.append(raw / ours)
        encoded.append(moved / ours / 1e9)
        decoded.append(size / _decode(stripe, size, data, blocks) / 1e9)
    for memory in data.values():
        memory.close()
    return ratios, encoded, decoded


def _memory(rank: int, size: int) -> Memfd:
    memory = Memfd(f"gemini:bench:{rank}", size)
    with memory.view() as view:
        np.frombuffer(view, np.uint64)[:] = np.random.default_rng(rank).integers(0, 1 << 63, size // 8, np.uint64)
    return memory


def _encode(
    stripe: tuple[int, ...], used: dict[int, int], data: dict[int, Memfd], blocks: int
) -> tuple[float, float, int]:
    """Seconds, ours and NumPy's exclusive or, one right after the other; the bytes."""
    room = parity.compute_block_bytes(max(used.values()), len(stripe), blocks)
    folds = parity.Stripe(stripe, blocks).derive_encoding(0, used, room)
    with memoryview(bytearray(blocks * room)) as into:
        target = ParityFold(_STAMP, 0, into, room, {1: 1})
        began = time.perf_counter()
        for one in folds:
            with data[one.rank].view() as view:
                for at in range(one.start, one.end, _PIECE):
                    with view[at : min(one.end, at + _PIECE)] as piece:
                        target.add(one.offset + at - one.start, piece, one.factor)
        ours = time.perf_counter() - began
    plain = np.zeros(blocks * room, np.uint8)
    began = time.perf_counter()
    for one in folds:
        with data[one.rank].view() as view:
            part = np.frombuffer(view, np.uint8)[one.start : one.end]
            place = plain[one.offset : one.offset + len(part)]
            np.bitwise_xor(place, part, out=place)
            del part
    return ours, time.perf_counter() - began, sum(one.end - one.start for one in folds)


def _decode(stripe: tuple[int, ...], size: int, data: dict[int, Memfd], blocks: int) -> float:
    """Seconds to make shard 0 again where the first `blocks` are lost, with everything in memory."""
    members = len(stripe)
    room = parity.compute_block_bytes(size, members, blocks)
    shards = {rank: Copy("", rank, members, rank, size, size, _STAMP, _digest(data[rank])) for rank in stripe}
    made, parts = [], []
    for rank in stripe[blocks:]:
        memory = Memfd("gemini:bench:parity", blocks * room)
        others = [r for r in stripe if r != rank]
        of = tuple(Member(r, r, size, size, shards[r].digest) for r in others)
        both = blocks * room
        beside = Copy("", rank, members, rank, both, both, _STAMP, "", members=of, blocks=blocks, room=room)
        making.make(beside, memory, [(data[r], shards[r]) for r in others], Event())
        made.append(memory)
        parts += [(memory, beside), (data[rank], shards[rank])]
    target = Memfd("gemini:bench:made", size)
    began = time.perf_counter()
    making.make(shards[0], target, parts, Event())
    took = time.perf_counter() - began
    for memory in (*made, target):
        memory.close()
    return took


def _digest(memory: Memfd) -> str:
    with memory.view() as view:
        return digest_bytes(view)
