"""The way from a report to a running job: one `Recovery` for each incarnation that lost nodes.

1. Reports are collected. A second dead node that is reported meanwhile joins the same recovery.
2. Each suspect is probed and judged by `fencing`, on facts read from Slurm.
3. After confirmation, survivors and candidates are reserved, the dead are set DOWN, and the requeue is steered
   (`requeue`). A node that is not ours to fence is watched further: if Slurm finds it dead, the requeue is steered
   the same way.

Each action is journaled before and after. `recoveries.Recoveries` finishes what a dead controller began.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from dataclasses import dataclass, replace

from gemini_hpc import clock
from gemini_hpc.controller import give_back, probe
from gemini_hpc.controller.fencing import (
    REASON,
    Act,
    Case,
    Claim,
    Port,
    Verdict,
    Veto,
    compute_budget,
    compute_user_budget,
    judge_case,
)
from gemini_hpc.controller.recovery_context import ActiveRecovery, RecoveryContext, Suspect
from gemini_hpc.controller.registry import Track
from gemini_hpc.controller.requeue import Requeue
from gemini_hpc.controller.requeue_rules import count_candidates
from gemini_hpc.controller.reservation import Held, describe_ms
from gemini_hpc.controller.survivors import Survivors
from gemini_hpc.controller.withheld import FENCE, REQUEUE
from gemini_hpc.core.rescue import LIMIT_S
from gemini_hpc.slurm import SlurmError, SlurmRefused, SlurmUnreachable, UnknownJob
from gemini_hpc.slurm.facts import PENDING, RUNNING, SLURMD_TIMEOUT_S, Job, Node
from gemini_hpc.wire.inspect_schema import InspectAsk
from gemini_hpc.wire.ports import list_candidates as agent_ports

log = logging.getLogger("gemini_hpc.controller")

TICK_S, SLOW_TICK_S = 0.05, 0.5  # pause between two judgements; slow while all is left to Slurm
REFRESH_S, SLOW_REFRESH_S = 0.5, 2.0  # Slurm's facts are read again after this
FRESH_S = 0.25  # facts for an action are at most this old
AGAIN_S = 2.0  # retry for this long if our own reachability check fails or Slurm does not answer, before setting DOWN
RESERVE_S = 10.0  # retry for this long to reserve nodes if Slurm does not answer
COLLECT_S = 0.3  # a new report is awaited for this long: more nodes may have died
WATCH_S = 60.0  # a suspect is judged for this long before it is dismissed
LEFT_S = 2 * SLURMD_TIMEOUT_S  # nodes left to Slurm are watched for so long
LINKED_FACTOR = 2.0  # an agent counts as connected if a message came within so many confirmation times
MAX_SUSPECTS = 64
ACTS = (Act.FENCE, Act.ADOPT, Act.REQUEUE)
BUDGETS = (Veto.BUDGET, Veto.USER_BUDGET)
DEAD_BUT_NOT_OURS = (*BUDGETS, Veto.STRANGERS)


@dataclass
class SlurmFacts:
    """Slurm's facts at one moment. `job` is None if Slurm no longer knows the job."""

    read_at: float
    job: Job | None
    nodes: dict[str, Node]
    owners: dict[str, set[tuple[int, int]]]
    slurm_up_s: float


class Recovery(ActiveRecovery):
    """The recovery from the failure of one or more nodes in one incarnation."""

    def __init__(self, home: RecoveryContext, track: Track, restart: int) -> None:
        super().__init__(track.user_id)
        self._home = home
        self._track = track
        self.restart = restart
        self._ahead: Requeue | None = None
        self._has_logged_rescue = False

    @property
    def key(self) -> str:
        """Return the recovery's name in the journal."""
        return f"{self._track.raw_id}.{self.restart}"

    def log_event(self, event: str, host: str = "", detail: str = "") -> None:
        """Write one line to the job's event log."""
        self._home.log_event(self._track.raw_id, self.restart, event, host, detail)

    def write_journal(self, step: str, phase: str, **data: str | int | float | list[str]) -> None:
        """Write one line to the journal."""
        self._home.journal.write_line(self.key, step, phase, **data)

    def on_task_death(self, why: str) -> None:
        """Log that a task of this recovery died of a fault of ours. The task is restarted."""
        self.log_event("task_died", "", why)

    def accept_report(self, host: str, witnesses: set[str], since: float) -> None:
        """Accept a report. The first report about a host starts its probes.

        Args:
            host: The silent host.
            witnesses: The hosts that could not reach it.
            since: Unix time at which it was found silent.
        """
        if host not in self.suspects and len(self.suspects) < MAX_SUSPECTS:
            self.suspects[host] = Suspect(host, found_at=since)
            self.log_event("detected", host, f"reported by {','.join(sorted(witnesses))}")

    async def run(self) -> None:
        """Judge the suspects, and act if that follows."""
        try:
            facts = await self._judge_all()
            if facts is not None and (mode := self._home.gate.explain_job_refusal(facts.job)):
                self._withhold(mode)
            elif facts is not None:
                self.is_acting = True
                await self._act(facts)
            elif self._ahead is not None:
                await self._ahead.held.release_reservation()
                self.write_journal("close", "after", outcome="not acted on")
        finally:
            for suspect in self.suspects.values():
                suspect.stop()

    def _withhold(self, mode: str) -> None:
        """Record what would follow from the judgement now.

        A node that would be set DOWN counts in the budget, so that the next judgement is the one of `act`.
        """
        raw_id = self._track.raw_id
        for host, suspect in self.suspects.items():
            verdict = suspect.verdict
            if verdict.act is Act.FENCE:
                if self._home.withheld.record_act(FENCE, raw_id, self.restart, host, verdict.why, mode):
                    self.write_journal("down", "withheld", node=host, user_id=self._track.user_id)
            elif verdict.act is Act.REQUEUE:
                self._home.withheld.record_act(REQUEUE, raw_id, self.restart, host, verdict.why, mode)
            elif verdict.act is Act.ADOPT:
                what = f"held the survivors and pinned the requeue: {host} is DOWN in Slurm"
                self._home.withheld.log_once(raw_id, self.restart, what, mode)

    # ---- judging ---------------------------------------------------------------------------------------

    async def _read(self) -> SlurmFacts:
        """Return fresh facts from Slurm.

        Raises:
            UnknownJob: The job is gone.
            SlurmError: Slurm did not answer.
        """
        slurm, job = self._home.slurm, await self._home.slurm.read_job(self._track.raw_id)
        self._track.record_job(job)
        nodes = await slurm.read_nodes()
        # Slurm cannot be queried about nodes without a record. No action is taken on them either.
        names = [h for h in self.suspects if h in self._track.list_members(self.restart) and h in nodes]
        owners = await slurm.read_owners(names) if names else {}
        up_s = await self._home.primary.measure_up_s()
        return SlurmFacts(clock.monotonic(), job, nodes, owners, up_s)

    def _start_probes(self, facts: SlurmFacts) -> None:
        for suspect in self.suspects.values():
            node = facts.nodes.get(suspect.host)
            if suspect.seen is None and node is not None and suspect.host in self._track.list_members(self.restart):
                suspect.seen = probe.RepeatedProbe(self._build_target(node), self.on_task_death)

    def _build_target(self, node: Node) -> probe.Target:
        settings, agent = self._home.settings, self._track.agents.get(node.name)
        ports = [agent.port] if agent and agent.port else agent_ports(settings, self._track.raw_id)[:2]
        return probe.Target.build(settings, node.address, node.port, ports)

    async def _probe_others(self, facts: SlurmFacts, *, is_sure: bool = False) -> None:
        accused = self._home.list_accused() | self.suspects.keys()
        await self._home.reach.probe_members(
            self._track.list_members(self.restart), accused, facts.nodes, must_be_fresh=is_sure
        )

    async def _read_sure(self, facts: SlurmFacts) -> SlurmFacts:
        """Return facts that an action may be based on: fresh, and with proof that this host still reaches others."""
        for _ in range(2):
            if clock.monotonic() - facts.read_at > FRESH_S:
                facts = await self._read()
                self._start_probes(facts)
            await self._probe_others(facts, is_sure=True)
            if clock.monotonic() - facts.read_at <= FRESH_S:
                break
        return facts

    def _build_case(self, suspect: Suspect, facts: SlurmFacts) -> Case:
        home, settings, track = self._home, self._home.settings, self._track
        seen, host, agent = suspect.seen, suspect.host, home.registry.find_agent(track.raw_id, suspect.host)
        strangers = {uid for uid, _ in facts.owners.get(host, ()) if uid != track.user_id}
        lately = clock.monotonic() - LINKED_FACTOR * settings.fence_confirm_s
        window_s, whole = (
            settings.fence_budget_window_s,
            compute_budget(settings.fence_budget_nodes, len(facts.nodes)),
        )
        # A survivor may already be in the next incarnation, and its absence may be reported there.
        later, dead = suspect.claim is Claim.SURVIVOR, self.survivors.dead if self.survivors is not None else ()
        return Case(
            claim=suspect.claim,
            node=host,
            restart=self.restart,
            members=track.list_members(self.restart),
            witnesses=track.witnesses.list_fresh(self.restart, host, clock.monotonic(), counts_later=later),
            # Nodes that suspect each other: the one that is alive by all evidence is a witness again.
            suspects=frozenset(self.list_accused().union(dead)),
            job=facts.job,
            slurm_node=facts.nodes.get(host),
            slurmd=seen.judge_port("slurmd") if seen else Port.SILENT,
            agent=seen.judge_port("agent") if seen else Port.SILENT,
            kernel=seen.judge_port("kernel") if seen else Port.SILENT,
            silent_s=suspect.silent_s,
            agent_silent_s=seen.agent_silent_s if seen else 0.0,
            is_agent_linked=agent is not None and agent.link.last_heard > max(suspect.since, lately),
            slurmd_before=track.find_slurmd_start(self.restart, host),
            found_at=suspect.found_at,
            strangers=frozenset(strangers),
            others_reached=home.reach.reached,
            others_asked=home.reach.asked,
            fenced=home.journal.count_fenced(window_s, without=host),
            budget=whole,
            silent=len(home.list_silent({host})),
            user_fenced=home.journal.count_fenced(window_s, user_id=track.user_id, without=host),
            user_budget=compute_user_budget(settings.fence_budget_user_nodes, whole),
            user_silent=len(home.list_silent({host}, track.user_id)),
            confirm_s=settings.fence_confirm_s,
            is_guarded=settings.node_max_jobs_guard,
            slurm_up_s=facts.slurm_up_s + clock.monotonic() - facts.read_at,
            settle_s=settings.slurm_settle_s,
            has_finished=bool(track.check_finished(self.restart)) or track.has_gone_on(self.restart, [host]),
        )

    def _judge(self, suspect: Suspect, facts: SlurmFacts) -> Verdict:
        """Judge one suspect now. Log changes."""
        verdict, before = judge_case(self._build_case(suspect, facts)), suspect.verdict
        suspect.verdict, suspect.node = verdict, facts.nodes.get(suspect.host)
        if verdict.veto in BUDGETS:
            # A mass outage: these hosts count again when the next one is judged.
            self._home.remember_silent(self._home.list_silent({suspect.host}))
            self._home.alerts.send_alert(verdict.veto.value, self._track.raw_id, suspect.host, verdict.why)
        if verdict.act is Act.DISMISS and before.act is not Act.DISMISS:
            self.log_event("dismissed", suspect.host, verdict.why)
        if verdict.act is Act.LEAVE and suspect.left is not verdict.veto:
            suspect.left = verdict.veto
            self.log_event("not_fenced", suspect.host, verdict.why)
        return verdict

    def _decide(self, facts: SlurmFacts) -> list[Suspect]:
        """Judge every suspect. Return those that call for an action."""
        return [s for s in self.suspects.values() if self._judge(s, facts).act in ACTS]

    def _ask_suspects(self) -> None:
        for host in self.suspects:
            agent = self._home.registry.find_agent(self._track.raw_id, host)
            if agent is not None:
                agent.link.send(InspectAsk())

    async def _judge_all(self) -> SlurmFacts | None:
        """Judge until every suspect has a verdict. Return the facts to act on, or None."""
        began, facts, quick = clock.monotonic(), None, True
        watch_s = WATCH_S + self._home.settings.slurm_settle_s
        while (passed_s := clock.monotonic() - began) < max(watch_s, LEFT_S):
            refresh_s = REFRESH_S if quick else SLOW_REFRESH_S
            try:
                if facts is None or clock.monotonic() - facts.read_at > refresh_s:
                    facts = await self._read()
                    self._ask_suspects()
                self._start_probes(facts)
                await self._probe_others(facts)
                found = self._decide(facts)
                if found:
                    facts = await self._read_sure(facts)
                    found = self._decide(facts)
            except UnknownJob:
                return None
            except SlurmError as exc:
                log.warning("job=%s restart=%d slurm=%s", self._track.raw_id, self.restart, exc)
                await asyncio.sleep(REFRESH_S)
                continue
            waiting = [s for s in self.suspects.values() if s.verdict.act is Act.WAIT]
            left = [s for s in self.suspects.values() if s.verdict.act is Act.LEAVE]
            if (
                found
                and not any(self._is_soon_confirmed(s) for s in waiting)
                and not self._is_rescue_under_way(passed_s)
            ):
                return facts
            if not found and not left and (not waiting or passed_s >= watch_s):
                break
            await self._hold_ahead(facts)
            # otherwise all is left to Slurm, whose decision is awaited
            quick = bool(found or waiting) and passed_s < watch_s
            await asyncio.sleep(TICK_S if quick else SLOW_TICK_S)
        for suspect in self.suspects.values():
            if suspect.verdict.act in (Act.WAIT, Act.LEAVE):
                passed_s = clock.monotonic() - began
                self.log_event(
                    "dismissed", suspect.host, f"not confirmed within {passed_s:.0f} s: {suspect.verdict.why}"
                )
        return None

    def _is_rescue_under_way(self, passed_s: float) -> bool:
        """Return whether agents copy state from living ranks: setting a node DOWN would end those ranks."""
        rescuing = passed_s < LIMIT_S and self._track.is_rescuing(self.restart)
        if rescuing and not self._has_logged_rescue:
            self._has_logged_rescue = True
            self.log_event("rescuing", "", "the job's agents copy live state of its ranks: the step ends afterwards")
        return rescuing

    async def _hold_ahead(self, facts: SlurmFacts) -> None:
        """Reserve the job's own living nodes if a dead node is not ours to fence.

        Slurm will requeue the job some time, and no other job may take its nodes first. No other job waits for
        them, since this job holds them now.
        """
        left = [s.host for s in self.suspects.values() if s.verdict.veto in DEAD_BUT_NOT_OURS]
        if self._ahead is not None or facts.job is None or not left or self._home.gate.explain_job_refusal(facts.job):
            return
        alive = self._list_alive(left, facts)
        self._ahead = self.build_requeue(facts.job, alive, left)
        self._open(facts.job, left, alive, ahead=1)
        try:
            await self._ahead.reserve_nodes(facts.job, facts.nodes, 0)
        except SlurmError as exc:
            log.warning("job=%s restart=%d slurm=%s", self._track.raw_id, self.restart, exc)

    def _open(self, job: Job, dead: list[str], alive: list[str], **more: int) -> None:
        """Open the journal's entry. `ahead=1` means that nodes are held and no other action has begun."""
        self.write_journal(
            "open",
            "before",
            job=job.raw_id,
            restart=self.restart,
            user_id=job.user_id,
            members=list(self._track.list_members(self.restart)),
            dead=dead,
            survivors=alive,
            original=self._track.stored.original,
            **more,
        )

    def _list_alive(self, dead: list[str], facts: SlurmFacts) -> list[str]:
        """Return all other nodes of the job that Slurm does not consider DOWN. The survey finds out which answer."""
        members = self._track.list_members(self.restart)
        return [h for h in members if h not in dead and h in facts.nodes and not facts.nodes[h].is_down]

    def _is_soon_confirmed(self, suspect: Suspect) -> bool:
        """Return whether a suspect may soon be confirmed: it is silent, or was just reported."""
        if clock.monotonic() - suspect.since < COLLECT_S:
            return True
        confirm_s = self._home.settings.fence_confirm_s
        if suspect.host in self._track.list_members(self.restart) and (not suspect.seen or not suspect.seen.rounds):
            return True
        return 0 < suspect.silent_s < confirm_s and clock.monotonic() - suspect.since < 2 * confirm_s + COLLECT_S

    async def judge_taken_over(self, host: str) -> Verdict:
        """Judge again, under the same vetoes, a node that an earlier controller had begun to fence.

        The judgement waits as long as a report is watched.

        Raises:
            SlurmError: Slurm did not answer.
        """
        suspect = self.suspects[host] = Suspect(host, Claim.TAKEN_OVER)
        began, watch_s = clock.monotonic(), WATCH_S + self._home.settings.slurm_settle_s
        try:
            while clock.monotonic() - began < watch_s:
                facts = await self._read()
                self._start_probes(facts)
                await self._probe_others(facts)
                verdict = self._judge(suspect, facts)
                if verdict.act is Act.FENCE:
                    verdict = self._judge(suspect, await self._read_sure(facts))
                if verdict.act is not Act.WAIT:
                    break
                await asyncio.sleep(FRESH_S)
        finally:
            suspect.stop()
            del self.suspects[host]
        return suspect.verdict

    async def _judge_survivor(self, host: str, seen: probe.ProbeHistory) -> bool:
        """Judge a survivor that has fallen silent, by the same rules. Return whether it is dead and DOWN now."""
        suspect = self.suspects.setdefault(host, Suspect(host, Claim.SURVIVOR))
        suspect.seen = seen
        try:
            facts = await self._read()
            await self._probe_others(facts)
            verdict = self._judge(suspect, facts)
            if verdict.act is Act.FENCE:
                facts, began = await self._read_sure(facts), clock.monotonic()
                if host in facts.nodes:
                    seen.add_result(await probe.probe_node(self._build_target(facts.nodes[host])), began)
                verdict = self._judge(suspect, facts)
            if verdict.act is Act.FENCE:
                self.log_event("confirmed", host, verdict.why)
                await self.fence_node(host, suspect.node)
            if verdict.act not in (Act.FENCE, Act.ADOPT):
                return False
        except SlurmError as exc:
            log.warning("job=%s restart=%d host=%s slurm=%s", self._track.raw_id, self.restart, host, exc)
            return False
        del self.suspects[host]
        return True

    # ---- acting ----------------------------------------------------------------------------------------

    async def _act(self, facts: SlurmFacts) -> None:
        job, chosen = facts.job, {s.host: s.verdict for s in self.suspects.values()}
        if job is None:
            return
        confirmed = [h for h, v in chosen.items() if v.act in (Act.FENCE, Act.ADOPT)]
        dead = list(confirmed)  # survivors that prove dead join it
        rebooted = [h for h, v in chosen.items() if v.act is Act.REQUEUE]
        for host in [*dead, *rebooted]:
            self.log_event("confirmed", host, chosen[host].why)
        alive = self._list_alive(dead, facts)
        self._open(job, dead, alive)
        helper = self.build_requeue(job, alive, dead)
        if self._ahead is not None:
            helper.held.name, helper.held.is_own = self._ahead.held.name, self._ahead.held.is_own
        await self._reserve(helper, job, facts, len(dead))
        try:
            spared: list[str] = []
            for host in confirmed:
                verdict = chosen[host]
                if verdict.act is Act.FENCE:
                    verdict = await self._judge_again(self.suspects[host], facts)
                # There is no `await` between this judgement and its action.
                if verdict.act is Act.FENCE:
                    await self.fence_node(host, self.suspects[host].node)
                elif verdict.act is Act.ADOPT:
                    self.log_event("down", host, "by Slurm itself")
                else:
                    spared.append(host)
            self._release_suspects(spared, helper)
            dead = helper.survivors.dead
            if rebooted and not dead and job.state not in (PENDING,):
                await self._send_back(job)
        except Exception:
            with suppress(SlurmError):
                await helper.held.release_reservation()
            raise
        if not dead and not rebooted:
            await helper.held.release_reservation()
            self.write_journal("close", "after", outcome="nobody dead")
            self.log_event("closed", "", "no node is dead any more")
            return
        await self.finish_requeue(helper)

    async def _reserve(self, helper: Requeue, job: Job, facts: SlurmFacts, dead: int) -> None:
        """Hold nodes for the requeue.

        No node is fenced on these facts: each dead node is judged once more afterwards.

        Raises:
            SlurmError: Slurm refused, or did not answer for `RESERVE_S`.
        """
        began = clock.monotonic()
        while True:
            try:
                await helper.reserve_nodes(job, facts.nodes, self.count_wanted(job, facts.nodes, dead))
                return
            except SlurmUnreachable as exc:
                if clock.monotonic() - began > RESERVE_S:
                    raise
                log.warning("job=%s restart=%d slurm=%s", self._track.raw_id, self.restart, exc)
            await asyncio.sleep(REFRESH_S)

    async def _judge_again(self, suspect: Suspect, facts: SlurmFacts) -> Verdict:
        """Judge a suspect again right before it is set DOWN.

        The node may have come back while nodes were reserved or while another node was set DOWN.

        Raises:
            SlurmError: Slurm did not answer.
        """
        began = clock.monotonic()
        while True:
            in_time = clock.monotonic() - began < AGAIN_S
            try:
                facts = await self._read_sure(facts)
            except UnknownJob:
                facts = replace(facts, job=None)
            except SlurmError:
                if not in_time:
                    raise
                await asyncio.sleep(REFRESH_S)
                continue
            verdict = self._judge(suspect, facts)
            if verdict.veto is not Veto.REACH or not in_time:
                return verdict
            await asyncio.sleep(TICK_S)

    def _release_suspects(self, hosts: list[str], helper: Requeue) -> None:
        """Treat nodes that were confirmed but are not dead now like the job's other nodes."""
        for host in hosts:
            suspect = self.suspects.pop(host)
            suspect.stop()
            helper.survivors.dead.remove(host)
            helper.survivors.names.append(host)
            if suspect.verdict.act is Act.WAIT:
                self.log_event("dismissed", host, suspect.verdict.why)

    def count_wanted(self, job: Job, nodes: dict[str, Node], dead: int) -> int:
        """Return how many nodes to hold beside the survivors."""
        return count_candidates(job, nodes, dead, self._home.settings.reserve_candidates)

    async def _send_back(self, job: Job) -> None:
        began = clock.monotonic()
        self.write_journal("requeue", "before", state=job.state)
        try:
            await self._home.slurm.requeue_job(job)
        except SlurmRefused as exc:
            # Slurm may have been faster: the batch host's registration shows its boot. The job is followed in the
            # same way, and its reservation stays.
            self.write_journal("requeue", "failed", error=str(exc))
            self.log_event("refused", "", str(exc))
            return
        self.write_journal("requeue", "after")
        self.log_event("sent_back", "", f"scontrol requeue {describe_ms(began)}")

    def build_requeue(self, job: Job, survivors: list[str], dead: list[str]) -> Requeue:
        """Return the helper that steers this job's requeue."""
        home, track = self._home, self._track

        def on_completing(seconds: float) -> None:
            home.longest_epilog_s = max(home.longest_epilog_s, seconds)

        self.survivors = Survivors(
            names=survivors,
            dead=dead,
            log_event=self.log_event,
            build_target=self._build_target,
            is_vouched=home.registry.is_vouched,
            confirm_s=home.settings.fence_confirm_s,
            fence_node=self._judge_survivor,
        )
        held = Held(
            slurm=home.slurm,
            raw_id=track.raw_id,
            user_id=job.user_id,
            log_event=self.log_event,
            write_journal=self.write_journal,
            minutes=home.compute_reservation_minutes(),
            list_protected=lambda: home.list_protected(job.user_id),
            find_survivors=home.find_survivors,
            reserving=home.reserving,
            count_visits=home.lemons.count_visits,
        )
        return Requeue(
            slurm=home.slurm,
            raw_id=track.raw_id,
            restart=self.restart,
            survivors=self.survivors,
            held=held,
            original=list(track.stored.original),
            log_event=self.log_event,
            write_journal=self.write_journal,
            may_requeue=True,
            own_request=track.stored.reservation,
            on_pin=track.remember_pin,
            on_completing=on_completing,
            # When the recovery is over, its nodes must count as a running job's: other recoveries then look for
            # candidates.
            on_read=track.record_job,
            has_gone_on=lambda: track.has_gone_on(self.restart, dead),
            has_finished=lambda: bool(track.check_finished(self.restart)),
            may_go_on=lambda left: track.may_go_on(self.restart, left),
            explain_hold=lambda: home.explain_hold(track),
            on_hold=track.remember_hold,
            length_s=_compute_length_s(job),
        )

    async def finish_requeue(self, helper: Requeue) -> None:
        """Steer the requeue to its end and close the journal's entry."""
        outcome = await helper.steer_requeue()
        self.write_journal("close", "after", outcome=outcome)
        log.info("job=%s restart=%d outcome=%s", self._track.raw_id, self.restart, outcome)
        if outcome != "running":
            self.log_event("closed", "", outcome)

    async def fence_node(self, host: str, node: Node | None) -> None:
        """Set a node DOWN and drained.

        A node that an administrator has drained keeps its reason. With our reason, the drain would count as ours
        and be undone with it.

        Args:
            host: The node's name.
            node: The node as Slurm has it.
        """
        began = clock.monotonic()
        theirs = give_back.find_drain_reason(node) if node is not None else ""
        reason = theirs or f"{REASON}, job {self._track.raw_id} restart {self.restart}"
        self.write_journal("down", "before", node=host, user_id=self._track.user_id)
        if host in self.suspects:
            self.suspects[host].is_down = True  # counts as fenced from here on
        await self._home.slurm.set_node_down(host, reason)
        self.write_journal("down", "after", node=host)
        self._home.lemons.add_visit(host, "fenced", self._track.raw_id, "no answer from slurmd and agent")
        self.log_event("down", host, describe_ms(began))


def _compute_length_s(job: Job) -> float:
    """Return for how many seconds the job will run, by its record.

    The result is infinite for a running job without an end, and 0 for a waiting job whose length is not known.
    """
    if job.end_time and job.start_time:
        return max(0.0, job.end_time - job.start_time)
    return math.inf if job.state == RUNNING else 0.0
