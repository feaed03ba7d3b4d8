"""All recoveries of this controller, including those that a dead controller left open (requirement one-controller).

Reports reach their recovery through this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from gemini_hpc import clock
from gemini_hpc.controller import reservation, tasks
from gemini_hpc.controller.fencing import Act
from gemini_hpc.controller.gate import WithheldError
from gemini_hpc.controller.give_back import is_ours
from gemini_hpc.controller.journal import JournalRecord
from gemini_hpc.controller.recovery import Recovery
from gemini_hpc.controller.recovery_context import RecoveryContext
from gemini_hpc.controller.registry import Track
from gemini_hpc.slurm import SlurmError, SlurmRefused, SlurmUnreachable
from gemini_hpc.slurm.api import find_job
from gemini_hpc.slurm.facts import COMPLETED, CUT_SHORT, RUNNING, Job, Node
from gemini_hpc.wire.controller import Report

log = logging.getLogger("gemini_hpc.controller")

MAX_LATER = 512  # per user
RETRY_S = 1.0  # pause before Slurm is queried again
GIVE_UP_S = 600.0  # seconds of refusals by Slurm; its silence does not count
SILENT_MOST_S = 600.0  # a node that was silent for longer counts as silent for so long; a failover takes less
SPEAK_S = 10.0  # time within which an agent that has lost its controller connects to the next one
COOL_DOWN_S, MAX_COOL_DOWN_S = 1.0, 30.0  # pause of an incarnation after a recovery; it doubles each time


class Recoveries(RecoveryContext):
    """The recoveries of this controller."""

    def __post_init__(self) -> None:
        """Begin without any recovery; `resume_open` starts those that were left open."""
        super().__post_init__()
        self._active: dict[tuple[int, int], Recovery] = {}
        self._cool: dict[tuple[int, int], tuple[float, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._later: set[tuple[int, int, int, str]] = set()
        self._is_over = False  # this controller has stepped down

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all work at once, as a crash would, and start none: another controller takes over from the journal.

        Return the tasks that are about to end, which may still write to the journal.
        """
        self._is_over = True
        ending = list(self._tasks)
        for task in ending:
            task.cancel()
        self.alerts.close()
        return ending

    def on_task_death(self, why: str) -> None:
        """Alert that a task of the service died of a fault of ours. The task is restarted."""
        if self._is_over:
            return
        self.alerts.send_alert("task died", 0, "", why)

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]], died: tasks.Died) -> None:
        """Run the work to its end. After a fault of ours, report it and start again."""
        if self._is_over:
            return
        task = tasks.start(name, work, died)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: tuple[int, int], recovery: Recovery) -> None:
        """Run one recovery. After a fault, finish its begun actions as after a restart of the controller."""
        try:
            await recovery.run()
        except SlurmUnreachable as exc:
            # No fault of ours: begun actions are finished or undone as soon as Slurm answers again.
            log.warning("recovery %s waits for Slurm: %s", recovery.key, exc)
            self._take_over(recovery.key)
        except Exception as exc:
            if self._is_over:
                raise asyncio.CancelledError from exc
            log.exception("event=task-died task=recovery %s", recovery.key)
            tasks.report_death(recovery.on_task_death, f"recovery: {type(exc).__name__}")
            self._take_over(recovery.key)
        finally:
            self._remove_recovery(key)

    def _take_over(self, key: str) -> None:
        if self._is_over or key not in self.journal.read_open():
            return
        self._resuming.add(key)
        raw_id, _, restart = key.partition(".")
        died = partial(self.log_event, int(raw_id), int(restart), "task_died", "")
        self._start(f"recovery {key}", lambda: self._resume_until_done(key), died)

    def accept_report(self, track: Track, reporter: str, message: Report) -> None:
        """Accept a plausible report from an authenticated agent on `reporter`, a node of the job."""
        if self._is_over:
            return
        if track.lacks(message.restart, message.host):
            return
        said_by = {reporter, *message.witnesses} & set(track.list_members(message.restart))
        track.witnesses.record_witnesses(message.restart, message.host, said_by, clock.monotonic())
        now = clock.time()  # an agent's clock may be wrong
        since = min(now, max(now - SILENT_MOST_S, message.t))
        self._handle_report(track, message.restart, message.host, said_by, since)

    def _handle_report(self, track: Track, restart: int, host: str, said_by: set[str], since: float) -> None:
        key = (track.raw_id, restart)
        if self._is_over or f"{track.raw_id}.{restart}" in self._resuming:
            return
        recovery = self._active.get(key)
        if recovery is None:
            pause_s = self._cool.get(key, (0.0, 0.0))[0] - clock.monotonic()
            if pause_s > 0:
                self._handle_later(track, restart, host, said_by, since, pause_s)
                return
            begun = self._active[key] = Recovery(self, track, restart)
            begun.accept_report(host, said_by, since)
            self._start(f"recovery {begun.key}", lambda: self._run(key, begun), begun.on_task_death)
        elif not recovery.is_acting:
            recovery.accept_report(host, said_by, since)

    def _handle_later(
        self, track: Track, restart: int, host: str, said_by: set[str], since: float, pause_s: float
    ) -> None:
        """Handle a report of the pause after the pause: its sender may not repeat it."""
        what = (track.user_id, track.raw_id, restart, host)
        if what in self._later or sum(w[0] == track.user_id for w in self._later) >= MAX_LATER:
            return
        self._later.add(what)

        def retry() -> None:
            self._later.discard(what)
            self._handle_report(track, restart, host, said_by, since)

        asyncio.get_running_loop().call_later(pause_s + 0.01, retry)

    def _remove_recovery(self, key: tuple[int, int]) -> None:
        """Remove a recovery. New reports about its incarnation are handled after a pause that doubles each time."""
        self._active.pop(key, None)
        now = clock.monotonic()
        pause_s = min(MAX_COOL_DOWN_S, 2 * self._cool.get(key, (0.0, COOL_DOWN_S / 2))[1])
        self._cool = {k: c for k, c in self._cool.items() if c[0] > now - 10 * MAX_COOL_DOWN_S}
        self._cool[key] = (now + pause_s, pause_s)

    # ---- after a restart -------------------------------------------------------------------------------

    async def resume_open(self) -> None:
        """Finish or clean up the recoveries that an earlier controller left open, once Slurm answers."""
        left = self.journal.read_open()
        while True:
            try:
                kept = [str(r.data["name"]) for rs in left.values() for r in rs if r.step == "reserve"]
                for name in await reservation.delete_leftovers(
                    self.slurm, kept, lambda job: not self.gate.explain_job_refusal(job)
                ):
                    log.info("left-over reservation %s deleted", name)
                break
            except SlurmError as exc:
                log.warning("waiting for Slurm: %s", exc)
                await asyncio.sleep(1.0)
        for key in left:
            self._take_over(key)

    async def _resume_until_done(self, key: str) -> None:
        """Finish one open recovery, and only then release its key.

        A fault does not release the key; the work is tried again. If Slurm refuses for `GIVE_UP_S`, the recovery is
        given up: while the key is held, the job gets no new recovery.
        """
        refused_s, why = 0.0, ""
        while records := self.journal.read_open().get(key):
            began = clock.monotonic()
            try:
                if refused_s < GIVE_UP_S:
                    await self._resume_one(key, records)
                else:
                    await self._give_up(key, records, why)
                break
            except SlurmUnreachable as exc:
                log.warning("recovery %s waits for Slurm: %s", key, exc)
                await asyncio.sleep(RETRY_S)
            except WithheldError as exc:
                refused_s, why = GIVE_UP_S, str(exc)
            except SlurmError as exc:
                log.warning("Slurm refuses recovery %s: %s", key, exc)
                await asyncio.sleep(RETRY_S)
                refused_s, why = refused_s + clock.monotonic() - began, str(exc)
        self._resuming.discard(key)

    async def _give_up(self, key: str, records: list[JournalRecord], why: str) -> None:
        """Release all that is held, and alert: the rest of the work is the administrator's."""
        raw_id, restart = int(str(records[0].data["job"])), int(str(records[0].data["restart"]))
        try:
            job: Job | None = await self.slurm.read_job(raw_id)
        except SlurmRefused:
            job = None
        for name in _list_reserved(records):
            await self._delete(job, name)
        self.journal.write_line(key, "close", "after", outcome="given up")
        self.log_event(raw_id, restart, "closed", "", f"ended unfinished: {why}")
        begun = sorted({str(r.data["node"]) for r in records if r.step == "down"})
        text = f"restart {restart}, nodes fenced or drained: {','.join(begun) or 'none'}"
        refusal = "the mode forbids it" if self.gate.explain_job_refusal(job) else "Slurm refuses it"
        self.alerts.send_alert(
            "recovery given up", raw_id, "", f"a recovery cannot finish, as {refusal}: check its nodes ({text})"
        )

    async def _resume_one(self, key: str, records: list[JournalRecord]) -> None:
        opened = records[0].data
        raw_id, restart = int(str(opened["job"])), int(str(opened["restart"]))
        names = {part: [str(n) for n in _to_list(opened.get(part))] for part in ("members", "dead", "survivors")}
        job = await find_job(self.slurm, raw_id)
        if mode := self.gate.explain_job_refusal(job):
            raise WithheldError(f"the rest of the recovery is withheld: {mode}")
        reserved = _list_reserved(records)
        begun = {str(r.data["node"]) for r in records if (r.step, r.phase) == ("down", "before")}
        downed = {str(r.data["node"]) for r in records if (r.step, r.phase) == ("down", "after")}
        sent_back = any(r.step == "requeue" for r in records)
        track = self.registry.track_job(job) if job is not None else None
        if track is not None and restart not in track.stored.allocations:
            track.stored.allocations[restart] = names["members"]
        judging = Recovery(self, track, restart) if track is not None else None
        for host in begun - downed:
            await self._resolve_half_fence(host, judging, raw_id, restart)
        if judging is not None and job is not None and not job.has_ended and job.restarts == restart:
            for host in downed:
                await self._fence_again(host, judging)
        in_flight = job is not None and not job.has_ended and (job.state != RUNNING or bool(downed) or sent_back)
        if in_flight and opened.get("ahead"):
            # Nodes were only held until Slurm finds the others dead. Check whether it has, and has requeued the job
            # for that.
            nodes = await self.slurm.read_nodes()
            found = any(n in nodes and nodes[n].is_down for n in names["dead"])
            in_flight = found and job is not None and job.restarts > restart
        in_flight = in_flight or await self._has_ended_before(job, restart, begun)
        if job is None or track is None or not in_flight or (job.state == RUNNING and job.restarts > restart):
            for name in reserved:
                await self._delete(job, name)
            self.journal.write_line(key, "close", "after", outcome="cleaned")
            return
        recovery = self._active[raw_id, restart] = Recovery(self, track, restart)
        recovery.is_acting = True
        try:
            self.log_event(raw_id, restart, "taken_over", "", "by a restarted controller")
            helper = recovery.build_requeue(job, names["survivors"], names["dead"])
            alive = {r.name for r in await self.slurm.read_reservations()}
            existing = [name for name in reserved if name in alive]
            helper.held.name = existing[-1] if existing else ""
            for name in existing[:-1]:
                await self._delete(job, name)
            nodes = await self.slurm.read_nodes()
            helper.held.wanted = recovery.count_wanted(job, nodes, len(names["dead"]))
            if not helper.held.name:
                await helper.reserve_nodes(job, nodes, helper.held.wanted)
            await recovery.finish_requeue(helper)
        finally:
            self._remove_recovery((raw_id, restart))

    async def _delete(self, job: Job | None, name: str) -> None:
        """Delete a reservation, whether it exists or not. A reservation that Slurm refuses to delete ends by itself.

        Raises:
            SlurmUnreachable: Slurm did not answer.
        """
        try:
            if job is not None and not job.has_ended and job.reservation == name:
                await self.slurm.detach_reservation(job)
            await self.slurm.delete_reservation(name)
        except SlurmRefused as exc:
            log.warning("reservation %s could not be deleted: %s", name, exc)

    async def _fence_again(self, host: str, recovery: Recovery) -> None:
        """Fence a node again if slurmctld died before it had saved that the node is DOWN.

        The node is no less dead for that.
        """
        if await self._read_unless_down(host) is None:
            return
        if (await recovery.judge_taken_over(host)).act is not Act.FENCE:
            return
        if (node := await self._read_unless_down(host)) is not None:
            await recovery.fence_node(host, node)

    async def _resolve_half_fence(self, host: str, recovery: Recovery | None, raw_id: int, restart: int) -> None:
        """Finish or undo a fence of a controller that died between drain and DOWN.

        The fence is finished if the judgement still demands it. Otherwise the node is returned to service.
        """
        if not await self._is_still_drained(host):
            return
        verdict = await recovery.judge_taken_over(host) if recovery is not None else None
        if not await self._is_still_drained(host):
            return  # an administrator or Slurm has changed the node meanwhile
        if recovery is not None and verdict is not None and verdict.act is Act.FENCE:
            await recovery.fence_node(host, None)
            return
        await self.slurm.resume_node(host)
        why = verdict.why if verdict is not None else "the job is gone"
        self.log_event(raw_id, restart, "resumed", host, f"undid the drain of an interrupted recovery: {why}")

    async def _has_ended_before(self, job: Job | None, restart: int, begun: set[str]) -> bool:
        """Return whether the script had ended before its node was set DOWN.

        Only the controller requeues such a job.
        """
        if job is None or job.restarts != restart or job.state not in CUT_SHORT or not begun:
            return False
        if clock.time() - job.end_time > self.settings.retention_s:
            return False  # the job's copies are gone
        if job.state == COMPLETED and not await self._is_unfinished(job.raw_id, restart):
            return False
        nodes = await self.slurm.read_nodes()
        return any(n in nodes and nodes[n].is_down for n in begun)

    async def _is_unfinished(self, raw_id: int, restart: int) -> bool:
        """Return whether agents report that the training of this incarnation has not finished.

        A new controller waits for a while until they call.
        """
        deadline = clock.monotonic() + SPEAK_S
        while (track := self.registry.jobs.get(raw_id)) is not None and clock.monotonic() < deadline:
            if (finished := track.check_finished(restart)) is not None:
                return not finished
            await asyncio.sleep(RETRY_S / 4)
        return False

    async def _read_unless_down(self, host: str) -> Node | None:
        """Return the node as it is now; None if it is DOWN or unknown."""
        node = (await self.slurm.read_nodes()).get(host)  # all nodes are read: a query for a removed node is an error
        return None if node is None or node.is_down else node

    async def _is_still_drained(self, host: str) -> bool:
        """Return whether the controller has drained the node and it is not DOWN.

        The reason alone proves nothing, because it may outlive a RESUME.
        """
        node = await self._read_unless_down(host)
        return node is not None and is_ours(node)


def _list_reserved(records: list[JournalRecord]) -> list[str]:
    """Return the reservations that were made or begun: one that is not recorded as made may exist all the same."""
    return list(dict.fromkeys(str(r.data["name"]) for r in records if r.step == "reserve"))


def _to_list(value: str | int | float | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else []
