from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gemini_hpc.core.copy import Copy
from gemini_hpc.core.placement import AS_RANKED, PlacementOrder, can_survive, list_holders
from gemini_hpc.core.recovery_plan import (
    Inventory,
    TrainingPlan,
    compute_first_epoch,
    inherit_stamp,
    plan_recovery,
)
from gemini_hpc.core.slots import Stamp

HOSTS = ["n0", "n1", "n2", "n3"]
FIVE, SIX = Stamp(0, 5), Stamp(0, 6)


def copy(rank: int, stamp: Stamp = FIVE, *, world: int = 4, digest: str = "", name: str = "") -> Copy:
    return Copy(name, rank, world, rank, 8192, 5000, stamp, digest or f"{rank}@{stamp}")


def job(
    N: int = 4,
    m: int = 2,
    stamps: tuple[Stamp, ...] = (FIVE,),
    sealed: Stamp | None = FIVE,
    order: PlacementOrder = AS_RANKED,
) -> dict[str, Inventory]:
    """One rank per node, all copies in place."""
    noderanks = {f"n{node}": node for node in range(N)}
    return {
        host: Inventory(
            host,
            noderanks,
            0,
            tuple(copy(r, s, world=N) for r in range(N) if node in list_holders(r, N, m, order) for s in stamps),
            0,
            () if sealed is None else (("", sealed),),
            order.ranks,
        )
        for host, node in noderanks.items()
    }


def without(inventory: Inventory, rank: int, stamp: Stamp) -> Inventory:
    return replace(inventory, copies=tuple(c for c in inventory.copies if (c.rank, c.stamp) != (rank, stamp)))


def the_set(inventories: dict[str, Inventory], hosts: list[str] = HOSTS, m: int = 2) -> TrainingPlan:
    found = plan_recovery(inventories, hosts, m).find_training_plan("")
    assert found is not None
    return found


def test_a_replacement_pulls_its_own_shard_and_its_peers() -> None:
    inventories = job()
    del inventories["n1"]
    made = plan_recovery(inventories, ["new", "n0", "n2", "n3"], 2)
    assert made.noderanks == {"n0": 0, "new": 1, "n2": 2, "n3": 3}
    assert (made.epoch, made.gone, made.survivable, made.warnings) == (1, ("n1",), True, ())
    found = made.find_training_plan("")
    assert found is not None
    assert (found.outcome, found.chosen, found.world, found.keep, found.sealed) == ("chosen", FIVE, 4, (FIVE,), FIVE)
    assert [shard.rank for shard in found.shards] == [0, 1, 2, 3]
    assert {(pull.dest_host, pull.shard.rank, pull.sources) for pull in found.pulls} == {
        ("new", 0, ("n0",)),
        ("new", 1, ("n0",)),
    }


def test_an_untouched_job_moves_nothing() -> None:
    assert the_set(job()).pulls == ()


def test_a_first_start_has_no_plan() -> None:
    made = plan_recovery({host: Inventory(host, None, -1, (), -1) for host in HOSTS}, HOSTS, 2)
    assert (made.epoch, made.trainings, made.survivable) == (0, (), True)
    assert made.noderanks == {host: node for node, host in enumerate(HOSTS)}
    assert plan_recovery({}, HOSTS, 2, min_epoch=7).epoch == 7


def test_an_epoch_that_nobody_remembers_is_not_used_again() -> None:
    """All nodes of an incarnation are lost: the next one's epochs are above all that it can have used."""
    inventories, epoch = job(), 0
    for _ in range(20):  # rounds of the incarnation that is lost
        epoch = plan_recovery(inventories, HOSTS, 2, min_epoch=compute_first_epoch(3)).epoch
        inventories = {host: replace(inventory, max_epoch=epoch) for host, inventory in inventories.items()}
    assert plan_recovery({}, HOSTS, 2, min_epoch=compute_first_epoch(4)).epoch > epoch > compute_first_epoch(3)


def test_the_highest_version_that_is_whole_is_chosen() -> None:
    inventories = job(stamps=(FIVE, SIX))
    assert the_set(inventories).chosen == SIX
    inventories["n0"] = without(inventories["n0"], 0, SIX)
    assert the_set(inventories).chosen == SIX
    inventories["n1"] = without(inventories["n1"], 0, SIX)
    assert the_set(inventories).chosen == FIVE
    later = job(stamps=(Stamp(1, 2),))
    later["n0"] = replace(later["n0"], copies=(*later["n0"].copies, *job()["n0"].copies))
    assert the_set(later).chosen == Stamp(1, 2)


def test_what_a_replica_has_made_counts_while_no_other_contradicts() -> None:
    """n2 and n3, which held shards 2 and 3, are lost; n0 and n1 have copied what lives in their ranks."""
    left = {host: inventory for host, inventory in job(sealed=None).items() if host in ("n0", "n1")}
    made = {rank: msgspec.structs.replace(copy(rank), proven=False) for rank in (2, 3)}

    def rescued(third: Copy | None, fourth: Copy | None = made[3]) -> dict[str, Inventory]:
        more = {"n0": (made[2], made[3]), "n1": tuple(c for c in (third, fourth) if c is not None)}
        return {host: replace(i, copies=(*i.copies, *more[host])) for host, i in left.items()}

    hosts = ["n0", "n1", "new2", "new3"]
    found = the_set(rescued(made[2]), hosts)
    assert found.chosen == FIVE and {p.shard.rank for p in found.pulls if p.dest_host == "new2"} == {2, 3}
    assert the_set(rescued(None), hosts).chosen == FIVE, "one replica is enough"
    other = msgspec.structs.replace(made[2], digest="something else")
    assert the_set(rescued(other), hosts).chosen is None, "nobody knows which of them is right"
    proven = msgspec.structs.replace(other, proven=True)
    found = the_set(rescued(proven), hosts)
    assert found.chosen == FIVE and found.shards[2].digest == "something else", "what its home had made is right"


def test_an_unsealed_version_is_chosen_with_its_fallback() -> None:
    """6 is whole but has one copy of shard 0 left: voiding 5 now would let the next failure lose everything."""
    inventories = job(stamps=(FIVE, SIX))
    inventories["n1"] = without(inventories["n1"], 0, SIX)
    found = the_set(inventories)
    assert (found.chosen, found.keep, found.sealed) == (SIX, (SIX, FIVE), FIVE)
    assert [(pull.dest_host, pull.shard.rank, pull.sources) for pull in found.pulls] == [("n1", 0, ("n0",))]
    forgotten = the_set({host: replace(inventory, sealed=()) for host, inventory in inventories.items()})
    assert (forgotten.chosen, forgotten.keep, forgotten.sealed) == (SIX, (SIX, FIVE), None)


def test_the_last_sealed_version_is_the_fallback_whatever_lies_between() -> None:
    inventories = job(stamps=(Stamp(0, 4), FIVE, SIX), sealed=Stamp(0, 4))
    assert the_set(inventories).keep == (SIX, Stamp(0, 4))


def test_the_epoch_is_above_all_that_anybody_has_seen() -> None:
    inventories = job(stamps=(Stamp(3, 5),), sealed=None)
    inventories["n2"] = replace(inventories["n2"], max_epoch=7)
    assert plan_recovery(inventories, HOSTS, 2).epoch == 8
    assert plan_recovery(inventories, HOSTS, 2, min_epoch=20).epoch == 20
    assert plan_recovery(job(stamps=(Stamp(3, 5),)), HOSTS, 2).epoch == 4


def test_lost_shards_are_named_with_their_holders() -> None:
    inventories = job()
    del inventories["n0"], inventories["n1"]
    inventories["n2"] = replace(inventories["n2"], copies=(*inventories["n2"].copies, copy(0, Stamp(0, 3))))
    made = plan_recovery(inventories, ["n2", "n3", "a", "b"], 2)
    found = made.find_training_plan("")
    assert found is not None
    assert (found.outcome, found.chosen, made.survivable, made.gone) == ("lost", None, False, ("n0", "n1"))
    assert [shard.rank for shard in found.lost] == [0, 1]
    assert found.lost[0].reason == (
        "no complete copy of shard 0 at version 0.5, only of 0.3; its holders were n0 (gone), n1 (gone)"
    )
    assert found.lost[1].reason == "no complete copy of shard 1 at version 0.5; gone: n0, n1"


def test_a_failure_before_the_first_seal_is_not_a_loss() -> None:
    inventories = job(stamps=(Stamp(0, 1),), sealed=None)
    for host in HOSTS:
        inventories[host] = without(inventories[host], 2, Stamp(0, 1))
    assert the_set(inventories).outcome == "never-sealed"
    inventories["n0"] = replace(inventories["n0"], sealed=(("", Stamp(0, 1)),))
    assert the_set(inventories).outcome == "lost"


def test_a_digest_that_fewer_hosts_have_is_not_used() -> None:
    inventories = job(N=3, m=3)
    for host, digest in (("n0", "bad"), ("n1", "good"), ("n2", "good")):
        others = without(inventories[host], 0, FIVE).copies
        inventories[host] = replace(inventories[host], copies=(copy(0, world=3, digest=digest), *others))
    hosts = HOSTS[:3]
    made = plan_recovery(inventories, hosts, 3)
    found = made.find_training_plan("")
    assert found is not None
    assert found.shards[0].digest == "good"
    assert [(pull.dest_host, pull.shard.digest) for pull in found.pulls] == [("n0", "good")]
    assert set(found.pulls[0].sources) == {"n1", "n2"}
    assert made.warnings == (
        "training '': digests of shard 0 at version 0.5 differ: using that of n1, n2, not of n0",
    )
    inventories["n2"] = without(inventories["n2"], 0, FIVE)
    tied = plan_recovery(inventories, hosts, 3).find_training_plan("")
    assert tied is not None
    assert tied.shards[0].digest == "bad"  # one against one: the home node's


def test_the_map_of_the_latest_restart_counts() -> None:
    inventories = job()
    old = {"n3": 0, "n2": 1, "n1": 2, "n0": 3}
    inventories["n0"] = replace(inventories["n0"], noderanks=old, map_restart=-1)
    assert plan_recovery(inventories, HOSTS, 2).noderanks == {host: node for node, host in enumerate(HOSTS)}
    inventories["n0"] = replace(inventories["n0"], map_restart=0)
    made = plan_recovery(inventories, ["n1", "n0", "n2", "n3"], 2)
    assert made.noderanks == {host: node for node, host in enumerate(HOSTS)}
    assert made.warnings == ("node-rank maps of restart 0 differ: using that of n1, not of n0",)


def test_what_cannot_be_is_ignored_and_said() -> None:
    inventories = job()
    hostile = [
        copy(7),
        copy(-1),
        structs.replace(copy(0), home=-2),
        structs.replace(copy(0, Stamp(9, 9)), world=10**18),
    ]
    inventories["n0"] = replace(inventories["n0"], copies=(*inventories["n0"].copies, *hostile))
    made = plan_recovery(inventories, HOSTS, 2)
    found = made.find_training_plan("")
    assert found is not None
    assert found.chosen == FIVE
    assert len(made.warnings) == 3


def test_sets_are_planned_apart() -> None:
    inventories = job()
    second = tuple(copy(rank, Stamp(0, 40), world=2, name="critic") for rank in range(2))
    inventories["n2"] = replace(inventories["n2"], copies=(*inventories["n2"].copies, *second))
    made = plan_recovery(inventories, HOSTS, 2)
    assert [(found.training_name, found.chosen, found.world) for found in made.trainings] == [
        ("", FIVE, 4),
        ("critic", Stamp(0, 40), 2),
    ]
    assert {(pull.dest_host, pull.shard.rank) for pull in made.trainings[1].pulls} == {
        ("n0", 0), ("n1", 0), ("n0", 1), ("n1", 1),
    }  # fmt: skip


def test_a_wrong_number_of_replicas_is_told() -> None:
    with pytest.raises(ValueError, match="3 replicas asked for on 2 nodes"):
        plan_recovery({}, ["a", "b"], 3)


def test_sources_are_spread() -> None:
    inventories = job(N=3, m=3)
    del inventories["n0"]
    noderanks = {"n1": 1, "n2": 2, "x": 0}
    world = 12
    shards = [Copy("", rank, world, 0, 1, 1, FIVE, str(rank)) for rank in range(world)]
    for host in ("n1", "n2"):
        inventories[host] = replace(inventories[host], copies=tuple(shards))
    found = the_set(inventories, ["x", "n1", "n2"], 3)
    assert plan_recovery(inventories, ["x", "n1", "n2"], 3).noderanks == noderanks
    firsts = [pull.sources[0] for pull in found.pulls]
    assert firsts.count("n1") == firsts.count("n2") == world // 2


@given(st.integers(1, 7).flatmap(lambda N: st.tuples(st.just(N), st.integers(1, N))), st.data())
def test_within_the_promise_everything_comes_back(size: tuple[int, int], data: st.DataObject) -> None:
    N, m = size
    inventories = job(N, m)
    failed = data.draw(st.sets(st.integers(0, N - 1)))
    for node in failed:
        del inventories[f"n{node}"]
    hosts = data.draw(st.permutations([f"n{node}" if node not in failed else f"new{node}" for node in range(N)]))
    made = plan_recovery(inventories, hosts, m)
    found = made.find_training_plan("")
    if failed == set(range(N)):
        assert found is None  # nobody is left who knows that there was something
        return
    assert made.survivable == can_survive(N, m, failed)
    assert found is not None
    assert (found.outcome == "chosen") == can_survive(N, m, failed)
    if found.chosen is None:
        assert found.lost and all(shard.reason for shard in found.lost)
        return
    held = {host: {c.rank for c in inventories[host].copies} for host in inventories}
    for pull in found.pulls:
        assert pull.shard.rank not in held.get(pull.dest_host, set())
        assert pull.sources and all(pull.shard.rank in held[source] for source in pull.sources)
        held.setdefault(pull.dest_host, set()).add(pull.shard.rank)
    by_rank = {rank: host for host, rank in made.noderanks.items()}
    assert all(rank in held[by_rank[holder]] for rank in range(N) for holder in list_holders(rank, N, m))


@given(st.lists(st.builds(copy, st.integers(0, 3), st.sampled_from([FIVE, SIX, Stamp(1, 1)]))))
def test_choose_needs_every_rank(copies: list[Copy]) -> None:
    whole = [s for s in (FIVE, SIX, Stamp(1, 1)) if {c.rank for c in copies if c.stamp == s} == set(range(4))]
    found = plan_recovery({"n0": Inventory("n0", None, 0, tuple(copies), 0)}, HOSTS, 2).find_training_plan("")
    assert (None if found is None else found.chosen) == max(whole, default=None)


def test_copies_of_another_jobs_agents_are_pulled_even_where_they_are() -> None:
    """A host that has one has it in another agent's memory; its own node goes first."""
    made = plan_recovery(job(), HOSTS, 2, foreign=True)
    found = made.find_training_plan("")
    assert found is not None and made.noderanks == {f"n{node}": node for node in range(4)}
    assert {(pull.dest_host, pull.shard.rank) for pull in found.pulls} == {
        (f"n{holder}", rank) for rank in range(4) for holder in list_holders(rank, 4, 2)
    }
    assert all(pull.sources[0] == pull.dest_host and len(pull.sources) == 2 for pull in found.pulls)


def test_another_job_does_not_say_how_many_nodes_train() -> None:
    """Of this job's nodes two are to train, whatever the other one had; where its map is made, that one stays."""
    assert len(plan_recovery(job(), HOSTS, 2, nodes=2, foreign=True).noderanks) == 2
    assert len(plan_recovery(job(), HOSTS, 2, nodes=2).noderanks) == 4
    fixed = plan_recovery(job(), ["n1", "n0"], 2, noderanks={"n1": 0, "n0": 1}, foreign=True)
    assert fixed.noderanks == {"n1": 0, "n0": 1} and fixed.trainings[0].chosen == FIVE


def test_what_is_inherited_is_below_all_that_a_job_makes() -> None:
    assert inherit_stamp(Stamp(900, 7)) == Stamp(0, 7) < Stamp(compute_first_epoch(0), 1)


# ---- failure domains --------------------------------------------------------------------------------------

RACKS = {"n0": "rack0", "n1": "rack0", "n2": "rack1", "n3": "rack1"}
APART = PlacementOrder((0, 2, 1, 3))


def test_a_first_plan_keeps_racks_apart_and_leaves_ranks_alone() -> None:
    made = plan_recovery({host: Inventory(host, None, -1, (), -1) for host in HOSTS}, HOSTS, 2, by_host=RACKS)
    assert made.noderanks == {host: node for node, host in enumerate(HOSTS)}
    assert made.order == APART
    assert plan_recovery({host: Inventory(host, None, -1, (), -1) for host in HOSTS}, HOSTS, 2).order is AS_RANKED


def test_a_rack_is_lost_and_its_replacements_take_its_places() -> None:
    for known in (RACKS, {}, {**RACKS, "new": "rack1"}):
        inventories = job(order=APART)
        del inventories["n2"], inventories["n3"]
        made = plan_recovery(inventories, ["n0", "n1", "new", "newer"], 2, by_host=known)
        assert (made.order, made.survivable) == (APART, True), known
        assert made.noderanks == {"n0": 0, "n1": 1, "new": 2, "newer": 3}, known
        found = made.find_training_plan("")
        assert found is not None and found.chosen == FIVE, known
        assert {(pull.dest_host, pull.shard.rank, pull.sources) for pull in found.pulls} == {
            ("new", 0, ("n0",)),
            ("new", 2, ("n0",)),
            ("newer", 1, ("n1",)),
            ("newer", 3, ("n1",)),
        }, known


def test_a_job_that_has_begun_without_domains_goes_on_so() -> None:
    assert plan_recovery(job(), HOSTS, 2, by_host=RACKS).order is AS_RANKED


def test_who_takes_over_from_another_job_keeps_racks_apart() -> None:
    assert plan_recovery(job(), HOSTS, 2, foreign=True, by_host=RACKS).order == APART
    assert plan_recovery(job(order=APART), HOSTS, 2, foreign=True).order == APART
    assert plan_recovery(job(), HOSTS, 2, foreign=True, order=APART).order == APART


def test_with_fewer_nodes_racks_are_kept_apart_anew() -> None:
    inventories = job(order=APART)
    del inventories["n3"]
    made = plan_recovery(inventories, ["n0", "n1", "n2"], 2, by_host=RACKS)
    found = made.find_training_plan("")
    assert made.order is AS_RANKED and found is not None and found.chosen == FIVE


def test_who_lost_two_nodes_of_a_group_is_told_who_its_holders_were() -> None:
    inventories = job(order=APART)
    del inventories["n0"], inventories["n2"]
    n1 = inventories["n1"]
    inventories["n1"] = replace(n1, copies=(*n1.copies, copy(0, Stamp(0, 4))))
    made = plan_recovery(inventories, ["n1", "n3", "x", "y"], 2, by_host=RACKS)
    found = made.find_training_plan("")
    assert found is not None and not made.survivable and found.outcome == "lost"
    assert "its holders were n0 (gone), n2 (gone)" in found.lost[0].reason


def test_an_order_that_cannot_be_counts_as_none() -> None:
    for order in ((0, 0, 1, 2), (0, 1), (5, 0, 1, 2), (0, 1, 2, 3, 4)):
        inventories = {host: replace(inventory, order=order) for host, inventory in job().items()}
        assert plan_recovery(inventories, HOSTS, 2, by_host=RACKS).order is AS_RANKED, order


@given(
    st.integers(2, 9).flatmap(
        lambda N: st.tuples(
            st.permutations(range(N)), st.integers(2, min(3, N)), st.sets(st.integers(0, N - 1)), st.just(N)
        )
    )
)
def test_in_any_order_what_is_survivable_is_found(case: tuple[list[int], int, set[int], int]) -> None:
    ranks, m, failed, N = case
    order = PlacementOrder(tuple(ranks))
    inventories = {host: i for host, i in job(N, m, order=order).items() if int(host[1:]) not in failed}
    hosts = [*inventories, *(f"r{k}" for k in failed)]
    made = plan_recovery(inventories, hosts, m)
    if not inventories:
        return
    found = made.find_training_plan("")
    assert found is not None and made.survivable == can_survive(N, m, failed, order)
    assert (found.outcome == "chosen") == made.survivable
    assert made.order == (order if len(hosts) == N else made.order)
    if made.survivable:
        held = {host: {c.rank for c in i.copies} for host, i in inventories.items()}
        for pull in found.pulls:
            assert pull.dest_host.startswith("r"), "survivors have what they are to have"
            held.setdefault(pull.dest_host, set()).add(pull.shard.rank)
        by_rank = {rank: host for host, rank in made.noderanks.items()}
        assert all(rank in held[by_rank[h]] for rank in range(N) for h in list_holders(rank, N, m, order))
