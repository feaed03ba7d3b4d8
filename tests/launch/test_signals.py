"""A rank gets each signal of its step once, whether Slurm sends it to the launcher alone or to all processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from waiting import until

from gemini_hpc import clock
from gemini_hpc.launch import launcher
from gemini_hpc.launch.signals import LATER_S, SOON_S, Signals, Witness
from gemini_hpc.wire import local

pytestmark = pytest.mark.slow

LAUNCHER = """
import os, select, signal, sys
from gemini_hpc.launch.signals import SENT, Signals
signals = Signals()
signals.install_handlers()
rank = os.fork()
if rank == 0:
    signals.close()
    def note(number, _):
        with open(sys.argv[1], "a") as log:
            log.write(f"{signal.Signals(number).name}\\n")
    for number in SENT:
        signal.signal(number, note)
    print("ready", os.getpid(), flush=True)
    while True:
        signal.pause()
while True:
    due_s = signals.compute_wait_s()
    select.select([signals.fd], [], [], due_s)
    signals.pass_on(rank)
"""


class Step:
    """A launcher and its rank, in a session of their own."""

    def __init__(self, log: Path) -> None:
        self.log = log
        argv = [sys.executable, "-c", LAUNCHER, str(log)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        self.rank = int(self.process.stdout.readline().split()[1])

    def alone(self, number: signal.Signals) -> None:
        """Send it as proctrack/cgroup does."""
        os.kill(self.process.pid, number)

    def everywhere(self, number: signal.Signals) -> None:
        """Send it as other plugins do, and terminals."""
        os.killpg(self.process.pid, number)

    def got(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    @property
    def witness(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if int(pid) != self.rank)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    made = Step(tmp_path / "log")
    yield made
    made.close()


@pytest.mark.parametrize("send", [Step.alone, Step.everywhere], ids=["launcher alone", "all processes"])
def test_each_signal_reaches_the_rank_once(step: Step, send: Callable[[Step, signal.Signals], None]) -> None:
    wanted = []
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        send(step, number)
        wanted.append(number.name)
        until(lambda: len(step.got()) >= len(wanted), 10, what=f"{number.name} at the rank")
    time.sleep(LATER_S + 1.0)  # for one that would come twice
    assert step.got() == wanted


def test_a_signal_reaches_the_rank_once_where_the_witness_has_not_run(step: Step) -> None:
    """A process that is stopped stands for one that a busy node does not run: signals wait for both."""
    for times in (1, 2):
        os.kill(step.witness, signal.SIGSTOP)
        until(
            lambda: "T (stopped)" in Path(f"/proc/{step.witness}/status").read_text(), 10, what="the witness stopped"
        )
        step.everywhere(signal.SIGUSR1)
        until(lambda times=times: len(step.got()) >= times, 10, what="the signal at the rank")  # type: ignore[misc]
        time.sleep(LATER_S + 0.5)  # for one that would come twice
        os.kill(step.witness, signal.SIGCONT)
        time.sleep(0.5)  # the witness reports late
        assert step.got() == ["SIGUSR1"] * times
    step.alone(signal.SIGUSR1)
    until(lambda: len(step.got()) == 3, 10, what="the signal that the launcher alone got")


def test_a_signal_that_is_sent_twice_while_the_witness_does_not_run(step: Step) -> None:
    """Send a signal twice, which the kernel merges for the witness and not for the rank."""
    os.kill(step.witness, signal.SIGSTOP)
    for times in (1, 2):
        step.everywhere(signal.SIGUSR1)
        until(lambda times=times: len(step.got()) >= times, 10, what="the signal at the rank")  # type: ignore[misc]
    time.sleep(LATER_S + 0.5)  # for one that would come twice
    assert step.got() == ["SIGUSR1"] * 2
    os.kill(step.witness, signal.SIGCONT)


def test_a_signal_that_comes_before_the_witness_is_ready() -> None:
    witness = Witness()
    try:
        os.kill(witness._pid, signal.SIGUSR1)
        until(lambda: witness.has_got(signal.SIGUSR1), 10, what="the signal reported")
        os.kill(witness._pid, signal.SIGUSR2)
        until(lambda: witness.has_got(signal.SIGUSR2), 10, what="another one: the witness lives")
    finally:
        witness.close()


def test_nothing_is_left_when_the_launcher_dies(step: Step) -> None:
    witness = step.witness
    os.kill(step.process.pid, signal.SIGKILL)
    until(
        lambda: not Path(f"/proc/{witness}/cmdline").exists() or not Path(f"/proc/{witness}/cmdline").read_bytes(), 10
    )


def test_a_launcher_that_ends_keeps_its_status() -> None:
    """srun ends the others with SIGTERM when one has failed, also those that are about to end."""
    program = (
        "import atexit, os, signal\n"
        "from gemini_hpc.launch.signals import Signals\n"
        "signals = Signals()\n"
        "signals.install_handlers()\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid()):\n"
        "        kill(pid, 15)\n"
        "signals.end()\n"
        "signals.close()\n"
        "atexit.last = Last()\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGTERM)\n"
        "raise SystemExit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 7


def test_a_signal_is_passed_on_sooner_where_the_job_waits() -> None:
    signals = Signals()
    signals._on_signal(signal.SIGUSR1, None)
    signals._due[0] = signals._due[0]._replace(due=clock.monotonic() - 1.0)
    signals._on_signal(signal.SIGTERM, None)
    signals.hurry()
    first, second = signals._due
    assert (first.number, second.number) == (signal.SIGUSR1, signal.SIGTERM)
    assert second.due <= clock.monotonic() + SOON_S
    assert signals.compute_wait_s() == 0.0, "what is due stays due"


@pytest.mark.parametrize(
    ("verdict", "waits"),
    [
        (local.Verdict(dead=("n2",)), True),  # Slurm ends the step, and its requeue waits for that
        (local.Verdict(dead=("n2",), spared=True), False),  # the step goes on with a spare
        (local.Verdict(suspect=("n2",)), False),
        (None, False),
    ],
)
def test_the_job_waits_where_a_node_is_dead(
    monkeypatch: pytest.MonkeyPatch, verdict: local.Verdict | None, waits: bool
) -> None:
    monkeypatch.setattr(launcher, "ask_verdict", lambda *_: verdict)
    assert launcher.Launcher("/agent.sock", {}, 0, cast(Any, None), cast(Any, None))._has_dead_node() is waits
