"""Clusters for the tests, and what must be gone once one is taken down."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from leaks.cluster import nothing_left
from leaks.machine import MARK

from gemini_hpc.devcluster import Cluster
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.devcluster.status import list_clusters
from gemini_hpc.devcluster.teardown import MOUNT_POINTS, list_processes, tear_down

CHECKOUT = Path(__file__).parents[2]
ROOT = Path("/var/lib/gemini-devcluster")
# Other people's clusters on this machine stay out of it.
PREFIX = f"t{os.getpid()}"


def links() -> set[str]:
    """Names of the machine's own network devices."""
    return set(os.listdir("/sys/class/net"))


@dataclass(frozen=True)
class Trace:
    """The namespaces that a cluster had, to be looked for after its end."""

    name: str
    namespaces: frozenset[str]
    links: frozenset[str]

    @classmethod
    def of(cls, name: str) -> Trace:
        found = (namespaces(process.pid) for process in list_processes(ClusterFiles(name)))
        # nsenter waits for its command in the pid namespace of the machine.
        return cls(name, frozenset[str]().union(*found) - namespaces("self"), frozenset(links()))

    def assert_gone(self) -> None:
        layout = ClusterFiles(self.name)
        assert not layout.directory.exists()
        assert not layout.lock.exists()
        assert list_processes(layout) == []
        assert f"gemini-devcluster/{self.name}" not in Path("/proc/self/mountinfo").read_text()
        # Other workers' come and go: os.walk passes over what has just gone.
        assert f"gemini-devcluster-{self.name}" not in {n for _, below, _ in os.walk("/sys/fs/cgroup") for n in below}
        assert self.name not in everything_running()
        assert not {who: spaces & self.namespaces for who, spaces in inhabited().items() if spaces & self.namespaces}
        assert links() <= self.links
        # Another worker's cluster may just be on its way up or down.
        deadline = time.monotonic() + 20.0
        while not list_clusters() and [path for path in (ROOT, *MOUNT_POINTS) if path.exists()]:
            assert time.monotonic() < deadline, "no cluster is left, but what they share is"
            time.sleep(0.05)


def namespaces(pid: int | str) -> frozenset[str]:
    found = set()
    for kind in ("net", "mnt", "pid", "uts", "ipc"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
    return frozenset(found)


def inhabited() -> dict[str, frozenset[str]]:
    """Process -> its namespaces, without those of other clusters and of other workers' tests: the kernel gives freed
    numbers to the next who asks."""
    found, others = {}, frozenset[str]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()
                marked = re.search(rb"(?:^|\0)%s=(\d+)" % MARK.encode(), environment)
                if b"GEMINI_DEVCLUSTER=" in environment or (marked and int(marked[1]) != os.getpid()):
                    others |= namespaces(entry.name)
                else:
                    found[f"{entry.name} {text}"] = namespaces(entry.name)
    # An agent there has an environment of its own.
    return {who: spaces - others for who, spaces in found.items()}


def everything_running() -> str:
    lines = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in lines.splitlines() if "pytest" not in line)


def tool(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """The command line."""
    return subprocess.run(
        [sys.executable, "-m", "gemini_hpc.cli.main", "devcluster", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=CHECKOUT,
    )


def killed_up(name: str, milestone: str, profile: str = "fast") -> None:
    """`up`, killed as soon as it has got as far as a file."""
    command = [sys.executable, "-m", "gemini_hpc.cli.main", "devcluster", "up", "--name", name]
    process = subprocess.Popen(
        [*command, "--profile", profile], cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 20
    while not (ClusterFiles(name).directory / milestone).exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.0005)
    process.kill()
    process.wait(10)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Five nodes without plugin and controller, shared by a module; a test leaves all of them on and idle."""
    name = f"{PREFIX}-{request.module.__name__.rpartition('_')[2]}"
    with Cluster.bring_up(name, nodes=5, site=False, controller=False) as started:
        trace = Trace.of(name)
        yield started
    trace.assert_gone()


@pytest.fixture(autouse=True)
def nothing_left_in_a_shared_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    shared = [request.getfixturevalue(name) for name in ("cluster", "site") if name in request.fixturenames]
    with ExitStack() as stack:
        for cluster in shared:
            stack.enter_context(nothing_left(cluster, 20))
        yield


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for a cluster that the test starts itself; it is taken down in any case."""
    chosen = f"{PREFIX}-x"
    yield chosen
    tear_down(ClusterFiles(chosen))
