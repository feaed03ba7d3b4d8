"""What a job's first round makes of what its predecessor has left (`--gemini-after`)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gemini_hpc.agent.peers import round_plan
from gemini_hpc.agent.peers.round_plan import JobFacts, PredecessorState, take_over
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.placement import list_holders
from gemini_hpc.core.recovery_plan import compute_first_epoch
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.views import View
from gemini_hpc.tier.version import VersionManifest
from gemini_hpc.wire import peer
from gemini_hpc.wire.local import Attach
from gemini_hpc.wire.stored import Rejection

from .test_agreed_map import Alone, manifest

HOSTS = ("n0", "n1", "n2")
OLD, NEW = Stamp(130, 7), Stamp(130, 8)  # a job that was requeued twice


def copy(rank: int, stamp: Stamp, world: int = 3) -> Copy:
    return Copy("default", rank, world, rank, 8192, 5000, stamp, f"{rank}@{stamp}")


def left(stamps: Iterable[Stamp] = (OLD, NEW), hosts: Iterable[str] = HOSTS) -> PredecessorState:
    """Of a job on n0 to n2 with two replicas: what agents on these hosts hold."""
    ranks = {host: rank for rank, host in enumerate(HOSTS)}
    records = [
        peer.InventoryRecord(
            host,
            ranks,
            2,
            130,
            tuple(copy(r, s) for s in stamps for r in range(3) if ranks[host] in list_holders(r, 3, 2)),
            (("default", OLD),),
            17000 + ranks[host],
            "i",
        )
        for host in hosts
    ]
    return PredecessorState(17, tuple(records))


def empty(hosts: tuple[str, ...] = HOSTS, rejected: tuple[Rejection, ...] = ()) -> peer.PlanDown:
    ranks = {host: rank for rank, host in enumerate(hosts)}
    return peer.PlanDown(1, "", compute_first_epoch(0), ranks, "", {}, (), (), rejected=rejected)


def taken(
    found: PredecessorState, hosts: tuple[str, ...] = HOSTS, plan: peer.PlanDown | None = None
) -> peer.PlanDown:
    facts = JobFacts(Attach(18, 0, "", hosts[0], 2), View(hosts), {})
    return take_over(plan or empty(hosts), found, facts, None)


def test_every_holder_pulls_its_copies_from_its_own_node_first() -> None:
    plan = taken(left())
    (found,) = plan.trainings
    assert (found.chosen, found.keep, found.sealed, found.world) == (Stamp(0, 8), (Stamp(0, 8),), None, 3)
    assert plan.epoch == compute_first_epoch(0) > 0, "above what was taken over"
    assert plan.takeover is not None
    assert (plan.takeover.job, plan.takeover.stamps, plan.takeover.lost) == (17, {"default": NEW}, "")
    assert plan.takeover.ports == {"n0": 17000, "n1": 17001, "n2": 17002}
    assert {(order.dest, order.copy.rank) for order in plan.pulls} == {
        (HOSTS[holder], rank) for rank in range(3) for holder in list_holders(rank, 3, 2)
    }
    for order in plan.pulls:
        assert order.copy.stamp == Stamp(0, 8) and order.sources[0] == f"before:{order.dest}"
        others = [host for host in order.sources if not host.startswith(peer.BEFORE)]
        assert others and order.dest not in others, "handed over there, it may be had from the new holder"
    for shard, sources in found.copies:
        assert set(sources[:2]) == {HOSTS[holder] for holder in list_holders(shard.rank, 3, 2)}


def test_other_nodes_and_fewer() -> None:
    plan = taken(left(hosts=("n0", "n1")), ("n7", "n1"))
    assert plan.noderanks == {"n7": 0, "n1": 1}, "a node of both keeps its rank"
    (found,) = plan.trainings
    assert found.chosen == Stamp(0, 8) and found.world == 3 and len(found.copies) == 3
    assert {order.dest for order in plan.pulls} == {"n1", "n7"}
    lost = taken(left(hosts=("n0",)), ("n7", "n1"))
    assert lost.trainings == () and lost.pulls == () and lost.takeover is not None
    assert lost.takeover.lost.startswith("default: shard ") and not lost.takeover.stamps


def test_what_was_found_bad_is_not_taken() -> None:
    theirs = left()
    bad = Rejection("default", NEW, NEW, "NaN")
    records = tuple(msgspec.structs.replace(r, rejected=(bad,)) for r in theirs.records)
    assert taken(PredecessorState(17, records)).trainings[0].chosen == Stamp(0, 7), "by the predecessor"
    mine = empty(rejected=(Rejection("default", Stamp(0, 8), Stamp(1, 9), "NaN"),))
    plan = taken(theirs, plan=mine)
    assert plan.trainings[0].chosen == Stamp(0, 7) and plan.takeover is not None
    assert plan.takeover.stamps == {"default": OLD}, "by this job, after it had loaded it"


def test_the_tier_where_it_is_newer() -> None:
    older = taken(PredecessorState(17, left().records, (manifest(OLD, 3),)))
    assert not older.trainings[0].stored and older.trainings[0].chosen == Stamp(0, 8)
    newer = taken(PredecessorState(17, left().records, (manifest(Stamp(131, 2), 3),)))
    (found,) = newer.trainings
    assert found.stored and found.chosen == found.sealed == Stamp(0, 2) and newer.takeover is not None
    assert newer.takeover.find_origin("default", Stamp(0, 2)) == Stamp(131, 2)
    assert (
        newer.takeover.find_origin("default", Stamp(0, 3)) is newer.takeover.find_origin("other", Stamp(0, 2)) is None
    )
    assert {order.sources for order in newer.pulls} == {(peer.TIER,)} and len(newer.pulls) == 3


def test_steps_after_the_version_that_is_taken_are_known() -> None:
    """Ranks report them at their resume, as repeated; a training that is not taken repeats nothing."""
    records = tuple(
        msgspec.structs.replace(record, stop=peer.Stop(5.0, reached={"default": 8 + k, "other": 3}))
        for k, record in enumerate(left().records)
    )
    assert taken(PredecessorState(17, records)).stop == peer.Stop(reached={"default": 10})
    assert taken(PredecessorState(17)).stop == peer.Stop()


def successor(found: PredecessorState, stored: list[VersionManifest] | None = None) -> Alone:
    """The agent of a job on one node that goes on from job 17."""
    host = Alone("n0", after=17)
    host.left, host.stored = found, stored
    return host


def test_the_first_round_asks_the_predecessor() -> None:
    host = successor(left(), [])
    plan = host.plan()
    assert host.asked == 1 and plan.trainings[0].chosen == Stamp(0, 8) and not plan.unseen


def test_a_tier_that_cannot_be_seen_is_waited_for_unless_memory_serves() -> None:
    assert successor(left()).plan().trainings[0].chosen == Stamp(0, 8)
    plan = successor(PredecessorState(17, why="nobody")).plan()
    assert plan.unseen == "not mounted" and plan.takeover is not None and plan.takeover.lost == "nobody"


def test_versions_that_cannot_be_read_are_passed_over() -> None:
    host = successor(PredecessorState(17), [manifest(NEW, 3), manifest(OLD, 3)])
    host.record = peer.InventoryRecord(
        "n0", {"n0": 0}, 0, 1, (), (), 1, "i", unreadable=(("default", Stamp(0, 8)),), unbroken=True
    )
    plan = host.plan()
    assert plan.trainings[0].chosen == Stamp(0, 7) and plan.trainings[0].stored
    assert round_plan.is_unwanted("default", NEW, (), host.record.unreadable)


def test_what_is_its_own_goes_first() -> None:
    host = successor(left(), [])
    own = Copy("default", 0, 1, 0, 8192, 5000, Stamp(1, 3), "x")
    host.record = peer.InventoryRecord("n0", {"n0": 0}, 0, 1, (own,), (), 1, "i", unbroken=True)
    assert host.plan().trainings[0].chosen == Stamp(1, 3) and host.asked == 0
