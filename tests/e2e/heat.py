"""The MPI example as a job of alice's, and the plate that it must agree with."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.devcluster.layout import INSIDE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MPI = INSIDE / "base" / "mpi"  # this environment, as the nodes see it
OPENMPI, MPICH = MPI / "openmpi", MPI / "mpich"
LAUNCHERS = {
    "mpirun": (OPENMPI / "lib/libmpi.so.40", f"{OPENMPI}/bin/mpirun -n 3 --map-by ppr:1:node"),
    "pmix": (OPENMPI / "lib/libmpi.so.40", "srun --kill-on-bad-exit --mpi=pmix"),
    "pmi2": (MPICH / "lib/libmpi.so.12", "srun --kill-on-bad-exit --mpi=pmi2"),
    "mpiexec": (MPICH / "lib/libmpi.so.12", f"{MPICH}/bin/mpiexec -n 3 -ppn 1"),
}


@dataclass
class Heat:
    """One job of three nodes that runs examples/heat_mpi.sh."""

    cluster: Cluster
    id: int
    directory: Path

    @classmethod
    def submit(
        cls, cluster: Cluster, how: str, *options: str, n: int, steps: int, step_s: float, program: Sequence[str] = ()
    ) -> Heat:
        library, launch = LAUNCHERS[how]
        directory = cluster.locate_home("alice") / f"heat-{time.time_ns()}"
        shutil.copytree(EXAMPLES, directory, ignore=shutil.ignore_patterns("__pycache__"))
        for path in [directory, *directory.iterdir()]:
            path.chmod(0o755)
        shutil.chown(directory, 5001)
        arguments = ["--every", "1", "--n", str(n), "--steps", str(steps), "--step-s", str(step_s), *program]
        argv = ["--gemini-replicas=2", f"--chdir={directory}", *options, str(directory / "heat_mpi.sh"), *arguments]
        return cls(
            cluster, cluster.submit_job(argv, env={"MPI4PY_LIBMPI": str(library), "LAUNCH": launch}), directory
        )

    def lines(self, what: str = "") -> list[dict[str, Any]]:
        """Of the program's log; with `what`, those that tell it."""
        texts = [path.read_text() for path in self.directory.glob("*.jsonl")]
        found = [json.loads(line) for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in found if not what or what in line]

    def reach(self, step: int, timeout_s: float = 60.0) -> None:
        until(lambda: any(line["step"] >= step for line in self.lines("step")), timeout_s, what=f"step {step}")

    def hosts(self) -> list[str]:
        return self.cluster.run(["scontrol", "show", "hostnames", self.slurm()["NodeList"]]).stdout.split()

    def slurm(self) -> dict[str, str]:
        return self.cluster.read_job(self.id)

    def said(self) -> str:
        return "".join(path.read_text() for path in self.directory.glob("*.out"))

    def finish(self) -> str:
        """The final field's digest."""

        def over() -> bool:
            state = self.slurm().get("JobState", "gone")
            assert state not in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), (state, self.said())
            return state == "COMPLETED"

        until(over, 120, what="the job's completion")
        return str(self.lines("final")[-1]["final"])

    def agrees(self) -> bool:
        """Whether each step, also one that was repeated, has had the same result."""
        heat: dict[int, str] = {}
        return all(heat.setdefault(line["step"], line["heat"]) == line["heat"] for line in self.lines("step"))


def plates(n: int) -> Iterator[np.ndarray[Any, np.dtype[np.float64]]]:
    """The plate after each step, from none on, computed by one process."""
    field = np.zeros((n + 2, n))
    field[0] = 100.0
    while True:
        yield field[1:-1].copy()
        change = field[:-2, 1:-1] + field[2:, 1:-1] + field[1:-1, :-2] + field[1:-1, 2:] - 4 * field[1:-1, 1:-1]
        field[1:-1, 1:-1] += 0.2 * change
