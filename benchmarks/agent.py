"""The agent: how fast it is there, how soon a new job is protected, how late its loop is, what memory it takes."""

from __future__ import annotations

import json
import re
import statistics
import tempfile

from benchmarks.bench import PYTHON, USER, Line, MeasureError, Options, TrainingJob, cluster, directory, program
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

RANKS = 2
_FIRST_JOB = 900_001  # of no real job
_STATUS = 'for p in $(pgrep -f "gemini_hpc.agent --job $0 "); do cat /proc/$p/status; done'


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    with cluster(RANKS) as on:
        options.progress.say("agent", "starting agents")
        starts = _starts(on, options.count(15))
        firsts, peaks, plain_s = [], [], []
        jobs = options.count(3)
        for number in range(1, jobs + 1):
            options.progress.say("agent", f"training job {number} of {jobs}")
            first, peak = _train(on, options)
            firsts.append(first)
            peaks.append(peak)
            on.wait_idle()
            (plain,) = program(300, "plainfirst.py", options.state_bytes, RANKS)
            plain_s.append(plain["seconds"])
    options.progress.say("agent", "pushes beside a timer")
    late_ms = _late_ms(options.state_bytes, options.count(5))
    python_s = statistics.median(line["python_s"] for line in starts)
    return [
        median_row(
            "agent.start_s",
            "process started to ready for the prolog (one-node job, no agent there before)",
            "s",
            [line["ready_s"] for line in starts],
            limit=0.3,
            peers={"python -I -c pass": python_s},
            baseline="python -I -c pass",
        ),
        median_row(
            "agent.socket_s",
            "of it: until its socket takes connections",
            "s",
            [line["connected_s"] for line in starts],
        ),
        median_row(
            "agent.start_cpu_s", "CPU time until ready, with its supervisor", "s", [i["cpu_s"] for i in starts]
        ),
        median_row(
            "agent.first_sealed_s",
            f"first step() of a new job to its first sealed version, {options.gb:g} GB a rank, m = 2, iterations of "
            f"{firsts[0][0]['iteration_s']} s",
            "s",
            [max(line["sealed_s"] for line in first) for first in firsts],
            limit=3,
            peers={"the same memory and bytes by plain processes": statistics.median(plain_s)},
            baseline="the same memory and bytes by plain processes",
        ),
        median_row(
            "agent.loop_late_ms",
            f"a timer of 1 ms on an agent's loop, beside a push of {options.gb:g} GB each way: how late it is, 99 % "
            "of a version",
            "ms",
            late_ms,
            limit=5,
        ),
        Row(
            "agent.rss_mib",
            "resident memory of the agent process while training, beside replicas: RssAnon + RssFile (libraries "
            "shared with others included), the most seen",
            "MiB",
            max(peak["agent"] for peak in peaks),
            tuple(peak["agent"] for peak in peaks),
            limit=30,
            peers={"of it RssAnon": max(peak["anon"] for peak in peaks)},
        ),
        Row(
            "agent.supervisor_rss_mib",
            "the same of its supervisor (most of it shared with the agent, which it forked)",
            "MiB",
            max(peak["supervisor"] for peak in peaks),
            tuple(peak["supervisor"] for peak in peaks),
        ),
    ]


def _starts(on: Cluster, runs: int) -> list[Line]:
    program = directory(on, "starter.py") / "starter.py"
    places = [f"/run/gemini-hpc/{_FIRST_JOB + i}" for i in range(runs + 1)]
    on.exec("n1", ["mkdir", "-p", "-m", "0755", "/run/gemini-hpc"])
    on.exec("n1", ["install", "-d", "-m", "0700", "-o", USER, *places])
    done = on.exec("n1", [PYTHON, str(program), "n1", *places], user=USER, timeout_s=30 + 5 * runs)
    on.exec("n1", ["rm", "-rf", *places])
    if done.returncode:
        raise MeasureError(f"agents do not start: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()][1:]


def _late_ms(state_bytes: int, versions: int) -> list[float]:
    """Return how late the loops of two agents are: 99 % of each version, in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="gemini-late-") as place:
        lines = program(120 + 60 * versions, "late_loop.py", place, state_bytes, versions)
    return [late for line in lines for late in line["late_ms"]]


def _train(on: Cluster, options: Options) -> tuple[list[Line], dict[str, float]]:
    """One job: what its ranks say of their first version; the most memory that its agents took."""
    plan = ["--bytes", str(options.state_bytes), "--plan", "first,gemini:6"]
    job = TrainingJob(on, RANKS, 2, plan)
    peak = dict.fromkeys(("agent", "supervisor", "anon"), 0.0)

    def sample() -> None:
        for node in on.node_names:
            found = [
                _memory(text) for text in on.exec(node, ["bash", "-c", _STATUS, str(job.id)]).stdout.split("Name:")
            ]
            found = [process for process in found if process["pid"]]
            # the supervisor's parent is no agent
            pids = {process["pid"] for process in found}
            for process in found:
                name = "agent" if process["parent"] in pids else "supervisor"
                if name == "agent" or len(found) > 1:
                    peak[name] = max(peak[name], process["anon"] + process["file"])
                if name == "agent":
                    peak["anon"] = max(peak["anon"], process["anon"])

    job.finish(600, sample)
    if not peak["agent"]:
        raise MeasureError(f"no agent of job {job.id} was seen")
    return job.lines("first"), peak


def _memory(status: str) -> dict[str, float]:
    """pid, parent and MiB of one /proc/PID/status."""
    keys = {"pid": "Pid", "parent": "PPid", "anon": "RssAnon", "file": "RssFile"}
    found = {}
    for name, key in keys.items():
        m = re.search(rf"^{key}:\s+(\d+)( kB)?", status, re.MULTILINE)
        value = float(m[1]) if m else 0.0
        found[name] = value / 1024 if m and m[2] else value
    return found
