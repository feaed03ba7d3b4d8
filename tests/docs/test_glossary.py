"""The glossary names classes that are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "glossary.md"


def test_each_name_is_a_class_of_the_code() -> None:
    rows = re.findall(r"^- \*\*([^*]+)\*\* \(`([\w.]+)`\): \w", PAGE.read_text(), re.M)
    assert len(rows) > 30
    names = [name for name, _ in rows]
    assert len(set(names)) == len(names), "one name, one meaning"
    for name, place in rows:
        module, _, found = place.rpartition(".")
        assert isinstance(getattr(importlib.import_module(f"gemini_hpc.{module}"), found), type), name
