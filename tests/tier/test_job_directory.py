"""A job finds its own directory on the tier again, whatever other jobs of its number have left there."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemini_hpc.tier import job_directory, owned
from gemini_hpc.tier.job_directory import Mark
from gemini_hpc.tier.owned import Directory, NotOurs

MINE, OTHER = Mark(7, "0123456789abcdef", "north"), Mark(7, "fedcba9876543210", "north")


def name(tier: Path, mark: Mark) -> str:
    with Directory.open_tier(str(tier)) as top, job_directory.make(top, mark) as made:
        return os.path.basename(made.where)


def found(tier: Path, mark: Mark) -> str | None:
    with Directory.open_tier(str(tier)) as top:
        there = job_directory.find(top, mark)
        if there is None:
            return None
        with there:
            return os.path.basename(there.where)


def beside(tier: Path, mark: Mark) -> str:
    with Directory.open_tier(str(tier)) as top:
        return job_directory.explain_clash(top, mark)


def test_two_jobs_of_one_number_have_a_directory_each(tmp_path: Path) -> None:
    assert found(tmp_path, MINE) is None
    assert [name(tmp_path, MINE), name(tmp_path, OTHER)] == ["gemini-7", "gemini-7-fedcba9876543210"]
    assert [name(tmp_path, MINE), name(tmp_path, OTHER)] == ["gemini-7", "gemini-7-fedcba9876543210"], "found again"
    assert beside(tmp_path, MINE) == "" and "gemini-7-fedcba9876543210" in beside(tmp_path, OTHER)
    (tmp_path / "gemini-7" / job_directory.MARK).unlink()
    os.rmdir(tmp_path / "gemini-7")
    assert found(tmp_path, OTHER) == "gemini-7-fedcba9876543210", "a free number changes nothing"
    assert sorted(os.listdir(tmp_path)) == ["gemini-7-fedcba9876543210"], "nothing is left of what was begun"


def test_a_job_without_a_key_has_what_an_older_release_has_made(tmp_path: Path) -> None:
    (tmp_path / "gemini-7").mkdir(mode=0o700)
    (tmp_path / "gemini-7" / "default").mkdir()
    assert found(tmp_path, Mark(7)) == "gemini-7"
    assert found(tmp_path, MINE) is None and name(tmp_path, MINE) == "gemini-7-0123456789abcdef"


def test_a_job_without_a_key_does_not_write_into_anothers(tmp_path: Path) -> None:
    name(tmp_path, MINE)
    assert "nothing" in beside(tmp_path, Mark(7))
    with pytest.raises(NotOurs):
        name(tmp_path, Mark(7))


@pytest.mark.parametrize("content", [b"", b"{}", b"nonsense", b'{"job":8,"key":"0123456789abcdef"}', b"x" * 9999])
def test_a_damaged_mark_is_nobodys(tmp_path: Path, content: bytes) -> None:
    name(tmp_path, MINE)
    (tmp_path / "gemini-7" / job_directory.MARK).write_bytes(content)
    assert found(tmp_path, MINE) is None and found(tmp_path, Mark(7)) is None
    assert name(tmp_path, MINE) == "gemini-7-0123456789abcdef"


def test_a_predecessor_is_any_job_of_the_number_on_this_cluster(tmp_path: Path) -> None:
    for mark in (MINE, OTHER, Mark(7, "00000000000000aa", "south"), Mark(71, "00000000000000bb", "north")):
        name(tmp_path, mark)
    with Directory.open_tier(str(tmp_path)) as top:
        names = [os.path.basename(there.where) for there in job_directory.open_former(top, 7, "north")]
    assert names == ["gemini-7", "gemini-7-fedcba9876543210"]


def test_what_was_begun_is_removed(tmp_path: Path) -> None:
    for name in (".gemini-7.abc.tmp", ".gemini-71.abc.tmp", ".gemini-7.abc"):
        (tmp_path / name).mkdir(mode=0o700)
    with Directory.open_tier(str(tmp_path)) as top:
        job_directory.clean(top, 7)
    assert sorted(os.listdir(tmp_path)) == [".gemini-7.abc", ".gemini-71.abc.tmp"]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all directories belong to a group of several users."""
    monkeypatch.setattr(owned, "_is_private", lambda group: False)


@pytest.mark.parametrize(
    ("name", "members", "gid", "private"),
    [
        ("alice", [], 5, True),
        ("alice", ["alice"], 5, True),
        ("alice", ["bob"], 5, False),
        ("lab", [], 5, False),
        ("alice", [], 6, False),
    ],
)
def test_a_users_private_group_has_no_others(
    name: str, members: list[str], gid: int, private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show it for sites where users have umask 002 and a group of their own each."""
    user = SimpleNamespace(pw_gid=gid, pw_name="alice")
    group = SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    assert owned._is_private(5) is private


@pytest.mark.usefixtures("shared")
def test_what_could_be_another_users_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1777)
    for directory in ("mine", "open", "theirs"):
        (tmp_path / directory).mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o770)
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "file").touch()
    (tmp_path / "mine" / "link").symlink_to("../file")
    (tmp_path / "mine" / "file").touch()
    os.mkfifo(tmp_path / "mine" / "pipe")
    with Directory.open_tier(str(tmp_path)) as top:
        for name in ("open", "link", "file"):
            with pytest.raises(NotOurs, match=name):
                top.open_below(name)
        with pytest.raises(FileNotFoundError):
            top.open_below("nothing")
        with top.open_below("mine") as mine:
            os.close(mine.open_file("file"))
            for name in ("link", "pipe"):
                with pytest.raises(NotOurs, match=name):
                    mine.open_file(name)
            monkeypatch.setattr(os, "geteuid", lambda: 4711)
            for refused in (lambda: top.open_below("mine"), lambda: mine.open_file("file")):
                with pytest.raises(NotOurs):
                    refused()


@pytest.mark.usefixtures("shared")
def test_a_tier_is_its_users_or_roots_and_nobody_renames_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    for mode, taken in ((0o700, True), (0o755, True), (0o1777, True), (0o1770, True), (0o777, False), (0o770, False)):
        place.chmod(mode)
        if taken:
            Directory.open_tier(str(place)).close()
        else:
            with pytest.raises(NotOurs, match="not sticky"):
                Directory.open_tier(str(place))
    place.chmod(0o755)
    (tmp_path / "link").symlink_to(place)
    Directory.open_tier(str(tmp_path / "link")).close()
    if os.geteuid():  # root's own is anybody's tier
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(NotOurs, match="belongs to user"):
            Directory.open_tier(str(place))
