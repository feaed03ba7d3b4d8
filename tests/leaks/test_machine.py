"""Whatever a test may leave on the machine is planted here, and must be found; what is nobody's fault must not."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import until

from gemini_hpc.devcluster import Cluster

from . import assert_nothing_new, machine, new

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


@contextmanager
def planted(*words: str) -> Iterator[None]:
    """What is made inside is found, in one line that holds all `words`; `assert_nothing_new` fails."""
    before = machine.present()
    try:
        yield
        found = new(before, machine.present())
        assert len(found) == 1 and all(word in found[0] for word in words), found
        with pytest.raises(AssertionError, match=words[0]):
            assert_nothing_new(before, machine.present, 0.0)
    finally:
        machine.rescan()


def test_a_child() -> None:
    with planted("sleep 61"):
        child = subprocess.Popen(["sleep", "61"], env={})
    child.kill()
    child.wait()


def test_an_orphan_in_a_session_of_its_own() -> None:
    with planted("sleep 62", "test_an_orphan"):
        start = ["sh", "-c", "setsid sleep 62 >/dev/null 2>&1 & echo $!"]
        pid = int(subprocess.run(start, check=True, capture_output=True, text=True).stdout)
        until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", what="it has been started")
    os.kill(pid, signal.SIGKILL)


def test_a_process_that_ends_in_time_is_no_leak() -> None:
    before = machine.present()
    with subprocess.Popen(["sleep", "0.5"]):

        def look() -> dict:  # type: ignore[type-arg]
            machine.rescan()
            return machine.present()

        assert new(before, look())
        assert_nothing_new(before, look, 10.0)


def test_a_descriptor_of_replica_memory() -> None:
    with planted("memfd"):
        fd = os.memfd_create("gemini:planted")
    os.close(fd)


def test_a_mapping_of_replica_memory() -> None:
    with planted("memfd"):
        fd = os.memfd_create("gemini:planted")
        os.ftruncate(fd, 4096)
        mapped = mmap.mmap(fd, 4096, trackfd=False) if sys.version_info >= (3, 13) else mmap.mmap(fd, 4096)
        os.close(fd)
    mapped.close()


def test_other_memory_is_not_ours() -> None:
    before = machine.present()
    fd = os.memfd_create("somebody's")
    assert not new(before, machine.present())
    os.close(fd)


@pytest.mark.parametrize("directory", ["", "/dev/shm", "/var/lib"])
def test_a_file(directory: str) -> None:
    import tempfile

    with planted("file", "gemini-planted"):
        fd, path = tempfile.mkstemp(prefix=f"gemini-planted-{machine.PID}-", dir=directory or None)
    os.close(fd)
    os.unlink(path)


def cgroups() -> Path:
    """The hierarchy in which agents would have theirs."""
    return next(path for path in (machine.CGROUPS / "memory", machine.CGROUPS) if (path / "cgroup.procs").exists())


def test_a_cgroup_without_processes() -> None:
    own = cgroups() / f"gemini-planted-{machine.PID}"
    try:
        with planted("cgroup", own.name):
            own.mkdir()
            before = machine.present()
        # While a process is in it, the process is what there is to find.
        with subprocess.Popen(["sleep", "63"]) as child:
            (own / "cgroup.procs").write_text(str(child.pid))
            there = set(new({}, machine.present())) - set(new({}, before))
            assert [text for text in there if "sleep 63" in text] and not [t for t in there if "cgroup" in t]
            child.kill()
    finally:
        own.rmdir()


@pytest.mark.parametrize(
    ("cluster", "count"), [(f"x{machine.PID}", 1), (f"x{machine.PID}1", 0)], ids=["ours", "a stranger's"]
)
def test_a_cgroup_of_a_cluster_is_its_owner_s(cluster: str, count: int) -> None:
    before, own = machine.present(), cgroups() / f"gemini-devcluster-{cluster}"
    own.mkdir()
    try:
        assert len([text for text in new(before, machine.present()) if own.name in text]) == count
    finally:
        own.rmdir()


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("ip link add planted0 type veth peer name planted1", "network link planted"),
        ("ip netns add planted", "network namespace planted"),
        (f"mkdir {machine.RUN_DIRECTORY}", f"file {machine.RUN_DIRECTORY}"),
        ("mkdir /run/gemini-planted; mount -t tmpfs tmpfs /run/gemini-planted", "mount /run/gemini-planted"),
    ],
)
def test_network_mounts_and_the_run_directory(command: str, word: str) -> None:
    """In namespaces of their own: other tests watch the machine's."""
    code = (
        "import subprocess; from leaks import machine, new; before = machine.present(); "
        f"subprocess.run({command!r}, shell=True, check=True); print(new(before, machine.present()))"
    )
    private = 'mount --make-rprivate / && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /run && exec "$@"'
    argv = ["unshare", "-n", "-m", "sh", "-c", private, "sh", sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env, cwd="/", timeout=60)
    assert done.returncode == 0, done.stderr
    assert word in done.stdout


@pytest.mark.cluster
def test_a_cluster() -> None:
    name = f"leak{machine.PID}"
    try:
        with planted(f"cluster {name}"):
            cluster = Cluster.bring_up(name, nodes=1, site=False, controller=False)
        assert not machine.ours(f"leak{machine.PID}1") and not machine.ours(f"leak1{machine.PID}-0")
    finally:
        cluster.tear_down()


LEAKY = """
import os, subprocess
import pytest
import conftest
from leaks import machine
conftest.SETTLE_S = 0.3
machine.strangers = lambda: []  # whoever else tests here now

def test_clean(): subprocess.run(["true"], check=True)
def test_process(): subprocess.Popen(["sleep", "64"])
def test_memory(): os.memfd_create("gemini:planted")
def test_failed():
    os.memfd_create("gemini:planted")
    assert False
def test_clean_again(): pass
"""
GROWING = """
import conftest
from leaks import machine
conftest.SETTLE_S = 0.3
machine.strangers = lambda: []

def test_shared_memory():
    with open("{path}", "wb") as f:
        f.write(bytes(100 << 20))
"""


def inner(path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A pytest run of its own, with the leak check of all tests."""
    (path / "test_leaky.py").write_text(text)
    argv = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", "/dev/null", "-p", "no:cacheprovider", "-rA"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    env |= {"PYTHONPATH": f"{TESTS}:{TESTS.parent}:{env.get('PYTHONPATH', '')}"}
    argv += [*options, "--rootdir", str(path), str(path)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=env, cwd=path, timeout=120)


@pytest.mark.parametrize("options", [[], ["-n", "2", "--dist", "loadfile"]], ids=["alone", "workers"])
def test_the_test_that_leaks_is_named(tmp_path: Path, options: list[str]) -> None:
    before = machine.present()
    done = inner(tmp_path, LEAKY, *options)
    subprocess.run(["pkill", "-f", "^sleep 64$"], check=False)
    lines = done.stdout.splitlines()
    for word, names in (
        ("PASSED", {"clean", "process", "memory", "clean_again"}),
        ("ERROR", {"process", "memory"}),
        ("FAILED", {"failed"}),
    ):
        told = {line.split("::test_")[1].split()[0] for line in lines if line.startswith(word) and "::" in line}
        # What is still there when all tests of a file are over is told once more, with its last test.
        assert names <= told <= names | ({"clean_again"} if word == "ERROR" else set()), done.stdout
    assert (
        "process " in done.stdout and "sleep 64" in done.stdout and "memory of the tests' own process" in done.stdout
    )
    assert_nothing_new(before, machine.present, 10.0)


def test_shared_memory_of_the_whole_run(tmp_path: Path) -> None:
    path = Path(f"/dev/shm/planted-{machine.PID}")
    try:
        done = inner(tmp_path, GROWING.format(path=path))
        assert done.returncode == 1 and "1 passed" in done.stdout
        assert "MiB of shared memory more than before the tests" in done.stdout, done.stdout
    finally:
        path.unlink(missing_ok=True)
