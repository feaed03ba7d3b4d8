"""Whom the kernel ends first: scores of the supervisor, of its children, and of agents that were there before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemini_hpc.devcluster import cgroups
from gemini_hpc.node import oom
from gemini_hpc.node.cgroup import AgentCgroup

SUPERVISOR = """
import os
from gemini_hpc.node import oom, privileges
oom.raise_score()
score = oom.OwnScore()
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
privileges.close_to_owner()
for _ in range(2):
    if score.fork() == 0:
        os.kill(os.getpid(), 19)
    pid, _ = os.waitpid(-1, os.WUNTRACED)
    print(pid, flush=True)
input()
"""


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root lowers a score")
def test_supervisor_comes_after_its_children() -> None:
    """Both could be ended at one time before, and then nobody started another agent."""
    argv = [sys.executable, "-c", SUPERVISOR]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children = [int(process.stdout.readline()) for _ in range(2)]
        try:
            assert [score(pid) for pid in children] == [oom.NEWEST] * 2, "also of one that is started again"
            assert score(process.pid) == oom.SUPERVISOR
        finally:
            for pid in children:
                os.kill(pid, 9)


@pytest.fixture
def top() -> Iterator[Path]:
    base = cgroups._find_base() if os.geteuid() == 0 else None
    if base is None:
        pytest.skip("no writable memory cgroup (v1) on this machine")
    path = base / f"gemini-oom-{os.getpid()}"
    path.mkdir()
    yield path
    cgroups._remove_tree(path)


HOLDER = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
open("/proc/self/oom_score_adj", "w").write(sys.argv[3])
memory = os.memfd_create("gemini:test")
os.posix_fallocate(memory, 0, int(sys.argv[2]) << 20)
print("there", flush=True)
input()
"""


@pytest.mark.slow
def test_agents_with_copies_come_last(top: Path) -> None:
    holders: list[subprocess.Popen[str]] = []
    for name, mib, adj in (("7", 8, oom.NEWEST), ("8", 0.0, oom.NEWEST), ("7", 0, oom.SUPERVISOR)):
        (top / name).mkdir(exist_ok=True)
        argv = [sys.executable, "-c", HOLDER, str(top / name), str(int(mib) or 1), str(adj)]
        holders.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        for holder in holders:
            assert holder.stdout is not None and holder.stdout.readline() == "there\n"
        oom.lower_scores(
            [
                AgentCgroup(1, (str(top / "7"),)),
                AgentCgroup(1, (str(top / "8"),)),
                AgentCgroup(1, (str(top / "gone"),)),
            ]
        )
        found = [score(holder.pid) for holder in holders]
        assert found == [oom.WITH_COPIES, oom.WITHOUT_COPIES, oom.SUPERVISOR]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            for pipe in (holder.stdin, holder.stdout):
                if pipe is not None:
                    pipe.close()
