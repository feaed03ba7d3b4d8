"""Profile `site`: slurmdbd with limits, a munged on each node, nodes without configuration files; nothing is left."""

from __future__ import annotations

import os
import pwd
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from gemini_hpc.devcluster import Cluster, DevclusterError, cgroups, network
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.devcluster.profiles import PROFILES
from gemini_hpc.devcluster.requirements import ACCOUNTING_PROGRAMS, PROGRAMS, check, find_program
from gemini_hpc.devcluster.teardown import list_processes
from gemini_hpc.slurm import accounting
from gemini_hpc.slurm.accounting import History

from .conftest import PREFIX, Trace, everything_running, killed_up, tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def site() -> Iterator[Cluster]:
    """Three nodes; a test leaves all of them on and idle. The leak check at the end is part of every test."""
    with Cluster.bring_up(f"{PREFIX}-site", nodes=3, profile="site", site=False, controller=False) as started:
        yield started
        # Not before: the kernel gives the namespaces of a node that was switched off to the next who asks.
        trace = Trace.of(started.name)
    trace.assert_gone()


def config(cluster: Cluster) -> dict[str, str]:
    lines = cluster.run(["scontrol", "show", "config"]).stdout.splitlines()
    return {key.strip(): value.strip() for key, equals, value in (line.partition("=") for line in lines) if equals}


def test_slurm_is_set_up_as_a_site_would(site: Cluster) -> None:
    assert site.ready_s is not None and site.ready_s < 30
    found = config(site)
    assert found["SlurmUser"].startswith("slurm(")
    assert found["AccountingStorageEnforce"] == "associations,limits,qos"
    assert found["AccountingStorageType"] == "accounting_storage/slurmdbd"
    assert found["PriorityType"] == "priority/multifactor" and int(found["PriorityWeightAge"]) > 0
    # Timers that sites leave alone, and so do we.
    assert found["AuthInfo"] == "(null)"
    assert (found["SlurmdTimeout"], found["KillWait"]) == ("300 sec", "30 sec")
    assert (found["MessageTimeout"], found["TCPTimeout"]) == ("10 sec", "2 sec")
    daemons = site.run(["ps", "-o", "user=,comm=", "-C", "slurmctld,slurmdbd,mariadbd"]).stdout.split()
    assert sorted(daemons) == sorted(["slurm", "slurmctld", "slurm", "slurmdbd", "slurm", "mariadbd"])


def test_the_kernel_tracks_a_job_and_holds_it_to_its_memory(site: Cluster) -> None:
    if why := cgroups.find_tracking_problem():
        pytest.skip(f"`up` says so: {why}")
    found = config(site)
    assert (found["ProctrackType"], found["TaskPlugin"]) == ("proctrack/cgroup", "task/cgroup")
    program = "import os; print(open('/proc/self/cgroup').read()); bytearray(int(os.environ['TAKE']) << 20)"
    argv = ["srun", "--mem=60", "/usr/bin/python3", "-c", program]
    small = site.run(argv, user="alice", env={"TAKE": "1"})
    assert small.returncode == 0, small.stderr
    places = {line.split(":")[1]: line.split(":")[2] for line in small.stdout.splitlines() if line}
    assert "/job_" in places["freezer"] and "/step_0" in places["memory"], places
    large = site.run(argv, user="alice", env={"TAKE": "200"})
    assert large.returncode != 0 and "oom" in large.stderr.lower(), large.stderr


def test_two_partitions_share_all_nodes(site: Cluster) -> None:
    rows = site.run(["sinfo", "-h", "-o", "%P %D"]).stdout.split()
    assert rows == ["batch*", "3", "debug", "3"]
    assert site.run(["srun", "-p", "debug", "-N3", "true"], user="alice").returncode == 0


def test_nobody_runs_without_an_association(site: Cluster) -> None:
    refused = site.run(["srun", "true"], user="daemon")
    assert refused.returncode != 0 and "Invalid account" in refused.stderr
    for user in ("alice", "bob", None):
        assert site.run(["srun", "true"], user=user).returncode == 0


def test_a_limit_of_a_qos_holds_a_job_back(site: Cluster) -> None:
    sleeper = "#!/bin/sh\nsleep 60\n"
    first, second = (site.submit_job(["--qos=single", "-n1"], script=sleeper) for _ in range(2))
    other = site.submit_job(["--qos=single", "-n1"], user="bob", script=sleeper)
    try:
        until(lambda: site.read_job(first)["JobState"] == site.read_job(other)["JobState"] == "RUNNING", 20)
        until(lambda: site.read_job(second)["Reason"] == "QOSMaxJobsPerUserLimit", 20)
        assert site.read_job(second)["JobState"] == "PENDING"
    finally:
        site.run(["scancel", *map(str, (first, second, other))])
    until(lambda: not site.run(["squeue", "-h"]).stdout, 20)
    refused = site.run(["sbatch", "--qos=nonsense", "--wrap", "true"], user="alice")
    assert refused.returncode != 0 and "Invalid qos" in refused.stderr


def test_qos_and_age_make_the_priority(site: Cluster) -> None:
    held = ["-H", "-n1"]
    normal = site.submit_job(held, script="#!/bin/sh\ntrue\n")
    urgent = site.submit_job([*held, "--qos=urgent"], script="#!/bin/sh\ntrue\n")
    try:
        for job in (normal, urgent):
            site.run(["scontrol", "update", f"jobid={job}", "StartTime=now+1hour"])
            site.run(["scontrol", "release", str(job)])
        assert int(site.read_job(urgent)["Priority"]) > int(site.read_job(normal)["Priority"])
    finally:
        site.run(["scancel", str(normal), str(urgent)])


def test_jobs_are_recorded_in_the_database(site: Cluster) -> None:
    assert site.run(["srun", "--job-name=recorded", "true"], user="bob").returncode == 0
    argv = ["sacct", "-n", "-P", "--name=recorded", "-o", "user,account,partition,state"]

    def recorded() -> bool:
        return site.run(argv, user="bob").stdout.startswith("bob|lab|batch|COMPLETED")

    until(recorded, 20)


def test_the_site_s_past_comes_from_the_database(site: Cluster) -> None:
    assert site.run(["srun", "-n1", "--job-name=past", "sleep", "2"], user="bob").returncode == 0

    def past() -> History:
        done = site.run(["sacct", *accounting.ARGUMENTS, "-S", "now-90days"])
        assert done.returncode == 0, done.stderr
        return accounting.parse_history(done.stdout.split("\n"))

    until(lambda: past().runs and past().node_days, 20)
    assert past().lost == 0


def test_the_database_is_the_cluster_s_own(site: Cluster) -> None:
    """No port, no socket outside, no file that others could read."""
    directory = site.directory / "database"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (site.directory / "etc" / "slurm" / "slurmdbd.conf").stat().st_mode & 0o777 == 0o600
    assert site.run(["ls", str(directory)], user="alice").returncode != 0
    assert not network.listens(site.read_status().outer_pid, 3306)
    assert not Path("/run/mysqld").exists()
    assert everything_running().count(f"--datadir={directory}") == 1


def test_each_node_has_a_munged_of_its_own(site: Cluster) -> None:
    inodes = {
        site.run(["stat", "-c", "%d %i", "/run/munge/munge.socket.2"], node=n).stdout for n in ("n1", "n2", None)
    }
    assert len(inodes) == 3
    credential = site.exec("n1", ["munge", "-s", "hello"], user="alice").stdout
    for host in ("n2", None):  # each knows only what it has decoded itself
        done = site.run(["unmunge"], stdin=credential, node=host)
        assert "Success" in done.stdout and "alice (5001)" in done.stdout and done.stdout.endswith("hello")
    assert "Replayed" in site.run(["unmunge"], stdin=credential).stdout
    assert site.exec("n3", ["pkill", "-x", "munged"]).returncode == 0
    assert site.exec("n3", ["munge", "-n"]).returncode != 0
    assert site.exec("n1", ["munge", "-n"]).returncode == 0
    site.cut_power("n3")
    site.restore_power("n3")
    assert site.exec("n3", ["munge", "-n"]).returncode == 0
    site.wait_idle(timeout_s=20)


def test_nodes_have_no_configuration_files(site: Cluster) -> None:
    for path in ("/etc/slurm/slurm.conf", str(site.directory / "etc" / "slurm" / "slurm.conf")):
        assert site.exec("n1", ["test", "-e", path]).returncode == 1
    shown = site.exec("n1", ["sh", "-c", "echo $SLURM_CONF; sinfo -h -o %D"], user="alice")
    assert shown.stdout == "\n3\n" and shown.returncode == 0
    job = site.submit_job(["-N2"], script="#!/bin/sh\necho $SLURM_CONF\nsrun hostname\n")
    until(lambda: site.read_job(job)["JobState"] == "COMPLETED", 20)
    cached, *hosts = (site.locate_home("alice") / f"slurm-{job}.out").read_text().split()
    assert cached.endswith("/conf-cache/slurm.conf") and len(hosts) == 2


def test_a_node_loses_its_power_and_comes_back(site: Cluster) -> None:
    before = site.find_node_pid("n2")
    site.cut_power("n2")
    assert not site.is_on("n2")
    assert f"munged.{'n2'}.log" not in site.run(["ps", "axww", "-o", "args"]).stdout
    assert tool("power-on", "--name", site.name, "n2").returncode == 0  # a tool that was not there at `up`
    site.wait_idle(timeout_s=20)
    assert site.find_node_pid("n2") != before
    assert sorted(site.run(["srun", "-N3", "hostname"], user="alice").stdout.split()) == site.node_names
    fetched = site.exec("n2", ["readlink", "/run/slurm/conf"]).stdout.strip()
    assert fetched.endswith("spool/n2/conf-cache")


def test_a_failed_up_leaves_no_database(name: str) -> None:
    with pytest.raises(DevclusterError, match="slurmctld did not"):
        Cluster.bring_up(
            name, nodes=1, profile="site", site=False, controller=False, slurm_conf=["SchedulerType=sched/nonsense"]
        )
    Trace.of(name).assert_gone()


@pytest.mark.timeout(300)
def test_tool_killed_in_the_middle_of_up(name: str) -> None:
    cases: list[str] = ["database/mariadbd.pid", "log/slurmdbd.log", "log/slurmctld.log", "munge/munged.n1.log"]
    for milestone in cases:
        print(f"killed at {milestone}")
        killed_up(name, milestone, "site")
        trace = Trace.of(name)
        done = tool("down", "--name", name)
        assert done.returncode == 0, done.stderr
        trace.assert_gone()


def test_a_cluster_whose_init_was_killed_leaves_no_database(name: str) -> None:
    cluster = Cluster.bring_up(name, nodes=1, profile="site", site=False, controller=False)
    trace = Trace.of(name)
    os.kill(cluster.read_status().outer_pid, signal.SIGKILL)
    until(lambda: not list_processes(ClusterFiles(name)), 10)
    assert tool("down", "--name", name).returncode == 0
    trace.assert_gone()


def test_missing_packages_are_named_for_this_profile_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in PROGRAMS:
        (tmp_path / known).symlink_to(find_program(known))
    monkeypatch.setattr("gemini_hpc.devcluster.requirements.SEARCH_PATH", str(tmp_path))
    check(PROFILES["fast"])
    wanted = r"slurmdbd, sacctmgr, mariadbd not found \(profile site\).*mariadb-server-core slurm-client slurmdbd$"
    with pytest.raises(DevclusterError, match=wanted):
        Cluster.bring_up(name, nodes=1, profile="site")
    assert not ClusterFiles(name).directory.exists()
    # The server that Debian's mariadb-server would start on this machine is not asked for.
    assert "mariadb-server" not in ACCOUNTING_PROGRAMS.values()


def test_every_profile_runs_slurmctld_as_slurm_and_keeps_credentials(name: str) -> None:
    """What `fast` shortens stays its own."""
    assert pwd.getpwnam("slurm").pw_uid != 0
    for profile in PROFILES.values():
        if profile.name != "fast":
            text = " ".join(f"{key}={value}" for key, value in profile.slurm.items())
            assert not re.search("cred_expire|Timeout|KillWait|CompleteWait|SlurmUser", text), profile.name
