"""Start and end: nothing is left behind, whatever happened in between."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from waiting import until

from gemini_hpc.devcluster import Cluster, DevclusterError
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.devcluster.status import list_clusters
from gemini_hpc.devcluster.teardown import list_processes, tear_down

from .conftest import CHECKOUT, PREFIX, Trace, killed_up, links, tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.mark.witness("a development cluster leaves nothing behind")
def test_up_and_down_leave_nothing(name: str) -> None:
    before = links()
    cluster = Cluster.bring_up(name, nodes=5, site=False, controller=False)
    trace = Trace.of(name)
    assert len(trace.namespaces) >= 5 * 6  # controller host and five nodes, five kinds each
    assert cluster.ready_s is not None
    assert cluster.node_names == ["n1", "n2", "n3", "n4", "n5"]
    assert set(cluster.read_node_states().values()) == {"idle"}
    assert cluster.run(["srun", "-N5", "hostname"]).stdout.split().__len__() == 5
    assert links() == before  # nothing in the machine's own network
    assert f"gemini-devcluster/{name}" not in Path("/proc/self/mountinfo").read_text()
    cluster.tear_down()
    trace.assert_gone()
    cluster.tear_down()  # again: nothing to do, no error
    with pytest.raises(DevclusterError, match="is not running"):
        cluster.run(["true"])


def test_two_clusters_side_by_side(name: str) -> None:
    other = f"{PREFIX}-y"
    with (
        Cluster.bring_up(name, nodes=5, site=False, controller=False) as first,
        Cluster.bring_up(other, nodes=5, site=False, controller=False) as second,
    ):
        traces = [Trace.of(name), Trace.of(other)]
        assert not traces[0].namespaces & traces[1].namespaces
        for cluster in (first, second):
            assert sorted(cluster.run(["srun", "-N5", "hostname"]).stdout.split()) == cluster.node_names
            assert cluster.name in cluster.run(["scontrol", "show", "config"]).stdout
        assert {name, other} <= set(list_clusters())
        first.tear_down()
        traces[0].assert_gone()
        # The other one has not even lost the mounts that both share a mount point for.
        done = second.run(["/opt/gemini-hpc/venv/bin/python", "-I", "-c", "import gemini_hpc"], user="alice")
        assert done.returncode == 0, done.stderr
        assert second.run(["srun", "-N5", "true"]).returncode == 0
    traces[1].assert_gone()


def test_up_twice_is_refused_and_replace_is_not(name: str) -> None:
    first = Cluster.bring_up(name, nodes=1, site=False, controller=False)
    pid = first.read_status().outer_pid
    with pytest.raises(DevclusterError, match="already running"):
        Cluster.bring_up(name, nodes=1, site=False, controller=False)
    assert first.read_status().outer_pid == pid
    second = Cluster.bring_up(name, nodes=2, site=False, controller=False, replace=True)
    assert second.read_status().outer_pid != pid
    assert Cluster.attach(name).node_names == ["n1", "n2"]


def test_a_cluster_whose_init_was_killed_can_be_started_again(name: str) -> None:
    cluster = Cluster.bring_up(name, nodes=2, site=False, controller=False)
    trace = Trace.of(name)
    os.kill(cluster.read_status().outer_pid, signal.SIGKILL)
    until(lambda: not list_clusters()[name], 10)
    assert list_processes(ClusterFiles(name)) == []
    again = Cluster.bring_up(name, nodes=2, site=False, controller=False)
    assert again.run(["srun", "-N2", "true"]).returncode == 0
    again.tear_down()
    trace.assert_gone()


@pytest.mark.timeout(300)
def test_tool_killed_in_the_middle_of_up(name: str) -> None:
    cases: list[str] = [
        *("etc", "opt/base", "log/init.log", "outer.json", "munge/munge.key", "munge/munged.ctl.log"),
        *("etc/slurm/plugstack.conf", "log/slurmctld.log", "nodes/n1.boot_id", "nodes/n1.json", "nodes/n5.json"),
        *("log/slurmd.n1.log", "cluster.json"),
    ]
    for milestone in cases:
        print(f"killed at {milestone}")
        killed_up(name, milestone)
        trace = Trace.of(name)
        done = tool("down", "--name", name)
        assert done.returncode == 0, done.stderr
        trace.assert_gone()


def test_a_cluster_that_is_not_complete_dies_with_the_tool(name: str) -> None:
    cases: list[str] = ["outer.json", "etc/slurm/plugstack.conf", "nodes/n1.boot_id", "nodes/n2.json"]
    for milestone in cases:
        killed_up(name, milestone)
        until(lambda: not list_processes(ClusterFiles(name)), 10, what=f"killed at {milestone}")
        tear_down(ClusterFiles(name))


def test_the_recorded_pid_of_somebody_else_is_left_alone(name: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        layout = ClusterFiles(name)
        layout.directory.mkdir(parents=True)
        layout.outer.write_text(f'{{"pid":{bystander.pid},"start":1}}')
        assert tool("down", "--name", name).returncode == 0
        assert not layout.directory.exists()
        assert bystander.poll() is None
        bystander.kill()


def test_a_failed_up_leaves_nothing(name: str) -> None:
    with pytest.raises(DevclusterError, match="slurmctld did not"):
        Cluster.bring_up(name, nodes=1, site=False, controller=False, slurm_conf=["SchedulerType=sched/nonsense"])
    Trace.of(name).assert_gone()


@pytest.mark.parametrize("profile", ["fast", "stock"])
def test_profiles_run_jobs(name: str, profile: str) -> None:
    with Cluster.bring_up(name, nodes=2, profile=profile, site=False, controller=False) as cluster:
        assert cluster.run(["srun", "-N2", "hostname"]).stdout.split().__len__() == 2
        timeout = cluster.run(["scontrol", "show", "config"]).stdout
        assert f"SlurmdTimeout           = {10 if profile == 'fast' else 300} sec" in timeout
        assert "SlurmUser               = slurm" in timeout


def test_installed_in_an_environment_below_a_closed_directory(name: str, tmp_path: Path) -> None:
    """A wheel in a 0700 home: nothing of it is readable for others outside, all of it inside."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    subprocess.run([os.path.realpath(sys.executable), "-m", "venv", "--without-pip", home / "venv"], check=True)
    target = home / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    for package in ("msgspec", "xxhash"):
        shutil.copytree(Path(sysconfig.get_path("platlib")) / package, target / package)
    shutil.copytree(CHECKOUT / "gemini_hpc", target / "gemini_hpc")
    (home / "venv" / "bin" / "greet").write_text(
        f"#!{home}/venv/bin/python\nimport gemini_hpc, sys; print(sys.prefix)\n"
    )
    (home / "venv" / "bin" / "greet").chmod(0o755)
    python = str(home / "venv" / "bin" / "python")
    command = [python, "-I", "-m", "gemini_hpc.cli.main", "devcluster", "up", "--name", name, "--no-controller"]
    done = subprocess.run([*command, "--nodes=1"], capture_output=True, text=True, timeout=60, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    with Cluster.attach(name) as cluster:
        code = "import gemini_hpc.devcluster, msgspec, xxhash, sys; print(sys.executable, gemini_hpc.__file__)"
        # The tmp_path lies below /tmp, which is private inside: nothing of the original path is needed.
        done = cluster.exec("n1", ["/opt/gemini-hpc/venv/bin/python", "-I", "-c", code], user="alice")
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[0] == "/opt/gemini-hpc/venv/bin/python"
        assert done.stdout.split()[1].startswith("/opt/gemini-hpc/venv/lib")
        assert cluster.run(["greet"], user="alice").stdout.strip() == "/opt/gemini-hpc/venv"
        refused = cluster.run(["touch", "/opt/gemini-hpc/base/x"])
        assert "Read-only" in refused.stderr


def test_bad_requests_are_one_line(name: str) -> None:
    for arguments, part in (
        (["up", "--name", "Bad/Name"], "not valid"),
        (["up", "--name", name, "--nodes", "0"], "nodes=0"),
        (["up", "--name", name, "--profile", "slow"], "choose from fast, stock"),
        (["up", "--name", name, "--set", "x"], "KEY=VALUE"),
        (["status", "--name", name], "is not running"),
        (["power-off", "--name", name, "n1"], "is not running"),
        (["run", "--name", name, "--", "true"], "is not running"),
    ):
        done = tool(*arguments)
        assert done.returncode == 1
        assert part in done.stderr
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("gemini-hpc devcluster: ")


def test_every_verb_has_help() -> None:
    verbs = ["up", "down", "status", "list", "run", "exec", "sbatch", "power-off", "power-on", "resume", "shape"]
    for verb in verbs:
        done = tool(verb, "--help")
        assert done.returncode == 0 and "usage: " in done.stdout
    assert all(verb in tool("--help").stdout for verb in verbs)


def test_without_root_it_says_so() -> None:
    setpriv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    for verb in (["up"], ["down"], ["status"], ["run", "--", "true"]):
        command = [*setpriv, sys.executable, "-m", "gemini_hpc.cli.main", "devcluster", *verb]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=CHECKOUT)
        assert done.returncode == 1
        assert "needs root" in done.stderr and done.stderr.count("\n") == 1


def test_without_the_right_to_make_namespaces_it_says_so(name: str) -> None:
    setpriv = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    command = [*setpriv, sys.executable, "-m", "gemini_hpc.cli.main", "devcluster", "up", "--name", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=CHECKOUT)
    assert done.returncode == 1
    assert "the kernel refuses new namespaces" in done.stderr and done.stderr.count("\n") == 1
    Trace.of(name).assert_gone()


def test_without_slurm_it_names_the_packages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemini_hpc.devcluster.requirements.SEARCH_PATH", "/nonexistent")
    with pytest.raises(DevclusterError, match=r"slurmctld.*apt-get install.*munge.*slurm-client.*slurmctld.*slurmd"):
        Cluster.bring_up(name, nodes=1)
