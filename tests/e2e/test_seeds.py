"""A batch script that trains several times without names, a step for each: `for seed in ...; do srun ...`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from training import SMALL, STEPS, Run, Training
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEEDS, SHORT, CUT_AT = 5, 8, 8
SCRIPT = """#!/bin/bash
for seed in {1..5}; do
    more=
    [ $seed = 2 ] && more="--iteration-s 0.4"
    [ $seed -gt 2 ] && more="--steps 8 --iteration-s 0.4 --workers 0"
    srun --kill-on-bad-exit=1 /opt/gemini-hpc/venv/bin/python train_gpt.py ARGUMENTS $more \\
        --seed $seed --log $seed/loss.jsonl
done
until [ -e go ]; do sleep 0.1; done
"""


def held(job: Training) -> list[str]:
    """Return the trainings of which the job's agents have copies."""
    told = job.cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice")
    return [t["name"] for t in json.loads(told.stdout)["trainings"] if any(s["holders"] for s in t["shards"])]


@pytest.mark.timeout(600)
def test_a_node_is_lost_in_the_second_of_five_trainings(
    cluster: Cluster, tier: Path, reference: Callable[..., Run]
) -> None:
    """The first step has its end, with its weights; the second one goes on; in the end the copies of one
    training are left."""
    first, second = reference(seed=1), reference(seed=2)
    directory = cluster.locate_home("alice") / f"seeds-{time.time_ns()}"
    shutil.copytree(EXAMPLES, directory, ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "job.sh").write_text(SCRIPT.replace("ARGUMENTS", " ".join(SMALL)))
    logs = [Run(directory / str(seed)) for seed in range(1, SEEDS + 1)]
    for log in logs:
        log.directory.mkdir()
    for path in [directory, *directory.iterdir()]:
        path.chmod(0o755)
        shutil.chown(path, 5001)
    options = ["-N3", "--ntasks-per-node=1", "--requeue", "--open-mode=append", "--gemini-replicas=2"]
    options += [f"--gemini-tier={tier}", "--gemini-tier-interval=3600"]
    where = [f"--chdir={directory}", f"--output={directory}/out", str(directory / "job.sh")]
    job = Training(cluster, cluster.submit_job([*options, *where]), directory)

    def reached(log: Run, step: int) -> bool:
        return any(line["step"] >= step for line in log.steps())

    job.wait("second training", lambda: reached(logs[1], CUT_AT), 120)
    until(lambda: held(job) == ["default+2.1"], 20, what="the first training's copies have gone")
    assert not reached(logs[1], STEPS), "it is in the middle of its second training"
    cluster.cut_power(job.hosts()[1])
    job.wait("last training", lambda: any("final" in line for line in logs[-1].lines()), 240)

    finals = [line for line in logs[0].lines() if "final" in line]
    assert [line["restart"] for line in finals] == [0, 1], finals
    start = finals[1]["start"]  # the last sealed version: on a busy machine the one before the last may be that
    assert STEPS - start <= 1 and f"resumed at version {start} from the tier" in job.output(), job.output()
    assert finals[0]["final"] == finals[1]["final"] and str(finals[0]["final"]) == first.final()
    assert logs[0].losses() == first.losses()
    assert logs[1].losses() == second.losses() and logs[1].final() == second.final()
    assert logs[1].repeated() <= 1 and {line["restart"] for line in logs[1].steps()} == {0, 1}, job.output()
    for log in logs[2:]:
        assert set(log.losses()) == set(range(1, SHORT + 1)) and not log.repeated(), job.output()

    until(lambda: held(job) == [f"default+{SEEDS}.1"], 30, what="the last training's copies alone")
    (directory / "go").touch()
    job.finish()
