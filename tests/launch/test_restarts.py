"""A rank fails beside real agents: all ranks go on in the next attempt, or end with the reason."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import until

from .launchers import TOY, Launchers, alive

pytestmark = pytest.mark.slow

Launch = Callable[..., Launchers]
Undisturbed = Callable[..., list[str]]
RELAUNCHES = ("rank_failed", "relaunch", "not_relaunched")
MISTAKE = 1 + TOY.read_text().splitlines().index('            raise ValueError(f"a mistake at step {step}")')


def events(launchers: Launchers, node: int = 0) -> list[str]:
    """What an agent has noted of launches."""
    assert launchers.job is not None
    words = (word for line in launchers.job.nodes[node].log().splitlines() for word in line.split())
    return [name for word in words if (name := word.removeprefix("event=")) in RELAUNCHES]


KILLED = pytest.param("kill", marks=pytest.mark.witness("a killed rank comes back within its step, by the launcher"))


@pytest.mark.parametrize("how", [KILLED, "raise"])
def test_all_ranks_go_on_when_one_has_failed(launch: Launch, undisturbed: Undisturbed, how: str) -> None:
    ranks = launch(faults=[(1, 0, 8, how)], fresh=how == "raise")
    assert ranks.wait() == [0, 0], ranks.story()
    assert ranks.attempts() == 2 and ranks.repeated(1) in (0, 1), ranks.story()
    assert all(line["state"] != "unprotected" for line in ranks.lines("resumed")), ranks.story()
    assert ranks.digests() == undisturbed(), ranks.story()
    cost = "1 step repeated" if ranks.repeated(1) else "no step repeated"
    assert re.search(rf"resumed at version \d+ from memory .*, {cost}, \S+ s after the failure", ranks.output(0))
    ended = "SIGKILL" if how == "kill" else f"status 1 (ValueError at toy.py:{MISTAKE})"
    assert f"rank 1 ended with {ended}; starting all ranks again: restart 1 of 3" in ranks.output(1)
    assert ("ValueError: a mistake at step 8" in ranks.output(1)) == (how == "raise"), ranks.output(1)
    assert "gemini_hpc/launch" not in ranks.output(1) and "runpy" not in ranks.output(1), ranks.output(1)
    assert events(ranks) == ["relaunch"] and events(ranks, 1) == ["rank_failed"]
    assert ranks.job is not None
    shows = "was killed or crashed" if how == "kill" else "ended with an error"
    assert f" {shows}: attempt 0 of step " in ranks.job.nodes[0].log(), ranks.story()


def test_restarts_are_used_up(launch: Launch) -> None:
    """The second attempt fails where the first did."""
    ranks = launch(words=["--max-restarts", "1"], faults=[(1, attempt, 6, 9) for attempt in range(5)])
    codes = ranks.wait()
    assert ranks.attempts() == 2 and codes == [9, 9], ranks.story()
    both = ranks.output(0) + ranks.output(1)
    assert both.count("not starting the ranks again: --max-restarts=1 is reached") == 1, ranks.story()
    assert "rank 0: ending: rank 1 ended with status 9 (exit 9 at toy.py:" in ranks.output(0)
    assert events(ranks) == ["relaunch", "not_relaunched"] and events(ranks, 1) == ["rank_failed"] * 2


@pytest.mark.parametrize("step", [0, 6])
def test_a_mistake_is_tried_once_more(launch: Launch, step: int) -> None:
    """Both ranks of a node raise it in each attempt; its traceback is shown once."""
    ranks = launch(4, faults=[(rank, attempt, step, "raise") for rank in (0, 1) for attempt in range(5)])
    assert ranks.wait() == [1] * 4, ranks.story()
    assert {line["attempt"] for line in ranks.lines("fault")} == {0, 1}, ranks.story()
    said = "".join(map(ranks.output, range(4)))
    assert said.count("Traceback") == said.count(f"ValueError: a mistake at step {step}") == 1, said
    where = f"at step {step}" if step else "before its first step is saved"
    ended = f"ended with status 1 (ValueError at toy.py:{MISTAKE})"
    assert f"{ended}; not starting the ranks again: it fails {where} each time" in said, said
    assert said.count(f"{ended}; starting all ranks again: restart 1 of 3") == 1, said
    assert events(ranks).count("relaunch") == events(ranks).count("not_relaunched") == 1, ranks.story()


def test_the_same_exception_at_other_steps_is_no_pattern(launch: Launch, undisturbed: Undisturbed) -> None:
    ranks = launch(
        words=["--max-restarts", "1"], faults=[(1, attempt, 4 * attempt + 4, "raise") for attempt in range(3)]
    )
    assert ranks.wait() == [0, 0] and ranks.attempts() == 4, ranks.story()
    assert ranks.digests() == undisturbed(), ranks.story()


def test_a_newer_sealed_version_begins_the_count_again(launch: Launch, undisturbed: Undisturbed) -> None:
    faults = [(attempt % 2, attempt, 4 * attempt + 4, "kill") for attempt in range(3)]
    ranks = launch(words=["--max-restarts", "1"], faults=faults)
    assert ranks.wait() == [0, 0] and ranks.attempts() == 4, ranks.story()
    assert all(ranks.repeated(attempt) in (0, 1) for attempt in (1, 2, 3)), ranks.story()
    assert ranks.digests() == undisturbed(), ranks.story()


def test_no_attempt_follows_where_a_rank_has_ended_with_success(launch: Launch) -> None:
    ranks = launch(3, steps=4, faults=[(1, 0, -1, "sleep"), (2, 0, -1, "sleep")])
    until(lambda: ranks.processes[0].poll() == 0, 40, 0.01, what="rank 0 ends")
    until(lambda: len(ranks.lines("fault")) == 2, 40, 0.01, what="both at their end")
    os.kill(ranks.pid(2), signal.SIGKILL)
    assert ranks.wait() == [0, 137, 137] and ranks.attempts() == 1, ranks.story()
    why = "rank 2 ended with SIGKILL; another rank has already ended with success"
    assert f"not starting the ranks again: {why}" in ranks.output(2), ranks.story()
    assert f"rank 1: ending: {why}" in ranks.output(1), ranks.story()


@pytest.mark.parametrize("later_s", [0.0, 0.2])
def test_a_step_that_somebody_ends_is_not_started_again(launch: Launch, later_s: float) -> None:
    ranks = launch(steps=1000)
    ranks.reach(4)
    ranks.signal(signal.SIGTERM, later_s)
    assert ranks.wait() == [143, 143] and ranks.attempts() == 1, ranks.story()
    assert "relaunch" not in events(ranks) and "starting all ranks again" not in ranks.output(0) + ranks.output(1)


def test_a_rank_that_ends_gently_is_left_to_it(launch: Launch) -> None:
    ranks = launch(steps=1000, sigterm=[[0.0, 3], [1.5, 4]])
    ranks.reach(4)
    ranks.signal(signal.SIGTERM)
    assert ranks.wait() == [3, 4] and len(ranks.lines("gently")) == 2, ranks.story()
    assert ranks.attempts() == 1 and "relaunch" not in events(ranks), ranks.story()


def test_an_import_that_starts_a_thread_costs_imports_only(
    launch: Launch, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(999,), "
        "name='watcher', daemon=True).start()\n"
    )
    script = tmp_path / "toy.py"
    script.write_text(TOY.read_text().replace("import torch\n", "import busy\nimport torch\n", 1))
    ranks = launch(script=script, faults=[(0, 0, 5, "kill")])
    assert ranks.wait() == [0, 0] and ranks.attempts() == 2 and ranks.repeated(1) in (0, 1), ranks.story()
    assert "imports everything anew: an import has started a thread (watcher)" in ranks.output(0)
    assert ranks.digests() == undisturbed(), ranks.story()


def test_workers_go_with_their_rank(launch: Launch, undisturbed: Undisturbed) -> None:
    ranks = launch(workers=2, faults=[(1, 0, 8, "kill")])
    ranks.reach(10, 1)
    first = {pid for line in ranks.lines("step", attempt=0) for pid in line["workers"]}
    second = {pid for line in ranks.lines("step", attempt=1) for pid in line["workers"]}
    assert len(first) == len(second) == 4 and not any(map(alive, first)), ranks.story()
    assert ranks.wait() == [0, 0] and ranks.repeated(1) in (0, 1), ranks.story()
    assert not any(map(alive, first | second))
    assert ranks.digests() == undisturbed(workers=2), ranks.story()


def test_an_agent_dies_and_comes_back(launch: Launch, undisturbed: Undisturbed) -> None:
    ranks = launch(steps=60, faults=[(0, 0, 50, "kill")])
    ranks.reach(6)
    assert ranks.job is not None
    agent = ranks.job.nodes[0]
    agent.die()
    time.sleep(0.3)
    agent.start(again=True)
    assert ranks.wait() == [0, 0] and ranks.attempts() == 2, ranks.story()
    assert ranks.repeated(1) in (0, 1) and ranks.digests() == undisturbed(steps=60), ranks.story()


def test_a_rank_fails_while_its_agent_is_away(launch: Launch, undisturbed: Undisturbed) -> None:
    """Its launcher waits for the agent; the copies are those of the other node."""
    ranks = launch(steps=30)
    ranks.reach(6)
    assert ranks.job is not None
    agent = ranks.job.nodes[0]
    agent.die()
    os.kill(ranks.pid(0), signal.SIGKILL)
    until(lambda: "the agent does not answer" in ranks.output(0), 20, 0.01, what="rank 0's launcher waits")
    agent.start(again=True)
    assert ranks.wait() == [0, 0] and ranks.attempts() == 2, ranks.story()
    assert ranks.repeated(1) in (0, 1, 2) and ranks.digests() == undisturbed(steps=30), ranks.story()


def test_a_second_rank_fails_while_the_first_failure_is_mended(launch: Launch, undisturbed: Undisturbed) -> None:
    ranks = launch(3, nodes=3, faults=[(1, 0, 7, "kill"), (2, 1, 0, "raise")])
    assert ranks.wait() == [0, 0, 0], ranks.story()
    assert not ranks.lines("resumed", attempt=1) and ranks.repeated(2) in (0, 1), ranks.story()
    assert ranks.digests() == undisturbed(3), ranks.story()


def test_two_ranks_fail_at_once(launch: Launch, undisturbed: Undisturbed) -> None:
    ranks = launch(3, nodes=3, faults=[(0, 0, 7, "kill"), (2, 0, 7, 5)])
    assert ranks.wait() == [0, 0, 0] and ranks.attempts() == 2, ranks.story()
    assert ranks.repeated(1) in (0, 1) and ranks.digests() == undisturbed(3), ranks.story()


def test_without_an_agent_a_training_runs_as_under_python(undisturbed: Undisturbed, tmp_path: Path) -> None:
    ranks = Launchers(None, tmp_path / "ranks", 2, pause_s=0, faults=[(rank, 0, 6, 7) for rank in range(2)])
    try:
        assert ranks.wait() == [7, 7] and ranks.attempts() == 1, ranks.story()
    finally:
        ranks.close()
    assert undisturbed()
