"""The controller's lock is found on file systems whose files have other device numbers than /proc/locks says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemini_hpc.doctor import controller
from gemini_hpc.node.mounts import parse_mountinfo

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import fcntl, sys, time
held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""
LOOK = """
import sys
sys.path.insert(0, "{root}")
from gemini_hpc.doctor import controller
print(controller.find_holder(sys.argv[1], []))
"""
# Runs in a mount namespace of its own; the first word is where to mount, the rest the command.
OVERLAY = """
set -e
mount --make-rprivate /
mount -t tmpfs none "$1"
cd "$1"
mkdir lower upper work merged lower/state
touch lower/state/lock
mount -t overlay none -o lowerdir=lower,upperdir=upper,workdir=work merged
cd /
shift
exec "$@"
"""
PROGRAM = """
import os, subprocess, sys
path, hold, look = sys.argv[1:]
holder = subprocess.Popen([sys.executable, "-c", hold, path], stdout=subprocess.PIPE)
holder.stdout.readline()
ask = lambda: subprocess.run([sys.executable, "-c", look, path], capture_output=True, text=True).stdout.strip()
device = os.stat(path).st_dev
text = open("/proc/locks").read()
known = f"{os.major(device):02x}:{os.minor(device):02x}:{os.stat(path).st_ino}" in text
print(holder.pid, ask(), "same" if known else "other")
holder.kill(); holder.wait()
print(ask())
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    path = tmp_path / "gemini-hpc.lock"
    path.touch()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield path, process
        process.kill()


def test_the_holder_is_found(held: tuple[Path, subprocess.Popen[str]]) -> None:
    path, process = held
    assert controller.find_holder(str(path), []) == process.pid
    assert controller.find_holder(str(path), [os.getpid(), process.pid]) == process.pid
    process.kill()
    process.wait()
    assert controller.find_holder(str(path), [os.getpid()]) is None


def test_an_open_file_that_is_not_locked_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w"):
        assert controller.find_holder(str(path), [os.getpid()]) is None


def test_a_lock_on_another_file_of_the_same_number_is_not_ours(held: tuple[Path, subprocess.Popen[str]]) -> None:
    path, process = held
    text = (
        f"1: FLOCK  ADVISORY  WRITE {process.pid} 00:99:{path.stat().st_ino} 0 EOF\n2: POSIX ADVISORY READ 3 x 0 0\n"
    )
    assert controller.find_pids_by_inode(path.stat(), text) == [process.pid]
    other = path.with_name("other")
    other.touch()
    assert not controller.holds_lock(process.pid, other.stat())


@pytest.mark.cluster
def test_overlayfs(tmp_path: Path) -> None:
    """A lock that is taken on a file of a lower layer, as in a container's image."""
    place = tmp_path / "place"
    place.mkdir()
    look = LOOK.format(root=ROOT)
    argv = ["unshare", "-m", "sh", "-c", OVERLAY, "sh", str(place), sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        [*argv, str(place / "merged/state/lock"), HOLD, look], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    first, after = done.stdout.splitlines()
    pid, found, _ = first.split()
    assert found == pid and after == "None"


MOUNTS = (
    "22 1 0:21 / / rw - btrfs /dev/sda2 rw\n"
    "30 22 0:21 /@var {top}/var rw - btrfs /dev/sda2 rw\n"
    "31 22 0:40 / {top}/shared rw - nfs4 s:/x rw\n"
    "32 22 0:41 / {top}/a\\\\040b rw - tmpfs none rw\n"
)


def test_which_file_system(tmp_path: Path) -> None:
    """Two subvolumes of one btrfs are one file system; stat gives each a number of its own."""
    for name in ("var", "shared", "a b", "varied"):
        (tmp_path / name).mkdir()
    text = MOUNTS.format(top=os.path.realpath(tmp_path)).replace("\\\\040", "\\040")
    visible = list(parse_mountinfo(text))
    on = {n: controller.find_file_system(str(tmp_path / n), visible) for n in ("var", "shared", "a b", "varied")}
    assert on == {"var": "0:21", "shared": "0:40", "a b": "0:41", "varied": "0:21"}
    with pytest.raises(FileNotFoundError):
        controller.find_file_system(str(tmp_path / "nowhere"), visible)
