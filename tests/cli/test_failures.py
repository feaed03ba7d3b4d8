"""Rates of failures from a site's past: out of a file, and out of `sacct`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.cli.main import main
from gemini_hpc.slurm import client
from gemini_hpc.slurm.accounting import History, parse_history
from gemini_hpc.slurm.text import ParseError

PLAN = ["plan", "--nodes", "64", "--state", "1TB", "--network", "200Gbps", "--memory", "1TB", "--iteration", "20"]
# Two runs of job 7, of which the first has lost a node; 8 never ran; 9 had steps.
PAST = """JobIDRaw|State|NNodes|ElapsedRaw
7|NODE_FAIL|64|43200
7|COMPLETED|64|86400
8|PENDING|4|0
9|CANCELLED by 1000|2|86400
9.batch|CANCELLED|1|86400
9.0|COMPLETED|2|86400
"""


def test_runs_are_counted_and_steps_are_not() -> None:
    assert parse_history(PAST.split("\n")) == History(3, 98.0, 1)
    shuffled = ["Elapsedraw|nnodes|Account|jobidraw|STATE", "", "86400|3.07K|physics|7|NODE_FAIL"]
    assert parse_history(shuffled) == History(1, 3070.0, 1)


def test_the_rate_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    past = tmp_path / "past"
    past.write_text(PAST)
    assert main([*PLAN, "--history", str(past), "--json"]) == 0
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert failures == {"per_day": 1 / 98, "hardware": 1.0, "source": f"{past}: 1 lost in 98 node-days"}
    assert main([*PLAN, "--history", str(past), "--hardware", "0.25"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "failures: 0.0102 of a node a day, 25 % with its memory" in said and "1 lost in 98 node-days" in said


def test_where_none_was_lost_the_bound_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    past = tmp_path / "past"
    past.write_text(PAST.replace("NODE_FAIL", "COMPLETED"))
    words = ["simulate", "--nodes", "9", "--days", "1", "--schemes", "ours", "--history", str(past), "--json"]
    assert main(words) == 0
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert failures["per_day"] == pytest.approx(3 / 98) and "the bound at 95 %" in failures["source"]


DAY = 86400.0


def written(t: float, name: str, host: str, restart: int = 0) -> str:
    return json.dumps({"t": t * DAY, "name": name, "host": host, "restart": restart, "version": 0, "detail": ""})


def test_the_rate_of_event_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two nodes for ten days; n2 is lost after five of them, and n3 takes its place."""
    soon = 5 + 20 / DAY
    lines = [written(0, "owner", ""), written(0, "attached", "n1"), written(0, "attached", "n2")]
    lines += [written(2, "failed_first", "n1"), written(5, "confirmed", "n2"), written(soon, "failed_first", "n1")]
    lines += [written(5, "detached", "n1"), written(5, "attached", "n1", 1), written(5, "attached", "n3", 1)]
    lines += ["no event", written(10, "detached", "n1", 1), written(10, "released", "n3", 1), ""]
    (tmp_path / "7.jsonl").write_text("\n".join(lines))
    (tmp_path / "8.jsonl").write_text(written(0, "owner", "") + "\n")
    (tmp_path / "notes").write_text("nothing of ours")
    assert main([*PLAN, "--history", str(tmp_path), "--json"]) == 0
    source = f"{tmp_path}: 1 lost, 1 failed on healthy nodes; 1 job, 20 node-days"
    assert json.loads(capsys.readouterr().out)["failures"] == {"per_day": 0.1, "hardware": 0.5, "source": source}


def test_event_logs_without_a_failure_or_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--history", str(tmp_path)]) == 2
    assert "no protected job in it" in capsys.readouterr().err
    (tmp_path / "7.jsonl").write_text(f"{written(0, 'attached', 'n1')}\n{written(6, 'saved', 'n1')}\n")
    assert main([*PLAN, "--history", str(tmp_path), "--json"]) == 0
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert failures["per_day"] == 0.5 and "1 job, 6 node-days without a failure" in failures["source"]


def test_a_bad_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    past = tmp_path / "past"
    for text, why in (
        ("", "it is empty: wanted what `sacct -a -X -D"),
        ("JobIDRaw|State\n7|NODE_FAIL\n", "line 1: no column NNodes, ElapsedRaw"),
        (PAST + "10|COMPLETED\n", "line 8: 2 columns"),
        (PAST + "$(id)|COMPLETED|1|1\n", "line 8: '$(id)' is no raw job id"),
        (PAST + "10|COMPLETED|1|-5\n", "line 8: '1' nodes for '-5' seconds"),
        (PAST + "10|COMPLETED|1e9|5\n", "line 8: '1e9' nodes"),
        ("JobIDRaw|State|NNodes|ElapsedRaw\n", "no run of a job in it"),
    ):
        past.write_text(text)
        assert main([*PLAN, "--history", str(past)]) == 2, why
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"gemini-hpc plan: {past}: {why}")


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8"))))
def test_any_text_is_read_or_refused(rows: list[str]) -> None:
    try:
        found = parse_history(["JobIDRaw|State|NNodes|ElapsedRaw", *rows])
    except ParseError:
        return
    assert found.lost <= found.runs


def sacct(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "sacct"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(client, "_DIRECTORIES", (str(tmp_path),))


def test_sacct_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "past").write_text(PAST)
    sacct(tmp_path, f'echo "$*" >{tmp_path}/asked; cat {tmp_path}/past', monkeypatch)
    (tmp_path / "here" / "sacct").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")  # the word is no directory
    assert main([*PLAN, "--history", "sacct", "--history-days", "30", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["failures"]
    assert found["source"] == "sacct, 30 days: 1 lost in 98 node-days"
    asked = "-a -X -D -P --noconvert -o JobIDRaw,State,NNodes,ElapsedRaw -S now-30days\n"
    assert (tmp_path / "asked").read_text() == asked


def test_without_accounting_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sacct(tmp_path, "echo Slurm accounting storage is disabled >&2; exit 1", monkeypatch)
    assert main([*PLAN, "--history", "sacct"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "gemini-hpc plan: --history sacct: Slurm accounting storage is disabled; a rate can be given instead: "
        "--failures-per-node-day"
    )
    (tmp_path / "sacct").unlink()
    assert main([*PLAN, "--history", "sacct"]) == 2
    assert "sacct was not found" in capsys.readouterr().err
