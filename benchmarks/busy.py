"""A full cluster: what 30 waiting jobs of two other users do to a recovery, and what the recovery does to them.

On profile `site`, two partitions share the nodes. The protected job runs on three of eight nodes at the lowest
priority; one of its nodes loses its power; while the job is COMPLETING, the rivals arrive. Compared with runs in
which nothing fails and the same rivals arrive at the same moment.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import USER, USER_UID, MeasureError, Options, cluster
from benchmarks.rows import Row
from gemini_hpc.devcluster.cluster import Cluster

NODES, OURS = 8, 3
RIVALS = (("bob", "batch", 15), ("carol", "debug", 15))
RIVAL_S = 2
PROTECTED, RESUMED_S, RIVALS_S = 5, 120.0, 240.0
CONTROLS = 3
_TRAINER = Path(__file__).parents[1] / "tests" / "recovery" / "lite.py"


@dataclass(frozen=True)
class Trial:
    """One run. `waits`: seconds from submission to start, by rival; `stolen`: survivors that are not ours again."""

    waits: list[float]
    stolen: int
    resumed_s: float
    repeated: int


class _Job:
    """The protected job, and what its training tells."""

    def __init__(self, on: Cluster) -> None:
        self.on = on
        self.directory = on.locate_home(USER) / f"busy-{time.time_ns()}"
        self.directory.mkdir()
        shutil.chown(self.directory, USER_UID)
        shutil.copy(_TRAINER, self.directory / "lite.py")
        (self.directory / "lite.py").chmod(0o644)
        script = f"#!/bin/bash\nsrun python {self.directory}/lite.py {self.directory}/log 100000 0.1\n"
        argv = ["--requeue", "--open-mode=append", f"--output={self.directory}/out", f"-N{OURS}", "--exclusive"]
        self.id = on.submit_job([*argv, "--nice=10000", "--ntasks-per-node=1", "--gemini-replicas=2"], script=script)

    def lines(self, what: str, restart: int) -> list[dict[str, float]]:
        path = self.directory / "log"
        text = path.read_text() if path.exists() else ""
        found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in found if line["what"] == what and line["restart"] == restart]

    def hosts(self) -> list[str]:
        names = self.on.read_job(self.id).get("NodeList", "")
        return self.on.run(["scontrol", "show", "hostnames", names]).stdout.split()

    def protected(self) -> bool:
        ranks = {line["rank"] for line in self.lines("sealed", 0) if line["version"] >= PROTECTED}
        return len(ranks) == OURS


def _until(what: str, true: object, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise MeasureError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(0.05)


def _rivals(on: Cluster, options: Options) -> list[int]:
    ids = []
    for user, partition, count in RIVALS:
        argv = ["-p", partition, "-N1", "--exclusive", f"--array=1-{options.pick(count, 2)}", "--output=/dev/null"]
        ids.append(on.submit_job(argv, user=user, script=f"#!/bin/sh\nsleep {RIVAL_S}\n"))
    return ids


def _waits(on: Cluster, ids: list[int]) -> list[float]:
    """Seconds that each task waited, in the order of the tasks."""
    found = {}
    for job in ids:
        out = on.run(["scontrol", "show", "job", "-o", str(job)], env={"SLURM_TIME_FORMAT": "%s"}).stdout
        for line in out.splitlines():
            words = dict(word.partition("=")[::2] for word in line.split())
            waited = int(words["StartTime"]) - int(words["SubmitTime"])
            found[job, int(words["ArrayTaskId"])] = float(waited)
    return [found[key] for key in sorted(found)]


def _over(on: Cluster, ids: list[int]) -> bool:
    return not on.run(["squeue", "-h", "-r", "-j", ",".join(map(str, ids))]).stdout.strip()


def trial(on: Cluster, options: Options, cut: bool) -> Trial:
    """One run with or without the failure; the cluster is as before afterwards. Raises `MeasureError`."""
    job = _Job(on)
    try:
        _until("protected", job.protected, 60)
        hosts, began = job.hosts(), time.time()
        if cut:
            on.cut_power(hosts[1])
            _until("COMPLETING", lambda: on.read_job(job.id)["JobState"] == "COMPLETING", 60)
        else:
            time.sleep(2.0)
        rivals = _rivals(on, options)
        stolen, resumed_s, repeated = 0, 0.0, 0
        if cut:
            _until("resumed", lambda: len(job.lines("resumed", 1)) == OURS, RESUMED_S)
            resumed_s = max(line["t"] for line in job.lines("resumed", 1)) - began
            stolen = len({hosts[0], hosts[2]} - set(job.hosts()))
            newest = max(line["version"] for line in job.lines("step", 0))
            repeated = int(newest - job.lines("resumed", 1)[0]["version"])
        _until("the rivals' end", lambda: _over(on, rivals), RIVALS_S)
        waits = _waits(on, rivals)
    finally:
        on.run(["scancel", f"--user={USER}"])
        for user, _, _ in RIVALS:
            on.run(["scancel", f"--user={user}"])
        _until("an empty queue", lambda: not on.run(["squeue", "-h"]).stdout.strip(), 120)
        on.restore()
    return Trial(waits, stolen, resumed_s, repeated)


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    runs = options.count(20)
    with cluster(
        options.pick(NODES, OURS + 2), profile="site", settings={"fence_budget_nodes": 1000, "retention_s": 10.0}
    ) as on:
        controls = []
        for i in range(min(CONTROLS, runs)):
            options.progress.say("busy", f"run {i + 1} of {min(CONTROLS, runs)} without a failure")
            controls.append(trial(on, options, False))
        usual = [statistics.median(waits) for waits in zip(*(c.waits for c in controls), strict=True)]
        cuts = []
        for i in range(runs):
            options.progress.say("busy", f"recovery {i + 1} of {runs}")
            cuts.append(trial(on, options, True))
    delays = [max(w - u for w, u in zip(cut.waits, usual, strict=True)) for cut in cuts]
    return [
        Row(
            "busy.stolen",
            "survivors that the job had lost when it ran again, of all recoveries together",
            "nodes",
            sum(cut.stolen for cut in cuts),
            tuple(float(cut.stolen) for cut in cuts),
            limit=0,
        ),
        Row(
            "busy.rival_delay_s",
            "the longest that a rival started later than in the runs without a failure (median of those, by rival)",
            "s",
            max(delays),
            tuple(delays),
            limit=15,
            peers={"longest wait without a failure": max(usual)},
        ),
        Row(
            "busy.resumed_s",
            "power cut to all ranks resumed, without Python's imports, the longest",
            "s",
            max(cut.resumed_s for cut in cuts),
            tuple(cut.resumed_s for cut in cuts),
        ),
        Row(
            "busy.lost_iterations",
            "completed iterations that are repeated, the most seen",
            "iterations",
            max(cut.repeated for cut in cuts),
            tuple(float(cut.repeated) for cut in cuts),
            limit=1,
        ),
    ]
