"""`gemini-hpc simulate`: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from gemini_hpc.cli import amounts, simulate
from gemini_hpc.cli.main import main
from gemini_hpc.forecast.figures import FIGURES
from gemini_hpc.forecast.schemes import SCHEMES


def test_the_names_are_those_that_there_are() -> None:
    """They are written down twice, so that --help need not import them."""
    assert tuple(FIGURES) == simulate._NAMES and tuple(SCHEMES) == simulate._SCHEMES


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


def test_a_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--nodes", "100", "--days", "10", "--standby", "5", "--schemes", "ours,strawman"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("100 nodes and 5 that stand by, 10 days, ") and len(lines) == 4
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["schemes"]
    assert list(found) == ["ours", "strawman"] and 0 < found["strawman"]["goodput"] < found["ours"]["goodput"] < 1
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schemes"] == found, "the seed says all"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nodes", "1"], "no whole number from 2"),
        (["--nodes", "1e99"], "no whole number"),
        (["--state", "much"], "no amount above 0"),
        (["--state=-1TB"], "no amount above 0"),
        (["--network", "0Gbps"], "no amount above 0"),
        (["--shape", "nan"], "no number from"),
        (["--schemes", "ours,theirs"], "there is no scheme 'theirs'"),
        (["--figure", "gemini-99"], "invalid choice"),
        (["--nodes", "3", "--replicas", "4"], "4 replicas on 3 nodes"),
    ],
)
def test_a_wrong_word_is_one_line(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["simulate", *words])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("gemini-hpc simulate: ") and why in last


@pytest.mark.parametrize(
    ("text", "bytes_"), [("1.2TB", 1.2e12), ("400G", 4e11), ("1203e9", 1203e9), ("75GB", 75e9), ("12", 12.0)]
)
def test_sizes(text: str, bytes_: float) -> None:
    assert amounts.size(text) == pytest.approx(bytes_)


def test_rates_are_in_bits() -> None:
    assert amounts.rate("400Gbps") == pytest.approx(50e9) and amounts.rate("8M") == pytest.approx(1e6)
