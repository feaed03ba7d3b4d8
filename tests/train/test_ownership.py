"""Who keeps what: everything once, nothing twice, in balance."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.train.state.ownership import Block, TensorEntry, deal_blocks, find_unequal

Shape = tuple[int, ...]


def whole(key: str, shape: Shape, fingerprint: int = 1) -> TensorEntry:
    return TensorEntry(key, shape, (0,) * len(shape), shape, 4, fingerprint)


def rows(key: str, shape: Shape, rank: int, world: int) -> TensorEntry:
    """As Shard(0) cuts."""
    step = -(-shape[0] // world)
    start, stop = min(shape[0], rank * step), min(shape[0], (rank + 1) * step)
    offset = (start if stop > start else 0, *(0 for _ in shape[1:]))
    return TensorEntry(key, shape, offset, (stop - start, *shape[1:]), 4)


def cells(offset: Shape, size: Shape) -> set[Shape]:
    return set(itertools.product(*(range(o, o + s) for o, s in zip(offset, size, strict=True))))


def bytes_of(entries: list[list[TensorEntry]], dealt: list[list[Block]]) -> list[int]:
    return [sum(math.prod(b.size) * entries[r][b.entry].itemsize for b in blocks) for r, blocks in enumerate(dealt)]


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, shapes, st.integers(1, 5))
def test_every_cell_has_one_keeper(replicated: list[Shape], sharded: list[Shape], world: int) -> None:
    entries = [
        [whole(f"w{i}", s) for i, s in enumerate(replicated)]
        + [rows(f"s{i}", s, rank, world) for i, s in enumerate(sharded) if s]
        for rank in range(world)
    ]
    assert not find_unequal(entries)
    dealt = deal_blocks(entries)
    kept: dict[str, list[Shape]] = {}
    for rank, blocks in enumerate(dealt):
        for block in blocks:
            entry = entries[rank][block.entry]
            inside = cells(entry.offset, entry.size)
            mine = cells(block.offset, block.size)
            assert mine <= inside, "a rank can keep only what it has"
            kept.setdefault(entry.key, []).extend(mine)
    for entry in itertools.chain(*entries):
        wanted = sorted(itertools.product(*(range(n) for n in entry.shape))) if 0 not in entry.shape else []
        found = kept.get(entry.key, [])
        if entry.key.startswith("w") and 0 < len(wanted) * entry.itemsize <= 64:  # a count of steps: on every rank
            assert sorted(set(found)) == wanted and len(found) == world * len(wanted)
        else:
            assert sorted(found) == wanted
    assert deal_blocks(entries) == dealt


def gpt(layers: int, dim: int, vocabulary: int) -> list[tuple[str, Shape]]:
    found: list[tuple[str, Shape]] = [("embed", (vocabulary, dim))]
    for i in range(layers):
        found += [(f"{i}.qkv", (3 * dim, dim)), (f"{i}.out", (dim, dim)), (f"{i}.up", (4 * dim, dim))]
        found += [(f"{i}.down", (dim, 4 * dim)), (f"{i}.norm", (dim,)), (f"{i}.step", ())]
    return [(f"{kind}.{k}", s) for kind in ("p", "m", "v") for k, s in found]


def balance(entries: list[list[TensorEntry]]) -> float:
    loads = bytes_of(entries, deal_blocks(entries))
    return max(loads) * len(loads) / sum(loads)


def test_replicated_state_is_balanced() -> None:
    for world in (2, 3, 4, 8, 64):
        for tensors in (gpt(12, 768, 50257), gpt(4, 192, 256), gpt(2, 64, 100_000)):
            assert balance([[whole(k, s) for k, s in tensors] for _ in range(world)]) <= 1.05


def test_hybrid_shards_are_balanced() -> None:
    """HSDP 2x2: each half is held by two ranks."""
    tensors = gpt(6, 256, 10_001)
    entries = [[rows(k, s, rank % 2, 2) if s else whole(k, s) for k, s in tensors] for rank in range(4)]
    assert not find_unequal(entries)
    assert balance(entries) <= 1.05


def test_one_huge_tensor_is_split() -> None:
    assert balance([[whole("e", (50_000, 64)), whole("b", (64,))] for _ in range(3)]) <= 1.05
    assert balance([[whole("e", (1, 1, 64_000))] for _ in range(3)]) <= 1.05


def test_full_ownership_keeps_everything_everywhere() -> None:
    entries = [[whole("a", (7, 3)), whole("b", ())] for _ in range(3)]
    assert all(
        [(b.entry, b.size) for b in blocks] == [(0, (7, 3)), (1, ())] for blocks in deal_blocks(entries, "full")
    )


def test_what_differs_is_recognised() -> None:
    assert find_unequal([[whole("a", (3,), 1)], [whole("a", (3,), 2)]]) == {"a"}
    assert find_unequal([[whole("a", (3,))], [whole("a", (4,))]]) == {"a"}
    assert find_unequal([[TensorEntry("a", (4,), (0,), (2,), 4)], [TensorEntry("a", (4,), (1,), (2,), 4)]]) == {"a"}
    assert find_unequal([[TensorEntry("a", (4,), (0,), (2,), 4)], [TensorEntry("a", (4,), (3,), (1,), 4)]]) == {"a"}
    assert not find_unequal([[TensorEntry("a", (4,), (0,), (2,), 4)], [TensorEntry("a", (4,), (2,), (2,), 4)]])
