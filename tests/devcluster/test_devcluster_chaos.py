"""`devcluster chaos`: power cuts on a real cluster with a job, and its moments."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from gemini_hpc.devcluster import Cluster
from gemini_hpc.devcluster.chaos import BACK_S, Weather, draw_cut_times

from .conftest import CHECKOUT, tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture
def job(cluster: Cluster) -> Iterator[int]:
    """On n1, n2 and n3; it loses no node, whatever is cut."""
    made = cluster.submit_job(["-N3", "--no-kill", "-w", "n[1-3]", "--output=/dev/null", "--wrap", "sleep 300"])
    until(lambda: cluster.read_job(made)["JobState"] == "RUNNING", 10, what="running")
    yield made
    cluster.run(["scancel", str(made)])
    cluster.restore()


def boots(cluster: Cluster) -> dict[str, str]:
    return {n: cluster.exec(n, ["cat", "/proc/sys/kernel/random/boot_id"]).stdout for n in cluster.node_names}


def events(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def storm(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return tool("chaos", "--name", cluster.name, *words, timeout_s=90)


def started(cluster: Cluster, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "gemini_hpc.cli.main", "devcluster", "chaos", "--name", cluster.name, *words]
    return subprocess.Popen(argv, cwd=CHECKOUT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_nodes_with_a_job_are_cut_and_come_back(cluster: Cluster, job: int) -> None:
    before = boots(cluster)
    done = storm(
        cluster, "--every", "3", "--duration", "7", "--repair", "2", "--seed", "1", "--spare", "n1", "--json"
    )
    assert done.returncode == 0, done.stderr
    told = events(done.stdout)
    assert (told[0]["event"], told[-1]["event"]) == ("begin", "end"), done.stdout
    assert told[-1]["detail"] == "7 s are over; 2 cuts", done.stdout
    cuts = [e for e in told if e["event"] == "cut"]
    assert len(cuts) == 2 and all(e["jobs"] == [job] and e["node"] in ("n2", "n3") for e in cuts), done.stdout
    victims = {e["node"] for e in cuts}
    for victim in victims:
        after = [e["event"] for e in told if e["node"] == victim]
        assert after in (["cut", "on", "back"], ["cut", "on", "back"] * 2), done.stdout
    assert {n for n, boot in boots(cluster).items() if boot != before[n]} == victims
    assert not any(word in state for state in cluster.read_node_states().values() for word in ("down", "drain"))


def test_it_ends_with_the_last_job(cluster: Cluster, job: int) -> None:
    cluster.run(["scancel", str(job)])
    until(lambda: not cluster.read_queue(), 20, what="no job")
    done = storm(cluster, "--mtbf", "5")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"gemini-hpc devcluster: cluster {cluster.name} has no job: submit one first\n"
    last = cluster.submit_job(["-N1", "--output=/dev/null", "--wrap", "sleep 300"])
    with started(cluster, "--every", "600") as process:
        assert process.stdout is not None and "begin" in process.stdout.readline()
        cluster.run(["scancel", str(last)])
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "end: no job is left; 0 cuts" in out, out + err


def test_ctrl_c_gives_power_back(cluster: Cluster, job: int) -> None:
    with started(cluster, "--every", "3", "--repair", "600") as process:
        assert process.stdout is not None
        line = ""
        for line in process.stdout:
            if "cut n" in line:
                break
        assert f"(job {job})" in line, line
        assert any(not cluster.is_on(node) for node in cluster.node_names)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=BACK_S + 30)
    assert process.returncode == 130 and err == "gemini-hpc devcluster: interrupted\n", out + err
    assert "back n" in out and all(cluster.is_on(node) for node in cluster.node_names), out


def test_what_makes_no_sense_is_refused(cluster: Cluster) -> None:
    cases: list[tuple[list[str], str]] = [
        ([], "one of the arguments --mtbf --every is required"),
        (["--mtbf", "0"], "wanted a number from 0.001"),
        (["--mtbf", "5", "--every", "5"], "not allowed with"),
        (["--every", "5", "--spare", "n9"], "has no node 'n9'"),
    ]
    for case in cases:
        words, said = case
        done = storm(cluster, *words)
        assert done.returncode in (1, 2) and said in done.stderr and not done.stdout, (case, done.stderr)


@given(st.integers(0, 1 << 32), st.floats(0.1, 1e6))
def test_a_seed_repeats_its_moments(seed: int, mtbf_s: float) -> None:
    weather = Weather(mtbf_s=mtbf_s, seed=seed)
    first, again = (list(islice(draw_cut_times(weather, random.Random(seed)), 20)) for _ in range(2))
    assert first == again == sorted(first) and first[0] > 0
    many = list(islice(draw_cut_times(weather, random.Random(seed)), 2000))
    assert 0.8 * mtbf_s < many[-1] / len(many) < 1.2 * mtbf_s


def test_fixed_moments() -> None:
    assert list(islice(draw_cut_times(Weather(every_s=60.0), random.Random(1)), 3)) == [60.0, 120.0, 180.0]
