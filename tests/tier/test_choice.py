"""Which versions a recovery takes from the tier, and which from memory."""

from __future__ import annotations

from gemini_hpc.agent.peers.round_plan import add_stored_versions
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier.version import VersionManifest
from gemini_hpc.wire import peer
from gemini_hpc.wire.stored import NodeFile, Stored

HOSTS = ("a", "b", "c")
RANKS = {"a": 0, "b": 1, "c": 2}
DIGEST = "0" * 32


def manifest(stamp: Stamp, name: str = "default", homes: tuple[int, ...] = (0, 1, 2)) -> VersionManifest:
    files = tuple(
        NodeFile(f"node-{home:04d}.h5", 10, (Stored(rank, home, 4096, 4000, DIGEST),))
        for rank, home in enumerate(homes)
    )
    return VersionManifest(7, name, stamp, len(homes), 1.0, files)


def plan(*trainings: peer.PlannedTraining, epoch: int = 3) -> peer.PlanDown:
    return peer.PlanDown(
        round=1, step="", epoch=epoch, noderanks=RANKS, map_hash="", ports={}, trainings=trainings, pulls=()
    )


def in_memory(stamp: Stamp | None, name: str = "default") -> peer.PlannedTraining:
    return peer.PlannedTraining(name, stamp, (), stamp, 3, (), ())


def test_what_memory_has_lost_comes_from_the_tier() -> None:
    found = add_stored_versions(plan(in_memory(None)), [manifest(Stamp(2, 40))])
    [chosen] = found.trainings
    assert chosen.chosen == (2, 40) and chosen.world == 3 and chosen.stored
    assert [(order.dest, order.copy.rank, order.sources) for order in found.pulls] == [
        (host, rank, (peer.TIER,)) for host, rank in RANKS.items()
    ]


def test_memory_that_is_as_new_is_preferred() -> None:
    before = plan(in_memory(Stamp(2, 40)))
    assert add_stored_versions(before, [manifest(Stamp(2, 40))]) == before
    assert add_stored_versions(before, [manifest(Stamp(2, 39))]) == before
    assert add_stored_versions(before, []) == before


def test_memory_that_is_older_is_not() -> None:
    found = add_stored_versions(plan(in_memory(Stamp(2, 30))), [manifest(Stamp(2, 40))])
    assert found.trainings[0].chosen == (2, 40)


def test_each_set_has_its_own_choice() -> None:
    found = add_stored_versions(
        plan(in_memory(Stamp(2, 41), "x"), in_memory(None, "y")),
        [manifest(Stamp(2, 40), "x"), manifest(Stamp(1, 9), "y")],
    )
    assert {s.name: (s.chosen, s.stored) for s in found.trainings} == {"x": ((2, 41), False), "y": ((1, 9), True)}


def test_a_set_of_which_not_even_the_name_is_known_takes_the_place_of_its_absence() -> None:
    nothing = peer.PlannedTraining("default", None, (), None, 0, (), ("all copies are gone",))
    found = add_stored_versions(plan(nothing), [manifest(Stamp(2, 40), "mine")])
    assert [s.name for s in found.trainings] == ["mine"]


def test_fewer_nodes_than_then_share_the_homes() -> None:
    found = add_stored_versions(plan(in_memory(None)), [manifest(Stamp(2, 40), homes=(0, 1, 2, 3, 4))])
    assert [order.dest for order in found.pulls] == ["a", "b", "c", "a", "b"]


def test_the_epoch_is_above_that_of_the_version() -> None:
    assert add_stored_versions(plan(in_memory(None), epoch=1), [manifest(Stamp(5, 40))]).epoch == 6
    assert add_stored_versions(plan(in_memory(None), epoch=9), [manifest(Stamp(5, 40))]).epoch == 9
