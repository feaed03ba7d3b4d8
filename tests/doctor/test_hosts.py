"""MUNGE, ports, addresses, memory and the controller's host, broken on a real cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from gemini_hpc.devcluster import Cluster
from gemini_hpc.node.meminfo import read_meminfo

from .conftest import Patient, Report

pytestmark = pytest.mark.cluster

PYTHON = "/opt/gemini-hpc/venv/bin/python"
LISTEN = "import socket, time; s = socket.create_server(('', {port})); print('ready', flush=True); time.sleep(60)"
LATE = (
    "import sys, time; real = time.time; time.time = lambda: real() + {late};"
    "from gemini_hpc.cli.main import main; sys.exit(main())"
)


# ---- MUNGE ---------------------------------------------------------------------------------------------


def test_munge_does_not_answer(patient: Patient) -> None:
    with patient.mounted("n3", "-t", "tmpfs", "none", "/run/munge"):
        report = patient.doctor(node="n3", env={"MUNGE_SOCKET": ""})
    assert report["munge.answers"]["status"] == "wrong"
    # Slurm and the controller cannot be asked without it.
    assert set(report.news) == {"munge.answers", "slurm.answers", "network.controller"}
    assert report["munge.clock"]["status"] == "skipped"
    assert patient.doctor(node="n3").news == {}


def test_cve_2026_25506_munge_version(patient: Patient) -> None:
    cases: list[tuple[str, str]] = [("0.5.17", "warning"), ("0.5.18", "ok"), ("0.6.0", "ok"), ("?", "skipped")]
    for case in cases:
        version, status = case
        with (
            patient.written("munged", f"#!/bin/sh\necho munge-{version}\n", 0o755) as path,
            patient.mounted("n3", "--bind", str(path), "/usr/sbin/munged"),
        ):
            report = patient.doctor("--only", "munge.version", node="n3")
        assert report["munge.version"]["status"] == status, case


def test_clock(patient: Patient) -> None:
    """One machine has one clock: that of the command is set apart, the controller's credential is real."""
    cases: list[tuple[int, str]] = [(0, "ok"), (12, "warning"), (-45, "wrong"), (400, "wrong")]
    for case in cases:
        late, status = case
        argv = [PYTHON, "-I", "-c", LATE.format(late=late), "doctor", "--json", "--only", "munge"]
        done = patient.cluster.run(argv, node="n1")
        report = Report(done.returncode, json.loads(done.stdout), done.stderr)
        assert report["munge.clock"]["status"] == status, case
        assert set(report.news) <= {"munge.clock"}, case
        if late:
            assert abs(int(re.findall(r"(\d+) s ", report["munge.clock"]["found"])[0]) - abs(late)) <= 2, case


def test_munge_key(patient: Patient) -> None:
    with patient.access(patient.directory / "munge/munge.key", mode=0o644):
        report = patient.doctor()
    assert report.news == {"munge.key": "wrong"} and "0644" in report["munge.key"]["found"]
    assert patient.doctor(user="alice")["munge.key"]["status"] == "skipped"


# ---- ports and addresses -------------------------------------------------------------------------------


def test_ephemeral_ports(patient: Patient) -> None:
    def sysctl(name: str, value: str) -> None:
        done = patient.cluster.exec("n2", ["sh", "-c", f"echo '{value}' > /proc/sys/net/ipv4/{name}"])
        assert done.returncode == 0, done.stderr

    sysctl("ip_local_port_range", "20000 60999")
    report = patient.doctor(node="n2")
    sysctl("ip_local_reserved_ports", "17000-21095,24000-31999")
    reserved = patient.doctor(node="n2")
    sysctl("ip_local_reserved_ports", "")
    sysctl("ip_local_port_range", "32768 60999")
    assert report.news == {"network.ephemeral": "warning"} and report.code == 0
    assert "agents" in report["network.ephemeral"]["found"] and "MASTER_PORT" in report["network.ephemeral"]["found"]
    assert reserved.news == {} == patient.doctor(node="n2").news


def test_ports_in_use(patient: Patient) -> None:
    cases: list[tuple[int, str | None, str]] = [
        (17005, "alice", "warning"),
        (24100, None, "warning"),
        (24100, "alice", ""),
    ]
    for case in cases:
        port, user, status = case
        process = patient.cluster.start_command([PYTHON, "-c", LISTEN.format(port=port)], user=user, node="n2")
        try:
            assert process.stdout is not None and process.stdout.readline(), case
            report = patient.doctor(node="n2")
        finally:
            process.kill()
            process.wait()
        assert report.news == ({"network.in-use": status} if status else {}), case
        assert str(port) in report["network.in-use"]["found"] or not status, case


def test_addresses(patient: Patient) -> None:
    for values, status in (
        ({"peer_address": "{host}-nowhere"}, "wrong"),
        ({"peer_address": "localhost"}, "wrong"),
        ({"peer_address": "ctl"}, "wrong"),
        ({"interface": "nope0"}, "wrong"),
        ({"interface": "eth0"}, "warning"),
        (
            {
                "interface": "eth0",
                "peer_address": "{host}.",
            },
            "",
        ),
    ):
        with patient.with_settings(**values) as path:
            report = patient.doctor("--config", str(path), "--only", "network.addresses", node="n1")
        found = report["network.addresses"]
        if status:
            assert found["status"] == status, found
        else:
            assert found["status"] in (
                "ok",
                "wrong",
            )  # whether a name with a point at its end is known depends on the host


def test_no_controller_in_the_settings(patient: Patient) -> None:
    with patient.with_settings(controller_host="") as path:
        report = patient.doctor("--config", str(path), "--only", "network", node="n1")
    assert report.news == {} and report["network.controller"]["status"] == "skipped"


# ---- memory --------------------------------------------------------------------------------------------


def test_carve_out(patient: Patient) -> None:
    total_mb = read_meminfo()["MemTotal"] >> 20
    lines = patient.slurm_conf.read_text().splitlines()
    for share, status in ((0.99, "wrong"), (0.7, "warning")):
        ours = [re.sub(r"RealMemory=\d+", f"RealMemory={int(total_mb * share)}", line) for line in lines]
        with patient.file(patient.slurm_conf, "\n".join(ours) + "\n"):
            patient.reconfigure()
            report = patient.doctor(node="n1")
        patient.reconfigure()
        assert report.news == {"memory.carve-out": status}
        assert "MiB" in report["memory.carve-out"]["found"] and "RealMemory=" in report["memory.carve-out"]["fix"]
    assert patient.doctor(node="n1").news == {}


def test_slurmd_cgroup(patient: Patient) -> None:
    """A limit on slurmd's own cgroup, as MemSpecLimit or its unit would put it."""
    table = patient.cluster.exec("n1", ["bash", "-c", "cat /proc/$(pgrep -xo slurmd)/cgroup"]).stdout
    own = next(line.split(":")[2] for line in table.splitlines() if ":memory:" in line)
    limit = Path(f"/sys/fs/cgroup/memory{own}/memory.limit_in_bytes")
    assert "gemini-devcluster" in own, "the test would limit something else"
    limit.write_text(str(512 << 20))
    try:
        with patient.with_settings(agent_cgroup="none") as path:
            report = patient.doctor("--config", str(path), "--only", "memory", node="n1")
            assert report.news == {"memory.slurmd-cgroup": "wrong"}
            assert "512 MiB" in report["memory.slurmd-cgroup"]["found"]
            assert patient.doctor("--config", str(path), "--only", "memory", node="n2").news == {}
        report = patient.doctor(node="n1")
        assert report.news == {} and "agents leave" in report["memory.slurmd-cgroup"]["found"]
    finally:
        limit.write_text("-1")


def test_unit(patient: Patient) -> None:
    """The unit is a file here, and no systemd reads it."""
    dropin = patient.directory / "etc-systemd"
    (dropin / "slurmd.service.d").mkdir(parents=True)
    (dropin / "slurmd.service.d/kill.conf").write_text("[Service]\nKillMode=mixed\n")
    try:
        with patient.mounted("n2", "--bind", str(dropin), "/etc/systemd/system"):
            report = patient.doctor(node="n2")
    finally:
        (dropin / "slurmd.service.d/kill.conf").unlink()
        (dropin / "slurmd.service.d").rmdir()
        dropin.rmdir()
    assert report.news == {"memory.unit": "wrong"} and "mixed" in report["memory.unit"]["found"]
    assert patient.doctor(node="n2").news == {}


# ---- the controller ------------------------------------------------------------------------------------


def test_no_controller(patient: Patient) -> None:
    patient.cluster.stop_controller()
    try:
        report, node = patient.doctor(), patient.doctor(node="n1")
    finally:
        patient.cluster.start_controller()
    assert report.news == {"controller.runs": "wrong", "network.controller": "wrong"} and report.code == 1
    assert node.news == {"network.controller": "wrong"}
    assert node["munge.clock"]["status"] == "skipped"
    until(lambda: patient.doctor("--only", "network").news == {})


def test_a_controller_that_hangs(patient: Patient) -> None:
    pid = patient.cluster.find_controller_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        report = patient.doctor("--only", "network", "controller", "jobs")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert report.news == {"network.controller": "wrong"}


def test_a_controller_that_agents_do_not_dial(patient: Patient) -> None:
    with patient.with_settings(controller_host="n2") as path:
        report = patient.doctor("--config", str(path), "--only", "controller", "--host-role", "controller")
    assert report.news == {"controller.runs": "wrong"} and "n2" in report["controller.runs"]["found"]


def test_journal(patient: Patient) -> None:
    journal = patient.state / "journal.jsonl"
    with patient.access(journal, owner=5001):
        assert patient.doctor().news == {"controller.journal": "wrong"}
    with patient.appended(journal, b'{"t":1.0,"key":"1\nnonsense\n'):
        report = patient.doctor()
        assert (
            report.news == {"controller.journal": "warning"}
            and "2 of the newest" in report["controller.journal"]["found"]
        )
    state = str(patient.state)
    with patient.mounted(None, "--bind", state, state):
        assert patient.cluster.run(["mount", "-o", "remount,bind,ro", state]).returncode == 0
        report = patient.doctor()
    assert report.news == {"controller.journal": "wrong"} and "read-only" in report["controller.journal"]["found"]


def test_a_controller_that_has_stood_aside(patient: Patient) -> None:
    line = (
        f'{{"t":{time.time()},"key":"nodes","step":"alert","phase":"after","data":{{"kind":"budget","node":"n7"}}}}'
    )
    with patient.appended(patient.state / "journal.jsonl", f"{line}\n".encode()):
        report = patient.doctor()
    assert report.news == {"controller.alerts": "warning"} and "n7" in report["controller.alerts"]["found"]
    with patient.appended(
        patient.state / "journal.jsonl", b'{"t":"x","step":"alert"}\n{"t":9,"step":"alert"}\n[1]\n'
    ):
        assert "controller.alerts" not in patient.doctor("--only", "controller.alerts").news


def test_journal_on_a_full_disk(patient: Patient) -> None:
    with patient.mounted("n3", "-t", "tmpfs", "-o", "size=1m", "none", "/mnt"):
        assert patient.cluster.exec("n3", ["sh", "-c", "touch /mnt/journal.jsonl"]).returncode == 0
        with patient.with_settings(state_dir="/mnt") as path:
            args = ("--config", str(path), "--host-role", "controller", "--only", "controller.journal")
            report = patient.doctor(*args, node="n3")
    assert report.news == {"controller.journal": "wrong"} and "free" in report["controller.journal"]["found"]


def test_the_way_in_which_slurm_is_asked(patient: Patient) -> None:
    report = patient.doctor("--only", "controller")
    assert (
        report["controller.slurm-api"]["found"]
        == "the controller asks Slurm through commands: pyslurm is not installed"
    )
    with patient.with_settings(slurm_api="pyslurm") as path:
        report = patient.doctor("--config", str(path), "--only", "controller.slurm-api")
    assert report.news == {"controller.slurm-api": "warning"}
    assert "it was started with auto" in report["controller.slurm-api"]["found"]
    left = '{"setting":"auto","used":"commands","why":"pyslurm is no longer used: x","left":true,"at":1.0}'
    with patient.file(patient.state / "slurm-api.json", left):
        report = patient.doctor("--only", "controller.slurm-api")
    assert report.news == {"controller.slurm-api": "warning"}
    assert "no longer used: x" in report["controller.slurm-api"]["found"]


@pytest.fixture
def two_controllers() -> Iterator[Cluster]:
    name = f"doctor2-{os.getpid()}"
    extra = ["SlurmctldHost=n2(10.77.0.12)"]
    with Cluster.bring_up(name, nodes=2, slurm_conf=extra) as cluster:
        yield cluster


def test_a_backup_slurmctld_takes_over(two_controllers: Cluster) -> None:
    patient = Patient(two_controllers)
    assert "controller.primary" not in patient.doctor("--only", "controller").bad
    assert patient.doctor("--only", "controller", node="n2").document["roles"] == ["controller", "node"]
    with patient.with_settings(state_dir="/dev/shm") as path:
        report = patient.doctor("--config", str(path), "--only", "controller.lock")
        assert report.news == {"controller.lock": "wrong"}
    pid = two_controllers.run(["cat", "/run/slurmctld.pid"]).stdout.strip()
    start = ["/usr/sbin/slurmctld", "-f", str(patient.slurm_conf), "-L", str(patient.directory / "log/backup.log")]
    assert two_controllers.exec("n2", start).returncode == 0
    until(lambda: "n2 is UP" in two_controllers.run(["scontrol", "ping"]).stdout)
    assert two_controllers.run(["kill", "-9", pid]).returncode == 0
    until(lambda: "ctl is DOWN" in two_controllers.run(["scontrol", "ping"]).stdout)
    two_controllers.run(["scontrol", "takeover"], node="n2")
    until(lambda: two_controllers.run(["scontrol", "show", "config"], timeout_s=60).returncode == 0, 60)
    # The controller here steps down by itself: none acts, and that is as it should be.
    until(lambda: patient.doctor("--only", "controller").bad.get("controller.primary") == "warning", 30)
    report = patient.doctor("--only", "controller")
    assert "n2 has taken over" in report["controller.primary"]["found"]
    assert report["controller.runs"]["status"] == "ok" and "none acts here" in report["controller.runs"]["found"]


# ---- who else is where the agents are, and what is full ------------------------------------------------


def test_strangers_in_the_agents_cgroup(patient: Patient) -> None:
    """As root's ledger has it: a process that no prolog has put there."""
    group = "/sys/fs/cgroup/memory/gemini-hpc/4000000"
    boot = patient.cluster.exec("n1", ["cat", "/proc/sys/kernel/random/boot_id"]).stdout.strip()
    entry = {"job": 4000000, "uid": 5001, "restart": 0, "ended_s": None, "released": False, "boot": boot}
    text = json.dumps(entry | {"group": {"version": 1, "directories": [group]}})
    top = "/run/gemini-hpc.agents"
    made = patient.cluster.exec(
        "n1",
        ["bash", "-c", f"mkdir -p {group} {top}; chmod 700 {top}; echo '{text}' >{top}/4000000; "
         f"(echo 0 >{group}/cgroup.procs; exec sleep 100) >/dev/null 2>&1 & sleep 0.3"],
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    try:
        report = patient.doctor(node="n1")
    finally:
        patient.cluster.exec("n1", ["bash", "-c", f"kill $(cat {group}/cgroup.procs); rm {top}/4000000; sleep 0.3"])
        patient.cluster.exec("n1", ["rmdir", group])
    assert report.news == {"agents.strangers": "wrong"} and "'sleep'" in report["agents.strangers"]["found"]
    assert (
        patient.doctor("--only", "agents.strangers", node="n1", user="alice")["agents.strangers"]["status"]
        == "skipped"
    )
    assert patient.doctor(node="n1").news == {}


def test_directories_without_room(patient: Patient) -> None:
    fill = "i=0; while : >/run/gemini-hpc/full.$i; do i=$((i+1)); done 2>/dev/null; ls /run/gemini-hpc | wc -l"
    assert int(patient.cluster.exec("n1", ["bash", "-c", fill], timeout_s=60).stdout) > 16000
    try:
        report = patient.doctor("--only", "agents.room", node="n1")
    finally:
        patient.cluster.exec("n1", ["bash", "-c", "find /run/gemini-hpc -name 'full.*' -delete"])
    assert report["agents.room"]["status"] == "warning" and "files left" in report["agents.room"]["found"]
    assert patient.doctor("--only", "agents.room", node="n1")["agents.room"]["status"] == "ok"
