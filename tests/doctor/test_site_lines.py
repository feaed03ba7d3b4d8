"""The lines that Slurm's files need: `gemini-hpc install --dry-run` on the files of a site."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemini_hpc.cli.main import main
from gemini_hpc.doctor import site_lines


def needed(path: Path) -> list[str]:
    return [need.line for need in site_lines.needs(site_lines.read(str(path)), str(path)) if not need.met]


def written(tmp_path: Path, text: str, plugstack: str | None = None) -> Path:
    path = tmp_path / "slurm.conf"
    path.write_text(text)
    if plugstack is not None:
        (tmp_path / "plugstack.conf").write_text(plugstack)
    return path


OURS = "Prolog=/opt/gemini-hpc/prolog_epilog/prolog\nEpilog=/opt/gemini-hpc/prolog_epilog/epilog\n"


def test_an_empty_file_needs_what_slurm_does_not_do_by_default(tmp_path: Path) -> None:
    assert needed(written(tmp_path, "ClusterName=c\n")) == [
        "PrologFlags=Alloc",
        "Prolog=/opt/gemini-hpc/prolog_epilog/prolog",
        "Epilog=/opt/gemini-hpc/prolog_epilog/epilog",
        "optional gemini_spank.so",
    ]


def test_a_complete_site_needs_nothing(tmp_path: Path) -> None:
    text = f"prologflags=contain,X11 # site\n{OURS}JobRequeue=1\nUnkillableStepTimeout=180\n"
    assert needed(written(tmp_path, text, "optional gemini_spank.so\n")) == []


def test_the_files_of_a_site_are_kept(tmp_path: Path) -> None:
    (tmp_path / "own.sh").write_text("#!/bin/sh\ntrue\n")
    (tmp_path / "more.conf").write_text("JobRequeue=0\nUnkillableStepTimeout=5\n")
    (tmp_path / "epilog.d").mkdir()
    text = (
        f"PrologFlags=Contain,RunInJob\nProlog={tmp_path}/own.sh\nEpilog={tmp_path}/epilog.d/*\nInclude more.conf\n"
    )
    assert needed(written(tmp_path, text, "required gemini_spank.so\n")) == [
        "PrologFlags=Contain",
        f"in {tmp_path}/own.sh: /opt/gemini-hpc/prolog_epilog/prolog",
        f"ln -s /opt/gemini-hpc/prolog_epilog/epilog {tmp_path}/epilog.d/50-gemini-hpc",
        "JobRequeue=1",
        "UnkillableStepTimeout=60",
        "optional gemini_spank.so",
    ]


def test_the_drop_in_is_for_a_site_that_includes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_in = tmp_path / "gemini-hpc.conf"
    drop_in.write_text("optional gemini_spank.so\n")
    monkeypatch.setattr(site_lines, "DROP_IN", str(drop_in))
    path = written(tmp_path, OURS + "PrologFlags=Alloc\n", "include plugstack.conf.d/*.conf\n")
    assert needed(path) == [f"cp {drop_in} {tmp_path}/plugstack.conf.d/"]
    (tmp_path / "plugstack.conf.d").mkdir()
    (tmp_path / "plugstack.conf.d" / "gemini-hpc.conf").write_text(drop_in.read_text())
    assert needed(path) == []


def test_the_command_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "ClusterName=c\n")
    argv = ["install", "--slurm-conf", str(path)]
    assert main(argv) == 2
    assert "never edits" in capsys.readouterr().err
    assert main([*argv, "--dry-run"]) == 1
    text = capsys.readouterr().out
    assert f"{path}: PrologFlags=Alloc\n" in text and "Nothing was changed" in text
    assert main([*argv, "--dry-run", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1 and not document["lines"][0]["met"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["slurm.conf"]
    assert main(["install", "--dry-run", "--slurm-conf", str(tmp_path / "none")]) == 2
    assert "none: No such file" in capsys.readouterr().err
