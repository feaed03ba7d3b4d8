"""Figures of the controller for Prometheus: a file for node_exporter's textfile collector, an endpoint, or both.

Names and labels are documented in docs/admin.md. Events are counted where the controller itself writes them. What
agents claim shows as the state of their jobs only, since agents belong to users.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gemini_hpc import __version__, clock
from gemini_hpc.controller.recovery_context import RecoveryContext
from gemini_hpc.controller.registry import Track
from gemini_hpc.controller.withheld import count_verdicts
from gemini_hpc.query.figures import compute_sealed_age_s, count_survivable_nodes, find_sealed_version, find_user_name

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from gemini_hpc.query.inspect_document import Document

log = logging.getLogger("gemini_hpc.controller")

EVERY_S = 15.0  # Prometheus' usual interval
MOST_JOBS = 500  # whose agents are asked in a round, the newest first
_AT_ONCE = 8  # jobs whose agents are asked at the same time
# the controller's own events that are counted
EVENTS = (
    *("confirmed", "dismissed", "not_fenced", "down", "sent_back", "running", "goes_on", "held", "let_go"),
    *("reserve_refused", "partly_protected", "never_requeued", "shrunk", "drained", "not_drained", "task_died"),
    *("withheld", "judged"),
)
_BEGINS, _ENDS = ("confirmed", "taken_over"), ("running", "goes_on")
# from a spare that takes over to three times SlurmdTimeout's default
BUCKETS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0)


class Metrics:
    """The figures, gathered anew every `EVERY_S` seconds."""

    def __init__(self, home: RecoveryContext, ask: Callable[[Track], Awaitable[Document]]) -> None:
        """Begin to count. `ask` returns a job's inspect document without its events."""
        self._home, self._ask = home, ask
        self._events: Counter[str] = Counter()
        self._began: dict[tuple[int, int], float] = {}
        self._took_s: list[float] = []
        self._shown: list[Metric] = []

    def count_event(self, raw_id: int, restart: int, event: str) -> None:
        """Count an event of the controller."""
        if event in EVENTS:
            self._events[event] += 1
        if event in _BEGINS:
            self._began.setdefault((raw_id, restart), clock.monotonic())
        elif event in _ENDS:
            begun = [key for key in self._began if key[0] == raw_id]
            if begun:
                self._took_s.append(clock.monotonic() - min(self._began.pop(key) for key in begun))

    async def run(self) -> None:
        """Gather and publish until cancelled. Do nothing where no setting asks for it."""
        settings = self._home.settings
        if not (settings.metrics_file or settings.metrics_listen):
            return
        try:
            import prometheus_client
        except ImportError:
            log.warning("event=no-metrics reason=prometheus_client is not installed: pip install '.[metrics]'")
            return
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        server = self._listen(registry) if settings.metrics_listen else None
        try:
            while True:
                self._shown = await self._gather()
                if settings.metrics_file:
                    try:
                        await asyncio.to_thread(prometheus_client.write_to_textfile, settings.metrics_file, registry)
                    except OSError as exc:
                        log.warning("event=metrics-not-written path=%s %s", settings.metrics_file, exc.strerror)
                await asyncio.sleep(EVERY_S)
        finally:
            if server is not None:
                await asyncio.to_thread(server.shutdown)
                server.server_close()

    def _listen(self, registry: Any) -> Any:
        """Return the started endpoint; None, with a line in the log, if its address cannot be used."""
        from prometheus_client import start_http_server

        host, _, port = self._home.settings.metrics_listen.rpartition(":")
        try:
            server, thread = start_http_server(int(port), host or "127.0.0.1", registry)
        except (OSError, ValueError, OverflowError) as exc:
            log.warning("event=no-metrics-endpoint address=%s %s", self._home.settings.metrics_listen, exc)
            return None
        assert isinstance(thread, threading.Thread)
        log.info("event=metrics address=%s", self._home.settings.metrics_listen)
        return server

    def collect(self) -> Iterable[Metric]:
        """Return what was gathered last: a scrape asks nobody. Any thread may call this."""
        return list(self._shown)

    async def _gather(self) -> list[Metric]:
        tracks = [t for t in self._home.registry.jobs.values() if not t.stored.ended_at]
        asked = sorted(tracks, key=lambda t: t.raw_id, reverse=True)[:MOST_JOBS]
        gate = asyncio.Semaphore(_AT_ONCE)

        async def ask_track(track: Track) -> Document:
            async with gate:
                return await self._ask(track)

        found = await asyncio.gather(*(ask_track(track) for track in asked), return_exceptions=True)
        jobs = [(track, d) for track, d in zip(asked, found, strict=True) if not isinstance(d, BaseException)]
        return [*self._list_service_metrics(len(tracks)), *_list_job_metrics(jobs)]

    def _list_service_metrics(self, jobs: int) -> Iterator[Metric]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            InfoMetricFamily,
        )

        settings, journal = self._home.settings, self._home.journal
        yield InfoMetricFamily("gemini_hpc_controller", "Release.", {"version": __version__})
        yield GaugeMetricFamily("gemini_hpc_jobs_tracked", "Protected jobs that have not ended.", jobs)
        linked = sum(a.is_connected for t in self._home.registry.jobs.values() for a in t.agents.values())
        yield GaugeMetricFamily("gemini_hpc_agents_connected", "Agents with a link to the controller.", linked)
        events = CounterMetricFamily(
            "gemini_hpc_events", "Events of the controller since it began.", labels=["event"]
        )
        for name in EVENTS:
            events.add_metric([name], self._events[name])
        yield events
        fenced = journal.count_fenced(settings.fence_budget_window_s)
        yield GaugeMetricFamily("gemini_hpc_fenced_nodes", "Nodes fenced in the budget's window.", fenced)
        left = max(0, settings.fence_budget_nodes - fenced)
        yield GaugeMetricFamily(
            "gemini_hpc_fence_budget_left", "Nodes that may still be fenced in it, by `fence_budget_nodes`.", left
        )
        drained = journal.count_drained(clock.DAY_S)
        yield GaugeMetricFamily("gemini_hpc_drained_nodes", "Nodes drained as sick within a day.", drained)
        withheld = GaugeMetricFamily(
            "gemini_hpc_withheld_acts", "Acts that the mode withheld, by Slurm's verdict.", labels=["verdict"]
        )
        for verdict, count in count_verdicts(self._home.withheld.acts).items():
            withheld.add_metric([verdict], count)
        yield withheld
        took = HistogramMetricFamily(
            "gemini_hpc_recovery_seconds", "From a proved loss of a node to the job's new start."
        )
        counts = [sum(s <= bound for s in self._took_s) for bound in BUCKETS_S]
        buckets = [(str(bound), float(n)) for bound, n in zip(BUCKETS_S, counts, strict=True)]
        took.add_metric([], [*buckets, ("+Inf", float(len(self._took_s)))], sum(self._took_s))
        yield took


def _list_job_metrics(jobs: list[tuple[Track, Document]]) -> Iterator[Metric]:
    """Return the figures of single jobs, and how many jobs are in each state."""
    from prometheus_client.core import GaugeMetricFamily

    by_job = ["job", "user"]
    states = GaugeMetricFamily("gemini_hpc_jobs", "Protected jobs by state.", labels=["state"])
    for state, count in sorted(Counter(d["state"] for _, d in jobs).items()):
        states.add_metric([state], count)
    yield states
    age = GaugeMetricFamily("gemini_hpc_job_sealed_age_seconds", "Age of the newest sealed step.", labels=by_job)
    step = GaugeMetricFamily("gemini_hpc_job_sealed_step", "Newest sealed step.", labels=by_job)
    survives = GaugeMetricFamily(
        "gemini_hpc_job_survivable_nodes", "Nodes, whichever they are, that may be lost.", labels=by_job
    )
    memory = GaugeMetricFamily("gemini_hpc_job_memory_bytes", "Memory of the job's agents for copies.", labels=by_job)
    cores = GaugeMetricFamily("gemini_hpc_job_agent_cores", "Cores used by the job's agents.", labels=by_job)
    for track, d in jobs:
        labels = [str(track.raw_id), find_user_name(track.user_id)]
        for family, value in (
            (step, find_sealed_version(d)),
            (age, compute_sealed_age_s(d)),
            (survives, count_survivable_nodes(d)),
        ):
            if value is not None:
                family.add_metric(labels, value)
        memory.add_metric(labels, sum(n["memory_bytes"] for n in d["nodes"]))
        used = [n["cpu"]["cores"] for n in d["nodes"] if n.get("cpu")]
        if used:
            cores.add_metric(labels, sum(used))
    yield from (age, step, survives, memory, cores)
