"""The process that reads and writes on the tier: an order in, answers out, whatever happens to the file system."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format.shard_manifest import TensorRow
from gemini_hpc.tier import job_directory, orders, version, worker
from gemini_hpc.tier.shards import ParsedSlot

from . import slots

ROWS = (TensorRow("model.w", "float32", (64, 16), True, "cpu"),)
STAMP = Stamp(2, 7)
IDLE = 3
IOPRIO_GET = {"x86_64": 252, "aarch64": 31}
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")  # root's process, without root's rights
LOADED = """
import os, sys
from gemini_hpc.tier import worker
worker.main()
print(os.nice(0), *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def start(order: orders.Order, *fds: int, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    argv = [*before, sys.executable, "-m", "gemini_hpc.tier.worker", str(os.getpid())]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds)
    assert process.stdin is not None
    process.stdin.write(orders.encode(order) + b"\n")
    process.stdin.close()
    return process


def here(order: orders.Order) -> Any:
    """Carry out an order in this process, without its signs of life."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_lower_priority", lambda: None)
        patch.setattr(worker, "_say", lambda _: None)
        return worker.answer(orders.encode(order))


def carry_out(order: orders.Order, *fds: int, before: tuple[str, ...] = ()) -> Any:
    """Carry out an order in a process of its own, as an agent does."""
    with start(order, *fds, before=before) as process:
        assert process.stdout is not None
        answers = [orders.answer_decoder.decode(line) for line in process.stdout.read().splitlines()]
        assert process.wait() == 0
    assert all(isinstance(answer, orders.Progress) for answer in answers[:-1])
    return answers[-1]


class Node:
    """Two ranks' slots in memory, on one node each."""

    def __init__(self, tier: Path, stamp: Stamp = STAMP) -> None:
        self.tier, self.stamp = str(tier), stamp
        self.fds: list[int] = []
        self.slots: list[slots.Slot] = []
        self.files: list[Any] = []
        for rank in range(2):
            self.fds.append(os.memfd_create("slot"))
            boxes = [(0, (32 * rank, 0), (32, 16))]
            self.slots.append(slots.make(rank, 2, ROWS, boxes, stamp=stamp, fd=self.fds[-1]))

    def source(self, rank: int) -> orders.Source:
        slot = self.slots[rank]
        return orders.Source(self.fds[rank], rank, rank, len(slot.memory), slot.used, slot.digest())

    def write(self, rank: int, **more: Any) -> Any:
        order = orders.Write(self.tier, 5, "default", self.stamp, rank, (self.source(rank),), **more)
        return here(order)

    def finish(self, **more: Any) -> Any:
        return here(orders.Finish(self.tier, 5, "default", self.stamp, 2, tuple(self.files), **more))

    def save(self, **more: Any) -> Any:
        self.files = [self.write(rank).file for rank in range(2)]
        return self.finish(**more)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def node(tmp_path: Path) -> Any:
    made = Node(tmp_path)
    yield made
    made.close()


def io_class(pid: int) -> int:
    """The class of a process's input and output."""
    return int(ctypes.CDLL(None).syscall(IOPRIO_GET[os.uname().machine], 1, pid)) >> 13


def look(tier: Path, *without: tuple[str, Stamp], make: bool = False) -> Any:
    return here(orders.Look(str(tier), 5, "", without, begin=True, make=make))


@pytest.mark.slow
def test_from_memory_to_the_tier_and_back(node: Node, tmp_path: Path) -> None:
    """Processes of their own carry out the orders, each with the descriptors of its order."""
    looks = orders.Look(str(tmp_path), 5, "", begin=True)
    assert carry_out(looks).manifests == ()
    for rank in range(2):
        write = orders.Write(node.tier, 5, "default", node.stamp, rank, (node.source(rank),))
        node.files.append(carry_out(write, node.fds[rank]).file)
    finish = orders.Finish(node.tier, 5, "default", node.stamp, 2, tuple(node.files))
    assert carry_out(finish) == orders.Finished(directory=f"{tmp_path}/gemini-5")
    (manifest,) = carry_out(looks).manifests
    assert manifest.stamp == STAMP and manifest.whole and manifest.serial == 1
    for rank, (_, stored) in manifest.map_shards().items():
        fd = os.memfd_create("into")
        os.ftruncate(fd, stored.used)
        order = orders.Read(str(tmp_path), 5, "default", STAMP, rank, fd, stored.used, stored.digest)
        assert carry_out(order, fd) == orders.Finished()
        wanted = bytearray(node.slots[rank].memory[:])
        assert digest_bytes(memoryview(wanted)[: stored.used]) == node.slots[rank].digest(), "a slot stays as it is"
        ParsedSlot.parse(memoryview(wanted), len(wanted)).clear_gaps()
        assert os.pread(fd, stored.used, 0) == wanted[: stored.used]
        os.close(fd)
    assert look(tmp_path, ("default", STAMP)).manifests == ()


def test_a_long_end_has_signs_of_life(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each piece that goes into the index, if that were slow."""
    node.files = [node.write(rank).file for rank in range(2)]
    said: list[orders.Answer] = []
    monkeypatch.setattr(worker, "_say", said.append)
    monkeypatch.setattr(worker, "_TELL_EVERY_S", -1.0)
    order = orders.Finish(node.tier, 5, "default", STAMP, 2, tuple(node.files))
    assert worker.DOES[orders.Finish](order) == orders.Finished(directory=f"{node.tier}/gemini-5")
    assert said == [orders.Progress(0)] * 3


def test_a_version_that_a_node_has_not_written_is_none(node: Node, tmp_path: Path) -> None:
    node.files = [node.write(0).file]
    assert "2 ranks" in node.finish().reason
    assert look(tmp_path).manifests == ()
    assert here(orders.Clean(str(tmp_path), 5, "default")).removed == (STAMP,)
    assert version.list_stamps(str(tmp_path / "gemini-5/default")) == []


def test_a_directory_that_each_node_has_for_itself_is_named(node: Node, tmp_path: Path) -> None:
    node.files = [node.write(rank).file for rank in range(2)]
    (tmp_path / "gemini-5/default" / version.format_name(STAMP) / node.files[1].name).unlink()
    assert "each node has a directory of its own" in node.finish().reason
    assert look(tmp_path).manifests == ()


def test_what_was_overwritten_while_it_was_copied_is_not_written(node: Node, tmp_path: Path) -> None:
    source = node.source(0)
    node.slots[0].memory[9000] ^= 1
    order = orders.Write(str(tmp_path), 5, "default", STAMP, 0, (source,))
    assert "overwritten" in here(order).reason
    assert os.listdir(tmp_path / "gemini-5/default" / version.format_name(Stamp(*STAMP))) == []


def test_old_versions_go_when_a_new_one_is_whole(tmp_path: Path) -> None:
    removed = []
    for number in range(1, 7):
        node = Node(tmp_path, Stamp(1, number))
        removed.append(node.save(keep_last=2, keep_every=3).removed)
        node.close()
    assert removed == [(), (), ((1, 1),), ((1, 2),), (), ((1, 4),)]
    assert [s.version for s in version.list_stamps(str(tmp_path / "gemini-5/default"))] == [6, 5, 3]


@pytest.mark.slow
def test_a_tier_in_which_one_may_make_directories_and_not_look(node: Node, tmp_path: Path) -> None:
    node.tier = str(tmp_path / "tier")
    os.mkdir(node.tier)
    os.chmod(node.tier, 0o1333)
    order = orders.Write(node.tier, 5, "default", node.stamp, 0, (node.source(0),))
    assert isinstance(carry_out(order, node.fds[0], before=WITHOUT_RIGHTS), orders.Written)


def written_to(node: Node, tier: Path, before: tuple[str, ...] = ()) -> str:
    """Return why a version cannot be written to this tier; nothing of it is left there."""
    node.tier = str(tier)
    order = orders.Write(node.tier, 5, "default", node.stamp, 0, (node.source(0),))
    answer = carry_out(order, node.fds[0], before=before) if before else here(order)
    assert isinstance(answer, orders.Failed) and answer.reason.startswith(node.tier), answer
    assert {name for _, _, names in os.walk(node.tier) for name in names} <= {job_directory.MARK}, tier
    return answer.reason.rpartition(": ")[2]


def test_one_sentence_says_what_is_wrong(node: Node, tmp_path: Path) -> None:
    assert written_to(node, tmp_path / "gone") == "the directory is not there"
    (tmp_path / "file").touch()
    assert written_to(node, tmp_path / "file") == "not a directory"


@pytest.mark.slow
def test_one_sentence_says_what_is_wrong_with_a_file_system(node: Node, tmp_path: Path) -> None:
    full = ("strace", "-D", "-f", "-o", "/dev/null", "-e", "inject=pwrite64:error=EDQUOT")
    for kind, options, before, why in (
        ("full", "size=4k", (), "the file system is full"),
        ("read-only", "ro", (), "the file system is read-only"),
        ("closed", "", WITHOUT_RIGHTS, "permission denied"),
        ("another's", "", (), "belongs to user 65534, neither to the job's user nor to root"),
        ("quota", "", full, "the quota is used up"),
    ):
        tier = tmp_path / kind
        tier.mkdir()
        if kind == "another's":
            shutil.chown(tier, 65534)
        if kind == "closed":
            tier.chmod(0o555)
        if options:
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", tier], check=True)
        try:
            assert written_to(node, tier, before) == why, kind
        finally:
            if options:
                subprocess.run(["umount", tier], check=True)


def test_the_directory_of_a_user_is_made_where_that_is_asked_for(tmp_path: Path) -> None:
    assert isinstance(look(tmp_path / "alice"), orders.Failed)
    assert look(tmp_path / "alice", make=True) == orders.Found(()) == look(tmp_path / "alice", make=True)
    assert (tmp_path / "alice").stat().st_mode & 0o777 == 0o700


def test_nothing_is_made_where_a_file_system_is_missing(tmp_path: Path) -> None:
    answer = look(tmp_path / "not-mounted" / "alice", make=True)
    assert isinstance(answer, orders.Failed) and "not there" in answer.reason
    assert not (tmp_path / "not-mounted").exists()


@pytest.mark.slow
def test_it_ends_with_the_agent(node: Node, tmp_path: Path) -> None:
    """A rate of 1 byte a second: it would not come to its end by itself."""
    order = orders.Write(str(tmp_path), 5, "default", STAMP, 0, (node.source(0),), 1.0)
    script = (
        "import os, subprocess, sys, time\n"
        "argv = [sys.executable, '-m', 'gemini_hpc.tier.worker', str(os.getpid())]\n"
        f"p = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=({node.fds[0]},))\n"
        f"p.stdin.write({orders.encode(order)!r} + b'\\n'); p.stdin.close()\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, pass_fds=(node.fds[0],))
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    where = tmp_path / "gemini-5/default" / version.format_name(Stamp(*STAMP))
    until(lambda: where.is_dir() and os.listdir(where), every_s=0.02)
    assert [name for name in os.listdir(where) if name.endswith(".tmp")]
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert io_class(pid) == IDLE
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    agent.stdout.close()
    until(lambda: not Path(f"/proc/{pid}/stat").exists(), every_s=0.02)
    assert here(orders.Clean(str(tmp_path), 5, "default")).removed == (STAMP,)
    shutil.rmtree(tmp_path / "gemini-5")


@pytest.mark.slow
def test_torch_is_never_loaded_and_what_a_training_waits_for_is_not_behind_others(node: Node, tmp_path: Path) -> None:
    """torch takes seconds and hundreds of MB, for each order."""
    fd = os.memfd_create("into")
    source = node.source(0)
    os.ftruncate(fd, source.used)
    where = (str(tmp_path), 5, "default")
    node.files = [node.write(rank).file for rank in range(2)]
    (stored,) = node.files[0].shards
    for order in (
        orders.Write(*where, STAMP, 0, (source,), compress=True),
        orders.Finish(*where, STAMP, 2, tuple(node.files)),
        orders.Look(*where, begin=True),
        orders.Read(*where, STAMP, 0, fd, stored.used, stored.digest),
        orders.Clean(*where),
    ):
        done = subprocess.run(
            [sys.executable, "-c", LOADED, str(os.getpid())],
            input=orders.encode(order) + b"\n",
            capture_output=True,
            pass_fds=(node.fds[0], fd),
            check=True,
        )
        answer = orders.answer_decoder.decode(done.stdout.splitlines()[-1])
        assert not isinstance(answer, orders.Failed), answer
        nice, *loaded = done.stderr.decode().split()
        assert (nice == "19") == (not isinstance(order, orders.Look | orders.Read))
        assert "gemini_hpc" in loaded and "torch" not in loaded
        assert ("h5py" in loaded) == isinstance(order, orders.Write | orders.Finish | orders.Read)
    os.close(fd)


def test_garbage_is_an_order_for_nothing() -> None:
    argv = [sys.executable, "-m", "gemini_hpc.tier.worker", str(os.getpid())]
    done = subprocess.run(argv, input=b'{"op":"write","tier":"/"}\n', stdout=subprocess.PIPE, check=True)
    assert isinstance(orders.answer_decoder.decode(done.stdout), orders.Failed)
