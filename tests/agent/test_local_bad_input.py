"""Whatever a process of the job's owner sends to the local socket, the agent goes on serving its real trainers."""

from __future__ import annotations

import fcntl
import os
import random
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import until

from gemini_hpc.core.digest import digest_bytes as digest_of
from gemini_hpc.wire import local
from gemini_hpc.wire.traffic import TimelineState, TrafficState

from .conftest import SIZE, AgentProcess, Caller, case

pytestmark = pytest.mark.slow

_SEAL_ALL = 1 | 2 | 4
Make = Callable[..., AgentProcess]


def refused(reply: local.Message | None, *words: str) -> None:
    assert isinstance(reply, local.Error), reply
    assert "\n" not in reply.error
    for word in words:
        assert word in reply.error, reply.error


PACKETS = {
    "noise": random.Random(1).randbytes(3000),
    "truncated": b'{"op":"begin-version","training":"default","rank":0,"ver',
    "not an object": b"[1,2,3]",
    "unknown op": b'{"op":"format the disk"}',
    "no op": b'{"rank":0}',
    "a reply": b'{"op":"welcome","job":1}',
    "wrong type": b'{"op":"begin-version","training":"default","rank":"0","version":1}',
    "float": b'{"op":"begin-version","training":"default","rank":0,"version":1.5}',
    "negative": b'{"op":"begin-version","training":"default","rank":-1,"version":1}',
    "huge": b'{"op":"begin-version","training":"default","rank":0,"version":' + b"9" * 3000 + b"}",
    "above 40 bits": b'{"op":"begin-version","training":"default","rank":0,"version":1099511627776}',
    "nan": b'{"op":"event","name":"a","version":1,"t":NaN}',
    "infinity": b'{"op":"event","name":"a","version":1,"t":1e999}',
    "huge time": b'{"op":"event","name":"a","version":1,"t":1e300}',
    "not utf-8": b'{"op":"event","name":"\xff\xfe","version":1,"t":1}',
    "surrogate": b'{"op":"event","name":"\\ud800","version":1,"t":1}',
    "nested": b'{"op":"verdict?","x":' + b"[" * 30000 + b"]" * 30000 + b"}",
    "nested open": b'{"op":"verdict?","x":' + b'{"a":' * 12000,
    "one byte too many": b'{"op":"verdict?"}'.ljust(local.MAX_PACKET_BYTES + 1),
    "oversized": b'{"op":"event","name":"' + b"x" * local.MAX_PACKET_BYTES + b'","version":1,"t":1}',
}


def test_packets_that_are_no_messages(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    trainer.step()
    caller = agent.caller()
    for name, packet in PACKETS.items():
        with case(name):
            caller.raw(b"{}")
            fds = agent.fds()
            refused(caller.raw(packet))
            assert caller.ask(local.VerdictRequest()).alive == ("n1",), "the connection is still good"
            read, write = os.pipe()
            for _ in range(20):
                refused(caller.raw(packet, [read, write]))
            os.close(read)
            os.close(write)
            agent.quiet(fds)
            trainer.step()


def test_descriptors_nobody_asked_for_are_closed(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    trainer.step()
    trainer.step()
    fds = agent.fds()
    pipes = [fd for _ in range(8) for fd in os.pipe()]
    caller = agent.caller()
    for count in (1, 2, 4, 5, 16):
        caller.ask(local.VerdictRequest(), pipes[:count])
        caller.ask(local.BeginVersion("default", 0, 1), pipes[:count])
    for _ in range(20):
        empty = Caller(agent.socket)
        with suppress(OSError):
            socket.send_fds(empty.sock, [b""], pipes[:4])
        assert empty.sock.recv(100) == b""
        empty.close()
    caller.close()
    agent.quiet(fds)
    for fd in pipes:
        os.close(fd)
    trainer.step()


def test_flood_of_clients(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    trainer.step()
    trainer.step()  # both slots are mapped from now on
    before, fds = agent.rss_bytes(), agent.fds()
    peer_server: list[Caller] = []
    with suppress(OSError):
        for _ in range(1100):
            peer_server.append(Caller(agent.socket))
    trainer.step()
    for caller in peer_server:
        caller.close()
    agent.quiet(fds, 20)
    trainer.step()
    assert agent.rss_bytes() - before < 8 << 20


def test_client_that_does_not_read(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    caller = agent.caller()
    caller.sock.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            caller.sock.send(local.encode(local.VerdictRequest()))
    for _ in range(5):
        trainer.step()


def test_requests_before_hello(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    trainer.step()
    caller = agent.caller()
    requests: list[local.Message] = [
        local.Register("default", 0, 1, 0, SIZE),
        local.BeginVersion("default", 0, 2),
        local.Landed("default", 0, 1, 0, 10, "x"),
        local.Abort("default", 0, 1, 0),
        local.Fetch("default", 0),
        local.Finished("default", 0),
        local.HandBack("default", 0, 1, 0, SIZE, 0, 1, 1, 10, "x"),
        local.Traffic("default", 0, TrafficState(1.0, "gemini", "gloo", "steady")),
        local.Timeline("default", 0, TimelineState(1, 1.0, 1.0)),
        local.CacheBytes("default", 0, "0" * 32, b"x"),
        local.FetchCached("default", 0, "0" * 32),
    ]
    for request in requests:
        refused(caller.ask(request), "this process has not joined")
    trainer.step()


NAMES = [
    "default+2.1",
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc/passwd",
    "a\nb",
    "a\0b",
    "-" * 65,
    "\u00e4",
    ".hidden",
    "x" * 60000,
]


def test_set_names_that_look_like_paths(agent: AgentProcess) -> None:
    for name in NAMES:
        with case(name[:100]):
            fds = agent.fds()
            caller = agent.caller()
            refused(caller.hello(name=name), "invalid name, rank or step")
            caller.close()
            agent.quiet(fds)


def test_ranks_that_cannot_be(agent: AgentProcess) -> None:
    for rank, world in [(0, 0), (1, 1), (5, 3)]:
        refused(agent.caller().hello(rank, world), f"rank {rank} of {world}")


def test_wrong_protocol_and_step(agent: AgentProcess) -> None:
    refused(agent.caller().ask(local.Hello(9, 9, "default", 0, 1, 0, "77.0", 1)), "protocol 9")
    refused(agent.caller().hello(step=""), "invalid name, rank or step")
    refused(agent.caller().hello(step="7" * 1000), "invalid name, rank or step")


def test_two_processes_of_one_rank(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    trainer.step()
    refused(agent.caller().hello(), "rank 0 of training 'default' trains here already", str(os.getpid()), "name=")
    trainer.step()
    refused(agent.caller().hello(rejoin=True), "trains here already")
    trainer.step()


def test_second_hello_on_a_connection(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    refused(trainer.caller.hello(0, 1, "other"), "already joined a training")
    trainer.step()


def test_rank_may_come_again_at_once_after_its_process_was_killed(agent: AgentProcess) -> None:
    first = agent.trainer()
    first.step()
    first.caller.close()
    again = agent.trainer()
    assert again.page.sealed == (first.epoch, 1)


def test_another_world(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    refused(agent.caller().hello(1, 2), "2 ranks", "1")
    refused(trainer.caller.ask(local.Register("default", 0, 2, 0, SIZE)), "impossible shard")
    trainer.step()


CANNOT_BE_SERVED: list[tuple[local.Message, str]] = [
    (local.Register("default", 0, 1, 5, SIZE), "home 5"),
    (local.Register("default", 1, 1, 0, SIZE), "rank 1 of 1"),
    (local.Register("default", 0, 1, 0, 0), "0 bytes"),
    (local.Register("default", 0, 1, 0, (1 << 50) - 1), "not enough memory for the replicas: wanted"),
    (local.BeginVersion("default", 3, 1), "rank 3"),
    (local.Landed("default", 0, 9, 0, 10, "x"), "not being filled"),
    (local.Landed("default", 0, 9, -1, 10, "x"), "not being filled"),
    (local.Landed("default", 0, 9, 1 << 40, 10, "x"), "not being filled"),
    (local.Fetch("default", 9), "shard 9 is not part"),
    (local.Finished("default", 7), "rank 7"),
    (local.BeginVersion("other", 0, 1), "this process has not joined"),
    (local.Traffic("default", 1, TrafficState(1.0, "gemini", "gloo", "steady")), "rank 1"),
    (local.Timeline("default", 7, TimelineState(1, 1.0, 1.0)), "rank 7"),
    (local.CacheBytes("default", 1, "0" * 32, b"x"), "rank 1"),
    (local.FetchCached("default", 1, "0" * 32), "rank 1"),
    (local.FetchCached("other", 0, "0" * 32), "this process has not joined"),
    (local.HandBack("default", 0, 1, 0, SIZE, 0, 1, 1, 10, "x"), "descriptor"),
]


def test_requests_that_cannot_be_served(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    trainer.step()
    for request, words in CANNOT_BE_SERVED:
        with case(request):
            refused(trainer.caller.ask(request), words)
            trainer.step()


def test_used_bytes_beyond_the_slot(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    begun = trainer.caller.ask(local.BeginVersion("default", 0, 1))
    assert isinstance(begun, local.Begun)
    refused(trainer.caller.ask(local.Landed("default", 0, 1, begun.slot, SIZE + 1, "x")), str(SIZE + 1), str(SIZE))


def test_wrong_digest_is_not_sealed_and_loses_nothing(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    trainer.step()
    begun = trainer.caller.ask(local.BeginVersion("default", 0, 2))
    assert isinstance(begun, local.Begun)
    for text in ("x", "0" * 31, "A" * 32, "é" * 32):
        refused(trainer.caller.ask(local.Landed("default", 0, 2, begun.slot, 10, text)), "needs its digest")
    assert trainer.caller.ask(local.Landed("default", 0, 2, begun.slot, 10, "0" * 32)) == local.Ok()
    until(lambda: "damaged" in agent.log(), what="the digest is compared")
    assert trainer.page.sealed == (trainer.epoch, 1)
    trainer.version = 2
    trainer.step()


def test_another_training_cannot_touch_the_first(agent: AgentProcess) -> None:
    """Another process of the owner, in the same step, with a set of its own, and then as a second rank."""
    trainer = agent.trainer()
    trainer.step()
    other = agent.trainer("other")
    for request in (local.Register("default", 0, 1, 0, SIZE), local.BeginVersion("default", 0, 1 << 30)):
        refused(other.caller.ask(request), "this process has not joined")
    other.step()
    trainer.step()


def test_a_shard_has_one_writer(make_agent: Make) -> None:
    agent = make_agent()
    first, second = agent.caller(), agent.caller()
    assert isinstance(first.hello(0, 2), local.Welcome)
    assert isinstance(second.hello(1, 2), local.Welcome)
    assert isinstance(first.ask(local.Register("default", 0, 2, 0, SIZE)), local.Slots)
    refused(second.ask(local.Register("default", 0, 2, 0, SIZE)), f"process {os.getpid()}")
    refused(second.ask(local.BeginVersion("default", 0, 1 << 39)), "not registered by this process")
    refused(second.ask(local.Finished("default", 0)), "rank 0")
    assert isinstance(first.ask(local.BeginVersion("default", 0, 1)), local.Begun)
    first.close()
    mine = local.Register("default", 0, 2, 0, SIZE)
    until(lambda: isinstance(second.ask(mine), local.Slots), what="the agent has noticed that the first is gone")


def test_sets_are_limited(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    fds = agent.fds()
    replies = []
    for n in range(100):
        caller = Caller(agent.socket)
        replies.append(caller.hello(name=f"set{n}"))
        caller.close()
    refused(replies[-1], "invalid name, rank or step")
    agent.quiet(fds + 2 * 64)
    trainer.step()


def test_events_are_limited_and_tame(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    for n in range(2000):
        event = local.Event(f"x\n\x1b[2J event=agreed {n}", 1, 1.0, "detail\nt=1 event=forged " + "y" * 5000)
        assert trainer.caller.ask(event) == local.Ok()
    lines = [line for line in agent.log().splitlines() if "forged" in line]
    assert 100 < len(lines) < 400
    assert max(map(len, lines)) < 600
    lines = agent.log().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]{12} job=", line) and "\x1b" not in line for line in lines)


def test_no_replicas_are_one(agent: AgentProcess) -> None:
    assert agent.caller().ask(local.Attach(77, 1, "n1", "n1", 0)) == local.Ready("mapped")


def test_attach_of_others(agent: AgentProcess) -> None:
    trainer = agent.trainer()
    caller = agent.caller()
    refused(caller.ask(local.Attach(78, 0, "n1", "n1", 1)), "agent of job 77 on n1")
    refused(caller.ask(local.Attach(77, 0, "n1", "n2", 1)), "agent of job 77 on n1")
    refused(caller.ask(local.Attach(77, 1, "n2", "n1", 1)), "n1 is not in the node list")
    refused(caller.ask(local.Attach(77, 1, "n1,n1", "n1", 1)), "twice")
    refused(caller.ask(local.Attach(77, 1, "n[0-999999999]", "n1", 1)), "hosts")
    refused(caller.ask(local.Attach(77, 1, "n[", "n1", 1)), "node list")
    refused(caller.ask(local.Epilog(78, 0)), "agent of job 77")
    refused(caller.raw(b'{"op":"attach","job":77,"restart":-1,"nodelist":"n1","node":"n1","replicas":1}'))
    refused(caller.raw(b'{"op":"attach","job":77,"restart":1,"nodelist":"n1","node":"n1","replicas":-7}'))
    trainer.step()


# ---- memory that is handed back ------------------------------------------------------------------------


def memfd(name: str = "gemini:x", size: int = SIZE, seals: int = _SEAL_ALL, *, sparse: bool = False) -> int:
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    if size and not sparse:
        os.posix_fallocate(fd, 0, size)
    if seals:
        fcntl.fcntl(fd, 1033, seals)
    return fd


def _plain_file() -> int:
    fd, path = tempfile.mkstemp(prefix="gemini")
    os.unlink(path)
    os.ftruncate(fd, SIZE)
    return fd


def _read_only() -> int:
    fd = memfd()
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return other


IMPOSTORS: dict[str, Callable[[], int]] = {
    "pipe": lambda: os.pipe()[0],
    "file": _plain_file,
    "directory": lambda: os.open("/", os.O_RDONLY),
    "device": lambda: os.open("/dev/zero", os.O_RDWR),
    "path only": lambda: os.open("/dev/zero", os.O_PATH),
    "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
    "another name": lambda: memfd("passwords"),
    "not sealed: could be cut short under the agent's feet": lambda: memfd(seals=0),
    "half sealed": lambda: memfd(seals=2),
    "sealed against writing": lambda: memfd(seals=_SEAL_ALL | 8),
    "read-only": _read_only,
    "too short": lambda: memfd(size=SIZE // 2),
    "too long": lambda: memfd(size=SIZE * 2),
}


@pytest.fixture
def rejoined(agent: AgentProcess) -> Iterator[tuple[AgentProcess, Caller]]:
    """An agent that has died and come back, and a trainer of before that has said hello to it."""
    trainer = agent.trainer()
    trainer.step()
    trainer.caller.close()
    agent.kill()
    agent.start(again=True)
    caller = agent.caller()
    assert isinstance(caller.hello(rejoin=True), local.Welcome), agent.log()
    yield agent, caller


def back(**changes: int | str) -> local.HandBack:
    fields: dict[str, int | str] = {"rank": 0, "world": 1, "home": 0, "bytes": SIZE, "slot": 0, "epoch": 1}
    fields |= {"version": 1, "used": 0, "digest": ""} | changes
    return local.HandBack("default", **fields)  # type: ignore[arg-type]


def test_hand_back_of_something_else(rejoined: tuple[AgentProcess, Caller]) -> None:
    agent, caller = rejoined
    for name, make in IMPOSTORS.items():
        with case(name):
            fds = agent.fds()
            for _ in range(10):
                fd = make()
                refused(caller.ask(back(), [fd]), "handed back")
                os.close(fd)
            agent.quiet(fds)
    assert isinstance(caller.ask(local.Register("default", 0, 1, 0, SIZE)), local.Slots), "the trainer goes on"
    assert isinstance(caller.ask(local.BeginVersion("default", 0, 2)), local.Begun)


def test_hand_back_that_cannot_be(rejoined: tuple[AgentProcess, Caller]) -> None:
    agent, caller = rejoined
    for name, value in [
        ("slot", 2),
        ("slot", -1),
        ("rank", 1),
        ("world", 2),
        ("home", 3),
        ("bytes", 0),
        ("epoch", 1000),
    ]:
        with case(f"{name} {value}"):
            fds, fd = agent.fds(), memfd()
            refused(caller.ask(back(**{name: value}), [fd]))
            refused(caller.ask(back(), [fd, fd]), "one descriptor")
            refused(caller.ask(back()), "one descriptor")
            os.close(fd)
            agent.quiet(fds)


def test_hand_back_of_holes_is_refused(rejoined: tuple[AgentProcess, Caller]) -> None:
    """Filling them would be paid by all agents of the node, and nobody has counted that."""
    agent, caller = rejoined
    fds, fd = agent.fds(), memfd(sparse=True)
    refused(caller.ask(back(used=10, digest="0" * 32), [fd]), "bytes of memory")
    os.close(fd)
    agent.quiet(fds)


def test_hand_back_of_the_same_version_twice(rejoined: tuple[AgentProcess, Caller]) -> None:
    agent, caller = rejoined
    digest = digest_of(bytes(10))
    first, second = memfd(), memfd()
    assert caller.ask(back(used=10, digest=digest), [first]) == local.Ok()
    refused(caller.ask(back(used=10, digest=digest), [second]), "cannot take version 1 back")
    assert caller.ask(back(slot=1, used=10, digest=digest), [second]) == local.Ok()
    assert isinstance(caller.ask(local.BeginVersion("default", 0, 2)), local.Begun), agent.log()
    os.close(first)
    os.close(second)


def test_hand_back_with_another_digest_is_not_counted(rejoined: tuple[AgentProcess, Caller]) -> None:
    agent, caller = rejoined
    fd = memfd()
    assert caller.ask(back(used=10, digest="0" * 32), [fd]) == local.Ok()
    os.close(fd)
    assert "handed back with a different digest" in agent.log()


# ---- not enough memory ---------------------------------------------------------------------------------


def test_refusal_has_the_numbers_and_ends_nothing(make_agent: Make) -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    agent = make_agent(fraction=(32 << 20) / total)
    small = agent.trainer("small")
    small.step()
    caller = agent.caller()
    assert isinstance(caller.hello(name="large"), local.Welcome)
    reply = caller.ask(local.Register("large", 0, 1, 0, 100 << 20))
    refused(reply, "not enough memory for the replicas: wanted 200 MiB", "cap is 32 MiB", "memory_fraction")
    fds = agent.fds()
    for _ in range(30):
        refused(caller.ask(local.Register("large", 0, 1, 0, 100 << 20)), "wanted 200 MiB")
    assert agent.fds() == fds
    small.step()
    assert isinstance(caller.ask(local.Register("large", 0, 1, 0, 1 << 20)), local.Slots), "one that fits is welcome"


# ---- anything at all -----------------------------------------------------------------------------------

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_ops = [
    "epilog",
    "verdict?",
    "hello",
    "register",
    "begin-version",
    "landed",
    "abort",
    "fetch",
    "event",
    "finished",
    "handback",
    "traffic",
    "timeline",
    "cache",
    "fetch-cached",
]
_fields = [
    "job",
    "restart",
    "training",
    "rank",
    "world",
    "home",
    "bytes",
    "slot",
    "epoch",
    "version",
    "used",
    "digest",
    "step",
    "pid",
    "least",
    "most",
    "t",
    "name",
    "rejoin",
    "state",
    "timeline",
    "key",
    "data",
]
_value = _json | st.sampled_from(["default", "77.0", 0, 1, 2, 77, SIZE])


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[tuple[AgentProcess, Caller]]:
    agent = AgentProcess()
    trainer = agent.trainer()
    trainer.step()
    caller = agent.caller()
    yield agent, caller
    log = agent.log()
    try:
        trainer.step()
        assert agent.rss_bytes() < 64 << 20
        assert agent.fds() < 120
        assert "Traceback" not in log
    finally:
        agent.close()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(op=st.sampled_from(_ops), fields=st.dictionaries(st.sampled_from(_fields), _value, max_size=12))
def test_any_fields(fuzzed: tuple[AgentProcess, Caller], op: str, fields: dict[str, object]) -> None:
    """Every packet gets one reply, whatever is in it; what hello may do is tested above."""
    import json

    if op in ("hello", "epilog"):
        fields |= {"least": 99, "most": 99, "job": 1}
    reply = fuzzed[1].raw(json.dumps({"op": op} | fields).encode())
    assert reply is not None, fuzzed[0].log()[-2000:]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=200))
def test_any_bytes(fuzzed: tuple[AgentProcess, Caller], data: bytes) -> None:
    assert fuzzed[1].raw(data) is not None
