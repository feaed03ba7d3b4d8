"""`gemini-hpc simulate`: what it prints, and what it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from gemini_hpc.cli import amounts, simulate
from gemini_hpc.cli.main import main
from gemini_hpc.forecast import goodput
from gemini_hpc.forecast.figures import FIGURES
from gemini_hpc.forecast.schemes import SCHEMES

from .refused import refused


def test_the_names_are_those_that_there_are() -> None:
    """They are written down twice, so that --help need not import them."""
    assert (*FIGURES, "goodput") == simulate._NAMES and tuple(SCHEMES) == simulate._SCHEMES


def test_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--figure", "gemini-15b"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("1000 nodes, GEMINI  ")]
    assert line.split()[3:] == ["91", "%", "91.1", "%"]
    assert main(["simulate", "--figure", "gemini-9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["rows"][0] == {
        "what": "N=16, m=2, k=2",
        "published": "93.3 %",
        "ours": "93.3 %",
        "note": "",
    }


def test_goodput(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(goodput, "DAYS", 1.0)
    assert main(["simulate", "--figure", "goodput"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and any(line.startswith("  10000  ours, with a spare") for line in lines)
    assert main(["simulate", "--figure", "goodput", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figure"] == "goodput" and {row["gpus"] for row in found["rows"]} == {1_000, 10_000, 100_000}
    assert all(one["source"] for one in found["published"])


def test_a_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--nodes", "100", "--days", "10", "--standby", "5", "--schemes", "ours,strawman"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("100 nodes and 5 that stand by, 10 days, ") and len(lines) == 5
    assert lines[1] == "failures: 0.015 of a node a day, 50 % with its memory (GEMINI, Figure 15b)"
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["schemes"]
    assert list(found) == ["ours", "strawman"] and 0 < found["strawman"]["goodput"] < found["ours"]["goodput"] < 1
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schemes"] == found, "the seed says all"


def test_failures_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace"
    trace.write_text("# seconds nodes kind\n86400 0-1 hardware\n3600 7 software  # a crash\n\n999999 3 hardware\n")
    words = ["simulate", "--trace", str(trace), "--nodes", "8", "--days", "2", "--schemes", "ours,reft", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["schemes"]
    assert {o["failures"] for o in found.values()} == {3}, "the last one comes after the two days"
    assert {o["recoveries"] for o in found.values()} == {2}
    assert main(words[:-1]) == 0
    assert f"failures: those of {trace}" in capsys.readouterr().out.replace("\n", " ")
    assert found["ours"]["from_tier"] == 1, "nodes 0 and 1 keep each other's copies"


def test_a_bad_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace"
    for text, why in (
        ("3600 1 hardware\n7200 $(id) hardware\n", "line 2: wanted node ranks from 0 to 999"),
        ("", "no failures in it"),
        ("1 2 \x1b[2J\n", "line 1: wanted hardware or software, found '\\x1b[2J'"),
    ):
        trace.write_text(text)
        assert main(["simulate", "--trace", str(trace)]) == 2, why
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"gemini-hpc simulate: {trace}: {why}") and line.isprintable()


def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--nodes", "50", "--days", "9", "--schemes", "ours"]
    assert main(words) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(words) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("\r\x1b[Kours: ") and shown.err.endswith("\r\x1b[K") and shown.out == quiet.out


def test_a_wrong_word_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in (
        (["--nodes", "1"], "a whole number from 2"),
        (["--nodes", "1e99"], "a whole number"),
        (["--state", "much"], "no amount above 0"),
        (["--state=-1TB"], "no amount above 0"),
        (["--network", "0Gbps"], "no amount above 0"),
        (["--shape", "nan"], "a number from"),
        (["--schemes", "ours,theirs"], "there is no scheme 'theirs'"),
        (["--figure", "gemini-99"], "invalid choice"),
        (["--trace", "a", "--history", "b"], "not allowed with"),
        (["--nodes", "3", "--replicas", "4"], "4 replicas on 3 nodes"),
    ):
        last = refused(["simulate", *words], capsys)
        assert last.startswith("gemini-hpc simulate: ") and why in last, words


def test_sizes() -> None:
    for text, bytes_ in (("1.2TB", 1.2e12), ("400G", 4e11), ("1203e9", 1203e9), ("75GB", 75e9), ("12", 12.0)):
        assert amounts.parse_size(text) == pytest.approx(bytes_), text


def test_rates_are_in_bits() -> None:
    for bare in ("100", "1e9", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="such as 100Gbps"):
            amounts.parse_rate(bare)
    assert amounts.parse_rate("400Gbps") == pytest.approx(50e9) and amounts.parse_rate("8M") == pytest.approx(1e6)
