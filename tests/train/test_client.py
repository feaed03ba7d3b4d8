"""The connection to the agent: events are a side matter, nobody waits for them."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hello import build_hello
from waiting import until

from gemini_hpc.client import agent_connection as client
from gemini_hpc.client import stats_messages
from gemini_hpc.client.agent_connection import AgentClient, AgentLost, RefusedForNow
from gemini_hpc.wire import local
from gemini_hpc.wire.traffic import TrafficState

from .fake_agent import FakeJob

MakeJob = Callable[[int, int], FakeJob]
KEY = stats_messages.build_profile_key("model", ["n1"])
HELLO = build_hello(training="s", rank=0, world=1, local_rank=0, step="1.0", pid=1)


def joined(job: FakeJob) -> AgentClient:
    agent = AgentClient(job.nodes[0].path, lambda welcome, exchange: True, lambda: None)
    agent.join_training(HELLO, lambda waited_s, why: None)
    return agent


def test_an_agent_that_says_later_is_asked_again(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    job.not_yet = 3
    told: list[str] = []
    agent = AgentClient(job.nodes[0].path, lambda welcome, exchange: True, lambda: None)
    agent.join_training(HELLO, lambda waited_s, why: told.append(why))
    agent.close()
    assert told == ["the tier cannot be seen"] * 3 and len(job.nodes[0].hellos) == 4


def test_for_so_long_only(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(1, 1)
    job.not_yet = 1000
    monkeypatch.setattr(client, "NOT_YET_S", 0.5)
    agent = AgentClient(job.nodes[0].path, lambda welcome, exchange: True, lambda: None)
    with pytest.raises(RefusedForNow, match="cannot be seen"):
        agent.join_training(HELLO, lambda waited_s, why: None)
    assert 2 <= len(job.nodes[0].hellos) <= 5


AT_A_DEAD_END = """
import array, signal, socket
from gemini_hpc.client.agent_connection import AgentSocket
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ours = AgentSocket(fileno=a.detach())
b.close()
for send in (lambda: ours.send(b"x"), lambda: ours.sendall(b"x"), lambda: socket.send_fds(ours, [b"x"], [0])):
    try:
        send()
    except BrokenPipeError:
        print("gone")
"""


def test_an_agents_death_is_no_signal_to_the_script() -> None:
    """Also where SIGPIPE ends it, as scripts that write into pipes like to have it."""
    done = subprocess.run(
        [sys.executable, "-c", AT_A_DEAD_END], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "gone\n" * 3), done


def test_events_arrive_in_order_before_the_end(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    agent = joined(job)
    for version in range(50):
        agent.queue_event("skipped", version)
    agent.close()
    assert [e.version for e in job.saw("skipped")] == list(range(50))


def test_the_next_agent_gets_the_events_that_the_dead_one_missed(make_job: MakeJob) -> None:
    """Other ranks would wait for the version that this rank has skipped meanwhile."""
    job = make_job(1, 1)
    agent = joined(job)
    job.nodes[0].die()
    until(lambda: agent.lost, what="the loss")
    agent.queue_event("skipped", 7)
    agent.queue_event("skipped", 8)
    time.sleep(0.2)
    job.nodes[0].start()
    until(lambda: len(job.saw("skipped")) == 2, what="the events")
    agent.close()
    assert [e.version for e in job.saw("skipped")] == [7, 8]


@pytest.fixture
def may_notice(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event; the watcher sees no end of a connection before it is set."""
    may, poll = threading.Event(), select.poll

    class Blind:
        def __init__(self) -> None:
            self._poll = poll()
            self.register = self._poll.register

        def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
            if threading.current_thread().name == "gemini-agent":
                may.wait()
            return self._poll.poll(timeout_ms)

    monkeypatch.setattr(select, "poll", Blind)
    yield may
    may.set()


def test_an_event_that_a_dying_agent_has_read_reaches_the_next_one(
    make_job: MakeJob, may_notice: threading.Event
) -> None:
    """Resend the event on the next connection, also if the watcher notices the death late."""
    job = make_job(1, 1)
    agent = joined(job)
    job.hangs_up = [1]
    for version in (1, 2, 3):
        agent.queue_event("skipped", version)
    until(lambda: agent.lost or not (agent._waiting or agent._sending_event), what="the loss")
    may_notice.set()
    until(lambda: len(job.saw("skipped")) == 3, what="the events")
    agent.close()
    assert [e.version for e in job.saw("skipped")] == [1, 2, 3]


def test_an_event_after_a_failed_request_waits_for_the_next_agent(
    make_job: MakeJob, may_notice: threading.Event
) -> None:
    job = make_job(1, 1)
    agent = joined(job)
    job.nodes[0].die()
    with pytest.raises(AgentLost):
        agent.request(local.BeginVersion("s", 0, 1))
    assert agent.lost, "the connection is known to be dead before the watcher notices"
    agent.queue_event("skipped", 1)
    job.nodes[0].start()
    may_notice.set()
    until(lambda: len(job.saw("skipped")) == 1, what="the event")
    agent.close()
    assert agent._resent is None, "it has been sent on the new connection only"


def test_an_event_that_ends_the_connection_is_sent_twice_at_most(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    agent = joined(job)
    job.hangs_up = [1] * 10
    for version in (1, 2):
        agent.queue_event("skipped", version)
    until(lambda: job.saw("skipped"), what="the event behind it")
    agent.close()
    assert len(job.hangs_up) == 8 and [e.version for e in job.saw("skipped")] == [2]
    assert len(job.nodes[0].hellos) == 3, "each try was on a connection of its own"


def test_an_event_that_has_not_been_sent_is_not_dropped(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request may wait for its answer for longer than the event waits for its turn."""
    job = make_job(1, 1)
    agent = joined(job)
    request, tries = agent.request, list[int]()

    def ask(message: local.Message, **options: Any) -> Any:
        tries.append(1)
        return request(message, timeout_s=0.01)

    with agent._lock:
        monkeypatch.setattr(agent, "request", ask)
        agent.queue_event("skipped", 1)
        until(lambda: len(tries) >= 3, what="two tries in vain")
        monkeypatch.setattr(agent, "request", request)
    until(lambda: job.saw("skipped"), what="the event")
    agent.close()


def test_an_event_that_waits_for_another_agent_ends_with_the_client(
    make_job: MakeJob, may_notice: threading.Event
) -> None:
    job = make_job(1, 1)
    before = threading.enumerate()
    agent = joined(job)
    senders = [t for t in threading.enumerate() if t.name == "gemini-events" and t not in before]
    job.hangs_up = [1]
    agent.queue_event("skipped", 1)
    until(lambda: agent.lost, what="the loss")
    agent.close()
    until(lambda: not any(t.is_alive() for t in senders), what="the end of the sender")
    assert len(senders) == 1 and not job.saw("skipped")


def test_a_hung_agent_holds_nobody_up(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    agent = joined(job)
    job.delay["Event"] = 30.0
    began = time.monotonic()
    for version in range(10_000):
        agent.queue_event("skipped", version)
    assert time.monotonic() - began < 2.0
    assert len(agent._events) <= client.EVENTS_KEPT
    assert agent._events[-1].version == 9_999, "the oldest are dropped"
    until(agent._lock.locked)  # the first of them has been sent: that thread may get a processor only now
    with pytest.raises(AgentLost, match="earlier request"):
        agent.request(local.Finished(training="s", rank=0), timeout_s=0.1)
    began = time.monotonic()
    agent.close()
    assert time.monotonic() - began < 2.0 + client.FLUSH_TIMEOUT_S


STATE = TrafficState(1.7e9, "gemini", "gloo", "steady", j=2)


def test_what_is_posted_arrives_the_newest_of_each_kind(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    agent = joined(job)
    job.delay["Traffic"] = 0.2
    for j in range(100):
        agent.post(local.Traffic("s", 0, msgspec.structs.replace(STATE, j=j)))
        agent.queue_event("skipped", j)
    agent.post(local.Timeline("s", 0, stats_messages.build_timeline(version=3, iteration_s=1.0, gate_s=0.9)))
    agent.post(local.CacheBytes("s", 0, KEY, b"profile"))
    agent.close()
    states = [m.state.j for m in job.told if isinstance(m, local.Traffic)]
    assert states[-1] == 99 and len(states) < 10, "one that waits is replaced by the next"
    assert {type(m) for m in job.told} == {local.Traffic, local.Timeline, local.CacheBytes}
    assert len(job.saw("skipped")) == 100


def test_what_was_kept_is_recalled(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    agent = joined(job)
    assert agent.recall("s", 0, KEY) is None
    agent.post(local.CacheBytes("s", 0, KEY, b"profile"))
    agent.flush()
    assert agent.recall("s", 0, KEY) == b"profile"
    agent.close()
    job.requeue()
    again = joined(job)
    assert again.recall("s", 0, KEY) == b"profile"
    assert again.recall("s", 0, "f" * 32) is None
    again.close()


def test_an_agent_that_knows_nothing_of_it_is_asked_in_vain(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    job.listens = False
    agent = joined(job)
    agent.post(local.Traffic("s", 0, STATE))
    agent.post(local.CacheBytes("s", 0, KEY, b"profile"))
    agent.flush()
    assert agent.recall("s", 0, KEY) is None
    assert not agent.lost and job.told == []
    agent.queue_event("skipped", 1)
    agent.close()
    assert len(job.saw("skipped")) == 1, "the connection is as good as before"


def test_what_does_not_fit_a_packet_is_not_sent(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    agent = joined(job)
    agent.post(local.CacheBytes("s", 0, KEY, bytes(local.MAX_PACKET_BYTES)))
    agent.queue_event("skipped", 1)
    agent.flush()
    assert not agent.lost and len(job.saw("skipped")) == 1 and job.told == []
    agent.close()


def test_posting_to_an_agent_that_is_gone_or_hangs_costs_nothing(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    agent = joined(job)
    job.delay["Traffic"] = 30.0
    began = time.monotonic()
    for _ in range(10_000):
        agent.post(local.Traffic("s", 0, STATE))
    assert time.monotonic() - began < 2.0
    agent.close()
    gone = make_job(1, 1)
    agent = joined(gone)
    gone.nodes[0].die()
    until(lambda: agent.lost, every_s=0.01, what="the end of the connection")
    agent.post(local.Traffic("s", 0, STATE))
    assert agent.recall("s", 0, KEY) is None
    agent.close()
