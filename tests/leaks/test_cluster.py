"""Whatever jobs may leave in a cluster is planted here, and must be found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gemini_hpc.devcluster import Cluster, cgroups

from . import Found, assert_nothing_new, new
from .cluster import Bystander, held, present

pytestmark = pytest.mark.cluster

PYTHON = ["/opt/gemini-hpc/venv/bin/python", "-I", "-c"]
SLEEPER = "#!/bin/sh\nexec sleep 600\n"


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster.bring_up(f"leaks{os.getpid()}", nodes=2, site=False, controller=False) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Each test plants and takes away."""
    assert_nothing_new({}, lambda: present(shared), 10)
    yield shared
    assert_nothing_new({}, lambda: present(shared), 20)


def there(
    cluster: Cluster, word: str, look: Callable[[Cluster], Found] = present, before: Found | None = None
) -> str:
    """The one thing that is found, within a moment."""
    deadline = time.monotonic() + 10
    while not (found := [text for text in new(before or {}, look(cluster)) if word in text]):
        assert time.monotonic() < deadline, f"{word!r} is not found: {new(before or {}, look(cluster))}"
        time.sleep(0.05)
    assert len(found) == 1, found
    return found[0]


@contextmanager
def running(cluster: Cluster, argv: list[str], node: str) -> Iterator[None]:
    process = cluster.start_command(argv, node=node, user="alice")
    try:
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("look", [held, present])
def test_an_agent(cluster: Cluster, look: Callable[[Cluster], Found]) -> None:
    code = "import time; time.sleep(600)"  # a shell that forks is there twice for a moment
    with running(cluster, [*PYTHON, code, "gemini_hpc.agent", "--job", "7"], "n2"):
        assert there(cluster, "gemini_hpc.agent", look).startswith("n2: process")


@pytest.mark.parametrize("look", [held, present])
def test_memory(cluster: Cluster, look: Callable[[Cluster], Found]) -> None:
    code = "import os, time; os.memfd_create('gemini:default:0:1'); time.sleep(600)"
    with running(cluster, [*PYTHON, code], "n1"):
        assert there(cluster, "memfd:gemini:default:0:1", look).startswith("n1:")


@pytest.mark.skipif(not cgroups.are_possible(), reason="no writable memory cgroup (v1) on this machine")
@pytest.mark.parametrize("look", [held, present])
def test_a_process_in_the_cgroup_of_agents(cluster: Cluster, look: Callable[[Cluster], Found]) -> None:
    """A rank or a helper of an agent, whatever it is called; an empty cgroup of agents stays."""
    group = "/sys/fs/cgroup/memory/gemini-hpc/planted"
    into = f"mkdir -p {group}; echo 0 >{group}/cgroup.procs; exec sleep 65"
    process = cluster.start_command(["sh", "-c", into], node="n1")
    found = there(cluster, "gemini-hpc/planted", look)
    assert found.startswith("n1: processes [")
    process.kill()
    process.communicate()
    assert_nothing_new({}, lambda: look(cluster), 10)


def test_files_on_a_node(cluster: Cluster) -> None:
    for plant, path in (("touch /dev/shm/x", "/dev/shm/x"), ("mkdir -p D; touch D/agent.sock", "D/agent.sock")):
        directory = "/run/gemini-hpc/7"
        cluster.exec("n1", ["sh", "-c", plant.replace("D", directory)])
        assert there(cluster, path.replace("D", directory)).startswith("n1:")
        cluster.exec("n1", ["rm", path.replace("D", directory)])
    cluster.exec("n1", ["touch", "/run/gemini-hpc/7/agent.log"])
    assert not present(cluster), "the log of an agent that has let go may stay"
    cluster.exec("n1", ["rm", "-r", "/run/gemini-hpc/7"])


def test_a_reservation(cluster: Cluster) -> None:
    options = "reservationname=planted nodes=n1 users=alice starttime=now duration=2 flags=ignore_jobs"
    cluster.run(["scontrol", "create", "reservation", *options.split()])
    there(cluster, "reservation planted", held)
    there(cluster, "reservation planted", present)
    cluster.run(["scontrol", "delete", "reservationname=planted"])


def test_jobs_and_their_pins(cluster: Cluster) -> None:
    job = cluster.submit_job(["-N1", "--begin=now+600"], script=SLEEPER)
    there(cluster, f"job {job} is PENDING")
    for change in ("reqnodelist=n2", "starttime=now+900"):
        before = present(cluster)
        cluster.run(["scontrol", "update", f"jobid={job}", change])
        wanted = "ReqNodeList=n2" if "req" in change else "StartTime="
        assert wanted in there(cluster, f"job {job} is PENDING", before=before)
    cluster.run(["scancel", str(job)])
    running_job = cluster.submit_job(["-N1"], script=SLEEPER)
    there(cluster, f"job {running_job} is RUNNING")
    cluster.run(["scancel", str(running_job)])


@pytest.mark.parametrize("change", ["", "reqnodelist=n2", "starttime=now+2days", "numnodes=2", "requeue=0"])
def test_what_is_done_to_a_bystander(cluster: Cluster, change: str) -> None:
    bystander = Bystander(cluster)
    other = cluster.submit_job(["-N2"], script=SLEEPER)
    there(cluster, f"job {other} is RUNNING")
    if change:
        cluster.run(["scontrol", "update", f"jobid={bystander.id}", change])
    cluster.run(["scancel", str(other)])
    key = {"reqnodelist": "ReqNodeList", "starttime": "StartTime", "numnodes": "NumCPUs", "requeue": "Requeue"}
    said = bystander.end()
    assert key[change.partition("=")[0]] in said if change else said == "", said


@pytest.mark.parametrize("state", ["drain", "down"])
def test_a_node_that_stays_out(cluster: Cluster, state: str) -> None:
    cluster.run(["scontrol", "update", "nodename=n2", f"state={state}", "reason=gemini-hpc: planted"])
    found = there(cluster, "node n2 is")
    assert state.upper() in found and found.endswith("gemini-hpc:")
    cluster.resume("n2")
    cluster.wait_idle()


def test_what_the_controller_keeps(cluster: Cluster) -> None:
    directory = cluster.directory / "controller" / "jobs"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "7.jsonl").touch()
    assert not present(cluster)
    (directory / "7.job").touch()
    there(cluster, "controller: controller/jobs/7.job")
    (directory / "7.job").unlink()
