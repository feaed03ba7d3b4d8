"""What a first version waits for: pages that are taken, of both slots; what is mapped, comes when it comes."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gemini_hpc.agent.replicas import digest_pool
from gemini_hpc.agent.replicas.memory import Budget, Memfd, NoMemory
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.agent.transfer.threads import run_beside
from gemini_hpc.client import mapped_slots
from gemini_hpc.client.mapped_slots import Content, MappedShard, MappedSlot, SlotMappings, populate
from gemini_hpc.config import Settings
from gemini_hpc.node import priority

MIB = 1 << 20
PLENTY = Settings(memory_floor_bytes=0, memory_cap_bytes=1 << 40)


def mapped(memory: Memfd) -> int:
    """Bytes of a mapping of this memory that this process has in its page table."""
    inode, resident = os.fstat(memory.fd).st_ino, 0
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        fields = part.split(maxsplit=5)
        if len(fields) > 4 and fields[4] == str(inode):
            found = re.search(r"^Rss:\s+(\d+) kB", part, re.MULTILINE)
            resident += int(found[1]) * 1024 if found else 0
    return resident


def taken(memory: Memfd) -> int:
    """Bytes of this memory that exist."""
    return os.fstat(memory.fd).st_blocks * 512


def test_both_slots_are_taken_and_none_is_mapped() -> None:
    """So that no later write can fail, and the first version does not wait for the second one's slot."""
    store = Store(Budget(PLENTY))
    shard = asyncio.run(store.make_shard("default", 0, 1, 0, 8 * MIB))
    views = [memory.view() for memory in shard.memory]
    assert [taken(memory) >= 8 * MIB for memory in shard.memory] == [True, True]
    assert [mapped(memory) for memory in shard.memory] == [0, 0]
    for view in views:
        view.release()
    store.clear()


def test_one_slot_that_does_not_fit_gives_both_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays taken, or counted."""
    store = Store(Budget(PLENTY))
    monkeypatch.setattr(store.budget, "measure_left_bytes", lambda: 4 * MIB)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoMemory, match="ran short"):
        asyncio.run(store.make_shard("default", 0, 1, 0, 8 * MIB))
    assert (store.budget.taken_bytes, len(os.listdir("/proc/self/fd"))) == (0, before)


def test_shards_of_a_node_are_taken_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a node with many processors do not wait for one another's memory; a quarter of them is used."""
    monkeypatch.setattr(digest_pool, "choose_thread_count", lambda cores: 4)
    store, all_here = Store(Budget(PLENTY)), threading.Barrier(4)
    taking, most = list[Memfd](), list[int]()

    def take(memory: Memfd, count_left_bytes: Callable[[], int]) -> None:
        taking.append(memory)
        most.append(len(taking))
        all_here.wait(10)
        taking.remove(memory)

    async def register() -> None:
        await asyncio.gather(*(store.make_shard("default", rank, 4, 0, 8 * MIB) for rank in range(4)))

    monkeypatch.setattr(Memfd, "take_pages", take)
    asyncio.run(register())
    assert len(most) == 8 and max(most) == 4
    store.clear()


def test_mapping_keeps_what_is_there() -> None:
    """A slot may be received into, or hold a copy, while its pages are mapped."""
    memory = Memfd("gemini:test", 4 * MIB)
    memory.take_pages(lambda: 1 << 40)
    os.pwrite(memory.fd, b"what is there", 3 * MIB)
    memory.populate()
    with memory.view() as view:
        assert bytes(view[3 * MIB : 3 * MIB + 13]) == b"what is there"
    assert mapped(memory) == 4 * MIB
    memory.close()
    with pytest.raises(ValueError, match="given back"):
        memory.populate()


def test_memory_that_is_closed_meanwhile_is_not_touched_again() -> None:
    """Its addresses may be another mapping's a moment later: it stays mapped until the thread has left it."""
    mapping, asked, go_on, over = mmap.mmap(-1, 4 * MIB), threading.Event(), threading.Event(), threading.Event()

    def ended() -> bool:
        asked.set()
        return go_on.wait(10)

    def work() -> None:
        populate(mapping, ended)
        over.set()

    threading.Thread(target=work).start()
    assert asked.wait(10)
    with pytest.raises(BufferError):
        mapping.close()
    go_on.set()
    assert over.wait(10)
    mapping.close()


def test_the_slot_that_is_filled_first_comes_first() -> None:
    """An empty one before one that holds a version, an older version before a newer one."""
    fds = [os.memfd_create("gemini:test") for _ in range(2)]
    for fd in fds:
        os.ftruncate(fd, 2 * mmap.PAGESIZE)
    shard = MappedShard(0, 1, 0, mmap.PAGESIZE, fds, MappedSlot)
    assert shard.list_slots_by_age() == shard.slots
    shard.slots[0].content = Content(1, 7, 10, "ab")
    assert shard.list_slots_by_age() == shard.slots[::-1]
    shard.slots[1].content = Content(1, 8, 10, "ab")
    assert shard.list_slots_by_age() == shard.slots
    shard.close()


def test_slots_are_mapped_beside_one_another_and_beside_the_caller() -> None:
    """While the agent takes memory for the next shard, and one processor for each slot."""
    begun, go_on = threading.Barrier(3), threading.Event()
    done = list[int]()

    def populate(number: int) -> None:
        begun.wait(10)
        assert go_on.wait(10)
        done.append(number)

    mappings = SlotMappings()
    mappings.start([cast(Any, SimpleNamespace(populate=partial(populate, 0)))])
    mappings.start([cast(Any, SimpleNamespace(populate=partial(populate, 1)))])
    begun.wait(10)
    go_on.set()
    mappings.wait()
    assert sorted(done) == [0, 1]


def test_threads_that_map_memory_wait_for_a_small_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel holds the process's address space during a step: 64 MiB at nice 10 held an event loop for 0.3 s."""
    steps = list[int]()

    def madvise(at: int, size: int, advice: int) -> int:
        steps.append(size)
        return 0

    monkeypatch.setattr(mapped_slots, "_libc", SimpleNamespace(madvise=madvise))
    populate(mmap.mmap(-1, 8 * MIB + mmap.PAGESIZE))
    assert (sum(steps), max(steps)) == (8 * MIB + mmap.PAGESIZE, MIB // 4)


def test_a_first_version_does_not_wait_for_the_gil_after_each_small_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that runs Python keeps it for 5 ms: 1 GB took 2 to 9 s in small steps, and 1.2 to 2.8 s in these."""
    steps = list[int]()

    def madvise(at: int, size: int, advice: int) -> int:
        steps.append(size)
        return 0

    fd = os.memfd_create("gemini:test")
    os.ftruncate(fd, 64 * MIB)
    monkeypatch.setattr(mapped_slots, "_libc", SimpleNamespace(madvise=madvise))
    slot = MappedSlot(fd, 64 * MIB)
    slot.populate()
    assert len(steps) * 0.005 < 0.1 and sum(steps) == 64 * MIB
    steps.clear()
    slot.populate(awaited=False)
    assert max(steps) == MIB // 4 and sum(steps) == 64 * MIB
    os.close(fd)


def test_a_movers_thread_goes_behind_the_training() -> None:
    """And the threads that it starts; the event loop does not."""
    found = list[int]()

    def nice() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def work() -> None:
        nice()
        other = threading.Thread(target=nice)
        other.start()
        other.join()

    asyncio.run(run_beside("gemini-test", work))
    nice()
    assert found[:2] == [max(priority.NICE, found[2])] * 2
