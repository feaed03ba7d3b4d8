"""The kernel ends a rank for want of memory: it is told so, with the limit, and a leak is not started without end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import until

from gemini_hpc.client.restart_limit import Reached, RestartLimit
from gemini_hpc.node import cgroup, memory_cgroup, out_of_memory
from gemini_hpc.node.memory_cgroup import Place
from gemini_hpc.node.out_of_memory import OutOfMemory

from .launchers import Launchers

MIB = 1 << 20
EVENTS = {
    1: ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    2: ("memory.events", "low 0\nhigh 0\nmax 7\noom 2\noom_kill {}\noom_group_kill 0\n"),
}

# A rank in a cgroup of its own that takes more than there is; what its launcher would tell of it.
PROGRAM = """
import os, sys
from gemini_hpc.client.restart_limit import Reached
from gemini_hpc.launch.rank_end import describe
from gemini_hpc.node.out_of_memory import OutOfMemory
from gemini_hpc.launch.rank_process import Forked, RankProcess, note_error

open(sys.argv[1] + "/cgroup.procs", "w").write("0")
memory = OutOfMemory()
for what in sys.argv[2:]:
    memory.begin_attempt()
    try:
        rank = RankProcess({})
    except Forked:
        if what == "takes":
            data = [bytearray(b"x" * (1 << 20)) for _ in range(1000)]
        elif what == "worker":
            if (pid := os.fork()) == 0:
                data = [bytearray(b"x" * (1 << 20)) for _ in range(1000)]
            os.waitpid(pid, 0)
            os._exit(3)
        os.kill(os.getpid(), 9)
    while not rank.has_ended():
        pass
    end = describe(rank, 3, "n1", Reached((1, 7), 7), memory, spares=False)
    print(end.text, end.key, end.memory, sep="|", flush=True)
"""


@pytest.fixture
def group() -> Iterator[Callable[[int], Path]]:
    """group(MiB): a memory cgroup with this limit."""
    made: list[Path] = []

    def make(mib: int) -> Path:
        here = cgroup.find_place()
        assert here is not None and here.writable, "no memory cgroup that root may write to"
        made.append(Path(here.locate_directory(), f"gemini-test-{os.getpid()}-{len(made)}"))
        made[-1].mkdir()
        (made[-1] / memory_cgroup.name_limit_file(here.version)).write_text(str(mib * MIB))
        return made[-1]

    yield make
    until(lambda: not any((at / "cgroup.procs").read_text() for at in made), 20, what="nobody is in it")
    for directory in made:
        directory.rmdir()


@pytest.mark.slow
def test_a_rank_that_takes_more_than_it_may(group: Callable[[int], Path]) -> None:
    """Killed by hand it is not told so, though another one was for memory before; a worker of a rank counts."""
    argv = [sys.executable, "-c", PROGRAM, str(group(64)), "takes", "killed", "worker", "takes"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    why, key = "out of memory: the limit here is 64 MiB", "memory at step 7"
    assert done.stdout.splitlines() == [
        f"rank 3 ended with SIGKILL ({why})|{key}|True",
        "rank 3 ended with SIGKILL||False",
        f"rank 3 ended with status 3 ({why})|{key}|True",
        f"rank 3 ended with SIGKILL ({why})|{key}|True",
    ], done.stderr


@pytest.mark.slow
def test_a_training_that_leaks(group: Callable[[int], Path], launch: Callable[..., Launchers]) -> None:
    """It seals newer versions in each attempt."""
    leak = {"leaks": [1, 60], "steps": 1000}
    ranks = launch(words=["--max-restarts", "1"], fresh=True, groups={1: group(1000)}, **leak)
    assert ranks.wait(300) == [137, 137] and ranks.attempts() == 2, ranks.story()
    assert min(line["step"] for line in ranks.lines("resumed", attempt=1)) > 0, ranks.story()
    ended = "rank 1 ended with SIGKILL (out of memory: the limit here is 1000 MiB)"
    assert f"{ended}; starting all ranks again: restart 1 of 1" in ranks.output(1), ranks.story()
    assert f"{ended}; not starting the ranks again: --max-restarts=1 is reached" in ranks.output(1), ranks.story()


@pytest.mark.parametrize("version", [1, 2])
def test_the_kernels_count(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "job_5" / "step_0"
    here.mkdir(parents=True)
    name, text = EVENTS[version]
    (here / name).write_text(text.format(2))
    (here.parent / memory_cgroup.name_limit_file(version)).write_text(f"{1536 * MIB}\n")
    monkeypatch.setattr(cgroup, "find_place", lambda pid: Place(version, str(tmp_path), "/job_5/step_0", False))
    memory = OutOfMemory()
    assert not memory.has_happened() and memory.describe_kill() == "out of memory: the limit here is 1.5 GiB"
    (here / name).write_text(text.format(3))
    assert memory.has_happened()
    memory.begin_attempt()
    assert not memory.has_happened()


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_that_slurm_has_removed(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the kill from the job's cgroup on v2, and from the machine's count on v1."""
    job, machine = tmp_path / "job_5", tmp_path / "vmstat"
    (job / "step_0" / "task_1").mkdir(parents=True)
    name, text = EVENTS[version]
    for directory in (job, job / "step_0", job / "step_0" / "task_1"):
        (directory / name).write_text(text.format(2))
    machine.write_text("nr_free_pages 7\noom_kill 5\n")
    monkeypatch.setattr(out_of_memory, "_MACHINE", str(machine))
    monkeypatch.setattr(
        cgroup, "find_place", lambda pid: Place(version, str(tmp_path), "/job_5/step_0/task_1", False)
    )
    (job / "step_0" / memory_cgroup.name_limit_file(version)).write_text(f"{200 * MIB}\n")
    memory = OutOfMemory(77)
    shutil.rmtree(job / "step_0")
    assert not memory.has_happened() and memory.describe_kill() == "out of memory: the limit here is 200 MiB"
    if version == 2:
        (job / name).write_text(text.format(3))
    machine.write_text("nr_free_pages 7\noom_kill 6\n")
    assert memory.has_happened()
    memory.begin_attempt()
    assert not memory.has_happened()


def test_the_machines_count_is_another_jobs_while_the_cgroup_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, (name, text) = tmp_path / "vmstat", EVENTS[2]
    (tmp_path / name).write_text(text.format(0))
    machine.write_text("oom_kill 5\n")
    monkeypatch.setattr(out_of_memory, "_MACHINE", str(machine))
    monkeypatch.setattr(cgroup, "find_place", lambda pid: Place(2, str(tmp_path), "/", False))
    memory = OutOfMemory(77)
    machine.write_text("oom_kill 6\n")
    assert not memory.has_happened()


def test_without_a_cgroup_the_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "find_place", lambda pid: None)
    memory = OutOfMemory()
    assert not memory.has_happened() and memory.describe_kill() == "the node is out of memory"


def test_a_leak_is_not_started_without_end() -> None:
    """It seals versions each time, which would begin the count again for any other failure."""
    for memory, most in ((True, 4), (False, 20)):
        limit, tries, why_not = RestartLimit(3), 0, ""
        while not why_not and tries < 20:
            limit.record_start(Reached((1, 10 * tries)))
            tries += 1
            why_not = limit.judge_failure(Reached((1, 10 * tries)), memory=memory)
            assert why_not or limit.restarts == (tries if memory else 1)
        assert (tries, why_not) == (most, "--max-restarts=3 is reached" if memory else "")


def test_other_failures_between_do_not_cure_a_leak() -> None:
    limit, said = RestartLimit(2), []
    for version, memory in enumerate((True, False, True, False, False, True)):
        limit.record_start(Reached((1, version)))
        said.append(limit.judge_failure(Reached((1, version + 1)), memory=memory))
    assert said == [""] * 5 + ["--max-restarts=2 is reached"]
