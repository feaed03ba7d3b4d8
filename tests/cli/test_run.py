"""`gemini-hpc run` outside of Slurm: what it hands to its command, and when it starts it again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from gemini_hpc.cli import run as verb
from gemini_hpc.cli import sendback
from gemini_hpc.slurm import SlurmError
from gemini_hpc.wire import local

pytestmark = pytest.mark.slow

Attempt = Callable[..., tuple[int, int, str]]
SHOW = "echo ${SLURM_NTASKS-none} ${SLURM_NPROCS-none}"


def run(*command: str, **slurm: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "GEMINI_"))} | slurm
    argv = [sys.executable, "-m", "gemini_hpc.cli.main", "run", "--", *command]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("tasks", "nodes", "most", "wanted"),
    [
        ("3", "2", "1", "2 2"),  # one node less
        ("16", "3", "4", "12 12"),
        ("5", "3", "2", "5 none"),  # there is room: as the user has it
        ("3", "4", "1", "3 none"),
        ("3", "2", "", "3 none"),
        ("3", "two", "1", "3 none"),
        ("3", "2", "9" * 30, "3 none"),
        ("3", "0", "1", "3 none"),
    ],
)
def test_a_job_with_fewer_nodes_than_it_was_submitted_with_has_fewer_tasks(
    tasks: str, nodes: str, most: str, wanted: str
) -> None:
    done = run("sh", "-c", SHOW, SLURM_NTASKS=tasks, SLURM_JOB_NUM_NODES=nodes, SLURM_NTASKS_PER_NODE=most)
    assert (done.returncode, done.stdout.strip()) == (0, wanted)
    assert ("job now has" in done.stderr) == (wanted.split()[1] != "none")


def test_outside_of_slurm_nothing_is_set() -> None:
    assert run("sh", "-c", SHOW).stdout.strip() == "none none"


def test_its_exit_status_is_the_commands() -> None:
    assert run("sh", "-c", "exit 7").returncode == 7
    assert run("kill-me-not-there").returncode == 127
    assert run().returncode == 2


# ---- with an agent that tells what has been sealed -------------------------------------------------------

JOB = """
import os, signal, sys
tries = len(os.listdir(sys.argv[1]))
open(os.path.join(sys.argv[1], str(tries)), "w").close()
with open(sys.argv[2]) as f:
    said = f.read().splitlines()
sealed, begun, status = said[min(tries, len(said) - 1)].split()
with open(sys.argv[3] + ".new", "w") as f:
    f.write(f"{sealed} {begun}")
os.rename(sys.argv[3] + ".new", sys.argv[3])
if int(status) < 0:
    if -int(status) != signal.SIGKILL:
        signal.signal(-int(status), signal.SIG_DFL)  # nohup ignores one of them
    os.kill(os.getpid(), -int(status))
sys.exit(int(status))
"""


class Told:
    """Stands where the agent does, and tells of versions what the step has written into a file."""

    def __init__(self, directory: Path) -> None:
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
                    peer.send(local.encode(local.Verdict(alive=("a", "b"), sealed=sealed, begun=begun)))

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    """Runs a step whose attempts go as told, each "sealed begun status": exit status, attempts, what was said."""
    agent = Told(tmp_path)
    (tmp_path / "tries").mkdir()

    def attempts(*said: str) -> tuple[int, int, str]:
        (tmp_path / "said").write_text("\n".join(said))
        places = [str(tmp_path / name) for name in ("tries", "said", "state")]
        done = run(sys.executable, "-c", JOB, *places, GEMINI_SOCKET=agent.path)
        return done.returncode, len(list((tmp_path / "tries").iterdir())), done.stderr

    yield attempts
    agent.close()


def test_without_a_sealed_version_a_step_is_started_again_once_only(attempt: Attempt) -> None:
    status, tries, said = attempt("0 0 1")
    assert (status, tries) == (1, 2), said
    assert "no newer version was sealed" in said
    assert "fails before its first step is saved each time" in said


def test_the_count_begins_again_with_progress(attempt: Attempt) -> None:
    status, tries, said = attempt("5 5 1", "9 9 1", "12 13 1", "20 20 1", "30 31 1", "30 31 0")
    assert (status, tries) == (0, 6), said
    assert said.count("restart 1 of 3") == 5, said


def test_a_step_that_comes_to_the_same_end_is_told_so_and_given_up(attempt: Attempt) -> None:
    status, tries, said = attempt("7 7 3")
    assert (status, tries) == (3, 3), said
    assert said.count("status 3 (fails at step 8 each time)") == 2, said


def test_another_end_at_the_same_step_is_no_pattern(attempt: Attempt) -> None:
    status, _, said = attempt("7 7 3", "7 7 4", "7 7 5")
    assert status == 5 and "each time" not in said, said


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_that_somebody_has_sent_to_the_ranks_is_no_failure(attempt: Attempt, number: int) -> None:
    status, tries, said = attempt(f"7 7 {-number}")
    assert (status, tries) == (128 + number, 1), said
    assert f"somebody ended the step with {signal.Signals(number).name}" in said


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM])
def test_a_fault_is_a_failure(attempt: Attempt, number: int) -> None:
    """SIGTERM too: srun ends the other ranks with it where one has failed."""
    status, tries, said = attempt(f"7 7 {-number}", "9 9 0")
    assert (status, tries) == (0, 2), said


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_that_was_passed_on_ends_the_step_whatever_its_status(tmp_path: Path, number: int) -> None:
    """A handler that saves and leaves with a status of its own."""
    agent = Told(tmp_path)
    step = f"import signal, sys, time; signal.signal({number:d}, lambda *_: sys.exit(9)); print(1, flush=True)"
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | {"GEMINI_SOCKET": agent.path}
    argv = [sys.executable, "-m", "gemini_hpc.cli.main", "run", "--", sys.executable, "-c", f"{step}\ntime.sleep(60)"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "1\n"
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
            agent.close()
    assert process.returncode == 9 and "restart 1" not in said, said


class Asked:
    """Stands for Slurm's client: what it is asked, and its answer."""

    requeued: ClassVar[list[str]] = []
    refuses = False

    def __init__(self, timeout_s: float) -> None:
        pass

    async def job(self, raw_id: int) -> SimpleNamespace:
        return SimpleNamespace(id=f"40_{raw_id}")

    async def requeue(self, job: SimpleNamespace) -> None:
        if self.refuses:
            raise SlurmError("not now")
        self.requeued.append(job.id)


@pytest.mark.parametrize("refuses", [False, True])
def test_where_nobody_requeues_the_job_it_asks_for_it(monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    """An array's task by its own id: by the raw one, its last task would be all of the array. What it does it says
    before, for Slurm may end it at once."""
    happened: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setattr(sendback, "Slurm", Asked)
    monkeypatch.setattr(Asked, "requeued", happened)
    monkeypatch.setattr(Asked, "refuses", refuses)
    monkeypatch.setattr(verb, "_say", happened.append)
    for name, value in (("REQUEUE_WAIT_S", 0.3), ("SENT_BACK_WAIT_S", 0.1)):
        monkeypatch.setattr(verb, name, value)
    monkeypatch.setattr(verb, "ask_verdict", lambda _: local.Verdict(dead=("b",), alive=("a",)))
    assert not verb._nodes_healthy("", threading.Event())
    last = "Slurm does not requeue this job: not now" if refuses else "40_42"
    assert happened[-2:] == ["nobody has requeued this job in 0.3 s: requeuing it", last]
