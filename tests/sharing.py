"""A development cluster that many tests share: each leaves it as it found it, and after a failure it is another."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from leaks.cluster import Bystander, nothing_left
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

# A retention time of 20 s, and three looks of the controller, 10 s apart at most on a slow machine: a job has ended,
# its retention is over, its agents have gone.
LET_GO_S = 55.0
# On a busy machine an agent may take 10 s to start, and be silent for half a second: no test is about that.
PATIENT = {"attach_timeout_s": 40.0, "heartbeat_missed": 10}
SETTINGS = {"retention_s": 20.0, "fence_budget_nodes": 1000, "self_fence_s": 6.0, "tier_keep_every": 3}
NODES = 7
_USERS = ("alice", "bob")
Settings = Mapping[str, str | int | float | bool]
_KILLED_RANKS_LEAVE = re.compile(r"mpich_shm_|torch_")


class Shared:
    """One cluster for one test after the other."""

    def __init__(self, name: str, let_go_s: float = LET_GO_S, *, settings: Settings, **how: Any) -> None:
        """Bring it up.

        Args:
            name: stays when the cluster is replaced, which is then the same to the leak check.
            let_go_s: within which what jobs hold is given back after a test.
            settings: beside, or over, `PATIENT`.
            how: of `Cluster.bring_up`.
        """
        self._up = partial(Cluster.bring_up, f"{name}{os.getpid()}", settings={**PATIENT, **settings}, **how)
        self._let_go_s = let_go_s
        self._cluster = self._up()
        self._is_clean = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.tear_down()

    @contextmanager
    def lent(
        self, request: pytest.FixtureRequest, sweep: Callable[[Cluster], None] | None = None
    ) -> Iterator[Cluster]:
        """Lend it to the test of `request`, from its fixture; `sweep` takes away what the jobs' programs leave."""
        if not self._is_clean:
            self._cluster = self._up(replace=True)
        self._is_clean, failed = False, request.session.testsfailed
        with ExitStack() as stack:
            stack.enter_context(clean(self._cluster, self._let_go_s, sweep))
            yield self._cluster
            if request.session.testsfailed > failed:
                stack.pop_all()  # nobody tidies it
                return
        self._is_clean = True


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    """Bring up the cluster of all tests that need no other; the conftest.py of all has it, so that there is one."""
    with Shared("shared", nodes=NODES, settings=SETTINGS) as shared:
        yield shared


@contextmanager
def clean(cluster: Cluster, let_go_s: float, sweep: Callable[[Cluster], None] | None = None) -> Iterator[None]:
    """Take one test: afterwards its jobs are ended, all nodes are back, and nothing is left."""
    if cluster.find_controller_pid() is None:
        cluster.start_controller()
    with nothing_left(cluster, let_go_s):
        bystander = Bystander(cluster)
        yield
        changed = bystander.end()
        tidy(cluster)
        if sweep:
            sweep(cluster)
    assert not changed, f"somebody else's job {bystander.id} has been changed: {changed}"


def tidy(cluster: Cluster) -> None:
    """End all jobs, and bring the controller and all nodes back."""
    for user in _USERS:
        cluster.run(["scancel", f"--user={user}"])
    until(lambda: not cluster.run(["squeue", "-h"]).stdout.strip(), 60, 0.1, what="queue empty")
    if cluster.find_controller_pid() is None:
        cluster.start_controller()
    cluster.restore()


def swept(cluster: Cluster) -> None:
    """Remove what MPICH and torch's data loaders leave of ranks that were killed."""
    for node in cluster.node_names:
        for path in Path(f"/proc/{cluster.find_node_pid(node)}/root/dev/shm").iterdir():
            if _KILLED_RANKS_LEAVE.match(path.name):
                path.unlink()
