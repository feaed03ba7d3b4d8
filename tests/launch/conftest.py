"""Launchers and real agents, ended after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from train.agents import RealJob
from train.conftest import make_agents, open_munge

from .launchers import Launchers

__all__ = ["make_agents", "open_munge"]


@pytest.fixture
def launch(make_agents: Callable[..., RealJob], tmp_path: Path) -> Iterator[Callable[..., Launchers]]:
    """launch(world, nodes=2, ...): begin a training of so many ranks, with two replicas."""
    begun: list[Launchers] = []

    def begin(world: int = 2, *, nodes: int = 2, **more: Any) -> Launchers:
        job = make_agents(nodes, 2, heartbeat_s=1.0)  # no test waits for a dead node: a busy machine makes none
        begun.append(Launchers(job, tmp_path / f"ranks{len(begun)}", world, **more))
        return begun[-1]

    yield begin
    for launchers in begun:
        launchers.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """undisturbed(world, ...): the final weights of that training without agents and faults, by rank."""
    known: dict[Any, list[str]] = {}

    def digests(world: int = 2, **options: Any) -> list[str]:
        key = world, *sorted(options.items())
        if key not in known:
            launchers = Launchers(None, tmp_path_factory.mktemp("undisturbed") / "ranks", world, pause_s=0, **options)
            try:
                assert launchers.wait() == [0] * world, launchers.story()
            finally:
                launchers.close()
            known[key] = launchers.digests()
            assert len(set(known[key])) == 1
        return known[key]

    return digests
