"""Hosts on which something that doctor looks at is not there, closed or odd: no check breaks, and each says what is
missing. In mount namespaces of this machine; no cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.config import Settings
from gemini_hpc.doctor.examine import CHECKS, build_document, examine
from gemini_hpc.doctor.facts import Configuration, Here, HostFacts, SlurmRelease
from gemini_hpc.doctor.finding import Unavailable

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
TOOLS = [f"/usr/bin/{name}" for name in ("scontrol", "squeue", "sinfo", "sacctmgr", "sbatch", "srun", "munge")]
LIBRARIES = [f"/usr/lib/{os.uname().machine}-linux-gnu/libmunge.so.2"]
TMPFS = "mount -t tmpfs -o mode=0755 none"
ROLES = ("auto", "controller", "node", "login")


def hidden(*paths: str) -> str:
    """Shell lines that put an empty file, or an empty directory, over what is there."""
    lines = []
    for path in paths:
        real = os.path.realpath(path)
        if os.path.isdir(real):
            lines.append(f"mount -t tmpfs -o mode=0755 none {real}")
        elif os.path.exists(real):
            lines.append(f"mount --bind /dev/null {real}")
    return "\n".join(lines)


# What a host lacks, as shell lines that are run in a mount namespace of its own.
HOSTS = {
    "bare": hidden(*TOOLS, *LIBRARIES, "/usr/sbin/munged", "/etc/slurm", "/etc/munge", "/opt"),
    "no-slurm": hidden(*TOOLS, "/etc/slurm"),
    "no-munge-library": hidden(*LIBRARIES),
    "no-slurm-conf": hidden("/etc/slurm"),
    "no-users": hidden("/etc/passwd", "/etc/group"),
    "no-proc": f"{TMPFS} /proc",
    "no-network-files": hidden("/proc/net", "/proc/sys/net/ipv4/ip_local_port_range", "/proc/locks"),
    "broken-tools": "for f in /usr/bin/scontrol /usr/bin/squeue; do mount --bind /bin/false $f; done",
    "silent-tools": "for f in /usr/bin/scontrol /usr/bin/squeue; do mount --bind /bin/true $f; done",
    "talking-tools": "for f in /usr/bin/scontrol /usr/bin/squeue; do mount --bind /bin/echo $f; done",
    "half-installed": f"{TMPFS} /opt; mkdir -p /opt/gemini-hpc/venv/bin /opt/gemini-hpc/prolog_epilog; "
    "touch /opt/gemini-hpc/venv/bin/python3",
    "broken-interpreter": f"{TMPFS} /opt; mkdir -p /opt/gemini-hpc/venv/bin; "
    "ln -s /bin/echo /opt/gemini-hpc/venv/bin/python3",
    "a-file-for-a-directory": f"{TMPFS} /opt; touch /opt/gemini-hpc; {TMPFS} /var/lib; "
    f"touch /var/lib/gemini-hpc; {TMPFS} /run; touch /run/gemini-hpc",
    "closed": f"{TMPFS} /opt; mkdir -m 0700 /opt/gemini-hpc; {TMPFS} /var/lib; "
    f"mkdir -m 0700 /var/lib/gemini-hpc; {TMPFS} /etc/slurm; chmod 0700 /etc/slurm",
    "dangling": f"{TMPFS} /opt; mkdir -p /opt/gemini-hpc/venv/bin; "
    f"ln -s /root/nowhere/python3 /opt/gemini-hpc/venv/bin/python3; {TMPFS} /var/lib; "
    "ln -s /var/lib/gemini-hpc /var/lib/gemini-hpc",
}  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package where an ordinary user can read it."""
    place = Path("/var/tmp") / f"doctor-hosts-{os.getpid()}"
    place.mkdir(mode=0o755)
    shutil.copytree(ROOT / "gemini_hpc", place / "gemini_hpc", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("msgspec", "xxhash"):
        found = __import__(name).__file__
        shutil.copytree(Path(str(found)).parent, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True)
    yield place
    shutil.rmtree(place)


# One interpreter looks at the host in each role: the documents stand one behind the other.
IN_EACH_ROLE = (
    "import sys; sys.path[:0] = ['{package}']; from gemini_hpc.cli.main import main;"
    "sys.exit(min(main([*sys.argv[1:], '--host-role', role]) for role in {roles!r}))"
)


def doctor(
    package: Path, host: str, uid: int, *args: str, roles: tuple[str, ...] = ("auto",)
) -> subprocess.CompletedProcess[str]:
    """Run it; its status is the least of all roles."""
    code = IN_EACH_ROLE.format(package=package, roles=roles)
    inner = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
    script = f"mount --make-rprivate /\n{HOSTS[host]}\n" + 'exec "$@"'
    python = os.path.realpath("/usr/bin/python3")
    argv = ["unshare", "-m", "sh", "-c", script, "sh", *inner, python, "-I", "-B", "-c", code, "doctor", *args]
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
    return subprocess.run(argv, capture_output=True, text=True, timeout=110, env=env, cwd="/", check=False)


def broken(document: dict[str, Any]) -> list[str]:
    return [f"{c['check']}: {c['found']}" for c in document["checks"] if "this check broke" in c["found"]]


def documents(text: str) -> list[dict[str, Any]]:
    found = []
    while text := text.lstrip():
        document, end = json.JSONDecoder().raw_decode(text)
        found.append(document)
        text = text[end:]
    return found


@pytest.mark.parametrize("uid", [0, NOBODY])
def test_no_check_breaks(package: Path, uid: int) -> None:
    for host in HOSTS:
        done = doctor(package, host, uid, "--json", roles=ROLES)
        assert "Traceback" not in done.stderr and done.returncode == 1, (host, done.stderr)
        found = documents(done.stdout)
        assert len(found) == len(ROLES), (host, done.stdout)
        for role, document in zip(ROLES, found, strict=True):
            assert broken(document) == [], (host, role)
            assert document["counts"]["wrong"] >= 1 and document["status"] == 1, (host, role)
            told = [c for c in document["checks"] if c["status"] in ("warning", "wrong")]
            assert all(c["wanted"] and c["fix"] for c in told), (host, role)


def test_nothing_is_installed(package: Path) -> None:
    done = doctor(package, "bare", 0)
    text = " ".join(done.stdout.split())
    assert "WRONG install.parts not on this host: Slurm's commands (scontrol); MUNGE" in text
    assert "/opt/gemini-hpc/venv/bin/python3" in text and "docs/install.md" in text
    assert "make demo" in text and "defect" not in text
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_only_gemini_hpc_is_missing(package: Path) -> None:
    done = doctor(package, "no-slurm-conf", 0, "--json", "--only", "install")
    (found,) = json.loads(done.stdout)["checks"]
    assert (found["check"], found["status"]) == ("install.parts", "wrong")
    assert found["found"].startswith("gemini-hpc is not installed on this host")


# ---- who can use what is installed ----------------------------------------------------------------------

INSTALL = """
mount -t tmpfs -o mode=0755 none /opt
mount -t tmpfs -o mode=0755 none /etc/slurm
mkdir -m 0755 /etc/gemini-hpc 2>/dev/null
mount -t tmpfs -o mode=0755 none /etc/gemini-hpc; umask {umask}
{before}
{python} -m venv --without-pip /opt/gemini-hpc/venv
cp -r {package}/* /opt/gemini-hpc/venv/lib/python3.*/site-packages/
touch /etc/gemini-hpc/gemini.toml
"""
HOME = "mount -t tmpfs -o mode=0700 none /root; mkdir /root/py; cp /usr/bin/python3.11 /root/py/python3"


@pytest.mark.parametrize(
    ("umask", "before", "python", "words"),
    [
        ("022", "", "/usr/bin/python3", []),
        ("027", "", "/usr/bin/python3", ["the group root", "/opt/gemini-hpc", "0750"]),
        ("077", "", "/usr/bin/python3", ["only root", "/opt/gemini-hpc", "0700"]),
        ("022", HOME, "PYTHONHOME=/usr /root/py/python3", ["directory /root ", "0700"]),
    ],
)
def test_who_cannot_use_what(
    package: Path, monkeypatch: pytest.MonkeyPatch, umask: str, before: str, python: str, words: list[str]
) -> None:
    """Installed for real, and looked at as root and as an owner of jobs."""
    host = INSTALL.format(umask=umask, before=before, python=python, package=package)
    monkeypatch.setitem(HOSTS, "installed", f"( {host} ) >&2 || exit 1")
    for uid in (0, NOBODY):
        done = doctor(package, "installed", uid, "--json", "--only", "files.access")
        assert done.stdout, done.stderr
        (found,) = json.loads(done.stdout)["checks"]
        assert found["check"] == "files.access", uid
        assert found["status"] == ("wrong" if words else "ok"), (uid, found)
        if uid == 0:
            assert [w for w in words if w not in found["found"]] == [], uid
        if words:
            assert "umask 022" in found["fix"] and "/usr/bin/python3" in found["fix"], uid


def test_one_closed_file_of_a_package_is_named(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = INSTALL.format(umask="022", before="", python="/usr/bin/python3", package=package)
    closed = "chmod 0640 /opt/gemini-hpc/venv/lib/python3.*/site-packages/gemini_hpc/agent/daemon.py"
    monkeypatch.setitem(HOSTS, "installed", f"( {host} {closed} ) >&2 || exit 1")
    done = doctor(package, "installed", 0, "--json", "--only", "files.access")
    (found,) = json.loads(done.stdout)["checks"]
    assert found["status"] == "wrong" and "gemini_hpc/agent/daemon.py (mode 0640)" in found["found"]


# ---- facts that cannot be had, one at a time -------------------------------------------------------------

FACTS = {
    "settings": Settings(controller_host="localhost", controller_port=1),
    "configuration": Configuration(
        {"SLURM_VERSION": "22.05.8", "StateSaveLocation": "/nowhere", "SLURM_CONF": "/x/y"}
    ),
    "release": SlurmRelease(22, 5, 8),
    "nodes": {},
    "reservations": [],
    "queue": {},
    "processes": [],
}


class Lacking(HostFacts):
    """A host of all kinds, of which one thing is not known, or nothing can be told."""

    def __init__(self, *missing: str) -> None:
        super().__init__("/nonexistent/gemini.toml")
        self._known |= FACTS | {name: Unavailable(f"no {name}") for name in missing}
        self._known["roles"] = frozenset(("controller", "node", "login"))


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("uid", [0, NOBODY])
def test_each_fact_missing(uid: int) -> None:
    for missing in ((), *((name,) for name in FACTS), tuple(FACTS)):
        with as_user(uid):
            found = list(examine(Lacking(*missing)))
        document = build_document(found, Here("h", "", None), ["node"], "root", "", 0, 0.0)
        assert len(found) == len(CHECKS) and broken(document) == [], missing


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file or directory", "/etc/x"), OSError(107, "gone")])
def test_a_file_that_is_not_there_is_no_defect(error: OSError) -> None:
    def look(_: HostFacts) -> Any:
        raise error

    checks = (type(CHECKS[0])("a.b", "x", frozenset(("node", "login", "controller")), look),)
    (found,) = examine(Lacking(), checks=checks)
    assert found.status == "wrong" and "broke" not in found.found and str(error.strerror) in found.found
