"""slurmd's record of the jobs of an earlier boot goes, that of this boot stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemini_hpc import clock
from gemini_hpc.node import boot

AN_HOUR_S = 3600.0


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slurm.conf").write_text(f"ClusterName=c\nSlurmdSpoolDir={tmp_path}/spool/%n\n")
    own = tmp_path / "spool" / os.uname().nodename.split(".")[0]
    own.mkdir(parents=True)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setattr(boot, "_MARK", str(tmp_path / "mark"))
    return own


def write_state(path: Path, after_boot_s: float) -> None:
    path.write_text("jobs")
    t = boot.read_boot()[1] + after_boot_s
    os.utime(path, (t, t))


def test_the_record_of_an_earlier_boot_is_removed(spool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cred_state", "cred_state.old", "hwloc_topo_whole.xml"):
        write_state(spool / name, -AN_HOUR_S)
    assert boot.main() == 0
    assert [path.name for path in spool.iterdir()] == ["hwloc_topo_whole.xml"]
    assert f"removed {spool}/cred_state: " in capsys.readouterr().out
    assert boot.main() == 0 and not capsys.readouterr().out


def test_the_record_of_this_boot_stays(spool: Path) -> None:
    """A restart of slurmd must not run the prologs of running jobs again."""
    write_state(spool / "cred_state", 1.0)
    assert boot.main() == 0
    assert (spool / "cred_state").exists()


def test_a_clock_that_starts_in_the_past_keeps_no_old_record(spool: Path) -> None:
    """Without a battery for its clock a node boots long before the record was written."""
    write_state(spool / "cred_state", clock.time() - boot.read_boot()[1] + AN_HOUR_S)
    assert boot.main() == 0
    assert not (spool / "cred_state").exists()


@pytest.mark.parametrize("set_by_s", [AN_HOUR_S, -AN_HOUR_S])
def test_a_clock_set_after_the_boot_removes_no_record(spool: Path, set_by_s: float) -> None:
    """A slurmd that crashes has written its record before the clock was right."""
    assert boot.main() == 0
    write_state(spool / "cred_state", 1.0 - set_by_s)
    assert boot.main() == 0
    assert (spool / "cred_state").exists()


def test_the_mark_of_another_boot_or_container_counts_for_nothing(spool: Path, tmp_path: Path) -> None:
    assert boot.main() == 0
    mark = tmp_path / "mark"
    for other in ("0" + mark.read_text()[1:] + "1", mark.read_text() + "1", ""):
        mark.write_text(other)
        write_state(spool / "cred_state", -AN_HOUR_S)
        assert boot.main() == 0 and not (spool / "cred_state").exists(), other


def test_a_spool_that_is_not_there_is_said_and_not_marked(
    spool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool.rename(tmp_path / "away")
    assert boot.main() == 0
    assert f"no spool here yet: {spool}" in capsys.readouterr().out and not (tmp_path / "mark").exists()


def test_each_slurmd_of_a_host_forgets(spool: Path, tmp_path: Path) -> None:
    """A node's name need not be its host's."""
    with (tmp_path / "slurm.conf").open("a") as file:
        file.write(f"NodeName=a[1-2] NodeHostname={os.uname().nodename}\nNodeName=b NodeHostname=other\n")
    for node in ("a1", "a2", "b"):
        (tmp_path / "spool" / node).mkdir()
        write_state(tmp_path / "spool" / node / "cred_state", -AN_HOUR_S)
    assert boot.main() == 0
    assert [path.parent.name for path in tmp_path.glob("spool/*/cred_state")] == ["b"]


@pytest.mark.parametrize("options", ["-f {}/own.conf -N odd", "-D -Nodd -f{}/own.conf"])
def test_options_of_slurmds_unit_count(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    (tmp_path / "own.conf").write_text(f"SlurmdSpoolDir = {tmp_path}/own/%n\n")
    (tmp_path / "own" / "odd").mkdir(parents=True)
    write_state(tmp_path / "own" / "odd" / "cred_state", -AN_HOUR_S)
    monkeypatch.setenv("SLURMD_OPTIONS", options.format(tmp_path))
    assert boot.main() == 0
    assert not (tmp_path / "own" / "odd" / "cred_state").exists()


def test_links_and_directories_stay(spool: Path, tmp_path: Path) -> None:
    write_state(tmp_path / "precious", -AN_HOUR_S)
    (spool / "cred_state").symlink_to(tmp_path / "precious")
    (spool / "cred_state.old").mkdir()
    os.utime(spool / "cred_state.old", (1.0, 1.0))
    assert boot.main() == 0
    assert (tmp_path / "precious").exists() and (spool / "cred_state").is_symlink()
    assert (spool / "cred_state.old").is_dir()


def test_a_copy_of_slurm_conf_serves_where_slurmctld_sends_it(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "usual" / "conf-cache"
    cache.mkdir(parents=True)
    (tmp_path / "slurm.conf").rename(cache / "slurm.conf")
    monkeypatch.delenv("SLURM_CONF")
    monkeypatch.setattr(boot, "_SLURM_CONF", str(tmp_path / "absent"))
    monkeypatch.setattr(boot, "_CONFIGLESS", (str(tmp_path / "other"), str(tmp_path / "usual")))
    write_state(spool / "cred_state", -AN_HOUR_S)
    assert boot.main() == 0
    assert not (spool / "cred_state").exists()


def test_without_slurm_conf_a_line_says_what_follows() -> None:
    argv = [sys.executable, "-c", "import sys; from gemini_hpc.node import boot; boot._CONFIGLESS = (); "]
    argv[2] += "boot._MARK = boot._SLURM_CONF = '/nowhere'; sys.exit(boot.main())"
    environ = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=environ)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "gemini-hpc: /nowhere: no slurm.conf here" in done.stderr and "unprotected" in done.stderr


def test_the_unit_sees_what_slurmds_does() -> None:
    """slurm.conf may be on a remote file system or in /home, and a spool in /var/tmp."""
    unit = Path(__file__).parents[2] / "slurm/packaging/files/gemini-hpc-boot.service"
    lines = [line.partition("=")[::2] for line in unit.read_text().splitlines()]
    assert ("Before", "slurmd.service") in lines and ("After", "remote-fs.target") in lines
    for packaged in ("default", "sysconfig"):
        assert ("EnvironmentFile", f"-/etc/{packaged}/slurmd") in lines
    assert ("ProtectHome", "yes") not in lines and ("PrivateTmp", "yes") not in lines
