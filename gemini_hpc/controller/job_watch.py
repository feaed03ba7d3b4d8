"""The watch over all tracked jobs, with one query to Slurm.

It sends `Release` to agents whose replicas are of no more use. It removes pins that have outlived their recovery.
It reports nodes without an agent and jobs that Slurm will never requeue.

For a job that was cancelled while pending, only this watch frees the memory: no epilog runs for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from gemini_hpc import clock
from gemini_hpc.controller.planned_drains import DrainWatch
from gemini_hpc.controller.recovery_context import RecoveryContext
from gemini_hpc.controller.registry import ConnectedAgent, Track
from gemini_hpc.controller.requeue_rules import find_release_reason
from gemini_hpc.controller.reservation import PREFIX
from gemini_hpc.query import past
from gemini_hpc.query.slurm_facts import explain_no_requeue
from gemini_hpc.query.summary_line import PREFIX as LINE_PREFIX
from gemini_hpc.query.summary_line import build_summary_line
from gemini_hpc.slurm import SlurmError, SlurmUnreachable, UnknownJob
from gemini_hpc.slurm.facts import LIVE, PENDING, RUNNING
from gemini_hpc.wire.controller import Ending, Release, Waits

log = logging.getLogger("gemini_hpc.controller")

INTERVAL_S = 1.0  # pause between two queries to Slurm
MAX_INTERVAL_S = 10.0  # longest pause if Slurm is slow
ELSEWHERE_S = 30.0  # a new incarnation runs this long before agents on former nodes are released
PARTLY_S = 10.0  # agents have this long to connect before a node counts as unprotected
RELEASE_TOLD_S = 60.0  # one log line about a release in this time
TOLD_S = 2.0  # time until the controller has an agent's finding
_SAME_END_S = 1.5  # a smaller change of the job's end is not sent to the agents


class JobWatch:
    """The task that checks all tracked jobs about once a second, less often if Slurm is slow to answer."""

    def __init__(self, recoveries: RecoveryContext) -> None:
        self._recoveries, self._registry = recoveries, recoveries.registry
        self._settings, self._slurm = recoveries.settings, recoveries.slurm
        self._drains = DrainWatch(self._slurm)

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            began = clock.monotonic()
            try:
                await self.poll_jobs()
            except SlurmError as exc:
                # No answer means no knowledge: no agent gets a `Release`.
                log.warning("watcher: %s", exc)
            took = clock.monotonic() - began
            await asyncio.sleep(min(MAX_INTERVAL_S, max(INTERVAL_S, 20 * took)) if took > 0.1 else INTERVAL_S)

    async def poll_jobs(self) -> None:
        """Check all tracked jobs once."""
        tracks = dict(self._registry.jobs)
        if not tracks:
            return
        rows = await self._slurm.read_rows(list(tracks))
        running: list[Track] = []
        ended: list[Track] = []
        for raw_id, track in tracks.items():
            row = rows.get(raw_id)
            if row is not None and row.user_id != track.user_id:
                row = None  # Slurm has started its job ids anew
            state = row.state if row else None
            if row is not None:
                track.record_state(row.state, row.state not in LIVE)
                if row.state == RUNNING and (track.job is None or track.job.state != RUNNING):
                    # Facts outside the row (restarts, the whole node list) are read once per change.
                    with suppress(UnknownJob):
                        track.record_job(await self._slurm.read_job(raw_id))
                        await track.remember_nodes(self._slurm)
                elif track.job is not None and row.state != track.job.state:
                    with suppress(UnknownJob):
                        track.record_job(await self._slurm.read_job(raw_id))
            _send_waits(track, state == PENDING)
            if self._recoveries.is_active(raw_id):
                continue
            if self._log_end(track, is_forgotten=row is None) and row is not None:
                ended.append(track)
            ended_for_s = clock.time() - track.stored.ended_at if track.stored.ended_at else None
            doubt_s = self._settings.compute_detection_s() + TOLD_S
            reason = find_release_reason(state, ended_for_s, self._settings.retention_s, doubt_s)
            if reason:
                self._release_all(track, reason)
            elif state == RUNNING:
                running.append(track)
                self._release_elsewhere(track)
                self._check_agents(track)
                if row is not None and set(row.nodes) < set(
                    track.list_members(track.job.restarts if track.job else 0)
                ):
                    await self._check_shrunk(track)
                if row is not None:
                    _send_end(track, row.end_time)
            elif state == PENDING and track.stored.pinned:
                await self._unpin(track)
            elif state == PENDING and track.should_ask():
                with suppress(UnknownJob):
                    track.record_job(await self._slurm.read_job(raw_id))
        await self._drains.report_drains(running)
        await self._note_ends(ended)

    def _log_end(self, track: Track, *, is_forgotten: bool) -> bool:
        """Log each end of the job once, for queries after Slurm has forgotten the job.

        Return whether an end was logged.
        """
        ended = track.stored.ended_state or (past.UNKNOWN if is_forgotten else "")
        if track.stored.ended_told == bool(ended):
            return False
        track.stored.ended_told = bool(ended)
        track.write_entry()
        if ended:
            code = track.job.exit_code if track.job is not None and track.job.has_ended else ""
            restart = max(track.stored.allocations, default=0)
            self._recoveries.log_event(track.raw_id, restart, past.ENDED, "", past.describe_end(ended, code))
        return bool(ended)

    async def _note_ends(self, ended: Sequence[Track]) -> None:
        """Write lines into the AdminComments of ended jobs. A refusal of Slurm is logged, and that is all.

        An answer that does not come is awaited once, not once for each job: memory waits for the next poll.
        """
        for track in ended:
            try:
                await self._note_end(track)
            except SlurmError as exc:
                log.info("job=%d event=no-admin-comment %s", track.raw_id, exc)
                if isinstance(exc, SlurmUnreachable):
                    return

    async def _note_end(self, track: Track) -> None:
        restart = max(track.stored.allocations, default=0)
        agents = [a for a in track.agents.values() if a.restart == restart]
        line = build_summary_line(
            self._recoveries.read_events(track),
            max((a.replicas for a in agents), default=0),
            max((a.parity for a in agents), default=0),
            len(track.stored.allocations.get(restart, ())),
        )
        job = track.job or await self._slurm.read_job(track.raw_id)
        await self._slurm.note_end(job, line, LINE_PREFIX)

    def _release_all(self, track: Track, reason: str) -> None:
        agents = [a for a in track.agents.values() if a.is_connected]
        for agent in agents:
            self._release(agent, reason, save=True)
        if not agents:
            self._registry.drop_job(track.raw_id)

    def _release_elsewhere(self, track: Track) -> None:
        """Release the agents on nodes that the job has left, once its new incarnation has run for ELSEWHERE_S."""
        if track.running_since is None or track.job is None:
            return
        restart, since = track.running_since
        if clock.monotonic() - since < ELSEWHERE_S or restart != track.job.restarts:
            return
        for agent in list(track.agents.values()):
            if agent.is_connected and agent.restart < restart and agent.host not in track.list_members(restart):
                self._release(agent, "the job runs elsewhere")

    async def _check_shrunk(self, track: Track) -> None:
        """Handle a running job with fewer nodes than it began with.

        The job was made smaller by hand (`scontrol update`), unless the missing nodes are down (--no-kill). Those
        are a failure like any other.
        """
        job = await self._slurm.read_job(track.raw_id)
        members = track.list_members(job.restarts)
        left = [host for host in members if host not in job.nodes]
        if job.state != RUNNING or not job.nodes or not left:
            return
        nodes = await self._slurm.read_nodes(left)
        track.record_job(job)
        taken = [host for host in left if host in nodes and not nodes[host].is_down]
        if taken:
            track.give_up(job.restarts, taken)
            detail = f"the job was made smaller while it ran: without {','.join(taken[:16])}"
            self._recoveries.log_event(track.raw_id, job.restarts, "shrunk", "", detail)

    def _check_agents(self, track: Track) -> None:
        """Log facts for the user about a job that has begun to run, once for each incarnation.

        See requirements requeue and plugin-loaded.
        """
        job, since = track.job, track.running_since
        if job is None or since is None:
            return
        if (why := explain_no_requeue(job)) and track.noticed != job.restarts:
            track.noticed = job.restarts
            self._recoveries.log_event(track.raw_id, job.restarts, "never_requeued", "", why)
        if track.looked == job.restarts or clock.monotonic() - since[1] < PARTLY_S:
            return
        track.looked = job.restarts
        present = {a.host for a in track.agents.values() if a.is_connected and a.restart == job.restarts}
        missing = [host for host in job.nodes if host not in present]
        if present and missing:
            shown = ",".join(missing[:16]) + ("" if len(missing) <= 16 else f" and {len(missing) - 16} more")
            self._recoveries.log_event(track.raw_id, job.restarts, "partly_protected", "", f"no agent on {shown}")

    async def _unpin(self, track: Track) -> None:
        """Remove our pin from a job that waits again without a recovery.

        The job was preempted or requeued by hand. Or a survivor's epilog pinned it, and no controller was there to
        remove the pin.
        """
        job = await self._slurm.read_job(track.raw_id)
        if job.state != PENDING or not job.is_actable or self._recoveries.is_active(track.raw_id):
            return
        if mode := self._recoveries.gate.explain_job_refusal(job):
            self._recoveries.withheld.log_once(track.raw_id, job.restarts, "removed a pin of ours", mode)
            return
        if set(job.req_nodes) == set(track.stored.original) and job.reservation == track.stored.reservation:
            track.remember_pin(False)
            return
        try:
            await self._slurm.pin_job(job, track.stored.original, track.stored.reservation)
            if job.reservation.startswith(f"{PREFIX}{track.raw_id}_"):
                await self._slurm.delete_reservation(job.reservation)
        except SlurmError as exc:
            log.warning("job=%d event=pin-left %s", track.raw_id, exc)
            return
        track.remember_pin(False)
        self._recoveries.log_event(
            track.raw_id, job.restarts, "unpinned", "", "the job waits, and no recovery is under way"
        )

    @staticmethod
    def _release(agent: ConnectedAgent, reason: str, *, save: bool = False) -> None:
        # Log at most once a minute: a stopped agent gets a `Release` every second.
        if clock.monotonic() - agent.logged_release_s > RELEASE_TOLD_S:
            agent.logged_release_s = clock.monotonic()
            log.info("job=%d event=release host=%s reason=%s", agent.job, agent.host, reason)
        agent.link.send(Release(agent.job, reason, save))


def _send_end(track: Track, end_time: float) -> None:
    """Send agents the job's end, so that they bring the state to the tier before the time limit.

    The time limit may be changed while the job runs.
    """
    for agent in track.agents.values():
        if agent.is_connected and abs(agent.sent_end - end_time) > _SAME_END_S:
            agent.sent_end = end_time
            agent.link.send(Ending(track.raw_id, max(0, int(end_time - clock.time())) if end_time else None))


def _send_waits(track: Track, is_pending: bool) -> None:
    """Report to the agents that their job is held or waits in the queue.

    They then keep their memory longer than agents of an ended job.
    """
    for agent in track.agents.values():
        if is_pending and agent.is_connected and not agent.has_sent_waits:
            agent.link.send(Waits(track.raw_id))
        agent.has_sent_waits = is_pending and agent.is_connected
