"""A script that forks: what was forked is no rank, and its end changes nothing for the one that is."""

from __future__ import annotations

import os
import sys
import traceback
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from waiting import until

import gemini_hpc as gemini
from gemini_hpc.train import checkpointer

from .fake_agent import PROTECTED, FakeJob
from .test_checkpointer import wait_armed, wait_sealed


class Training:
    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.ckpt = gemini.Checkpointer(self.model, self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(2, 4)).sum().backward()
        self.optimizer.step()
        self.ckpt.step()


def leaves_the_block(training: Training) -> None:
    """Leave the block as a child does that falls out of `with Checkpointer(...)` by an exception."""
    training.ckpt.__exit__(ValueError, ValueError("of the child"), None)
    sys.excepthook(ConnectionResetError, ConnectionResetError("reset by peer"), None)  # nobody is held for that


def trains(training: Training) -> None:
    for _ in range(3):
        training.step()


CHILDREN: dict[str, Callable[[Training], object]] = {
    # not all that is to happen at the end of Python: these tests have put something there, too
    "its interpreter ends": lambda training: checkpointer._on_exit(weakref.ref(training.ckpt)),
    "it closes": lambda training: training.ckpt.close(),
    "it fails": leaves_the_block,
    "it trains": trains,
}


def forked(work: Callable[[], object]) -> int:
    """Return the exit status of a child that has done this."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("child", CHILDREN)
def test_the_parent_stays_protected(job: FakeJob, capfd: pytest.CaptureFixture[str], child: str) -> None:
    training = Training()
    training.ckpt.resume()
    training.step()
    wait_armed(training.ckpt)
    training.step()
    before = capfd.readouterr().err
    assert forked(lambda: CHILDREN[child](training)) == 0, before
    for _ in range(3):
        training.step()
    wait_sealed(job, 5)
    report = training.ckpt.report()
    assert report["state"] in PROTECTED and report["version"] == 5 and not report["unsaved"], report
    assert len(job.nodes[0].hellos) == 1, "the rank has not lost its agent"
    training.ckpt.close()
    said = [line for line in (before + capfd.readouterr().err).splitlines() if "gemini-hpc" in line]
    assert len(said) == 1 and "protected since step" in said[0], said


def test_a_child_that_outlives_the_rank_holds_no_connection(job: FakeJob) -> None:
    """Or the agent would not see the rank's death."""
    training = Training()
    client = training.ckpt._session.client
    assert client is not None and client._sock is not None
    ours = os.fstat(client._sock.fileno()).st_ino
    assert not forked(lambda: until(lambda: ours not in open_sockets(), what="no connection")), ours
    assert ours in open_sockets()
    training.ckpt.close()


def open_sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
        except OSError:
            continue
    return found
