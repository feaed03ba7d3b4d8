"""Requirement memory: root's part of leaving slurmd's cgroup, with real files where there are such, and a busctl of
our own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemini_hpc.agent.replicas.memory import Budget, Memfd, NoMemory
from gemini_hpc.config import Settings
from gemini_hpc.devcluster import cgroups
from gemini_hpc.node import cgroup, epilog, ledger, prolog
from gemini_hpc.node.cgroup import AgentCgroup
from gemini_hpc.node.memory_cgroup import AGENT_ROOM_BYTES, Choice, Place, build_scope_name

MIB = 1 << 20


@pytest.fixture
def top() -> Iterator[Path]:
    """A part of the real hierarchy."""
    base = cgroups._find_base() if os.geteuid() == 0 else None
    if base is None:
        pytest.skip("no writable memory cgroup (v1) on this machine")
    path = base / f"gemini-test-{os.getpid()}"
    path.mkdir()
    yield path
    cgroups._remove_tree(path)


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def busctl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> Path:
    path = tmp_path / "busctl"
    path.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/said\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setattr(cgroup, "BUSCTL", str(path))
    return tmp_path / "said"


@pytest.mark.slow
def test_systemd_moves_and_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, top: Path, sleeper: int
) -> None:
    """A stand-in that answers first and moves the process a moment later, as systemd does."""
    scope = top / build_scope_name(7, sleeper)
    move = f"(sleep 0.2; mkdir {scope}; echo {sleeper} >{scope}/cgroup.procs) >/dev/null 2>&1 &"
    said = busctl(monkeypatch, tmp_path, move)
    assert cgroup.admit(Choice("systemd"), 7, sleeper, 100 * MIB)[1] == ""
    found = cgroup.find_place(sleeper)
    assert found is not None and found.path.endswith(scope.name)
    assert f"PIDs au 1 {sleeper} Slice s geminihpc.slice MemoryMax t {100 * MIB}" in said.read_text()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no such method >&2; exit 1", "no such method"),
        ("exit 0", "did not create the scope in time"),
        ("exec sleep 30", "in time"),
    ],
)
def test_systemd_that_does_not_do_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sleeper: int, script: str, words: str
) -> None:
    monkeypatch.setattr(cgroup, "SYSTEMD_TIMEOUT_S", 0.3)
    busctl(monkeypatch, tmp_path, script)
    began = time.monotonic()
    problem = cgroup.admit(Choice("systemd"), 7, sleeper, 100 * MIB)[1]
    assert words in problem and "\n" not in problem and time.monotonic() - began < 3
    monkeypatch.setattr(cgroup, "BUSCTL", str(tmp_path / "missing"))
    assert cgroup.admit(Choice("systemd"), 7, sleeper, 100 * MIB)[1] == "systemd: No such file or directory"


def test_v2_is_written_as_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No v2 memory controller can be had here: what would be written, in this order."""
    written: list[tuple[str, str]] = []

    def write(path: str, text: str) -> None:
        assert Path(path).parent.is_dir()
        written.append((str(Path(path).relative_to(tmp_path)), text))

    monkeypatch.setattr(cgroup, "_write", write)
    monkeypatch.setattr(cgroup, "find_place", lambda pid="self": Place(2, str(tmp_path), "/slurmd", True))
    monkeypatch.setattr(cgroup, "SYSTEMD_BOOTED", str(tmp_path / "no-systemd"))
    choice = cgroup.prepare(Settings(memory_cap_bytes=100 * MIB), 1 << 40, 3)
    assert choice == Choice("v2", f"{tmp_path}/gemini-hpc")
    controllers = [("cgroup.subtree_control", f"+{name}") for name in ("memory", "cpu", "pids")]
    assert [step for step in written if step[0] == "cgroup.subtree_control"] == controllers
    assert ("gemini-hpc/memory.max", str(100 * MIB + 3 * AGENT_ROOM_BYTES)) in written
    written.clear()
    assert cgroup.admit(choice, 7, 4711, 50 * MIB) == (AgentCgroup(2, (f"{tmp_path}/gemini-hpc/7",)), "")
    assert written[:3] == [(f"gemini-hpc/{at}", what) for at, what in controllers]
    assert ("gemini-hpc/7/memory.max", str(50 * MIB)) in written
    assert written[-1] == ("gemini-hpc/7/cgroup.procs", "4711"), "entered when its limits stand"


@pytest.mark.slow
def test_earlier_agent_in_a_scope_of_its_own_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, top: Path, sleeper: int
) -> None:
    """Stopped by its owner, who has another one started beside it: nobody would look into the first one's scope."""
    former = top / "former.scope"
    former.mkdir()
    (former / "cgroup.procs").write_text(str(sleeper))
    os.kill(sleeper, signal.SIGSTOP)
    known = ledger.LedgerEntry(7, 65534, 0, AgentCgroup(1, (str(former),)))
    with ledger.open_ledger(str(tmp_path / "run")) as entries:
        entries.put(known)
    now = AgentCgroup(1, (str(top / "now.scope"),))
    monkeypatch.setattr(cgroup, "admit", lambda choice, job, pid, limit: (now, ""))
    again = prolog.JobRun(7, 65534, 1, 2, "n1", "n[1-2]", "", 0)
    prolog._leave_slurmds_cgroup(again, str(tmp_path / "run"), Choice("systemd"), 100 * MIB, os.getpid())
    assert os.waitid(os.P_PID, sleeper, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None, "ended"
    assert not former.exists()
    with ledger.open_ledger(str(tmp_path / "run")) as entries:
        entry = entries.get(7)
    assert entry is not None and (entry.group, entry.restart) == (now, 1)


def test_a_controller_that_is_not_there_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").touch()
    monkeypatch.setattr(cgroup, "find_place", lambda pid="self": Place(2, str(tmp_path), "/slurmd", True))
    choice = cgroup.prepare(Settings(agent_cgroup="/gemini-hpc"), 1 << 40, 1)
    assert choice.how == "stay" and "memory.max: No such file" in choice.why


def inside(directory: Path, work: Callable[[], int]) -> int:
    """What a process in this cgroup makes of it: a status."""
    child = os.fork()
    if child == 0:
        status = 255
        try:
            (directory / "cgroup.procs").write_text("0")
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def said(budget: Budget, wanted_bytes: int) -> str:
    """Why that cannot be taken, or ""."""
    try:
        budget.reserve(wanted_bytes, "shard")
    except NoMemory as exc:
        return str(exc)
    return ""


@pytest.fixture
def two(top: Path) -> tuple[Path, Path, Settings]:
    """Two jobs on a node with a cap of 96 MiB, of which each has a share of 64: the cgroups that root makes."""
    settings = Settings(
        memory_cap_bytes=96 * MIB, memory_floor_bytes=0, agent_cgroup=str(top).removeprefix(cgroups.MOUNT)
    )
    (top / "memory.limit_in_bytes").write_text(str(96 * MIB + 2 * AGENT_ROOM_BYTES))
    jobs = top / "7", top / "8"
    for job in jobs:
        job.mkdir()
        (job / "memory.limit_in_bytes").write_text(str(64 * MIB + AGENT_ROOM_BYTES))
    return *jobs, settings


@pytest.mark.slow
def test_a_job_has_its_share_and_no_more(two: tuple[Path, Path, Settings]) -> None:
    """All of it: its agent's own processes have room beside it."""
    first, _, settings = two

    def work() -> int:
        ballast, budget = bytearray(40 * MIB), Budget(settings, 1, "2 of 3 CPUs")
        if budget.cap_bytes != 64 * MIB or not ballast:
            return 1
        if "the job's share of the node (2 of 3 CPUs) is 64 MiB of its cap of 96 MiB" not in said(budget, 65 * MIB):
            return 2
        budget.reserve(64 * MIB, "shard")
        memory = Memfd("gemini:test", 64 * MIB)
        memory.reserve(budget.measure_left_bytes)
        return 3 if budget.measure_left_bytes() else 42

    assert inside(first, work) == 42


@pytest.mark.slow
def test_shares_that_are_more_than_the_cap_end_nobody(two: tuple[Path, Path, Settings]) -> None:
    """A job that has ended keeps its copies for a while, and another one has its CPUs."""
    first, second, settings = two

    def other() -> int:
        budget = Budget(settings)
        memory = Memfd("gemini:test", 48 * MIB)
        try:
            memory.reserve(budget.measure_left_bytes)
            return 1
        except NoMemory:
            memory.close()
        why = said(budget, 33 * MIB)
        return 42 if "has 32 MiB left for all agents of this node" in why else 2

    def one() -> int:
        memory = Memfd("gemini:test", 64 * MIB)
        memory.reserve(Budget(settings).measure_left_bytes)
        with memory.view() as view:
            view[0] = 1
        return inside(second, other)

    assert inside(first, one) == 42


def test_a_cgroup_that_is_there_gets_another_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Requeued with more of the node; never below what is taken, for v2 would kill."""
    for name, text in (("memory.max", "900"), ("memory.current", "500")):
        (tmp_path / name).write_text(text)
    group = AgentCgroup(2, (str(tmp_path),))
    for wanted, there in ((600, "600"), (550, "550"), (400, "550")):
        assert cgroup.resize(group, wanted) == ""
        assert (tmp_path / "memory.max").read_text() == there
    said_to = busctl(monkeypatch, tmp_path, "exit 0")
    scope = tmp_path / "geminihpc-7-4711.scope"
    scope.mkdir()
    for name, text in (("memory.max", "max"), ("memory.current", "0")):
        (scope / name).write_text(text)
    assert cgroup.resize(AgentCgroup(2, (str(scope),)), 300) == ""
    assert "SetUnitProperties sba(sv) geminihpc-7-4711.scope true 1 MemoryMax t 300" in said_to.read_text()
    assert cgroup.resize(cgroup.NO_GROUP, 300) == ""
    assert cgroup.resize(AgentCgroup(2, (str(tmp_path / "gone"),)), 300) == "", "with its agent"
    busctl(monkeypatch, tmp_path, "echo no such unit >&2; exit 1")
    assert "its limit could not be set: busctl: no such unit" in cgroup.resize(AgentCgroup(2, (str(scope),)), 400)


def test_no_agent_is_started_without_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the node, or of a cgroup that the site limits."""
    free = {"MemAvailable": 500 * MIB, "MemTotal": 1 << 30}
    monkeypatch.setattr(cgroup, "read_meminfo", lambda: free)
    monkeypatch.setattr(cgroup, "find_place", lambda pid="self": Place(2, str(tmp_path), "/site/slurmd", True))
    (tmp_path / "site" / "agents").mkdir(parents=True)
    choice, settings = Choice("v2", f"{tmp_path}/site/agents"), Settings(memory_floor_bytes=100 * MIB)
    assert cgroup.find_shortage(choice, settings) == "", "no limit is known"
    for name, text in (("memory.max", 300 * MIB), ("memory.current", 250 * MIB), ("memory.stat", "inactive_file 0")):
        (tmp_path / "site" / name).write_text(str(text))
    assert (
        cgroup.find_shortage(choice, settings)
        == f"no memory for its agent: it needs 96 MiB, {tmp_path}/site has 50 MiB left"
    )
    (tmp_path / "site" / "memory.stat").write_text(f"inactive_file {46 * MIB}")
    assert cgroup.find_shortage(choice, settings) == ""
    free["MemAvailable"] = 195 * MIB
    expected = "no memory for its agent: it needs 96 MiB, 95 MiB are free above the floor of 100 MiB"
    assert cgroup.find_shortage(choice, settings) == cgroup.find_shortage(Choice("systemd"), settings) == expected


@pytest.mark.slow
def test_reservation_stops_before_the_kernel_kills(top: Path) -> None:
    """In a cgroup of 200 MiB: what does not fit is refused with the numbers, at once or half way."""
    (top / "memory.limit_in_bytes").write_text(str(200 * MIB))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            (top / "cgroup.procs").write_text("0")
            budget = Budget(Settings(memory_floor_bytes=0))
            try:
                budget.reserve(190 * MIB, "shard")
            except NoMemory as exc:
                status = 2 if "MiB left" in str(exc) else 3
            memory = Memfd("gemini:test", 190 * MIB)
            try:
                memory.reserve(budget.measure_left_bytes)
            except NoMemory as exc:
                status += 10 if "ran short" in str(exc) else 20
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 12


# ---- faults of ours --------------------------------------------------------------------------------------


def test_a_cgroup_that_is_not_visible_any_more_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "find_place", lambda pid="self": None)
    group, problem = cgroup.admit(Choice("v1", "/sys/fs/cgroup/memory/gemini"), 7, os.getpid(), MIB)
    assert group.version == 0 and "visible" in problem


@pytest.mark.parametrize("strict", [False, True])
def test_a_fault_of_ours_in_prolog_or_epilog_drains_no_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], strict: bool
) -> None:
    """Unless strict_prolog wants it."""
    monkeypatch.setattr(
        prolog, "load_site_settings", lambda: Settings(run_dir=str(tmp_path / "run"), strict_prolog=strict)
    )
    monkeypatch.setattr(prolog, "_notes", [])
    monkeypatch.setattr(epilog, "load_site_settings", Settings)

    def fault(*_: object) -> int:
        raise KeyError("MemTotal")

    monkeypatch.setattr(prolog, "_protect_job", fault)
    monkeypatch.setattr(epilog, "_end_incarnation", fault)
    words = ["7", "5001", "0", "2", "n1", "n[1-2]", *[""] * (len(prolog.ARGUMENTS) - 6)]
    assert prolog.main(words) == (prolog.EXIT_STRICT if strict else 0)
    assert epilog.main(["7", "5001", "0", "0", "n1", "n[1-2]"]) == 0
    assert capfd.readouterr().err.count("KeyError: 'MemTotal'") == 2
