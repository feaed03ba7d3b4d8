"""`gemini-hpc run` outside of Slurm: what it hands to its command, and when it starts it again."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from gemini_hpc.cli import run as verb
from gemini_hpc.cli import sendback
from gemini_hpc.core.attempts import End
from gemini_hpc.launch.signals import SENT
from gemini_hpc.slurm import SlurmRefused
from gemini_hpc.wire import local

Attempt = Callable[..., tuple[int, int, str]]


def main(*words: str) -> int:
    """Run the verb in this process."""
    parser = argparse.ArgumentParser()
    verb.register(parser.add_subparsers())
    return verb.run(parser.parse_args(["run", *words]))


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No job's environment, no pause before an attempt, and afterwards the signals as they were."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "GEMINI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(verb, "HEALTHY_FOR_S", 0.0)
    before = {number: signal.getsignal(number) for number in (*SENT, signal.SIGCONT)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_job_with_fewer_nodes_than_it_was_submitted_with_has_fewer_tasks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE")
    for tasks, nodes, most, wanted in (
        ("3", "2", "1", "2"),  # one node less
        ("16", "3", "4", "12"),
        ("5", "3", "2", None),  # there is room: as the user has it
        ("3", "4", "1", None),
        ("3", "2", "", None),
        ("3", "two", "1", None),
        ("3", "2", "9" * 30, None),
        ("3", "0", "1", None),
    ):
        given = dict(zip(names, (tasks, nodes, most), strict=True))
        environ = dict(given)
        verb._fit_tasks(environ)
        fewer = {} if wanted is None else {"SLURM_NTASKS": wanted, "SLURM_NPROCS": wanted}
        assert environ == given | fewer, given
        assert bool(capsys.readouterr().err) == bool(fewer), given
    nothing: dict[str, str] = {}
    verb._fit_tasks(nothing)
    assert nothing == {}


def test_a_step_fits_the_nodes_that_a_job_with_spares_goes_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun refuses more nodes and tasks than Slurm has left to the job."""
    before = {"SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8"}
    before |= {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "2(x4)"}
    for name, text in before.items():
        monkeypatch.setenv(name, text)
    for left in ((), ("n1", "n3", "n4"), ("n1", "n4")):
        monkeypatch.setattr(sendback, "list_nodes_left", lambda left=left: left)
        environ = dict(before)
        for _ in range(2):  # before each further step
            verb._fit_nodes(environ)
        count, names = str(len(left)), ",".join(left)
        fewer = {"SLURM_JOB_NUM_NODES": count, "SLURM_NNODES": count, "SLURM_NTASKS": str(2 * len(left))}
        fewer |= {"SLURM_NPROCS": str(2 * len(left)), "SLURM_JOB_NODELIST": names, "SLURM_NODELIST": names}
        assert environ == (fewer if left else before)


def test_the_command_has_the_tasks_that_fit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "3")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    assert main("--", "sh", "-c", "echo $SLURM_NTASKS $SLURM_NPROCS") == 0
    assert capfd.readouterr().out == "2 2\n"


def test_its_exit_status_is_the_commands() -> None:
    assert main("--", "kill-me-not-there") == 127
    assert main() == main("--") == 2
    argv = [sys.executable, "-m", "gemini_hpc.cli.main", "run", "--", "sh", "-c", "exit 7"]
    assert subprocess.run(argv, timeout=60, check=False).returncode == 7


# ---- with an agent that tells what has been sealed -------------------------------------------------------

# The step: notes that it was tried, tells the agent "sealed begun" of its line, and ends with the line's status.
STEP = """
tries=$(ls "$1" | wc -l)
: >"$1/$tries"
line=$(sed -n "$((tries + 1))p" "$2")
[ -n "$line" ] || line=$(tail -n 1 "$2")
state=$3
set -- $line
echo "$1 $2" >"$state.new"
mv "$state.new" "$state"
case $3 in
usr1) trap 'kill -KILL $$' USR1; kill -USR1 $PPID; while :; do sleep 0.05; done ;;
-*) kill "$3" $$ ;;
*) exit "$3" ;;
esac
"""


class Told:
    """Stands where the agent does, and tells of versions what the step has written into a file."""

    def __init__(self, directory: Path) -> None:
        self.last: Callable[[int], local.StepEnd | None] = lambda begun: None  # what is known of a step's end then
        self.path, self.state = str(directory / "agent.sock"), directory / "state"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.bind(self.path)
        self._sock.listen(8)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._sock.accept()
            except OSError:
                return
            with peer:
                while peer.recv(65536):
                    sealed, begun = (0, 0), 0
                    if self.state.exists():
                        first, second = self.state.read_text().split()
                        sealed, begun = (int(first != "0"), int(first)), int(second)
                    last = self.last(begun)
                    verdict = local.Verdict(alive=("a", "b"), sealed=sealed, begun=begun, last=last)
                    peer.send(local.encode(verdict))

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Told]:
    told = Told(tmp_path)
    yield told
    told.close()


@pytest.fixture
def attempt(
    agent: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Attempt:
    """Runs a step whose attempts go as told, each "sealed begun status": exit status, attempts, what was said."""
    monkeypatch.setenv("GEMINI_SOCKET", agent.path)
    tries, said = tmp_path / "tries", tmp_path / "said"

    def attempts(*lines: str) -> tuple[int, int, str]:
        shutil.rmtree(tries, ignore_errors=True)
        tries.mkdir()
        agent.state.unlink(missing_ok=True)
        said.write_text("".join(f"{line}\n" for line in lines))
        status = main("--", "sh", "-c", STEP, "step", str(tries), str(said), str(agent.state))
        return status, len(list(tries.iterdir())), capfd.readouterr().err

    return attempts


def test_without_a_sealed_version_a_step_is_started_again_once_only(attempt: Attempt) -> None:
    status, tries, said = attempt("0 0 1")
    assert (status, tries) == (1, 2), said
    assert "not restarted: it fails before its first step is saved each time" in said


def test_the_count_begins_again_with_progress(attempt: Attempt) -> None:
    status, tries, said = attempt("5 5 1", "9 9 1", "12 13 1", "20 20 1", "30 31 1", "30 31 0")
    assert (status, tries) == (0, 6), said
    assert said.count("restart 1 of 3") == 5, said


def test_a_step_that_comes_to_the_same_end_is_given_up(attempt: Attempt) -> None:
    status, tries, said = attempt("7 7 3")
    assert (status, tries) == (3, 2), said
    assert "status 3; not restarted: it fails at step 8 each time" in said


def test_another_end_at_the_same_step_is_no_pattern(attempt: Attempt) -> None:
    status, tries, said = attempt("7 7 3", "7 7 4", "7 7 5")
    assert (status, tries) == (5, 3) and "each time" not in said, said
    assert "no newer version was sealed" in said


def test_a_step_that_wants_another_try_has_no_pattern(attempt: Attempt) -> None:
    """Each time it loads something else."""
    status, tries, said = attempt("7 7 75", "7 7 75", "7 7 0")
    assert (status, tries) == (0, 3), said


def test_what_launchers_have_given_up_is_not_started_again(agent: Told, attempt: Attempt) -> None:
    """They have tried it twice: the step would fail in the same way."""
    why = "rank 1 ended with status 1 (ValueError at t.py:3); it fails at step 8 each time"
    told = local.StepEnd("7.0", given_up=why)
    agent.last = lambda begun: told if begun else None
    status, tries, said = attempt("7 7 1")
    assert (status, tries) == (1, 1) and f"status 1; not restarted: {why}" in said, said
    agent.last = lambda begun: told
    status, tries, said = attempt("8 8 9", "9 9 0")
    assert (status, tries) == (0, 2), f"that was another step\n{said}"


def test_a_step_that_has_leaked_is_not_started_without_end(agent: Told, attempt: Attempt) -> None:
    """It seals newer versions each time."""
    end = End("rank 1 was ended: out of memory", memory=True)
    agent.last = lambda begun: local.StepEnd(f"7.{begun}", end) if begun else None
    status, tries, said = attempt(*(f"{n} {n} 137" for n in range(5, 50, 5)))
    assert (status, tries) == (137, 4), said
    for number in (1, 2, 3):
        assert f"(rank 1 was ended: out of memory) on healthy nodes: restart {number} of 3" in said, said
    assert "not restarted: --max-restarts=3 is reached" in said, said


def test_a_signal_that_somebody_has_sent_to_the_ranks_is_no_failure(attempt: Attempt) -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        status, tries, said = attempt(f"7 7 {-number}")
        assert (status, tries) == (128 + number, 1), said
        assert number.name in said


def test_a_fault_is_a_failure(attempt: Attempt) -> None:
    """SIGTERM too: srun ends the other ranks with it where one has failed."""
    for number in (signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM):
        status, tries, said = attempt(f"7 7 {-number}", "9 9 0")
        assert (status, tries) == (0, 2), said


def test_a_step_that_outlives_a_signal_and_is_killed_then_has_failed(attempt: Attempt) -> None:
    """It was asked for something else than its end."""
    status, tries, said = attempt("7 7 usr1", "9 9 0")
    assert (status, tries) == (0, 2), said


def test_a_signal_that_was_passed_on_ends_the_step_whatever_its_status(agent: Told) -> None:
    """A handler that saves and leaves with a status of its own."""
    pipe = subprocess.PIPE
    for name in ("USR1", "TERM"):
        step = f"trap 'exit 9' {name}; echo ready; while :; do sleep 0.05; done"
        argv = [sys.executable, "-m", "gemini_hpc.cli.main", "run", "--", "sh", "-c", step]
        env = os.environ | {"GEMINI_SOCKET": agent.path}
        with subprocess.Popen(argv, env=env, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                assert process.stdout is not None and process.stdout.readline() == "ready\n", name
                process.send_signal(signal.Signals[f"SIG{name}"])
                _, said = process.communicate(timeout=120)
            finally:
                process.kill()
        assert process.returncode == 9 and "restart 1" not in said, said


def test_a_signal_that_comes_while_the_step_is_started_goes_on_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it ended the batch script, and left the step alone."""
    started = subprocess.Popen
    before = list[int]()

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        child = started(*arguments, **options)
        os.kill(os.getpid(), signal.SIGUSR1)
        return child

    signal.signal(signal.SIGUSR1, lambda number, _: before.append(number))
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    assert main("--", "sleep", "20") == 128 + signal.SIGUSR1 and before == []


def test_a_signal_that_is_ignored_is_not_passed_on() -> None:
    """As with nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert main("--", "sh", "-c", "kill -HUP $PPID; kill -HUP $$; exit 5") == 5
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


class Asked:
    """Stands for Slurm's client: what it is asked, and its answer."""

    requeued: ClassVar[list[str]] = []
    refuses = False

    def __init__(self, timeout_s: float) -> None:
        pass

    async def read_job(self, raw_id: int) -> SimpleNamespace:
        return SimpleNamespace(id=f"40_{raw_id}")

    async def requeue_job(self, job: SimpleNamespace) -> None:
        if self.refuses:
            raise SlurmRefused("not now")
        self.requeued.append(job.id)


def test_where_nobody_requeues_the_job_it_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array's task by its own id: by the raw one, its last task would be all of the array. What it does it says
    before, for Slurm may end it at once."""
    happened: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setattr(sendback, "Slurm", Asked)
    monkeypatch.setattr(Asked, "requeued", happened)
    monkeypatch.setattr(verb, "_say", happened.append)
    for name, value in (("REQUEUE_WAIT_S", 0.3), ("SENT_BACK_WAIT_S", 0.1)):
        monkeypatch.setattr(verb, name, value)
    monkeypatch.setattr(verb, "ask_verdict", lambda _: local.Verdict(dead=("b",), alive=("a",)))
    for refuses, last in (
        (False, "40_42"),
        (True, "Slurm does not requeue this job, so it ends with status 75: not now"),
    ):
        monkeypatch.setattr(Asked, "refuses", refuses)
        assert not verb._await_healthy_nodes("", threading.Event()), last
        assert happened[-2:] == ["Slurm has not requeued this job within 0.3 s: requeuing it", last]


@pytest.mark.parametrize(
    ("unmapped", "sealed", "restart", "refuses", "starts"),
    [
        (1, 17, "1", False, False),  # sent back: the next start has all agents
        (1, 17, "1", True, True),  # nobody is served by a job that does not run
        (2, 17, "2", False, True),  # it was sent back before
        (1, 0, "1", False, True),  # nothing is lost
        (1, 17, "", False, True),  # the first start of the job: another job's state, or none
        (0, 17, "1", False, True),
    ],
)
def test_a_start_that_loses_what_agents_hold_is_sent_back_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    unmapped: int,
    sealed: int,
    restart: str,
    refuses: bool,
    starts: bool,
) -> None:
    happened: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    monkeypatch.setenv("GEMINI_UNPROTECTED", "no agent answers on n2; scontrol requeue 42 lets the job resume")
    monkeypatch.setattr(sendback, "Slurm", Asked)
    monkeypatch.setattr(Asked, "requeued", happened)
    monkeypatch.setattr(Asked, "refuses", refuses)
    monkeypatch.setattr(verb, "SENT_BACK_WAIT_S", 0.1)
    asked: list[str] = []

    def answer(path: str) -> local.Verdict:
        asked.append(path)
        return local.Verdict(sealed=(65, sealed), unmapped=unmapped)

    monkeypatch.setattr(verb, "ask_verdict", answer)
    status = main("--", "touch", str(tmp_path / "started"))
    said = capfd.readouterr().err
    assert (tmp_path / "started").exists() is starts, said
    assert (status, happened) == ((0, []) if starts else (75, ["40_42"]))
    told = "no agent answers on n2; step 17 would be lost: requeuing it"
    assert (told in said) is (refuses or not starts), said
    assert ("so it begins anew: not now" in said) is refuses, said
    assert set(asked) <= {"/run/gemini-hpc/42/agent.sock"}
