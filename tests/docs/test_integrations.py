"""docs/integrations.md claims only what a test has shown."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_row_names_a_test_that_is_there() -> None:
    text = (ROOT / "docs" / "integrations.md").read_text()
    table = text[text.index("| stack | result |") :]
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    assert len(rows) > 5
    place = ""
    for row in rows:
        cell = row.rstrip("| ").rpartition("| ")[2]
        place = next(iter(re.findall(r"`(tests/[\w/]+\.py)`", cell)), place)  # a row without a file goes on with it
        named = re.findall(r"`(test_\w+)`", cell)
        defined = set(re.findall(r"^def (test_\w+)\(", (ROOT / place).read_text(), re.M))
        assert named and set(named) <= defined, row
