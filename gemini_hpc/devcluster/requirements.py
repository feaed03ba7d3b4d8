"""The requirements of a cluster on this machine."""

from __future__ import annotations

import os
import pwd
import shutil

from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.profiles import Profile

# program -> the Debian package that contains it
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
# Only for profiles with accounting. The package mariadb-server is not needed: it would start its own server.
ACCOUNTING_PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "sacctmgr": "slurm-client",
    "mariadbd": "mariadb-server-core",
}
# A user's PATH often lacks the sbin directories, which contain the daemons.
SEARCH_PATH = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
)


def find_program(name: str) -> str:
    """Return the absolute path of a program of `PROGRAMS` or `ACCOUNTING_PROGRAMS`."""
    found = shutil.which(name, path=SEARCH_PATH)
    if found is None:
        package = {**PROGRAMS, **ACCOUNTING_PROGRAMS}[name]
        raise DevclusterError(f"{name} is not installed: it is in the Debian package {package}")
    return found


def check_root() -> None:
    """Raise `DevclusterError` unless this process runs as root."""
    if os.geteuid() != 0:
        raise DevclusterError(
            f"the development cluster needs root (namespaces, mounts, Slurm's daemons), this is uid {os.geteuid()}: "
            "use sudo"
        )


def check(profile: Profile | None = None) -> None:
    """Raise `DevclusterError` for the first unmet requirement, with all missing programs in one message.

    With `profile`, also check the additional needs of this profile.
    """
    check_root()
    wanted = {**PROGRAMS, **(ACCOUNTING_PROGRAMS if profile and profile.accounting else {})}
    missing = [name for name in wanted if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        packages = " ".join(sorted({wanted[name] for name in missing}))
        why = f" (profile {profile.name})" if profile and not PROGRAMS.keys() & set(missing) else ""
        raise DevclusterError(
            f"{', '.join(missing)} not found{why}; on Debian: apt-get install --no-install-recommends {packages}"
        )
    try:
        pwd.getpwnam("slurm")
    except KeyError:
        raise DevclusterError("there is no user slurm: Debian's package slurmctld creates it") from None
