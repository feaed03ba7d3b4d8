"""A pair of slots of which one has been handed back does not say that it lacks what is in the other one: a root that
has been started again would give up the very version that was sealed last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gemini_hpc.agent.filling import Filling
from gemini_hpc.agent.sealing import Sealing
from gemini_hpc.agent.sets import Sets
from gemini_hpc.agent.store import Shard
from gemini_hpc.core.seal import Word
from gemini_hpc.core.slots import Refused, Slot, Stamp

SEALED, BEGUN = Stamp(1, 8), Stamp(1, 9)


def still(*_: object, **__: object) -> None: ...


def test_nothing_is_given_up_for_a_pair_that_is_half_handed_back() -> None:
    shards: list[Shard] = []
    agent = SimpleNamespace(
        replicas=1,
        epoch=1,
        mesh=None,
        rounds=SimpleNamespace(stage="live", round=1, parent=None, children=()),
        store=SimpleNamespace(of_set=lambda name: shards, drop_stale=still),
        pulls=SimpleNamespace(overtaken=still),
        drains=SimpleNamespace(sealed=still),
        budget=None,
    )
    sets = Sets(cast(Any, agent))
    training = sets.named("default")
    try:
        training.world = 2
        for rank in range(2):
            shards.append(Shard("default", rank, 2, rank, 64, [], registered_round=1, awaited=frozenset((0, 1))))
        for index, stamp in ((0, BEGUN), (1, SEALED)):
            for shard in shards:
                if stamp is SEALED or shard.rank == 0:  # the newer one never got to the other rank's holder
                    shard.pair.slots[index] = Slot("complete", stamp, "0" * 32, 64)
                    shard.pair.high = max(shard.pair.high or stamp, stamp)
                shard.awaited -= {index}
                sets._recount("default")
                if shard.awaited:
                    with pytest.raises(Refused):
                        Filling(cast(Any, agent)).begin(training, shard, 10)
        assert training.sealing is not None and training.sealing.word == Word(SEALED, frozenset())
    finally:
        sets.close()


def test_what_a_root_abandons_that_does_not_know_yet_what_is_sealed_counts() -> None:
    told: list[Word] = []
    sealing = Sealing(2, ("below",), lambda _: None, lambda word, degraded: told.append(word))
    sealing.hear(Word(SEALED), False)
    sealing.hear(Word(None, frozenset({SEALED, BEGUN})), False)
    assert sealing.word == Word(SEALED, frozenset({BEGUN})) == told[-1]
