"""What users and nodes of a running cluster see."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import time
from pathlib import Path

import pytest
from waiting import until

from gemini_hpc.devcluster import Cluster, DevclusterError

from .conftest import tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]


def test_jobs_run_as_their_user(cluster: Cluster) -> None:
    job = cluster.submit_job(
        ["-N3"], user="alice", script="#!/bin/sh\nsrun sh -c 'echo $(id -un) $(hostname) $HOME'\n"
    )
    output = cluster.locate_home("alice") / f"slurm-{job}.out"
    until(lambda: cluster.read_job(job)["JobState"] == "COMPLETED", 20)
    home = cluster.locate_home("alice")
    assert sorted(output.read_text().splitlines()) == [f"alice {node} {home}" for node in ("n1", "n2", "n3")]
    assert output.stat().st_uid == 5001


def test_a_script_from_outside_is_submitted(cluster: Cluster, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    script = tmp_path / "outside.sh"
    script.write_text("#!/bin/sh\necho hello from $1\n")
    done = tool("sbatch", "--name", cluster.name, "--user", "bob", "-N1", "--output=outside.txt", str(script), "here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Submitted batch job")
    output = cluster.locate_home("bob") / "outside.txt"
    until(lambda: output.exists() and output.read_text() == "hello from here\n", 20)
    assert output.stat().st_uid == 5002


def test_users_are_separate_and_unprivileged(cluster: Cluster) -> None:
    assert cluster.run(["ls", str(cluster.locate_home("alice"))], user="bob").returncode != 0
    assert cluster.run(["cat", str(cluster.directory / "munge" / "munge.key")], user="alice").returncode != 0
    capabilities = cluster.exec("n1", ["grep", "CapEff", "/proc/self/status"], user="alice").stdout
    assert int(capabilities.split()[1], 16) == 0
    assert cluster.run(["scontrol", "update", "nodename=n1", "state=down", "reason=x"], user="bob").returncode != 0
    with pytest.raises(DevclusterError, match="no user 'eve'"):
        cluster.run(["true"], user="eve")


def test_nodes_have_their_own_places(cluster: Cluster) -> None:
    for directory in ("/tmp", "/dev/shm", "/run/gemini-hpc"):
        assert cluster.exec("n1", ["touch", f"{directory}/mark"]).returncode == 0
        for host in ("n2", None):
            assert cluster.run(["test", "-e", f"{directory}/mark"], node=host).returncode == 1
        assert not Path(directory, "mark").exists()
        assert cluster.exec("n1", ["rm", f"{directory}/mark"]).returncode == 0
    assert cluster.exec("n1", ["stat", "-c", "%U %a", "/run/gemini-hpc"]).stdout == "root 755\n"
    assert cluster.exec("n4", ["hostname"]).stdout == "n4\n"
    assert cluster.run(["hostname"]).stdout == "ctl\n"
    boots = {cluster.exec(node, ["cat", "/proc/sys/kernel/random/boot_id"]).stdout for node in cluster.node_names}
    assert len(boots) == len(cluster.node_names)


def test_munge_answers_everywhere_without_configuration(cluster: Cluster) -> None:
    credential = cluster.exec("n1", ["munge", "-s", "hello"], user="alice").stdout
    done = cluster.exec("n2", ["unmunge"], stdin=credential)
    assert "alice (5001)" in done.stdout and done.stdout.endswith("hello")


def test_the_environment_serves_every_user(cluster: Cluster) -> None:
    code = "import gemini_hpc, msgspec, xxhash, sys; print(sys.prefix)"
    for user in ("alice", "slurm", None):
        done = cluster.exec("n2", ["/opt/gemini-hpc/venv/bin/python", "-I", "-c", code], user=user)
        assert (done.returncode, done.stdout) == (0, "/opt/gemini-hpc/venv\n"), done.stderr
    which = cluster.run(["sh", "-c", "command -v gemini-hpc && sinfo --version"], user="alice")
    assert which.stdout.startswith("/opt/gemini-hpc/venv/bin/gemini-hpc\nslurm")


def test_no_variable_of_the_tool_gets_in(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    inside = cluster.run(["env"], user="alice", env={"MINE": "1"}).stdout
    assert "PYTHONPATH" not in inside and "MINE=1" in inside and "USER=alice" in inside


def test_settings_reach_the_site_file(cluster: Cluster) -> None:
    text = cluster.exec("n3", ["cat", "/etc/gemini-hpc/gemini.toml"], user="alice").stdout
    for line in (f'cluster_name = "{cluster.name}"', 'controller_host = "ctl"', 'slurm_user = "slurm"'):
        assert line in text
    assert "heartbeat_s = 0.1\n" in text and f'state_dir = "{cluster.directory}/controller"' in text
    assert (cluster.directory / "controller").stat().st_uid == pwd.getpwnam("slurm").pw_uid


def test_a_command_that_hangs_is_ended_with_its_children(cluster: Cluster) -> None:
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run(["bash", "-c", "sleep 4711; true"], timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert "sleep 4711" not in cluster.run(["ps", "ax"]).stdout


def test_popen_signals_reach_the_command(cluster: Cluster) -> None:
    process = cluster.start_command(["bash", "-c", "sleep 4712; true"], node="n1", user="alice")
    until(lambda: "sleep 4712" in cluster.exec("n1", ["ps", "ax"]).stdout, 10)
    process.kill()
    process.wait(10)
    until(lambda: "sleep 4712" not in cluster.exec("n1", ["ps", "ax"]).stdout, 10)
    process.communicate()


def test_command_line_run_and_exec(cluster: Cluster) -> None:
    name = cluster.name
    assert tool("run", "--name", name, "hostname").stdout == "ctl\n"
    assert tool("run", "--name", name, "--user=alice", "--", "id", "-un").stdout == "alice\n"
    assert tool("exec", "--name", name, "n2", "--", "sh", "-c", "hostname; exit 7").stdout == "n2\n"
    assert tool("exec", "n2", "--name", name, "--user", "bob", "sh", "-c", "exit 7").returncode == 7
    assert tool("exec", "--name", name, "n9", "--", "true").returncode == 1
    usage = tool("exec", "--name", name, "n2")
    assert usage.returncode == 2 and "no command was given" in usage.stderr


def test_status_as_json(cluster: Cluster) -> None:
    shown = json.loads(tool("status", "--name", cluster.name, "--json").stdout)
    assert set(shown) == {
        *("name", "profile", "directory", "outer_pid", "controller_pid", "plugin", "prolog", "epilog", "nodes")
    }
    assert [node["name"] for node in shown["nodes"]] == cluster.node_names
    assert set(shown["nodes"][0]) == {"name", "address", "on", "pid", "slurm_state", "rate"}
    assert cluster.find_node_pid("n2") == shown["nodes"][1]["pid"]
    assert os.readlink(f"/proc/{cluster.find_node_pid('n2')}/ns/net") != os.readlink("/proc/self/ns/net")
    assert f"{cluster.name}\trunning" in tool("list").stdout
