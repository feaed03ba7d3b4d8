"""The canary: what it refuses, that what it takes away comes back in every case, and one on a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from gemini_hpc.cli import canary as verb
from gemini_hpc.cli import demo
from gemini_hpc.config import Settings
from gemini_hpc.controller.fencing import REASON
from gemini_hpc.devcluster import Cluster
from gemini_hpc.doctor import canary
from gemini_hpc.doctor.canary import OWN_REASON, Taken, is_own
from gemini_hpc.doctor.examine import examine
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.slurm.facts import Node
from gemini_hpc.slurm.text import parse_node


def node(name: str, state: str = "IDLE", reason: str = "") -> Node:
    more = f" Reason={reason}" if reason else ""
    return parse_node(f"NodeName={name} NodeAddr={name} CPUTot=4 State={state} Partitions=debug{more}")


# ---- what is refused -----------------------------------------------------------------------------------


class Site(HostFacts):
    """A site where a canary may run."""

    def __init__(self, program: Path, **settings: Any) -> None:
        super().__init__("/nonexistent/gemini.toml", "controller")
        given = {"controller_host": "ctl", "canary_program": str(program)} | settings
        self._known["settings"] = Settings(**given)
        self._known["nodes"] = {n: node(n) for n in ("n1", "n2", "n3")}

    def ask_slurm(self, question: Any) -> Any:
        return {"debug": "UP", "closed": "DOWN"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n[ ! -e {tmp_path}/fails ] || exit 3\n')
    path.chmod(0o755)
    return path


def calls(directory: Path) -> list[str]:
    path = directory / "calls"
    return path.read_text().splitlines() if path.exists() else []


def refusal(site: Site, partition: str = "debug", user: str = "nobody") -> str:
    try:
        verb.prepare(site, partition, user)
    except verb.RefusedError as exc:
        return str(exc)
    return ""


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's directory below /tmp is a place of root's."""
    monkeypatch.setattr(verb, "find_program_problem", lambda path: "" if Path(path).exists() else "no such file")
    monkeypatch.setattr("os.geteuid", lambda: 0)


@pytest.mark.usefixtures("trusted")
def test_what_is_refused(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is done: no job, no node taken away."""
    assert refusal(Site(program)) == "" and calls(tmp_path) == [f"check n{n} 0" for n in (1, 2, 3)]
    assert "canary_program is not set" in refusal(Site(program, canary_program=""))
    assert "no such file" in refusal(Site(program, canary_program="/nonexistent"))
    assert 'mode = "observe"' in refusal(Site(program, mode="observe"))
    other = {"mode": "canary", "canary_partitions": ("gpu",)}
    assert "debug is not in canary_partitions" in refusal(Site(program, **other))
    assert "controller_host is empty" in refusal(Site(program, controller_host=""))
    assert "not UP" in refusal(Site(program), "closed") and "not UP" in refusal(Site(program), "gqu")
    assert "no user" in refusal(Site(program), user="") and "a user's" in refusal(Site(program), user="root")
    small = Site(program)
    small._known["nodes"]["n3"] = node("n3", "ALLOCATED")
    assert "2 nodes of debug are idle, and the canary needs 3" in refusal(small)
    (tmp_path / "fails").touch()
    assert "could not be brought back" in refusal(Site(program))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "only root" in refusal(Site(program))


def test_the_example(tmp_path: Path) -> None:
    """It says what it would do on the node; here with an ssh that runs nothing."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift 4\necho "$@"\n')
    ssh.chmod(0o755)
    example = Path(__file__).resolve().parents[2] / "examples/canary_slurmd"
    found = {}
    for words in ("check n2 0", "stop n2 7", "start n2 7", "reboot n2 7", "stop n2 x;y"):
        argv, env = [str(example), *words.split()], {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        found[words.split()[0] + words[-1]] = (done.returncode, done.stdout.splitlines())
    kill = "root@n2 pkill -KILL -f 'gemini_hp[c].agent --job 7 ' || true"
    assert found == {
        "check0": (0, ["root@n2 systemctl is-active --quiet slurmd"]),
        "stop7": (0, ["root@n2 systemctl stop slurmd", kill]),
        "start7": (0, ["root@n2 systemctl start slurmd"]),
        "reboot7": (2, []),
        "stopy": (2, []),
    }


# ---- what is taken away comes back ---------------------------------------------------------------------

TAKEN = Taken("n2", 7, "/x", 1000.0)


def test_only_its_own_down() -> None:
    own = (f"{OWN_REASON}, job 7 [root@now]", f"{REASON}, job 7 restart 0 [slurm@now]", "Not responding [slurm@now]")
    for reason in own:
        assert is_own(TAKEN, node("n2", "DOWN+DRAIN", reason))
        assert not is_own(TAKEN, node("n2", "IDLE", reason)), "a reason outlives a RESUME"
    for reason in ("fan broken", f"{REASON}, job 77 restart 0", "gemini-hpc: sick", ""):
        assert not is_own(TAKEN, node("n2", "DOWN+DRAIN", reason))


ENDS = {
    "it has done": "pass",
    "it fails": "raise RuntimeError('fault')",
    "Ctrl-C": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)",
    "it hangs": "os.waitpid(guard._pid, 0)",
}
CANARY = """
import os, signal, sys, time
from gemini_hpc.doctor import canary

async def back(taken):
    return ""

canary._wait_until_back = back
canary.find_tool = lambda name: "/bin/true"
canary.LONGEST_S = float(sys.argv[3])
taken = canary.Taken("n2", 7, sys.argv[1], time.time())
guard = canary.Guard(taken, sys.argv[2])
try:
    canary.call_program(taken.program, "stop", taken.node, taken.job)
    {end}
finally:
    guard.undo()
"""


@pytest.mark.parametrize("end", ENDS)
def test_slurmd_is_started_again_however_the_canary_ends(end: str, program: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    code = CANARY.replace("{end}", ENDS[end])
    longest = "1" if end == "it hangs" else "60"
    argv = [sys.executable, "-c", code, str(program), str(state), longest]
    subprocess.run(argv, timeout=30, capture_output=True, check=False)
    until(lambda: not state.exists(), 20)
    assert calls(tmp_path) == ["stop n2 7", "start n2 7"]


@pytest.mark.parametrize("kind", ["pipe", "link", "no JSON", "no object"])
def test_a_log_that_is_none(kind: str, tmp_path: Path) -> None:
    log, other = tmp_path / "loss.jsonl", tmp_path / "other"
    other.write_text('{"step": 1}\n')
    if kind == "pipe":
        os.mkfifo(log)
    elif kind == "link":
        log.symlink_to(other)
    else:
        log.write_text("root:x\n" if kind == "no JSON" else "7\n")
    run = demo.TrainingRun(Site(tmp_path), 7, tmp_path, 1)  # type: ignore[arg-type]
    if kind == "pipe":
        assert run.read_log() == []
        return
    with pytest.raises(demo.DemoFailed, match="no log of a training"):
        run.read_log()


def test_what_cannot_be_undone_is_said_and_kept(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next canary, and doctor, find it in the file."""
    monkeypatch.setattr(canary, "TRY_PAUSE_S", 0.01)
    monkeypatch.setattr(canary, "find_tool", lambda name: "/bin/true")
    state, said = tmp_path / "state", list[str]()
    taken = Taken("n2", 7, str(program), 1000.0)
    canary.Guard._write(taken, str(state))
    (tmp_path / "fails").touch()
    assert not canary.undo(taken, said.append, str(state))
    assert "NOT undone" in said[-1] and len(calls(tmp_path)) == canary.TRIES
    assert os.geteuid() or canary.read_taken(str(state)) == taken


def test_doctor_tells_of_it(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> str:
        site = Site(program)
        monkeypatch.setattr(site, "require_root", lambda what: None)
        [found] = examine(site, ["leftovers.canary"])
        return found.status

    taken = Taken("n2", 7, str(program), time.time())
    monkeypatch.setattr(canary, "read_taken", lambda: taken)
    assert look() == "ok", "it is at work"
    taken = Taken("n2", 7, str(program), time.time() - 2 * canary.LONGEST_S)
    assert look() == "wrong"
    taken = None  # type: ignore[assignment]
    assert look() == "ok"


# ---- on a cluster --------------------------------------------------------------------------------------

# The controller's host sees the processes of all nodes; each node's process 1 has the node's name.
PROGRAM = """#!/bin/sh
set -eu
verb=$1 node=$2 job=$3
init=
for p in $(pgrep -f '[i]nit[.]py'); do
	[ "$(nsenter -t "$p" -u hostname)" = "$node" ] && init=$p && break
done
[ -n "$init" ]
on_node() { nsenter -t "$init" -n -m -u -i -p -- "$@"; }
case $verb in
check) on_node pgrep -x slurmd >/dev/null ;;
stop)
	on_node pkill -KILL -x slurmd
	on_node pkill -KILL -f "gemini_hpc[.]agent --job $job " || true
	;;
start) on_node pgrep -x slurmd >/dev/null || on_node SLURMD -f "$SLURM_CONF" -N "$node" ;;
esac
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Cluster]:
    with Cluster.bring_up(f"canary{os.getpid()}", nodes=4, slurm_conf=["SlurmdTimeout=300"]) as cluster:
        path = cluster.directory / "etc/gemini-hpc/canary"
        from gemini_hpc.devcluster.requirements import find_program as find

        path.write_text(PROGRAM.replace("SLURMD", find("slurmd")))
        path.chmod(0o755)
        toml = cluster.directory / "etc/gemini-hpc/gemini.toml"
        toml.write_text(toml.read_text() + 'canary_program = "/etc/gemini-hpc/canary"\n')
        yield cluster


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_on_a_real_cluster(site: Cluster) -> None:
    """The job comes back with the same bits, the node is in service again, and nothing is left."""
    argv = ["gemini-hpc", "doctor", "--canary", "main", "--user", "alice", "--yes"]
    done = site.run(argv, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("detected by its peers", "survivors reserved", "running again", "identical bits", "is back"):
        assert part in done.stdout, done.stdout
    site.wait_idle()
    assert site.run(["test", "-e", canary.FILE]).returncode != 0


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_on_a_real_cluster(site: Cluster) -> None:
    """The canary is killed while the node is away: the guard brings it back."""
    argv = ["gemini-hpc", "doctor", "--canary", "main", "--user", "alice", "--yes"]
    process = site.start_command(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    for line in process.stdout:
        if "set DOWN" in line:
            break
    pid = site.run(["pgrep", "-o", "-f", "doctor --canary main"]).stdout.split()[0]
    site.run(["kill", "-KILL", pid])
    until(lambda: site.run(["test", "-e", canary.FILE]).returncode != 0, 60)
    process.wait(60)
    site.wait_idle(timeout_s=60)
