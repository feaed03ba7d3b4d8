"""The paper's Figure 16 without GPUs: length of an iteration under each scheme of sending checkpoints to the peers.

Real Slurm nodes, one rank on each, m = 2, links of 1 Gbit/s each way (119 MB/s of payload), `programs/interleave.py`:
FSDP2 and Adam in fp32, so that a rank sends C = 12 bytes per parameter / ranks in each iteration, and
3 * blocks * forward seconds of an iteration are idle time of its network, in 2 * blocks spans of which the longest is
2 * forward. Calculated with B = 117 MB/s:

                 parameters   C         C/B      idle     idle : C/B   longest span : C/B
    2 nodes      8.75 M       52.5 MB   0.449 s  0.673 s  1.5          0.125
    tight        8.75 M       52.5 MB   0.449 s  0.359 s  0.8          0.067
    slow         4.39 M       26.3 MB   1.13 s   0.338 s  0.3          0.025     links of 200 Mbit/s
    short        4.39 M       26.3 MB   0.225 s  0.338 s  1.5          0.125     iterations half as long
    4 nodes      8.75 M       26.2 MB   0.449 s  0.673 s  1.5          0.125     links of 500 Mbit/s
    4, short     4.39 M       13.2 MB   0.225 s  0.338 s  1.5          0.125     the same, iterations half as long

Copies go from agent to agent. The receiver has no buffers, and no copy from a device is emulated. Four nodes have
slower links, as two cores do not move 4 x 1 Gbit/s each way beside what they compute.

A part of what a checkpoint costs is a fixed time in each iteration (`step()`, and in each stretch of collectives a
little), which weighs less the longer iterations are: hence the short ones, and `ms`, the median's loss in
milliseconds.

What each set-up really had is a row. Jobs differ by more than their rounds do, so the rounds of "2 nodes" and "4
nodes" are those of three jobs, one after the other. A round gives one ratio for each scheme in it (gemini always,
the others in one round of five): its iterations against those without checkpoints in the same round. Bounds are those
of the median, one-sided at 95 %, from 4,000 resamplings (bootstrap); of fewer than six ratios there is no bound, and
the row of a scheme without a bar is their median. `planned`: share of the rounds of gemini in which there was a plan
(in others the training was being profiled, which counts as well). Whether the set-up is right is seen from
`blocking`: it must cost what C/B says, within 5 %.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.bench import Line, MeasureError, Options, TrainingJob, cluster
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

RATE = "1gbit"
ROUNDS, WARM, MEASURED = 30, 2, 6
BASELINE = "none"
TIMEOUT_S = 3000.0
LOOK_S = 5.0
RESAMPLINGS, LEAST = 4000, 6
SCHEMES = {
    BASELINE: "no checkpoints",
    "blocking": "the training waits until each checkpoint has been sent",
    "background": "sent at once, beside the training's own traffic",
    "naive": "one partition in each idle span",
    "no_pipeline": "chunks in idle spans, one buffer",
    "gemini": "chunks in idle spans, several buffers",
}
LIMITS = {"gemini": (1.01, 1.005)}


@dataclass(frozen=True)
class Setting:
    """One training. forward_s: emulated compute of a block in the forward pass. suffix: of its rows;
    main: name of its row of `gemini`; what: it is."""

    nodes: int
    forward_s: float
    schemes: tuple[str, ...]
    suffix: str = ""
    main: str = "gemini"
    what: str = ""
    rate: str = RATE
    share: float = 1.0  # of the usual number of rounds
    dim: int = 296
    blocks: int = 8
    warm: int = WARM
    measured: int = MEASURED
    jobs: int = 1  # that share the rounds
    micro: int = 1  # micro-batches in an iteration

    @property
    def idle_s(self) -> float:
        """Idle time of the network in an iteration."""
        return 3 * self.blocks * self.forward_s * self.micro


TWO = Setting(2, 0.02805, tuple(SCHEMES), jobs=3)
SHORT = Setting(
    2,
    0.01407,
    (BASELINE, "gemini"),
    "_short",
    "short",
    ", short iterations",
    share=0.5,
    dim=208,
)
TIGHT = Setting(
    2,
    0.01496,
    (BASELINE, "blocking", "background", "gemini"),
    "_tight",
    "tight",
    ", too little idle time",
    share=0.5,
)
SLOW = Setting(
    2,
    0.01407,
    (BASELINE, "background", "gemini"),
    "_slow",
    "slow",
    ", links of 200 Mbit/s",
    rate="200mbit",
    share=0.3,
    dim=208,
    warm=4,
    measured=8,
)
FOUR = Setting(
    4,
    0.02805,
    (BASELINE, "blocking", "background", "gemini"),
    "_4",
    "gemini_4",
    ", links of 500 Mbit/s",
    rate="500mbit",
    measured=4,
    jobs=3,
)
FOUR_SHORT = Setting(
    4,
    0.01407,
    (BASELINE, "gemini"),
    "_4_short",
    "short_4",
    ", links of 500 Mbit/s, short iterations",
    rate="500mbit",
    share=0.5,
    dim=208,
)
SETTINGS = ((2, (TWO, SHORT, TIGHT, SLOW)), (4, (FOUR, FOUR_SHORT)))


def tiny(setting: Setting) -> Setting:
    """As small as it can be."""
    return replace(setting, nodes=2, forward_s=0.01, dim=32, blocks=3, warm=1, measured=1)


@dataclass(frozen=True)
class Found:
    """What a training showed. seconds: by scheme and round, the mean iteration."""

    setting: Setting
    seconds: dict[str, dict[int, float]]
    rate: tuple[float, ...]
    checkpoint_bytes: int
    alone_s: float
    traffic: dict[str, list[Line]]

    @property
    def B(self) -> float:
        """Bytes per second of a link."""
        return statistics.median(self.rate)

    @property
    def sending_s(self) -> float:
        """C/B."""
        return self.checkpoint_bytes / self.B

    def ratios(self, scheme: str) -> list[float]:
        """Against no checkpoints, one for each round."""
        return [seconds / self.seconds[BASELINE][number] for number, seconds in self.seconds[scheme].items()]

    @property
    def bare(self) -> list[float]:
        """Iterations without checkpoints, one for each round."""
        return list(self.seconds[BASELINE].values())

    @property
    def expected(self) -> float:
        """Of `blocking`: 1 + (C/B) / T."""
        return 1 + self.sending_s / statistics.median(self.bare)


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    rounds, rows = options.count(ROUNDS), list[Row]()
    if options.tiny:
        with cluster(2) as on:
            prepare(on)
            shared = train(options, on, tiny(TWO), 1)
        found = [replace(shared, setting=setting) for _, those in SETTINGS for setting in those]
        return [row for one in found for row in _rows(one)]
    for nodes, settings in SETTINGS:
        with cluster(nodes) as on:
            for setting in settings:
                prepare(on, setting.rate)
                count = max(2, round(rounds * setting.share))
                jobs = min(setting.jobs, count // 2)
                each = [count // jobs + (number < count % jobs) for number in range(jobs)]
                rows += _rows(pooled([train(options, on, setting, share) for share in each]))
    return rows


def prepare(on: Cluster, rate: str = RATE) -> None:
    """Shape the links. The host's congestion control may be one that halts for 0.2 s now and then to look for its
    round-trip time (BBR), or shares badly; Reno is everywhere."""
    for node in on.node_names:
        on.limit_link(node, rate)
        done = on.exec(node, ["/bin/sh", "-c", "echo reno >/proc/sys/net/ipv4/tcp_congestion_control"])
        if done.returncode:
            raise MeasureError(f"congestion control of {node}: {done.stderr.strip()}")


def train(options: Options, on: Cluster, setting: Setting, rounds: int) -> Found:
    """One job."""
    words = {
        "--schemes": ",".join(setting.schemes),
        "--rounds": rounds,
        "--warm": setting.warm,
        "--measured": setting.measured,
        "--dim": setting.dim,
        "--blocks": setting.blocks,
        "--forward": setting.forward_s,
        "--micro": setting.micro,
    }
    argv = [str(word) for pair in words.items() for word in pair]
    job = TrainingJob(on, setting.nodes, 2, argv, "interleave.py")

    def meanwhile() -> None:
        last = job.lines("iteration")[-1:]
        where = f"round {last[0]['round'] + 1} of {rounds}" if last else "starting"
        options.progress.say(f"fig16, {setting.nodes} nodes{setting.suffix}", where)

    job.finish(TIMEOUT_S, meanwhile, LOOK_S)
    checkpoint = job.lines("checkpoint")
    return Found(
        setting,
        _by_round(job.lines("iteration")),
        tuple(line["bytes_per_s"] for line in job.lines("rate") if line["rank"] == 0),
        max(line["bytes"] for line in checkpoint),
        max(line["seconds"] for line in checkpoint),
        {scheme: [line for line in job.lines("traffic") if line["scheme"] == scheme] for scheme in setting.schemes},
    )


def pooled(parts: Sequence[Found]) -> Found:
    """What several jobs of one set-up showed, as one. The rounds are numbered on."""
    seconds: dict[str, dict[int, float]] = defaultdict(dict)
    traffic: dict[str, list[Line]] = defaultdict(list)
    begun = 0
    for part in parts:
        for scheme, rounds in part.seconds.items():
            seconds[scheme] |= {begun + number: value for number, value in rounds.items()}
        for scheme, lines in part.traffic.items():
            traffic[scheme] += lines
        begun += len(part.bare)
    return Found(
        parts[0].setting,
        dict(seconds),
        tuple(rate for part in parts for rate in part.rate),
        parts[0].checkpoint_bytes,
        statistics.median(part.alone_s for part in parts),
        dict(traffic),
    )


def _by_round(lines: Iterable[Line]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["index"] >= 0:
            found[line["scheme"]][line["round"]].append(line["seconds"])
    return {s: {n: statistics.mean(v) for n, v in sorted(rounds.items())} for s, rounds in found.items()}


def upper(values: Sequence[float]) -> float:
    """Upper bound of the median, one-sided at 95 %."""
    dice = random.Random(16)
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(RESAMPLINGS))
    return medians[int(0.95 * RESAMPLINGS)]


def stated(scheme: str, ratios: Sequence[float]) -> tuple[float, str]:
    """The figure of a scheme's row, and what it is. What has a bar is held to it by the bound, of however few ratios
    (then it is the greatest of them)."""
    if scheme in LIMITS or len(ratios) >= LEAST:
        return upper(ratios), "upper bound"
    return statistics.median(ratios), "median"


def _rows(found: Found) -> list[Row]:
    setting, suffix = found.setting, found.setting.suffix
    bare = found.bare
    where = f"{setting.nodes} nodes{setting.what}"
    rows = [
        median_row(f"fig16.none{suffix}", f"{where}: length of an iteration without checkpoints", "s", bare),
        Row(
            f"fig16.spread{suffix}",
            f"{where}: standard deviation of those over their mean; above this the figures below are noise",
            "x",
            statistics.pstdev(bare) / statistics.mean(bare),
            limit=0.01,
        ),
        median_row(
            f"fig16.rate{suffix}",
            f"{where}: B, payload between two nodes, both ways at once",
            "MB/s",
            [rate / 1e6 for rate in found.rate],
        ),
        Row(
            f"fig16.idle{suffix}",
            f"{where}: emulated compute of an iteration against C/B; C = {found.checkpoint_bytes / 1e6:.1f} MB",
            "x",
            setting.idle_s / found.sending_s,
            peers={"longest span": 2 * setting.forward_s / found.sending_s, "C/B in s": found.sending_s},
        ),
    ]
    for scheme in setting.schemes[1:]:
        ratios = found.ratios(scheme)
        (value, what), middle = stated(scheme, ratios), statistics.median(ratios)
        peers = {"median": middle, "ms": 1e3 * (middle - 1) * statistics.median(bare)}
        if scheme == "gemini":
            stages = [line["stage"] for line in found.traffic[scheme]]
            peers["planned"] = stages.count("steady") / len(stages)
        rows.append(
            Row(
                f"fig16.{setting.main if scheme == 'gemini' else scheme + suffix}",
                f"{where}: iteration against one without, {what}; {SCHEMES[scheme]}",
                "x",
                value,
                tuple(ratios),
                peers=peers,
                limit=LIMITS.get(scheme, (None, None))[0],
                goal=LIMITS.get(scheme, (None, None))[1],
            )
        )
    rows += plan_rows(
        (f"fig16.{setting.main}_j", f"fig8.before{suffix}", f"fig8.after{suffix}"),
        where,
        found.traffic.get("gemini", []),
    )
    if "blocking" in setting.schemes:
        seen = statistics.median(found.ratios("blocking"))
        rows.append(
            Row(
                f"fig16.blocking_expected{suffix}",
                f"{where}: blocking against 1 + (C/B)/T, how far off; above this the set-up is wrong",
                "x",
                abs(seen / found.expected - 1),
                limit=0.05,
                peers={"expected": found.expected, "seen": seen, "C alone in s": found.alone_s},
            )
        )
    return rows


def plan_rows(ids: tuple[str, str, str], where: str, told: Sequence[Line]) -> list[Row]:
    """Return the rows j, idle time before and idle time after, of the plans that ranks reported.

    A figure is NaN where no rank had one: in a short run all of them may be profiling anew.
    """
    planned, nothing = [line for line in told if line["stage"] == "steady"], [float("nan")]
    saved, before, after = ids
    return [
        Row(
            saved, f"{where}: a version is saved every j-th iteration", "", max([p["j"] for p in planned] or nothing)
        ),
        median_row(
            before,
            f"{where}: idle time of the network in an iteration without checkpoints",
            "s",
            [p["idle_s"] for p in planned] or nothing,
        ),
        median_row(
            after,
            f"{where}: the same with checkpoints in it",
            "s",
            [p["idle_s"] - p["overlap"]["chunks_s"] for p in planned if p["overlap"]] or nothing,
        ),
    ]
