"""The persistent tier: its files against bare ones, what drains cost the training, what memory saves a recovery.

`tier.drain_slowdown`: two ranks on two nodes, 1 GB of state each, compute emulated, a version in each iteration,
sent at once (there is next to no traffic of the training that it could disturb).
Blocks of iterations in turns, one after the other: without drains, and with one drain after the other (`gemini-hpc
flush` in a loop, below everything else). Both nodes write to the one disk of this machine, at 500 MB/s each at most.

Recovery (the paper's Figure 10): the same training, requeued. One node of two is cut: the replacement's state comes
from the memory of the other. Then both: it comes from the tier, page cache dropped. Retrieval is the agents' own
time for all shards of a node (own and held), the whole is from the cut to the state being loaded.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import tierfiles
from benchmarks.bench import USER, MeasureError, Options, TrainingJob, cluster, wait_for
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

RANKS, WARM, BLOCK, PAIRS, CUTS = 2, 12, 6, 8, 3
ITERATION_S = 4.0  # of a GB
NEVER_S = 604800
LOOP = 'while [ ! -e "$2" ]; do gemini-hpc flush "$1" || sleep 0.1; done'


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    rows = tierfiles.measure(options)
    with cluster(RANKS) as on:
        rows += _drains(options, on)
    with cluster(RANKS + 2, settings={"fence_budget_nodes": 1000, "tier_flush_s": 0}) as on:
        rows += _recoveries(options, on)
    return rows


def _tier(on: Cluster) -> Path:
    path = on.locate_home(USER) / "tier"
    path.mkdir(exist_ok=True)
    path.chmod(0o1777)  # what others may write to without the sticky bit is no tier
    return path


@contextmanager
def _draining(job: TrainingJob, number: int) -> Iterator[None]:
    """One drain after the other."""
    stop = job.directory / f"stop.{number}"
    argv = ["nice", "-n", "19", "sh", "-c", LOOP, "loop", str(job.id), str(stop)]
    with job.cluster.start_command(argv, USER, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            stop.touch()
            process.wait(120)


def _drains(options: Options, on: Cluster) -> list[Row]:
    pairs, tier = options.count(PAIRS), _tier(on)
    warm, block = options.pick((WARM, BLOCK), (2, 2))
    more = [f"--gemini-tier={tier}", f"--gemini-tier-interval={NEVER_S}"]
    iteration_s, size = _pace(options)
    job = TrainingJob(on, RANKS, 2, [*size, "--plan", "first,gemini:100000"], options=more)
    try:
        _train(job, warm, 300)
        means: list[float] = []
        for number in range(2 * pairs):
            options.progress.say("tier", f"drains: block {number + 1} of {2 * pairs}")
            if number % 2:
                with _draining(job, number):
                    means.append(_train(job, block, 60 * iteration_s))
            else:
                means.append(_train(job, block, 60 * iteration_s))
        saved = [event for event in _events(on, job) if event["name"] == "saved"]
    finally:
        job.cancel()
    ratios = [drained / bare for bare, drained in zip(means[::2], means[1::2], strict=True)]
    if len(saved) < len(ratios):
        raise MeasureError(f"{len(saved)} drains in {len(ratios)} blocks")
    gb, bare_s = job.lines("ready")[0]["bytes"] / 1e9, statistics.median(means[::2])
    what = f"iterations of {bare_s:.2g} s, {gb:.2g} GB a node, with drains / without; {len(saved)} drains"
    return [median_row("tier.drain_slowdown", what, "x", ratios, limit=1.02)]


def _pace(options: Options) -> tuple[float, list[str]]:
    """Compute of an iteration, in which the copies can be sent; the words of it and of the state's size."""
    seconds = max(0.5, ITERATION_S * options.gb)
    words = ["--bytes", str(options.state_bytes), "--iteration", str(seconds), "--first-iteration", str(seconds)]
    return seconds, [*words, "--scheme", "background"]


def _train(job: TrainingJob, count: int, timeout_s: float) -> float:
    """So many whole iterations from now on: their mean length."""

    def iterations() -> list[float]:
        return [line["seconds"] for line in job.lines("iteration") if line["rank"] == 0]

    first = len(iterations()) + 1  # the one that runs now does not count

    def there() -> bool:
        job.check()
        return len(iterations()) >= first + count

    wait_for(f"{count} iterations", there, timeout_s, 0.5)
    return statistics.mean(iterations()[first : first + count])


def _events(on: Cluster, job: TrainingJob) -> list[dict[str, object]]:
    done = on.run(["gemini-hpc", "inspect", str(job.id), "--json"], user=USER)
    if done.returncode:
        raise MeasureError(done.stderr.strip())
    found: list[dict[str, object]] = json.loads(done.stdout)["events"]
    return found


def _recoveries(options: Options, on: Cluster) -> list[Row]:
    cuts, tier = options.count(CUTS), _tier(on)
    found: dict[str, list[tuple[float, float]]] = {
        source: [] for source in options.pick(("memory", "tier"), ("tier",))
    }
    for number in range(cuts):
        for source, times in found.items():
            options.progress.say("tier", f"recovery from {source}: {number + 1} of {cuts}")
            times.append(_recovery(options, on, tier, source))
    rows = []
    for source, what in (
        ("memory", "one node of two is lost: from the other's memory"),
        ("tier", "both: from the tier"),
    ):
        pulls, wholes = zip(*found.get(source, found["tier"]), strict=True)
        rows.append(median_row(f"tier.{source}_pull_s", f"retrieval, {what}", "s", pulls))
        rows.append(median_row(f"tier.{source}_recovery_s", f"cut to state loaded, {what}", "s", wholes))
    return rows


def _recovery(options: Options, on: Cluster, tier: Path, source: str) -> tuple[float, float]:
    """Seconds of the slowest agent's pulls, and from the cut to the state being loaded."""
    more = ["--requeue", "--open-mode=append", f"--gemini-tier={tier}", f"--gemini-tier-interval={NEVER_S}"]
    _, size = _pace(options)
    job = TrainingJob(on, RANKS, 2, [*size, "--plan", "first,await:never"], options=more)
    try:
        job.wait_line("awaiting", RANKS, 180)
        done = on.run(["gemini-hpc", "flush", str(job.id)], user=USER, timeout_s=120)
        if done.returncode:
            raise MeasureError(f"no flush: {done.stderr.strip()}")
        for path in tier.rglob("*.h5"):
            tierfiles.forget(path)
        hosts = job.hosts()
        cut = hosts if source == "tier" else hosts[1:]
        for path in job.directory.glob("rank.[0-9]*"):
            path.unlink()
        began = time.time()
        for host in cut:
            on.cut_power(host)
        job.wait_line("ready", RANKS, 180)
        whole_s = time.time() - began
        pulled = [event for event in _events(on, job) if event["name"] == "pulled" and float(str(event["t"])) > began]
        pulls = [float(str(event["detail"]).rsplit(" in ", 1)[1].split()[0]) for event in pulled]
        out = (job.directory / "out").read_text()
        if not pulls or f"from {'the tier' if source == 'tier' else 'memory'}" not in out:
            raise MeasureError(f"job {job.id} did not come back from {source}:\n{out[-2000:]}")
        return max(pulls), whole_s
    finally:
        job.cancel()
        on.restore(120)
