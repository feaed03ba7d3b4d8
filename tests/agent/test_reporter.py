"""What an agent tells the controller of a death, again and again, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc import clock
from gemini_hpc.agent import reporter
from gemini_hpc.agent.reporter import Reporter
from gemini_hpc.wire.controller import Report


def told(*, detached: bool, ago_s: float = 0.0, waits: bool = False) -> list[str]:
    """The hosts of which a new controller hears."""
    agent: Any = SimpleNamespace(job=7, restart=0, node="n1", mesh=SimpleNamespace(dead={"n2"}))
    agent.detached, agent.waits, agent.detached_at = detached, waits, clock.monotonic() - ago_s
    sent: list[Any] = []
    mine = Reporter(agent)
    mine._link, mine._reported = SimpleNamespace(send=sent.append), -reporter._REPEAT_S - 1.0  # type: ignore[assignment]
    mine.beat()
    return [m.host for m in sent if isinstance(m, Report)]


@pytest.mark.parametrize(
    ("detached", "ago_s", "waits", "hosts"),
    [
        (False, 0.0, False, ["n2"]),
        (True, 5.0, False, ["n2"]),  # the script has ended, perhaps before a controller could act
        (True, 5.0, True, []),  # the job is pending: somebody has acted
        (True, reporter._ENDED_S + 1.0, False, []),
    ],
)
def test_a_death_is_told_until_somebody_has_acted(
    detached: bool, ago_s: float, waits: bool, hosts: list[str]
) -> None:
    assert told(detached=detached, ago_s=ago_s, waits=waits) == hosts
