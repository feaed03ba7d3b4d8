"""Requirement several-trainings on the real cluster: two trainings in one job are two sets, each sealed and recovered
by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import LiteJob
from waiting import until

from .conftest import Site

Inspect = Callable[[int], dict[str, Any]]
pytestmark = pytest.mark.cluster

# Both trainings in every task of one step; the second one's log has ".b" behind its name.
BOTH = (
    'srun bash -c \'LITE_SET=b "$1" "$2" "$3.b" "$4" 0.15 "$6" & b=$!; LITE_SET=a "$@"; a=$?; wait $b && exit $a\' sh'
)


class Second(LiteJob):
    """The same job, seen through the second training's log."""

    @property
    def log(self) -> Path:
        return self.directory / "log.b"


def test_two_trainings_side_by_side_recover_a_dead_node(site: Site, inspect: Inspect) -> None:
    first = site.job(nodes=3, steps=50, run=BOTH)
    second = Second(**{k: getattr(first, k) for k in LiteJob.__dataclass_fields__})
    first.reach(10)
    second.reach(5)

    def states() -> set[tuple[str, str]]:
        return {(training["name"], training["state"]) for training in inspect(first.id).get("trainings", [])}

    until(lambda: states() >= {("a", "protected"), ("b", "protected")}, 20, what="both are protected")
    site.cluster.cut_power(first.hosts()[1])
    first.finish()
    until(lambda: len(second.lines("done")) >= 3, 30, what="the second one's end")
    for training in (first, second):
        assert not training.lines("MIXED"), training.story()
        assert training.resumed(1) > 0 and training.repeated(1) in (0, 1), training.story()
    assert first.resumed(1) != second.resumed(1), "each has its own version"


def test_two_trainings_of_one_name_are_told_to_take_names(site: Site) -> None:
    same = BOTH.replace("LITE_SET=b", "LITE_SET=a")
    job = site.job(nodes=2, steps=30, run=same)
    until(lambda: "several trainings in one job need names" in job.output(), 40, what="the refusal")
    assert "Checkpointer(name=...)" in job.output()
