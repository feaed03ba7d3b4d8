"""Power cuts at random moments while jobs run: a node with a job loses its power, and comes back later."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from gemini_hpc import clock
from gemini_hpc.core import hostlist
from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.durations import format_time

LOOK_S = 0.5  # short beside the pauses between two faults
BACK_S = 60.0  # seconds within which Slurm has to use a node again
_LOST = ("down", "drain", "fail", "unk", "reboot")


@dataclass(frozen=True)
class Weather:
    """The plan of the power cuts; the same seed and the same nodes with jobs give the same cuts.

    Attributes:
        mtbf_s: Mean time between two cuts in seconds, exponentially distributed.
        every_s: In place of `mtbf_s`: the constant time between two cuts in seconds.
        repair_s: Seconds from a cut until the node has power again.
        duration_s: Seconds until the last cut, None: until no job is left.
        seed: Seed of the random numbers.
        spare: Nodes that are never cut.
    """

    mtbf_s: float = 0.0
    every_s: float = 0.0
    repair_s: float = 30.0
    duration_s: float | None = None
    seed: int | None = None
    spare: Sequence[str] = ()


class ChaosEvent(msgspec.Struct, frozen=True):
    """An event of a run.

    Attributes:
        t: Unix time in seconds.
        after_s: Seconds since the beginning.
        event: "begin", "cut", "on", "back", "none", "stuck" or "end".
        node: The node's name, if any.
        jobs: The jobs that ran on the node.
        detail: A sentence.
    """

    t: float
    after_s: float
    event: str
    node: str = ""
    jobs: list[int] = []
    detail: str = ""

    def __str__(self) -> str:
        stamp = format_time(self.t, "%H:%M:%S")
        jobs = f" (job {', '.join(map(str, self.jobs))})" if self.jobs else ""
        words = " ".join(word for word in (self.event, self.node) if word)
        return f"{stamp} {self.after_s:+8.1f} s  {words}{jobs}{f': {self.detail}' if self.detail else ''}"


def draw_cut_times(weather: Weather, chance: random.Random) -> Iterator[float]:
    """Yield the times of the cuts, in seconds after the beginning."""
    at = 0.0
    while True:
        at += weather.every_s or chance.expovariate(1.0 / weather.mtbf_s)
        yield at


@dataclass
class _Repair:
    node: str
    due: float
    on: bool = False
    good: int = 0


class Chaos:
    """A run of power cuts; `tell` is called with each event at once."""

    def __init__(self, cluster: Cluster, weather: Weather, tell: Callable[[ChaosEvent], None]) -> None:
        """Create a run. Raises DevclusterError for spare nodes that the cluster does not have."""
        for node in weather.spare:
            if node not in cluster.node_names:
                names = ", ".join(cluster.node_names)
                raise DevclusterError(f"cluster {cluster.name} has no node {node!r}, only {names}")
        self._cluster, self._weather, self._hear = cluster, weather, tell
        self._began = clock.monotonic()
        self._repairs: list[_Repair] = []

    def run(self) -> int:
        """Cut and repair until the time is over or no job is left; return the number of cuts.

        At the end, and also after an interrupt, every node gets its power back. Raises DevclusterError if
        there is no job at all.
        """
        if not self._cluster.read_queue():
            raise DevclusterError(f"cluster {self._cluster.name} has no job: submit one first")
        chance = random.Random(self._weather.seed)
        self._began, cuts = clock.monotonic(), 0
        w = self._weather
        pace = f"every {w.every_s:g} s" if w.every_s else f"every {w.mtbf_s:g} s on average"
        self._report_event("begin", detail=f"a cut {pace}, repaired after {w.repair_s:g} s")
        try:
            why = ""
            for at in draw_cut_times(w, chance):
                last = w.duration_s is not None and at > w.duration_s
                if why := self._wait(w.duration_s if last else at):
                    break
                if last:
                    why = f"{w.duration_s:g} s are over"
                    break
                cuts += self._cut(chance)
        finally:
            self._mend()
        self._report_event("end", detail=f"{why}; {cuts} cut{'' if cuts == 1 else 's'}")
        return cuts

    def _report_event(self, event: str, node: str = "", jobs: Sequence[int] = (), detail: str = "") -> None:
        self._hear(ChaosEvent(clock.time(), round(self._after_s, 3), event, node, list(jobs), detail))

    @property
    def _after_s(self) -> float:
        return clock.monotonic() - self._began

    def _wait(self, until_s: float | None) -> str:
        """Repair nodes until the given time; return why the run is over, "" if it is not."""
        while True:
            self._advance_repairs()
            left = (until_s or 0.0) - self._after_s
            if left <= 0:
                return ""
            if not self._cluster.read_queue():
                return "no job is left"
            clock.sleep(max(0.0, min(LOOK_S, left)))

    def _cut(self, chance: random.Random) -> int:
        jobs: dict[str, list[int]] = {}
        for job, state, nodes in self._cluster.read_queue():
            if state == "RUNNING":
                for node in hostlist.expand(nodes):
                    jobs.setdefault(node, []).append(job)
        away = {repair.node for repair in self._repairs} | set(self._weather.spare)
        found = [node for node in self._cluster.node_names if node in jobs and node not in away]
        draw = chance.random()  # drawn also if no node is found, so that later draws stay the same
        found = [node for node in found if self._cluster.is_on(node)]
        if not found:
            self._report_event("none", detail="no node that may be cut runs a job")
            return 0
        node = found[int(draw * len(found))]
        self._repairs.append(_Repair(node, clock.monotonic() + self._weather.repair_s))
        self._cluster.cut_power(node)
        self._report_event("cut", node, jobs[node])
        return 1

    def _advance_repairs(self) -> None:
        """Switch repaired nodes on, and return nodes with power to service once Slurm knows why they were away."""
        now = clock.monotonic()
        for repair in list(self._repairs):
            if not repair.on and repair.due <= now:
                self._restore_power(repair)
        waiting = [repair for repair in self._repairs if repair.on]
        if not waiting:
            return
        states = self._cluster.read_node_states()
        for repair in waiting:
            state = states.get(repair.node, "unknown").lower()
            if "*" in state or any(word in state for word in _LOST):
                repair.good = 0
                with suppress(DevclusterError):  # Slurm has done it meanwhile, or is about to
                    self._cluster.resume(repair.node)
            else:
                repair.good += 1
            if repair.good > 1:
                self._report_event("back", repair.node, detail=f"Slurm calls it {state}")
                self._repairs.remove(repair)
            elif clock.monotonic() > repair.due + BACK_S:
                self._report_event(
                    "stuck", repair.node, detail=f"Slurm calls it {state} {BACK_S:g} s after its repair"
                )
                self._repairs.remove(repair)

    def _restore_power(self, repair: _Repair) -> None:
        try:
            if not self._cluster.is_on(repair.node):  # another process may have switched it on
                self._cluster.restore_power(repair.node)
        except DevclusterError as error:
            self._repairs.remove(repair)
            self._report_event("stuck", repair.node, detail=str(error))
            return
        repair.on, repair.due = True, clock.monotonic()
        self._report_event("on", repair.node)

    def _mend(self) -> None:
        """Leave no node without power or out of service."""
        for repair in list(self._repairs):
            if not repair.on:
                self._restore_power(repair)
        deadline = clock.monotonic() + BACK_S
        while self._repairs and clock.monotonic() < deadline:
            self._advance_repairs()
            clock.sleep(LOOK_S)
