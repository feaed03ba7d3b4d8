"""The lines that Slurm's files need: `gemini-hpc install --dry-run` on the files of a site."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemini_hpc.cli.main import main
from gemini_hpc.doctor import installation, site_lines
from gemini_hpc.doctor.facts import SlurmRelease

ROOT = Path(__file__).parents[2]


OLD, NEW = SlurmRelease(22, 5, 8), SlurmRelease(24, 11, 5)


def needed(path: Path, release: SlurmRelease | None = OLD) -> list[str]:
    return [need.line for need in site_lines.list_needs(str(path), release) if not need.met]


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
        f"in {tmp_path}/own.sh: /opt/gemini-hpc/prolog_epilog/prolog || exit $?",
        f"cp /opt/gemini-hpc/prolog_epilog/epilog.d/50-gemini-hpc {tmp_path}/epilog.d/",
        "JobRequeue=1",
        "UnkillableStepTimeout=60",
        "optional gemini_spank.so",
    ]


def test_of_several_lines_each_counts_or_the_last(tmp_path: Path) -> None:
    """Read them as seen: 22.05.8 says `specified more than once, latest value used`, 24.11.5 and 26.05.5 run each."""
    (tmp_path / "own.sh").write_text("#!/bin/sh\ntrue\n")
    rest = "PrologFlags=Alloc\nPlugStackConfig=plug.conf\n"
    (tmp_path / "plug.conf").write_text("optional gemini_spank.so\n")
    rest = rest.replace("plug.conf", str(tmp_path / "plug.conf"))
    ours_first = written(tmp_path, f"{OURS}Prolog=own.sh\nEpilog={tmp_path}/own.sh\n{rest}")
    assert needed(ours_first, NEW) == []
    call = f"in {tmp_path}/own.sh: /opt/gemini-hpc/prolog_epilog"
    assert needed(ours_first, OLD) == [f"{call}/prolog || exit $?", f"{call}/epilog || exit $?"]
    assert needed(ours_first, None) == needed(ours_first, OLD)
    ours_last = written(tmp_path, f"Prolog=own.sh\nEpilog={tmp_path}/own.sh\n{OURS}{rest}")
    assert needed(ours_last, NEW) == needed(ours_last, OLD) == []
    none = written(tmp_path, f"Prolog=own.sh\nProlog=own.sh\nEpilog=own.sh\n{rest}")
    assert needed(none, NEW) == OURS.split()


def test_a_directory_with_our_drop_in_needs_nothing(tmp_path: Path) -> None:
    """Also where the file is there and gemini-hpc is not, as on a controller host."""
    text = "PrologFlags=Alloc\n"
    for kind in ("Prolog", "Epilog"):
        directory = tmp_path / f"{kind.lower()}.d"
        directory.mkdir()
        (directory / "90-own").write_text("#!/bin/sh\n")
        drop_in = ROOT / "prolog_epilog" / directory.name / "50-gemini-hpc"
        (directory / drop_in.name).write_text(drop_in.read_text())
        assert installation.find_drop_in_target(str(drop_in)) == f"/opt/gemini-hpc/prolog_epilog/{kind.lower()}"
        text += f"{kind}={directory}/*\n"
    path = written(tmp_path, text, "optional gemini_spank.so\n")
    assert needed(path) == needed(path, NEW) == []
    order = installation.list_scripts(site_lines.read_slurm_conf(str(path), OLD), "Prolog")
    assert [Path(found).name for found in order] == ["90-own", "50-gemini-hpc"], "slurmd's order"


def test_a_drop_in_counts_as_the_script_that_it_runs(tmp_path: Path) -> None:
    drop_in, target = tmp_path / "50-gemini-hpc", tmp_path / "prolog"
    text = (ROOT / "prolog_epilog/prolog.d/50-gemini-hpc").read_text()
    drop_in.write_text(text.replace("/opt/gemini-hpc/prolog_epilog/prolog", str(target)))
    assert installation.find_our_script(str(drop_in), "Prolog") is None
    target.write_text("exec python3 -m gemini_hpc.node.prolog\n")
    assert installation.find_our_script(str(drop_in), "Prolog") == str(drop_in)
    drop_in.write_text(f"exit 0\n[ ! -x {target} ] || exec {target}\n")
    assert installation.find_our_script(str(drop_in), "Prolog") == str(target), "named, and perhaps never reached"


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
