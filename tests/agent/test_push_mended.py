"""Bytes that are damaged on the way, between real agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_hpc.core.digest import PIECE_BYTES

from .test_push_bad_input import Site, opened, payload
from .test_push_stripes import MID, SIZE, STRIPES, USED

__all__ = ["opened"]
pytestmark = pytest.mark.slow


def test_a_flipped_byte_is_sent_again_with_its_piece(opened: None, tmp_path: Path) -> None:
    """Each agent damages the first version that it is sent: it is sealed all the same."""
    site = Site(tmp_path / "job", SIZE, USED, STRIPES, flips=MID)
    try:
        for node in site.job.nodes:
            assert f"{PIECE_BYTES} bytes were damaged on the way, and were sent again" in node.log(), node.log()
            assert "event=damaged" not in node.log() and "event=degraded" not in node.log()
        for rank in site.ranks:
            before = site.ranks[(rank.rank - 1) % 3]
            assert any(slot[:USED] == payload(before.rank, site.version, USED) for slot in rank.kept)
    finally:
        site.close()
