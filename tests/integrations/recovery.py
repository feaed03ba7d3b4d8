"""A training on two ranks and two agents that is killed, started again, and compared with one that never was."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.agents import RealJob
from train.launch import Run
from train.test_kills import lines, newest, reach

Start = Callable[..., Run]
Told = list[dict[str, Any]]
# What a process tells of its own launch only.
OWN = {"start", "losses", "report"}
_undisturbed: dict[str, Told] = {}


def no_false_alarm(run: Run) -> None:
    """Stacks wrap optimizers and schedulers, and the wrappers step, too: none was left out, and all is captured."""
    said = [line for process in run.processes for line in process.read()[1].splitlines()]
    assert [line for line in said if "not passed" in line or "not captured" in line] == []


@dataclass
class Recovery:
    """One job and its trainings."""

    job: RealJob
    start: Start
    directory: Path

    def undisturbed(self, **options: Any) -> Told:
        """The same training on no agent, once for all tests of a file."""
        key = json.dumps(options, sort_keys=True)
        if key not in _undisturbed:
            _undisturbed[key] = self.start(None, directory=str(self.directory / "undisturbed"), **options).wait()
        return _undisturbed[key]

    def killed_at(self, step: int, *, lose: Iterable[str] = (), **options: Any) -> tuple[int, list[Path]]:
        """SIGKILL for all ranks when one has completed this step, then for the agents of these nodes, and the job is
        requeued on the others and new ones. (Steps that were completed, logs)."""
        logs = [self.directory / f"log.{rank}" for rank in range(options.get("world", 2))]
        run = self.start(self.job, **self._own(options), sleep_s=0.03)
        reach(run, logs, step)
        for process in run.processes:
            process.signal(signal.SIGKILL)
        for process in run.processes:
            process.wait(10.0)
        no_false_alarm(run)
        names = [node.name for node in self.job.nodes]
        for name in lose:
            self.job.all[name].die()
        new = f"n{len(self.job.all) + 1}"
        self.job.requeue([name for name in names if name not in lose] + [new for _ in lose])
        return newest(logs), logs

    def comes_back(self, step: int, *, lose: Iterable[str] = (), **options: Any) -> Told:
        """Bit for bit, with one step repeated at most."""
        whole = self.undisturbed(**options)
        completed, logs = self.killed_at(step, lose=lose, **options)
        assert completed < options["steps"], "it was killed in the middle"
        run = self.start(self.job, **self._own(options), seed=9)
        results = run.wait()
        no_false_alarm(run)
        for before, after, log in zip(whole, results, logs, strict=True):
            rows = lines(log)
            assert after["start"] in (completed - 1, completed), (after["start"], completed, run.stderr)
            assert {row[1] for row in rows} == set(range(1, options["steps"] + 1))
            assert [row for row in rows if before["losses"][str(row[1])] != row[2]] == []
            for key in before.keys() - OWN:
                assert after[key] == before[key], key
            assert after["report"]["state"] == "protected" and not after["report"]["unsaved"], after["report"]
        return results

    def _own(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"directory": str(self.directory / "run"), "log": str(self.directory / "log"), **options}
