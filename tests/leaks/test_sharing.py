"""A cluster that many tests share is replaced after a failure, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sharing import Shared

pytestmark = pytest.mark.cluster


def test_after_a_failure_it_is_another() -> None:
    session = SimpleNamespace(testsfailed=0)
    request: Any = SimpleNamespace(session=session)
    seen = []
    with Shared("again", nodes=1, settings={}) as shared:
        for fails in (False, True, False):
            with shared.lent(request) as cluster:
                seen.append((cluster.name, cluster.find_node_pid("n1")))
                session.testsfailed += fails
    first, second, third = seen
    assert first == second and third[0] == first[0] and third[1] != first[1], seen
