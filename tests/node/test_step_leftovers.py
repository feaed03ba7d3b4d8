"""The prolog removes the files of a lost node's steps before the job's next step, and nothing else."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

import pytest

from gemini_hpc.node import spawn, step_leftovers

pytestmark = pytest.mark.slow  # it gives files to other users

JOB, UID = 42, 5001
NOSUID_NODEV, MNT_DETACH = 6, 2


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A node n1 with a spool and a temporary file system, both of this test."""
    (tmp_path / "spool" / "n1").mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    lines = f"NodeName=n1 CPUs=4\nSlurmdSpoolDir={tmp_path}/spool/%n  # a comment\ntmpfs={tmp_path}/tmp\n"
    (tmp_path / "slurm.conf").write_text(lines)
    return tmp_path


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def make_directory(path: Path, uid: int) -> None:
    path.mkdir()
    (path / "inner").mkdir()
    (path / "inner" / "file").write_text("x")
    os.chown(path, uid, 0)


def remove(site: Path) -> str:
    return step_leftovers.remove(str(site / "slurm.conf"), "n1", JOB, UID)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_pmix_left_is_removed(site: Path) -> None:
    spool = site / "spool" / "n1"
    make_socket(spool / "stepd.slurm.pmix.42.0")
    for step in (0, 1):
        make_directory(spool / f"pmix.42.{step}", UID)
    make_directory(site / "tmp" / "spmix_appdir_5001_42.0", UID)
    make_directory(site / "tmp" / "spmix_appdir_42.1", UID)
    assert remove(site) == ""
    assert names(spool) == [] == names(site / "tmp")


def test_nothing_else_is_removed(site: Path) -> None:
    spool, tmp = site / "spool" / "n1", site / "tmp"
    for name in ("pmix.421.0", "pmix.4.20", "pmix.42.0x", "xpmix.42.0", "cred_state", "job00042"):
        make_directory(spool / name, UID)
    make_socket(spool / "stepd.slurm.pmix.421.0")
    make_directory(tmp / "spmix_appdir_5001_42.0", 5002)  # of another user
    make_directory(tmp / "spmix_appdir_5002_42.0", UID)
    make_directory(tmp / "spmix_appdir_5001_421.0", UID)
    before = names(spool), names(tmp)
    assert remove(site) == ""
    assert (names(spool), names(tmp)) == before


def test_links_are_not_followed(site: Path) -> None:
    """The owner of a directory may have put a link in its place or into it."""
    precious = site / "precious"
    make_directory(precious, 0)
    make_directory(site / "tmp" / "spmix_appdir_5001_42.0", UID)
    (site / "tmp" / "spmix_appdir_5001_42.0" / "inner" / "link").symlink_to(precious)
    (site / "tmp" / "spmix_appdir_5001_42.1").symlink_to(precious)
    os.chown(site / "tmp" / "spmix_appdir_5001_42.1", UID, 0, follow_symlinks=False)
    assert remove(site) == ""
    assert names(site / "tmp") == [] and (precious / "inner" / "file").exists()


def test_mpi_conf_names_another_directory(site: Path) -> None:
    (site / "own").mkdir()
    make_directory(site / "own" / "spmix_appdir_5001_42.0", UID)
    (site / "mpi.conf").write_text(f"PMIxCliTmpDirBase={site}/own\n")
    assert remove(site) == ""
    assert names(site / "own") == []


def test_a_missing_file_or_directory_is_no_fault(site: Path) -> None:
    assert step_leftovers.remove("", "n1", JOB, UID) == ""
    (site / "spool" / "n1").rmdir()
    (site / "tmp").rmdir()
    assert remove(site) == ""
    (site / "slurm.conf").unlink()
    assert "slurm.conf: No such file" in remove(site)


def test_what_cannot_be_removed_is_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_directory(site / "spool" / "n1" / "pmix.42.0", UID)
    slow = site / "bin"
    slow.mkdir()
    (slow / "rm").write_text("#!/bin/sh\nexec sleep 30\n")
    (slow / "rm").chmod(0o755)
    monkeypatch.setattr(spawn, "ENVIRONMENT", {"PATH": f"{slow}:/usr/bin:/bin"})
    monkeypatch.setattr(step_leftovers, "REMOVAL_S", 0.2)
    assert f"could not remove {site}/spool/n1/*pmix.42.*" in remove(site)


@pytest.mark.parametrize("how", ["", ",allow_other"])
def test_a_mount_of_another_user_obstructs_nothing(site: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Root may not look into a user's FUSE, or waits there for an answer."""
    make_directory(site / "spool" / "n1" / "pmix.42.0", UID)
    where = site / "tmp" / "spmix_appdir_42.0"
    where.mkdir()
    libc = ctypes.CDLL(None)
    try:
        fuse = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("no FUSE here")
    try:
        options = f"fd={fuse},rootmode=40000,user_id=5002,group_id=5002{how}"
        if libc.mount(b"test", str(where).encode(), b"fuse", NOSUID_NODEV, options.encode()):
            pytest.skip("may not mount")
        monkeypatch.setattr(step_leftovers, "REMOVAL_S", 1.0)
        left = remove(site)
    finally:
        os.close(fuse)  # ends what waits for an answer
        libc.umount2(str(where).encode(), MNT_DETACH)
    assert names(site / "spool" / "n1") == []
    assert bool(left) == bool(how) and "spool" not in left


def test_entries_that_vanish_are_no_fault(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user may make and remove directories of that name."""
    own = site / "tmp" / "spmix_appdir_5001_42.1"
    make_directory(own, UID)

    class Vanished:
        name, path = "spmix_appdir_42.0", str(site / "tmp" / "spmix_appdir_42.0")

        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            return os.stat(self.path, follow_symlinks=follow_symlinks)

    listed = step_leftovers._list_entries
    monkeypatch.setattr(step_leftovers, "_list_entries", lambda directory: (Vanished(), *listed(directory)))
    assert remove(site) == "" and not own.exists()


def test_the_temporary_file_system_may_have_the_nodes_name(site: Path) -> None:
    (site / "tmp" / "n1").mkdir()
    make_directory(site / "tmp" / "n1" / "spmix_appdir_5001_42.0", UID)
    (site / "slurm.conf").write_text(f"SlurmdSpoolDir = {site}/spool/%n\nTmpFS={site}/tmp/%n\n")
    assert remove(site) == ""
    assert names(site / "tmp" / "n1") == []
