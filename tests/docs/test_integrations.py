"""docs/integrations.md claims only what a test has shown."""

from __future__ import annotations

import re

from .test_faults import entries
from .test_links import ROOT, section


def test_every_row_names_a_test_that_is_there() -> None:
    rows = entries("## Shown\n" + section("docs/integrations.md", "What was shown"))
    assert len(rows) > 30
    place = ""
    for row in rows:
        cell = row["Test"]
        place = next(iter(re.findall(r"`(tests/[\w/]+\.py)`", cell)), place)  # a row without a file goes on with it
        named = re.findall(r"`(test_\w+)`", cell)
        defined = set(re.findall(r"^def (test_\w+)\(", (ROOT / place).read_text(), re.M))
        assert named and set(named) <= defined, row
