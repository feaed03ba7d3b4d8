"""All recoveries of this controller: whom reports reach, and what a dead controller left to be done (SITE 5)."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from gemini_hpc.config import Settings
from gemini_hpc.control import probe, rescue
from gemini_hpc.control.decide import Act, Port, candidates_wanted
from gemini_hpc.control.eventlog import EventLogs
from gemini_hpc.control.journal import Journal, Record
from gemini_hpc.control.primary import Primary
from gemini_hpc.control.recovery import REASON, Recovery
from gemini_hpc.control.registry import Registry, Track
from gemini_hpc.control.rescue import RESERVED_MINUTES
from gemini_hpc.control.slurm import SlurmError, UnknownJob
from gemini_hpc.control.slurm.api import SlurmApi
from gemini_hpc.control.slurm.facts import RUNNING, Job, Node
from gemini_hpc.wire.controller import Report
from gemini_hpc.wire.picture import EventRecord

log = logging.getLogger("gemini_hpc.control")

MAX_LATER = 512  # a user
OUTAGE_S = 120.0
SETTLING_S = 0.25
_DEAD = (Port.SILENT, Port.HANGS)
COOL_DOWN_S, MAX_COOL_DOWN_S = 1.0, 30.0


class Recoveries:
    """All recoveries of this controller."""

    def __init__(
        self,
        settings: Settings,
        slurm: SlurmApi,
        journal: Journal,
        logs: EventLogs,
        registry: Registry,
        primary: Primary,
    ) -> None:
        self.settings, self.slurm, self.journal, self.registry = settings, slurm, journal, registry
        self.primary = primary
        self._logs = logs
        self._active: dict[tuple[int, int], Recovery] = {}
        self._cool: dict[tuple[int, int], tuple[float, float]] = {}
        self._outage: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._later: set[tuple[int, int, int, str, str]] = set()
        self._resuming = set(journal.left_open())
        self.reserving = asyncio.Lock()
        # The longest that a job was seen COMPLETING: its epilogs, mostly.
        self.longest_epilog_s = 0.0

    def reservation_minutes(self) -> int:
        """How long a reservation of ours lasts if nobody ends it (SITE 11)."""
        return max(RESERVED_MINUTES, math.ceil(3 * self.longest_epilog_s / 60))

    def cancel(self) -> None:
        """Stop all work at once, as a crash would: another controller takes over from the journal."""
        for task in list(self._tasks):
            task.cancel()

    def say(self, raw_id: int, restart: int, event: str, host: str = "", detail: str = "") -> None:
        """One line of a job's event log, and of the service's own log."""
        log.info("job=%d restart=%d event=%s host=%s detail=%s", raw_id, restart, event, host or "-", detail)
        self._logs.add(raw_id, [EventRecord(time.time(), event, host, restart, 0, detail[:400])])

    def accused(self) -> set[str]:
        """Hosts that some job's agents have reported and that are not cleared."""
        return {h for r in self._active.values() for h, s in r.suspects.items() if s.decision.act is not Act.DISMISS}

    def silent(self, hosts: set[str]) -> set[str]:
        """These hosts, and all others that are silent now or were a moment ago: a mass outage shows in the sum."""
        since = time.monotonic() - OUTAGE_S
        self._outage = {host: t for host, t in self._outage.items() if t > since}
        waiting = [r for r in self._active.values() if not r.acting]
        now = {s.host for r in waiting for s in r.suspects.values() if s.series and s.series.silent_s > 0}
        return hosts | now | set(self._outage)

    def remember_silent(self, hosts: set[str]) -> None:
        """These were too many; they count again when the next one is judged."""
        self._outage.update(dict.fromkeys(hosts, time.monotonic()))

    def active(self, raw_id: int) -> bool:
        """Whether a recovery of this job is under way: its replicas are needed whatever Slurm says meanwhile."""
        return any(key[0] == raw_id for key in self._active) or any(
            key.split(".")[0] == str(raw_id) for key in self._resuming
        )

    def spawn(self, work: Coroutine[Any, Any, None], done: Callable[[], None] | None = None) -> None:
        """Run to the end, log what goes wrong."""

        async def guarded() -> None:
            try:
                await work
            except Exception:
                log.exception("a recovery failed")
            finally:
                if done is not None:
                    done()

        task = asyncio.ensure_future(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def report(self, track: Track, reporter: str, message: Report) -> None:
        """A report from an authenticated agent on `reporter`; anything that is not plausible is dropped here."""
        members = track.members(message.restart)
        if message.host not in members or reporter not in members or message.host == reporter:
            log.info("job=%d reporter=%s host=%s: not plausible", track.raw_id, reporter, message.host[:64])
            return
        key = (track.raw_id, message.restart)
        if f"{track.raw_id}.{message.restart}" in self._resuming:
            return
        recovery = self._active.get(key)
        if recovery is None:
            pause_s = self._cool.get(key, (0.0, 0.0))[0] - time.monotonic()
            if pause_s > 0:
                self._hear_later(track, reporter, message, pause_s)
                return
            recovery = self._active[key] = Recovery(self, track, message.restart)
            recovery.report(message.host, {reporter, *message.witnesses} & set(members))
            self.spawn(recovery.run(), lambda: self._ended(key))
        elif not recovery.acting:
            recovery.report(message.host, {reporter, *message.witnesses} & set(members))

    def _hear_later(self, track: Track, reporter: str, message: Report, pause_s: float) -> None:
        """A report that comes during the pause is heard after it, once: its sender may not repeat it."""
        what = (track.user_id, track.raw_id, message.restart, message.host, reporter)
        if what in self._later or sum(w[0] == track.user_id for w in self._later) >= MAX_LATER:
            return
        self._later.add(what)

        def again() -> None:
            self._later.discard(what)
            self.report(track, reporter, message)

        asyncio.get_running_loop().call_later(pause_s + 0.01, again)

    def _ended(self, key: tuple[int, int]) -> None:
        """Reports that led to nothing are heard again after a pause that doubles."""
        self._active.pop(key, None)
        now = time.monotonic()
        pause_s = min(MAX_COOL_DOWN_S, 2 * self._cool.get(key, (0.0, COOL_DOWN_S / 2))[1])
        self._cool = {k: c for k, c in self._cool.items() if c[0] > now - 10 * MAX_COOL_DOWN_S}
        self._cool[key] = (now + pause_s, pause_s)

    # ---- after a restart -------------------------------------------------------------------------------

    async def resume(self) -> None:
        """Finish or clean what an earlier controller left (waits until Slurm answers)."""
        left = self.journal.left_open()
        while True:
            try:
                kept = [str(r.data["name"]) for rs in left.values() for r in rs if r.step == "reserve"]
                for name in await rescue.sweep(self.slurm, kept):
                    log.info("left-over reservation %s deleted", name)
                break
            except SlurmError as exc:
                log.warning("waiting for Slurm: %s", exc)
                await asyncio.sleep(1.0)
        for key, records in left.items():
            self.spawn(self._resume_until_done(key, records))

    async def _resume_until_done(self, key: str, records: list[Record]) -> None:
        try:
            while True:
                try:
                    return await self._resume_one(key, records)
                except SlurmError as exc:
                    log.warning("recovery %s waits for Slurm: %s", key, exc)
                    await asyncio.sleep(1.0)
        finally:
            self._resuming.discard(key)

    async def _resume_one(self, key: str, records: list[Record]) -> None:
        opened = records[0].data
        raw_id, restart = int(str(opened["job"])), int(str(opened["restart"]))
        names = {part: [str(n) for n in _list(opened.get(part))] for part in ("members", "dead", "survivors")}
        try:
            job: Job | None = await self.slurm.job(raw_id)
        except UnknownJob:
            job = None
        reserved = [str(r.data["name"]) for r in records if r.step == "reserve" and r.phase == "after"]
        begun = {str(r.data["node"]) for r in records if (r.step, r.phase) == ("down", "before")}
        downed = {str(r.data["node"]) for r in records if (r.step, r.phase) == ("down", "after")}
        sent_back = any(r.step == "requeue" for r in records)
        for host in begun - downed:
            await self._half_fenced(host, raw_id, restart)
        if job is not None and not job.over and job.restarts == restart:
            for host in downed:
                await self._forgotten(host, key)
        in_flight = job is not None and not job.over and (job.state != RUNNING or bool(downed) or sent_back)
        if job is None or not in_flight or (job.state == RUNNING and job.restarts > restart):
            for name in reserved:
                await self._delete(job, name)
            self.journal.write(key, "close", "after", outcome="cleaned")
            return
        track = self.registry.track(job)
        recovery = self._active[raw_id, restart] = Recovery(self, track, restart)
        recovery.acting = True
        try:
            self.say(raw_id, restart, "taken_over", "", "by a restarted controller")
            helper = recovery.rescue(job.user_id, names["survivors"], names["dead"])
            alive = {r.name for r in await self.slurm.reservations()}
            helper.reservation = next((n for n in reserved if n in alive), "")
            if not helper.reservation:
                async with self.reserving:
                    nodes = await self.slurm.nodes()
                    wanted = candidates_wanted(job, nodes, len(names["dead"]), self.settings.reserve_candidates)
                    await helper.reserve(job, nodes, wanted)
            await recovery.finish(helper)
        finally:
            self._ended((raw_id, restart))

    async def _delete(self, job: Job | None, name: str) -> None:
        with suppress(SlurmError):
            if job is not None and not job.over and job.reservation == name:
                await self.slurm.detach_reservation(job)
            await self.slurm.delete_reservation(name)

    async def _forgotten(self, host: str, key: str) -> None:
        """slurmctld died before it had saved that this node is DOWN; the node is no less dead for that."""
        node = await self._not_down(host)
        if node is None or not await self._dead_and_settled(node) or await self._not_down(host) is None:
            return
        raw_id, _, restart = key.partition(".")
        self.journal.write(key, "down", "before", node=host)
        await self.slurm.node_down(host, f"{REASON}, job {raw_id} restart {restart}")
        self.journal.write(key, "down", "after", node=host)
        self.say(int(raw_id), int(restart), "down", host, "again: slurmctld had forgotten it")

    async def _half_fenced(self, host: str, raw_id: int, restart: int) -> None:
        """Died between drain and DOWN: finish on a dead node, give a healthy one back."""
        node = await self._not_down(host, REASON)
        if node is None:
            return
        dead = await self._dead_and_settled(node)
        if await self._not_down(host, REASON) is None:
            return  # an administrator has been there meanwhile
        if dead:
            await self.slurm.node_down(host, f"{REASON}, job {raw_id} restart {restart}")
        else:
            await self.slurm.node_resume(host)
            self.say(raw_id, restart, "resumed", host, "it answers: the drain of an interrupted recovery is undone")

    async def _not_down(self, host: str, reason: str = "") -> Node | None:
        """The node as it is now, unless it is DOWN, unknown, or its reason begins otherwise."""
        node = (await self.slurm.nodes([host])).get(host)
        return None if node is None or node.down or not node.reason.startswith(reason) else node

    async def _dead_and_settled(self, node: Node) -> bool:
        """False as soon as the node answers; True if it has not for `fence_confirm_s` and slurmctld has settled."""
        began = time.monotonic()
        while True:
            if await probe.probe(node.address, node.port or self.settings.slurmd_port) not in _DEAD:
                return False
            silent_s, up_s = time.monotonic() - began, await self.primary.up_s()
            if silent_s >= self.settings.fence_confirm_s and up_s >= self.settings.slurm_settle_s:
                return True
            await asyncio.sleep(SETTLING_S)


def _list(value: str | int | float | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else []
