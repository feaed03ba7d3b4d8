"""A shard's former slots are kept until its new ones have what is sealed."""

from __future__ import annotations

import asyncio

from gemini_hpc.agent.replicas.memory import Budget
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.config import Settings
from gemini_hpc.core.slots import Stamp


def test_a_newer_version_that_is_not_sealed_does_not_free_the_sealed_one() -> None:
    """Slots have grown since the seal; the newer version is void, and each decision names the old seal again."""
    store, sealed = Store(Budget(Settings(cluster_name="c", memory_floor_bytes=0))), Stamp(1, 11)

    async def shards() -> None:
        for size, version in ((8192, 11), (12288, 12)):
            shard = await store.make_shard("default", 0, 1, 0, size)
            shard.registered_round = 1
            shard.pair.complete_slot(
                shard.pair.begin_version(Stamp(1, version), None, frozenset(), voted=frozenset()),
                Stamp(1, version),
                "d",
                1,
            )

    asyncio.run(shards())
    try:
        store.drop_stale("default", 1, 1, sealed)
        assert {copy.stamp for copy in store.list_copies()} == {sealed, Stamp(1, 12)}
        store.drop_stale("default", 1, 1, Stamp(1, 12))
        assert {copy.stamp for copy in store.list_copies()} == {Stamp(1, 12)}
    finally:
        store.clear()
