"""Power and links of nodes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from waiting import until

from gemini_hpc.devcluster import Cluster, DevclusterError

from .conftest import tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

# Accepts one connection, says a word, and then sits there.
SERVER = """
import socket, time
s = socket.create_server(("", 4000), reuse_port=True)
print("listening", flush=True)
c, _ = s.accept()
c.send(b"hello")
time.sleep(600)
"""
# Connects to argv[1]; tells what it hears after the first word: "silence" after argv[2] seconds, "end" or "reset".
CLIENT = """
import socket, sys
c = socket.create_connection((sys.argv[1], 4000), timeout=5)
print(c.recv(5).decode(), flush=True)
c.settimeout(float(sys.argv[2]))
try:
    print("end" if c.recv(1) == b"" else "data")
except TimeoutError:
    print("silence")
except OSError:
    print("reset")
"""
SINK = """
import socket
s = socket.create_server(("", 4001), reuse_port=True)
print("listening", flush=True)
while True:
    c, _ = s.accept()
    while c.recv(1 << 20):
        pass
    c.send(b"x")
    c.close()
"""
# Sends argv[2] bytes to argv[1] and prints the bits per second until the last one was read.
SOURCE = """
import socket, sys, time
c = socket.create_connection((sys.argv[1], 4001), timeout=20)
began = time.monotonic()
c.sendall(bytes(int(sys.argv[2])))
c.shutdown(socket.SHUT_WR)
c.recv(1)
print(int(sys.argv[2]) * 8 / (time.monotonic() - began))
"""
PYTHON = ["/opt/gemini-hpc/venv/bin/python", "-I", "-c"]


@contextmanager
def serving(cluster: Cluster, node: str, code: str) -> Iterator[None]:
    process = cluster.start_command([*PYTHON, code], node=node)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield
    finally:
        process.kill()
        process.communicate()


def hears(cluster: Cluster, reset: bool) -> str:
    """What a peer hears of a node that loses its power."""
    with serving(cluster, "n1", SERVER):
        client = cluster.start_command([*PYTHON, CLIENT, cluster.find_address("n1"), "2"], node="n2")
        assert client.stdout is not None
        assert client.stdout.readline() == "hello\n"
        cluster.cut_power("n1", reset=reset)
        heard, _ = client.communicate(timeout=10)
    assert not cluster.is_on("n1")
    cluster.restore_power("n1")
    cluster.wait_idle(timeout_s=20)
    return heard.strip()


@pytest.mark.witness("peers hear nothing of a node that loses its power")
def test_power_off_is_silent(cluster: Cluster) -> None:
    assert hears(cluster, reset=False) == "silence"


def test_power_off_with_reset_is_heard(cluster: Cluster) -> None:
    assert hears(cluster, reset=True) in ("end", "reset")


def test_a_node_without_power_is_unreachable_and_comes_back_empty(cluster: Cluster) -> None:
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 6818), timeout=2)"
    reach = [*PYTHON, connect, cluster.find_address("n3")]
    assert cluster.run(reach).returncode == 0
    boot = cluster.exec("n3", ["cat", "/proc/sys/kernel/random/boot_id"]).stdout
    cluster.exec("n3", ["touch", "/dev/shm/replica", "/tmp/file", "/run/gemini-hpc/job"])
    pid = cluster.find_node_pid("n3")
    cluster.cut_power("n3")
    assert cluster.run(reach).returncode != 0
    assert not cluster.is_on("n3")
    for call in (cluster.cut_power, cluster.find_node_pid):
        with pytest.raises(DevclusterError, match=r"n3 .* is off"):
            call("n3")
    cluster.restore_power("n3")
    assert cluster.find_node_pid("n3") != pid
    assert cluster.run(reach).returncode == 0
    left = cluster.exec("n3", ["find", "/dev/shm", "/tmp", "/run/gemini-hpc", "-mindepth", "1"])
    assert (left.returncode, left.stdout) == (0, "/tmp/file\n"), "as on a disk"
    assert cluster.exec("n3", ["cat", "/proc/sys/kernel/random/boot_id"]).stdout != boot
    with pytest.raises(DevclusterError, match="already on"):
        cluster.restore_power("n3")
    cluster.wait_idle(timeout_s=20)
    assert sorted(cluster.run(["srun", "-N5", "hostname"]).stdout.split()) == cluster.node_names


def test_slurm_notices_by_itself_and_the_node_comes_back(cluster: Cluster) -> None:
    cluster.cut_power("n5")
    until(lambda: cluster.read_node_state("n5").startswith("down"), every_s=0.2)
    cluster.restore_power("n5")
    cluster.wait_idle(["n5"], timeout_s=20)


def test_resume_takes_a_node_out_of_down_and_drain(cluster: Cluster) -> None:
    for state in ("drain", "down"):
        cluster.run(["scontrol", "update", "nodename=n4", f"state={state}", "reason=test"])
    cluster.cut_power("n4")
    cluster.restore_power("n4")
    assert cluster.read_node_state("n4") != "idle"
    assert tool("resume", "--name", cluster.name, "n4").returncode == 0
    cluster.wait_idle(["n4"], timeout_s=20)


def test_power_from_the_command_line(cluster: Cluster) -> None:
    assert tool("power-off", "--name", cluster.name, "n2").returncode == 0
    assert not cluster.is_on("n2")
    assert "OFF" in tool("status", "--name", cluster.name).stdout
    done = tool("power-on", "--name", cluster.name, "n2")
    assert done.returncode == 0 and done.stdout.startswith("n2: registered after")
    cluster.wait_idle(timeout_s=20)


@pytest.mark.parametrize("sender,receiver", [("n1", "n2"), ("n2", "n1")])
def test_shaping_limits_both_directions(cluster: Cluster, sender: str, receiver: str) -> None:
    def rate() -> float:
        return float(cluster.exec(sender, [*PYTHON, SOURCE, cluster.find_address(receiver), str(5_000_000)]).stdout)

    with serving(cluster, receiver, SINK):
        unlimited = rate()
        cluster.limit_link("n1", "40mbit")
        limited = rate()
        cluster.limit_link("n1", None)
        again = rate()
    # How fast it is without a limit depends on what else this machine does.
    assert min(unlimited, again) > 2 * limited
    assert 25e6 < limited < 48e6
    assert cluster.read_status().nodes[0].rate is None


def test_a_limit_outlives_a_power_off(cluster: Cluster) -> None:
    assert tool("shape", "--name", cluster.name, "n1", "--rate", "20mbit").returncode == 0
    cluster.cut_power("n1")
    cluster.restore_power("n1")
    assert cluster.read_status().nodes[0].rate == "20mbit"
    assert "htb" in cluster.exec("n1", ["tc", "qdisc", "show", "dev", "eth0"]).stdout
    assert tool("shape", "--name", cluster.name, "n1", "--rate", "off").returncode == 0
    assert "htb" not in cluster.exec("n1", ["tc", "qdisc", "show", "dev", "eth0"]).stdout
    cluster.limit_link("n1", None)  # again: nothing to do, no error
    refused = tool("shape", "--name", cluster.name, "n1", "--rate", "fast")
    assert refused.returncode == 1 and "1gbit" in refused.stderr
    cluster.wait_idle(timeout_s=20)


def test_a_node_that_is_off_takes_no_commands(cluster: Cluster) -> None:
    cluster.cut_power("n2")
    with pytest.raises(DevclusterError, match=r"n2 .* is off"):
        cluster.exec("n2", ["true"])
    with pytest.raises(DevclusterError, match="no node 'n77'"):
        cluster.cut_power("n77")
    cluster.restore_power("n2")
    cluster.wait_idle(timeout_s=20)


def test_a_command_on_a_node_ends_with_its_power(cluster: Cluster) -> None:
    process = cluster.start_command(["sleep", "600"], node="n3")
    cluster.cut_power("n3")
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode != 0
    cluster.restore_power("n3")
    cluster.wait_idle(timeout_s=20)
