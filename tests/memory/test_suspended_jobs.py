"""Requirement not-a-failure on the real cluster: suspended jobs, and hosts with another version of gemini-hpc."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import LiteJob
from waiting import until

import gemini_hpc
from gemini_hpc.wire import version

from .conftest import MIB, Site

pytestmark = pytest.mark.cluster


def healthy(site: Site, job: LiteJob) -> None:
    """Nobody took anything for a failure."""
    assert job.slurm()["Restarts"] == "0"
    names = {event["name"] for event in job.events()}
    assert not names & {"detected", "confirmed", "down", "self_fenced", "dismissed"}, names
    assert not {s for s in site.cluster.read_node_states().values() if "drain" in s or "down" in s}
    assert len({line["step"] for line in job.lines("resumed")}) == 1


@pytest.mark.witness("a suspended job is not taken for a failed one")
def test_suspended_is_not_failed(site: Site) -> None:
    """Suspended in the middle of copies and votes, several times, once for longer than any time-out of ours."""
    job = site.job(nodes=3, size=8 * MIB, pause_s=0.02)
    job.reach(5)
    for pause_s in (0.3, 0.1, 7.0):
        at = max(line["version"] for line in job.lines("sealed"))
        assert site.cluster.run(["scontrol", "suspend", str(job.id)]).returncode == 0
        until(lambda: job.state == "SUSPENDED", 10, what="suspended")
        time.sleep(pause_s)
        assert site.cluster.run(["scontrol", "resume", str(job.id)]).returncode == 0
        job.reach(at + 3)
    healthy(site, job)
    job.finish()
    assert not job.lines("skipped"), "protection went on where it was"


def test_ranks_stopped_in_mid_copy(site: Site) -> None:
    """One node's ranks alone are stopped again and again: their peers wait, seal late, and go on."""
    job = site.job(nodes=3, size=8 * MIB, pause_s=0.02)
    job.reach(5)
    node = job.hosts()[1]
    ranks = f"{job.directory}/lite[.]py"
    for pause_s in (0.4, 0.4, 0.4, 2.0):
        site.sh(node, f"pkill -STOP -f '{ranks}'; sleep {pause_s}; pkill -CONT -f '{ranks}'")
    at = max(line["version"] for line in job.lines("sealed"))
    job.reach(at + 5)
    healthy(site, job)
    job.finish()


@pytest.fixture
def other_version(site: Site) -> Iterator[str]:
    """n2 has gemini-hpc with another protocol: `write(current, oldest)` says which."""
    copy = site.cluster.directory / "other"
    shutil.copytree(Path(gemini_hpc.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    site.sh("n2", f"mount --bind {copy} /opt/gemini-hpc/src/gemini_hpc")
    yield str(copy / "wire" / "version.py")
    site.sh("n2", "umount /opt/gemini-hpc/src/gemini_hpc")
    shutil.rmtree(copy)


def set_version(path: str, current: int, oldest: int) -> None:
    file = Path(path)
    text = (
        file.read_text()
        .replace(f"CURRENT = {version.CURRENT}\n", f"CURRENT = {current}\n")
        .replace(f"OLDEST = {version.OLDEST} ", f"OLDEST = {oldest} ")
    )
    assert f"CURRENT = {current}\n" in text and f"OLDEST = {oldest} " in text
    file.write_text(text)


def test_an_agent_of_the_next_version_takes_part(site: Site, other_version: str) -> None:
    """n2's agent and ranks speak the older version: they train, recover a dead node, and seal again."""
    set_version(other_version, version.CURRENT + 1, version.CURRENT)
    job = site.job(nodes=3, options=("-wn1,n2,n3",))
    job.reach(8)
    job.cluster.cut_power("n3")
    job.finish()
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    assert "n2" in {e["host"] for e in job.events() if e["name"] == "attached"}, "the controller heard it too"


def test_trainers_of_the_next_version(site: Site) -> None:
    job = site.job(nodes=3, prefix=f"LITE_PROTOCOL={version.CURRENT + 1} ")
    job.reach(8)
    node = job.hosts()[1]
    site.sh(node, f"kill -9 {job.agent_pid(node)}")
    until(lambda: job.lines("rejoined"), 20, what="hand-back")
    job.finish()


def test_no_common_version_is_unprotected_and_one_line(site: Site, other_version: str) -> None:
    set_version(other_version, version.CURRENT + 2, version.CURRENT + 1)
    site.configure(attach_timeout_s=5.0)
    out = site.cluster.locate_home("alice") / "mismatch"
    fixed = ["-N2", "-wn1,n2", f"--output={out}", "--gemini-replicas=2"]
    job = site.cluster.submit_job(fixed, script="#!/bin/bash\nenv | grep -c GEMINI_SOCKET\necho over\nsleep 600\n")
    until(lambda: out.exists() and "over" in out.read_text(), 30, what="the script")
    said, *rest = out.read_text().splitlines()
    assert said.endswith("gemini-hpc: this job is not protected: no agent answers on n2")
    assert rest == ["0", "over"], "plain Slurm"
    wanted = f"protocol {version.CURRENT + 1} to {version.CURRENT + 2}, wanted {version.CURRENT}"
    logs = f"/run/gemini-hpc/{job}/agent.log"
    until(lambda: wanted in "".join(site.sh(node, f"cat {logs}") for node in ("n1", "n2")), 20, what=wanted)
    assert not {s for s in site.cluster.read_node_states().values() if "drain" in s or "down" in s}
