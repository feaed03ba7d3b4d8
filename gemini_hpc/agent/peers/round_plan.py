"""The plan of a round in messages, made from agents' inventories and the tier by `core.recovery_plan`. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from gemini_hpc.agent.peers.round_events import Decide
from gemini_hpc.core import domains, node_ranks, recovery_plan, sequence
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.placement import PlacementOrder
from gemini_hpc.core.recovery_plan import Inventory, RecoveryPlan
from gemini_hpc.core.sequence import Closed
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.views import View
from gemini_hpc.tier.version import VersionManifest
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.stored import Rejection, Tier


class JobFacts(NamedTuple):
    """The facts about a job that each plan depends on.

    Attributes:
        attach: The message that began the incarnation.
        view: The nodes with which it goes on.
        by_host: Known failure domains by host.
    """

    attach: local.Attach
    view: View
    by_host: Mapping[str, str]

    @property
    def m(self) -> int:
        """Return the number of a shard's holders, not limited by the number of nodes."""
        return max(1, self.attach.replicas)

    def plan_recovery(self, inventories: Iterable[Inventory], **options: Any) -> RecoveryPlan:
        """Return `core`'s plan for these inventories."""
        return recovery_plan.plan_recovery(
            {inventory.host: inventory for inventory in inventories},
            self.view.hosts,
            self.m,
            nodes=self.view.wanted,
            parity=self.attach.parity,
            by_host=self.by_host,
            **options,
        )

    def describe_map(self, plan: RecoveryPlan) -> dict[str, Any]:
        """Return the fields of `PlanDown` that tell the map."""
        noderanks, ranks, attach = plan.noderanks, plan.order.ranks, self.attach
        m = min(self.m, len(noderanks))
        return {
            "noderanks": noderanks,
            "map_hash": node_ranks.hash_noderanks(noderanks, attach.job, attach.restart, ranks),
            "order": ranks,
            "domains": domains.measure_separation(self.by_host, noderanks, m, plan.order),
        }


def make_plan(
    facts: JobFacts,
    order: Decide,
    rejected: tuple[Rejection, ...],
    closed: tuple[Closed, ...],
    tier: Tier,
) -> tuple[peer.PlanDown, tuple[str, ...], bool]:
    """Return the plan of a round, warnings, and whether every training in it resumes from its last seal.

    Args:
        facts: The job's facts.
        order: The round with all inventories.
        rejected: All rejected versions.
        closed: All closed trainings.
        tier: The program's choice.
    """
    records, restart = order.records, facts.attach.restart
    plan = facts.plan_recovery(
        [build_inventory(record, partial(is_rejected, rejected)) for record in records],
        min_epoch=recovery_plan.compute_first_epoch(restart),
    )
    found, pulls = build_trainings(plan)
    trainings = list(found)
    is_forgotten = restart > 0 and not any(record.noderanks for record in records)
    if not plan.trainings and (is_forgotten or not plan.survivable):
        reason = f"all copies are gone with {', '.join(plan.gone)}"
        if is_forgotten:
            reason = (
                "no agent of an earlier start is left: other nodes, retention_s over, or ended by the site's scripts"
            )
        trainings.append(peer.PlannedTraining("default", None, (), None, 0, (), (reason,)))
    for name in sorted({found.training for found in rejected} - {s.name for s in trainings}):
        reasons = tuple(found.sentence for found in rejected if found.training == name)
        trainings.append(peer.PlannedTraining(name, None, (), None, 0, (), reasons))
    own = [record for record in records if record.host in facts.view.hosts]
    down = peer.PlanDown(
        round=order.round,
        step=order.step,
        epoch=plan.epoch,
        ports={r.host: r.port for r in records},
        trainings=tuple(trainings),
        pulls=pulls,
        tier=tier,
        counted={r.host: r.instance for r in own},
        rejected=rejected,
        closed=closed,
        stop=merge_stops(own, plan.noderanks),
        **facts.describe_map(plan),
    )
    # copies of an older incarnation are not the newest if the last one's agents are all gone
    # nor is the version before a rejected one: the tier may have newer versions
    known = plan.survivable and plan.latest >= restart - 1 and not rejected
    # an agent with a plan made without a look at the tier may have forgotten newer versions
    known = known and not any(record.doubt for record in records)
    return down, plan.warnings, known and bool(plan.trainings) and all(s.newest for s in plan.trainings)


def build_trainings(plan: RecoveryPlan) -> tuple[tuple[peer.PlannedTraining, ...], tuple[peer.PullOrder, ...]]:
    """Return the version each training resumes from, and the copies to pull for it."""
    trainings: list[peer.PlannedTraining] = []
    pulls: list[peer.PullOrder] = []
    for s in plan.trainings:
        copies = tuple(zip(s.shards, s.holders, strict=True))
        lost = tuple(f"shard {x.rank}: {x.reason}" for x in s.lost)
        if s.outcome == "never-sealed":
            lost = ("no version had been sealed yet",)
        trainings.append(peer.PlannedTraining(s.training_name, s.chosen, s.keep, s.sealed, s.world, copies, lost))
        pulls += [peer.PullOrder(p.dest_host, p.shard, p.sources) for p in s.pulls]
        pulls += [peer.PullOrder(made.dest_host, made.copy, (), made.parts) for made in s.made]
    return tuple(trainings), tuple(pulls)


def add_stored_versions(plan: peer.PlanDown, stored: Iterable[VersionManifest]) -> peer.PlanDown:
    """Return the plan with the tier's version of each training that is newer than memory's.

    The home of a shard reads it from the tier. The shard's other holders have a copy again when the next version is
    saved. Until then the tier takes the place of these copies.
    """
    trainings, pulls, epoch = {s.name: s for s in plan.trainings}, list(plan.pulls), plan.epoch
    by_rank = {rank: host for host, rank in plan.noderanks.items()}
    for manifest in stored:
        known = trainings.get(manifest.training)
        if known is not None and known.chosen is not None and known.chosen >= manifest.stamp:
            continue
        name, stamp = manifest.training, manifest.stamp
        copies = [
            Copy(name, s.rank, manifest.world, s.home, s.bytes, s.used, stamp, s.digest)
            for _, s in sorted(manifest.map_shards().values(), key=lambda found: found[1].rank)
        ]
        lost = known.lost if known is not None else ()
        trainings[name] = peer.PlannedTraining(
            name, stamp, (stamp,), stamp, manifest.world, tuple((c, (peer.TIER,)) for c in copies), lost
        )
        pulls = [order for order in pulls if order.copy.training != name]
        pulls += [peer.PullOrder(by_rank[c.home % len(by_rank)], c, (peer.TIER,)) for c in copies]
        epoch = max(epoch, stamp[0] + 1)
    if trainings.keys() - {"default"}:  # reported under this name if not even training names are known
        trainings = {n: s for n, s in trainings.items() if n != "default" or s.chosen or s.world}
    return msgspec.structs.replace(plan, trainings=tuple(trainings.values()), pulls=tuple(pulls), epoch=epoch)


def is_rejected(rejected: Iterable[Rejection], name: str, stamp: Stamp) -> bool:
    """Return whether one of these rejections covers the version of a training."""
    return any(found.covers(name, stamp) for found in rejected)


def build_inventory(record: peer.InventoryRecord, is_bad: Callable[[str, Stamp], bool]) -> Inventory:
    """Return a record's inventory without bad versions."""
    return Inventory(
        host=record.host,
        noderanks=record.noderanks,
        map_restart=record.map_restart,
        copies=tuple(c for c in record.copies if not is_bad(c.training, c.stamp)),
        max_epoch=record.max_epoch,
        sealed=tuple((name, stamp) for name, stamp in record.sealed if not is_bad(name, stamp)),
        order=record.order,
    )


def merge_stops(records: Iterable[peer.InventoryRecord], noderanks: Mapping[str, int]) -> peer.Stop:
    """Return what the agents of the job know together of its last stop.

    Args:
        records: Inventories of the job's agents.
        noderanks: Node ranks of the new plan.
    """
    records = tuple(records)
    stops = [record.stop for record in records]
    newest = max(records, key=lambda record: (bool(record.noderanks), record.map_restart), default=None)
    before = {rank: host for host, rank in ((newest.noderanks if newest else None) or {}).items()}
    replaced = {pair: None for stop in stops for pair in stop.replaced if pair[1] in noderanks}
    for host, rank in sorted(noderanks.items(), key=lambda item: item[1]):
        if before.get(rank, host) not in noderanks:
            replaced[before[rank], host] = None
    return peer.Stop(
        min((stop.time for stop in stops if stop.time), default=0.0),
        tuple(sorted({host for stop in stops for host in stop.lost})),
        tuple(replaced),
        _merge_reached(stops),
    )


def _merge_reached(stops: Iterable[peer.Stop]) -> dict[str, int]:
    """Return the newest step that ranks have completed, by training."""
    found: dict[str, int] = {}
    for stop in stops:
        for name, version in stop.reached.items():
            found[name] = max(version, found.get(name, 0))
    return found


# ---- what another job has left -------------------------------------------------------------------------


@dataclass(frozen=True)
class PredecessorState:
    """The state found of a predecessor.

    Attributes:
        records: Inventories of its agents.
        stored: The newest whole versions on the tier.
        why: Reason for missing state.
    """

    job: int
    records: tuple[peer.InventoryRecord, ...] = ()
    stored: tuple[VersionManifest, ...] = ()
    why: str = ""


def is_unwanted(
    name: str, stamp: Stamp, rejected: Iterable[Rejection], unreadable: Iterable[tuple[str, Stamp]]
) -> bool:
    """Return whether this job has found a version of its predecessor bad.

    Args:
        name: Name of the training.
        stamp: The predecessor's stamp of the version.
        rejected: Versions rejected in this job.
        unreadable: Versions that could not be read in this job.
    """
    inherited = recovery_plan.inherit_stamp(stamp)
    return (name, inherited) in set(unreadable) or is_rejected(rejected, name, inherited)


def take_over(
    plan: peer.PlanDown, left: PredecessorState, facts: JobFacts, noderanks: Mapping[str, int] | None
) -> peer.PlanDown:
    """Return the plan of a job without own state, with the state that its predecessor has left.

    Each holder pulls its copies from the predecessor's agents, the one on its own node first. No version counts as
    sealed before all holders have their copies.

    Args:
        plan: The plan without the predecessor.
        left: The predecessor's state.
        facts: This job's facts.
        noderanks: This job's node ranks if earlier rounds have decided them; the plan then has the order. Otherwise a
            node of both jobs keeps its rank.
    """

    def is_bad(record: peer.InventoryRecord, name: str, stamp: Stamp) -> bool:
        return is_rejected(record.rejected, name, stamp) or is_unwanted(name, stamp, plan.rejected, ())

    good = [build_inventory(record, partial(is_bad, record)) for record in left.records]
    made = facts.plan_recovery(
        [replace(inventory, max_epoch=0) for inventory in good],  # its epochs mean nothing here
        noderanks=noderanks or None,
        foreign=True,
        order=PlacementOrder(plan.order) if noderanks else None,
    )
    trainings, pulls = build_trainings(made)
    own = {s.name: s for s in plan.trainings}
    plan = msgspec.structs.replace(plan, trainings=trainings, pulls=pulls, **facts.describe_map(made))
    theirs = add_stored_versions(plan, left.stored)
    stamps = {s.name: s.chosen for s in theirs.trainings if s.chosen is not None}
    why = "; ".join(filter(None, (left.why, *(f"{s.name}: {x}" for s in theirs.trainings for x in s.lost[:1]))))
    takeover = peer.Takeover(left.job, {r.host: r.port for r in left.records}, stamps, why[:300])
    holders: dict[tuple[str, int], list[str]] = {}
    for order in theirs.pulls:
        holders.setdefault((order.copy.training, order.copy.rank), []).append(order.dest)
    taken = {s.name: _adopt_training(s, holders) for s in theirs.trainings if s.chosen is not None}
    reached = {name: step for name, step in _merge_reached(r.stop for r in left.records).items() if name in taken}
    return msgspec.structs.replace(
        plan,
        trainings=tuple((own | taken).values()),
        pulls=tuple(
            msgspec.structs.replace(order, copy=_inherit_copy(order.copy), sources=_list_sources(order, holders))
            for order in theirs.pulls
        ),
        takeover=takeover,
        stop=msgspec.structs.replace(plan.stop, reached=reached | plan.stop.reached),
        closed=sequence.merge_closed((*plan.closed, *_list_closed(left.records))),
    )


def _list_closed(records: Iterable[peer.InventoryRecord]) -> list[Closed]:
    """Return the predecessor's closed trainings, with no step: none of this job's steps has closed them."""
    records = tuple(records)
    known = [closed for record in records for closed in record.closed]
    found = sequence.merge_closed(known, [part for record in records for part in record.closing])
    return [msgspec.structs.replace(closed, restart=0, series="") for closed in found]


def _inherit_copy(copy: Copy) -> Copy:
    return msgspec.structs.replace(copy, stamp=recovery_plan.inherit_stamp(copy.stamp))


def _list_sources(order: peer.PullOrder, holders: Mapping[tuple[str, int], Sequence[str]]) -> tuple[str, ...]:
    """Return the predecessor's agents, then this job's.

    An agent of the predecessor may have handed its memory over to one of this job's agents.
    """
    if peer.TIER in order.sources:
        return order.sources
    ours = holders.get((order.copy.training, order.copy.rank), ())
    return (*_mark_theirs(order.sources), *(host for host in ours if host != order.dest))


def _mark_theirs(sources: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(source if source == peer.TIER else peer.BEFORE + source for source in sources)


def _adopt_training(
    theirs: peer.PlannedTraining, holders: Mapping[tuple[str, int], Sequence[str]]
) -> peer.PlannedTraining:
    """Return the predecessor's training plan as this job's plan.

    A rank that loads a shard from elsewhere asks this job's holders before the predecessor's agents, which soon
    release their memory.

    Args:
        theirs: The predecessor's plan.
        holders: This job's future holders, by training and rank.
    """
    assert theirs.chosen is not None
    stamp = recovery_plan.inherit_stamp(theirs.chosen)
    sealed = stamp if theirs.stored else None  # as in `add_stored_versions`: the tier is what the other holders were
    copies = tuple(
        (
            _inherit_copy(copy),
            sources if theirs.stored else (*holders.get((copy.training, copy.rank), ()), *_mark_theirs(sources)),
        )
        for copy, sources in theirs.copies
    )
    return msgspec.structs.replace(theirs, chosen=stamp, keep=(stamp,), sealed=sealed, copies=copies, lost=())
