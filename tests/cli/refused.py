"""Command lines that are refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gemini_hpc.cli.main import main


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last line on stderr of a command line that is a user's mistake."""
    try:
        status: object = main(list(words))
    except SystemExit as ended:
        status = ended.code
    errors = capsys.readouterr().err
    assert status == 2 and "Traceback" not in errors, words
    line: str = errors.strip().splitlines()[-1]
    return line
