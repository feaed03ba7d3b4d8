"""The example scripts of other stacks under launchers: a rank is killed, and all go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from train.agents import RealJob
from train.launch import ROOT, environments
from waiting import until

from gemini_hpc.client.agent_connection import ask_verdict

from .launchers import Command

pytestmark = pytest.mark.slow


def sealed(job: RealJob) -> int:
    """The newest sealed version."""
    verdict = ask_verdict(job.nodes[0].path)
    return 0 if verdict is None else verdict.sealed[1]


@pytest.mark.parametrize("stack", ["huggingface", pytest.param("lightning", marks=pytest.mark.long)])
def test_a_rank_is_killed(make_agents: Callable[..., RealJob], tmp_path: Path, stack: str) -> None:
    job = make_agents(2, 2, heartbeat_s=1.0)
    arguments = [str(ROOT / "examples" / f"train_{stack}.py"), "--steps", "250"]
    ranks: list[Command] = []
    try:
        for rank, env in enumerate(environments(2)):
            env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GEMINI_STEP": "7.0"}
            env["GEMINI_SOCKET"] = job.nodes[rank].path
            ranks.append(Command(env, arguments, tmp_path / f"output{rank}"))
        until(lambda: sealed(job) >= 20, 90, what="version 20 is sealed")
        children = Path(f"/proc/{ranks[1].pid}/task/{ranks[1].pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)  # the rank; the launcher's first child is its witness
        assert [rank.wait(90) for rank in ranks] == [0, 0], [rank.read()[1] for rank in ranks]
    finally:
        for process in ranks:
            process.signal(signal.SIGKILL)
            process.wait(10)
    said = ranks[0].read()[1]
    start = int(said.partition("resumed at version ")[2].split()[0])
    assert start >= 20 and "starting all ranks again: restart 1 of 3" in ranks[1].read()[1], said
