"""slurmd's record of the jobs of an earlier boot goes, that of this boot stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemini_hpc import clock
from gemini_hpc.node import boot, ledger

AN_HOUR_S = 3600.0


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slurm.conf").write_text(f"ClusterName=c\nSlurmdSpoolDir={tmp_path}/spool/%n\n")
    own = tmp_path / "spool" / os.uname().nodename.split(".")[0]
    own.mkdir(parents=True)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    return own


def write_state(path: Path, after_boot_s: float) -> None:
    path.write_text("jobs")
    t = clock.time() - ledger.read_boot_clock_s() + after_boot_s
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
    argv[2] += "boot._SLURM_CONF = '/nowhere'; sys.exit(boot.main())"
    environ = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=environ)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "gemini-hpc: /nowhere: no slurm.conf here" in done.stderr and "unprotected" in done.stderr
