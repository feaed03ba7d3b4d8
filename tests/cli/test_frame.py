"""The frame of the verbs: what an exception becomes, and what a result prints."""

from __future__ import annotations

import argparse

import pytest

from gemini_hpc.cli import frame
from gemini_hpc.cli.main import main
from gemini_hpc.config import ConfigError
from gemini_hpc.query.ask import QueryError
from gemini_hpc.slurm import SlurmRefused

ARGS = argparse.Namespace(json=False)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (frame.UserError("no\x1b[3m"), 1),
        (frame.UsageError("no\x1b[3m"), 2),
        (ConfigError("no\x1b[3m"), 1),
        (QueryError("no\x1b[3m"), 1),
        (SlurmRefused("no\x1b[3m"), 1),
        (FileNotFoundError("no\x1b[3m"), 1),
    ],
)
def test_an_expected_error_is_one_tame_line(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    assert frame.run_verb("verb", fail, (OSError,), ARGS) == status
    assert capsys.readouterr() == ("", "gemini-hpc verb: no?[3m\n")


def test_another_error_is_ours() -> None:
    def fail(_: argparse.Namespace) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        frame.run_verb("verb", fail, (OSError,), ARGS)


@pytest.mark.parametrize(("as_json", "text"), [(True, '{"n": 3}\n'), (False, "3 nodes\n")])
def test_a_result_is_printed_in_one_form(as_json: bool, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = frame.Result({"n": 3}, lambda d: f"{d['n']} nodes", 1)
    assert frame.run_verb("verb", lambda _: result, (), argparse.Namespace(json=as_json)) == 1
    assert capsys.readouterr() == (text, "")


def test_an_empty_text_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run_verb("verb", lambda _: frame.Result([], lambda _: ""), (), ARGS) == 0
    assert capsys.readouterr() == ("", "")


def test_export_shows_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "/no\x1b[3m", "--format", "torch", "-o", "/tmp/never"]) == 1
    assert "\x1b" not in capsys.readouterr().err
