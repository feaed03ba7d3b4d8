"""Versions that a rank here does not fill, whose holder does not wait for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gemini_hpc.wire import local

from .test_push_bad_input import Site, opened

__all__ = ["opened"]
pytestmark = pytest.mark.slow


def test_a_version_that_a_rank_leaves_out_is_not_awaited(opened: None, tmp_path: Path) -> None:
    """A degraded rank saves, but fills no other rank's shard; a rank that skips or voids a version says so in an
    event."""
    site = Site(tmp_path / "job", fill_wait_s=600.0)  # longer than any test
    try:
        rank, new = site.ranks[1], site.version + 1
        assert isinstance(rank.caller.ask(local.Fill("default", 0, new)), local.Begun)
        rank.caller.ask(local.Filled("default", 0, new))
        events = [local.Event(name, new + 2 + k, time.time()) for k, name in enumerate(("skipped", "void"))]
        for report in (None, local.Unfilled("default", 1, new + 1), *events):
            assert report is None or rank.caller.ask(report) == local.Ok()
            push = site.push()
            push.offer(new if report is None else report.version)
            push.close()
    finally:
        site.close()
