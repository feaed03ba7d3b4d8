"""The verb `demo`: a job on a development cluster loses a node's power and continues.

The same training runs twice, once undisturbed and once with a power cut in the middle. Every loss, the final
parameters and the optimizer states are compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gemini_hpc import clock
from gemini_hpc.cli import frame
from gemini_hpc.cli.amounts import parse_count
from gemini_hpc.core import hostlist

if TYPE_CHECKING:
    from gemini_hpc.devcluster.cluster import Cluster

USER = "alice"
MEMORY_MB = 800  # for a rank with torch; the profile `site` holds jobs to it
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
_BAR = 30
_MARGIN = "  | "  # before the output of another command
IDENTICAL = "{} losses, final parameters and optimizer states: identical bits in both runs."
_STEPS_PER_CUT = 10
_MOST_LOG_BYTES = 64 << 20  # an iteration takes some 100 bytes


class DemoFailed(Exception):
    """A demonstration that failed; the text gives the reason."""


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "demo",
        run,
        "sudo gemini-hpc demo",
        "sudo gemini-hpc demo --victim batch-host --cuts 2",
        help="watch a job lose a node and come back from its peers' memory",
        description="Start a development cluster of 5 nodes, train a small GPT on 3 of them, cut the power of one in "
        "mid-run, and compare the result, bit by bit, with an undisturbed run. Needs root.",
        epilog="Exit status: 0 if both runs agree and no more than one iteration was repeated, else 1.",
    )
    parser.add_argument("--name", default="demo", help="name of the cluster (default: %(default)s)")
    parser.add_argument("--steps", type=parse_count, default=60, help="training iterations (default: %(default)s)")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp", help="how the model is distributed")
    parser.add_argument(
        "--victim", choices=("worker", "batch-host"), default="worker", help="which node loses its power"
    )
    parser.add_argument("--cuts", type=parse_count, default=1, help="cuts, one after the other (default: 1)")
    parser.add_argument("--profile", default="fast", help="of the development cluster (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running")
    parser.set_defaults(parser=parser)


class Jobs(Protocol):
    """The jobs of a cluster or of a site."""

    def read_job(self, job_id: int) -> dict[str, str]:
        """Return a job's facts; `JobState` is one of them."""


@dataclass
class TrainingRun:
    """A training job and the files that it wrote."""

    cluster: Jobs
    id: int
    directory: Path
    steps: int
    cut_at: list[float] = field(default_factory=list)

    def read_log(self) -> list[dict[str, Any]]:
        """Return rank 0's log: one object per iteration, then one with digests.

        The file is a user's and the reader is root: no link is followed, no pipe is waited for.

        Raises:
            DemoFailed: The file is no such log.
        """
        path = self.directory / "loss.jsonl"
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as f:
                whole, _, _ = f.read(_MOST_LOG_BYTES).rpartition(b"\n")
            found: list[Any] = [json.loads(line) for line in whole.splitlines()]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as exc:
            raise DemoFailed(f"{path} is no log of a training: {exc}") from None
        if not all(isinstance(line, dict) for line in found):
            raise DemoFailed(f"{path} is no log of a training: a line is no JSON object")
        return found

    def list_steps(self, restart: int | None = None) -> list[dict[str, Any]]:
        """Return the log's iterations, in this incarnation or in all."""
        steps = [line for line in self.read_log() if "step" in line]
        return [line for line in steps if restart is None or line.get("restart") == restart]

    def read_step(self) -> int:
        """Return the last iteration that rank 0 has finished."""
        return max((line["step"] for line in self.list_steps()), default=0)

    @property
    def state(self) -> str:
        """Return the job's state in Slurm."""
        return self.cluster.read_job(self.id).get("JobState", "UNKNOWN")

    def read_output(self) -> str:
        """Return the batch script's output."""
        path = self.directory / "out"
        return path.read_text() if path.exists() else ""


@dataclass
class DemoRun(TrainingRun):
    """A training job on a development cluster."""

    cluster: Cluster


class Show:
    """A progress display: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._began = clock.monotonic()
        self._last = ""

    def say(self, text: str = "") -> None:
        """Print a line that is not overwritten."""
        self._wipe()
        print(text, flush=True)

    def print_title(self, text: str) -> None:
        """Print a heading with the time since the start."""
        self.say(f"[{clock.monotonic() - self._began:5.1f} s] {text}")

    def draw_progress(self, done: int, total: int, note: str) -> None:
        """Show a bar that is overwritten; without a terminal, print a line at each fifth of the way."""
        if self._live:
            filled = _BAR * done // max(1, total)
            text = f"  [{'#' * filled}{'.' * (_BAR - filled)}] {done}/{total} {note}"
            print(f"\r\033[K{text}", end="", flush=True)
            self._last = text
        else:
            text = f"  iteration {5 * (done // (total // 5 * 5 // 5 or 1)) * (total // 5) // 5} of {total}: {note}"
            if text != self._last:
                self._last = text
                print(text, flush=True)

    def _wipe(self) -> None:
        if self._live and self._last:
            print("\r\033[K", end="")
            self._last = ""


def find_examples() -> Path:
    """Return the directory of the examples."""
    import gemini_hpc

    package = Path(gemini_hpc.__file__).resolve().parent
    for candidate in (package / "_site" / "examples", package.parent / "examples"):
        if (candidate / "job.sh").exists():
            return candidate
    raise DemoFailed("the examples are not installed with this package")


def _submit_job(cluster: Cluster, label: str, args: argparse.Namespace, options: list[str]) -> DemoRun:
    directory = cluster.locate_home(USER) / label
    directory.mkdir()
    for path in find_examples().iterdir():
        if path.is_file():
            shutil.copy(path, directory / path.name)
            (directory / path.name).chmod(0o755)
    shutil.chown(directory, USER_UID)
    training = ["--parallel", args.parallel, "--steps", str(args.steps), "--log", str(directory / "loss.jsonl")]
    script = [str(directory / "job.sh"), *training]
    fixed = ["--requeue", "-N3", f"--mem={MEMORY_MB}", f"--chdir={directory}", f"--output={directory}/out"]
    job = cluster.submit_job([*fixed, *options, *script], user=USER)
    return DemoRun(cluster, job, directory, args.steps)


USER_UID = 5001


def wait_until(run: TrainingRun, show: Show, note: str, until: Callable[[], bool], timeout_s: float) -> None:
    """Wait until something is true of a job.

    Raises:
        DemoFailed: The time is over, or the job has ended otherwise.
    """
    deadline = clock.monotonic() + timeout_s
    while not until():
        if clock.monotonic() > deadline:
            raise DemoFailed(f"job {run.id}: {note}: not within {timeout_s:g} s\n{run.read_output()[-3000:]}")
        state = run.state
        if state in _ENDED and not until():
            if state != "COMPLETED":
                raise DemoFailed(f"job {run.id} ended as {state}\n{run.read_output()[-3000:]}")
            return
        show.draw_progress(run.read_step(), run.steps, f"{note} ({state.lower()})")
        clock.sleep(0.1)


def _inspect_job(run: DemoRun, *options: str) -> str:
    from gemini_hpc.report import columns

    width = f"COLUMNS={columns.measure_width() - len(_MARGIN)}"
    argv = ["env", width, "gemini-hpc", "inspect", str(run.id), *options]
    done = run.cluster.run(argv, user=USER, timeout_s=20)
    if done.returncode:
        raise DemoFailed(f"gemini-hpc inspect {run.id}: {done.stderr.strip()}")
    return done.stdout


def _cut_power(run: DemoRun, args: argparse.Namespace, show: Show) -> str:
    hosts = hostlist.expand(run.cluster.read_job(run.id)["NodeList"])
    victim = hosts[0] if args.victim == "batch-host" else hosts[1]
    run.cut_at.append(clock.time())
    run.cluster.cut_power(victim)
    show.print_title(f"*** power of {victim} cut, in iteration {run.read_step() + 1} ***")
    return victim


def has_recovered(run: TrainingRun, restart: int) -> bool:
    """Return whether this incarnation has finished an iteration."""
    return bool(run.list_steps(restart))


_TIMELINE = (
    ("detected", "detected by its peers"),
    ("confirmed", "confirmed by the controller"),
    ("reserved", "survivors reserved"),
    ("down", "DOWN in Slurm"),
    ("completing", "requeued, completing"),
    ("requeued", "pending again"),
    ("running", "running again"),
    ("attached", "prolog: agents attached"),
    ("agreed", "agents agree on map and version"),
    ("pulled", "pulled from the peers"),
    ("imports_done", "Python imports done"),
    ("resumed", "state loaded"),
    ("first_iteration", "first new iteration"),
)


@dataclass(frozen=True)
class RecoveryTimeline:
    """The events of one recovery, in seconds after the power cut."""

    rows: tuple[tuple[float, str, str], ...]
    total_s: float
    own_s: float


def build_timeline(document: dict[str, Any], cut: float, restart: int, first_step: float) -> RecoveryTimeline:
    """Return the events of the recovery into incarnation `restart`, and our own share of its length.

    Our own share consists of these parts:

    - cut to DOWN (detection, confirmation, reservation)
    - pending to running (the start margin that we ask for)
    - running to agreed (our prolog)
    - the later of 'imports done' and 'agreed' to the first new iteration

    The rest is Slurm's (DOWN to pending) and Python's (imports).
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    detail: dict[str, str] = {}
    for event in document["events"]:
        after = event["t"] - cut
        if 0 <= after <= first_step - cut + 2:
            name = event["name"]
            first.setdefault(name, after)
            last[name] = after
            detail.setdefault(name, " ".join(x for x in (event["host"], event["detail"]) if x and x[0] != "{"))
    late = ("pulled", "resumed", "imports_done", "attached")
    rows = [
        (last[name] if name in late else first[name], text, detail[name])
        for name, text in _TIMELINE
        if name in first and name != "first_iteration"
    ]
    total = first_step - cut
    rows.append((total, "first new iteration", f"restart {restart}"))
    down, pending, running = (first.get(name, 0.0) for name in ("down", "requeued", "running"))
    agreed = max(first.get("agreed", 0.0), running)
    own = down + (running - pending) + (agreed - running) + total - max(last.get("imports_done", 0.0), agreed)
    return RecoveryTimeline(tuple(sorted(rows)), total, own)


def compare_runs(reference: TrainingRun, run: TrainingRun) -> tuple[int, list[str]]:
    """Return the number of compared iterations and the list of differences."""
    wanted = {line["step"]: line["loss"] for line in reference.list_steps()}
    steps = run.list_steps()
    trouble = [
        f"loss of iteration {line['step']} (restart {line['restart']}) differs"
        for line in steps
        if wanted.get(line["step"]) != line["loss"]
    ]
    seen = {line["step"] for line in steps}
    if seen != set(wanted) or len(wanted) != reference.steps:
        trouble.append(f"{len(seen)} and {len(wanted)} iterations, wanted {reference.steps}")
    digests = [[line["final"] for line in r.read_log() if "final" in line] for r in (reference, run)]
    if not digests[0] or digests[0][-1:] != digests[1][-1:]:
        trouble.append("final parameters or optimizer states differ")
    return len(seen), trouble


def run(args: argparse.Namespace) -> int:
    """Run the demonstration and return the exit status."""
    from gemini_hpc.devcluster.cluster import Cluster
    from gemini_hpc.devcluster.errors import DevclusterError

    if args.cuts < 1 or args.steps < _STEPS_PER_CUT * (args.cuts + 1):
        least = _STEPS_PER_CUT * (max(args.cuts, 1) + 1)
        args.parser.error(f"wanted --cuts of 1 or more, and --steps of {least} or more for that many cuts")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        args.parser.error(f"--json {args.json}: no such directory")
    show = Show()
    try:
        show.print_title("starting 5 nodes: slurmctld, slurmd, munged, and the gemini controller")
        # Each cut fences a node, so the default budget would end a longer demonstration halfway.
        settings = {"fence_budget_nodes": args.cuts} if args.cuts > 2 else {}
        cluster = Cluster.bring_up(args.name, nodes=5, profile=args.profile, settings=settings, replace=True)
        try:
            return _run_jobs(cluster, args, show)
        finally:
            if args.keep:
                show.say(f"The cluster is still there: gemini-hpc devcluster status --name {args.name}")
            else:
                cluster.tear_down()
    except DevclusterError as exc:
        show.say(f"gemini-hpc demo: {exc}")
    except DemoFailed as exc:
        show.say(f"gemini-hpc demo: FAILED: {exc}")
    return 1


def _run_jobs(cluster: Cluster, args: argparse.Namespace, show: Show) -> int:
    show.print_title(f"the reference: sbatch -N3 job.sh, {args.steps} iterations without replicas or disturbance")
    reference = _submit_job(cluster, "reference", args, [])
    wait_until(reference, show, "reference run", lambda: reference.state == "COMPLETED", 180)

    show.print_title("the main job: sbatch --requeue -N3 --gemini-replicas=2 job.sh")
    main = _submit_job(cluster, "main", args, ["--gemini-replicas=2"])
    span = args.steps // (args.cuts + 1)
    figures: dict[str, Any] = {"cuts": []}
    before = ""
    for number in range(1, args.cuts + 1):
        goal = span * number
        wait_until(main, show, "training", lambda goal=goal: main.read_step() >= goal, 120)  # type: ignore[misc]
        before = _inspect_job(main)
        victim = _cut_power(main, args, show)
        wait_until(main, show, f"{victim} is dead", lambda n=number: has_recovered(main, n), 90)  # type: ignore[misc]
        show.print_title("training goes on")
        if number < args.cuts:
            cluster.restore_power(victim)
            cluster.resume(victim)
    first_steps = {n: main.list_steps(n)[0]["time"] for n in range(1, args.cuts + 1)}
    clock.sleep(0.5)
    after = _inspect_job(main)
    document = json.loads(_inspect_job(main, "--json"))
    wait_until(main, show, "training", lambda: main.state == "COMPLETED", 180)
    document["events"] += [
        e for e in json.loads(_inspect_job(main, "--json"))["events"] if e not in document["events"]
    ]

    show.say()
    show.say("gemini-hpc inspect, before the cut:")
    show.say(_indent_text(before))
    show.say("gemini-hpc inspect, after the recovery:")
    show.say(_indent_text(after))
    failed = []
    for number in range(1, args.cuts + 1):
        cut, first = main.cut_at[number - 1], first_steps[number]
        line = build_timeline(document, cut, number, first)
        show.say(f"Timeline of recovery {number} (seconds after the power cut):")
        show_rows(line.rows, show)
        repeated = count_repeated(main, number)
        show.say(f"  power cut to first new iteration: {line.total_s:.2f} s ({line.own_s:.2f} s of it in gemini-hpc)")
        show.say(f"  completed iterations repeated: {repeated}")
        figures["cuts"].append({"total_s": line.total_s, "own_s": line.own_s, "lost": repeated, "rows": line.rows})
        if repeated not in (0, 1):
            failed.append(f"recovery {number} repeated {repeated} completed iterations, at most 1 is allowed")
    compared, trouble = compare_runs(reference, main)
    failed += trouble
    if not trouble:
        show.say(IDENTICAL.format(compared))
    figures["failed"] = failed
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))
    if failed:
        raise DemoFailed("; ".join(failed[:5]))
    show.print_title("done: the job lost a node and nothing else")
    return 0


def show_rows(rows: Sequence[tuple[float, str, str]], show: Show) -> None:
    """Print (seconds, event, detail) of a timeline, folded to the width of the terminal."""
    from gemini_hpc.report import columns

    for t, text, detail in rows:
        for line in columns.fold(detail, columns.measure_width(), " " * 42, f"  {t:6.2f}  {text:<31} "):
            show.say(line)


def count_repeated(run: TrainingRun, restart: int) -> int:
    """Return the number of completed iterations that this recovery had to repeat."""
    old = max((line["step"] for line in run.list_steps() if line["restart"] < restart), default=0)
    new = run.list_steps(restart)[0]["step"]
    return int(max(0, old - new + 1))


def _indent_text(text: str) -> str:
    return "\n".join(f"{_MARGIN}{line}" for line in text.rstrip().splitlines())
