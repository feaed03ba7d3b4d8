"""The plan of a job whose nodes keep parity: any one node of a group may be lost, and its shard is made again."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gemini_hpc.core import parity, placement
from gemini_hpc.core.copy import Copy, Member
from gemini_hpc.core.recovery_plan import Inventory, TrainingPlan, plan_recovery
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.core.slots import Stamp

FIVE, SIX = Stamp(0, 5), Stamp(0, 6)


def used(rank: int) -> int:
    return 1_000_000 + 3000 * rank


def shard(rank: int, stamp: Stamp, N: int, digest: str = "") -> Copy:
    return Copy("", rank, N, rank, 1 << 20, used(rank), stamp, digest or f"{rank}@{stamp}")


def parity_of(rank: int, stamp: Stamp, N: int, n: int, blocks: int = 1) -> Copy:
    stripe = parity.Stripe(parity.build_stripes(range(N), placement.list_groups(N, n))[rank], blocks)
    of = tuple(
        Member(s.rank, s.home, s.bytes, s.used, s.digest)
        for r in stripe.ranks
        if r != rank
        for s in [shard(r, stamp, N)]
    )
    room = max(stripe.compute_block_bytes(m.bytes) for m in of)
    length = stripe.compute_parity_bytes(rank, {m.rank: m.used for m in of}, room)
    digest = f"p{rank}@{stamp}"
    return Copy("", rank, N, rank, blocks * room, length, stamp, digest, members=of, blocks=blocks, room=room)


def job(
    N: int, n: int, stamps: tuple[Stamp, ...] = (FIVE,), sealed: Stamp | None = FIVE, blocks: int = 1
) -> dict[str, Inventory]:
    """One rank per node, all copies and parities in place."""
    noderanks = {f"n{node}": node for node in range(N)}
    return {
        host: Inventory(
            host,
            noderanks,
            0,
            tuple(c for s in stamps for c in (shard(node, s, N), parity_of(node, s, N, n, blocks))),
            0,
            () if sealed is None else (("", sealed),),
        )
        for host, node in noderanks.items()
    }


def planned(inventories: dict[str, Inventory], hosts: list[str], n: int, blocks: int = 1) -> TrainingPlan:
    found = plan_recovery(inventories, hosts, n, parity=blocks).find_training_plan("")
    assert found is not None
    return found


def hosts(N: int, *without: str) -> list[str]:
    return [f"n{node}" for node in range(N) if f"n{node}" not in without]


@given(st.integers(2, 9), st.data())
def test_a_lost_nodes_shard_and_parity_are_made_by_its_replacement(N: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(2, N))
    lost = data.draw(st.integers(0, N - 1))
    inventories = job(N, n)
    del inventories[f"n{lost}"]
    found = planned(inventories, ["new", *hosts(N, f"n{lost}")], n)
    assert (found.outcome, found.chosen, found.sealed, found.pulls) == ("chosen", FIVE, FIVE, ())
    assert [s.rank for s in found.shards] == list(range(N))
    again, new = found.made
    assert (again.dest_host, again.copy) == ("new", shard(lost, FIVE, N))
    others = set(Redundancy(N, n, parity=1).list_receivers(lost))
    assert {c.rank for _, c in again.parts if c.members} == others
    assert {c.rank for _, c in again.parts if not c.members} == (others if len(others) > 1 else set())
    assert all(host == f"n{c.rank}" for host, c in (*again.parts, *new.parts))
    assert new.dest_host == "new" and {m.rank for m in new.copy.members} == others == {c.rank for _, c in new.parts}
    assert structs.replace(new.copy, digest=f"p{lost}@{FIVE}") == parity_of(lost, FIVE, N, n)


@given(st.integers(3, 9), st.data())
def test_as_many_lost_nodes_as_there_are_blocks_are_made_again(N: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(3, N))
    blocks = data.draw(st.integers(2, min(4, n - 1)))
    group = data.draw(st.sampled_from(placement.list_groups(N, n)))
    lost = sorted(data.draw(st.sets(st.sampled_from(group), min_size=1, max_size=blocks)))
    inventories = {host: i for host, i in job(N, n, blocks=blocks).items() if int(host[1:]) not in lost}
    new = [f"x{node}" for node in lost]
    found = planned(inventories, [*new, *inventories], n, blocks)
    assert (found.outcome, found.chosen, found.sealed, found.pulls) == ("chosen", FIVE, FIVE, ())
    shards = {made.copy.rank: made for made in found.made if not made.copy.members}
    assert [made.copy for _, made in sorted(shards.items())] == [shard(node, FIVE, N) for node in lost]
    for made in shards.values():
        assert made.dest_host == f"x{lost[0]}" or made.dest_host in new
        assert all(host == f"n{c.rank}" for host, c in made.parts)
    dest = {made.dest_host for made in shards.values()}
    assert dest == set(new)


def test_of_one_node_too_many_nothing_is_made() -> None:
    inventories = {host: i for host, i in job(6, 6, blocks=2).items() if host not in ("n0", "n2", "n5")}
    assert planned(inventories, ["x", "y", "z", *inventories], 6, 2).outcome == "lost"


def test_with_two_blocks_one_parity_may_be_missing_beside_a_lost_node() -> None:
    inventories = job(6, 6, blocks=2)
    del inventories["n1"]
    inventories["n2"] = replace(inventories["n2"], copies=(shard(2, FIVE, 6),))
    found = planned(inventories, ["n0", "new", "n2", "n3", "n4", "n5"], 6, 2)
    assert found.outcome == "chosen" and found.chosen == FIVE


def test_nobody_lost_nothing_is_made() -> None:
    found = planned(job(5, 4, (FIVE, SIX), None), hosts(5), 4)
    assert (found.chosen, found.keep, found.sealed, found.made) == (SIX, (SIX, FIVE), None, ())


def test_two_nodes_of_a_group_are_too_many_and_of_two_groups_are_not() -> None:
    for pair in combinations(range(6), 2):
        inventories = {h: i for h, i in job(6, 3).items() if int(h[1:]) not in pair}
        made = plan_recovery(inventories, [*inventories, "x", "y"], 3, parity=1)
        survives = pair[0] // 3 != pair[1] // 3
        assert made.survivable == survives
        found = made.find_training_plan("")
        assert found is not None and (found.outcome == "chosen") == survives
        if not survives:
            assert {x.rank for x in found.lost} == set(pair)
            assert "no complete copy of shard" in found.lost[0].reason and "n" in found.lost[0].reason


def test_a_version_of_which_one_parity_is_missing_cannot_be_made() -> None:
    inventories = job(4, 4, (FIVE, SIX), FIVE)
    del inventories["n1"]
    inventories["n2"] = replace(
        inventories["n2"], copies=tuple(c for c in inventories["n2"].copies if not (c.members and c.stamp == SIX))
    )
    found = planned(inventories, ["n0", "new", "n2", "n3"], 4)
    assert (found.chosen, found.keep) == (FIVE, (FIVE,))


def test_a_parity_that_is_missing_is_made_where_all_shards_are() -> None:
    inventories = job(3, 3)
    inventories["n1"] = replace(inventories["n1"], copies=(shard(1, FIVE, 3),))
    [made] = planned(inventories, hosts(3), 3).made
    assert made.dest_host == "n1" and made.copy.members == parity_of(1, FIVE, 3, 3).members


def test_a_parity_of_more_members_than_can_be_is_left_out() -> None:
    """As one may be named by a peer: there is no code for so many."""
    inventories = job(3, 3)
    del inventories["n0"]
    bad = parity_of(1, FIVE, 3, 3)
    many = tuple(structs.replace(bad.members[0], rank=rank) for rank in (0, *range(2, 300)))
    copies = (shard(1, FIVE, 3), structs.replace(bad, members=many, world=400))
    inventories["n1"] = replace(inventories["n1"], copies=copies)
    found = plan_recovery(inventories, ["new", "n1", "n2"], 3, parity=1)
    made = found.find_training_plan("")
    assert made is None or made.outcome != "chosen"
    short = structs.replace(bad, members=bad.members[:1], blocks=2)
    inventories["n1"] = replace(inventories["n1"], copies=(shard(1, FIVE, 3), short))
    assert planned(inventories, ["new", "n1", "n2"], 3).outcome == "lost"


def test_a_parity_that_says_something_else_is_not_used() -> None:
    for of in ("another digest", "twice the same", "its own", "of no such rank"):
        inventories = job(3, 3)
        del inventories["n0"]
        bad = parity_of(1, FIVE, 3, 3)
        first, second = bad.members
        wrong = {
            "another digest": (first, structs.replace(second, digest="other")),
            "twice the same": (first, first),
            "its own": (first, structs.replace(second, rank=1)),
            "of no such rank": (first, structs.replace(second, rank=7)),
        }[of]
        copies = (shard(1, FIVE, 3), structs.replace(bad, members=wrong))
        inventories["n1"] = replace(inventories["n1"], copies=copies)
        assert planned(inventories, ["new", "n1", "n2"], 3).outcome == "lost", of


def test_a_job_of_another_size_goes_on_with_parity_of_the_next_version() -> None:
    inventories = job(4, 4)
    found = planned(inventories, hosts(3), 3)
    assert found.chosen == FIVE and found.sealed == FIVE
    del inventories["n1"]
    smaller = planned(inventories, ["n0", "n2", "n3"], 3)
    assert smaller.chosen == FIVE and smaller.sealed == FIVE, "nobody can seal it, and a later one may replace it"


def test_whole_copies_of_a_predecessor_are_taken_and_its_parity_is_not() -> None:
    made = plan_recovery(job(3, 3), hosts(3), 3, parity=1, foreign=True).find_training_plan("")
    assert made is not None and made.made == () and len(made.pulls) == 3
    left = job(3, 3)
    del left["n2"]
    lost = plan_recovery(left, hosts(3), 3, parity=1, foreign=True).find_training_plan("")
    assert lost is not None and lost.outcome != "chosen"


def test_parity_of_one_is_a_single_copy() -> None:
    made = plan_recovery({"n0": job(3, 3)["n0"]}, ["n0"], 1, parity=1)
    assert made.noderanks == {"n0": 0}
