"""Every verb's --help stands alone and mentions each of its options."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gemini_hpc.cli.main import VERBS, build_parser, main


def verbs(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from verbs(below, (*words, name))


ALL = list(verbs(build_parser()))


def at(words: tuple[str, ...]) -> argparse.ArgumentParser:
    parser = build_parser()
    for word in words:
        (sub,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        parser = sub.choices[word]
    return parser


def test_all_verbs_are_here() -> None:
    assert {words[0] for words in ALL if words} == set(VERBS)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    text, errors = capsys.readouterr()
    assert ended.value.code == 0 and errors == ""
    assert text.startswith(f"usage: gemini-hpc {' '.join(words)}".rstrip())
    parser = at(words)
    assert parser.description, "says what it does"
    for action in parser._actions:
        for option in action.option_strings:
            assert option in text
        if action.option_strings:
            assert action.help, f"{action.dest} is explained"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            assert all(f"\n    {name} " in text or f"\n    {name}\n" in text for name in action.choices)


@pytest.mark.parametrize("words", [(), ("inspect",), ("no-such-verb",), ("inspect", "1", "--no-such-option"),
                                   ("inspect", "1", "--watch", "inf"), ("inspect", "1", "--watch", "nan"),
                                   ("demo", "--cuts", "0"), ("demo", "--steps", "19"),
                                   ("demo", "--json", "/nowhere/at/all"),
                                   ("run", "--max-restarts", "-1", "--", "true")], ids=" ".join)  # fmt: skip
def test_wrong_command_lines(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    assert "usage: gemini-hpc" in capsys.readouterr().err


def test_from_a_shell() -> None:
    argv = [sys.executable, "-m", "gemini_hpc.cli.main", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert all(verb in done.stdout for verb in VERBS)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_fits_a_terminal(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("words", [["--help"], ["jobs", "--help"]], ids=" ".join)
def test_an_output_that_takes_nothing(words: list[str]) -> None:
    argv = [sys.executable, "-m", "gemini_hpc.cli.main", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "gemini-hpc: the output cannot be written: No space left on device\n"
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as nobody:
        done = subprocess.run(argv, stdout=nobody, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 141 and done.stderr == ""
