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

pytestmark = pytest.mark.slow

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


@pytest.mark.witness("a user's environment reaches no script of root's")
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
    assert silent(node.run([*lures, "/opt/scripts/prolog"], env))
    assert silent(node.run([*lures, "/opt/scripts/epilog"], env))
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


def test_root_that_cannot_become_the_owner_does_nothing(node: Node) -> None:
    env = {"SLURM_JOB_UID": str(ALICE), "SLURM_JOB_NUM_NODES": "3", "SLURM_NODELIST": "n[1-3]"}
    env |= {"SLURMD_NODENAME": "n2", "SPANK_GEMINI_REPLICAS": "2"}
    node.mode("detach")
    cases = [(script, name) for script in ("prolog", "epilog") for name in HANDICAPS]
    for job, (script, name) in enumerate(cases, 7):
        handicap, words = HANDICAPS[name]
        if script == "epilog":
            assert silent(node.prolog(job=job)), name
        before, records = node.agents(), node.records(job)
        done = node.run([*handicap, f"/opt/scripts/{script}"], env, SLURM_JOB_ID=str(job))
        case = f"{script} that {name}"
        if name == "knows no other uid":
            # Nor has it the rights to mount; in the epilog the directory is a stranger's.
            told = words in done.stderr or (script == "epilog" and not done.stderr)
            assert done.returncode == 0 and told, f"{case}: {done}"
        else:
            assert words in one_line(done, case=case), case
        assert (node.agents(), node.records(job)) == (before, records), case


def test_users_limits_cost_users_alone(node: Node) -> None:
    """The owner may run no further process: no agent, one line, and no node is drained, strict or not."""
    node.site("strict_prolog = true")
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(ALICE), "SLURM_JOB_NUM_NODES": "3", "SLURM_NODELIST": "n[1-3]"}
    env |= {"SLURMD_NODENAME": "n2", "SPANK_GEMINI_REPLICAS": "2"}
    assert "not protected" in one_line(node.run(["prlimit", "--nproc=1:1", "/opt/scripts/prolog"], env))
    assert node.agents() == []


# ---- root in directories that users write to: CVE-2016-10030, CVE-2023-41914 -----------------------------


@pytest.mark.parametrize("mounted", [True, False], ids=["as it is now", "of an older release"])
def test_hard_links_and_other_peoples_directories(node: Node, mounted: bool) -> None:
    """Removing a name is all that root does: no owner, mode or content of what stands behind it is touched."""
    if mounted:
        assert silent(node.prolog())
    else:
        node.sh(f"mkdir -p {DIRECTORY}; chown {ALICE} {DIRECTORY}; chmod 700 {DIRECTORY}")
    node.sh(
        f"""
        echo secret >/run/precious; chmod 640 /run/precious
        mkdir -p {DIRECTORY}/theirs /run/mounted; touch {DIRECTORY}/theirs/precious; chown -R {BOB} {DIRECTORY}/theirs
        mkdir -p {DIRECTORY}/mounted; mount -t tmpfs tmpfs /run/mounted; touch /run/mounted/precious
        chown {ALICE} {DIRECTORY}/mounted; mount --bind /run/mounted {DIRECTORY}/mounted
        ln /etc/passwd {DIRECTORY}/hard 2>/dev/null || :
        """
    )
    done = node.prolog(uid=BOB)
    if mounted:
        assert silent(done), "the file system goes as a whole, what was mounted in it stays where else it is"
        assert node.sh(f"stat -c %u {DIRECTORY}") == f"{BOB}\n"
    else:
        assert "another owner or file system" in one_line(done)
        assert node.exists(f"{DIRECTORY}/theirs/precious") and node.exists(f"{DIRECTORY}/mounted/precious")
    assert node.exists("/run/mounted/precious")
    assert node.sh("stat -c '%U %a' /run/precious").split() == ["root", "640"]


def test_who_fills_the_own_directory_fills_nobody_elses(node: Node) -> None:
    """Bytes or files: neither root nor another job notices, and what was filled is gone with the job at once."""
    node.site("strict_prolog = true")
    assert silent(node.prolog())
    said = node.as_user(ALICE, f"head -c 200000000 /dev/zero >{DIRECTORY}/fill; echo $?")
    assert "No space left" in said
    node.sh("head -c 5000000 /dev/zero >/run/gemini-hpc/of-root; rm /run/gemini-hpc/of-root")
    files = f"rm {DIRECTORY}/fill; mkdir {DIRECTORY}/a; i=0; while : >{DIRECTORY}/a/$i; do i=$((i+1)); done"
    assert "No space left" in node.as_user(ALICE, files)
    node.sh("touch /run/another-of-root")
    assert int(node.sh("df --output=iavail /run/gemini-hpc | tail -1")) > 16000
    for mount in ("/run/gemini-hpc", DIRECTORY):
        options = node.sh(f"findmnt -no OPTIONS {mount}").strip().split(",")
        assert {"nosuid", "nodev", "noexec"} <= set(options)
    assert silent(node.prolog(job=8, uid=BOB)) and len(node.records(8)) == 1
    assert silent(node.prolog(job=7, uid=BOB)), "another owner's job of the same number"
    assert node.sh(f"ls {DIRECTORY}/a 2>/dev/null || :") == ""


@pytest.mark.parametrize("fills", ["bytes", "files"])
def test_full_run_directory_is_swept_first_and_drains_nobody(node: Node, fills: str) -> None:
    """Of plain directories, as an older release made them, on a file system that is full to the last."""
    node.site("strict_prolog = true")
    node.sh(
        f"""
        mkdir -p /run/gemini-hpc; mount -t tmpfs -o mode=755,size=1m,nr_inodes=128 gemini-hpc /run/gemini-hpc
        mkdir {DIRECTORY} /run/gemini-hpc/6; chown {ALICE} {DIRECTORY} /run/gemini-hpc/6
        """
    )
    how = "cat /dev/zero >{0}/fill" if fills == "bytes" else "i=0; while : >{0}/$i; do i=$((i+1)); done"
    node.as_user(ALICE, how.format("/run/gemini-hpc/6"))
    first = node.prolog(job=9, uid=BOB)
    assert first.returncode == 0, "no user may have a node drained"
    node.sh("touch -d '10 minutes ago' /run/gemini-hpc/6")
    assert silent(node.prolog(job=10, uid=BOB)) and len(node.records(10)) == 1
    assert not node.exists("/run/gemini-hpc/6")


# What setuid fusermount does for a user; then nobody ever answers the kernel.
FUSE = """
import ctypes, os, sys, time
fd = os.open("/dev/fuse", os.O_RDWR)
uid = sys.argv[2]
data = f"fd={fd},rootmode=40000,user_id={uid},group_id={uid},allow_other"
assert ctypes.CDLL(None).mount(b"evil", sys.argv[1].encode(), b"fuse", 6, data.encode()) == 0
os.read(fd, 65536)
print("mounted", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("where", [DIRECTORY, f"{DIRECTORY}/inside"])
@pytest.mark.parametrize("mounted", [True, False], ids=["as it is now", "of an older release"])
def test_file_system_that_never_answers(node: Node, where: str, mounted: bool) -> None:
    """Mounted by the owner over what is the owner's: root detaches it and does not look through it."""
    if mounted:
        assert silent(node.prolog())
    else:
        node.sh(f"mkdir -p {DIRECTORY}; touch -d '10 minutes ago' {DIRECTORY}")
    node.sh(f"mkdir -p {where}; chown {ALICE} {DIRECTORY} {where}; test -e /dev/fuse || mknod /dev/fuse c 10 229")
    enter = ["nsenter", "-t", str(node.pid), "-m", "-p", "-w/", "--"]
    argv = [*enter, "/usr/bin/python3", "-c", FUSE, where, str(ALICE)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == "mounted\n"
            began = time.monotonic()
            assert node.prolog(job=8, uid=BOB).returncode == 0 and len(node.records(8)) == 1, (
                "another job on the node"
            )
            done = node.prolog(job=7, uid=BOB)
            assert time.monotonic() - began < 20
            if mounted or where == DIRECTORY:
                assert silent(done) and node.sh(f"stat -c %u {DIRECTORY}") == f"{BOB}\n"
                assert "evil" not in node.sh("cat /proc/mounts")
            else:
                assert "another owner or file system" in one_line(done), "told, and nothing hangs"
            assert node.epilog(job=7, uid=BOB).returncode == 0
        finally:
            server.kill()
            node.sh(f"umount -l {where} 2>/dev/null || :")


def test_epilog_of_a_job_that_the_ledger_does_not_know_asks_no_file_system_of_its_owner(node: Node) -> None:
    assert silent(node.prolog())
    node.sh("rm -f /run/gemini-hpc.agents/7; test -e /dev/fuse || mknod /dev/fuse c 10 229")
    enter = ["nsenter", "-t", str(node.pid), "-m", "-p", "-w/", "--"]
    argv = [*enter, "/usr/bin/python3", "-c", FUSE, DIRECTORY, str(ALICE)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == "mounted\n"
            began = time.monotonic()
            assert node.epilog().returncode == 0
            assert time.monotonic() - began < 8
        finally:
            server.kill()
            node.sh(f"umount -l {DIRECTORY} 2>/dev/null || :")


def test_a_directory_that_its_owner_has_dated_into_the_future_is_removed(node: Node) -> None:
    """Root's sweep removes what is older than a minute, and what says that it is of tomorrow."""
    node.sh(f"mkdir -p {DIRECTORY}; chown {ALICE} {DIRECTORY}; touch -d 2200-01-01 {DIRECTORY}")
    assert silent(node.prolog(job=8, uid=BOB))
    assert not node.exists(DIRECTORY)


# As FUSE, but it says what it can do: who has asked it for a file after that cannot be killed.
FUSE_ONCE = FUSE.replace(
    "os.read(fd, 65536)\n",
    """
import struct
asked = os.read(fd, 65536)
number = struct.unpack_from("<Q", asked, 8)[0]
can = struct.pack("<IIIIHHIIHHI28x", 7, 31, 65536, 0, 12, 9, 65536, 1, 32, 0, 0)
os.write(fd, struct.pack("<IiQ", 16 + len(can), 0, number) + can)
""",
).replace("time.sleep(100)", "os.read(fd, 65536)\ntime.sleep(100)")


@pytest.mark.parametrize("step", [True, False], ids=["of a running job", "of one that has ended"])
def test_file_system_that_lets_root_hang_for_good(node: Node, step: bool) -> None:
    """Mounted in the job's directory, where the agent's socket was. Neither another job's prolog nor the own job's
    epilog waits for it, and who hangs there holds no lock and no output of slurmd's."""
    assert silent(node.prolog())
    where = f"{DIRECTORY}/agent.sock"
    (agent,) = node.agents()
    node.sh(f"kill -STOP {agent}; rm {where}; mkdir {where}; chown {ALICE} {where}")
    node.sh(f"test -e /dev/fuse || mknod /dev/fuse c 10 229; touch -d '10 minutes ago' {DIRECTORY}")
    enter = ["nsenter", "-t", str(node.pid), "-m", "-p", "-w/", "--"]
    argv = [*enter, "/usr/bin/python3", "-c", FUSE_ONCE, where, str(ALICE)]
    title = ["sh", "-c", "exec -a 'slurmstepd: [7.0]' sleep 60"]
    stepd = subprocess.Popen([*enter, "bash", *title[1:]]) if step else None
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == "mounted\n"
            began = time.monotonic()
            assert silent(node.prolog(job=8, uid=BOB)) and len(node.records(8)) == 1
            assert time.monotonic() - began < 5.0
            began = time.monotonic()
            assert node.epilog().returncode == 0 and time.monotonic() - began < 5.5
            assert silent(node.epilog(job=8, uid=BOB))
            assert time.monotonic() - began < 10.0
        finally:
            server.kill()
            if stepd is not None:
                stepd.kill()
                stepd.wait()
            node.sh(f"umount -l {where} 2>/dev/null || :; kill -KILL {agent} 2>/dev/null || :")


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


def test_restart_count_is_slurmds(node: Node) -> None:
    """The agent, its owner's, may choose between slurmd's restart count and the one before, and nothing else."""
    words = {"1": "1", "0": "0", "2": "", "-1": "", '"0"': "", "null": "", "1e9": "", "[0]": ""}
    for job, (said, held) in enumerate(words.items(), 7):
        node.mode(f"hold {said}")
        assert silent(node.prolog(job=job, SLURM_JOB_RESTART_COUNT="1")), said
        assert silent(node.epilog(job=job, SLURM_JOB_RESTART_COUNT="1")), said
        text = node.sh("cat /run/held 2>/dev/null || :; rm -f /run/held").strip()
        assert text == (f"--job {job} --restart {held} --node n2 --nodes n[1-3]" if held else ""), said


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
