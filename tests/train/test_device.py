"""A training whose host runs far ahead of its device: copies go in the device's idle spans, not in the host's.

Watch, pacer, profile and plan are the real ones. The device and the link live in a time of their own, so that a
second of them takes none of ours, and every run is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.modellink import ModelLink
from gemini_hpc.core import spans
from gemini_hpc.core.ranges import merge_ranges
from gemini_hpc.core.spans import Profile, Trace
from gemini_hpc.train.device.progress import Front
from gemini_hpc.train.schedule import collective_monitor as watch_module
from gemini_hpc.train.schedule import trace as iteration_module
from gemini_hpc.train.schedule.chunk_schedule import Route, find_common_windows
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.dispatch_hooks import Signature
from gemini_hpc.train.schedule.launch_count import GroupWeights
from gemini_hpc.train.schedule.overhead_monitor import subtract_wait
from gemini_hpc.train.schedule.pacer import Pacer

from .timed_device import TimedDevice

COLLECTIVES, COMPUTE_S, COLLECTIVE_S, OPTIMIZER_S = 6, 0.020, 0.010, 0.005
B, ALPHA, CHUNK_BYTES, P, STEP_BYTES = 1e8, 1e-4, 1 << 20, 4, 1 << 18
SHARD_BYTES = 6 << 20  # 63 ms of the link's time, in 120 ms of idle spans
_REDUCE = Signature("allreduce_", 0, (1,), None)
_GROUP = SimpleNamespace(
    find_backend=lambda device: "nccl",
    on_network=True,
    size=2,
    derive_kind=lambda name, size_bytes: hash((name, size_bytes)),
    weights=GroupWeights([], 0, None),
)


class Training:
    """Of one rank: each version is sealed before the optimizer's step, and the host waits for nothing else."""

    def __init__(self, device: TimedDevice, watch: CollectiveMonitor, pacer: Pacer) -> None:
        self.device, self.watch, self.pacer = device, watch, pacer
        self.version = 0
        self.sealed = -1
        self.waits = False
        self.begun: dict[int, Any] = {}  # versions: the mark at their step()
        self.traces: list[Trace] = []
        self.launched_at: list[float] = []
        self._tensor = SimpleNamespace(is_meta=False, is_cuda=True, nbytes=1000, device="cuda:0")
        self.link = ModelLink(device.clock, B, ALPHA, STEP_BYTES)
        self.spilled_bytes = 0

    def step(self) -> None:
        """step(), and what the host does after it until it has to wait."""
        trace = self.watch.mark()
        if trace is not None:
            assert self.watch.held_s is not None
            self.traces.append(subtract_wait(trace, self.watch.held_s))
        self.version += 1
        self.pacer.begin_iteration(self.version)
        self.begun[self.version] = self.device.record_mark()
        for _ in range(COLLECTIVES):
            self.device.compute(COMPUTE_S)
            args = (None, self._tensor)
            begun = self.watch._on_launching(_REDUCE, args)
            self.device.collective(COLLECTIVE_S)
            self.watch._on_launched(_REDUCE, args, None, begun)
            self.device.join()
            self.launched_at.append(self.device.now)
        self.watch.record_gate_reached()
        self.waits = True
        self.pacer.record_wait()

    def pass_gate(self) -> None:
        """The version is sealed."""
        self.waits = False
        self.watch.record_gate_passed()
        self.pacer.record_gate_passed()
        self.device.compute(OPTIMIZER_S)
        self.step()

    def send(self, version: int) -> None:
        """As the replicator does it, over a link of B bytes a second."""
        device, pacer = self.device, self.pacer
        device.until(self.begun[version].query)  # the copy into the own slot
        pacer.begin_version(version)
        if self.waits:
            pacer.record_wait()
        link = self.link
        link.begin(SHARD_BYTES)
        pacer.deliver(0, SHARD_BYTES, link)
        arrives_at = link.all_arrives_at()
        device.until(lambda: device.now >= arrives_at)
        pacer.record_delivery(0)
        self.spilled_bytes += pacer.spilled_bytes
        device.at(device.now, self.pass_gate)

    def run(self, versions: int) -> None:
        """Save so many more."""
        self.link.chunks, self.spilled_bytes = [], 0
        for _ in range(versions):
            version = self.version
            self.send(version)
            self.device.until(lambda version=version: self.version > version)  # type: ignore[misc]

    def profile(self) -> Profile:
        return spans.summarize_traces(self.traces[1:])

    def beside(self) -> float:
        """Share of the chunks' time beside collectives of the device."""
        busy = merge_ranges((a, b) for a, b, _ in self.link.chunks)
        both = spans.intersect_intervals(busy, merge_ranges(self.device.collectives))
        return sum(b - a for a, b in both) / sum(b - a for a, b in busy)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    device = TimedDevice()
    clock = SimpleNamespace(monotonic=device.clock)
    for module in (watch_module, iteration_module):
        monkeypatch.setattr(module, "clock", clock)
    watch = CollectiveMonitor(lambda ranks: True, device=lambda: device)
    watch.start()
    assert not watch.problem
    monkeypatch.setattr(watch, "_find_group", lambda boxed: _GROUP)
    monkeypatch.setattr(watch._reached, "wait", device.wait)
    pacer = Pacer(CHUNK_BYTES, P, clock=device.clock)
    monkeypatch.setattr(pacer._hurry, "wait", device.wait)
    pacer.traffic, pacer.deferred = watch, True
    watch.recording = True
    made = Training(device, watch, pacer)
    made.step()
    yield made
    watch.stop()
    assert not watch.problem


def follow(training: Training) -> Profile:
    """Plan on what has been recorded."""
    profile = training.profile()
    windows = find_common_windows(profile, [(profile, 0.0)])
    route = Route(profile, windows, SHARD_BYTES, 2, CHUNK_BYTES * P, P, B, ALPHA, 0.95)
    assert route.plan(1).fits
    training.pacer.timetable, training.pacer.deferred = route.build_timetable(1), False
    return profile


def test_the_profile_is_the_devices(training: Training) -> None:
    training.run(8)
    profile = training.profile()
    assert len(set(training.launched_at[-COLLECTIVES:])) == 1, "the host launches all of an iteration at once"
    assert profile.ops == COLLECTIVES
    assert profile.iteration_s == pytest.approx(COLLECTIVES * (COMPUTE_S + COLLECTIVE_S) + OPTIMIZER_S, rel=0.01)
    assert profile.gate_s == pytest.approx(COLLECTIVES * (COMPUTE_S + COLLECTIVE_S), rel=0.01)
    lengths = [s.length_s for s in profile.spans if s.before_gate and s.length_s > 1e-3]
    assert lengths == [pytest.approx(COMPUTE_S, rel=0.01)] * COLLECTIVES


def test_while_it_is_profiled_nothing_is_sent_before_the_device_has_come_to_the_optimizer(training: Training) -> None:
    training.run(4)
    assert training.beside() < 0.01
    assert sum(size for _, _, size in training.link.chunks) == 4 * SHARD_BYTES


@pytest.mark.witness("checkpoint traffic goes in the idle spans of the training's own")
def test_bytes_go_in_planned_spans_of_the_device(training: Training) -> None:
    """Where the host's launches are followed, 93 % of them go when it has come to the optimizer, at once."""
    training.run(8)
    follow(training)
    training.run(1)
    training.run(10)
    assert sum(size for _, _, size in training.link.chunks) == 10 * SHARD_BYTES
    assert training.spilled_bytes == 0
    assert training.beside() < 0.02
    # the device goes on from the gate as if nobody had waited there
    assert training.watch.held_s == pytest.approx(0.0, abs=1e-4)


def test_what_is_left_goes_when_the_device_has_come_to_the_optimizer(training: Training) -> None:
    training.run(8)
    profile = follow(training)
    training.run(1)
    table = training.pacer.timetable
    assert table is not None
    training.pacer.timetable = type(table)(
        tuple(w._replace(length_s=w.length_s / 8) for w in table.windows), table.chunks, 1, table.usual_s, B, ALPHA
    )
    training.run(4)
    assert training.spilled_bytes > SHARD_BYTES
    begun = [mark.at for mark in training.begun.values()]
    late = [began for began, _, size in training.link.chunks if size == STEP_BYTES]  # larger than any window
    assert late and all(began - max(at for at in begun if at <= began) > profile.gate_s - 1e-3 for began in late)


def test_who_waits_is_patient_until_the_device_has_come(training: Training) -> None:
    training.run(2)
    training.pacer.deferred = True
    training.pacer.begin_version(training.version)
    training.pacer.record_wait()
    training.device.wait(0.1)
    assert training.pacer.arrived_at == training.pacer.progress_at == training.device.now
    training.device.wait(0.1)
    there = training.pacer.arrived_at
    training.device.wait(0.5)
    assert training.pacer.arrived_at == there < training.device.now
    training.pacer.hurry()


def test_collectives_of_several_streams_and_laps() -> None:
    """One that begins before an earlier one is in flight, but does not count until that one has begun."""
    device = TimedDevice()
    front = Front(device.record_mark(), device.clock)

    def mark(at: float) -> Any:
        found = device.record_mark()
        found.at = at
        return found

    device.now = 0.001
    front.poll_position()
    front.record_collective(mark(5.0), mark(6.0))
    front.record_collective(mark(1.0), mark(2.0))
    front.record_arrival(mark(7.0))
    front.record_pass(mark(7.5))
    front.begin_iteration(mark(8.0))
    front.record_collective(mark(9.0), mark(9.5))
    seen = []
    for now in (0.5, 1.5, 3.0, 5.5, 6.5, 7.2, 7.6, 8.5, 9.2, 10.0):
        device.now = now
        place = front.poll_position()
        seen.append((place.lap, place.behind, place.launched, place.flying, place.passed_at is not None))
    assert seen == [
        (0, 1, 0, 0, False),
        (0, 1, 0, 1, False),
        (0, 1, 0, 0, False),
        (0, 1, 2, 1, False),
        (0, 1, 2, 0, False),
        (0, 1, 2, 0, False),
        (0, 1, 2, 0, True),
        (1, 0, 0, 0, False),
        (1, 0, 1, 1, False),
        (1, 0, 1, 0, False),
    ]
    assert front.waited_s == pytest.approx(0.5)
    assert front.quiet_since == pytest.approx(9.5, abs=0.01), "when it ended, not when that was seen"


def test_what_is_gathered_in_a_bracket_is_taken_to_need_the_time_of_its_bytes(training: Training) -> None:
    device, watch = training.device, training.watch
    training.run(2)
    training.pacer.hurry()
    training.pass_gate()
    device.wait(2.0)
    device.grouped, watch.bytes_per_s = True, 1e4
    begun = watch._on_launching(_REDUCE, (None, training._tensor))
    watch._on_launched(_REDUCE, (None, training._tensor), None, begun)
    flying = []
    for _ in range(4):  # 1000 bytes in 0.1 s
        device.wait(0.04)
        flying.append(watch.count_in_flight())
    assert flying == [1, 1, 1, 0]


def test_nobody_waits_for_a_device_that_stands_still() -> None:
    device = TimedDevice()
    front = Front(device.record_mark(), device.clock)
    device.compute(1000.0)
    front.record_arrival(device.record_mark())
    device.now = 1.0
    assert not front.poll_position().at_gate
    device.now = 40.0
    assert front.poll_position().at_gate
