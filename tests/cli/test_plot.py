"""`--plot` of `plan` and `simulate`: a picture beside the same text."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_hpc.cli.main import main
from gemini_hpc.report import drawing

from .refused import refused

PLAN = ["plan", "--nodes", "64", "--state", "1TB", "--network", "200Gbps", "--memory", "1TB", "--iteration", "20"]
SIMULATE = ["simulate", "--nodes", "50", "--days", "9", "--schemes", "ours,reft"]


def test_it_is_drawn_and_the_text_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, form, begins in (
        (PLAN, "png", b"\x89PNG"),
        (SIMULATE, "svg", b"<?xml"),
        ([*PLAN, "--failures-per-node-day", "0"], "svg", b"<?xml"),
    ):
        assert main(words) == 0, words
        said = capsys.readouterr().out
        drawn = tmp_path / f"a.{form}"
        assert main([*words, "--plot", str(drawn)]) == 0, words
        assert capsys.readouterr().out == said and drawn.read_bytes().startswith(begins), words


def test_a_wrong_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in (
        ([*PLAN, "--plot", "a.gif"], "wanted the name of a .png or .svg file"),
        ([*PLAN, "--plot", "/nowhere/a.png"], "/nowhere/a.png: No such file"),
        ([*SIMULATE, "--plot", "/dev/null/a.svg"], "/dev/null/a.svg: Not a directory"),
        (["simulate", "--figure", "gemini-9", "--plot", "a.png"], "--plot draws a simulation"),
    ):
        assert why in refused(words, capsys), words


def test_without_matplotlib_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise drawing.MissingError("drawing needs matplotlib")

    monkeypatch.setattr(drawing, "require_matplotlib", missing)
    assert main([*SIMULATE, "--plot", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err == "gemini-hpc simulate: drawing needs matplotlib\n"
    assert not (tmp_path / "a.png").exists()
