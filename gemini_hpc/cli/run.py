"""The verb `run`: restart the training step in the same allocation if it fails on healthy nodes."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from gemini_hpc import clock, lines
from gemini_hpc.cli import frame, sendback
from gemini_hpc.cli.amounts import build_count_parser
from gemini_hpc.client.agent_connection import ask_verdict
from gemini_hpc.client.joining import RESTARTS_ENV, TRY_AGAIN_EXIT, UNPROTECTED_ENV
from gemini_hpc.client.restart_limit import Reached, RestartLimit
from gemini_hpc.config import ConfigError, load_site_settings
from gemini_hpc.core.attempts import NOTHING
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.launch.signals import SENT, SIGNAL_EFFECT_S, explains_status
from gemini_hpc.node.ask_agent import SOCKET_NAME
from gemini_hpc.wire.local import StepEnd

VERDICT_WAIT_S = 20.0  # agents prove a death, or doubt it no longer, within seconds
HEALTHY_FOR_S = 2.0  # agents suspect a silent node within this time
# Before they report to srun, the survivors' slurmstepds check for left-over processes once a second. A
# slurmstepd that no longer finds its srun retries for 3 s, and the job stays COMPLETING meanwhile.
LOST_GRACE_S = 1.6
# the controller requeues within seconds of a proved death
REQUEUE_WAIT_S = 60.0
LOOK_EVERY_S = 5.0  # each look asks slurmctld
SENT_BACK_WAIT_S = 30.0  # slurmctld ends the batch script within this time, on a busy day
EXIT_NOT_REQUEUED = 75
_ENDS = f"ends with status {EXIT_NOT_REQUEUED}"
REPLICAS_MAX = 32
OWN_LOOK_S = 1.0  # a look asks the agent of this node
OWN_LOST_S = 10.0  # ranks end by themselves sooner where the loss closes their connections


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "run",
        run,
        "gemini-hpc run -- srun python train.py",
        "gemini-hpc run --max-restarts 5 -- srun torchrun train.py",
        "gemini-hpc run --own-agents --replicas 2 -- srun python train.py",
        help="run a job step; restart it in the same allocation if it fails on healthy nodes",
        description="Run COMMAND (usually srun ...) in a batch script. If it fails while all nodes of the job are "
        "healthy, start it again at once: every rank resumes from the replicas in memory. Restart only once if "
        "no newer version was sealed in between, or if it fails at the same place again. If a node is dead, wait "
        "60 s for Slurm to requeue the job, then request it. Requeue a restarted job that lacks an agent and would "
        "lose saved steps, once. A command that a signal has ended is not repeated.",
        epilog="Exit status: that of the last COMMAND; 75 for a dead node and no requeue in time.",
    )
    parser.add_argument(
        "--max-restarts",
        type=build_count_parser(0, 1000),
        default=3,
        metavar="N",
        help="repeat at most N times; the count starts again with each newer sealed version (default 3)",
    )
    parser.add_argument(
        "--own-agents",
        action="store_true",
        help="start agents for this job, on a cluster where nobody has installed gemini-hpc",
    )
    parser.add_argument(
        "--replicas",
        type=build_count_parser(1, REPLICAS_MAX),
        metavar="R",
        help="with --own-agents: nodes that hold each shard (default 2)",
    )
    parser.add_argument(
        "--spares",
        type=build_count_parser(0, 1000),
        metavar="N",
        help="with --own-agents: nodes that wait to replace a lost one (default 0; needs sbatch --no-kill and the "
        "launcher)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="e.g. srun python t.py")


def _await_healthy_nodes(path: str, ended: threading.Event, *, own: bool = False) -> bool:
    """Wait until no node has been dead or suspect for a while; return whether that was reached.

    The result is False if Slurm requeues the job (`ended`), or does not requeue it in time. With its own agents the
    job is requeued here, since no controller does it.
    """
    began = looked = clock.monotonic()
    healthy_since: float | None = None
    waits = dead = False
    while clock.monotonic() - began < REQUEUE_WAIT_S and not ended.is_set():
        verdict = ask_verdict(path)
        if verdict is None:
            return True
        dead = bool(verdict.dead)
        if dead and own and not verdict.spared:
            _send_back(f"this job has lost {', '.join(verdict.dead)[:200]}, and no spare is left", ended)
            return False
        if dead and clock.monotonic() - looked > LOOK_EVERY_S:
            looked = clock.monotonic()
            if sendback.list_nodes_left():
                _send_back("Slurm lets this job run on without its lost node (--no-kill)", ended)
                return False
        if verdict.dead or verdict.suspect:
            healthy_since = None
            if not waits and (verdict.dead or clock.monotonic() - began > VERDICT_WAIT_S):
                waits = True
                found = f"{', '.join(verdict.dead or verdict.suspect)[:200]} {'dead' if verdict.dead else 'silent'}"
                _say(f"{found}: waiting up to {REQUEUE_WAIT_S:g} s for Slurm to requeue the job")
        else:
            healthy_since = healthy_since or clock.monotonic()
            if clock.monotonic() - healthy_since >= HEALTHY_FOR_S:
                return True
        ended.wait(0.1)
    if dead and not ended.is_set():
        _send_back(f"Slurm has not requeued this job within {REQUEUE_WAIT_S:g} s", ended)
    return False


def _send_back(why: str, ended: threading.Event, otherwise: str = _ENDS) -> bool:
    """Requeue the job, and wait for Slurm to end it. Return whether Slurm requeues it; if not, say `otherwise`."""
    _say(f"{why}: requeuing it")  # printed first, because Slurm's requeue ends this process
    if problem := sendback.requeue_job():
        _say(f"Slurm does not requeue this job, so it {otherwise}: {problem}")
        return False
    ended.wait(SENT_BACK_WAIT_S)
    return True


def _find_lost_state() -> str:
    """Return what this start would lose although agents hold it; "" if nothing, or if another start may not help.

    A requeued job begins unprotected, from step 0, if the agent of one node is missing. Slurm runs all prologs once
    more after a requeue. A second start in a row without all agents is left alone.
    """
    if not os.environ.get(UNPROTECTED_ENV) or not parse_number(os.environ.get("SLURM_RESTART_COUNT", "")):
        return ""
    try:
        run_dir = load_site_settings().run_dir
    except ConfigError:
        return ""
    verdict = ask_verdict(f"{run_dir}/{os.environ.get('SLURM_JOB_ID', '')}/{SOCKET_NAME}")
    if verdict is None or verdict.unmapped != 1 or not verdict.sealed[1]:
        return ""
    return f"{os.environ[UNPROTECTED_ENV].partition('; ')[0]}; step {verdict.sealed[1]} would be lost"


def _say(text: str) -> None:
    lines.write_line(f"run: {text}")


def _fit_tasks(environ: MutableMapping[str, str]) -> None:
    """Reduce the number of tasks to those that fit on the job's nodes, by `--ntasks-per-node`.

    Slurm gives a job that continues with fewer nodes (`scontrol update`) the number of tasks of its
    submission.
    """
    names = ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE")
    tasks, nodes, most = (parse_number(environ.get(name, "")) for name in names)
    if tasks > nodes * most > 0:
        _say(f"the job now has {nodes} nodes: the step starts {nodes * most} tasks instead of {tasks}")
        environ["SLURM_NTASKS"] = environ["SLURM_NPROCS"] = str(nodes * most)


def _fit_nodes(environ: MutableMapping[str, str]) -> None:
    """Fit the next step to the nodes that a job with spares still has.

    srun refuses the number of nodes that the job had before.
    """
    left = sendback.list_nodes_left()
    if not left:
        return
    names, had = ",".join(left), int(os.environ["SLURM_JOB_NUM_NODES"])
    environ["SLURM_JOB_NODELIST"] = environ["SLURM_NODELIST"] = names
    environ["SLURM_JOB_NUM_NODES"] = environ["SLURM_NNODES"] = str(len(left))
    if tasks := parse_number(os.environ.get("SLURM_NTASKS", "")):
        environ["SLURM_NTASKS"] = environ["SLURM_NPROCS"] = str(tasks * len(left) // had)
    environ.pop("SLURM_TASKS_PER_NODE", None)
    _say(f"the job has {len(left)} of its {had} nodes left: its next step runs on those")


def run(args: argparse.Namespace) -> int:
    """Run the command, with restarts, and return the exit status."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        _say("wanted a command after --, found none; example: gemini-hpc run -- srun python train.py")
        return 2
    if not args.own_agents:
        if args.replicas is not None or args.spares is not None:
            _say("--replicas and --spares are for --own-agents; otherwise give sbatch --gemini-replicas")
            return 2
        return _run_command(command, args.max_restarts, own=False)
    from gemini_hpc.cli.own_agents import OwnAgents, OwnAgentsError

    status = 1
    try:
        agents = OwnAgents(args.replicas or 2, args.spares or 0, os.environ)
        try:
            agents.start(os.environ)
            if args.spares and "gemini_hpc.launch" not in " ".join(command):
                _say("--spares has no effect without the launcher: use srun python -m gemini_hpc.launch train.py")
            status = _run_command(command, args.max_restarts, own=True)
        finally:
            agents.end(status)
    except OwnAgentsError as exc:
        _say(f"{exc}")
    return status


def _run_command(command: list[str], max_restarts: int, *, own: bool) -> int:
    _fit_tasks(os.environ)
    path = os.environ.get("GEMINI_SOCKET", "")
    ended = threading.Event()
    if not path and (lost := _find_lost_state()) and _send_back(lost, ended, "begins anew"):
        return EXIT_NOT_REQUEUED
    env = {**os.environ, **({RESTARTS_ENV: f"run-{os.urandom(8).hex()}"} if max_restarts else {})}
    attempts = RestartLimit(max_restarts)
    before: _Failure | None = None
    while True:
        attempts.record_start(_ask_progress(path))
        known = _ask_last_end(path)
        try:
            step = _Step(command, env, path, ended, own=own)
        except OSError as exc:
            _say(f"cannot start {command[0]!r}: {exc.strerror}")
            return 127
        status = step.wait()
        if status in (0, 130) or ended.is_set():
            return status
        if not path:
            why_not = "no agent protects this job (sbatch --gemini-replicas=N)"
            _say(f"the step ended with status {status}; not restarted: {why_not}")
            return status
        reached = _ask_progress(path)
        healthy = _await_healthy_nodes(path, ended, own=own)
        if ended.is_set():
            return status
        if not healthy:
            return EXIT_NOT_REQUEUED
        if sent := step.find_ending_signal(status):
            _say(f"{sent.name} ended the step: not restarted")
            return status
        message = f"the step ended with status {status}"
        last = _ask_last_end(path)
        last = last if last != known else None  # otherwise it belongs to an earlier step
        if last is not None and last.given_up:  # attempts of the step's own launchers count here, too
            _say(f"{message}; not restarted: {last.given_up}")
            return status
        end = last.end if last is not None else NOTHING
        message += f" ({end.text})" * bool(end.text)
        now = _Failure(status, end.key, reached.step if reached is not None else None)
        why_not = attempts.judge_failure(reached, again=now.repeats(before), memory=end.memory)
        before = now
        if why_not:
            _say(f"{message}; not restarted: {why_not}")
            return status
        _say(f"{message} on healthy nodes: restart {attempts.restarts} of {max_restarts}")
        _fit_nodes(env)


def _ask_progress(path: str) -> Reached | None:
    verdict = ask_verdict(path) if path else None
    return None if verdict is None else Reached(verdict.sealed, verdict.begun)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failed step.

    Attributes:
        status: The exit status.
        key: Identifies the cause, "" if no cause was reported.
        step: The step of the training, None if unknown.
    """

    status: int
    key: str
    step: int | None

    def repeats(self, before: _Failure | None) -> bool:
        """Return whether this failure equals the previous one."""
        if before is None or self.step is None or self.step != before.step or self.status == TRY_AGAIN_EXIT:
            return False
        return self.key == before.key if self.key and before.key else self.status == before.status


def _ask_last_end(path: str) -> StepEnd | None:
    """Return the agent's knowledge of the end of the newest step."""
    verdict = ask_verdict(path) if path else None
    return verdict.last if verdict is not None else None


class _Step:
    """The running command, with forwarding of signals.

    Signals for the batch script are passed on to the command, except those that are ignored (`nohup`). A
    SIGTERM together with a dead node means that the job is being requeued. The command is then ended at once.
    An srun that waits for the dead node would hold up the job's start elsewhere. When that srun gives up, it
    would kill the step of the same id there.
    """

    def __init__(
        self, command: list[str], env: Mapping[str, str], socket_path: str, ended: threading.Event, *, own: bool
    ) -> None:
        self._socket_path, self._ended, self._own = socket_path, ended, own
        self._looked = self._well = clock.monotonic()
        self._passed_on: tuple[signal.Signals, float] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        # Set before there is a child: otherwise an early signal would end this process and leave the child
        # alone.
        for number in (*SENT, signal.SIGCONT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._forward_signal)
        self._child = subprocess.Popen(command, env=env)
        for early in self._early:
            self._child.send_signal(early)

    def _forward_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            self._ended.set()
        if number in SENT:
            self._passed_on = (signal.Signals(number), clock.monotonic())
        if self._child is None:
            self._early.append(number)
        elif self._child.poll() is None:
            self._child.send_signal(number)

    def find_ending_signal(self, status: int) -> signal.Signals | None:
        """Return the signal with which a person ended the step, None if there is none.

        The signal was sent to the step's ranks (`scancel --signal`), or passed on. SIGTERM counts only if it
        was passed on, because with --kill-on-bad-exit srun itself sends it to all other ranks.
        """
        sent: signal.Signals | None = next(
            (number for number in SENT if status == 128 + number and number != signal.SIGTERM), None
        )
        passed_on, at = self._passed_on or (None, 0.0)
        if sent is None and passed_on is not None and clock.monotonic() - at < SIGNAL_EFFECT_S:
            sent = passed_on if explains_status(passed_on, status) else None
        return sent

    def wait(self) -> int:
        """Wait for the command; return its exit status, 128 + n for signal n."""
        assert self._child is not None
        while True:
            try:
                code = self._child.wait(0.1)
            except subprocess.TimeoutExpired:
                gone = self._own and self._lacks_node()
                if not gone and not (self._ended.is_set() and self._has_dead_node()):
                    continue
                if gone:  # otherwise Slurm has told srun to end
                    self._child.terminate()
                code = self._end_child(self._child)
            return code if code >= 0 else 128 - code

    def _end_child(self, child: subprocess.Popen[bytes]) -> int:
        try:
            return child.wait(LOST_GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()

    def _lacks_node(self) -> bool:
        """Return whether a node has been lost for a while and nobody replaces it.

        Without a controller nobody ends the step, in which the other ranks may wait for the lost node for long.
        """
        now = clock.monotonic()
        if now - self._looked < OWN_LOOK_S:
            return False
        self._looked = now
        verdict = ask_verdict(self._socket_path, 0.5)
        if verdict is None or not verdict.dead or verdict.spared:
            self._well = now
        if now - self._well < OWN_LOST_S:
            return False
        _say(
            f"{', '.join(verdict.dead)[:200] if verdict else 'a node'} lost: ending the step, which would wait for it"
        )
        return True

    def _has_dead_node(self) -> bool:
        verdict = ask_verdict(self._socket_path, 0.5) if self._socket_path else None
        return verdict is not None and bool(verdict.dead)
