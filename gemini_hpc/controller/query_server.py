"""The users' queries about their jobs, and the rule for their answers (`inspect`, requirement who-may-inspect)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from gemini_hpc import clock
from gemini_hpc.controller.event_log import KEPT_S, EventLogs
from gemini_hpc.controller.lemons import Lemons
from gemini_hpc.controller.registry import ConnectedAgent, Registry, Track
from gemini_hpc.operators import Operators
from gemini_hpc.query import past
from gemini_hpc.query.inspect_document import Document, build_inspect_document
from gemini_hpc.query.slurm_facts import NOT_YOURS, build_slurm_facts
from gemini_hpc.slurm import SlurmError, UnknownJob
from gemini_hpc.slurm.facts import Job
from gemini_hpc.slurm.fair_queue import PerUser
from gemini_hpc.wire import inspect_schema
from gemini_hpc.wire.link import Link

log = logging.getLogger("gemini_hpc.controller")

QUERY_IDLE_S = 60.0  # an idle client is disconnected after this
# The client gives up after 2 s. An agent on a busy node needs a moment; after that it is listed as missing.
SLURM_TIMEOUT_S, PARTS_TIMEOUT_S = 0.8, 0.9
QUERY_FRAME_BYTES = 4096
QUERIES_PER_S, QUERIES_BURST = 10.0, 64.0  # per user, over all connections
LISTED_S = clock.DAY_S  # ended jobs are listed for so long, unless the query asks for all
MAX_LISTED, MAX_LOGS = 1000, 4000
SILENT = {"state": "", "reason": "Slurm does not answer"}
STALE = "Slurm does not answer: the Slurm state shown here is an older one"


class QueryServer:
    """The answers to users' queries; the agents' parts are collected anew for each."""

    def __init__(
        self,
        operators: Operators,
        registry: Registry,
        logs: EventLogs,
        lemons: Lemons,
        read_job: Callable[[int], Awaitable[Job]],
    ) -> None:
        self._operators, self._registry, self._logs, self._read_job = operators, registry, logs, read_job
        self._lemons = lemons
        self._rate = PerUser(QUERIES_PER_S, QUERIES_BURST)
        self._parts: dict[int, tuple[int, dict[str, inspect_schema.InspectPart], asyncio.Event]] = {}
        self._request = 0
        self._listing = asyncio.Lock()

    def accept_part(self, agent: ConnectedAgent, message: inspect_schema.InspectPart) -> None:
        """Accept an agent's part of an answer, or drop it if it was not requested."""
        waiting = self._parts.get(message.request)
        if waiting is not None and waiting[0] == agent.job == message.job and message.host == agent.host:
            waiting[1][agent.host] = message
            waiting[2].set()

    async def serve_client(self, link: Link) -> None:
        """Serve one client until it disconnects or is idle for a minute."""
        link.limit_bytes = QUERY_FRAME_BYTES
        while True:
            async with asyncio.timeout(QUERY_IDLE_S):
                message = await link.receive()
            if not isinstance(message, inspect_schema.JobAsk | inspect_schema.JobsAsk):
                return
            while not self._rate.take_tokens(link.session.peer_uid):
                await asyncio.sleep(1.0)
            uid = link.session.peer_uid
            answer: inspect_schema.JobAnswer | inspect_schema.JobsAnswer
            if isinstance(message, inspect_schema.JobsAsk):
                answer = await self._list_jobs(message.all, uid)
            else:
                answer = await self._answer(message.job, uid)
            await link.flush(answer)  # read no further query before this answer has left: queued answers cost memory

    async def _answer(self, raw_id: int, uid: int) -> inspect_schema.JobAnswer:
        refused = inspect_schema.JobAnswer(error=f"job {raw_id}: {NOT_YOURS}")
        # Checked for every job, so that a forbidden job takes as long to answer as an unknown one.
        operator = await self._operators.allows(uid)
        track = self._registry.jobs.get(raw_id)
        job: Job | None = None
        silent = False
        try:
            async with asyncio.timeout(SLURM_TIMEOUT_S):
                job = await self._read_job(raw_id)
        except UnknownJob:
            job = None
        except (SlurmError, TimeoutError) as exc:
            silence = f"slurmctld has not answered about this job within {SLURM_TIMEOUT_S:g} s"
            log.warning("job=%d slurm=%s", raw_id, str(exc) or silence)
            job, silent = track.job if track else None, True
        if job is not None and track is not None and track.user_id != job.user_id:
            track = None  # the track is of an earlier job: Slurm reuses ids after a cold start
        # The log still has the owner of a job that Slurm has forgotten.
        owner = job.user_id if job else track.user_id if track else self._logs.find_owner(raw_id)
        if owner is None or (uid != owner and not operator):
            return refused
        if job is not None and track is not None:
            track.record_job(job)
        parts = await self._ask_agents(track) if track else {}
        members = job.nodes if job and job.nodes else ()
        missing = tuple(h for h in members if h not in parts)
        facts = build_slurm_facts(job) if job is not None or not silent else dict(SILENT)
        if silent and job is not None:
            facts["note"] = "; ".join(filter(None, (facts.get("note", ""), STALE)))
        if track is not None and track.running_s is not None:
            facts["running_s"] = str(int(track.running_s))
        if track is not None and job is not None:
            facts |= {"shrunk": ",".join(track.stored.shrunk.get(job.restarts, ()))} if track.stored.shrunk else {}
            if note := "; ".join(filter(None, (facts.get("note", ""), track.describe_nodes()))):
                facts["note"] = note
        return inspect_schema.JobAnswer(
            parts=tuple(parts.values()),
            events=self._logs.read_events(raw_id, owner),
            slurm=facts,
            missing=missing,
            lemons=self._lemons.list_rows(members),
        )

    async def build_document(self, track: Track) -> Document:
        """Return the inspect document of a job without its events, as its agents and our records have it now."""
        parts = await self._ask_agents(track)
        job = track.job
        missing = tuple(h for h in job.nodes if h not in parts) if job is not None else ()
        facts = build_slurm_facts(job) if job is not None else dict(SILENT)
        return build_inspect_document(
            track.raw_id, tuple(parts.values()), (), facts, missing, "controller", clock.time()
        )

    async def _list_jobs(self, everything: bool, uid: int) -> inspect_schema.JobsAnswer:
        operator = await self._operators.allows(uid)
        async with self._listing:  # one at a time: each query reads the directory
            ended = await asyncio.to_thread(self._list_ended, everything, None if operator else uid)
        rows = {row.job: row for row in ended}
        for raw_id, track in self._registry.jobs.items():
            if operator or track.user_id == uid:
                rows[raw_id] = self._build_row(track, rows.get(raw_id))
        newest = sorted(rows.values(), key=lambda row: (row.ended == 0, row.ended, row.job), reverse=True)
        return inspect_schema.JobsAnswer(tuple(newest[:MAX_LISTED]), max(0, len(newest) - MAX_LISTED))

    def _list_ended(self, everything: bool, uid: int | None) -> list[inspect_schema.JobRow]:
        """Return the rows of ended jobs from the logs. Runs in a thread of its own."""
        since = clock.time() - (KEPT_S if everything else LISTED_S)
        rows = []
        for job, owner in self._logs.list_newest(MAX_LOGS, since):
            if uid is None or owner == uid:
                events = self._logs.read_events(job, owner)
                how = past.derive_end(events, {"state": past.UNKNOWN})
                last = max((e.t for e in events), default=0.0)
                restart = max((e.restart for e in events), default=0)
                ended, state = (how.t or last, how.state) if how else (last, past.UNKNOWN)
                back = sum(r["completed"] for r in past.list_recoveries(events))
                sealed = how.version if how else 0
                rows.append(inspect_schema.JobRow(job, owner, state, 0, restart, back, ended, sealed))
        return rows

    @staticmethod
    def _build_row(track: Track, logged: inspect_schema.JobRow | None) -> inspect_schema.JobRow:
        stored, job = track.stored, track.job
        restart = max(stored.allocations, default=0)
        return inspect_schema.JobRow(
            track.raw_id,
            track.user_id,
            stored.ended_state or (job.state if job else ""),
            len(stored.allocations.get(restart, ())),
            restart,
            logged.recoveries if logged else 0,
            stored.ended_at,
            logged.sealed if logged else 0,
            job.id if job else "",
        )

    async def _ask_agents(self, track: Track) -> dict[str, inspect_schema.InspectPart]:
        agents = [a for a in track.agents.values() if a.is_connected]
        self._request += 1
        request = self._request
        found: dict[str, inspect_schema.InspectPart] = {}
        event = asyncio.Event()
        self._parts[request] = (track.raw_id, found, event)
        try:
            for agent in agents:
                agent.link.send(inspect_schema.InspectAsk(request))
            with suppress(TimeoutError):
                async with asyncio.timeout(PARTS_TIMEOUT_S):
                    while len(found) < len(agents):
                        event.clear()
                        await event.wait()
        finally:
            del self._parts[request]
        return dict(found)
