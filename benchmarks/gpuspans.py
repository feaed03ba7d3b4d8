"""Part of `benchmarks.gpu`: which part of a version goes in idle spans where a host runs ahead of its device.

One rank saves a version in each iteration: copied out of the device, then chunk by chunk over a link that only takes
the time. Watch, pacer, profile and plan are those of a training; its collectives are of a process group of one rank.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from benchmarks.modellink import ModelLink
from gemini_hpc.core import spans
from gemini_hpc.core.spans import Trace
from gemini_hpc.train.device.host_copy import HostCopies
from gemini_hpc.train.device.interface import Event
from gemini_hpc.train.device.progress import Device
from gemini_hpc.train.schedule.chunk_schedule import Route, find_common_windows
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.overhead_monitor import Pictured, subtract_wait
from gemini_hpc.train.schedule.pacer import Pacer

PROFILED, MU, ALPHA_S, P = 8, 0.95, 1e-4, 4
USED = 0.5  # of the idle time is what the link needs for a version
PATIENCE_S = 20.0


class NotMeasured(Exception):
    """Why there is no figure."""


class Load(Protocol):
    """What a training gives its device. Calls return at once, as far as the device lets them."""

    layers: int

    def compute(self) -> None:
        """Of one layer."""

    def collective(self) -> None:
        """After it."""

    def optimizer(self) -> None:
        """At the end of an iteration."""

    def synchronize(self) -> None:
        """Wait for all of it."""


@dataclass
class Found:
    """seconds of an iteration with and without copies; share: of the bytes, that went in planned spans; beside: share
    of the time that chunks were on their way, beside collectives; ahead_s: from when the host had launched an
    iteration until the device was at its end; held_s: wait of the device at the optimizer; launch_s: of the host's
    time, for the marks at a collective; step_s: for those at the optimizer and at step()."""

    alone_s: float = 0.0
    with_copies_s: float = 0.0
    share: float = 0.0
    beside: float = 0.0
    ahead_s: float = 0.0
    held_s: float = 0.0
    launch_s: float = 0.0
    step_s: float = 0.0
    spans: list[float] = field(default_factory=list)


class _Rank:
    def __init__(
        self, load: Load, device: Device, copies: HostCopies, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self.load, self.copies, self.pairs = load, copies, pairs
        self.bytes = sum(source.nbytes for _, source in pairs)
        self.watch = CollectiveMonitor(lambda ranks: True, device=lambda: device)
        self.pacer = Pacer(8 << 20, P)
        self.pacer.traffic, self.pacer.deferred = self.watch, True
        self.rate = 1e10
        self.link = ModelLink(time.monotonic, self.rate, ALPHA_S, 1 << 20)
        self.traces: list[Trace] = []
        self.held: list[float] = []
        self.pictures: list[Pictured] = []
        self.spilled_bytes = 0
        self.version = 0
        self._jobs: queue.SimpleQueue[tuple[int, Event] | None] = queue.SimpleQueue()
        self._sealed = threading.Semaphore(0)
        self._waiting = False
        self._problem = ""
        self._thread = threading.Thread(target=self._send, name="gpuspans", daemon=True)

    def start(self) -> None:
        self.watch.start()
        self.watch.recording = True
        self._step()
        self._thread.start()

    def stop(self) -> None:
        self.pacer.end()
        self._jobs.put(None)
        self._thread.join(PATIENCE_S)
        self.watch.stop()

    def _step(self) -> None:
        trace = self.watch.mark()
        self.version += 1
        self.pacer.begin_iteration(self.version)
        if trace is not None and self.watch.held_s is not None:
            self.traces.append(subtract_wait(trace, self.watch.held_s))
            self.held.append(self.watch.held_s)
            number = self.version - 1 - self.watch.ago
            self.pictures.append(Pictured(number, trace, tuple(self.pacer.journal), (), self.watch.held_s))

    def iteration(self) -> float:
        """Save a version in it. How long the host was ahead of the device at the optimizer."""
        self._jobs.put((self.version, self.copies.record_mark()))
        for _ in range(self.load.layers):
            self.load.compute()
            self.load.collective()
        self.watch.record_gate_reached()
        launched = time.monotonic()
        self._waiting = True
        self.pacer.record_wait()
        if not self._sealed.acquire(timeout=PATIENCE_S):
            raise NotMeasured(self._problem or f"a version did not arrive within {PATIENCE_S:g} s")
        self._waiting = False
        ahead_s = max(0.0, self.pacer.arrived_at - launched)
        self.watch.record_gate_passed()
        self.pacer.record_gate_passed()
        self.load.optimizer()
        self._step()
        return ahead_s

    def _send(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                version, ready = job
                self.copies.bring(ready, self.pairs)
                self.pacer.begin_version(version)
                if self._waiting:
                    self.pacer.record_wait()
                self._spread()
                self.spilled_bytes += self.pacer.spilled_bytes
                self._sealed.release()
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"

    def _spread(self) -> None:
        link = self.link
        link.rate = self.rate
        link.begin(self.bytes)
        self.pacer.deliver(0, self.bytes, cast(Any, link))
        time.sleep(max(0.0, link.all_arrives_at() - time.monotonic()))
        self.pacer.record_delivery(0)


def measure(
    load: Load,
    device: Device,
    copies: HostCopies,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    iterations: int,
) -> Found:
    """pairs: replica memory, and what is copied into it. Raises NotMeasured."""
    found = Found(alone_s=_alone(load, iterations))
    rank = _Rank(load, device, copies, pairs)
    rank.start()
    try:
        for _ in range(PROFILED + 3):
            rank.iteration()
        if len(rank.traces) < PROFILED // 2:
            raise NotMeasured(
                f"{len(rank.traces)} iterations were recorded: {rank.watch.problem or 'no reason known'}"
            )
        profile = spans.summarize_traces(rank.traces[1:])
        found.spans = [span.length_s for span in profile.spans if span.before_gate]
        rank.rate = rank.bytes / (USED * max(sum(found.spans), 1e-3))
        windows = find_common_windows(profile, [(profile, 0.0)])
        route = Route(profile, windows, rank.bytes, 2, P * rank.pacer.chunk_bytes, P, rank.rate, ALPHA_S, MU)
        rank.pacer.timetable, rank.pacer.deferred = route.build_timetable(1), False
        for _ in range(2):
            rank.iteration()
        rank.spilled_bytes = 0
        rank.pictures, rank.held = [], []
        began = time.monotonic()
        ahead = [rank.iteration() for _ in range(iterations)]
        load.synchronize()
        found.with_copies_s = (time.monotonic() - began) / iterations
        found.share = 1 - rank.spilled_bytes / (iterations * rank.bytes)
        found.ahead_s = statistics.median(ahead)
        found.held_s = statistics.median(rank.held)
        overlaps = [picture.measure_overlap() for picture in rank.pictures]
        found.beside = sum(o[2] for o in overlaps) / max(1e-9, sum(o[1] for o in overlaps))
        found.step_s = _step_s(rank.watch)
        found.launch_s = _launch_s(load, rank.watch)
        if rank.watch.problem:
            raise NotMeasured(rank.watch.problem)
    finally:
        rank.stop()
    return found


def _alone(load: Load, iterations: int) -> float:
    def iteration() -> None:
        for _ in range(load.layers):
            load.compute()
            load.collective()
        load.optimizer()

    for _ in range(3):
        iteration()
    load.synchronize()
    began = time.monotonic()
    for _ in range(iterations):
        iteration()
    load.synchronize()
    return (time.monotonic() - began) / iterations


def _launch_s(load: Load, watch: CollectiveMonitor, times: int = 64) -> float:
    """What the watch adds to the launch of a collective, on the host."""

    def usual_s() -> float:
        took = []
        for _ in range(times):
            began = time.perf_counter()
            load.collective()
            took.append(time.perf_counter() - began)
        load.synchronize()
        return statistics.median(took)

    watched_s = usual_s()
    watch.stop()
    return watched_s - usual_s()


def _step_s(watch: CollectiveMonitor, times: int = 64) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        watch.record_gate_reached()
        watch.record_gate_passed()
        watch.mark()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def rows(found: Found, row: Callable[[str, str], None]) -> None:
    """For people."""
    lengths = ", ".join(f"{length * 1e3:.1f}" for length in found.spans[:6])
    row(f"spans: idle before the optimizer, ms ({lengths} ...)", f"{sum(found.spans) * 1e3:.1f} ms")
    row("spans: the host is ahead of the device by", f"{found.ahead_s * 1e3:.1f} ms")
    row("spans: bytes that went in planned spans", f"{found.share:.1%}")
    row("spans: time of chunks beside collectives", f"{found.beside:.1%}")
    row("spans: wait of the device at the optimizer", f"{found.held_s * 1e3:.2f} ms")
    row("spans: an iteration without copies", f"{found.alone_s * 1e3:.2f} ms")
    row("spans: with a version in each", f"{found.with_copies_s / found.alone_s - 1:+.2%}")
    row("step: host's time for the marks at a collective", f"{found.launch_s * 1e6:.0f} us")
    row("step: host's time for the marks at optimizer and step()", f"{found.step_s * 1e6:.0f} us")
