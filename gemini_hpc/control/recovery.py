"""From a report to a job that runs again: one `Recovery` per incarnation that lost nodes.

1. Reports are collected; a second dead node reported meanwhile joins the same recovery.
2. Each suspect is probed (slurmd and agent port) and judged by `decide`, on facts read from Slurm.
3. Confirmed: survivors and candidates are reserved, the dead are set DOWN, and the requeue is steered (`rescue`).
Each action is journaled before and after; `recoveries.Recoveries` finishes what a dead controller began.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gemini_hpc.agent.ports import candidates as agent_ports
from gemini_hpc.control import probe
from gemini_hpc.control.decide import Act, Case, Decision, Port, budget, candidates_wanted, decide
from gemini_hpc.control.registry import Track
from gemini_hpc.control.rescue import Rescue
from gemini_hpc.control.slurm import SlurmError, UnknownJob
from gemini_hpc.control.slurm.facts import PENDING, Job, Node
from gemini_hpc.wire.picture import InspectAsk

if TYPE_CHECKING:
    from gemini_hpc.control.recoveries import Recoveries

log = logging.getLogger("gemini_hpc.control")

TICK_S = 0.05
REFRESH_S = 0.5
FRESH_S = 0.25
COLLECT_S = 0.3
WATCH_S = 60.0
LINKED_FACTOR = 2.0  # an agent that was heard of within so many confirmation times is there
MAX_SUSPECTS = 64
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
    slurm_up_s: float


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
        up_s = await self._home.primary.up_s()
        return Facts(time.monotonic(), job, nodes, owners, up_s)

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
        known = (h for h in dict.fromkeys(members + [h for h in more if h not in accused]) if h in facts.nodes)
        names = list(known)[:MAX_SUSPECTS]
        port = self._home.settings.slurmd_port
        targets = {n: (facts.nodes[n].address, facts.nodes[n].port or port) for n in names}
        targets = {n: t for n, t in targets.items() if not facts.nodes[n].down}
        doubtful = {n: t for n, t in targets.items() if not self._home.registry.vouched(n)}
        silent = [n for n, p in (await probe.reached(doubtful)).items() if p in (Port.SILENT, Port.HANGS)]
        self._others = (len(targets) - len(silent), len(targets))

    def _case(self, suspect: Suspect, facts: Facts) -> Case:
        settings, track = self._home.settings, self._track
        series, agent = suspect.series, self._home.registry.linked(track.raw_id, suspect.host)
        strangers = {uid for uid, _ in facts.owners.get(suspect.host, ()) if uid != track.user_id}
        lately = time.monotonic() - LINKED_FACTOR * settings.fence_confirm_s
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
            hangs=series.hangs if series else False,
            silent_s=series.silent_s if series else 0.0,
            agent_silent_s=series.agent_silent_s if series else 0.0,
            agent_linked=agent is not None and agent.link.last_heard > max(suspect.since, lately),
            slurmd_before=track.slurmd_before(self.restart, suspect.host),
            reported_at=suspect.reported_at,
            strangers=frozenset(strangers),
            others_reached=self._others[0],
            others_asked=self._others[1],
            fenced=self._home.journal.fenced(settings.fence_budget_window_s),
            budget=budget(settings.fence_budget_nodes, len(facts.nodes)),
            confirm_s=settings.fence_confirm_s,
            guard=settings.node_max_jobs_guard,
            slurm_up_s=facts.slurm_up_s + time.monotonic() - facts.at,
            settle_s=settings.slurm_settle_s,
        )

    def _decide(self, facts: Facts) -> list[Suspect]:
        """Judge every suspect; those that call for an action. Where more nodes are silent, all jobs together, than
        the budget has left, none of them is fenced (SITE 3)."""
        cases = {s.host: self._case(s, facts) for s in self.suspects.values()}
        verdicts = {host: decide(case) for host, case in cases.items()}
        fence = [host for host, verdict in verdicts.items() if verdict.act is Act.FENCE]
        silent = self._home.silent(set(fence)) if fence else set()
        for host in fence:
            case = cases[host]
            if case.fenced + len(silent) > case.budget:
                why = f"budget: {case.fenced} nodes fenced lately, {len(silent)} silent now, {case.budget} allowed"
                verdicts[host] = Decision(Act.DISMISS, f"{why}; call the administrator")
                self._home.remember_silent(silent)
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
        watch_s = WATCH_S + self._home.settings.slurm_settle_s
        while time.monotonic() - began < watch_s:
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
                self.say("dismissed", suspect.host, f"not confirmed within {watch_s:g} s: {suspect.decision.why}")
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
        helper = self.rescue(job.user_id, alive, dead)
        async with home.reserving:
            # One recovery at a time looks for candidates: two reservations may not overlap.
            await helper.reserve(job, facts.nodes, self._wanted(job, facts.nodes, dead))
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

    def _wanted(self, job: Job, nodes: dict[str, Node], dead: list[str]) -> int:
        return candidates_wanted(job, nodes, len(dead), self._home.settings.reserve_candidates)

    async def _send_back(self, job: Job) -> None:
        began = time.monotonic()
        self.note("requeue", "before", state=job.state)
        await self._home.slurm.requeue(job)
        self.note("requeue", "after")
        self.say("sent_back", "", f"scontrol requeue [{(time.monotonic() - began) * 1000:.0f} ms]")

    def rescue(self, user_id: int, survivors: list[str], dead: list[str]) -> Rescue:
        """The helper that steers this job's requeue."""
        home, track = self._home, self._track

        async def fence_survivor(host: str) -> bool:
            return await self._fence_if_allowed(host)

        def completing(seconds: float) -> None:
            home.longest_epilog_s = max(home.longest_epilog_s, seconds)

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
            vouched=home.registry.vouched,
            own_request=track.stored.reservation,
            pinned=track.remember_pin,
            completing=completing,
            minutes=home.reservation_minutes(),
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
            up_s = await self._home.primary.up_s()
            why = ""
            if strangers and settings.node_max_jobs_guard:
                why = "other owners' jobs"
            elif fenced >= limit:
                why = f"budget of {limit}"
            elif up_s < settings.slurm_settle_s:
                why = f"slurmctld has answered for {up_s:.0f} of {settings.slurm_settle_s:g} s"
            if why:
                self.say("not_fenced", host, why)
                return False
            await self.fence(host)
        except (SlurmError, KeyError) as exc:
            self.say("not_fenced", host, str(exc))
            return False
        return True
