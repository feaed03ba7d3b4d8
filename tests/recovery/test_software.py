"""Processes die, stop or lie on healthy nodes: the same allocation, no requeue, nothing lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from harness import LiteJob
from waiting import until

from gemini_hpc.devcluster import cgroups
from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Lite = Any
RUN = "gemini-hpc run --max-restarts 2 -- srun --kill-on-bad-exit=1"


def kill(job: LiteJob, node: str, pattern: str, number: int = signal.SIGKILL) -> None:
    done = job.cluster.exec(node, ["pkill", f"-{number}", "-f", pattern])
    assert done.returncode == 0, f"{pattern} does not run on {node}"


def trainers(job: LiteJob, node: str) -> list[str]:
    return job.cluster.exec(node, ["pgrep", "-f", f"{job.directory}/lite[.]py"]).stdout.split()


def launches(job: LiteJob) -> list[str]:
    return sorted({line["step"] for line in job.lines("resumed")})


@pytest.mark.witness("a rank dies: the job goes on in its allocation, one step repeated at most")
def test_trainer_killed_starts_again_in_the_same_allocation(lite: Lite) -> None:
    job = lite(run=RUN)
    job.reach(10)
    kill(job, job.hosts()[1], "lite[.]py")
    job.finish()
    assert job.slurm()["Restarts"] == "0"
    _first, second = launches(job)
    again = {line["version"] for line in job.lines("resumed") if line["step"] == second}
    start = min(line["t"] for line in job.lines("resumed") if line["step"] == second)
    assert len(again) == 1 and job.completed(start) - again.pop() in (0, 1), job.story()
    assert "restart 1 of 2" in job.output()


def test_restarts_are_bounded(lite: Lite, cluster: Cluster) -> None:
    job = LiteJob(cluster, run="gemini-hpc run --max-restarts 1 -- srun false #").submit()
    until(lambda: "--max-restarts=1 is reached" in job.output(), 40, what="restarts used up")
    assert job.output().count("restart 1 of 1") == 1


@pytest.mark.parametrize(("python", "nodes"), [("python", 1), ("python -m gemini_hpc.launch", 3)])
def test_a_signal_from_the_user_is_no_failure(lite: Lite, python: str, nodes: int) -> None:
    """The signal goes past the batch script: `lite.py` dies of it, and stays so. A launcher passes it on: with
    proctrack/cgroup no other process gets it. Without launchers srun may end one rank of several before the signal
    reaches it, and then reports that rank's SIGTERM."""
    job = lite(run=RUN, python=python, nodes=nodes, replicas=min(2, nodes))
    job.reach(5)
    sent = job.cluster.run(["scancel", "--signal=USR1", str(job.id)], user="alice")
    assert sent.returncode == 0, sent.stderr
    try:
        until(lambda: job.state in ("COMPLETED", "FAILED", "CANCELLED"), 40, what="job over")
    except AssertionError as exc:
        raise AssertionError(f"{exc}\n{job.story()}\n{job.output()}") from None
    assert len(launches(job)) == 1 and "restart 1 of" not in job.output(), job.story()


@pytest.mark.witness("an agent dies: the training goes on and is protected again")
def test_agent_killed_training_goes_on_and_protection_returns(lite: Lite) -> None:
    job = lite()
    job.reach(10)
    node = job.hosts()[1]
    job.cluster.exec(node, ["kill", "-9", str(job.agent_pid(node))])
    until(lambda: job.lines("rejoined"), 20, what="hand-back")
    at = max(line["version"] for line in job.lines("rejoined"))
    job.reach(at + 5)
    assert len(launches(job)) == 1, "the training was not started again"
    job.cluster.cut_power(job.hosts()[2])
    job.finish()
    assert job.resumed(1) > at and job.repeated(1) in (0, 1), job.story()


@pytest.mark.skipif(not cgroups.are_possible(), reason="no writable memory cgroup (v1) on this machine")
def test_agent_ended_for_want_of_memory(lite: Lite) -> None:
    """The kernel ends the agent at the limit of its cgroup: sealing begins again, and what is sealed then is held."""
    job = lite()
    job.reach(10)
    node = job.hosts()[1]
    job.starve_agent(node)
    until(lambda: job.lines("rejoined"), 20, what=f"hand-back\n{job.story()}")
    at = max(line["version"] for line in job.lines("rejoined"))
    job.reach(at + 5)
    assert len(launches(job)) == 1 and not job.refused(), job.story()
    assert "died (status 9, death 1)" in job.agent_log(node), job.story()
    job.cluster.cut_power(job.hosts()[2])
    job.finish()
    assert job.resumed(1) > at and job.repeated(1) in (0, 1), job.story()


def test_agent_stopped_for_a_while_is_not_fenced(lite: Lite) -> None:
    job = lite()
    job.reach(10)
    node = job.hosts()[0]
    pid = str(job.agent_pid(node))
    job.cluster.exec(node, ["kill", "-STOP", pid])
    time.sleep(4)
    job.cluster.exec(node, ["kill", "-CONT", pid])
    at = job.completed(time.time())
    job.reach(at + 5)
    job.finish()
    assert job.slurm()["Restarts"] == "0"
    states = job.cluster.read_node_states()
    assert all("drain" not in s and "down" not in s for s in states.values()), states


def test_trainer_stopped_for_a_while(lite: Lite) -> None:
    job = lite()
    job.reach(10)
    node = job.hosts()[1]
    kill(job, node, "lite[.]py", signal.SIGSTOP)
    time.sleep(3)
    kill(job, node, "lite[.]py", signal.SIGCONT)
    job.finish()
    assert job.slurm()["Restarts"] == "0" and len(launches(job)) == 1


def memfds(job: LiteJob, node: str, rank: int) -> list[Path]:
    """The agent's memory of one shard on a node, as paths on this machine."""
    inner = job.agent_pid(node)
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            same = lines["NSpid"].split()[-1] == str(inner)
            root = os.readlink(status.parent / "ns" / "pid")
            mine = os.readlink(f"/proc/{job.cluster.find_node_pid(node)}/ns/pid")
        except (OSError, KeyError):
            continue
        if same and root == mine:
            fds = (status.parent / "fd").iterdir()
            found = [fd for fd in fds if f"memfd:gemini:default:{rank}:" in os.readlink(fd)]
            return list({fd.stat().st_ino: fd for fd in found}.values())  # a mapping holds a second descriptor
    raise AssertionError(f"no agent found on {node}")


def flip(path: Path) -> None:
    with path.open("r+b", buffering=0) as f:
        f.seek(10)
        byte = f.read(1)
        f.seek(10)
        f.write(bytes([byte[0] ^ 1]))


@pytest.mark.witness("a flipped byte in a copy is found, and another copy taken")
def test_flipped_byte_in_a_survivors_memory(lite: Lite) -> None:
    """m=3 on 3 nodes: two survivors hold each shard; both slots of one of them are damaged while nobody writes."""
    job = lite(replicas=3, nodes=3)
    job.reach(10)
    hosts = job.hosts()
    job.cluster.cut_power(hosts[1])
    until(lambda: job.state in ("COMPLETING", "PENDING"), 30, what="step ended")
    paths = memfds(job, hosts[0], 1)
    assert len(paths) == 2, paths
    for path in paths:
        flip(path)
    job.finish()
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    assert any(e["name"] == "damaged" and e["host"] == hosts[0] for e in job.events()), job.events()


def test_second_failure_before_the_first_new_seal(lite: Lite) -> None:
    """R4: after a recovery the old epoch's copies must carry until the new epoch has a seal of its own."""
    job = lite(nodes=4, pause_s=1.5, steps=14)
    job.reach(4)
    hosts = job.hosts()
    job.cluster.cut_power(hosts[1])
    job.reach(1, "resumed", 60, 1)
    job.cluster.cut_power(hosts[3])
    job.finish(120)
    assert job.resumed(2) >= job.resumed(1) > 0 and job.repeated(2) in (0, 1), job.story()


def test_zombie_of_an_old_incarnation(lite: Lite) -> None:
    """A node is cut off, not dead: when its link is back, nobody listens to its agent, and it lets go."""
    job = lite()
    job.reach(10)
    zombie = job.hosts()[1]
    job.cluster.exec(zombie, ["ip", "link", "set", "eth0", "down"])
    job.reach(1, "resumed", 60, 1)
    assert zombie not in job.hosts()
    job.cluster.exec(zombie, ["ip", "link", "set", "eth0", "up"])
    job.finish()
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    until(lambda: job.agent_pid(zombie) == 0, 60, what="the zombie goes")
    assert not trainers(job, zombie), "its ranks went before it"


def test_hung_agent_is_replaced_by_the_next_incarnation(lite: Lite) -> None:
    job = lite()
    job.reach(10)
    node = job.hosts()[1]
    job.cluster.exec(node, ["kill", "-STOP", str(job.agent_pid(node))])
    job.cluster.run(["scontrol", "requeue", str(job.id)], user="alice")
    job.finish()
    assert node in job.hosts() and job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()


@pytest.mark.witness("a controller that is away stops no training")
def test_unreachable_controller_never_stops_training(lite: Lite, cluster: Cluster) -> None:
    cluster.stop_controller(signal.SIGKILL)
    job = lite()
    job.reach(5)
    job.finish()
    cluster.start_controller()
