"""The processors that an agent uses: measured by itself, version by version, and bounded by rarer versions.

An agent hashes, sends and receives at a low priority, on cores that nobody wants. That bounds no average: a training
whose versions follow each other fast could have its agents busy all the time. Hence the agent shows its ranks what a
version takes and what it may use (`wire.control_page`). The ranks save as rarely as needed, like on a slow link.
"""

from __future__ import annotations

import os
import resource
from collections import deque
from collections.abc import Callable
from statistics import median

from gemini_hpc import clock
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.config import Settings
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.inspect_schema import CpuState

LEAST_CORES = 0.5
SHARE = 16  # one core in so many, unless the site says otherwise
_LATEST = 8  # versions that the median is taken of
_LEAST = 3  # versions before which nothing is bounded: the first ones also map memory
_EVERY_S, _SAMPLES = 5.0, 13  # the average is over the last minute


def compute_allowed_cores(settings: Settings) -> float:
    """Return the average number of cores that one agent may use."""
    return settings.agent_cores or max(LEAST_CORES, (os.cpu_count() or 1) / SHARE)


def _measure_core_seconds() -> float:
    """Return the core-seconds of this process so far, of all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class _Versions:
    """The latest sealed versions of a training: the last one, the core-seconds before it, and what each has taken."""

    def __init__(self) -> None:
        self.last: Stamp | None = None
        self.at_s = 0.0
        self.taken_s: deque[float] = deque(maxlen=_LATEST)
        self.bytes: deque[int] = deque(maxlen=_LATEST)


class CpuUse:
    """The processors that this agent uses."""

    def __init__(
        self, settings: Settings, store: Store, read_used_s: Callable[[], float] = _measure_core_seconds
    ) -> None:
        """Begin to measure.

        Args:
            settings: The site's settings.
            store: Shards of this node.
            read_used_s: Returns the core-seconds that this process has used.
        """
        self._store, self._read_used_s = store, read_used_s
        self._allowed_cores = compute_allowed_cores(settings)
        self._versions: dict[str, _Versions] = {}
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def take_sample(self, now: float) -> None:
        """Take a sample for the average, if one is due (monotonic seconds)."""
        if not self._samples or now - self._samples[-1][0] >= _EVERY_S:
            self._samples.append((now, self._read_used_s()))

    def record_seal(self, training: Training, stamp: Stamp) -> None:
        """Record a seal, and show the training's ranks what a version takes.

        All core-seconds since the seal before count, whatever they were for. An incarnation's first seal only begins
        the measurement, because a recovery is no version.
        """
        versions = self._versions.setdefault(training.name, _Versions())
        last, used_s = versions.last, self._read_used_s()
        if last is not None and stamp <= last:
            return
        if last is not None and stamp.epoch == last.epoch:
            versions.taken_s.append(used_s - versions.at_s)
            versions.bytes.append(self._count_bytes(training.name, stamp))
        versions.last, versions.at_s = stamp, used_s
        if len(versions.taken_s) >= _LEAST:
            training.page.set_cpu(median(versions.taken_s), self._allowed_cores)

    def _count_bytes(self, name: str, stamp: Stamp) -> int:
        """Return the bytes of all copies of a version on this node."""
        slots = (slot for shard in self._store.list_all() if shard.training == name for slot in shard.pair.slots)
        return sum(slot.bytes_used for slot in slots if slot.stamp == stamp)

    def build_state(self) -> CpuState:
        """Return the figures for `gemini-hpc inspect`; those of a version are of the training that takes most."""
        measured = [v for v in self._versions.values() if v.taken_s]
        costliest = max(measured, key=lambda v: median(v.taken_s), default=None)
        version_s = gb_s = None
        if costliest is not None:
            version_s, total = median(costliest.taken_s), sum(costliest.bytes)
            gb_s = 1e9 * sum(costliest.taken_s) / total if total else None
        return CpuState(self._measure_cores(), self._allowed_cores, version_s, gb_s)

    def _measure_cores(self) -> float:
        now, used_s = clock.monotonic(), self._read_used_s()
        then, before_s = self._samples[0] if self._samples else (now, used_s)
        return max(0.0, used_s - before_s) / (now - then) if now > then else 0.0
