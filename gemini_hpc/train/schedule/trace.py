"""The record of one iteration of the training, and its conversion to a trace."""

from __future__ import annotations

import math
from collections.abc import Callable

from gemini_hpc import clock
from gemini_hpc.core.spans import Op, Trace
from gemini_hpc.train.device.interface import Event


class OperationRecord:
    """A recorded operation, timed by the monotonic clock or by two events of the device."""

    __slots__ = ("bytes", "end_s", "events", "kind", "receives", "start_s")

    def __init__(self, kind: int, size_bytes: int, start_s: float) -> None:
        self.kind, self.bytes = kind, size_bytes
        self.start_s, self.end_s = start_s, math.nan
        self.events: tuple[Event, Event] | None = None
        self.receives = False


class Iteration:
    """The records of one iteration of the training."""

    def __init__(self, whole: bool, event: Event | None = None) -> None:
        """Begin a record of an iteration.

        Args:
            whole: Whether the iteration is recorded from its beginning.
            event: The device's position at the beginning; None where no device is watched.
        """
        self.started_s = clock.monotonic()
        self.whole, self.event = whole, event
        self.gate_s: float | None = None
        self.gate_event: Event | None = None
        self.passed_event: Event | None = None
        self.records: list[OperationRecord] = []

    def has_all_times(self, following: Iteration) -> bool:
        """Return whether the device has reached the iteration's end, so that all its times are known."""
        events = [record.events[1] for record in self.records if record.events is not None]
        marks = [*events, self.passed_event] if self.passed_event is not None else events
        return not events or (following.event is not None and all(e.query() for e in [*marks, following.event]))

    @property
    def held_s(self) -> float | None:
        """Return the seconds that the device waited at the gate; None where unknown."""
        if self.gate_event is None or self.passed_event is None:
            return None
        return max(0.0, self.passed_event.count_seconds_since(self.gate_event))

    def build_trace(
        self, following: Iteration, bytes_per_s: float, host_s: Callable[[Event], float] | None = None
    ) -> Trace:
        """Return the trace of the iteration.

        A receive counts as busy only for its bytes' time at `bytes_per_s` before its end. Without a recorded end, a
        receive counts no time, and any other operation is busy until the iteration's end.

        Args:
            following: The next iteration; its beginning is the end of this one.
            bytes_per_s: Rate of one operation.
            host_s: Returns the host clock's time at which the device reached an event.
        """
        event, on_device = self.event, any(record.events is not None for record in self.records)
        started_s = self.started_s
        length_s = following.started_s - started_s
        gate_s = length_s if self.gate_s is None else self.gate_s - started_s
        if on_device:
            assert event is not None and following.event is not None
            length_s = following.event.count_seconds_since(event)
            gate_s = length_s if self.gate_event is None else max(0.0, self.gate_event.count_seconds_since(event))
            started_s = host_s(event) if host_s is not None else started_s
        ops = []
        for record in self.records:
            if record.events is not None:
                start_s, end_s = (mark.count_seconds_since(event) for mark in record.events)
            else:
                start_s, end_s = record.start_s - started_s, record.end_s - started_s
            start_s = min(max(start_s, 0.0), length_s)
            if math.isnan(end_s):
                end_s = start_s if record.receives else length_s
            end_s = min(max(end_s, start_s), length_s)
            if record.receives:
                start_s = max(start_s, end_s - record.bytes / bytes_per_s)
            ops.append(Op(record.kind, record.bytes, start_s, end_s))
        return Trace(started_s, length_s, min(gate_s, length_s), tuple(ops))
