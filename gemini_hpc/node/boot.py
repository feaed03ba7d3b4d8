"""The program that makes slurmd forget the jobs of an earlier boot. Root runs it before slurmd starts.

    python3 -I -m gemini_hpc.node.boot

slurmd runs no prolog for a job that it knows, and its spool keeps the known jobs (`cred_state`). After a power loss
the file still names the jobs that the reboot has ended. Such a job, requeued, would come back to the node without a
prolog: without its agent, unprotected, from step 0. slurmd without the file starts as on a new node. The file of the
present boot is left alone, so the program may run at any time.

Exit status: 0; 1 if a file could not be removed or slurm.conf not be read.
"""

from __future__ import annotations

import os
import stat
import sys

from gemini_hpc import clock, lines
from gemini_hpc.node import ledger
from gemini_hpc.node import slurm_conf as conf

_SLURM_CONF = "/etc/slurm/slurm.conf"
_NAMES = ("cred_state", "cred_state.old")
# Usual spools of nodes that get slurm.conf from slurmctld; slurmd keeps a copy there.
_CONFIGLESS = ("/var/spool/slurmd", "/var/spool/slurm/d", "/var/spool/slurm", "/var/lib/slurm/slurmd")
_CACHED = "conf-cache/slurm.conf"


def find_slurm_conf() -> str:
    """Return the path of this node's slurm.conf, or of the copy that slurmd keeps.

    Raises:
        FileNotFoundError: There is none in the usual places.
    """
    cached = (f"{spool}/{_CACHED}" for spool in _CONFIGLESS)
    for path in (os.environ.get("SLURM_CONF", ""), _SLURM_CONF, *cached):
        if path and os.path.exists(path):
            return path
    raise FileNotFoundError(2, "no slurm.conf here, and no copy of it in a spool; set SLURM_CONF", _SLURM_CONF)


def remove_known_jobs(spool: str) -> list[str]:
    """Remove slurmd's record of the jobs of earlier boots, and return the paths removed.

    Raises:
        OSError: A file could not be removed.
    """
    booted = clock.time() - ledger.read_boot_clock_s()
    removed = []
    for path in (f"{spool}/{name}" for name in _NAMES):
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode) and found.st_mtime < booted:
            os.unlink(path)
            removed.append(path)
    return removed


def main() -> int:
    """Remove the record and return the exit status. Never raise."""
    try:
        node = os.uname().nodename.split(".")[0]
        for path in remove_known_jobs(conf.find_spool(conf.read_values(find_slurm_conf()), node)):
            lines.put(sys.stdout, f"gemini-hpc: removed {path}: jobs that come back to this node run their prologs\n")
    except OSError as exc:
        lines.put(
            sys.stderr,
            f"gemini-hpc: {exc.filename}: {exc.strerror}: a job that comes back to this node may run without its "
            "prolog, unprotected\n",
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
