"""Every verb's --help stands alone and mentions each of its options."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
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


def ends(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """Return the exit code, what was printed, and what was said of errors."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code, *capsys.readouterr()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ALL:
        code, text, errors = ends(capsys, *words, "--help")
        assert code == 0 and errors == "", words
        assert text.startswith(f"usage: gemini-hpc {' '.join(words)}".rstrip())
        parser = at(words)
        assert parser.description, f"{words} says what it does"
        for action in parser._actions:
            assert all(option in text for option in action.option_strings), (words, action.dest)
            assert action.help or not action.option_strings, f"{action.dest} of {words} is explained"
            if isinstance(action, argparse._SubParsersAction):
                absent = [n for n in action.choices if f"\n    {n} " not in text and f"\n    {n}\n" not in text]
                assert absent == [], words


def test_no_usage_error_shows_a_name_of_python() -> None:
    """An error of a `type` that argparse does not know makes it print the function's name."""
    checked = 0
    for words in ALL:
        parser = at(words)
        for action in parser._actions:
            for text in ("abc", "", "-1", "nan", "1e999", "\u0663", "\u00b2", "9" * 5000, f"{'9' * 5000}d", "\0"):
                try:
                    parser._get_value(action, text)
                except argparse.ArgumentError as error:
                    checked += 1
                    assert "invalid" not in str(error) and len(str(error)) < 250, (words, str(error))
    assert checked > 100


def test_wrong_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        *(
            "inspect",
            "no-such-verb",
            "inspect 1 --no-such-option",
            "inspect 1 --watch inf",
            "inspect 1 --watch nan",
        ),
        *("demo --cuts 0", "demo --steps 19", "demo --json /nowhere/at/all", "run --max-restarts -1 -- true"),
    ):
        code, _, errors = ends(capsys, *line.split())
        assert code == 2 and "usage: gemini-hpc" in errors, line


def test_without_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == build_parser().format_help()


def test_examples_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    """Each verb's help ends with examples, and its parser accepts each of them."""
    for verb in VERBS:
        _, text, _ = ends(capsys, verb, "--help")
        if verb == "devcluster":  # it has a text of its own
            assert "\n  gemini-hpc devcluster up" in text
            continue
        _, _, examples = text.partition("\nexamples:\n")
        assert examples, verb
        for line in examples.replace("\\\n", "").splitlines():
            words = shlex.split(line.strip().removeprefix("sudo "))
            assert words[:2] == ["gemini-hpc", verb], line
            build_parser().parse_args(words[1:])


def test_from_a_shell() -> None:
    argv = [sys.executable, "-m", "gemini_hpc.cli.main", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert all(verb in done.stdout for verb in VERBS)


def test_help_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ALL:
        _, text, _ = ends(capsys, *words, "--help")
        assert [line for line in text.splitlines() if len(line) > 80] == [], words


def test_an_output_that_takes_nothing() -> None:
    for words in (["--help"], ["jobs", "--help"]):
        argv = [sys.executable, "-m", "gemini_hpc.cli.main", *words]
        with open("/dev/full", "w") as full:
            done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert done.returncode == 1, words
        assert done.stderr.count("\n") == 1 and os.strerror(errno.ENOSPC) in done.stderr, words
        reads, writes = os.pipe()
        os.close(reads)
        with os.fdopen(writes, "w") as nobody:
            done = subprocess.run(argv, stdout=nobody, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert done.returncode == 141 and done.stderr == "", words
