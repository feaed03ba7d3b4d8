"""Reading ahead and writing behind, past the page cache: every byte at its place, whatever its file system can do."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from gemini_hpc.format.shard_manifest import TensorRow
from gemini_hpc.tier import direct_io, nodefile, readahead, writeback
from gemini_hpc.tier.readahead import Ahead
from gemini_hpc.tier.writeback import Behind

from . import slots

pytestmark = pytest.mark.slow

PART = direct_io.PART_BYTES
PAGE = direct_io.PAGE_BYTES


@pytest.fixture(params=["disk", "memory", "is not opened"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """File systems with direct reads and writes, and one in which nothing can be opened for them."""
    if request.param == "memory":
        with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
            yield Path(made)
        return
    if request.param == "is not opened":
        opened = os.open

        def open_(path: str, flags: int, *more: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return opened(path, flags, *more)

        monkeypatch.setattr(os, "open", open_)
    yield tmp_path


def refusing(monkeypatch: pytest.MonkeyPatch, unless: Callable[[int], bool]) -> None:
    """A file system that opens files for direct reads and writes, and then has none at most offsets."""
    preadv, pwrite = os.preadv, os.pwrite

    def refused(fd: int, at: int) -> None:
        if is_direct(fd) and not unless(at):
            raise OSError(errno.EINVAL, "Invalid argument")

    def read(fd: int, into: list[memoryview], at: int) -> int:
        refused(fd, at)
        return preadv(fd, into, at)

    def write(fd: int, data: memoryview, at: int) -> int:
        refused(fd, at)
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "pwrite", write)


def is_direct(fd: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def content(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def cached(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    size = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as memory:
        there, first = ctypes.create_string_buffer(-(-size // PAGE)), ctypes.c_char.from_buffer(memory)
        assert not ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(size), there)
        del first
    return sum(byte & 1 for byte in there.raw)


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("gemini-")}


def test_every_byte_gets_to_its_place(place: Path) -> None:
    """Pieces of any length, on pages and beside them, with holes that were there before."""
    path, before = place / "f", content(40 << 20, seed=9)
    for seed in range(4):
        dice, wanted = np.random.default_rng(seed), bytearray(before)
        path.write_bytes(wanted)
        at = 0
        with closing(Behind(str(path), direct=True)) as writer:
            while at < len(wanted) - PART:
                at += int(dice.choice([0, 1, 64, 5000]))
                at += -at % PAGE if dice.random() < 0.7 else 0
                data = content(int(dice.choice([1, 64, PAGE, PAGE + 1, 70_000, PART - 1, PART])), seed=at)
                data = data[: len(wanted) - at]
                copy = writer.put(memoryview(data), at)
                assert copy == data, (seed, at)
                wanted[at : at + len(data)] = data
                at += len(data)
            writer.wait()
            writer.sync()
        assert path.read_bytes() == wanted, seed
        assert not threads(), seed


def test_what_was_written_may_change_at_once(tmp_path: Path) -> None:
    path, source = tmp_path / "f", bytearray(PART)
    path.touch()
    with closing(Behind(str(path), direct=True)) as writer:
        for number in range(40):
            source[:] = bytes([number]) * PART
            writer.put(memoryview(source), number * PART)
        source[:] = bytes(PART)
        writer.wait()
    assert path.read_bytes() == b"".join(bytes([number]) * PART for number in range(40))


def test_no_page_is_written_both_ways_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel holds a write past the cache for failed where a page beside it becomes dirty meanwhile."""
    monkeypatch.setattr(writeback, "_KEPT_BYTES", 100_000)
    under_way, lock, pwrite, mixed = [0, 0], threading.Lock(), os.pwrite, list[str]()
    wrote = [0, 0]

    def watched(fd: int, data: memoryview, at: int) -> int:
        way = is_direct(fd)
        with lock:
            under_way[way] += 1
            wrote[way] += 1
            mixed.extend(["both"] * (under_way[not way] > 0))
        time.sleep(0.001)
        sent = pwrite(fd, data, at)
        with lock:
            under_way[way] -= 1
        return sent

    monkeypatch.setattr(os, "pwrite", watched)
    path = tmp_path / "f"
    path.touch()
    data = memoryview(content(300_001))
    with closing(Behind(str(path), direct=True)) as writer:
        for number in range(100):
            writer.put(data, number * 303_104)
            writer.put(data[:3_000], number * 303_104 + 300_001)
        writer.wait()
    assert not mixed
    assert wrote[True] >= 100 and wrote[False] >= 200
    assert all(path.read_bytes()[n * 303_104 :][:303_001] == bytes(data) + bytes(data[:3_000]) for n in range(100))


def test_large_files_leave_nothing_in_the_page_cache(tmp_path: Path) -> None:
    path, data = tmp_path / "f", content(32 << 20)
    path.touch()
    with closing(Behind(str(path), direct=True)) as writer:
        for at in range(0, len(data), PART):
            writer.put(memoryview(data)[at : at + PART], at)
        writer.wait()
    assert cached(path) == 0
    with closing(Ahead(str(path), 0, len(data))) as reader:
        assert take_all(reader, 0, len(data)) == data
    assert cached(path) == 0
    assert path.read_bytes() == data and cached(path) > 0, "the measure itself"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails_is_told_and_ends(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, count = os.pwrite, [0]

    def full(fd: int, data: memoryview, at: int) -> int:
        count[0] += 1
        if at >= 10 * PART:
            raise OSError(code, os.strerror(code))
        return pwrite(fd, data[: len(data) // 2 // PAGE * PAGE or None], at)

    monkeypatch.setattr(os, "pwrite", full)
    path, data = tmp_path / "f", memoryview(content(PART))
    path.touch()
    with pytest.raises(OSError) as found, closing(Behind(str(path), direct=True)) as writer:
        for number in range(200):
            writer.put(data, number * PART)
        writer.wait()
    assert found.value.errno == code
    assert count[0] < 10 * 20, "what comes after it is not written"
    assert path.read_bytes() == bytes(data) * 10, "short writes were gone on with"
    assert not threads()


def test_a_failure_of_the_last_parts_is_told_by_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.touch()
    with closing(Behind(str(path), direct=True)) as writer:
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: os.write(-1, b""))
        writer.put(memoryview(bytes(PART)), 0)
        with pytest.raises(OSError):
            writer.wait()


def take_all(reader: Ahead, at: int, end: int, step: int = PART) -> bytes:
    """As who reads a file does, from one place on."""
    have = bytearray()
    while at < end:
        part = memoryview(bytearray(min(step, end - at)))
        count = reader.copy_ahead(part, at)
        if not count:
            break
        have += part[:count]
        at += count
    return bytes(have)


def test_a_file_comes_in_its_order(place: Path) -> None:
    path, data = place / "f", content(81 * (1 << 20) + 77)
    path.write_bytes(data)
    for begin, step in product((0, 12_345, 3 * PART + 1), (PART, 100_001)):
        with closing(Ahead(str(path), begin, len(data) - begin)) as reader:
            assert take_all(reader, begin, len(data) + 1, step) == memoryview(data)[begin:], (begin, step)
        assert not threads(), (begin, step)


@pytest.mark.parametrize("pages", [1 << 20, 4])
def test_what_is_refused_is_read_through_the_cache(
    tmp_path: Path, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, lambda at: at % (pages * PAGE) == 0 != at)
    path, data = tmp_path / "f", content(5 * PART + 77)
    path.write_bytes(data)
    with closing(Ahead(str(path), 0, len(data))) as reader:
        assert take_all(reader, 0, len(data) + 1) == data


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_a_read_that_is_late_spoils_no_other_part(tmp_path: Path, slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes begins further on, while it is still under way."""
    monkeypatch.setattr(readahead, "_WINDOW", 4)
    preadv = os.preadv

    def late(fd: int, into: list[memoryview], at: int) -> int:
        if at == slow * PART:
            time.sleep(0.3)
        return preadv(fd, into, at)

    monkeypatch.setattr(os, "preadv", late)
    path, data = tmp_path / "f", content(20 * PART)
    path.write_bytes(data)
    with closing(Ahead(str(path), 0, len(data) - 4 * PART)) as reader:
        time.sleep(0.1)
        reader.copy_ahead(memoryview(bytearray(1)), 4 * PART)
        time.sleep(0.4)
        assert take_all(reader, 4 * PART + 3, len(data)) == data[4 * PART + 3 :], "and to where it really ends"


def test_threads_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on a user's processes: one is enough, none is told."""
    start, left = threading.Thread.start, [1]

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    path, data = tmp_path / "f", content(9 * PART)
    path.write_bytes(data)
    with closing(Ahead(str(path), 0, len(data))) as reader:
        assert take_all(reader, 0, len(data)) == data
    with pytest.raises(RuntimeError, match="new thread"):
        Ahead(str(path), 0, len(data))


def test_holes_are_jumped_and_what_is_past_is_not_here(tmp_path: Path) -> None:
    path, data = tmp_path / "f", content(40 * PART)
    path.write_bytes(data)
    part = memoryview(bytearray(100))
    with closing(Ahead(str(path), 2 * PART, 36 * PART)) as reader:
        for at in (2 * PART + 5, 4 * PART, 9 * PART + 1, 37 * PART + 9):
            assert reader.copy_ahead(part, at) == 100 and part == data[at : at + 100]
        assert reader.copy_ahead(part, 38 * PART - 7) == 7, "no further than its part"
        assert reader.copy_ahead(part, 36 * PART) == 0, "before the part that was taken from"
        assert reader.copy_ahead(part, 0) == 0, "before all of it"
        assert reader.copy_ahead(part, 39 * PART) == 0, "behind all of it"


def test_no_more_than_the_window_is_read_before_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "_WINDOW", 4)
    preadv, read = os.preadv, list[int]()

    def noted(fd: int, into: list[memoryview], at: int) -> int:
        read.append(at // PART)
        return preadv(fd, into, at)

    monkeypatch.setattr(os, "preadv", noted)
    path, data = tmp_path / "f", content(20 * PART)
    path.write_bytes(data)
    with closing(Ahead(str(path), 0, len(data))) as reader:
        for number in range(15):
            deadline = time.monotonic() + 20
            while max(read, default=0) < number + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.01)
            assert sorted(read) == list(range(number + 4))
            assert take_all(reader, number * PART, (number + 1) * PART) == data[number * PART :][:PART]
            reader.copy_ahead(memoryview(bytearray(1)), (number + 1) * PART)
    assert not threads(), "the readers did not wait for room"


def test_what_cannot_be_read_is_left_to_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = tmp_path / "f", content(6 * PART)
    path.write_bytes(data)
    preadv = os.preadv

    def damaged(fd: int, into: list[memoryview], at: int) -> int:
        if at // PART == 3:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, into, at)

    monkeypatch.setattr(os, "preadv", damaged)
    with closing(Ahead(str(path), 0, len(data))) as reader:
        assert take_all(reader, 0, len(data)) == data[: 3 * PART]
        assert take_all(reader, 4 * PART, len(data)) == data[4 * PART :]


@pytest.mark.parametrize("pages", [1 << 20, 4])
def test_a_node_s_file_is_written_through_the_cache_where_it_must_be(
    tmp_path: Path, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, also where some offsets would not be refused."""
    refusing(monkeypatch, lambda at: at % (pages * PAGE) == 0)
    row = TensorRow("model.w", "uint8", (9_000_001,), True, "cpu")
    slot = slots.make(0, 1, (row,), [(0, (0,), row.shape)])
    file = nodefile.write(str(tmp_path), "n.h5", [(slot.shard(), 0, slot.digest())], lambda _: None)
    into = bytearray(slot.used)
    with nodefile.NodeFileReader(str(tmp_path / "n.h5")) as reader:
        reader.read(file.shards[0], memoryview(into))
    slot.shard().clear_gaps()
    assert into == slot.memory[: slot.used] and os.listdir(tmp_path) == ["n.h5"]


def test_a_write_of_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    path = tmp_path / "f"
    path.touch()
    with pytest.raises(OSError) as found, closing(Behind(str(path), direct=False)) as writer:
        writer.put(memoryview(bytes(PART)), 0)
        writer.wait()
    assert found.value.errno == errno.EIO


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Ahead(str(tmp_path / "none"), 0, 1)
    with pytest.raises(FileNotFoundError):
        Behind(str(tmp_path / "none"), direct=True)
    assert not threads()
