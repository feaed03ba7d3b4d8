"""The connection to the agent: events are a side matter, nobody waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gemini_hpc.train import client
from gemini_hpc.train.client import AgentClient, AgentLost
from gemini_hpc.wire import local

from .fake_agent import FakeJob

MakeJob = Callable[[int, int], FakeJob]
HELLO = local.hello(set="s", rank=0, world=1, local_rank=0, step="1.0", pid=1)


def joined(job: FakeJob) -> AgentClient:
    agent = AgentClient(job.nodes[0].path, lambda welcome, exchange: True, lambda: None)
    agent.hello(HELLO, lambda waited_s: None)
    return agent


def test_events_arrive_in_order_before_the_end(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    agent = joined(job)
    for version in range(50):
        agent.event("skipped", version)
    agent.close()
    assert [e.version for e in job.saw("skipped")] == list(range(50))


def test_a_hung_agent_holds_nobody_up(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    agent = joined(job)
    job.delay["Event"] = 30.0
    began = time.monotonic()
    for version in range(10_000):
        agent.event("skipped", version)
    assert time.monotonic() - began < 2.0
    assert len(agent._events) <= client.EVENTS_KEPT
    assert agent._events[-1].version == 9_999, "the oldest are dropped"
    with pytest.raises(AgentLost, match="earlier request"):
        agent.request(local.Finished(set="s", rank=0), timeout_s=0.1)
    agent.close()
    assert time.monotonic() - began < 2.0 + client.FLUSH_TIMEOUT_S
