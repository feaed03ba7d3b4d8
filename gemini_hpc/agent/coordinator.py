"""The coordinator's decision in a recovery round: its plan, made of the inventories of all agents.

Where memory may lack the newest versions, the coordinator searches elsewhere first: on nodes that the job has left,
on the tier, and at the job's predecessor.

The tier is read if memory cannot serve, or is older than the last seal or the last incarnation. It is also read after
a rejection, and after a plan that was made without the tier (`doubt`). The first round of a job never reads it. Nor
do later rounds of the first incarnation while no agent knows of a seal and none has been restarted.

If the tier cannot be read, the plan says `unseen`: prologs end with a map, but no launch is served. Each launch
begins another round. So does one that names the job's first tier. Ranks are told to ask again later. An agent with
such a plan reports `doubt`, also in the next incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from gemini_hpc.agent import outside_inventory
from gemini_hpc.agent.peers import round_plan
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.failure_domains import FailureDomains
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.round_events import Decide, Decided
from gemini_hpc.agent.predecessor import Predecessor
from gemini_hpc.agent.replicas.replicas import Replicas
from gemini_hpc.agent.tier.tier_parts import TierParts
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier.errors import TierFailed
from gemini_hpc.tier.version import VersionManifest
from gemini_hpc.wire import peer

# Seconds to look for the tier: while ranks wait, which then ask again; while the prologs wait.
_LAUNCHED_S, _PROLOG_S, _PROLOG_PART = 20.0, 3.0, 0.3
_BAD_ONES = 8  # limit of the predecessor's versions on the tier that may turn out bad


class Coordinator:
    """The decisions of an agent that coordinates recovery rounds."""

    def __init__(
        self,
        context: AgentContext,
        replicas: Replicas,
        tier: TierParts,
        controller: outside_inventory.HolderSource,
        predecessor: Predecessor,
    ) -> None:
        self._identity, self._log, self._spawn = context.identity, context.log, context.spawn
        self._rejections, self._closings = replicas.rejections, replicas.closings
        self._saver, self._tier = tier.saver, tier.choice
        self._controller, self._predecessor = controller, predecessor
        self.domains = FailureDomains(
            context.settings.failure_domains, lambda problem: self._log("warning", detail=problem)
        )

    def decide(self, incarnation: Incarnation, order: Decide) -> None:
        """Report the plan of a round to the rounds, at once or after a search."""
        plan, sure = self._make_plan(incarnation, order)
        if (sure or (incarnation.restart == 0 and order.round == 1)) and not self._may_inherit(plan):
            incarnation.step(Decided(plan))
        elif order.search:
            self._spawn(self._search(incarnation, order, plan))

    def _collect_facts(self, incarnation: Incarnation) -> round_plan.JobFacts:
        return round_plan.JobFacts(incarnation.attach, incarnation.view, self.domains.by_host)

    def _make_plan(self, incarnation: Incarnation, order: Decide) -> tuple[peer.PlanDown, bool]:
        """Return the plan, and whether every training in it resumes from its last seal."""
        facts, records = self._collect_facts(incarnation), order.records
        rejected = self._rejections.learn([found for r in records for found in r.rejected])
        closed = self._closings.learn(
            [found for r in records for found in r.closed], [part for r in records for part in r.closing]
        )
        plan, warnings, sure = round_plan.make_plan(facts, order, rejected, closed, self._tier.chosen)
        for warning in warnings:
            self._log("warning", detail=warning)
        return plan, sure

    # ---- search ----------------------------------------------------------------------------------------

    async def _search(self, incarnation: Incarnation, order: Decide, plan: peer.PlanDown) -> None:
        """Search outside this incarnation's nodes, which cannot serve or have only older versions.

        Older means older than the last seal. In the first round of a restart, ask agents on the nodes that the job
        has left. Then look on the tier, and at the predecessor.
        """
        restart, seen = incarnation.restart, False
        if restart > 0 and order.round == 1 and not _has_version(plan):
            order = await self._search_outside(incarnation, order)
            plan, seen = self._make_plan(incarnation, order)
        # true if no version was ever sealed
        nothing = restart == 0 and all(r.unbroken and not (r.sealed or r.rejected or r.closed) for r in order.records)
        seen = seen or nothing
        if self._tier.directory and not seen:
            stored, unseen = await self._find_stored(_collect_unreadable(order), order)
            if not unseen:
                plan, seen = round_plan.add_stored_versions(plan, stored), True
            plan = msgspec.structs.replace(plan, looked=seen, unseen=unseen)
        if self._may_inherit(plan) and not plan.unseen:
            plan = await self._inherit(incarnation, order, plan)
        incarnation.step(Decided(msgspec.structs.replace(plan, doubt=not seen)))

    async def _search_outside(self, incarnation: Incarnation, order: Decide) -> Decide:
        """Return the order with the inventories of agents on nodes that the job has left."""
        former = sorted({host for r in order.records for host in r.noderanks or {}})
        more = await outside_inventory.gather_inventories(self._identity, incarnation, self._controller, former)
        if any(r.copies for r in more):
            self._log("found_outside", detail=f"copies on {', '.join(r.host for r in more)[:300]}")
        return msgspec.structs.replace(order, records=(*order.records, *more))

    async def _find_stored(
        self, without: Iterable[tuple[str, Stamp]], order: Decide, job: int = 0
    ) -> tuple[tuple[VersionManifest, ...], str]:
        """Return the newest version of each training on the tier, and why its content is unknown.

        A round that goes on without the tier starts from nothing.
        """
        prolog_s = min(_PROLOG_S, _PROLOG_PART * self._identity.settings.attach_timeout_s)
        try:
            return await self._saver.find_stored(without, _LAUNCHED_S if order.step else prolog_s, job), ""
        except TierFailed as error:
            return (), str(error)

    def _may_inherit(self, plan: peer.PlanDown) -> bool:
        """Return whether there is a predecessor and the job has no state of its own."""
        return bool(self._predecessor.job) and not _has_version(plan)

    async def _inherit(self, incarnation: Incarnation, order: Decide, plan: peer.PlanDown) -> peer.PlanDown:
        """Return the plan extended by the state that the job's predecessor has left."""
        left, unseen, unreadable = await self._predecessor.gather_state(), "", _collect_unreadable(order)
        without: list[tuple[str, Stamp]] = []
        for _ in range(_BAD_ONES if self._tier.directory else 0):
            stored, unseen = await self._find_stored(without, order, self._predecessor.job)
            if unseen:
                break
            bad = [m for m in stored if round_plan.is_unwanted(m.training, m.stamp, plan.rejected, unreadable)]
            left = replace(left, stored=tuple(m for m in stored if m not in bad))
            if not bad:
                break
            without += [(m.training, m.stamp) for m in bad]
        ours = any(record.noderanks for record in order.records)
        plan = round_plan.take_over(plan, left, self._collect_facts(incarnation), plan.noderanks if ours else None)
        return plan if _has_version(plan) else msgspec.structs.replace(plan, unseen=unseen)


def _collect_unreadable(order: Decide) -> set[tuple[str, Stamp]]:
    return {bad for record in order.records for bad in record.unreadable}


def _has_version(plan: peer.PlanDown) -> bool:
    return any(s.chosen for s in plan.trainings)
