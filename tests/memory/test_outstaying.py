"""What an owner tries with the agent, which runs outside of Slurm's cgroups: to get into it, and to stay with it."""

from __future__ import annotations

import time

import pytest
from harness import LiteJob
from waiting import until

from gemini_hpc.devcluster import cgroups
from gemini_hpc.node import reaper
from gemini_hpc.node.memory_cgroup import TASKS_MAX

from .conftest import Site

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not cgroups.are_possible(), reason="no writable memory cgroup (v1) on this machine"),
]

# Every way that the kernel has into another process of one's own.
TRESPASS = r"""
import ctypes, os, sys
libc, got = ctypes.CDLL(None, use_errno=True), []
class IOVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]
for pid in map(int, sys.argv[1:]):
    for request, name in ((16, "attach"), (0x4206, "seize")):
        if libc.ptrace(request, pid, 0, 0) == 0:
            got.append(name)
    here = ctypes.create_string_buffer(8)
    mine, theirs = IOVec(ctypes.addressof(here), 8), IOVec(0x400000, 8)
    for call in ("process_vm_readv", "process_vm_writev"):
        done = getattr(libc, call)(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if done >= 0 or ctypes.get_errno() != 1:
            got.append(call)
    for name in ("mem", "maps", "environ", "auxv", "stack", "syscall", "fd", "map_files", "cwd", "root", "exe"):
        try:
            at = f"/proc/{pid}/{name}"
            os.listdir(at) if os.path.isdir(at) else open(at, "rb").read(0 if name == "mem" else 8)
            got.append(name)
        except OSError:
            pass
    process = os.pidfd_open(pid)
    got += [f"descriptor {n}" for n in range(32) if libc.syscall(438, process, n, 0) >= 0]
    os.kill(pid, 0)
print(*got)
"""


def test_owner_does_not_get_into_the_agent(site: Site) -> None:
    """Whoever traces a process runs what they like in it, where no limit of Slurm's holds."""
    job = site.job(nodes=2, steps=1000)
    job.reach(3)
    node = job.hosts()[0]
    pids = site.sh(node, f"pgrep -f 'gemini_hpc.agent --job {job.id} '").split()
    assert len(pids) == 2, "supervisor and agent"
    script = site.cluster.locate_home("alice") / "trespass.py"
    script.write_text(TRESPASS)
    tried = site.cluster.exec(node, ["/usr/bin/python3", str(script), *pids], user="alice")
    assert (tried.returncode, tried.stdout.strip()) == (0, ""), tried
    own = site.sh(node, f"sleep 60 >/dev/null 2>&1 & /usr/bin/python3 {script} $!", user="alice")
    assert "attach" in own and "mem" in own and "process_vm_readv" in own, f"or this test shows nothing: {own}"
    at = max(line["version"] for line in job.lines("sealed"))
    job.reach(at + 3)


def test_cgroup_of_an_agent_has_limits_and_no_devices(site: Site) -> None:
    job = site.job(nodes=2, steps=1000)
    job.reach(3)
    node = job.hosts()[0]
    table = site.sh(node, f"cat /proc/{job.agent_pid(node)}/cgroup")
    for controller in ("memory", "devices", "pids", "cpu", "freezer"):
        assert f":{controller}:" in table
        line = next(line for line in table.splitlines() if f":{controller}:" in line)
        assert line.endswith(f"/{node}/gemini-hpc/{job.id}"), line
    top = "/sys/fs/cgroup"
    devices = site.sh(node, f"cat {top}/devices/gemini-hpc/{job.id}/devices.list").splitlines()
    assert "c 1:3 rwm" in devices and not [d for d in devices if d.startswith(("a", "b")) or "195:" in d], devices
    assert site.sh(node, f"cat {top}/pids/gemini-hpc/{job.id}/pids.max") == str(TASKS_MAX)
    assert site.sh(node, f"cat {top}/cpu/gemini-hpc/{job.id}/cpu.shares") == "1024"
    site.cluster.run(["scancel", str(job.id)])
    until(lambda: not job.agent_pid(node), 60, what="the agent's end")
    for controller in ("memory", "devices", "pids", "cpu", "freezer"):
        gone = f"ls -d {top}/{controller}/gemini-hpc/{job.id} 2>/dev/null || :"
        until(lambda gone=gone: not site.sh(node, gone), 20, 0.2, what=f"its cgroup of {controller} is removed")


def test_nothing_outstays_its_retention(site: Site) -> None:
    """The owner stops the agent, and something of the owner's has got into its cgroup nevertheless; another owner's
    agent on the same node stays."""
    site.configure(retention_s=1.0, tier_flush_s=0.0)
    on = site.job(nodes=2, steps=1000, options=("-wn3,n4", "-c1"))
    job: LiteJob = site.job(nodes=2, steps=1000, options=("-wn3,n4", "-c1"))
    job.reach(3)
    on.reach(3)
    node = job.hosts()[0]
    group = f"/sys/fs/cgroup/memory/gemini-hpc/{job.id}/cgroup.procs"
    stranger = "setsid -f sh -c 'echo $$ >/tmp/stranger; exec sleep 600' >/dev/null 2>&1"
    site.sh(node, stranger, user="alice")
    until(lambda: site.sh(node, "pgrep -u alice -x sleep || :"), 10, what="the stranger")
    site.sh(node, f"cat /tmp/stranger >{group}; kill -STOP {job.agent_pid(node)}; rm /tmp/stranger")
    log = (site.cluster.log_directory / "controller.log").read_text()
    site.cluster.run(["scancel", str(job.id)])
    began = time.monotonic()
    until(lambda: not site.sh(node, f"cat {group} 2>/dev/null || :"), 90, 0.5, what="nobody is left in it")
    assert time.monotonic() - began < 1.0 + 2 * reaper.GRACE_S
    assert site.sh(node, "pgrep -u alice -x sleep || :") == ""
    assert not job.agent_pid(node)
    until(lambda: not site.sh(node, f"ls -d /run/gemini-hpc/{job.id} 2>/dev/null || :"), 10, what="no directory")
    assert on.agent_pid(node), "who trains keeps what it has"
    more = (site.cluster.log_directory / "controller.log").read_text()[len(log) :]
    told = [line for line in more.splitlines() if f"job={job.id} " in line and f"host={node} " in line]
    assert len([line for line in told if "event=release" in line]) <= 2, "the controller does not complain for ever"
    at = max(line["version"] for line in on.lines("sealed"))
    on.reach(at + 3)


def test_an_agent_that_answers_is_left_its_time(site: Site) -> None:
    """Requeued while the reaper waits: the next prolog takes the job out of its hands."""
    site.configure(retention_s=60.0)
    job = site.job(nodes=2, steps=1000)
    job.reach(3)
    before = {node: job.agent_pid(node) for node in job.hosts()}
    site.cluster.run(["scontrol", "requeue", str(job.id)])
    job.reach(3, restart=1)
    for node in set(before) & set(job.hosts()):
        assert job.agent_pid(node) == before[node]
        ended = f"grep -o '\"ended_s\".*' /run/gemini-hpc.agents/{job.id}"
        until(lambda node=node, ended=ended: "null" in site.sh(node, ended), 10, 0.2, what="entered again")


def test_nothing_outstays_a_job_that_got_no_epilog(site: Site) -> None:
    """The node was cut off while its job was ended elsewhere, and its owner has stopped the agent there."""
    # A job that has just started is not doubted for as long as its prolog may wait.
    site.configure(retention_s=1.0, tier_flush_s=0.0, attach_timeout_s=10.0)
    job = site.job(nodes=2, steps=1000, options=("-wn3,n4",))
    job.reach(3)
    agent, slurmd = job.agent_pid("n3"), site.slurmd("n3")
    ranks = "pkill -KILL slurmstepd; pkill -KILL -u alice -f lite.py"
    site.sh("n3", f"kill -STOP {agent} {slurmd}; ip link set eth0 down; {ranks}")
    try:
        until(lambda: "drain" in site.cluster.read_node_states()["n3"], 60, what="n3 is fenced")
        site.cluster.run(["scancel", str(job.id)])
        active = ["squeue", "-h", "-j", str(job.id)]
        until(lambda: not site.cluster.run(active).stdout.strip(), 60, 0.2, what="Slurm has done with it")
    finally:
        site.sh("n3", f"ip link set eth0 up; kill -CONT {slurmd}")
    site.cluster.restore()
    assert '"ended_s": null' in site.sh("n3", f"cat /run/gemini-hpc.agents/{job.id}"), "no epilog"
    assert job.agent_pid("n3") == agent
    other = site.job(nodes=2, steps=1000, options=("-wn3,n4",))
    other.reach(3)
    until(lambda: not job.agent_pid("n3"), 2 * reaper.GRACE_S, what="the stopped agent is ended")
    until(lambda: not site.sh("n3", f"ls /run/gemini-hpc.agents/{job.id} 2>&- || :"), 10, what="struck out")
    assert other.agent_pid("n3"), "who trains keeps what it has"
