"""From a report to a job that runs again: one `Recovery` per incarnation that lost nodes.

1. Reports are collected; a second dead node reported meanwhile joins the same recovery.
2. Each suspect is probed (slurmd and agent port) and judged by `decide`, on facts read from Slurm.
3. Confirmed: survivors and candidates are reserved, the dead are set DOWN, and the requeue is steered (`rescue`).
Each action is journaled before and after; `resume` finishes what a dead controller began.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gemini_hpc.agent.ports import candidates as agent_ports
from gemini_hpc.config import Settings
from gemini_hpc.control import probe, rescue
from gemini_hpc.control.decide import Act, Case, Decision, Port, budget, decide
from gemini_hpc.control.eventlog import EventLogs
from gemini_hpc.control.journal import Journal, Record
from gemini_hpc.control.registry import Registry, Track
from gemini_hpc.control.rescue import Rescue
from gemini_hpc.control.slurm import Slurm, SlurmError, UnknownJob
from gemini_hpc.control.slurmtext import PENDING, RUNNING, Job, Node
from gemini_hpc.wire.peer import EventRecord, InspectAsk, Report

log = logging.getLogger("gemini_hpc.control")

TICK_S = 0.05
REFRESH_S = 0.5
FRESH_S = 0.25
COLLECT_S = 0.3
WATCH_S = 60.0
MAX_SUSPECTS = 64
MAX_LATER = 4096
COOL_DOWN_S, MAX_COOL_DOWN_S = 1.0, 30.0
REASON = "gemini-hpc: no answer from slurmd and agent"


@dataclass
class Suspect:
    """One reported node."""

    host: str
    since: float = field(default_factory=time.monotonic)
    reported_at: float = field(default_factory=time.time)
    witnesses: set[str] = field(default_factory=set)
    series: probe.Series | None = None
    decision: Decision = field(default_factory=lambda: Decision(Act.WAIT, "just reported"))


@dataclass
class Facts:
    """What Slurm said at one moment."""

    at: float
    job: Job
    nodes: dict[str, Node]
    owners: dict[str, set[tuple[int, int]]]


class Recovery:
    """The failure of one or more nodes in one incarnation."""

    def __init__(self, home: Recoveries, track: Track, restart: int) -> None:
        self._home = home
        self._track = track
        self.restart = restart
        self.suspects: dict[str, Suspect] = {}
        self.acting = False
        self._others = (0, 0)
        self._others_at = 0.0

    @property
    def key(self) -> str:
        """Its name in the journal."""
        return f"{self._track.raw_id}.{self.restart}"

    def say(self, event: str, host: str = "", detail: str = "") -> None:
        """One line of the job's event log."""
        self._home.say(self._track.raw_id, self.restart, event, host, detail)

    def note(self, step: str, phase: str, **data: str | int | float | list[str]) -> None:
        """One line of the journal."""
        self._home.journal.write(self.key, step, phase, **data)

    def report(self, host: str, witnesses: set[str]) -> None:
        """Count a report; the first one about a host starts its probes."""
        suspect = self.suspects.get(host)
        if suspect is None:
            if len(self.suspects) >= MAX_SUSPECTS:
                return
            suspect = self.suspects[host] = Suspect(host)
            self.say("detected", host, f"reported by {','.join(sorted(witnesses))}")
        suspect.witnesses |= witnesses

    async def run(self) -> None:
        """Judge, and act if that is what follows."""
        try:
            facts = await self._judge()
            if facts is not None:
                self.acting = True
                await self._act(facts)
        finally:
            for suspect in self.suspects.values():
                if suspect.series is not None:
                    suspect.series.stop()

    # ---- judging ---------------------------------------------------------------------------------------

    async def _read(self) -> Facts:
        slurm, job = self._home.slurm, await self._home.slurm.job(self._track.raw_id)
        self._track.learn(job)
        names = [h for h in self.suspects if h in self._track.members(self.restart)]
        nodes = await slurm.nodes()
        owners = await slurm.owners(names) if names else {}
        return Facts(time.monotonic(), job, nodes, owners)

    def _start_probes(self, facts: Facts) -> None:
        settings = self._home.settings
        for suspect in self.suspects.values():
            node = facts.nodes.get(suspect.host)
            if suspect.series is not None or node is None or suspect.host not in self._track.members(self.restart):
                continue
            agent = self._track.agents.get(suspect.host)
            ports = [agent.port] if agent and agent.port else agent_ports(settings, self._track.raw_id)[:2]
            suspect.series = probe.Series(node.address, node.port or settings.slurmd_port, ports)

    async def _look_around(self, facts: Facts) -> None:
        """How many other nodes this host reaches: a controller that is cut off itself must not judge."""
        if time.monotonic() - self._others_at < REFRESH_S:
            return
        self._others_at = time.monotonic()
        accused = self._home.accused()
        members = [n for n in self._track.members(self.restart) if n not in accused]
        more = [h for t in self._home.registry.jobs.values() for h, a in t.agents.items() if a.connected]
        names = list(dict.fromkeys(members + [h for h in more if h not in accused]))[:64]
        port = self._home.settings.slurmd_port
        targets = {n: (facts.nodes[n].address, facts.nodes[n].port or port) for n in names if n in facts.nodes}
        targets = {n: t for n, t in targets.items() if not facts.nodes[n].down}
        doubtful = {n: t for n, t in targets.items() if not self._home.registry.vouched(n)}
        silent = [n for n, p in (await probe.reached(doubtful)).items() if p is Port.SILENT]
        self._others = (len(targets) - len(silent), len(targets))

    def _case(self, suspect: Suspect, facts: Facts) -> Case:
        settings, track = self._home.settings, self._track
        series, agent = suspect.series, self._home.registry.linked(track.raw_id, suspect.host)
        strangers = {uid for uid, _ in facts.owners.get(suspect.host, ()) if uid != track.user_id}
        return Case(
            node=suspect.host,
            restart=self.restart,
            members=track.members(self.restart),
            witnesses=frozenset(suspect.witnesses),
            suspects=frozenset(self.suspects),
            job=facts.job,
            slurm_node=facts.nodes.get(suspect.host),
            slurmd=series.found("slurmd") if series else Port.SILENT,
            agent=series.found("agent") if series else Port.SILENT,
            silent_s=series.silent_s if series else 0.0,
            agent_silent_s=series.agent_silent_s if series else 0.0,
            agent_linked=agent is not None and agent.link.last_heard > suspect.since,
            slurmd_before=track.slurmd_before(self.restart, suspect.host),
            reported_at=suspect.reported_at,
            strangers=frozenset(strangers),
            others_reached=self._others[0],
            others_asked=self._others[1],
            fenced=self._home.journal.fenced(settings.fence_budget_window_s),
            budget=budget(settings.fence_budget_nodes, len(facts.nodes)),
            confirm_s=settings.fence_confirm_s,
            guard=settings.node_max_jobs_guard,
        )

    def _decide(self, facts: Facts) -> list[Suspect]:
        """Judge every suspect; those that call for an action. Over the budget nobody is fenced at all (SITE 3)."""
        cases = {s.host: self._case(s, facts) for s in self.suspects.values()}
        verdicts = {host: decide(case) for host, case in cases.items()}
        fence = [host for host, verdict in verdicts.items() if verdict.act is Act.FENCE]
        for host in fence:
            case = cases[host]
            if case.fenced + len(fence) > case.budget:
                why = f"budget: {case.fenced} nodes fenced lately, {len(fence)} more wanted, {case.budget} allowed"
                verdicts[host] = Decision(Act.DISMISS, f"{why}; call the administrator")
        for suspect in self.suspects.values():
            verdict = verdicts[suspect.host]
            if verdict.act is Act.DISMISS and suspect.decision.act is not Act.DISMISS:
                self.say("dismissed", suspect.host, verdict.why)
            suspect.decision = verdict
        return [s for s in self.suspects.values() if s.decision.act in (Act.FENCE, Act.ADOPT, Act.REQUEUE)]

    def _ask_suspects(self) -> None:
        for host in self.suspects:
            agent = self._home.registry.linked(self._track.raw_id, host)
            if agent is not None:
                agent.link.send(InspectAsk())

    async def _judge(self) -> Facts | None:
        """Until every suspect is judged; the facts to act on, or None."""
        began, facts = time.monotonic(), None
        while time.monotonic() - began < WATCH_S:
            try:
                if facts is None or time.monotonic() - facts.at > REFRESH_S:
                    facts = await self._read()
                    self._start_probes(facts)
                    self._ask_suspects()
                self._start_probes(facts)
                await self._look_around(facts)
                found = self._decide(facts)
                if found and time.monotonic() - facts.at > FRESH_S:
                    facts = await self._read()
                    self._start_probes(facts)
                    found = self._decide(facts)
            except UnknownJob:
                return None
            except SlurmError as exc:
                log.warning("job=%s restart=%d slurm=%s", self._track.raw_id, self.restart, exc)
                await asyncio.sleep(REFRESH_S)
                continue
            waiting = [s for s in self.suspects.values() if s.decision.act is Act.WAIT]
            if found and not any(self._soon(s) for s in waiting):
                return facts
            if not found and not waiting:
                return None
            await asyncio.sleep(TICK_S)
        for suspect in self.suspects.values():
            if suspect.decision.act is Act.WAIT:
                self.say("dismissed", suspect.host, f"not confirmed within {WATCH_S:g} s: {suspect.decision.why}")
        return None

    def _soon(self, suspect: Suspect) -> bool:
        """Whether a suspect that is not confirmed yet is worth waiting for: it is silent, or was just reported."""
        if time.monotonic() - suspect.since < COLLECT_S:
            return True
        confirm_s = self._home.settings.fence_confirm_s
        silent_s = suspect.series.silent_s if suspect.series else 0.0
        if suspect.host in self._track.members(self.restart) and (not suspect.series or not suspect.series.rounds):
            return True
        return 0 < silent_s < confirm_s and time.monotonic() - suspect.since < 2 * confirm_s + COLLECT_S

    # ---- acting ----------------------------------------------------------------------------------------

    async def _act(self, facts: Facts) -> None:
        job, track, home = facts.job, self._track, self._home
        chosen = {s.host: s.decision for s in self.suspects.values()}
        dead = [h for h, d in chosen.items() if d.act in (Act.FENCE, Act.ADOPT)]
        rebooted = [h for h, d in chosen.items() if d.act is Act.REQUEUE]
        members = track.members(self.restart)
        for host in [*dead, *rebooted]:
            self.say("confirmed", host, chosen[host].why)
        alive = await self._alive([h for h in members if h not in dead], facts)
        self.note(
            "open",
            "before",
            job=job.raw_id,
            restart=self.restart,
            user_id=job.user_id,
            members=list(members),
            dead=dead,
            survivors=alive,
            original=track.stored.original,
        )
        helper = self._rescue(job.user_id, alive, dead)
        async with home.reserving:
            # One recovery at a time looks for candidates: two reservations may not overlap.
            await helper.reserve(job, facts.nodes, len(dead) + home.settings.reserve_candidates)
        try:
            for host in dead:
                if chosen[host].act is Act.FENCE:
                    await self.fence(host)
                else:
                    self.say("down", host, "by Slurm itself")
            if rebooted and not dead and job.state not in (PENDING,):
                await self._send_back(job)
        except BaseException:
            with suppress(SlurmError):
                await helper.clean()
            raise
        await self.finish(helper)

    async def _send_back(self, job: Job) -> None:
        began = time.monotonic()
        self.note("requeue", "before", state=job.state)
        await self._home.slurm.requeue(job)
        self.note("requeue", "after")
        self.say("sent_back", "", f"scontrol requeue [{(time.monotonic() - began) * 1000:.0f} ms]")

    def _rescue(self, user_id: int, survivors: list[str], dead: list[str]) -> Rescue:
        async def fence_survivor(host: str) -> bool:
            return await self._fence_if_allowed(host)

        return Rescue(
            slurm=self._home.slurm,
            raw_id=self._track.raw_id,
            restart=self.restart,
            user_id=user_id,
            survivors=survivors,
            dead=dead,
            original=list(self._track.stored.original),
            slurmd_port=self._home.settings.slurmd_port,
            confirm_s=self._home.settings.fence_confirm_s,
            say=self.say,
            note=self.note,
            may_requeue=True,
            fence=fence_survivor,
            vouched=self._home.registry.vouched,
        )

    async def finish(self, helper: Rescue) -> None:
        """Steer to the end and close the journal's entry."""
        outcome = await helper.follow()
        self.note("close", "after", outcome=outcome)
        log.info("job=%s restart=%d outcome=%s", self._track.raw_id, self.restart, outcome)
        if outcome != "running":
            self.say("closed", "", outcome)

    async def _alive(self, names: list[str], facts: Facts) -> list[str]:
        port = self._home.settings.slurmd_port
        known = [n for n in names if n in facts.nodes and not facts.nodes[n].down]
        seen = await probe.reached({n: (facts.nodes[n].address, facts.nodes[n].port or port) for n in known})
        return [n for n in known if seen[n] is Port.ANSWERS]

    async def fence(self, host: str) -> None:
        """Set a node DOWN and drained."""
        began = time.monotonic()
        reason = f"{REASON}, job {self._track.raw_id} restart {self.restart}"
        self.note("down", "before", node=host)
        await self._home.slurm.node_down(host, reason)
        self.note("down", "after", node=host)
        self.say("down", host, f"[{(time.monotonic() - began) * 1000:.0f} ms]")

    async def _fence_if_allowed(self, host: str) -> bool:
        """A survivor died as well: the same vetoes hold, the silence has been seen by the steering's own probes."""
        settings, slurm = self._home.settings, self._home.slurm
        try:
            nodes, owners = await slurm.nodes(), await slurm.owners([host])
            if nodes[host].down:
                return True
            strangers = {uid for uid, _ in owners[host] if uid != self._track.user_id}
            fenced = self._home.journal.fenced(settings.fence_budget_window_s)
            limit = budget(settings.fence_budget_nodes, len(nodes))
            if (strangers and settings.node_max_jobs_guard) or fenced >= limit:
                self.say("not_fenced", host, "other owners' jobs" if strangers else f"budget of {limit}")
                return False
            await self.fence(host)
        except (SlurmError, KeyError) as exc:
            self.say("not_fenced", host, str(exc))
            return False
        return True


class Recoveries:
    """All recoveries of this controller."""

    def __init__(
        self, settings: Settings, slurm: Slurm, journal: Journal, logs: EventLogs, registry: Registry
    ) -> None:
        self.settings, self.slurm, self.journal, self.registry = settings, slurm, journal, registry
        self._logs = logs
        self._active: dict[tuple[int, int], Recovery] = {}
        self._cool: dict[tuple[int, int], tuple[float, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._later: set[tuple[int, int, str, str]] = set()
        self._resuming = set(journal.left_open())
        self.reserving = asyncio.Lock()

    def say(self, raw_id: int, restart: int, event: str, host: str = "", detail: str = "") -> None:
        """One line of a job's event log, and of the service's own log."""
        log.info("job=%d restart=%d event=%s host=%s detail=%s", raw_id, restart, event, host or "-", detail)
        self._logs.add(raw_id, [EventRecord(time.time(), event, host, restart, 0, detail[:400])])

    def accused(self) -> set[str]:
        """Hosts that some job's agents have reported and that are not cleared."""
        return {h for r in self._active.values() for h, s in r.suspects.items() if s.decision.act is not Act.DISMISS}

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
        what = (track.raw_id, message.restart, message.host, reporter)
        if what in self._later or len(self._later) >= MAX_LATER:
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
            helper = recovery._rescue(job.user_id, names["survivors"], names["dead"])
            alive = {r.name for r in await self.slurm.reservations()}
            helper.reservation = next((n for n in reserved if n in alive), "")
            if not helper.reservation:
                async with self.reserving:
                    nodes = await self.slurm.nodes()
                    await helper.reserve(job, nodes, len(names["dead"]) + self.settings.reserve_candidates)
            await recovery.finish(helper)
        finally:
            self._ended((raw_id, restart))

    async def _delete(self, job: Job | None, name: str) -> None:
        with suppress(SlurmError):
            if job is not None and not job.over and job.reservation == name:
                await self.slurm.detach_reservation(job)
            await self.slurm.delete_reservation(name)

    async def _half_fenced(self, host: str, raw_id: int, restart: int) -> None:
        """Died between drain and DOWN: finish on a dead node, give a healthy one back."""
        node = (await self.slurm.nodes([host])).get(host)
        if node is None or node.down or not node.reason.startswith(REASON):
            return
        port = node.port or self.settings.slurmd_port
        if await probe.probe(node.address, port) is Port.SILENT:
            await self.slurm.node_down(host, f"{REASON}, job {raw_id} restart {restart}")
        else:
            await self.slurm.node_resume(host)
            self.say(raw_id, restart, "resumed", host, "it answers: the drain of an interrupted recovery is undone")


def _list(value: str | int | float | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else []
