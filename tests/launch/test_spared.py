"""The launcher of a job with spares, where its rank fails of a node's loss."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.core.culprits import Cause
from gemini_hpc.launch.launcher import Launcher
from gemini_hpc.wire import local

RANK: Any = SimpleNamespace(cause=Cause.CONSEQUENCE, raised=None, status=1, killed=False)


class Agents:
    """Stands where the agent does: in which attempt the ranks of the step are to be, and what it has been told."""

    def __init__(self, path: str) -> None:
        self.path, self.attempt, self.failed = path, 0, 0
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
        return local.LaunchState(self.attempt)

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
    imports: Any = None
    made = Launcher(agents.path, env, most, lambda env: pytest.fail("no rank is to begin"), imports)
    made._attempt = 0
    return made


def test_a_loss_is_no_failure_of_the_rank(agents: Agents) -> None:
    """No restart is left, and none is needed: the agents have begun the next attempt by themselves."""
    agents.attempt = 1
    assert launcher(agents, most=0)._after(1, RANK) is None and not agents.failed


def test_a_failure_is_one(agents: Agents, capfd: pytest.CaptureFixture[str]) -> None:
    assert launcher(agents, most=0)._after(1, RANK) == 1
    assert "0 restarts are used up" in capfd.readouterr().err
