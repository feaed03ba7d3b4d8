"""What a job's owner, or another user of the node, can try against the root of prolog and epilog, by the classes of
flaws that Slurm and its surroundings have had."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from .conftest import ALICE, ALICE_GID, BOB, Node
from .expect import one_line, silent

DIRECTORY = "/run/gemini-hpc/7"
CLEAN = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}

# ---- users' environment in root's scripts: CVE-2017-15566, CVE-2021-31215 --------------------------------

LURE = "/run/lure"
LURES = {
    "BASH_ENV": f"{LURE}/script",
    "ENV": f"{LURE}/script",
    "CDPATH": LURE,
    "IFS": "/",
    "PATH": LURE,
    "PS4": "$(touch /run/pwned)",
    "SHELLOPTS": "xtrace",
    "LD_LIBRARY_PATH": LURE,
    "GCONV_PATH": LURE,
    "PYTHONHOME": LURE,
    "PYTHONPATH": LURE,
    "PYTHONSTARTUP": f"{LURE}/script.py",
    "PYTHONINSPECT": "1",
    "PYTHONBREAKPOINT": "os.system",
    "PYTHONEXECUTABLE": f"{LURE}/python3",
    "PYTHONUSERBASE": LURE,
    "SLURM_CONF": f"{LURE}/etc/slurm.conf",
    "SPANK_LD_PRELOAD": f"{LURE}/lib.so",
    "HOME": LURE,
    "TMPDIR": LURE,
    "TZ": f"{LURE}/tz",
}


def test_environment_of_users_reaches_nobody(node: Node) -> None:
    node.sh(
        f"""
        mkdir -p {LURE}/etc {LURE}/bin {LURE}/gemini_hpc
        for name in env timeout logger python3 setpriv sh test '[' printf scontrol bin/scontrol bin/squeue; do
            printf '#!/bin/sh\\ntouch /run/pwned\\n' >{LURE}/$name; chmod 755 {LURE}/$name
        done
        echo 'touch /run/pwned' >{LURE}/script
        for name in script sitecustomize usercustomize json socket gemini_hpc/__init__; do
            echo 'open("/run/pwned", "w")' >{LURE}/$name.py
        done
        chown -R {ALICE} {LURE}
        """
    )
    node.mode("hold 0")
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(ALICE), "SLURM_JOB_NUM_NODES": "3", "SLURM_NODELIST": "n[1-3]"}
    env |= {"SLURMD_NODENAME": "n2", "SPANK_GEMINI_REPLICAS": "2", "SLURM_JOB_RESTART_COUNT": "1"}
    lures = ["/usr/bin/env", *(f"{name}={value}" for name, value in LURES.items())]
    assert silent(node.run([*lures, "/opt/scripts/prolog"], **env))
    assert silent(node.run([*lures, "/opt/scripts/epilog"], **env))
    assert node.exists("/run/held"), "root's own helper ran too"
    environments = [record["agent"]["env"] for record in node.records()]
    assert environments == [CLEAN, CLEAN]
    assert not node.exists("/run/pwned")


# ---- a group that the other side names: CVE-2018-10995 ---------------------------------------------------


def test_groups_come_from_the_name_service(node: Node) -> None:
    assert silent(node.prolog(SLURM_JOB_GID="0", SLURM_JOB_GROUP="root", SLURM_JOB_USER="root"))
    (record,) = node.records()
    assert record["agent"]["gids"] == [ALICE_GID] * 3 and 0 not in record["agent"]["groups"]
    assert node.sh(f"stat -c '%u %g' {DIRECTORY}").split() == [str(ALICE), str(ALICE_GID)]


# ---- root goes on where it could not become the user: CVE-2019-19728 -------------------------------------

HANDICAPS = {
    "may not change its uid": (["setpriv", "--bounding-set=-setuid"], "could not become uid"),
    "may not change its groups": (["setpriv", "--bounding-set=-setgid"], "could not become uid"),
    "keeps its rights when it changes": (["setpriv", "--securebits=+no_setuid_fixup"], "could become root again"),
    "knows no other uid": (["unshare", "--user", "--map-root-user"], "Invalid argument"),
}


@pytest.mark.parametrize("script", ["prolog", "epilog"])
@pytest.mark.parametrize("name", HANDICAPS)
def test_root_that_cannot_become_the_owner_does_nothing(node: Node, name: str, script: str) -> None:
    handicap, words = HANDICAPS[name]
    if script == "epilog":
        node.mode("detach")
        assert silent(node.prolog())
    before, records = node.agents(), node.records()
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(ALICE), "SLURM_JOB_NUM_NODES": "3", "SLURM_NODELIST": "n[1-3]"}
    env |= {"SLURMD_NODENAME": "n2", "SPANK_GEMINI_REPLICAS": "2"}
    done = node.run([*handicap, f"/opt/scripts/{script}"], **env)
    if name == "knows no other uid":
        # Nor has it the rights to mount; in the epilog the directory is a stranger's.
        assert done.returncode == 0 and (words in done.stderr or (script == "epilog" and not done.stderr))
    else:
        assert words in one_line(done)
    assert (node.agents(), node.records()) == (before, records)


def test_users_limits_cost_users_alone(node: Node) -> None:
    """The owner may run no further process: no agent, one line, and no node is drained, strict or not."""
    node.site("strict_prolog = true")
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(ALICE), "SLURM_JOB_NUM_NODES": "3", "SLURM_NODELIST": "n[1-3]"}
    env |= {"SLURMD_NODENAME": "n2", "SPANK_GEMINI_REPLICAS": "2"}
    assert "not protected" in one_line(node.run(["prlimit", "--nproc=1:1", "/opt/scripts/prolog"], **env))
    assert node.agents() == []


# ---- root in directories that users write to: CVE-2016-10030, CVE-2023-41914 -----------------------------


def test_hard_links_and_other_peoples_directories(node: Node) -> None:
    """Removing a name is all that root does: no owner, mode or content of what stands behind it is touched."""
    assert silent(node.prolog())
    node.sh(
        f"""
        echo secret >/run/precious; chmod 640 /run/precious
        mkdir -p {DIRECTORY}/theirs; touch {DIRECTORY}/theirs/precious; chown -R {BOB} {DIRECTORY}/theirs
        mkdir -p {DIRECTORY}/mounted; mount -t tmpfs tmpfs {DIRECTORY}/mounted; touch {DIRECTORY}/mounted/precious
        chown {ALICE} {DIRECTORY}/mounted
        ln /etc/passwd {DIRECTORY}/hard 2>/dev/null || :
        """
    )
    assert "another owner or file system" in one_line(node.prolog(uid=BOB))
    assert node.exists(f"{DIRECTORY}/theirs/precious") and node.exists(f"{DIRECTORY}/mounted/precious")
    assert node.sh("stat -c '%U %a' /run/precious").split() == ["root", "640"]


def test_who_fills_the_run_directory_fills_that_alone(node: Node) -> None:
    assert silent(node.prolog())
    said = node.as_user(ALICE, f"head -c 200000000 /dev/zero >{DIRECTORY}/fill; echo $?")
    assert "No space left" in said
    node.sh("head -c 5000000 /dev/zero >/run/of-root")
    node.as_user(ALICE, f"rm {DIRECTORY}/fill; i=0; while : >{DIRECTORY}/$i; do i=$((i+1)); done")
    node.sh("touch /run/another-of-root")
    options = node.sh("findmnt -no OPTIONS /run/gemini-hpc").strip().split(",")
    assert {"nosuid", "nodev", "noexec"} <= set(options)
    began = time.monotonic()
    node.epilog()
    one_line(node.prolog(job=7, uid=BOB))
    assert time.monotonic() - began < 12, "a directory of 16,000 files takes several times, each of them bounded"
    assert silent(node.prolog(job=8, uid=BOB)) or node.agents()


def test_first_jobs_of_a_node_at_the_same_time(node: Node) -> None:
    """None of them makes its directory below a mount that comes a moment later."""
    enter = ["nsenter", "-t", str(node.pid), "-m", "-p", "-w/", "--"]
    env = {"SLURM_JOB_UID": str(ALICE), "SLURM_JOB_NUM_NODES": "3", "SLURM_NODELIST": "n[1-3]"}
    env |= {"SLURMD_NODENAME": "n2", "SPANK_GEMINI_REPLICAS": "2"}
    jobs = [str(job) for job in range(20, 26)]
    started = [subprocess.Popen([*enter, "/opt/scripts/prolog"], env=env | {"SLURM_JOB_ID": job}) for job in jobs]
    assert [process.wait(30) for process in started] == [0] * len(jobs)
    assert node.sh("ls /run/gemini-hpc").split() == jobs
    assert all(node.records(int(job)) for job in jobs)


# ---- forged words of the agent ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "held"),
    [("1", "1"), ("0", "0"), ("2", ""), ("-1", ""), ('"0"', ""), ("null", ""), ("1e9", ""), ("[0]", "")],
)
def test_site_01_restart_count_is_slurmds(node: Node, said: str, held: str) -> None:
    """The agent, its owner's, may choose between slurmd's restart count and the one before, and nothing else."""
    node.mode(f"hold {said}")
    assert silent(node.prolog(SLURM_JOB_RESTART_COUNT="1"))
    assert silent(node.epilog(SLURM_JOB_RESTART_COUNT="1"))
    text = node.sh("cat /run/held 2>/dev/null || :").strip()
    assert text == (f"--job 7 --restart {held} --node n2 --nodes n[1-3]" if held else "")


def test_nobody_is_killed_for_a_process_that_is_not_seen(node: Node) -> None:
    """A hung agent outside this process namespace has no number here; to kill number 0 is to kill oneself."""
    assert silent(node.prolog())
    node.sh(f"kill -9 {' '.join(map(str, node.agents()))}; rm {DIRECTORY}/agent.sock")
    path = f"/proc/{node.pid}/root{DIRECTORY}/agent.sock"
    code = (
        "import os, socket, sys, time\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        f"s.bind({path!r}); os.chown({path!r}, {ALICE}, {ALICE}); os.setresuid({ALICE}, {ALICE}, {ALICE})\n"
        "s.listen(8); print('listening', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as hung:
        assert hung.stdout is not None and hung.stdout.readline() == "listening\n"
        done = node.prolog(SLURM_JOB_RESTART_COUNT="1")
        hung.kill()
    assert silent(done) and len(node.agents()) == 1
    assert os.path.exists(f"/proc/{node.pid}")


def test_lock_that_somebody_keeps(node: Node) -> None:
    """Where the run directory's parent is not root's, others can hold the lock: the prolog waits for a moment."""
    node.sh("mkdir -m 1777 /run/open")
    node.site('run_dir = "/run/open/gemini"')
    node.as_user(BOB, "touch /run/open/gemini.lock; setsid -f flock /run/open/gemini.lock sleep 60 >/dev/null 2>&1")
    began = time.monotonic()
    done = node.prolog()
    assert done.returncode == 0 and time.monotonic() - began < 8
    assert silent(done) or "not protected" in one_line(done)
