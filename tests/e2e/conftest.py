"""Real training (the example, with torch) on a real cluster, against undisturbed runs without Slurm."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from sharing import Shared, swept
from train.launch import Process, environments
from training import SMALL, Run, Training

from gemini_hpc.devcluster.cluster import Cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def cluster(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with shared.lent(request, swept) as cluster:
        yield cluster


@pytest.fixture
def tier(cluster: Cluster) -> Path:
    """A directory for one test: agents may write there until the cluster has been tidied."""
    path = cluster.locate_home("alice") / f"tier-{time.time_ns()}"
    path.mkdir(0o700)
    shutil.chown(path, 5001)
    return path


@pytest.fixture
def train(cluster: Cluster) -> Callable[..., Training]:
    def submit(
        label: str,
        *options: str,
        parallel: str = "ddp",
        around: str = "",
        iteration_s: float = 0.15,
    ) -> Training:
        """around: a program of this directory that takes train_gpt.py's place, and runs it as usual.py."""
        directory = cluster.locate_home("alice") / f"{label}-{time.time_ns()}"
        shutil.copytree(EXAMPLES, directory, ignore=shutil.ignore_patterns("__pycache__"))
        if around:
            (directory / "train_gpt.py").rename(directory / "usual.py")
            shutil.copy(Path(__file__).with_name(around), directory / "train_gpt.py")
        for path in [directory, *directory.iterdir()]:
            path.chmod(0o755)
        shutil.chown(directory, 5001)
        how = [f"--parallel={parallel}", f"--iteration-s={iteration_s}"]
        arguments = [*SMALL, *how, f"--log={directory}/loss.jsonl"]
        fixed = ["--requeue", "-N3", f"--chdir={directory}", f"--output={directory}/out"]
        return Training(
            cluster, cluster.submit_job([*fixed, *options, str(directory / "job.sh"), *arguments]), directory
        )

    return submit


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run runs, each made once, at first use: ranks on this machine, without Slurm and without agents."""

    @cache
    def run(parallel: str = "ddp", ranks: int = 3, seed: int = 1) -> Run:
        directory = tmp_path_factory.mktemp("reference")
        arguments = [*SMALL, f"--parallel={parallel}", f"--seed={seed}", f"--log={directory}/loss.jsonl"]
        processes = [Process(env, module="examples.train_gpt", arguments=arguments) for env in environments(ranks)]
        codes = [process.wait(120) for process in processes]
        assert codes == [0] * ranks, [process.read() for process in processes]
        return Run(directory)

    return run
