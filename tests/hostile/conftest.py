"""One cluster for all hostile tests, with a real training on two nodes that must not notice anything."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "recovery"))
from harness import LiteJob
from leaks import assert_nothing_new
from leaks.cluster import present
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

CAP_BYTES = 32 << 20
ALICE, BOB, NOBODY = 5001, 5002, 65534
PYTHON = "/opt/gemini-hpc/venv/bin/python"
FAILED = pytest.StashKey[bool]()


class Site:
    """The cluster, its attackers, and alice's training."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.script = cluster.directory / "attacker.py"
        shutil.copy(Path(__file__).with_name("attacker.py"), self.script)
        self.script.chmod(0o644)
        self.job = LiteJob(cluster, nodes=2, steps=1_000_000, pause_s=0.05)
        self.job.submit()
        self.job.reach(5)
        self.nodes = self.job.hosts()
        self.pids = {node: self.job.agent_pid(node) for node in self.nodes}
        text = cluster.exec(self.nodes[0], ["cat", f"/run/gemini-hpc/{self.job.id}/map"]).stdout
        self.port = int(next(x for x in text.splitlines() if x.startswith("agent_port=")).split("=")[1])

    def attack(
        self, verb: str, user: str | None = "bob", node: str | None = None, timeout_s: float = 40, **a: Any
    ) -> Any:
        """Run one verb of `attacker.py` on a node (by default that of the agent) or on ctl; its answer."""
        arguments = self.call() | a
        argv = [PYTHON, "-I", str(self.script), verb, json.dumps(arguments)]
        done = self.cluster.run(argv, user=user, node=node, timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def call(self) -> dict[str, Any]:
        """A peer's call of the first agent, as it should be."""
        first, second = self.nodes
        return {
            "host": self.cluster.find_address(first),
            "port": self.port,
            "cluster": self.cluster.name,
            "job": self.job.id,
            "restart": 0,
            "source": second,
            "target": first,
            "purpose": "link",
            "server_uid": ALICE,
        }

    def controller_call(self) -> dict[str, Any]:
        """alice's question to the controller, as it should be."""
        import pwd

        return self.call() | {
            "host": self.cluster.find_address("ctl"),
            "port": 7321,
            "target": "ctl",
            "purpose": "query",
            "server_uid": pwd.getpwnam("slurm").pw_uid,
        }

    def agent_fds(self, node: str) -> int:
        return len(self.cluster.exec(node, ["ls", f"/proc/{self.pids[node]}/fd"]).stdout.split())

    def agent_rss(self, node: str) -> int:
        text = self.cluster.exec(node, ["cat", f"/proc/{self.pids[node]}/status"]).stdout
        return int(next(x for x in text.splitlines() if x.startswith("VmRSS")).split()[1]) * 1024

    def agent_log(self) -> str:
        return str(self.job.agent_log(self.nodes[0]))

    def controller_log(self) -> str:
        return (self.cluster.log_directory / "controller.log").read_text()

    def sealed(self) -> int:
        """The newest version that a rank has seen sealed."""
        with self.job.log.open("rb") as f:
            f.seek(max(0, self.job.log.stat().st_size - 4000))
            lines = f.read().split(b"\n")[1:-1]
        return max((v["version"] for v in map(json.loads, lines) if v["what"] == "sealed"), default=0)

    def goes_on(self, more: int = 5, timeout_s: float = 15.0) -> None:
        """Sealing goes on now, by the same agents, in the same launch."""
        now = self.sealed()
        try:
            until(lambda: self.sealed() >= now + more, timeout_s, what="sealing goes on")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.job.story()}") from None

    def unharmed(self) -> None:
        """After everything: the training has noticed nothing."""
        for node in self.nodes:
            assert self.job.agent_pid(node) == self.pids[node], f"the agent of {node} has died\n{self.job.story()}"
            assert "Traceback" not in self.job.agent_log(node)
        assert "Traceback" not in self.controller_log()
        for what in ("MIXED", "agent gone", "rejoined"):
            assert not self.job.lines(what), self.job.story()
        assert len(self.job.lines("resumed")) == 2 and self.job.slurm()["Restarts"] == "0"

    def gemini(self, *args: str, user: str | None = "alice", node: str | None = None) -> Any:
        return self.cluster.run(["gemini-hpc", *args], user=user, node=node)


class Sites:
    """The one site of all these tests, in place of which there is a new one after a test that failed."""

    def __init__(self) -> None:
        self.now = self._up()

    @staticmethod
    def _up() -> Site:
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        settings: dict[str, Any] = {
            "retention_s": 20.0,
            "memory_fraction": CAP_BYTES / total,
            "operators": ["games", "@ops"],
        }
        # A busy machine's pause must not have Slurm set a node DOWN.
        patient = ["SlurmdTimeout=300"]
        cluster = Cluster.bring_up(f"hostile{os.getpid()}", nodes=4, settings=settings, slurm_conf=patient)
        try:
            with (cluster.directory / "etc" / "group").open("a") as f:
                f.write("ops:x:6001:daemon\n")
            return Site(cluster)
        except BaseException:
            cluster.tear_down()
            raise

    def replace(self) -> None:
        """Replace the cluster at once, whatever its state: the next leak checks look for one of that name."""
        self.now.cluster.tear_down()
        self.now = self._up()

    def end(self) -> None:
        """End alice's training; then nothing is left."""
        cluster = self.now.cluster
        cluster.run(["scancel", "--user=alice"])
        until(lambda: not cluster.run(["squeue", "-h"]).stdout.strip(), 60, 0.1, what="queue empty")
        assert_nothing_new({}, lambda: present(cluster), 40)


@pytest.fixture(scope="session")
def sites() -> Iterator[Sites]:
    found = Sites()
    try:
        yield found
        found.end()
    finally:
        found.now.cluster.tear_down()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture
def site(sites: Sites, request: pytest.FixtureRequest) -> Iterator[Site]:
    found = sites.now
    try:
        found.goes_on(2)
        before = present(found.cluster)
        yield found
        found.goes_on()
        found.unharmed()
        assert_nothing_new(before, lambda: present(found.cluster), 20)
    except BaseException:
        sites.replace()
        raise
    if request.node.stash.get(FAILED, True):
        sites.replace()


def one_line(done: Any, *words: str, status: int | None = None, case: str = "") -> str:
    """The one line on stderr of a command that failed as it should; `case` names it in a failure."""
    assert done.returncode == status if status is not None else done.returncode not in (0, -1), f"{case}: {done}"
    lines = done.stderr.splitlines()
    assert len(lines) == 1, f"{case}: {done.stderr}"
    assert "Traceback" not in done.stderr and done.stdout == "", case
    for word in words:
        assert word in lines[0], f"{case}: {lines[0]}"
    return str(lines[0])


class Steady:
    """Measures that an attack costs an agent neither descriptors nor memory."""

    def __init__(self, site: Site, mib: int = 12) -> None:
        self._site, self._bytes, self._node = site, mib << 20, site.nodes[0]

    def __enter__(self) -> None:
        self._fds, self._rss = self._site.agent_fds(self._node), self._site.agent_rss(self._node)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            site, node = self._site, self._node
            until(lambda: site.agent_fds(node) <= self._fds + 1, 15, 0.2, what="descriptors are closed")
            grown = site.agent_rss(node) - self._rss
            assert grown < self._bytes, f"the agent has grown by {grown} bytes"


def complaints(log: str) -> list[float]:
    """When the agent complained."""
    lines = [line for line in log.splitlines() if " event=complaint " in line]
    return [float(line.partition(" t=")[2].split()[0]) for line in lines]


def at_most_one_a_second(times: list[float]) -> None:
    assert all(b - a > 0.9 for a, b in itertools.pairwise(times)), times


def turned_away(log: str) -> list[float]:
    """When the controller turned somebody away."""
    lines = [line for line in log.splitlines() if " event=turned-away " in line]
    return [datetime.fromisoformat(line.split()[0]).timestamp() for line in lines]
