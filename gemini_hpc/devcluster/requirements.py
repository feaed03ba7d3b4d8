"""What this machine must have before a cluster can start on it."""

from __future__ import annotations

import os
import pwd
import shutil

from gemini_hpc.devcluster.errors import DevclusterError

# Program -> the Debian package that brings it.
PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "sbatch": "slurm-client",
    "sinfo": "slurm-client",
    "scontrol": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "setsid": "util-linux",
}
# A user's PATH often lacks the sbin directories, where the daemons are.
SEARCH_PATH = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
)


def program(name: str) -> str:
    """The absolute path of a program of `PROGRAMS`."""
    found = shutil.which(name, path=SEARCH_PATH)
    if found is None:
        raise DevclusterError(f"{name} is not installed: it is in the Debian package {PROGRAMS[name]}")
    return found


def check_root() -> None:
    if os.geteuid() != 0:
        raise DevclusterError(
            f"the development cluster needs root (namespaces, mounts, Slurm's daemons), this is uid {os.geteuid()}: "
            "use sudo"
        )


def check() -> None:
    """Raise `DevclusterError` for the first thing that is missing, all missing programs in one message."""
    check_root()
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        packages = " ".join(sorted({PROGRAMS[name] for name in missing}))
        raise DevclusterError(
            f"{', '.join(missing)} not found; on Debian: apt-get install --no-install-recommends {packages}"
        )
    try:
        pwd.getpwnam("slurm")
    except KeyError:
        raise DevclusterError("there is no user slurm: Debian's package slurmctld creates it") from None
