"""The agent's hashing threads: right digests, what is urgent first, cancelled where nobody waits, gone at the end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from random import Random

import pytest

from gemini_hpc.agent.replicas.digest_pool import DigestPool, Urgency, choose_thread_count
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.core.digest import PIECE_BYTES, Pieces, digest_bytes

SIZE = 9 * PIECE_BYTES + 5
DATA = Random(3).randbytes(SIZE)


@pytest.fixture
def memory() -> Iterator[Memfd]:
    made = Memfd("gemini:test", SIZE)
    made.reserve(lambda: 1 << 40)
    with made.view() as view:
        view[:] = DATA
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[DigestPool]:
    made = DigestPool(3)
    yield made
    made.close()


def test_how_many() -> None:
    assert [choose_thread_count(cores) for cores in (1, 2, 8, 16, 64, 256)] == [2, 2, 2, 4, 16, 16]


@pytest.mark.parametrize(("start", "end"), [(0, SIZE), (0, 0), (0, 1), (0, PIECE_BYTES), (17, SIZE), (5, 5)])
def test_it_finds_the_digest(pool: DigestPool, memory: Memfd, start: int, end: int) -> None:
    found = asyncio.run(pool.digest(memory, end, start, urgency=Urgency.OWN))
    assert found == memory.digest(end, start) == digest_bytes(DATA[start:end])


def test_many_at_once_and_parts_of_one(pool: DigestPool, memory: Memfd) -> None:
    readings = [pool.read(memory, SIZE - n, urgency=Urgency(n % 3)) for n in range(30)]
    assert [reading.result() for reading in readings] == [digest_bytes(DATA[: SIZE - n]) for n in range(30)]
    pieces = Pieces(SIZE)
    halves = [pool.hash(memory, pieces, *half, urgency=Urgency.ARRIVING) for half in ((0, 4), (4, pieces.count))]
    for half in halves:
        half.result()
    assert pieces.compute_digest() == digest_bytes(DATA)


def test_what_is_urgent_goes_first(memory: Memfd) -> None:
    pool, order = DigestPool(1), list[str]()
    gate = _Slow(SIZE)
    slow = pool.hash(memory, gate, 0, 1, urgency=Urgency.INVENTORY)
    gate.begun.wait(10)
    for urgency in (Urgency.INVENTORY, Urgency.OWN, Urgency.ARRIVING):
        pool.read(memory, SIZE, urgency=urgency).add_done_callback(lambda _, name=urgency.name: order.append(name))
    last = pool.read(memory, SIZE, urgency=Urgency.INVENTORY)
    gate.go_on.set()
    slow.result()
    last.result()
    assert order == ["ARRIVING", "OWN", "INVENTORY"]
    pool.close()


class _Slow(Pieces):
    """Pieces of which the first holds the thread up."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def put(self, number: int, found: bytes) -> None:
        self.begun.set()
        self.go_on.wait(10)
        super().put(number, found)


def test_a_reading_that_nobody_wants_and_the_end(memory: Memfd) -> None:
    pool, gate = DigestPool(1), _Slow(SIZE)
    slow = pool.hash(memory, gate, 0, 1, urgency=Urgency.OWN)
    gate.begun.wait(10)
    given_up, left = (pool.read(memory, SIZE, urgency=Urgency.OWN) for _ in range(2))
    assert given_up.cancel()
    ends = threading.Thread(target=pool.close)
    ends.start()
    with pytest.raises(CancelledError):
        left.result(10)
    gate.go_on.set()
    slow.result()
    ends.join(10)
    assert not ends.is_alive() and pool.read(memory, SIZE, urgency=Urgency.OWN).cancelled()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gemini-digest")]
    assert pool.cpu_s >= 0.0


def test_memory_that_has_been_given_back(pool: DigestPool) -> None:
    gone = Memfd("gemini:test", SIZE)
    gone.close()
    with pytest.raises(ValueError, match="given back"):
        pool.read(gone, SIZE, urgency=Urgency.OWN)


def test_its_threads_leave_the_cores_to_others(pool: DigestPool, memory: Memfd) -> None:
    seen, mine = list[int](), os.getpriority(os.PRIO_PROCESS, 0)

    class Looks(Pieces):
        def put(self, number: int, found: bytes) -> None:
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            super().put(number, found)

    pool.hash(memory, Looks(SIZE), 0, 1, urgency=Urgency.OWN).result()
    assert seen == [max(10, mine)] and os.getpriority(os.PRIO_PROCESS, 0) == mine
