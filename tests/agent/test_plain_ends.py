"""How ranks end that no launcher watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from gemini_hpc.agent import plain_ends
from gemini_hpc.agent.plain_ends import PlainEnds
from gemini_hpc.core.attempts import End
from gemini_hpc.core.culprits import Cause


class Launches:
    """Stands for the agent's: what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, End]] = []

    def has_launchers(self, launch: str) -> bool:
        return launch.startswith("8.")

    def record_end(self, step: str, end: End) -> None:
        self.told.append((step, end))


class Kernel:
    """Stands for its count, by process."""

    ended: ClassVar[set[int]] = set()

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def has_happened(self) -> bool:
        return self._pid in self.ended

    def describe_kill(self) -> str:
        return "out of memory: the limit here is 4 GiB"


@dataclass(frozen=True)
class Process:
    pid: int


def client(pid: int) -> Any:
    return Process(pid)


@pytest.fixture
def launches() -> Launches:
    return Launches()


@pytest.fixture
def ends(launches: Any, monkeypatch: pytest.MonkeyPatch) -> PlainEnds:
    monkeypatch.setattr(plain_ends, "OutOfMemory", Kernel)
    monkeypatch.setattr(Kernel, "ended", {1, 3, 4})
    return PlainEnds("n1", launches)


def test_the_kernel_has_ended_a_rank(ends: PlainEnds, launches: Launches) -> None:
    ranks = [client(pid) for pid in range(5)]
    for rank, one in enumerate(ranks[:4]):
        ends.record_rank(one, "7.0", rank)
    ends.record_rank(ranks[4], "8.0+1", 4)
    for rank, one in enumerate(ranks):  # 3 has closed its checkpointer before; 4 has a launcher
        ends.on_disconnect(one, success=rank == 3)
        ends.on_disconnect(one, success=False)
    [(step, end)] = launches.told
    assert step == "7.0" and end.memory and (end.cause, end.rank, end.host) == (Cause.CRASHED, 1, "n1")
    assert end.text == "rank 1 was ended: out of memory: the limit here is 4 GiB"


def test_a_rank_tells_of_its_exception(ends: PlainEnds, launches: Launches) -> None:
    one = client(0)
    ends.record_exception(one, "ValueError at t.py:3", 7)
    ends.record_rank(one, "7.0", 2)
    ends.record_exception(one, "ValueError at t.py:3", 7)
    ends.on_disconnect(one, success=False)
    [(_, end)] = launches.told
    assert end.text == "rank 2 ended with ValueError at t.py:3" and end.key == "ValueError at t.py:3 at step 7"
