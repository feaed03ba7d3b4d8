from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.slots import Stamp
from gemini_hpc.format.slot_header import (
    HEADER_BYTES,
    MAGIC,
    PAGE_BYTES,
    TENSOR_ALIGN_BYTES,
    SlotLayout,
    pack_header,
    parse_header,
)

layouts = st.builds(SlotLayout.plan, st.integers(0, 1 << 20), st.integers(0, 1 << 45), st.integers(0, 1 << 24))


@given(layouts)
def test_areas_follow_each_other_aligned(layout: SlotLayout) -> None:
    assert layout.manifest_offset == HEADER_BYTES
    assert layout.manifest_offset + layout.manifest_bytes <= layout.tensor_offset
    assert layout.tensor_offset + layout.tensor_bytes <= layout.small_offset
    assert layout.small_offset + layout.small_capacity <= layout.total
    assert layout.tensor_offset % PAGE_BYTES == layout.small_offset % PAGE_BYTES == layout.total % PAGE_BYTES == 0
    assert PAGE_BYTES % TENSOR_ALIGN_BYTES == 0


@given(layouts, st.data())
def test_header_round_trip(layout: SlotLayout, data: st.DataObject) -> None:
    small = data.draw(st.integers(0, layout.small_capacity))
    stamp = Stamp(data.draw(st.integers(0, 1 << 32)), data.draw(st.integers(0, 1 << 40)))
    world = data.draw(st.integers(1, 10_000))
    page = pack_header(layout, small, stamp, world - 1, world)
    assert len(page) == HEADER_BYTES
    header = parse_header(memoryview(page), layout.total)
    assert (header.layout, header.small_bytes, header.stamp) == (layout, small, stamp)
    assert (header.rank, header.world) == (world - 1, world)
    assert header.used_bytes == layout.small_offset + small <= layout.total


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_damaged_header_is_never_taken_for_another_layout(position: int, change: int) -> None:
    """A flipped byte is refused unless it lies in a number that any value is right for: stamp, rank, fill level."""
    layout = SlotLayout.plan(1000, 1 << 20, 5000)
    good = pack_header(layout, 17, Stamp(1, 2), 3, 4)
    bad = bytearray(good)
    bad[position] ^= change
    try:
        header = parse_header(bad, layout.total)
    except ValueError:
        return
    assert header.layout.total == layout.total
    assert header.used_bytes <= layout.total
    if header.layout != layout:  # only sizes that leave every offset where it was
        assert header.layout.tensor_offset == layout.tensor_offset
        assert header.layout.small_offset == layout.small_offset


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ValueError, match="slot header"):
        parse_header(noise, 8192)
    with pytest.raises(ValueError, match="slot header"):
        parse_header((MAGIC + noise + b"\x01" * 104).ljust(HEADER_BYTES, b"\x00"), 8192)


def test_what_cannot_be_is_refused_when_packed() -> None:
    layout = SlotLayout.plan(10, 10, 10)
    for small, stamp, rank, world in [
        (11, Stamp(0, 0), 0, 1),
        (-1, Stamp(0, 0), 0, 1),
        (0, Stamp(0, 0), 1, 1),
        (0, Stamp(0, -1), 0, 1),
        (0, Stamp(1 << 64, 0), 0, 1),
    ]:
        with pytest.raises(ValueError, match="slot header"):
            pack_header(layout, small, stamp, rank, world)
    with pytest.raises(ValueError, match="tensor area of -1 bytes"):
        SlotLayout.plan(1, -1, 1)
    with pytest.raises(ValueError, match="states a slot of"):
        parse_header(pack_header(layout, 0, Stamp(0, 0), 0, 1), layout.total + 4096)
