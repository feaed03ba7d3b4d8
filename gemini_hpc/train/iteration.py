"""One iteration of the training as it is recorded, and what becomes of it: a trace."""

from __future__ import annotations

import math
import time
from typing import Any

from gemini_hpc.core.spans import Op, Trace
from gemini_hpc.train.streams import Streams


class Record:
    """One operation. Its times are the monotonic clock's, or two events of the device."""

    __slots__ = ("bytes", "end_s", "events", "kind", "receives", "start_s")

    def __init__(self, kind: int, size_bytes: int, start_s: float) -> None:
        self.kind, self.bytes = kind, size_bytes
        self.start_s, self.end_s = start_s, math.nan
        self.events: tuple[Any, Any] | None = None
        self.receives = False


class Iteration:
    """whole: recorded from its beginning; event: where the device was then, if it is of interest."""

    def __init__(self, whole: bool, event: Any = None) -> None:
        self.started_s = time.monotonic()
        self.whole, self.event = whole, event
        self.gate_s: float | None = None
        self.gate_event: Any = None
        self.records: list[Record] = []

    def known(self, following: Iteration) -> bool:
        """False while the device has not come to the end of it."""
        events = [record.events[1] for record in self.records if record.events is not None]
        return not events or (following.event is not None and all(e.query() for e in [*events, following.event]))

    def trace(self, following: Iteration, bytes_per_s: float) -> Trace:
        """What a receive needs before its end is by `bytes_per_s`; what had not ended is busy until the end."""
        on_device = any(record.events is not None for record in self.records)
        length_s = following.started_s - self.started_s
        gate_s = length_s if self.gate_s is None else self.gate_s - self.started_s
        if on_device:
            length_s = Streams.between_s(self.event, following.event)
            gate_s = length_s if self.gate_event is None else Streams.between_s(self.event, self.gate_event)
        ops = []
        for record in self.records:
            if record.events is not None:
                start_s, end_s = (Streams.between_s(self.event, event) for event in record.events)
            else:
                start_s, end_s = record.start_s - self.started_s, record.end_s - self.started_s
            start_s = min(max(start_s, 0.0), length_s)
            if math.isnan(end_s):
                end_s = start_s if record.receives else length_s
            end_s = min(max(end_s, start_s), length_s)
            if record.receives:
                start_s = max(start_s, end_s - record.bytes / bytes_per_s)
            ops.append(Op(record.kind, record.bytes, start_s, end_s))
        return Trace(self.started_s, length_s, min(gate_s, length_s), tuple(ops))
