"""The launcher of a job with spares: its rank fails of a node's loss; signals come, and it may have no rank."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc import clock
from gemini_hpc.core.culprits import Cause
from gemini_hpc.launch.launcher import Launcher
from gemini_hpc.launch.signals import SENT
from gemini_hpc.wire import local

RANK: Any = SimpleNamespace(cause=Cause.CONSEQUENCE, raised=None, status=1, killed=False)
QUIET = os.pipe()


class Agents:
    """Stands where the agent does: in which attempt the ranks of the step are to be, and what it has been told."""

    def __init__(self, path: str) -> None:
        self.path, self.attempt, self.failed = path, 0, 0
        self.asked, self.over_after = 0, 1 << 30
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.bind(path)
        self._sock.listen(8)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._sock.accept()
            except OSError:
                return
            with peer:
                while data := peer.recv(65536):
                    peer.send(local.encode(self._answer(local.request_decoder.decode(data))))

    def _answer(self, request: local.Request) -> local.Message:
        if not isinstance(request, local.LaunchRequest):
            return local.Verdict(alive=("n1", "n3"), sealed=(1, 5), begun=5)
        self.failed += bool(request.failed)
        self.asked += 1
        return local.LaunchState(self.attempt, over="the training is over" * (self.asked > self.over_after))

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(str(tmp_path / "agent.sock"))
    yield found
    found.close()


def launcher(agents: Agents, most: int) -> Launcher:
    env = {"GEMINI_SPARES": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    imports: Any = SimpleNamespace(fd=QUIET[0], compute_wait_s=lambda: None)
    made = Launcher(agents.path, env, most, lambda env: pytest.fail("no rank is to begin"), imports)
    made._attempt = 0
    return made


def test_a_loss_is_no_failure_of_the_rank(agents: Agents) -> None:
    """No restart is left, and none is needed: the agents have begun the next attempt by themselves."""
    agents.attempt = 1
    assert launcher(agents, most=0)._decide_after(1, RANK) is None and not agents.failed


def test_a_failure_is_one(agents: Agents, capfd: pytest.CaptureFixture[str]) -> None:
    assert launcher(agents, most=0)._decide_after(1, RANK) == 1
    assert "--max-restarts=0 is reached" in capfd.readouterr().err


@contextmanager
def sent(made: Launcher, *numbers: signal.Signals) -> Iterator[None]:
    """A launcher that has got these signals."""
    before = {number: signal.getsignal(number) for number in SENT}
    made._signals.install_handlers()
    try:
        for number in numbers:
            os.kill(os.getpid(), number)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        made._signals.close()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_launcher_without_a_rank_leaves_signals_to_the_ranks(agents: Agents, number: signal.Signals) -> None:
    """To end with one, while the ranks train on, would have srun end them."""
    agents.over_after = 3
    made = launcher(agents, most=3)
    with sent(made, number):
        assert made._wait() == 0 and agents.asked == 4
        assert made._signals.compute_wait_s() is None, "or it would wait for nothing, without a pause"


def test_without_an_agent_a_signal_ends_a_launcher_without_a_rank(agents: Agents) -> None:
    made = launcher(agents, most=3)
    made._path = f"{agents.path}.none"
    with sent(made, signal.SIGTERM, signal.SIGUSR1):
        assert made._wait() == 128 + signal.SIGTERM


def test_a_signal_that_a_rank_has_outlived_keeps_no_later_attempt_away(agents: Agents) -> None:
    """USR1 asks for no end: what is killed a moment later is a failure, and so is all that fails from then on."""
    agents.attempt = 1
    for ago_s, number, status, again in (
        (1.0, signal.SIGUSR1, 137, True),
        (1.0, signal.SIGUSR1, 1, False),  # its handler saves, and leaves with this status
        (1.0, signal.SIGTERM, 137, False),
        (100.0, signal.SIGUSR1, 1, True),
        (100.0, signal.SIGTERM, 1, True),
    ):
        made = launcher(agents, most=3)
        made._signals.last = number, clock.monotonic() - ago_s
        made._signals.asked = made._signals.last if number == signal.SIGTERM else None
        assert (made._decide_after(status, RANK) is None) is again, (ago_s, number, status)
