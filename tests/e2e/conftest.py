"""Real training (the example, with torch) on a real cluster, against one undisturbed reference run."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from heat import swept
from leaks.cluster import nothing_left
from training import STEPS, Training

from gemini_hpc.devcluster.cluster import Cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--steps", str(STEPS), "--layers", "2", "--dim", "96"]


SETTINGS = {"fence_budget_nodes": 1000, "tier_keep_every": 3}


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    nodes = getattr(request.module, "NODES", 5)
    with Cluster.up(f"e2e{os.getpid()}", nodes=nodes, settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def train(cluster: Cluster) -> Iterator[Callable[..., Training]]:
    def submit(
        label: str,
        *options: str,
        parallel: str = "ddp",
        transport: str = "auto",
        around: str = "",
        iteration_s: float = 0.15,
    ) -> Training:
        """around: a program of this directory that takes train_gpt.py's place, and runs it as usual.py."""
        directory = cluster.home("alice") / f"{label}-{time.time_ns()}"
        shutil.copytree(EXAMPLES, directory, ignore=shutil.ignore_patterns("__pycache__"))
        if around:
            (directory / "train_gpt.py").rename(directory / "usual.py")
            shutil.copy(Path(__file__).with_name(around), directory / "train_gpt.py")
        for path in [directory, *directory.iterdir()]:
            path.chmod(0o755)
        shutil.chown(directory, 5001)
        arguments = [
            *SMALL,
            "--iteration-s",
            str(iteration_s),
            "--parallel",
            parallel,
            "--transport",
            transport,
            "--log",
            str(directory / "loss.jsonl"),
        ]
        fixed = ["--requeue", "-N3", f"--chdir={directory}", f"--output={directory}/out"]
        return Training(cluster, cluster.sbatch([*fixed, *options, str(directory / "job.sh"), *arguments]), directory)

    with nothing_left(cluster, 30):
        yield submit
        cluster.run(["scancel", "--user=alice"])
        cluster.restore()
        swept(cluster)


@pytest.fixture(scope="module")
def references() -> dict[str, Training]:
    """The undisturbed runs, made at first use."""
    return {}


@pytest.fixture
def reference(train: Callable[..., Training], references: dict[str, Training]) -> Callable[[str], Training]:
    def get(parallel: str) -> Training:
        if parallel not in references:
            run = train("reference", parallel=parallel)
            run.finish()
            references[parallel] = run
        return references[parallel]

    return get
