"""What a demonstration prints: seen on a terminal of 80 columns."""

from __future__ import annotations

import pytest

from gemini_hpc.cli import demo


def test_a_timeline_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [(1.23, "agents agree on map and version", "word " * 30), (1.3, "requeued, completing", "")]
    demo.show_rows(rows, demo.Show())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4 and max(map(len, [*lines, demo.IDENTICAL.format(60)])) <= 80
    assert lines[-1] == "    1.30  requeued, completing"
