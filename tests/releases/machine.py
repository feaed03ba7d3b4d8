"""What this machine is set up with and a root needs, too: the mirror of apt, apt's way to it, the Python of .venv."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from .errors import ReleaseError

# How to get to a mirror; what else apt is told (hooks, caches, lists) is this machine's alone.
_NETWORK = re.compile(r"Acquire::(http|https|ForceIPv|Check-|Retries|Queue-Mode)", re.IGNORECASE)


def _output(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=60.0, check=True).stdout
    except (OSError, subprocess.SubprocessError) as exc:
        raise ReleaseError(f"{' '.join(argv)}: {exc}; a root is made on Debian, with apt") from None


def mirror() -> str:
    """The Debian mirror that apt on this machine uses."""
    wanted = "$(REPO_URI)\t$(ORIGIN)\t$(LABEL)\t$(COMPONENT)"
    for line in _output("apt-get", "indextargets", "--format", wanted, "Created-By: Packages").splitlines():
        uri, origin, label, component = line.split("\t")
        # Where apt has no lists yet it does not know whose the mirror is.
        debian = origin == label == "Debian" if origin else uri.rstrip("/").endswith("/debian")
        if debian and component == "main":
            return uri
    raise ReleaseError("apt on this machine has no mirror of Debian's main archive: name one with --mirror URL")


def apt_settings() -> str:
    """Proxy, time-outs and checks of dates of this machine's apt, as a file for apt.conf.d."""
    lines = [line for line in _output("apt-config", "dump").splitlines() if _NETWORK.match(line)]
    return "\n".join([*lines, 'Acquire::Languages "none";', 'APT::Sandbox::User "root";', ""])


def packages(checkout: Path) -> list[str]:
    """The Debian packages that the Makefile of `checkout` wants for clusters."""
    argv = ("make", "-s", "--no-print-directory", "-C", str(checkout), "debian-packages")
    return _output(*argv).split()


def python(checkout: Path) -> Path:
    """The interpreter below the .venv of `checkout`: /usr/bin/pythonX.Y of a Debian."""
    link = checkout / ".venv" / "bin" / "python"
    found = Path(os.path.realpath(link))
    if not found.exists():
        raise ReleaseError(f"{link} is not there: `make install` in {checkout} makes it")
    if not re.fullmatch(r"/usr/bin/python3\.\d+", str(found)):
        raise ReleaseError(
            f"{link} leads to {found}, and a root takes along only Debian's own Python: "
            f"make the .venv of {checkout} with /usr/bin/python3 -m venv"
        )
    return found
