"""What an agent makes of the node list that its prolog, a peer or a predecessor has told it."""

from __future__ import annotations

import pytest

from gemini_hpc.agent.daemon import _build_view
from gemini_hpc.wire.local import Attach


@pytest.mark.parametrize(
    ("nodes", "replicas", "spares", "wanted"), [(4, 2, 1, 3), (3, 2, 2, 2), (2, 2, 1, 2), (1, 2, 3, 1)]
)
def test_a_spare_that_the_copies_need_is_none(nodes: int, replicas: int, spares: int, wanted: int) -> None:
    nodelist = f"n[1-{nodes}]" if nodes > 1 else "n1"
    view = _build_view(Attach(7, 0, nodelist, "n1", replicas, spares=spares))
    assert (view.wanted, view.spares) == (wanted, nodes - wanted)


@pytest.mark.parametrize("lost", [("n1",), ("n9",)])
def test_what_cannot_be_lost(lost: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="n1 is not in the node list"):
        _build_view(Attach(7, 0, "n[1-3]", "n1", 2, spares=1, lost=lost))
