"""An agent whose job's directory is unmounted, replaced, covered or emptied: whether it can be spoken to again."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import until

from gemini_hpc.agent import own_directory
from gemini_hpc.agent.own_directory import OwnDirectory
from gemini_hpc.node import mounts
from gemini_hpc.wire import local

from .conftest import JOB, AgentProcess


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "7"
    made.mkdir(0o700)
    (made / own_directory.SOCKET).touch()
    return made


def held(path: Path) -> OwnDirectory:
    mine = OwnDirectory(str(path), os.getuid())
    assert mine.lock_directory()
    return mine


def replaced(path: Path, mode: int = 0o700) -> Path:
    """What was there before."""
    before = path.with_name("before")
    path.rename(before)
    path.mkdir(mode)
    return before


def test_it_is_where_it_was(path: Path) -> None:
    mine = held(path)
    assert mine.check_directory() == "here"
    (path / own_directory.SOCKET).unlink()
    assert mine.check_directory() == "silent"
    path.rename(path.with_name("before"))
    assert mine.check_directory() == "gone"


def test_another_one_in_its_place_is_moved_into_with_the_files(path: Path) -> None:
    mine = held(path)
    (path / "state").write_text("agreed")
    (path / "deep").mkdir()
    os.mkfifo(path / "pipe")
    (path / "link").symlink_to("/etc/passwd")
    replaced(path)
    assert mine.check_directory() == "moved"
    assert {entry.name: entry.read_text() for entry in path.iterdir()} == {
        "state": "agreed",
        own_directory.SOCKET: "",
    }
    assert mine.check_directory() == "here" and not OwnDirectory(str(path), os.getuid()).lock_directory(), (
        "it is the one agent here, too"
    )


@pytest.mark.parametrize("kind", ["of all", "of another agent", "a link", "a file"])
def test_what_is_not_the_jobs_directory_is_not_moved_into(path: Path, kind: str) -> None:
    mine = held(path)
    before = replaced(path, 0o755 if kind == "of all" else 0o700)
    other = OwnDirectory(str(path), os.getuid())
    if kind == "of another agent":
        assert other.lock_directory()
    elif kind != "of all":
        path.rmdir()
        path.symlink_to(before) if kind == "a link" else path.touch()
    assert mine.check_directory() == "gone"


@pytest.mark.parametrize(("source", "found"), [("somebody", "gone"), (mounts.SOURCE, "moved")])
def test_only_what_root_has_mounted_is_moved_into(
    path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: str
) -> None:
    """A user's file system is known by its mount: nothing else of it is looked at."""
    mine = held(path)
    replaced(path)
    monkeypatch.setattr(own_directory, "_find_mount", lambda fd: 4711)
    monkeypatch.setattr(mounts, "read_mount_number", lambda fd: 1)
    monkeypatch.setattr(mounts, "find_mount", lambda fd: mounts.Mount(4711, str(path), "tmpfs", source))
    asked = list[int]()
    with monkeypatch.context() as patched:
        patched.setattr(own_directory.os, "fstat", lambda fd: asked.append(fd) or os.stat(fd))
        assert mine.check_directory() == found
    assert bool(asked) is (found == "moved")


def test_what_is_mounted_in_the_sockets_place_is_not_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = held(path)
    (path / own_directory.SOCKET).unlink()
    (path / own_directory.SOCKET).mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(own_directory.os, "stat", lambda *_, **__: pytest.fail("it is asked what it is"))
        assert mine.check_directory() == "here"


@pytest.mark.parametrize(("source", "found"), [("somebody", "gone"), (mounts.SOURCE, "moved")])
def test_where_a_process_sees_no_mounts_of_its_descriptors_the_list_decides(
    path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: str
) -> None:
    monkeypatch.setattr(own_directory, "_find_mount", lambda fd: -1)
    over = mounts.Mount(4711, os.path.realpath(path), "tmpfs", source)
    monkeypatch.setattr(mounts, "list_mounts", lambda: [mounts.Mount(1, "/", "ext4", "/dev/sda"), over])
    mine = held(path)
    replaced(path)
    assert mine.check_directory() == found


@pytest.mark.slow
def test_an_agent_whose_directory_is_gone_is_found_in_the_next_one(make_agent: Callable[..., AgentProcess]) -> None:
    agent = make_agent()
    before = agent.directory.with_name(f"{agent.directory.name}-before")
    trainer = agent.trainer()
    trainer.step()
    agent.directory.rename(before)
    try:
        until(lambda: "event=unreachable" in (before / "log").read_text(), 10, what="it is told")
        trainer.step()  # who is connected goes on
        agent.directory.mkdir(0o700)
        until(agent.socket.exists, 10, what="a socket in the new directory")
        until(lambda: "event=reachable" in (before / "log").read_text(), 10, what="it is told")
        trainer.step()
        assert agent.caller().ask(local.Attach(JOB, 0, "n1", "n1", 1)) == local.Ready("mapped")
        agent.kill()
        agent.start(again=True)
        until(lambda: "event=restarted" in agent.log(), 10, what="its successor goes on from the files")
    finally:
        shutil.rmtree(before)


@pytest.mark.slow
def test_an_agent_whose_socket_is_removed_makes_another(make_agent: Callable[..., AgentProcess]) -> None:
    agent = make_agent()
    agent.socket.unlink()
    until(agent.socket.exists, 10, what="a socket")
    assert agent.caller().ask(local.Attach(JOB, 0, "n1", "n1", 1)) == local.Ready("mapped")


def test_an_agent_waits_for_the_directory_of_one_that_is_still_dying(agent: AgentProcess) -> None:
    """To end a killed one takes the kernel a while, as it gives much memory back. Nobody starts a third one."""
    agent.process.kill()
    agent.process.wait(10)
    dying = os.open(agent.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(dying, fcntl.LOCK_EX)
    gone = threading.Timer(0.5, os.close, (dying,))
    gone.start()
    agent.start(again=True)
    gone.join()
    assert agent.process.poll() is None
