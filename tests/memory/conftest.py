"""A cluster with a cap for the rules about memory and ranks (requirements memory, give-way, all-or-nothing-map,
several-trainings, users-errors, not-a-failure); nothing may be left after any test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "recovery"))
from harness import LiteJob
from sharing import Shared

from gemini_hpc.devcluster.cluster import Cluster

MIB = 1 << 20
CAP_BYTES = 200 * MIB


class Site:
    """The cluster, and its gemini.toml, which each prolog and each new agent reads."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._file = cluster.directory / "etc" / "gemini-hpc" / "gemini.toml"
        self._text = self._file.read_text()

    def configure(self, **values: Any) -> None:
        """Set these beside the cap, in place of the cluster's own, for jobs that start from now on."""
        values = {"memory_cap_bytes": CAP_BYTES, **values}
        lines = [line for line in self._text.splitlines() if line.split(" ")[0] not in values]
        shown = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        self._file.write_text("\n".join([*lines, *shown]) + "\n")

    def restore(self) -> None:
        """Set what the cluster was brought up with."""
        self._file.write_text(self._text)

    def job(self, **options: Any) -> LiteJob:
        return LiteJob(self.cluster, **options).submit()

    def sh(self, node: str, script: str, user: str | None = None) -> str:
        return self.cluster.exec(node, ["bash", "-c", script], user=user).stdout.strip()

    def cgroup(self, node: str, pid: int | str) -> str:
        """The memory cgroup of a process, from the node's own top."""
        return self.sh(node, f"grep ':memory:' /proc/{pid}/cgroup").rpartition(f"/{node}/")[2]

    def slurmd(self, node: str) -> str:
        return self.sh(node, "pgrep -xo slurmd")

    def memory(self, node: str, group: str, what: str) -> int:
        return int(self.sh(node, f"cat /sys/fs/cgroup/memory/{group}/memory.{what}"))


@pytest.fixture
def site(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Site]:
    with shared.lent(request) as cluster:
        site = Site(cluster)
        site.configure()
        yield site
        site.restore()


@pytest.fixture
def inspect(site: Site) -> Callable[[int], dict[str, Any]]:
    def ask(job: int) -> dict[str, Any]:
        done = site.cluster.run(["gemini-hpc", "inspect", str(job), "--json"], user="alice")
        return json.loads(done.stdout) if done.returncode == 0 else {}

    return ask
