"""`gemini-hpc plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemini_hpc.cli.main import main

from .refused import refused

JOB = ["plan", "--nodes", "64", "--state", "1.2TB", "--network", "200Gbps", "--memory", "1TB", "--iteration", "20"]


def test_a_column_for_the_copies_and_one_for_one_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(JOB) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "failures: 0.015 of a node a day, 50 % with its memory (GEMINI, Figure 15b)"
    assert lines[2].split() == ["2", "replicas", "3", "replicas", "xor:4", "rs:4+2"]
    (memory,) = [line for line in lines if line.startswith("memory per node")]
    assert memory.split()[-8:] == ["75.0", "GB", "112", "GB", "50.0", "GB", "56.2", "GB"]
    assert max(map(len, lines)) <= 80


def test_what_does_not_fit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB[:-4], "--memory", "100GB", "--iteration", "20"]) == 1
    assert "75.0 GB: TOO MUCH" in capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--json", "--failures-per-node-day", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and [(one["redundancy"], one["replicas"]) for one in found["plans"]] == [
        ("replicate", 2),
        ("replicate", 3),
        ("xor", 4),
        ("rs", 6),
    ]
    assert found["plans"][0]["tier_every_s"] is None and found["plans"][0]["effective"] == [1.0, 1.0]


def test_two_nodes_have_no_third_copy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--nodes", "2", "--memory", "9TB", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 1
    assert main([*JOB, "--redundancy", "replicate", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 2
    assert main([*JOB, "--redundancy=rs:8+3", "--json"]) == 0
    last = json.loads(capsys.readouterr().out)["plans"][-1]
    assert (last["redundancy"], last["replicas"], last["parity"]) == ("rs", 11, 3)
    assert [last["survival"][str(k)] for k in (1, 2, 3)] == [1.0, 1.0, 1.0] and last["survival"]["4"] < 1


def test_whole_racks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    racks = tmp_path / "topology.conf"
    racks.write_text("".join(f"SwitchName=r{k} Nodes=n[{8 * k}-{8 * k + 7}]\n" for k in range(9)))
    assert main([*JOB, "--topology", str(racks)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (known,) = [line for line in lines if line.startswith("a whole domain lost")]
    assert known.split()[-8:] == ["100.0", "%"] * 4
    (unknown,) = [line for line in lines if line.startswith("with failure_domains")]
    assert unknown.split()[-8:] == ["0.0", "%"] * 4
    assert main([*JOB, "--topology", str(racks), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    assert found[0]["domain_loss"] == {"domains": 8, "survived": 1.0, "as_listed": 0.0}
    assert main([*JOB, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["domain_loss"] is None


def test_a_topology_that_cannot_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    racks = tmp_path / "racks"
    for text, why in (
        (None, "No such file or directory"),
        ("n[1-64] rack\x1b", "line 1: wanted a name of letters"),
        ("n[1-63] rack", "names 63 nodes, the job has 64"),
        ("", "names 0 nodes"),
    ):
        if text is not None:
            racks.write_text(text)
        assert main([*JOB, "--topology", str(racks)]) == 2, why
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("gemini-hpc plan: ") and why in line


def test_a_wrong_word_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in (
        (JOB[:3], "the following arguments are required"),
        ([*JOB, "--replicas", "9"], "a whole number from 1 to 8"),
        ([*JOB, "--nodes", "2", "--replicas", "3"], "3 replicas on 2 nodes"),
        ([*JOB, "--redundancy", "rs:4"], "rs:K+M with M from 1 to 4"),
        ([*JOB, "--redundancy", "rs:28+4", "--nodes", "20"], "groups of 32 nodes on 20 nodes"),
        ([*JOB, "--idle", "2"], "a number from 0 to 1"),
    ):
        last = refused(words, capsys)
        assert last.startswith("gemini-hpc plan: ") and why in last, words
