"""`prolog_epilog/prolog` as slurmd runs it, on an imagined node with a fake agent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from gemini_hpc.node.meminfo import read_meminfo

from .conftest import ALICE, ALICE_EXTRA_GID, ALICE_GID, BOB, ROOT, Node
from .expect import one_line, silent

pytestmark = pytest.mark.slow

SCRIPTS = [ROOT / "prolog_epilog" / name for name in ("prolog", "epilog")]


def test_scripts_are_posix_sh_without_eval() -> None:
    for script in SCRIPTS:
        text = script.read_text()
        assert text.startswith("#!/bin/sh\n"), script
        assert "set -u\n" in text, script
        assert "eval" not in text, script
        assert script.stat().st_mode & 0o777 == 0o755, script
        subprocess.run(["/bin/sh", "-n", script], check=True)


def test_a_shell_that_cannot_fork_drains_no_node() -> None:
    """Users can use up a node's processes; status 2, a shell's own, would drain it."""
    job = {"SPANK_GEMINI_REPLICAS": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_UID": "5001", "SLURM_JOB_NUM_NODES": "1"}
    env = {"PATH": "/usr/bin:/bin", **job}
    alone = ["prlimit", "--nproc=0", "setpriv", "--reuid=4242", "--clear-groups", "/bin/sh"]
    for script in SCRIPTS:
        copied = Path("/tmp") / f"gemini-{script.name}-{os.getpid()}"  # where nobody in particular may read it
        copied.write_text(script.read_text())
        try:
            done = subprocess.run(
                [*alone, str(copied)], env=env, capture_output=True, text=True, timeout=60, check=False
            )
        finally:
            copied.unlink()
        assert "fork" in done.stderr.lower() and done.returncode == 0, done


def test_nothing_is_started_for_other_jobs(tattling_node: Node) -> None:
    for env in ({"SPANK_GEMINI_REPLICAS": ""}, {"SLURM_HET_JOB_ID": "12"}):
        assert silent(tattling_node.prolog(env)), env
        assert silent(tattling_node.epilog(env)), env
    assert not tattling_node.exists("/run/python-was-started")
    assert not tattling_node.exists("/run/gemini-hpc")


def test_the_tattling_python_would_tell(tattling_node: Node) -> None:
    tattling_node.prolog()
    assert tattling_node.exists("/run/python-was-started")


def test_more_replicas_than_nodes_is_left_to_the_plugin(tattling_node: Node) -> None:
    assert silent(tattling_node.prolog(SPANK_GEMINI_REPLICAS="4"))
    assert not tattling_node.exists("/run/python-was-started")


@pytest.mark.witness("a node without the installation runs jobs, and says so in one line")
def test_missing_installation_is_one_line(tattling_node: Node) -> None:
    tattling_node.sh("umount /opt/gemini-hpc/venv")
    assert "missing" in one_line(tattling_node.prolog())
    assert "missing" in one_line(tattling_node.epilog())


@pytest.mark.witness("the prolog starts the agent as the job's owner")
def test_agent_is_started_as_the_jobs_owner(node: Node) -> None:
    assert silent(
        node.prolog(
            SPANK_GEMINI_TIER="/lustre/x",
            SPANK_GEMINI_TIER_INTERVAL="60",
            SPANK_GEMINI_HANG="300",
            SPANK_GEMINI_AFTER="17",
            SPANK_GEMINI_REDUNDANCY="xor",
            SPANK_GEMINI_JOB_KEY="0123456789abcdef",
            SLURM_CLUSTER_NAME="north",
        )
    )
    (record,) = node.records()
    assert record["message"] == {
        "op": "attach",
        "job": 7,
        "restart": 0,
        "nodelist": "n[1-3]",
        "node": "n2",
        "replicas": 2,
        "tier": "/lustre/x",
        "tier_interval": 60,
        "hang": 300,
        "spares": 0,
        "after": 17,
        "parity": 1,
        "key": "0123456789abcdef",
        "cluster": "north",
    }
    agent = record["agent"]
    cap = agent["argv"].pop(-3)
    assert agent["argv"] == [
        *("--job", "7", "--uid", str(ALICE), "--node", "n2", "--dir", "/run/gemini-hpc/7"),
        *("--share-bytes", "--share", ""),
    ]
    assert int(cap) == int(read_meminfo()["MemTotal"] * 0.5), "all of it, where its share is not known"
    assert agent["uids"] == [ALICE] * 3
    assert agent["gids"] == [ALICE_GID] * 3
    assert agent["groups"] == [ALICE_GID, ALICE_EXTRA_GID]
    assert agent["flags"] == {"isolated": 1}
    assert not agent["traceable"]
    assert agent["cwd"] == "/"
    assert set(agent["env"]) <= {"PATH", "LC_ALL"}
    assert agent["oom_score_adj"] == "1000"
    log = "/run/gemini-hpc/7/agent.log"
    assert agent["fds"] == {"0": "/dev/null", "1": log, "2": log}
    assert agent["mode"] == "0o700"
    stat = node.sh("stat -c '%u %g %a' /run/gemini-hpc /run/gemini-hpc/7")
    assert stat == f"0 0 755\n{ALICE} {ALICE_GID} 700\n"


def test_agent_survives_the_end_of_the_prologs_process_group(node: Node) -> None:
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_UID": str(ALICE),
        "SLURMD_NODENAME": "n2",
        "SLURM_NODELIST": "n2",
        "SPANK_GEMINI_REPLICAS": "1",
    }
    done = node.run(["/usr/bin/setsid", "--wait", "/bin/sh", "-c", "/opt/scripts/prolog; kill -9 0"], env)
    assert done.returncode != 0
    (agent,) = node.agents()
    session = node.records()[0]["agent"]["session"]
    assert node.sh(f"pgrep -s {session}").split() == [str(agent)]


@pytest.mark.witness("a requeued job finds the agent of before, with its copies")
def test_second_prolog_finds_the_same_agent(node: Node) -> None:
    assert silent(node.prolog())
    before = node.agents()
    assert silent(node.prolog(SLURM_JOB_RESTART_COUNT="1"))
    assert silent(node.prolog(SLURM_JOB_RESTART_COUNT="1"))
    assert node.agents() == before
    assert len(before) == 1
    assert [r["message"]["restart"] for r in node.records()] == [0, 1, 1]


@pytest.mark.witness("an agent that hangs is replaced by the next prolog")
def test_hung_agent_is_killed_and_replaced(node: Node) -> None:
    assert silent(node.prolog())
    before = node.agents()
    node.mode("hung")
    assert silent(node.prolog(SLURM_JOB_RESTART_COUNT="1"))
    assert len(node.agents()) == 1 and node.agents() != before
    assert [r["message"]["restart"] for r in node.records()] == [0, 1]


def test_jobs_of_root_are_allowed(node: Node) -> None:
    assert silent(node.prolog(uid=0))
    (record,) = node.records()
    assert record["agent"]["uids"] == [0, 0, 0]


def test_unknown_user(node: Node) -> None:
    assert "uid 61999 is not known" in one_line(node.prolog(uid=61999))
    assert node.agents() == []


HOSTILE_INTEGERS = [
    "$(touch /run/pwned)",
    "`touch /run/pwned`",
    "1;touch /run/pwned",
    "a[$(touch /run/pwned)]",
    "-1",
    "+1",
    "1 1",
    " 1",
    "1\n1",
    "0x10",
    "1.5",
    "01",
    "99999999999999999999",
    "*",
    "../../etc",
]


@pytest.mark.witness("prolog and epilog execute nothing of a user's")
def test_hostile_integers(node: Node) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_JOB_RESTART_COUNT", "SPANK_GEMINI_REPLICAS"):
        for value in HOSTILE_INTEGERS:
            one_line(node.prolog({name: value}), case=f"{name}={value!r}")
            done = node.epilog({name: value})
            if name == "SPANK_GEMINI_REPLICAS":  # it only matters that there is one
                assert silent(done), f"{name}={value!r}"
            else:
                one_line(done, case=f"{name}={value!r}")
    assert node.agents() == []
    assert not node.exists("/run/gemini-hpc")


def test_replicas_out_of_range(node: Node) -> None:
    for value in ("0", "33", "2147483648", "9999999999"):
        done = node.prolog(SPANK_GEMINI_REPLICAS=value, SLURM_JOB_NUM_NODES="9999999999")
        assert "replicas" in one_line(done, case=value), value
    assert node.agents() == []


HOSTILE_TEXTS = [
    ("SPANK_GEMINI_TIER", "relative"),
    ("SPANK_GEMINI_TIER", "/a\nb"),
    ("SPANK_GEMINI_TIER", "/a'b"),
    ("SPANK_GEMINI_TIER", "/\x1b[31m"),
    ("SPANK_GEMINI_TIER", "/" + "a" * 4096),
    ("SPANK_GEMINI_TIER", "/\udcff"),
    ("SPANK_GEMINI_TIER_INTERVAL", "-1"),
    ("SPANK_GEMINI_TIER_INTERVAL", "604801"),
    ("SPANK_GEMINI_TIER_INTERVAL", "Auto"),
    ("SPANK_GEMINI_HANG", "604801"),
    ("SPANK_GEMINI_HANG", "on"),
    ("SPANK_GEMINI_REDUNDANCY", "xor;touch /run/pwned"),
    ("SPANK_GEMINI_REDUNDANCY", "rs:4+2"),
    ("SPANK_GEMINI_AFTER", "0"),
    ("SPANK_GEMINI_AFTER", "17_3"),
    ("SPANK_GEMINI_AFTER", "4294967296"),
    ("SPANK_GEMINI_AFTER", "17;touch /run/pwned"),
    ("SPANK_GEMINI_JOB_KEY", "../../../../etc"),
    ("SPANK_GEMINI_JOB_KEY", "0123456789abcdef\n"),
    ("SPANK_GEMINI_TIER_INTERVAL", "$(touch /run/pwned)"),
    ("SLURM_JOB_NUM_NODES", "$(touch /run/pwned)"),
    ("SLURMD_NODENAME", "n2;touch /run/pwned"),
    ("SLURMD_NODENAME", ""),
    ("SLURM_NODELIST", "n1 n2"),
    ("SLURM_NODELIST", ""),
]


def test_hostile_texts(node: Node) -> None:
    for name, value in HOSTILE_TEXTS:
        one_line(node.prolog({name: value}), case=f"{name}={value[:40]!r}")
    assert node.agents() == []


def test_an_automatic_interval_of_the_tier_arrives(node: Node) -> None:
    assert silent(node.prolog(SPANK_GEMINI_TIER="/lustre/x", SPANK_GEMINI_TIER_INTERVAL="auto"))
    assert node.records()[0]["message"]["tier_interval"] == "auto"


def test_texts_arrive_untouched(node: Node) -> None:
    tier = "/lustre/a b/$(touch /run/pwned);touch /run/pwned|*?~&&#"
    assert silent(node.prolog(SPANK_GEMINI_TIER=tier))
    assert node.records()[0]["message"]["tier"] == tier


def test_newer_slurms_name_of_the_node_list(node: Node) -> None:
    assert silent(node.prolog(SLURM_JOB_NODELIST="a[1-3]", SLURMD_NODENAME="a1"))
    assert node.records()[0]["message"]["nodelist"] == "a[1-3]"


def test_something_else_in_the_directorys_place(node: Node) -> None:
    node.sh("mkdir -p /run/target /run/gemini-hpc; touch /run/target/precious")
    for job, make in enumerate(("ln -s /run/target {}", "ln -s /run/nowhere {}", "touch {}", "mkfifo {}"), 7):
        node.sh(f"cd /run/gemini-hpc; {make.format(job)}")
        assert silent(node.prolog(job=job)), make
        assert len(node.records(job)) == 1, make
        assert node.sh(f"stat -c '%F %u' /run/gemini-hpc/{job}") == f"directory {ALICE}\n", make
        assert node.sh("ls /run/target") == "precious\n", make


@pytest.mark.witness("root follows no link in a user's directory")
def test_directory_of_another_owner_is_replaced_and_links_in_it_are_not_followed(node: Node) -> None:
    node.sh(
        f"""
        mkdir -p /run/target/inner /run/gemini-hpc/7/a/b; touch /run/target/precious /run/target/inner/precious
        cd /run/gemini-hpc/7; ln -s /run/target link; ln -s /run/target/precious a/link; ln -s /run/target a/b/link
        mkfifo a/pipe; touch map a/b/file; chown -hR {BOB} /run/gemini-hpc/7
        """
    )
    assert silent(node.prolog())
    assert node.sh("stat -c '%u' /run/gemini-hpc/7") == f"{ALICE}\n"
    assert not node.exists("/run/gemini-hpc/7/a")
    assert node.sh("cd /run/target; find . | sort") == ".\n./inner\n./inner/precious\n./precious\n"


def test_leftover_that_is_too_deep_is_refused_in_bounded_time(node: Node) -> None:
    deep = "/".join(["d"] * 40)
    node.sh(f"mkdir -p /run/gemini-hpc/7/{deep}; chown -R {BOB} /run/gemini-hpc/7")
    assert "deeper" in one_line(node.prolog())
    assert node.agents() == []


NOT_ROOTS = [
    "mkdir /run/target; ln -s /run/target /run/gemini-hpc",
    "ln -s /run/nowhere /run/gemini-hpc",
    f"mkdir /run/gemini-hpc; chown {BOB} /run/gemini-hpc",
    "mkdir /run/gemini-hpc; chmod 777 /run/gemini-hpc",
    "touch /run/gemini-hpc",
]


def test_run_directory_that_is_not_roots_is_refused(node: Node) -> None:
    for make in NOT_ROOTS:
        node.sh(make)
        assert "/run/gemini-hpc" in one_line(node.prolog(), case=make), make
        assert node.agents() == [], make
        assert node.sh("ls /run/target 2>/dev/null || :") == "", make
        assert not node.exists("/run/nowhere"), make
        node.sh("rm -rf /run/gemini-hpc /run/target")


def test_something_else_in_the_sockets_place(node: Node) -> None:
    node.sh("touch /run/victim")
    for job, make in enumerate(("mkfifo agent.sock", "ln -s /run/victim agent.sock", "touch agent.sock"), 7):
        _make_job_dir(node, make, job)
        assert silent(node.prolog(job=job)), make
        assert len(node.records(job)) == 1, make
        assert node.exists("/run/victim"), make


def test_socket_of_a_dead_agent(node: Node) -> None:
    assert silent(node.prolog())
    (dead,) = node.agents()
    node.sh(f"kill -9 {dead}")
    assert silent(node.prolog(SLURM_JOB_RESTART_COUNT="1"))
    (alive,) = node.agents()
    assert alive != dead


@pytest.mark.witness("root writes nothing where a user points")
def test_log_is_never_written_elsewhere(node: Node) -> None:
    node.sh("echo untouched >/run/victim; chmod 666 /run/victim")
    for job, make in enumerate(("ln -s /run/victim agent.log", "mkfifo agent.log", "mkdir agent.log"), 7):
        _make_job_dir(node, make, job)
        assert silent(node.prolog(job=job)), make
        fds = node.records(job)[0]["agent"]["fds"]
        assert fds == {"0": "/dev/null", "1": "/dev/null", "2": "/dev/null"}, make
        assert node.sh("cat /run/victim") == "untouched\n", make


def test_agent_of_another_user_is_not_believed(node: Node) -> None:
    _make_job_dir(node, "true")
    code = (
        "import socket,time,os; p='/run/gemini-hpc/7/agent.sock';"
        "s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET); s.bind(p); os.chmod(p,0o777);"
        "s.listen(1); open('/run/listening','w'); time.sleep(50)"
    )
    node.sh(f'setsid -f /usr/bin/python3 -c "{code}" >/dev/null 2>&1 </dev/null')
    node.sh("until [ -e /run/listening ]; do sleep 0.05; done")
    assert f"wanted an agent of uid {ALICE}, found one of uid 0" in one_line(node.prolog())


REFUSALS = {
    "garbage": "not JSON",
    "oversized": "longer than",
    "refuse": r"two\?lines\?\[31m",
    "exit": "ended at once",
}


def test_agent_that_says_something_else(node: Node) -> None:
    for job, (mode, words) in enumerate(REFUSALS.items(), 7):
        node.mode(mode)
        assert re.search(words, one_line(node.prolog(job=job), case=mode)), mode


@pytest.mark.alone
def test_agent_that_says_nothing_is_waited_for_in_bounded_time(node: Node) -> None:
    assert silent(node.prolog())  # an agent that is there already opens its socket in time on any machine
    node.site("attach_timeout_s = 1.5")
    for job, mode, words in (
        (7, "silent", "did not answer in time"),
        # heard and not heard in turns: what is said depends on where the deadline finds it
        (8, "hangup", "did not open its socket in time|did not answer in time"),
        (9, "never", "did not open its socket in time"),
    ):
        node.mode(mode)
        began = time.monotonic()
        assert re.search(words, one_line(node.prolog(job=job), case=mode)), mode
        assert time.monotonic() - began < 4, mode


def test_agent_that_is_slow_to_start_is_waited_for(node: Node) -> None:
    node.mode("slow")
    assert silent(node.prolog())


def test_strict_prolog_fails_only_when_no_agent_can_be_started(node: Node) -> None:
    node.site("strict_prolog = true\nattach_timeout_s = 1.0")
    for job, (mode, status) in enumerate((("exit", 1), ("never", 1), ("ok", 0), ("refuse", 0), ("silent", 0)), 7):
        node.mode(mode)
        if mode in ("refuse", "silent"):  # there is an agent, so that it opens its socket in time on any machine
            node.mode("ok")
            node.site("strict_prolog = true")
            assert silent(node.prolog(job=job)), mode
            node.mode(mode)
            node.site("strict_prolog = true\nattach_timeout_s = 1.0")
        node.installation(works=False)
        assert node.prolog(job=job).returncode == status, mode
        node.installation(works=True)
        assert node.prolog(job=20 + job).returncode == 0, f"{mode}: then it is a user's doing"


USERS_VALUES = [
    {"SPANK_GEMINI_REPLICAS": "99", "SLURM_JOB_NUM_NODES": "100"},
    {"SPANK_GEMINI_TIER": "x"},
    {"SPANK_GEMINI_REPLICAS": "0"},
    {"SPANK_GEMINI_REPLICAS": "many"},
    {"SPANK_GEMINI_REPLICAS": "33", "SLURM_JOB_NUM_NODES": "40"},
    {"SPANK_GEMINI_REPLICAS": "4"},
    {"SPANK_GEMINI_TIER": "relative/`reboot`"},
    {"SPANK_GEMINI_TIER_INTERVAL": "0"},
    {"SPANK_GEMINI_TIER_INTERVAL": "1e9"},
    {"SPANK_GEMINI_HANG": "-1"},
    {"SPANK_GEMINI_AFTER": "x"},
    {"SPANK_GEMINI_JOB_KEY": "x"},
    {"SPANK_GEMINI_REDUNDANCY": "$(reboot)"},
    {"SLURM_NODELIST": "n[1-"},
    {"SLURM_NODELIST": ""},
    {"SLURM_JOB_NUM_NODES": "-1"},
]


@pytest.mark.witness("a user's mistake drains no node")
def test_no_value_of_a_users_fails_a_strict_prolog(node: Node) -> None:
    node.site("strict_prolog = true")
    for env in USERS_VALUES:
        prolog = node.prolog(env)
        assert prolog.returncode == 0, env
        if env in USERS_VALUES[:2]:
            one_line(prolog, case=str(env))
        assert node.epilog(env).returncode == 0, env


def test_share_of_the_cap_follows_the_share_of_the_node(node: Node) -> None:
    node.site("memory_cap_bytes = 1000")
    node.sh("echo 'NodeName=n[1-9] CPUs=8' >/run/slurm.conf")
    told = {"SLURM_CONF": "/run/slurm.conf", "SLURM_JOB_CPUS_PER_NODE": "8,2,1"}
    assert silent(node.prolog(told))
    assert node.records()[0]["agent"]["argv"][-4:] == ["--share-bytes", "250", "--share", "2 of 8 CPUs"]
    told["SLURM_CONF"] = "/run/missing.conf"
    assert silent(node.prolog(told, job=8)), "read by slurmd, and away now"
    assert node.records(8)[0]["agent"]["argv"][-4:] == ["--share-bytes", "1000", "--share", ""]


def test_no_agent_is_started_without_room(node: Node) -> None:
    """Told to the job's user; users can fill a node, so it is no error of the node's, strict or not."""
    node.site("strict_prolog = true\nmemory_floor_bytes = 99999999999999")
    assert "job=7 not protected: no memory for its agent: it needs 96 MiB, " in one_line(node.prolog())
    assert node.agents() == []
    assert node.sh("cat /run/gemini-hpc.unprotected/7").startswith("0 no memory for its agent")
    node.site("strict_prolog = true")
    assert silent(node.prolog(SLURM_JOB_RESTART_COUNT="1"))
    assert len(node.agents()) == 1


def test_read_only_cgroups_are_one_line_and_no_failure(node: Node) -> None:
    """A memory hierarchy that cannot be written to: the agent stays in slurmd's cgroup, and is started."""
    done = node.run(["/bin/sh", "-c", "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory && "
                     "mount -t cgroup -o ro,memory cgroup /sys/fs/cgroup/memory"], PATH="/usr/bin:/bin")  # fmt: skip
    if done.returncode:
        pytest.skip("no memory cgroup (v1) on this machine")
    node.site("strict_prolog = true")
    prolog = node.prolog()
    assert (
        "stays in slurmd's cgroup, and counts against its limits: /sys/fs/cgroup/memory is mounted read-only"
        in one_line(prolog)
    )
    assert prolog.returncode == 0 and len(node.agents()) == 1


def test_bad_site_settings(node: Node) -> None:
    node.site("nonsense = 1")
    assert "nonsense" in one_line(node.prolog())
    assert node.agents() == []


def test_other_run_directory(node: Node) -> None:
    node.site('run_dir = "/run/elsewhere"')
    assert silent(node.prolog())
    assert node.exists("/run/elsewhere/7/agent.sock")
    assert silent(node.epilog())
    assert not node.exists("/run/elsewhere/7")


def test_leftovers_of_dead_agents_are_removed(node: Node) -> None:
    assert silent(node.prolog(job=50))
    node.sh(
        f"""
        mkdir -p /run/target; touch /run/target/precious
        cd /run/gemini-hpc
        mkdir 51 52 53 54 other; touch 51/map 51/agent.log; ln -s /run/target 51/link
        cp -a 51 55; chown -hR 61999 55
        chown -hR {BOB} 51 52 53 54
        touch -d '10 minutes ago' 50 51 52 54 55 other
        """
    )
    title = "slurmstepd: [54.0]"
    node.sh(f"setsid -f bash -c 'exec -a \"{title}\" sleep 100' >/dev/null 2>&1")
    node.as_user(BOB, "setsid -f bash -c 'exec -a \"slurmstepd: [52.0]\" sleep 100' >/dev/null 2>&1")
    node.sh("until pgrep -f '^slurmstepd: .54' >/dev/null; do sleep 0.05; done")
    assert silent(node.prolog())
    # 50: its agent lives. 53: too young. 54: a step of it runs, so its agent is about to be started again.
    assert node.sh("ls /run/gemini-hpc").split() == ["50", "53", "54", "7", "other"]
    assert node.exists("/run/target/precious")


def test_leftovers_take_bounded_time(node: Node) -> None:
    node.sh(
        f"""
        mkdir -p /run/gemini-hpc; cd /run/gemini-hpc
        for i in $(seq 100 139); do mkdir $i; done; chown -R {BOB} 1*; touch -d '10 minutes ago' 1*
        """
    )
    began = time.monotonic()
    assert silent(node.prolog())
    assert time.monotonic() - began < 3
    assert len(node.sh("ls /run/gemini-hpc").split()) >= 41 - 8
    for _ in range(20):
        node.prolog()
    assert node.sh("ls /run/gemini-hpc").split() == ["7"]


def _make_job_dir(node: Node, make: str, job: int = 7) -> None:
    directory = f"/run/gemini-hpc/{job}"
    node.sh(
        f"mkdir -p {directory}; cd {directory}; {make}; "
        f"chown -hR {ALICE}:{ALICE_GID} {directory}; chmod 700 {directory}"
    )


NOTES = "/run/gemini-hpc.unprotected"


def test_why_is_left_for_the_jobs_user(tattling_node: Node) -> None:
    """By the script alone, and gone with the epilog."""
    tattling_node.sh("umount /opt/gemini-hpc/venv")
    tattling_node.prolog(job=71)
    assert tattling_node.sh(f"cat {NOTES}/71").startswith("0 /opt/gemini-hpc/venv/bin/python3 is missing")
    assert " job=71 restart=0 /opt/gemini-hpc/venv/bin/python3 is missing" in tattling_node.sh(f"cat {NOTES}/log")
    assert tattling_node.sh(f"stat -c %u:%a {NOTES} {NOTES}/71").split() == ["0:755", "0:644"]
    tattling_node.epilog(job=71)
    assert not tattling_node.exists(f"{NOTES}/71")


def test_why_is_left_by_the_owners_side_too(node: Node) -> None:
    """It is the job's owner there, and cannot write where root's words stand."""
    node.site("attach_timeout_s = 0.5\n")
    node.mode("silent")
    node.prolog()
    note = node.sh(f"cat {NOTES}/7")
    assert note.startswith("0 ") and note.count("\n") == 1 and len(note) < 260
    assert node.sh(f"stat -c %u:%a {NOTES}/7").strip() == "0:644"
    assert "ermission denied" in node.as_user(ALICE, f"echo x >{NOTES}/7")


UNAGREED = "the agents of the job's nodes did not agree in time"


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        (["n2"], "no agent answers on n2"),
        ([f"n{k}" for k in range(2, 14)], "no agent answers on n2, n3, n4, n5, n6, n7, n8, n9 and 4 more"),
        ([], UNAGREED),
        (None, UNAGREED),
        ("n2", UNAGREED),
        ({"n2": 1}, UNAGREED),
        ([1, None, ["n2"], "", "n2;reboot", "n2\n9 other words", "x" * 65], UNAGREED),
        (["$(id)", "n3"], "no agent answers on n3"),
    ],
)
def test_a_disagreement_names_the_nodes_without_an_agent(node: Node, absent: object, words: str) -> None:
    """This node is in order: its administrator hears nothing, and the plugin does not blame it."""
    node.mode("ready " + json.dumps({"op": "ready", "state": "unmapped", "absent": absent}))
    assert silent(node.prolog())
    assert node.sh(f"cat {NOTES}/7") == f"0 elsewhere: {words}\n"


@pytest.mark.parametrize(
    ("sealed", "remedy"),
    [
        (17, "; scontrol requeue 7 lets the job resume from step 17"),
        *((hostile, "") for hostile in (0, -1, 1 << 63, 1.5, "17; rm", [17], None)),
    ],
)
def test_the_remedy_names_what_agents_hold(node: Node, sealed: object, remedy: str) -> None:
    node.mode("ready " + json.dumps({"op": "ready", "state": "unmapped", "absent": ["n2"], "sealed": sealed}))
    assert silent(node.prolog())
    assert node.sh(f"cat {NOTES}/7") == f"0 elsewhere: no agent answers on n2{remedy}\n"


def test_what_an_earlier_incarnation_left_goes(node: Node) -> None:
    node.sh(f"mkdir -m 755 {NOTES}; echo '0 of before' >{NOTES}/7; ln -s /etc/passwd {NOTES}/.7")
    assert node.prolog().returncode == 0
    assert not node.exists(f"{NOTES}/7") and not node.exists(f"{NOTES}/.7")
    assert "root" in node.sh("head -1 /etc/passwd")


def test_a_place_for_reasons_that_is_not_roots_is_left_alone(node: Node) -> None:
    for make in ("mkdir -m 777 {}", f"mkdir {{0}}; chown {ALICE} {{0}}", "ln -s /etc {}", "touch {}"):
        node.sh(make.format(NOTES))
        done = node.prolog(uid=61234)
        assert done.returncode == 0 and "uid 61234 is not known" in done.stderr, make
        assert not node.exists("/etc/7") and not node.exists("/etc/log"), make
        node.sh(f"rm -rf {NOTES}")


# ---- the agent lives, and its directory is gone --------------------------------------------------------------

UNMOUNTED = {"of the job": "umount -l /run/gemini-hpc/7", "of all jobs": "umount -l /run/gemini-hpc"}


@pytest.mark.parametrize("unmount", UNMOUNTED.values(), ids=UNMOUNTED.keys())
def test_an_agent_whose_directory_is_unmounted_is_found_again(node: Node, unmount: str) -> None:
    node.mode("moves")
    assert silent(node.prolog())
    before = node.agents()
    node.sh(unmount)
    assert silent(node.prolog(SLURM_JOB_RESTART_COUNT="1"))
    assert node.agents() == before and len(before) == 1
    first, second = [record["message"] for record in node.records()]
    assert (first["restart"], second["restart"]) == (0, 1) and "bereft" not in second
    assert node.sh("stat -c '%u %a' /run/gemini-hpc/7") == f"{ALICE} 700\n"


@pytest.mark.parametrize("how", ["it hangs", "it has died"])
def test_an_agent_that_is_lost_with_its_directory_is_replaced_and_told(node: Node, how: str) -> None:
    """There are never two: what does not come into the new directory is ended."""
    assert silent(node.prolog())
    (before,) = node.agents()
    if how == "it has died":
        node.sh(f"kill -9 {before}")
    node.sh("umount -l /run/gemini-hpc/7")
    assert "held here is lost" in one_line(node.prolog(SLURM_JOB_RESTART_COUNT="1"))
    (now,) = node.agents()
    (record,) = node.records()
    assert now != before and record["message"]["bereft"] is True
    node.mode("detach")
    assert silent(node.prolog(SLURM_JOB_RESTART_COUNT="2")) and node.agents() == [now]


def test_an_agent_that_has_let_go_is_not_taken_for_one_that_is_lost(node: Node) -> None:
    """It completes a version on the tier, and its directory has been removed: nobody ends it, nothing is told."""
    assert silent(node.prolog())
    node.sh("umount -l /run/gemini-hpc/7")
    node.sh('sed -i \'s/"released": false/"released": true/\' /run/gemini-hpc.agents/7')
    (before,) = node.agents()
    assert silent(node.prolog(SLURM_JOB_RESTART_COUNT="1"))
    assert before in node.agents() and len(node.agents()) == 2


def test_processes_that_only_call_themselves_the_agent_keep_no_job_from_one(node: Node) -> None:
    """Where agents have no cgroup: the owner's own is waited for and ended, another user's is nobody's."""
    assert silent(node.prolog())
    node.sh(f"kill -9 {node.agents()[0]}; umount -l /run/gemini-hpc/7")
    for uid in (ALICE, BOB):
        node.sh(
            f"setsid -f setpriv --reuid={uid} --regid={uid + 100} --clear-groups /usr/bin/python3 "
            f"-c 'import time; time.sleep(60)' gemini_hpc.agent --job 7 --uid {ALICE} x </dev/null >/dev/null 2>&1"
        )
    assert "is lost" in one_line(node.prolog(SLURM_JOB_RESTART_COUNT="1"))
    (record,) = node.records()
    assert record["message"]["restart"] == 1 and record["agent"]["pid"] in node.agents()
    assert node.sh(f"pgrep -u {ALICE} -f time.sleep || :") == "" != node.sh(f"pgrep -u {BOB} -f time.sleep || :")
