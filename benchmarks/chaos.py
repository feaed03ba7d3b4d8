"""One power cut a minute: how long a training takes for its steps, with torch's checkpoints and with ours.

The same training (`programs/chaotic.py`), three nodes of five, the same moments of the cuts (`gemini-hpc devcluster
chaos`). A random node of the job is cut, its batch host and its spare, too. Slurm's timers are those of the profile
`fast` for all: SlurmdTimeout 10 s, cred_expire 5 s. The clock runs from the end of the first step.

dcp: torch.distributed.checkpoint.async_save into a directory that all nodes see, every EVERY steps. Young's formula
gives sqrt(2 x 0.1 s x 60 s) = 3.5 s between saves that cost 0.1 s. Slurm itself finds the dead node and requeues; no
agent, prolog, plugin or controller is there. dcp_fenced: the same, and the harness sets the node DOWN FENCED_S after
its cut, as if somebody knew as soon as our controller does.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import PYTHON, USER, USER_UID, MeasureError, Options, cluster, directory, wait_for
from benchmarks.rows import Row
from gemini_hpc.devcluster.chaos import Chaos, ChaosEvent, Weather
from gemini_hpc.devcluster.cluster import Cluster

NODES, TRAIN = 5, 3
STEPS, ITERATION_S = 240, 0.5
MTBF_S, REPAIR_S, SEED = 60.0, 45.0, 1
EVERY = 5
FENCED_S = 1.0
LIMIT_S = 1200.0


@dataclass(frozen=True)
class Way:
    """options: of sbatch; run: before python, module: after it; fenced: the harness tells Slurm of each cut."""

    what: str
    options: tuple[str, ...]
    words: str
    module: str = ""
    site: bool = True
    fenced: bool = False


@dataclass(frozen=True)
class Outcome:
    """took_s: from the end of the first step to the end of the last; calm_s: as long without any cut."""

    took_s: float
    calm_s: float
    repeated: int
    cuts: int
    restarts: int

    @property
    def lost_s(self) -> float:
        """Seconds that a cut costs."""
        return (self.took_s - self.calm_s) / max(1, self.cuts)


_DCP = f"--way dcp --every {EVERY}"
WAYS = {
    "dcp": Way(
        f"torch's async DCP every {EVERY} steps, Slurm's requeue, SlurmdTimeout 10 s",
        (f"-N{TRAIN}",),
        _DCP,
        site=False,
    ),
    "dcp_fenced": Way(
        f"the same, each dead node set DOWN {FENCED_S:g} s after its cut",
        (f"-N{TRAIN}",),
        _DCP,
        site=False,
        fenced=True,
    ),
    "requeue": Way("ours, requeued", (f"-N{TRAIN}", "--gemini-replicas=2"), "--way gemini"),
    "spare": Way(
        "ours, under launchers with one spare, requeued where there is none left",
        (f"-N{TRAIN + 1}", "--gemini-replicas=2", "--no-kill", "--gemini-spares=1"),
        "--way gemini",
        module="-m gemini_hpc.launch",
    ),
}


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    found: dict[str, list[Outcome]] = {name: [] for name in WAYS}
    for at in range(options.count(1)):

        def once(name: str, at: int = at) -> Outcome:
            options.progress.say("chaos", f"{name}, run {at + 1}")
            return run(WAYS[name], options)

        for name, outcome in options.each(WAYS, "spare", once):
            found[name].append(outcome)
    return [row for name, outcomes in found.items() for row in rows(name, outcomes)]


def rows(name: str, outcomes: list[Outcome]) -> list[Row]:
    """Of one way."""
    cuts = ", ".join(str(outcome.cuts) for outcome in outcomes)
    figures = {
        f"{name}_s": (f"{STEPS} steps of {ITERATION_S:g} s, {WAYS[name].what}; cuts: {cuts}", "s", "took_s"),
        f"{name}_lost_s": ("of it lost with each cut", "s", "lost_s"),
        f"{name}_repeated": ("steps that were made again", "steps", "repeated"),
    }
    made = []
    for id, (what, unit, field) in figures.items():
        values = [float(getattr(outcome, field)) for outcome in outcomes]
        made.append(Row(f"chaos.{id}", what, unit, statistics.median(values), tuple(values)))
    return made


def run(way: Way, options: Options) -> Outcome:
    """One training under its cuts; a tiny one is over before the first."""
    steps = options.pick(STEPS, 6)
    with cluster(NODES, site=way.site, controller=way.site) as on:
        where = directory(on, "chaotic.py")
        (where / "dcp").mkdir()
        shutil.chown(where / "dcp", USER_UID)
        log = where / "log"
        script = where / "job.sh"
        words = f"{where}/chaotic.py {way.words} --steps {steps} --iteration {ITERATION_S} --log {log}"
        script.write_text(f"#!/bin/bash\nexec srun {PYTHON} {way.module} {words} --directory {where}/dcp\n")
        script.chmod(0o755)
        asked = ["--requeue", "--ntasks-per-node=1", "--open-mode=append", f"--output={where}/out", *way.options]
        job = on.submit_job([*asked, str(script)], user=USER)
        wait_for(f"job {job} makes a step", lambda: _lines(log), 180, 0.2)
        cuts = _storm(on, job, way, options, log, steps)
        lines, out = _lines(log), (where / "out").read_text()[-3000:]
        if max(line["step"] for line in lines) < steps:
            raise MeasureError(f"job {job} did not make its steps: {on.read_job(job).get('JobState')}\n{out}")
        return outcome(lines, cuts, steps)


def _storm(on: Cluster, job: int, way: Way, options: Options, log: Path, steps: int) -> int:
    """Cut power until the training is done; how often it was."""
    cuts, done = 0, threading.Event()
    timers: list[threading.Timer] = []

    def tell(event: ChaosEvent) -> None:
        nonlocal cuts
        options.progress.say("chaos", str(event))
        if event.event == "cut" and _last(log) < steps:
            cuts += 1
            if way.fenced:
                timers.append(threading.Timer(FENCED_S, _down, (on, event.node)))
                timers[-1].start()

    def end() -> None:
        """The chaos ends with the last job: a training that has its steps needs nothing more."""
        deadline = time.monotonic() + LIMIT_S
        while _last(log) < steps and time.monotonic() < deadline and not done.wait(0.2):
            pass
        on.run(["scancel", str(job)])

    watch = threading.Thread(target=end)
    watch.start()
    try:
        Chaos(on, Weather(every_s=MTBF_S, repair_s=REPAIR_S, seed=SEED), tell).run()
    finally:
        done.set()
        for timer in timers:
            timer.cancel()
        watch.join(60)
    return cuts


def _down(on: Cluster, node: str) -> None:
    on.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=power"])


def _lines(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    text = log.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _last(log: Path) -> int:
    return max((line["step"] for line in _lines(log)), default=0)


def outcome(lines: list[dict[str, Any]], cuts: int, steps: int) -> Outcome:
    """From the lines of a log: step, t, restart."""
    ends: dict[int, float] = {}
    for line in lines:
        ends.setdefault(line["step"], line["t"])
    last = min(line["t"] for line in lines if line["step"] == steps)
    pairs = itertools.pairwise(lines)
    usual = statistics.median(b["t"] - a["t"] for a, b in pairs if b["step"] == a["step"] + 1)
    made = [line for line in lines if line["t"] <= last]
    restarts = max(line["restart"] for line in lines)
    return Outcome(last - lines[0]["t"], usual * (steps - 1), len(made) - len(ends), cuts, restarts)
