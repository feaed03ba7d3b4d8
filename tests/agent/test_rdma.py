"""RDMA between agents, with a fake of the verbs: late and torn writes, hostile peers, and reasons for TCP."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim import fake_verbs
from sim.fake_verbs import PACKET_BYTES, FakeVerbs, Wire
from waiting import until

from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.transfer import rdma
from gemini_hpc.agent.transfer.rdma import Rdma, RdmaError, Registered, Window, Writer
from gemini_hpc.core.slots import SlotPair, Stamp
from gemini_hpc.wire import peer, protocol
from gemini_hpc.wire.link import BlockingLink, LinkClosed

BYTES = 6 * PACKET_BYTES + 321


class Given(Exception):
    """A version is given up."""


def port(verbs: FakeVerbs) -> rdma.RdmaPort:
    context = verbs.get_device_list()[0].open()
    return rdma.RdmaPort(verbs, "fake_0", 1, context, 0, verbs.gid, 7, 5)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    made = Wire(random.Random(1))
    use(made, monkeypatch)
    return made


def use(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let packets go on while somebody waits for a completion."""

    def readable(fd: int, timeout_s: float) -> bool:
        for _ in range(wire.rng.randint(1, 40)):
            wire.step()
        poll = rdma.select.poll()
        poll.register(fd, rdma.select.POLLIN)
        return bool(poll.poll(0 if wire.under_way else 1))

    monkeypatch.setattr(rdma, "_wait_readable", readable)
    monkeypatch.setattr(rdma, "_WRITE_BYTES", 2 * PACKET_BYTES)
    monkeypatch.setattr(rdma, "_DEPTH", 3)


class Pair:
    """A home and a holder, each with the two slots of one shard."""

    def __init__(self, rng: random.Random, wire: Wire) -> None:
        self.rng, self.wire = rng, wire
        self.source, self.held = ([Memfd("gemini:t", BYTES, slot=True) for _ in (0, 1)] for _ in (0, 1))
        home, holder = (port(FakeVerbs(wire, name)) for name in ("home", "holder"))
        self.sources = [Registered(home, memory.view()) for memory in self.source]
        self.windows = [Registered(holder, memory.view()) for memory in self.held]
        self.slots = SlotPair()
        self.granted: dict[fake_verbs.QP, Stamp] = {}
        self.sealed: Stamp | None = None
        wire.landing = self._landing

    def _landing(self, pair: fake_verbs.QP, region: fake_verbs.MR) -> None:
        index = next(i for i, one in enumerate(self.windows) if one.region is region)
        slot = self.slots.slots[index]
        assert slot.state == "filling" and slot.stamp == self.granted[pair], f"R1: late bytes in {slot}"

    def check(self) -> None:
        """Check that a complete slot has the bytes that were verified."""
        for slot, memory in zip(self.slots.slots, self.held, strict=True):
            assert slot.state != "complete" or memory.digest(slot.bytes_used) == slot.digest, f"R5: {slot}"

    def push(self, version: int) -> bool:
        """Push a version, which is given up at any moment. Return whether it is complete."""
        rng, stamp, source = self.rng, Stamp(1, version), version % 2
        used = rng.randint(1, BYTES)
        with self.source[source].view() as view:
            view[:] = rng.randbytes(BYTES)
        index = self.slots.begin_version(stamp, self.sealed, frozenset(), voted=frozenset())
        wanted, arrived = self.source[source].digest(used), False
        left = rng.choice((rng.randint(0, 6), 1000))

        def check_alive() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Given

        window = None
        with suppress(Given), closing(Writer(self.sources[source])) as writer:
            window = Window(self.windows[index], writer.pair)
            self.granted[self.wire.pairs[b"holder".ljust(16, b"."), window.place.pair.number]] = stamp
            writer.connect(window.place)
            cuts = sorted({0, used, *(rng.randint(0, used) for _ in range(3))})
            for start, end in pairwise(cuts):
                writer.write(start, end - start, check_alive)
            arrived = True
        assert window is not None
        window.close()  # as `PushReceiver._await_writes`
        found = self.held[index].digest(used)
        if not arrived or found != wanted:
            self.slots.empty_slot(index)
            return False
        self.slots.complete_slot(index, stamp, found, used)
        self.sealed = stamp
        return True

    def run(self) -> int:
        """Push some versions; meanwhile and afterwards anything may arrive. Return how many are complete."""
        complete = 0
        for version in range(1, 8):
            complete += self.push(version)
            self.check()
            for _ in range(self.rng.choice((0, 3, 20))):
                self.wire.step()
                self.check()
        while self.wire.step():
            self.check()
        self.check()
        return complete

    def close(self) -> None:
        for one in (*self.sources, *self.windows):
            one.close()
        for memory in (*self.source, *self.held):
            memory.close()


def story(seed: int, monkeypatch: pytest.MonkeyPatch, *, lies: bool = False) -> int:
    rng = random.Random(seed)
    wire = Wire(rng)
    wire.lies = lies
    use(wire, monkeypatch)
    pair = Pair(rng, wire)
    try:
        return pair.run()
    finally:
        pair.close()


@given(seed=st.integers(0, 1 << 32), lies=st.booleans())
def test_no_version_with_late_bytes_is_ever_complete(seed: int, lies: bool) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        story(seed, monkeypatch, lies=lies)


def test_versions_do_become_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(story(seed, monkeypatch) for seed in range(20)) >= 20


def _no_end(window: Window) -> None:
    """The queue pair is left as it is."""


def _no_wait(window: Window) -> None:
    """The queue pair is put into ERROR, and what has begun to land is not waited for."""
    verbs = window._memory.port.verbs
    window._pair.modify(verbs.QPAttrMask.STATE, qp_state=verbs.QPState.ERR)


@pytest.mark.parametrize("broken", [_no_end, _no_wait])
def test_without_the_end_of_the_queue_pair_late_bytes_are_noticed(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of the test above."""
    monkeypatch.setattr(Window, "close", broken)
    with pytest.raises(AssertionError, match=r"R1|R5"):
        for seed in range(300):
            story(seed, monkeypatch)


# ---- a device that does not obey ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "ends_process"),
    [
        ({"modify_qp_err"}, False),
        ({"flush"}, False),
        ({"modify_qp_err", "destroy_qp"}, False),
        ({"modify_qp_err", "destroy_qp", "dereg_mr"}, True),
    ],
)
def test_the_slot_is_free_only_when_something_has_ended_the_writes(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, faults: set[str], ends_process: bool
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(rdma, "_end_process", lambda: ended.append(True))
    monkeypatch.setattr(rdma, "_DRAIN_S", 0.05)
    home, verbs = FakeVerbs(wire, "home"), FakeVerbs(wire, "holder")
    source, memory, empty = (Memfd("gemini:t", BYTES) for _ in range(3))
    registered, from_here = Registered(port(verbs), memory.view()), Registered(port(home), source.view())
    with closing(Writer(from_here)) as writer:
        window = Window(registered, writer.pair)
        writer.connect(window.place)
        verbs.faults = faults
        window.close()
        assert bool(ended) == ends_process
        with source.view() as view:
            view[:] = b"x" * BYTES
        with suppress(RdmaError, Given):
            writer.write(0, BYTES, lambda: None)
        if not ends_process:
            assert memory.digest(BYTES) == empty.digest(BYTES)
    verbs.faults = set()
    for one in (registered, from_here, source, memory, empty):
        one.close()


# ---- hostile peers -----------------------------------------------------------------------------------------


@pytest.fixture
def pair(wire: Wire) -> Iterator[Pair]:
    made = Pair(random.Random(2), wire)
    yield made
    made.close()


@pytest.mark.parametrize("how", ["other key", "other address", "before", "behind", "no such key", "after the end"])
def test_a_peer_reaches_nothing_but_the_slot_that_it_was_given(pair: Pair, how: str) -> None:
    """Slot 1 is complete while slot 0 is open."""
    pair.slots.complete_slot(
        pair.slots.begin_version(Stamp(1, 1), None, frozenset(), voted=frozenset()), Stamp(1, 1), "", 0
    )
    index = pair.slots.begin_version(Stamp(1, 2), Stamp(1, 1), frozenset(), voted=frozenset())
    mine, other = pair.windows[index], pair.windows[1 - index]
    before = [memory.digest(BYTES) for memory in pair.held]
    writer = Writer(pair.sources[0])
    window = Window(mine, writer.pair)
    pair.granted[pair.wire.pairs[b"holder".ljust(16, b"."), window.place.pair.number]] = Stamp(1, 2)
    lie = {
        "other key": {"key": other.region.rkey, "address": other.address},
        "other address": {"address": other.address},
        "before": {"address": mine.address - 1},
        "behind": {"address": mine.address + 1},
        "no such key": {"key": 77},
        "after the end": {},
    }[how]
    writer.connect(msgspec.structs.replace(window.place, **lie))
    if how == "after the end":
        window.close()
    with pytest.raises(RdmaError, match="RETRY_EXC_ERR" if how == "after the end" else "REM_ACCESS_ERR"):
        writer.write(BYTES - 10, 10, lambda: None) if how == "behind" else writer.write(0, 10, lambda: None)
    writer.close()
    window.close()
    assert [memory.digest(BYTES) for memory in pair.held] == before


def test_nobody_else_writes_through_a_window(pair: Pair) -> None:
    writer, stranger = Writer(pair.sources[0]), Writer(pair.sources[1])
    window = Window(pair.windows[0], writer.pair)
    stranger.connect(window.place)
    with pytest.raises(RdmaError, match="REM_ACCESS_ERR"):
        stranger.write(0, 10, lambda: None)
    for one in (stranger, writer, window):
        one.close()


def test_nobody_writes_into_a_home(pair: Pair) -> None:
    """A holder that turns a push round."""
    writer, back = Writer(pair.sources[0]), Writer(pair.windows[0])
    writer.connect(peer.WriteWindow(back.pair, 0, 0))
    back.connect(peer.WriteWindow(writer.pair, pair.sources[0].address, pair.sources[0].region.rkey))
    with pytest.raises(RdmaError, match="REM_ACCESS_ERR"):
        back.write(0, 10, lambda: None)
    back.close()
    writer.close()


@pytest.mark.parametrize(
    "change",
    [
        {"address": -1},
        {"address": 1 << 62},
        {"key": -1},
        {"key": 1 << 32},
        {"pair": {"number": 1 << 24}},
        {"pair": {"psn": -1}},
        {"pair": {"lid": 1 << 16}},
        {"pair": {"gid": b"\0" * 15}},
        {"pair": {"gid": b"\0" * 17}},
        {"pair": {"mtu": 0}},
        {"pair": {"mtu": 6}},
    ],
)
def test_numbers_that_no_device_has_are_refused(change: dict[str, Any]) -> None:
    pair = {"number": 1, "psn": 2, "lid": 3, "gid": b"\0" * 16, "mtu": 5} | change.get("pair", {})
    place = {"address": 1, "key": 2} | change | {"pair": peer.QueuePair(**pair)}
    wrong = peer.PushAnswer(window=peer.WriteWindow(**place))
    with pytest.raises(msgspec.MsgspecError):
        protocol.decoder.decode(protocol.encode(wrong))


# ---- trials, and why TCP serves ----------------------------------------------------------------------------


class Agents:
    """Two agents' devices, and a connection between the agents."""

    def __init__(self, wire: Wire, monkeypatch: pytest.MonkeyPatch, setting: Any = "auto") -> None:
        self.wire, self.said = wire, {"home": list[str](), "holder": list[str]()}
        self.verbs = {name: FakeVerbs(wire, name) for name in self.said}
        self.loop = asyncio.new_event_loop()
        self.rdma: dict[str, Rdma] = {}
        self.monkeypatch, self.setting = monkeypatch, setting
        keys = (b"a" * 32, b"b" * 32), (b"b" * 32, b"a" * 32)
        self.links = [
            BlockingLink(sock, SimpleNamespace(send_key=a, receive_key=b))  # type: ignore[arg-type]
            for sock, (a, b) in zip(socket.socketpair(), keys, strict=True)
        ]
        for link in self.links:
            link.sock.settimeout(2.0)

    def start(self) -> None:
        for name in self.said:
            self.monkeypatch.setattr(
                rdma, "importlib", SimpleNamespace(import_module=lambda _, n=name: self.module(n))
            )
            made = self.rdma[name] = Rdma(
                self.setting, lambda event, *, detail="", n=name, **_: self.said[n].append(f"{event}: {detail}")
            )
            made.start(self.loop.run_until_complete)  # type: ignore[arg-type]

    def module(self, name: str) -> FakeVerbs:
        if "import" in self.verbs[name].faults:
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return self.verbs[name]

    def trial(self) -> tuple[bool, bool]:
        """Return the home's result, and the holder's."""

        def serve() -> bool:
            trial = self.links[1].receive(peer.PushTrial)
            return self.rdma["holder"].serve_trial(self.links[1], trial, "home")

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            found = self.rdma["home"].try_holder(self.links[0], "holder")
            if not found and not served.done():
                self.links[0].shut()
            with suppress(LinkClosed):
                return found, served.result()
            return found, False

    def told(self, name: str) -> list[str]:
        self.loop.run_until_complete(asyncio.sleep(0))
        return self.said[name]

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.loop.close()


@pytest.fixture
def agents(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setattr(rdma, "TRIAL_BYTES", 5 * PACKET_BYTES)
    monkeypatch.setattr(rdma, "TRIAL_S", 0.5)
    made = Agents(wire, monkeypatch)
    yield made
    made.close()


def test_a_trial_finds_that_bytes_arrive(agents: Agents) -> None:
    agents.start()
    assert agents.trial() == (True, True)
    for name in agents.said:
        assert agents.told(name) == ["rdma: fake_0:1 is active; each peer is tried before a version goes that way"]
        assert agents.rdma[name].state == "fake_0:1"


def test_nothing_is_looked_for_where_it_is_off(agents: Agents) -> None:
    agents.setting = "off"
    agents.verbs["home"].faults = {"import"}
    agents.start()
    assert agents.told("home") == [] and agents.rdma["home"].state == "" and not agents.rdma["home"].is_ready


@pytest.mark.parametrize(
    ("setting", "faults", "reason"),
    [
        ("auto", {"import"}, "ibverbs cannot be imported: libibverbs.so.1: cannot open shared object file"),
        ("auto", {"get_device_list"}, "the devices: [Errno 5] ibv_get_device_list failed: Input/output error"),
        ("auto", {"port"}, "fake_0:1 is not active"),
        (("mlx5_0:1", "mlx5_1"), set(), "there is no mlx5_0; there is no mlx5_1"),
    ],
)
def test_the_reason_why_no_device_serves_is_told(agents: Agents, setting: Any, faults: set[str], reason: str) -> None:
    agents.setting, agents.verbs["home"].faults = setting, faults
    agents.start()
    assert agents.told("home") == [f"rdma: TCP instead of RDMA: {reason}"]
    assert agents.rdma["home"].state == f"TCP: {reason}" and not agents.rdma["home"].is_ready
    assert not agents.rdma["home"].try_holder(agents.links[0], "holder"), "and nothing is tried"


def test_devices_are_taken_in_the_order_of_the_setting(agents: Agents) -> None:
    agents.setting = ("mlx5_0", "fake_0")
    agents.start()
    assert agents.rdma["home"].state == "fake_0:1"


def test_a_device_that_cannot_be_opened_leaves_the_next_one(agents: Agents) -> None:
    good = agents.verbs["home"].get_device_list()
    bad = SimpleNamespace(name="bad_0", open=lambda: agents.verbs["home"].check("open_device"))
    agents.verbs["home"].faults = {"open_device"}
    for setting in ("auto", ("bad_0", "fake_0"), ("bad_0:1", "fake_0:1")):
        agents.setting = setting
        agents.monkeypatch.setattr(agents.verbs["home"], "get_device_list", lambda: [bad, *good])
        agents.start()
        assert agents.rdma["home"].state == "fake_0:1"
    agents.monkeypatch.setattr(agents.verbs["home"], "get_device_list", lambda: [bad])
    agents.setting = ("bad_0", "fake_0")
    agents.start()
    assert agents.rdma["home"].state.startswith("TCP: bad_0:")
    assert agents.rdma["home"].state.endswith("there is no fake_0")


@pytest.mark.parametrize(
    ("at", "fault", "reason"),
    [
        ("home", "create_qp", "no queue pair"),
        ("home", "reg_mr", "cannot be registered"),
        ("home", "modify_qp", "no connection"),
        ("holder", "create_qp", "no queue pair"),
        ("holder", "reg_mr", "cannot be registered"),
        ("holder", "modify_qp", "the queue pair"),
        ("holder", "dereg_mr", "the end of a registration"),
    ],
)
def test_a_trial_that_fails_leaves_the_peer_to_tcp(agents: Agents, at: str, fault: str, reason: str) -> None:
    agents.start()
    agents.verbs[at].faults = {fault}
    assert agents.trial() == (False, False)
    assert reason in agents.told("home")[-1] and agents.told("home")[-1].startswith(
        "rdma: TCP instead of RDMA: holder:"
    )
    assert reason in agents.rdma["home"].state
    agents.verbs[at].faults = set()
    count = len(agents.told("home"))
    assert not agents.rdma["home"].try_holder(agents.links[0], "holder"), "it rests"
    agents.rdma["home"].rest("holder", agents.rdma["home"].state.partition("holder: ")[2])
    assert len(agents.told("home")) == count, "and each reason is told once"


def test_a_home_whose_device_does_not_let_go_stays_with_tcp(agents: Agents) -> None:
    agents.start()
    agents.verbs["home"].faults = {"dereg_mr"}
    assert agents.trial() == (False, True), "the bytes have arrived"
    assert "the end of a registration" in agents.told("home")[-1]


def test_a_peer_that_is_back_is_no_reason_any_more(agents: Agents) -> None:
    agents.start()
    for name, other in (("home", "holder"), ("holder", "home")):
        agents.rdma[name].rest(other, "a link that flapped")
        assert agents.rdma[name].state == f"fake_0:1; TCP: {other}: a link that flapped"
    agents.monkeypatch.setattr(agents.rdma["home"], "_resting", {})
    assert agents.trial() == (True, True)
    assert [agents.rdma[name].state for name in agents.said] == ["fake_0:1", "fake_0:1"]
    agents.rdma["home"].rest("another", "a link that flapped")
    assert agents.trial() == (True, True)
    assert agents.rdma["home"].state == "fake_0:1; TCP: another: a link that flapped"


def test_a_trial_whose_bytes_change_on_the_way_fails(agents: Agents) -> None:
    agents.start()
    taken = fake_verbs.Packet.go_on
    agents.monkeypatch.setattr(
        fake_verbs.Packet,
        "go_on",
        lambda packet: taken(packet) if packet._data != b"" else False,
    )

    def damaged(pair: Any, region: Any) -> None:
        for packet in agents.wire.under_way:
            if isinstance(packet, fake_verbs.Packet) and packet._data:
                packet._data = bytes(len(packet._data))

    agents.wire.landing = damaged
    assert agents.trial() == (False, False)
    assert "have not arrived" in agents.told("home")[-1] and "have not arrived" in agents.told("holder")[-1]


def test_a_trial_without_an_answer_of_the_device_ends(agents: Agents) -> None:
    agents.start()
    agents.monkeypatch.setattr(agents.wire, "step", lambda: False)
    agents.monkeypatch.setattr(rdma, "_DRAIN_S", 0.1)
    began = time.monotonic()
    assert agents.trial() == (False, False)
    assert time.monotonic() - began < 5 and "within 0.5 s" in agents.told("home")[-1]


# ---- registrations -----------------------------------------------------------------------------------------


def registered(device: Rdma, memory: Memfd) -> Registered:
    until(lambda: device.find_registration(memory) is not None, what="the registration")
    found = device.find_registration(memory)
    assert found is not None
    return found


def test_a_slot_is_registered_beside_the_versions_until_its_memory_goes(agents: Agents) -> None:
    agents.start()
    memory = Memfd("gemini:t", BYTES, slot=True)
    assert agents.rdma["home"].open_writer(memory) is None, "the first version goes over TCP"
    made = registered(agents.rdma["home"], memory)
    assert agents.rdma["home"].find_registration(memory) is made
    memory.close()
    assert made.region.closed and agents.rdma["home"].find_registration(memory) is None
    assert memory._map is None


def test_memory_that_goes_while_it_is_registered_is_let_go(agents: Agents) -> None:
    agents.start()
    memory, goes_on = Memfd("gemini:t", BYTES, slot=True), threading.Event()
    made: list[Registered] = []

    class Slow(Registered):
        def __init__(self, *args: Any) -> None:
            goes_on.wait(10)
            super().__init__(*args)
            made.append(self)

    agents.monkeypatch.setattr(rdma, "Registered", Slow)
    assert agents.rdma["home"].find_registration(memory) is None
    memory.close()
    goes_on.set()
    until(lambda: bool(made) and made[0].region.closed, what="the end of the registration")


def test_a_limit_of_locked_memory_leaves_a_slot_to_tcp(agents: Agents) -> None:
    agents.start()
    agents.verbs["home"].faults = {"reg_mr"}
    memory = Memfd("gemini:t", BYTES, slot=True)
    assert agents.rdma["home"].open_writer(memory) is None
    until(lambda: "ulimit -l" in agents.told("home")[-1], what="the reason")
    agents.verbs["home"].faults = set()
    assert agents.rdma["home"].open_writer(memory) is None, "it is not tried again"
    memory.close()


def test_a_window_is_refused_where_the_device_has_no_room(agents: Agents) -> None:
    agents.start()
    memory = Memfd("gemini:t", BYTES, slot=True)
    registered(agents.rdma["holder"], memory)
    agents.verbs["holder"].faults = {"create_qp"}
    assert agents.rdma["holder"].open_window(memory, peer.QueuePair(1, 2, 3, b"\0" * 16, 5)) is None
    assert "no queue pair" in agents.told("holder")[-1]
    memory.close()
