"""The root of a release: a Debian with its Slurm, made once by debootstrap and kept; runs only read it.

`CACHE/slurm-RELEASE-DIGEST` appears as a whole, by a rename; DIGEST is of what it is made from (suite, packages,
recipe), so that two checkouts that want different ones do not take turns. A run holds a shared lock on it. It is made
anew on request only (sid moves on), with the exclusive lock; one that nobody has used for long is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import machine
from .errors import ReleaseError

CACHE = Path("/var/cache/gemini-hpc")
# Slurm's major.minor -> the Debian that has it.
SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "sid"}
SCRIPT = Path(__file__).with_name("make_root.sh")
# Beside the packages of the Makefile: `scontrol --json` needs its plugins, and people in a root need to look around.
_MORE_PACKAGES = ("slurmrestd", "python3-dev")
_MAKING_LIMIT_S = 1800.0
_UNUSED_S = 14 * 86400.0


@dataclass(frozen=True)
class Recipe:
    """What a root is made from."""

    release: str
    mirror: str
    packages: tuple[str, ...]

    @property
    def suite(self) -> str:
        return SUITES[self.release]

    @property
    def digest(self) -> str:
        """Of all but the mirror: the same packages come from any."""
        text = json.dumps([self.suite, sorted(self.packages)]).encode() + SCRIPT.read_bytes()
        return hashlib.sha256(text).hexdigest()[:8]


def recipe(release: str, checkout: Path, mirror: str | None) -> Recipe:
    if release not in SUITES:
        raise ReleaseError(f"wanted one of the releases {', '.join(SUITES)}, found {release!r}")
    packages = (*machine.packages(checkout), *_MORE_PACKAGES)
    return Recipe(release, mirror or machine.mirror(), packages)


@contextmanager
def held(cache: Path, wanted: Recipe, *, anew: bool = False) -> Iterator[Path]:
    """The root, made if need be; nobody replaces it until the end."""
    cache.mkdir(mode=0o755, parents=True, exist_ok=True)
    root = cache / f"slurm-{wanted.release}-{wanted.digest}"
    fd = _open_lock(root)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        while anew or not root.is_dir():
            _exclusively(fd, root)
            if anew or not root.is_dir():  # another may have made it while this one waited
                _make(root, wanted)
                _remove_unused(cache)
            anew = False
            fcntl.flock(fd, fcntl.LOCK_SH)
        os.utime(_lock(root))
        yield root
    finally:
        os.close(fd)


def _lock(root: Path) -> Path:
    return root.with_name(f"{root.name}.lock")


def _open_lock(root: Path) -> int:
    return os.open(_lock(root), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _exclusively(fd: int, root: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{root} is in use or being made: waiting for that", flush=True)
        fcntl.flock(fd, fcntl.LOCK_EX)


def _remove_unused(cache: Path) -> None:
    """Roots that no run has used for `_UNUSED_S`. Their locks stay: a name that another may just be opening."""
    for lock in cache.glob("slurm-*.lock"):
        root = lock.with_suffix("")
        if not root.is_dir() or time.time() - lock.stat().st_mtime < _UNUSED_S:
            continue
        fd = _open_lock(root)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


def _stamp(root: Path) -> Path:
    return root / "etc" / "gemini-hpc-root.json"


def _make(root: Path, wanted: Recipe) -> None:
    """With the exclusive lock, so that what an earlier attempt has left is nobody's."""
    new, log, conf = (root.with_name(f"{root.name}.{what}") for what in ("new", "log", "apt.conf"))
    shutil.rmtree(new, ignore_errors=True)
    print(f"making {root}: Debian {wanted.suite} from {wanted.mirror}, a few minutes (log: {log})", flush=True)
    conf.write_text(machine.apt_settings())
    began = time.monotonic()
    try:
        with log.open("wb") as output:
            _run(
                [str(SCRIPT), wanted.suite, str(new), wanted.mirror, str(conf), *wanted.packages],
                output.fileno(),
                log,
            )
        found = _slurm_of(new)
        if not found.startswith(f"{wanted.release}."):
            raise ReleaseError(
                f"Debian {wanted.suite} has Slurm {found} now, not {wanted.release}: change `SUITES` in {__file__}"
            )
        stamp = {"suite": wanted.suite, "slurm": found, "made": time.strftime("%Y-%m-%d")}
        _stamp(new).write_text(json.dumps(stamp) + "\n")
        shutil.rmtree(root, ignore_errors=True)
        new.rename(root)
    finally:
        conf.unlink(missing_ok=True)
        shutil.rmtree(new, ignore_errors=True)
    print(f"made {root}: Slurm {found}, {time.monotonic() - began:.0f} s", flush=True)


def _run(argv: list[str], output: int, log: Path) -> None:
    """In namespaces of its own: mounts and processes end with it, and it ends with this process."""
    program = shutil.which("debootstrap", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise ReleaseError(
            "debootstrap is not installed: `make test-slurm` installs it, or apt-get install debootstrap"
        )
    process = subprocess.Popen(
        [*NAMESPACES, *argv], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        if process.wait(_MAKING_LIMIT_S):
            tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-8:])
            raise ReleaseError(f"the root could not be made; {log} ends:\n  {tail}")
    except subprocess.TimeoutExpired:
        raise ReleaseError(f"the root was not made within {_MAKING_LIMIT_S:g} s; see {log}") from None
    finally:
        process.kill()
        process.wait()


# A killed tool takes unshare with it, and that its process 1 with all of the pid namespace.
NAMESPACES = (
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--fork", "--pid", "--kill-child", "--mount", "--uts", "--ipc", "--propagation", "private", "--"),
)


def _slurm_of(root: Path) -> str:
    """The release of the root's slurmd, as in "24.11.5"."""
    done = subprocess.run(
        ["chroot", str(root), "/usr/sbin/slurmd", "-V"], capture_output=True, text=True, timeout=30.0, check=False
    )
    found = re.search(r"\d+\.\d+\.\d+", done.stdout)
    if found is None:
        raise ReleaseError(f"slurmd of the new root does not tell its release: {done.stdout}{done.stderr}")
    return found[0]


def described(root: Path) -> str:
    """One line on a root, for its user."""
    stamp = json.loads(_stamp(root).read_text())
    return f"Slurm {stamp['slurm']} on Debian {stamp['suite']} as of {stamp['made']} ({root})"
