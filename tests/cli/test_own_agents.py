"""`gemini-hpc run --own-agents` on this machine: a program of this test takes srun's place, the agent is real."""

from __future__ import annotations

import argparse
import base64
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import until

from gemini_hpc.agent.replicas.memory import Budget, NoMemory
from gemini_hpc.cli import own_agents, sendback
from gemini_hpc.cli import run as verb
from gemini_hpc.client.agent_connection import ask_verdict
from gemini_hpc.config import build_own_settings
from gemini_hpc.launch.signals import SENT
from gemini_hpc.node import ask_agent
from gemini_hpc.wire import keyed, local, own_key

# Runs one task on this "node", and notes what srun has been given.
SRUN = """#!/bin/sh
tr '\\0' '\\n' </proc/$$/environ >"$HOME/srun"
tr '\\0' '\\n' </proc/$$/cmdline >>"$HOME/srun"
while [ "${1#-}" != "$1" ]; do shift; done
SLURMD_NODENAME=localhost exec "$@"
"""
JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "localhost", "SLURM_CLUSTER_NAME": "tiny", "SLURM_NTASKS": "5"}
JOB |= {"SLURM_MEM_PER_NODE": "600"}

Main = Callable[..., int]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an `srun`, and the environment of a job."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "GEMINI_"))]:
        monkeypatch.delenv(name)
    for name in ("GEMINI_SOCKET", "GEMINI_SPARES", own_agents.NO_KILL_ENV):  # `run` sets them in this process
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    for name, text in {**JOB, "HOME": str(tmp_path), "PATH": f"{srun.parent}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(verb, "HEALTHY_FOR_S", 0.0)
    monkeypatch.setattr(sendback, "read_start_time", lambda: 0.0)
    return tmp_path


def main(*words: str) -> int:
    """Run the verb in this process, with own agents on the one node."""
    parser = argparse.ArgumentParser()
    verb.register(parser.add_subparsers())
    return verb.run(parser.parse_args(["run", "--own-agents", *words]))


def key_file(home: Path) -> Path:
    return home / ".gemini-hpc" / "jobs" / "tiny.77"


@contextmanager
def protected(home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The verb in a process of its own, around a command that waits for its input; and the agent's directory."""
    command = ["sh", "-c", "echo $GEMINI_SOCKET; read word; exit ${word:-1}"]
    argv = [sys.executable, "-m", "gemini_hpc.cli.main", "run", "--own-agents", "--replicas", "1"]
    argv += ["--max-restarts", "0", "--", *command]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as run:
        assert run.stdout is not None
        yield run, os.path.dirname(run.stdout.readline().strip())


def pids(directory: str) -> list[int]:
    """Processes of the agent."""
    found = subprocess.run(
        ["pgrep", "-f", f"gemini_hpc.agent.*{directory}"], check=False, capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]


@pytest.mark.slow
def test_a_command_has_an_agent_and_nothing_is_left(home: Path) -> None:
    """The key is in a file of its owner alone; neither arguments nor environment of any process tell it."""
    with protected(home) as (run, directory):
        assert ask_verdict(f"{directory}/agent.sock") is not None
        key, told = key_file(home).read_bytes(), (home / "srun").read_bytes()
        for pid in (run.pid, *pids(directory)):
            told += Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        _, err = run.communicate("0\n", 60)
    assert run.returncode == 0, err
    assert "own agents on 1 node, 1 replica in up to 300 MiB a node, 50% of the job's memory" in err, err
    assert "less than where a site has installed gemini-hpc" in err, err
    assert len(key) == keyed.KEY_BYTES and told.count(b"gemini_hpc.agent") >= 4, told
    assert not any(shape in told for shape in (key, key.hex().encode(), base64.b64encode(key)))
    assert b"SLURM_NTASKS" not in (home / "srun").read_bytes(), "the training's tasks are not the agents'"
    assert not pids(directory) and not os.path.exists(directory) and not key_file(home).exists()


@pytest.mark.slow
def test_after_a_failure_the_key_stays_for_the_jobs_next_life(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It names the job on the tier. A former job's of this number does not."""
    fail = ("--replicas", "1", "--max-restarts", "0", "--", "sh", "-c", "dirname $GEMINI_SOCKET; exit 3")
    assert main(*fail) == 3
    first, mode = key_file(home).read_bytes(), key_file(home).stat().st_mode
    assert stat.S_IMODE(mode) == 0o600 and stat.S_IMODE(key_file(home).parent.stat().st_mode) == 0o700
    os.environ.pop("GEMINI_SOCKET")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(sendback, "read_start_time", lambda: time.time() + 1000)
    assert main(*fail) == 3
    assert key_file(home).read_bytes() == first
    os.environ.pop("GEMINI_SOCKET")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert main(*fail) == 3
    assert key_file(home).read_bytes() != first
    for directory in capfd.readouterr().out.split():
        assert not pids(directory) and not os.path.exists(directory)


@pytest.mark.slow
def test_an_agent_that_dies_is_started_again(home: Path) -> None:
    with protected(home) as (run, directory):
        with ask_agent.connect(directory, os.geteuid(), time.monotonic() + 20) as sock:
            os.kill(ask_agent.read_peer_pid(sock), signal.SIGKILL)
        until(lambda: ask_verdict(f"{directory}/agent.sock", 0.5) is not None, 20, what="another agent")
        run.communicate("0\n", 60)
    assert run.returncode == 0


@pytest.mark.slow
def test_signals_for_all_steps_of_a_job_leave_an_agent_alone(home: Path) -> None:
    """`sbatch --signal=USR1@60` reaches every step. SIGTERM ends an agent in order, when it has saved."""
    with protected(home) as (run, directory):
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
            for pid in pids(directory):
                os.kill(pid, number)
        time.sleep(0.3)
        assert len(pids(directory)) == 3 and ask_verdict(f"{directory}/agent.sock") is not None
        for pid in pids(directory):
            os.kill(pid, signal.SIGTERM)
        until(lambda: not pids(directory), 20, what="the agent has ended")
        assert not os.path.exists(directory)
        run.communicate("0\n", 60)
    assert run.returncode == 0


@pytest.mark.parametrize(
    ("changed", "words", "said"),
    [
        ({"SLURM_JOB_ID": ""}, (), "--own-agents needs a Slurm allocation"),
        ({"SLURM_HET_SIZE": "2"}, (), "cannot serve a heterogeneous job"),
        ({}, (), "--replicas 2 want 2 nodes, and the job has 1"),
        ({}, ("--replicas", "1", "--spares", "2"), "--replicas 1 and --spares 2 want 3 nodes, and the job has 1"),
        ({"GEMINI_SOCKET": "/dev/null"}, ("--replicas", "1"), "this job has the agents of its site"),
        pytest.param(
            {"PATH": "/nowhere"}, ("--replicas", "1"), "srun: No such file or directory", marks=pytest.mark.slow
        ),
        ({"SLURM_JOB_NODELIST": "n["}, ("--replicas", "1"), "SLURM_JOB_NODELIST: "),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    changed: dict[str, str],
    words: tuple[str, ...],
    said: str,
) -> None:
    for name, text in changed.items():
        monkeypatch.setenv(name, text)
    assert main(*words, "--", "touch", f"{home}/ran") != 0
    err = capfd.readouterr().err
    assert said in err and err.count("\n") == 1 and not (home / "ran").exists(), err


@pytest.mark.parametrize(
    ("srun", "said"),
    [
        ("exit 1", "no agent on localhost: the step of the agents did not start"),
        ("echo localhost failed key file: gone", "no agent on localhost: key file: gone"),
        ("echo localhost unmapped n2 n3; cat >/dev/null", "localhost finds none on n2 n3"),
    ],
)
def test_agents_that_do_not_start_are_told(
    home: Path, capfd: pytest.CaptureFixture[str], srun: str, said: str
) -> None:
    (home / "bin" / "srun").write_text(f"#!/bin/sh\n{srun}\n")
    assert main("--replicas", "1", "--", "touch", f"{home}/ran") == 1
    assert said in capfd.readouterr().err and not (home / "ran").exists()


def test_replicas_and_spares_are_for_own_agents(capfd: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    verb.register(parser.add_subparsers())
    assert verb.run(parser.parse_args(["run", "--replicas", "2", "--", "true"])) == 2
    assert "--replicas and --spares are for --own-agents" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("environ", "mib"),
    [
        ({"SLURM_MEM_PER_NODE": "1000"}, 500),
        ({"SLURM_MEM_PER_CPU": "100", "SLURM_JOB_CPUS_PER_NODE": "8(x2),4"}, 200),
        ({"SLURM_MEM_PER_CPU": "100", "SLURM_JOB_CPUS_PER_NODE": "4"}, 200),
    ],
)
def test_copies_take_half_of_the_jobs_memory(environ: dict[str, str], mib: int) -> None:
    assert (
        own_agents.Allocation.from_environ({**JOB, "SLURM_MEM_PER_NODE": "", **environ}).compute_share_bytes()
        == mib << 20
    )


def test_a_job_without_a_limit_has_its_part_of_the_node() -> None:
    def share(cpus: str) -> int:
        job = {**JOB, "SLURM_MEM_PER_NODE": "", "SLURM_JOB_CPUS_PER_NODE": cpus}
        return own_agents.Allocation.from_environ(job).compute_share_bytes()

    everything = share("1000")
    assert 0 < share("1") <= everything < 1 << 44


def test_a_commands_key_is_that_of_the_job(home: Path) -> None:
    """`inspect` and the others find it by the job's number, on clusters of any name."""
    assert own_key.find(77) is None
    old, new = own_key.build_path("a.b", 77), own_key.build_path("tiny", 77)
    made = [own_key.make(old), own_key.make(new)]
    os.utime(old, (1, 1))
    assert own_key.find(77) == made[1] and own_key.find(7) is None
    Path(new).chmod(0o640)
    with pytest.raises(keyed.KeyFileError, match="wanted mode 0600"):
        own_key.find(77)
    assert own_key.build_path("../x", 7).endswith("/cluster.7")
    assert keyed.derive_tier_id(made[0]) != keyed.derive_tier_id(made[1])


@pytest.mark.parametrize(
    ("verdict", "status"),
    [
        (local.Verdict(dead=("n2",), alive=("n1",)), 75),
        (local.Verdict(dead=("n2",), alive=("n1",), spared=True), 0),
        (local.Verdict(suspect=("n2",), alive=("n1",)), 0),
    ],
)
def test_a_lost_node_ends_the_step_unless_a_spare_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], verdict: local.Verdict, status: int
) -> None:
    """No controller does it: the other ranks may wait for the lost node for half an hour."""
    requeued: list[str] = []

    def requeue_job() -> str:
        requeued.append("now")
        return ""

    for name, value in (("OWN_LOOK_S", 0.05), ("OWN_LOST_S", 0.2), ("SENT_BACK_WAIT_S", 0.0)):
        monkeypatch.setattr(verb, name, value)
    monkeypatch.setattr(verb, "ask_verdict", lambda *_: verdict)
    monkeypatch.setattr(sendback, "requeue_job", requeue_job)
    monkeypatch.setenv("GEMINI_SOCKET", "/nowhere/agent.sock")
    before = {number: signal.getsignal(number) for number in (*SENT, signal.SIGCONT)}
    try:
        assert verb._run_command(["sleep", "0.7" if status == 0 else "60"], 3, own=True) == status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    err = capfd.readouterr().err
    assert requeued == ["now"] * (status != 0)
    assert ("n2 lost: ending the step" in err) == (status != 0) == ("this job has lost n2" in err), err


def test_a_job_whose_memory_is_short_is_told_what_raises_it() -> None:
    budget = Budget(build_own_settings(), 10 << 20, "50% of the job's memory")
    with pytest.raises(
        NoMemory, match=r"may take 10 MiB \(50% of the job's memory\); more memory .* \(--mem\) raises it"
    ):
        budget.reserve(20 << 20, "training default, rank 0")
