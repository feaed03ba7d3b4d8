"""Tests of real clusters, and variants, that `make test-long` runs and `make test` does not; and what it has instead.

On real clusters `make test` shows each mechanism once. Who else dies, when, and beside what, is what simulated
clusters are better at (`sim:NAME` is a story of `tests/sim`, seeds of it run in `make test`); a variant has its
sibling. They stand in moved.toml. Without brackets an entry means all of a test's parameters.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

MOVED: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["moved"]


def instead(test: str) -> str:
    """What `make test` has in place of this test, as pytest's ids have it, below tests/; "": the test itself."""
    return MOVED.get(test) or MOVED.get(test.partition("[")[0], "")
