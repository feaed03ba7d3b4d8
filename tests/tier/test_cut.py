"""A drain is cut off at each of its system calls, or refused it: what was whole stays, what is half is none.

The calls are found by watching a drain; each is then the last one of a drain of its own (SIGKILL, as by a power cut
or the memory killer), or fails as on a full disk.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import nodefile, orders, version
from gemini_hpc.tier.shards import ParsedSlot

from .test_worker import Node, here

pytestmark = pytest.mark.slow

CHANGES = "mkdir,rename,openat,write,pwrite64,ftruncate,fsync,unlink,rmdir,unlinkat"
CALL = re.compile(r"^(\d+)\s+(\w+)\((.*)\) += (-?\w+)")
THROUGH = "/proc/self/fd/"  # how a worker reaches what it has opened and checked
ORDERS = ("write 0", "write 1", "finish")
ONE_WRITER = "from gemini_hpc.tier import worker, writeback; writeback._THREADS = 1; worker.main()"
OLD, NEW, NEXT = Stamp(1, 1), Stamp(1, 2), Stamp(2, 1)


def traced(order: orders.Order, fds: list[int], out: Path, *options: str) -> list[Any]:
    """The answers of a worker under strace; none where it was killed.

    It has one thread that writes: strace counts the calls of each, and which of several makes a call is chance.
    """
    argv = [sys.executable, "-c", ONE_WRITER, str(os.getpid())]
    strace = ["strace", "-D", "-f", "-qq", "-o", str(out), "-e", f"trace={CHANGES}", *options]
    done = subprocess.run(
        [*strace, *argv],
        check=False,
        input=orders.encode(order) + b"\n",
        stdout=subprocess.PIPE,
        pass_fds=fds,
        timeout=60,
    )
    return [orders.answer_decoder.decode(line) for line in done.stdout.splitlines()]


def changes(out: Path, tier: str) -> Iterator[tuple[str, int]]:
    """Name and number, among those of its name, of each call that changes something on the tier."""
    seen: Counter[tuple[str, str]] = Counter()  # strace counts for each thread
    mine: set[str] = set()
    for line in out.read_text().splitlines():
        found = CALL.match(line)
        if found is None:
            continue
        thread, name, arguments, result = found.groups()
        seen[thread, name] += 1
        if name == "openat":
            path = arguments.split(", ")[1]
            on_tier = tier in path or THROUGH in path
            if on_tier and not result.startswith("-"):
                mine.add(result)
            else:
                mine.discard(result)
            if on_tier and ("O_CREAT" in arguments or "O_WRONLY" in arguments):
                yield name, seen[thread, name]
        elif tier in arguments or THROUGH in arguments or arguments.split(",")[0] in mine:
            yield name, seen[thread, name]


class Drain:
    """The orders of one, in turn: two nodes write, the root finishes."""

    def __init__(self, tier: Path, stamp: Stamp) -> None:
        self.node = Node(tier, stamp)

    def order(self, what: str) -> tuple[orders.Order, list[int]]:
        kind, _, rank = what.partition(" ")
        if kind == "write":
            node, number = self.node, int(rank)
            order = orders.Write(node.tier, 5, "default", node.stamp, number, (node.source(number),))
            return order, [node.fds[number]]
        return orders.Finish(self.node.tier, 5, "default", self.node.stamp, 2, tuple(self.node.files), 1), []

    def until(self, what: str = "") -> Any:
        """Carry out all that comes before it, up to the first that fails; return the last answer."""
        answer = None
        for before in ORDERS[: ORDERS.index(what)] if what else ORDERS:
            answer = here(self.order(before)[0])
            if isinstance(answer, orders.Failed):
                break
            if isinstance(answer, orders.Written):
                self.node.files.append(answer.file)
        return answer


def watched(where: Path, what: str) -> list[tuple[str, int]]:
    """The calls of one of the orders."""
    prepare(where)
    drain = Drain(where / "tier", NEW)
    drain.until(what)
    order, fds = drain.order(what)
    *_, answer = traced(order, fds, where / "trace")
    assert isinstance(answer, orders.Written | orders.Finished)
    drain.node.close()
    return list(changes(where / "trace", str(where / "tier")))


def prepare(where: Path) -> None:
    (where / "tier").mkdir(parents=True)
    old = Drain(where / "tier", OLD)
    assert isinstance(old.until(), orders.Finished)
    old.node.close()


def loadable(tier: Path, sources: dict[Stamp, list[str]]) -> Stamp:
    """The version that a recovery would choose; its shards are those of the training, bit by bit."""
    manifest = next(version.list_whole(str(tier / "gemini-5/default")))
    where = tier / "gemini-5/default" / version.format_name(Stamp(*manifest.stamp))
    for rank, (name, stored) in manifest.map_shards().items():
        memory = bytearray(stored.used)
        with nodefile.NodeFileReader(str(where / name)) as reader:
            reader.read(stored, memoryview(memory))
        assert stored.digest == sources[manifest.stamp][rank] == digest_bytes(memoryview(memory))
    return manifest.stamp


def names(tier: Path) -> set[str]:
    return {str(path.relative_to(tier / "gemini-5/default")) for path in (tier / "gemini-5/default").rglob("*")}


def expected(*stamps: Stamp) -> set[str]:
    files = ("", "/node-0000.h5", "/node-0001.h5", "/index.h5", "/manifest.json")
    return {version.format_name(Stamp(*stamp)) + file for stamp in stamps for file in files}


@pytest.mark.parametrize("how", ["killed", "full"])
@pytest.mark.parametrize("what", ORDERS)
def test_each_call(tmp_path: Path, what: str, how: str) -> None:
    calls = watched(tmp_path / "watched", what)
    assert len(calls) > 8 and {"pwrite64", "fsync", "rename"} <= {name for name, _ in calls}
    if how == "full":
        calls = [call for call in calls if call[0] not in ("unlink", "rmdir", "unlinkat")]
    ended: Counter[Stamp] = Counter()
    for name, number in calls:
        where = tmp_path / f"{name}-{number}"
        prepare(where)
        drain = Drain(where / "tier", NEW)
        drain.until(what)
        order, fds = drain.order(what)
        fault = "signal=KILL" if how == "killed" else "error=ENOSPC"
        answers = traced(order, fds, where / "trace", "-e", f"inject={name}:{fault}:when={number}")
        sources = {stamp: digests(where, stamp) for stamp in (OLD, NEW)}
        stamp = loadable(where / "tier", sources)
        ended[stamp] += 1
        if how == "killed":
            assert "killed by SIGKILL" in (where / "trace").read_text()
            assert all(isinstance(answer, orders.Progress) for answer in answers), "one that has been slow tells it"
        elif isinstance(answers[-1], orders.Failed):
            assert os.strerror(errno.ENOSPC) not in answers[-1].reason, "told in our words"
            assert "full" in answers[-1].reason, answers
        assert stamp == NEW or not (answers and isinstance(answers[-1], orders.Finished))
        drain.node.close()
        after(where / "tier", stamp)
    assert ended[OLD] > 8
    assert bool(ended[NEW]) == (what == "finish"), ended


def digests(where: Path, stamp: Stamp) -> list[str]:
    """Of what the training has left in memory, without what lies between its tensors."""
    node, found = Node(where / "elsewhere", stamp), []
    for slot in node.slots:
        memory = bytearray(slot.memory[:])
        ParsedSlot.parse(memoryview(memory), len(memory)).clear_gaps()
        found.append(digest_bytes(memoryview(memory)[: slot.used]))
    node.close()
    return found


def after(tier: Path, stamp: Stamp) -> None:
    """The next run removes what is half, and only that; its own version becomes whole and the one before it goes."""
    here(orders.Clean(str(tier), 5, "default"))
    left = names(tier) - expected(OLD, NEW)
    assert not left and names(tier) >= expected(stamp), left
    drain = Drain(tier, NEXT)
    assert isinstance(drain.until(), orders.Finished)
    drain.node.close()
    assert names(tier) == expected(NEXT)


NAMED = re.compile(r'(?:mkdir|rename)\(.*"([^"]+)"(?:, 0\d+)?\) = 0$')
OPENED = re.compile(r"open(?:at)?\(.*O_PATH.*\) = (\d+)<([^>]+)>")
SYNCED = re.compile(r"fsync\(\d+<([^>]+)>\) = 0$")


def test_each_new_name_outlives_a_power_cut(tmp_path: Path) -> None:
    """The directory that it is in is synced after it, from the tier itself down."""
    tier = tmp_path / "tier"
    tier.mkdir()
    drain, number = Drain(tier, NEW), itertools.count()
    named, synced, opened = dict[str, int](), dict[str, int](), dict[str, str]()
    for what in ORDERS:
        order, fds = drain.order(what)
        answer = traced(order, fds, tmp_path / "trace", "-y")[-1]
        if isinstance(answer, orders.Written):
            drain.node.files.append(answer.file)
        for line in (tmp_path / "trace").read_text().splitlines():
            if match := OPENED.search(line):
                opened[match[1]] = match[2]
            for pattern, found in ((NAMED, named), (SYNCED, synced)):
                if match := pattern.search(line):
                    path = re.sub(rf"^{THROUGH}(\d+)", lambda fd: opened[fd[1]], match[1])
                    found[path] = next(number)
    drain.node.close()
    mine = {path: at for path, at in named.items() if str(tier) in path and os.path.exists(path)}
    above = {str(Path(path).relative_to(tier)) for path in mine}
    assert above == {"gemini-5", "gemini-5/default", *(f"gemini-5/default/{name}" for name in expected(NEW))}
    assert [path for path, at in mine.items() if synced.get(os.path.dirname(path), -1) < at] == []


def test_a_disk_of_each_size(tmp_path: Path) -> None:
    """Real ones, from no room at all for a new version to enough of it."""
    tier, ended = tmp_path / "tier", list[Stamp]()
    prepare(tmp_path)
    pages = sum(-(-path.stat().st_size // 4096) for path in tier.rglob("*.*")) + 1
    shutil.rmtree(tier)
    sources = {stamp: digests(tmp_path, stamp) for stamp in (OLD, NEW)}
    while NEW not in ended and len(ended) < 60:
        tier.mkdir()
        size = f"size={(pages + len(ended)) * 4096}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(tier)], check=True)
        try:
            drain = Drain(tier, OLD)
            drain.until()
            drain.node.close()
            free = os.statvfs(tier).f_bfree
            drain = Drain(tier, NEW)
            answer = drain.until()
            if isinstance(answer, orders.Failed):
                assert "full" in answer.reason and loadable(tier, sources) == OLD
                here(orders.Clean(str(tier), 5, "default"))
                assert names(tier) == expected(OLD) and os.statvfs(tier).f_bfree == free
            drain.node.close()
            ended.append(loadable(tier, sources))
        finally:
            subprocess.run(["umount", str(tier)], check=True)
            tier.rmdir()
    assert ended == [OLD] * (len(ended) - 1) + [NEW] and len(ended) > 8
