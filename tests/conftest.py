"""For all tests: the order in which `pytest -n 3 --dist loadfile --no-loadscope-reorder` deals the files."""

from __future__ import annotations

import pytest
from dealing import longest_first


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items)
