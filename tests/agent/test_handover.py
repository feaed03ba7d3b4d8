"""The memory of a copy passes to a job that takes over, and to nobody before this job's end."""

from __future__ import annotations

import os

import pytest
from waiting import until

from gemini_hpc.agent import handover
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import local

from .conftest import JOB, SIZE, AgentProcess

HEIR = JOB + 1


def ended(agent: AgentProcess) -> tuple[Copy, Stamp]:
    """A training of one rank has come to its third version, and the job has failed: the newest copy."""
    trainer = agent.trainer()
    for _ in range(3):
        trainer.step()
    payload = b"3".ljust(1000)
    stamp = Stamp(trainer.epoch, 3)
    copy = Copy("default", 0, 1, 0, SIZE, len(payload), stamp, digest_bytes(payload))
    early = agent.caller().ask(local.TakeOver("default", 0, HEIR, *stamp, copy.digest))
    assert early == local.Error("the job still runs")
    assert agent.caller().ask(local.Epilog(JOB, 0, "1")) == local.Ok("detached")
    return copy, stamp


def test_memory_passes_to_the_successor_once(agent: AgentProcess) -> None:
    copy, stamp = ended(agent)
    before = agent.fds()
    memory = handover.request_memory(str(agent.socket), os.getuid(), copy, stamp, HEIR)
    assert memory.digest(copy.used) == copy.digest and memory.size_bytes == SIZE
    until(lambda: agent.fds() < before, 5, what="the agent has let go of both slots")
    with pytest.raises(ValueError, match="not held here"):
        handover.request_memory(str(agent.socket), os.getuid(), copy, stamp, HEIR)
    assert memory.digest(copy.used) == copy.digest
    memory.close()
    assert "handed_over host=n1 version=3" in agent.log() and f"to job {HEIR}" in agent.log()


def test_another_version_or_content_is_not_given(agent: AgentProcess) -> None:
    copy, stamp = ended(agent)
    asks = [
        local.TakeOver("default", 0, HEIR, stamp.epoch, 9, copy.digest),
        local.TakeOver("default", 0, HEIR, *stamp, "0" * 32),
        local.TakeOver("default", 1, HEIR, *stamp, copy.digest),
        local.TakeOver("other", 0, HEIR, *stamp, copy.digest),
    ]
    for wrong in asks:
        assert agent.caller().ask(wrong) == local.Error("this copy is not held here, or is in use")
    handover.request_memory(str(agent.socket), os.getuid(), copy, stamp, HEIR).close()


def test_whoever_else_listens_there_is_not_asked(agent: AgentProcess) -> None:
    copy, stamp = ended(agent)
    with pytest.raises(ValueError, match="listens there"):
        handover.request_memory(str(agent.socket), os.getuid() + 1, copy, stamp, HEIR)
