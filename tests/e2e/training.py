"""One training job of alice's, and the undisturbed run that it must agree with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini_hpc.devcluster.cluster import Cluster

STEPS = 40
SMALL = ["--steps", str(STEPS), "--layers", "1", "--dim", "32", "--heads", "2"]


@dataclass
class Run:
    """The log of the ranks of one run of examples/train_gpt.py."""

    directory: Path

    def lines(self) -> list[dict[str, Any]]:
        path = self.directory / "loss.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "step" in line]

    def losses(self) -> dict[int, str]:
        """Every loss; a repeated iteration must have had the same one."""
        found: dict[int, str] = {}
        for line in self.steps():
            assert found.setdefault(line["step"], line["loss"]) == line["loss"], line
        return found

    def final(self) -> str:
        return str(next(line["final"] for line in reversed(self.lines()) if "final" in line))

    def repeated(self) -> int:
        """Iterations that were logged more than once."""
        return len(self.steps()) - len(self.losses())


class Training(Run):
    """One job of alice's that runs examples/job.sh."""

    def __init__(self, cluster: Cluster, id: int, directory: Path) -> None:
        super().__init__(directory)
        self.cluster, self.id = cluster, id

    @property
    def state(self) -> str:
        return self.cluster.read_job(self.id).get("JobState", "gone")

    def hosts(self) -> list[str]:
        text = self.cluster.read_job(self.id)["NodeList"]
        return self.cluster.run(["scontrol", "show", "hostnames", text]).stdout.split()

    def output(self) -> str:
        path = self.directory / "out"
        return path.read_text() if path.exists() else ""

    def reach(self, step: int, timeout_s: float = 90.0) -> None:
        self.wait(f"iteration {step}", lambda: any(line["step"] >= step for line in self.steps()), timeout_s)

    def finish(self, timeout_s: float = 150.0) -> None:
        self.wait("completion", lambda: self.state == "COMPLETED", timeout_s)

    def wait(self, what: str, true: Callable[[], bool], timeout_s: float) -> None:
        deadline, look_at = time.monotonic() + timeout_s, 0.0
        while not true():
            now = time.monotonic()
            failed = now > look_at and self.state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            if failed or now > deadline:
                raise AssertionError(f"no {what}: {self.state}\n{self.output()[-4000:]}")
            look_at = now + 1.0 if now > look_at else look_at
            time.sleep(0.05)

    def assert_same_as(self, other: Run) -> None:
        assert self.losses() == other.losses()
        assert set(self.losses()) == set(range(1, STEPS + 1))
        assert self.final() == other.final()
