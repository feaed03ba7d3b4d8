"""The canary of `doctor`: a small protected job of a user loses a node's agent and slurmd, and comes back.

Its nodes are the job's own (`--exclusive`). The node's loss is Slurm's to declare: the canary sets it DOWN in the
place of SlurmdTimeout. Whatever ends the canary, a guard brings the node back (`doctor.canary`).
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini_hpc import clock
from gemini_hpc.cli import demo
from gemini_hpc.config import Settings, find_program_problem
from gemini_hpc.controller.gate import Gate
from gemini_hpc.doctor import canary
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Unavailable
from gemini_hpc.slurm import Slurm, SlurmError
from gemini_hpc.slurm.client import find_tool

JOB_NODES, NODES = 2, 3  # the job's, and with one to replace the lost one
STEPS, TAKEN_AT = 40, 10
SMALL = ("--layers", "2", "--dim", "96", "--workers", "0")  # a drill of the recovery: any state will do
ITERATION_S = 0.25  # the training must not end before its loss is noticed
NOTICED_S = 30.0  # peers miss an agent within seconds
START_S, BACK_S, END_S = 300.0, 300.0, 300.0  # imports of torch from a shared file system may take minutes
MINUTES = 15  # time limit of each of the two jobs


class RefusedError(Exception):
    """The error that the canary was not begun; the text gives the reason and the remedy."""


@dataclass
class SiteJobs:
    """The jobs of one user at a site, as `demo.TrainingRun` asks for them."""

    facts: HostFacts
    account: pwd.struct_passwd
    directory: Path

    def run_as_user(self, argv: list[str]) -> str:
        """Run a command as the user. Return its output.

        Raises:
            RefusedError: The command failed.
        """
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "SLURM_CONF", "SLURM_ACCOUNT", "PYTHON", "LANG")}
        name = {"HOME": self.account.pw_dir, "USER": self.account.pw_name, "LOGNAME": self.account.pw_name}
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60.0,
            check=False,
            user=self.account.pw_uid,
            group=self.account.pw_gid,
            extra_groups=os.getgrouplist(self.account.pw_name, self.account.pw_gid),
            env=kept | name,
            cwd="/",
        )
        if done.returncode:
            raise RefusedError(
                f"{' '.join(argv[:2])} as {self.account.pw_name}: {' '.join(done.stderr.split())[-300:]}"
            )
        return done.stdout

    def submit(self, label: str, partition: str, options: list[str], more: list[str]) -> demo.TrainingRun:
        """Submit one training on nodes of its own."""
        directory = self.directory / label
        self.run_as_user(["/bin/mkdir", "-p", str(directory)])
        files = [str(path) for path in demo.find_examples().iterdir() if path.is_file()]
        self.run_as_user(["/bin/cp", "--", *files, str(directory)])
        training = [*SMALL, "--steps", str(STEPS), "--log", str(directory / "loss.jsonl"), *more]
        job = self.run_as_user(
            [
                *(find_tool("sbatch"), "--parsable", f"--partition={partition}", f"-N{JOB_NODES}", "--exclusive"),
                *("--requeue", f"--time={MINUTES}", "--job-name=gemini-canary", f"--chdir={directory}"),
                *(f"--output={directory}/out", *options, str(directory / "job.sh"), *training),
            ]
        )
        return demo.TrainingRun(self, int(job.strip().split(";")[0]), directory, STEPS)

    def read_job(self, job_id: int) -> dict[str, str]:
        """Return the job's state."""
        job = self.facts.ask_slurm(lambda slurm: slurm.read_job(job_id))
        return {"JobState": job.state}

    def list_nodes(self, job_id: int) -> tuple[str, ...]:
        """Return the job's nodes, the batch host first."""
        return self.facts.ask_slurm(lambda slurm: slurm.read_job(job_id)).nodes


def prepare(facts: HostFacts, partition: str, user: str) -> tuple[Settings, pwd.struct_passwd, list[str]]:
    """Check everything that the canary needs. Return the settings, the user, and idle nodes.

    Raises:
        RefusedError: Something is missing.
        Unavailable: Slurm did not answer, or the settings cannot be used.
    """
    if os.geteuid():
        raise RefusedError("only root may take a node away: run it as root")
    settings = facts.settings
    if not settings.list_controller_hosts():
        raise RefusedError("controller_host is empty in the settings: only a controller acts on a lost node")
    if mode := Gate(settings).explain_refusal([partition]):
        raise RefusedError(f"the controller would not act ({mode}): see docs/first_month.md")
    if not settings.canary_program:
        raise RefusedError("canary_program is not set, so that slurmd could not be started again: see docs/admin.md")
    if problem := find_program_problem(settings.canary_program):
        raise RefusedError(f"canary_program {settings.canary_program}: {problem}")
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise RefusedError(f"there is no user {user!r}: name one who may submit jobs, with --user") from None
    if account.pw_uid == 0:
        raise RefusedError("a protected job is a user's: name one who may submit jobs, with --user")
    if facts.ask_slurm(Slurm.read_partitions).get(partition) != "UP":
        raise RefusedError(f"partition {partition} is not there, or not UP")
    idle = sorted(n.name for n in facts.nodes.values() if n.is_idle and partition in n.partitions)
    if len(idle) < NODES:
        raise RefusedError(f"{len(idle)} nodes of {partition} are idle, and the canary needs {NODES}: try later")
    for node in idle:
        if problem := canary.call_program(settings.canary_program, "check", node, 0):
            raise RefusedError(f"{node} could not be brought back afterwards: {problem}")
    return settings, account, idle


def run(facts: HostFacts, partition: str, user: str, yes: bool) -> int:
    """Run the canary. Return the exit status: 0 if the job came back with the same bits and all is undone."""
    show = demo.Show()
    try:
        if not os.geteuid() and (earlier := canary.read_taken()) is not None:
            show.print_title(f"an earlier canary has left {earlier.node} taken away: it is brought back first")
            if not canary.undo(earlier, show.say):
                return 1
        settings, account, idle = prepare(facts, partition, user)
        show.say(
            f"The canary runs two small jobs of {account.pw_name} in {partition}, one after the other, each with "
            f"--exclusive on {JOB_NODES} of its {len(idle)} idle nodes. In the second, the agent and slurmd of one "
            "node are stopped, and the node is set DOWN. The node is brought back in any case."
        )
        if not yes and input("Go on? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
        directory = Path(account.pw_dir) / f"gemini-canary-{secrets.token_hex(4)}"
        site = SiteJobs(facts, account, directory)
        _run_jobs(site, partition, settings.canary_program, show)
        site.run_as_user(["/bin/rm", "-r", "--", str(directory)])
        show.print_title("done: the job lost a node and nothing else")
        return 0
    except (RefusedError, Unavailable, SlurmError, demo.DemoFailed, EOFError) as exc:
        show.say(f"gemini-hpc doctor: canary: {str(exc) or 'no answer to the question'}")
        return 1


def _run_jobs(site: SiteJobs, partition: str, program: str, show: demo.Show) -> None:
    show.print_title(f"the reference: {STEPS} iterations without replicas or disturbance")
    reference = site.submit("reference", partition, [], [])
    try:
        demo.wait_until(reference, show, "reference run", lambda: reference.state == "COMPLETED", START_S + END_S)
        show.print_title("the canary: the same job with --gemini-replicas=2")
        run = site.submit("canary", partition, ["--gemini-replicas=2"], ["--iteration-s", str(ITERATION_S)])
    finally:
        _cancel_job(reference)
    try:
        demo.wait_until(run, show, "training", lambda: run.read_step() >= TAKEN_AT, START_S)
        victim = site.list_nodes(run.id)[-1]
        taken = canary.Taken(victim, run.id, program, clock.time())
        guard = canary.Guard(taken)
        undone = False
        try:
            _stop_node(site, run, taken, show)
            demo.wait_until(run, show, f"{victim} is gone", lambda: demo.has_recovered(run, 1), BACK_S)
            show.print_title("training goes on")
            demo.wait_until(run, show, "training", lambda: run.state == "COMPLETED", END_S)
            document = _inspect_job(run)
        finally:
            show.print_title("bringing the node back")
            undone = guard.undo()
        _show_timeline(reference, run, document, show)
        if not undone:
            raise demo.DemoFailed(f"{victim} is not back")
    finally:
        _cancel_job(run)


def _stop_node(site: SiteJobs, run: demo.TrainingRun, taken: canary.Taken, show: demo.Show) -> None:
    run.cut_at.append(clock.time())
    if problem := canary.call_program(taken.program, "stop", taken.node, taken.job):
        raise demo.DemoFailed(problem)
    show.print_title(f"*** agent and slurmd of {taken.node} stopped, in iteration {run.read_step() + 1} ***")
    end = clock.monotonic() + NOTICED_S
    while clock.monotonic() < end:
        if any(e["name"] == "detected" and e["host"] == taken.node for e in _inspect_job(run)["events"]):
            break
        clock.sleep(0.5)
    node = site.facts.ask_slurm(Slurm.read_nodes)[taken.node]
    if not node.is_down:
        site.facts.ask_slurm(lambda slurm: slurm.set_node_down(taken.node, taken.reason))
        show.print_title(f"{taken.node} set DOWN, as Slurm does it after SlurmdTimeout")


def _inspect_job(run: demo.TrainingRun) -> dict[str, Any]:
    argv = [sys.executable, "-I", "-m", "gemini_hpc.cli.main", "inspect", str(run.id), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60.0, check=False)
    if done.returncode:
        raise demo.DemoFailed(f"inspect {run.id}: {done.stderr.strip()[:300]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _show_timeline(
    reference: demo.TrainingRun, run: demo.TrainingRun, document: dict[str, Any], show: demo.Show
) -> None:
    story = demo.build_timeline(document, run.cut_at[0], 1, run.list_steps(1)[0]["time"])
    show.say("Timeline (seconds after the node was taken away):")
    demo.show_rows(story.rows, show)
    show.say(f"  completed iterations repeated: {demo.count_repeated(run, 1)}")
    compared, trouble = demo.compare_runs(reference, run)
    if trouble:
        raise demo.DemoFailed("; ".join(trouble[:5]))
    show.say(demo.IDENTICAL.format(compared))


def _cancel_job(run: demo.TrainingRun) -> None:
    subprocess.run([find_tool("scancel"), str(run.id)], capture_output=True, timeout=60.0, check=False)
