"""Files that a command line names: read with bounds, or refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gemini_hpc.cli.failures import read_lines
from gemini_hpc.cli.frame import UserError
from gemini_hpc.cli.main import main

from .test_help import ALL, at

WITH_SETTINGS = [words for words in ALL if any("--config" in a.option_strings for a in at(words)._actions)]
ALSO_NEEDED = {"requeue": ["--after-save"], "export": ["--format", "torch", "-o", "/tmp/never"]}


def test_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("ä\nb\x0bc\n".encode())
    assert read_lines(str(tmp_path / "a")) == ["ä", "b\x0bc", ""]


@pytest.mark.timeout(10)
def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"one\ntwo \xff\n")
    (tmp_path / "large").write_bytes(b"x" * 2000)
    os.mkfifo(tmp_path / "pipe")
    for name, why in (
        ("bytes", "line 2: not UTF-8 text"),
        ("pipe", "not a regular file"),
        ("missing", "No such file"),
        (".", "Is a directory"),
        ("large", "more than"),
    ):
        with pytest.raises(UserError, match=why) as refused:
            read_lines(str(tmp_path / name), 1000)
        assert str(refused.value).startswith(f"{tmp_path}")
    with pytest.raises(UserError, match="no name of a file"):
        read_lines("a\0b")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("words", WITH_SETTINGS, ids=" ".join)
def test_no_verb_waits_for_settings_in_a_pipe(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    named = ["1" for action in at(words)._actions if not action.option_strings]
    line = [*words, *named, *ALSO_NEEDED.get(words[0], []), "--config", str(tmp_path / "pipe")]
    assert main(line) in (1, 2), line
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "pipe: cannot be read: not a regular file" in errors, errors
