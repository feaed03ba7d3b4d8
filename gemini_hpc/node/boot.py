"""The program that makes slurmd forget the jobs of an earlier boot. Root runs it before slurmd starts.

    python3 -I -m gemini_hpc.node.boot

slurmd runs no prolog for a job that it knows, and its spool keeps the known jobs (`cred_state`). After a power loss
the file still names the jobs that the reboot has ended. Such a job, requeued, would come back to the node without a
prolog: without its agent, unprotected, from step 0. slurmd without the file starts as on a new node. The file of the
present boot is left alone, so the program may run at any time.

The node's clock may be wrong when it boots, and be set while jobs run. A file that is younger than the clock is of an
earlier boot, too. After its first success in a boot, the program does nothing until the next.

Exit status: 0; 1 if a file could not be removed or slurm.conf not be read.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import suppress

from gemini_hpc import clock, lines
from gemini_hpc.node import ledger
from gemini_hpc.node import slurm_conf as conf

_SLURM_CONF = "/etc/slurm/slurm.conf"
_NAMES = ("cred_state", "cred_state.old")
# Usual spools of nodes that get slurm.conf from slurmctld; slurmd keeps a copy there.
_CONFIGLESS = ("/var/spool/slurmd", "/var/spool/slurm/d", "/var/spool/slurm", "/var/lib/slurm/slurmd")
_CACHED = "conf-cache/slurm.conf"
_MARK = "/run/gemini-hpc.boot"  # names the boot in which the program has succeeded


def find_slurm_conf() -> str:
    """Return the path of this node's slurm.conf, or of the copy that slurmd keeps.

    Raises:
        FileNotFoundError: There is none in the usual places.
    """
    host = os.uname().nodename.split(".")[0]
    cached = (f"{spool}/{below}{_CACHED}" for spool in _CONFIGLESS for below in ("", f"{host}/"))
    for path in (_read_slurmd_option("f"), os.environ.get("SLURM_CONF", ""), _SLURM_CONF, *cached):
        if path and os.path.exists(path):
            return path
    raise FileNotFoundError(2, "no slurm.conf here, and no copy of it in a spool; set SLURM_CONF", _SLURM_CONF)


def _read_slurmd_option(letter: str) -> str:
    """Return the value of an option that slurmd's unit passes to slurmd; "" if there is none."""
    found = re.search(rf"(?:^|\s)-{letter}\s*(\S+)", os.environ.get("SLURMD_OPTIONS", ""))
    return found[1].strip("\"'") if found else ""


def find_spools() -> list[str]:
    """Return the spools of the slurmds of this host.

    Raises:
        OSError: slurm.conf could not be read.
    """
    text = conf.read_text(find_slurm_conf())
    values = conf.parse_values(text)
    nodes = [name for name in (_read_slurmd_option("N"), *conf.find_nodes(text)) if name]
    return list(dict.fromkeys(conf.find_spool(values, node) for node in nodes))


def read_boot() -> tuple[str, float]:
    """Return a name for this boot, and its time in seconds since 1970. A container boots with its first process."""
    with open("/proc/1/stat", "rb") as file:
        ticks = int(file.read(4096).rpartition(b")")[2].split()[19])
    up_s = ledger.read_boot_clock_s() - ticks / os.sysconf("SC_CLK_TCK")
    return f"{ledger.read_boot_id()} {ticks}", clock.time() - max(0.0, up_s)


def remove_known_jobs(spool: str, booted: float) -> list[str]:
    """Remove slurmd's record of the jobs of boots before `booted`, and return the paths removed.

    Raises:
        OSError: A file could not be removed.
    """
    removed = []
    for path in (f"{spool}/{name}" for name in _NAMES):
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode) and not booted <= found.st_mtime <= clock.time():
            os.unlink(path)
            removed.append(path)
    return removed


def _read_mark() -> str:
    with suppress(OSError), open(_MARK, encoding="ascii", errors="replace") as file:
        return file.read(256)
    return ""


def main() -> int:
    """Remove the record and return the exit status. Never raise."""
    try:
        name, booted = read_boot()
        if _read_mark() == name:
            return 0
        spools = find_spools()
        for path in (path for spool in spools for path in remove_known_jobs(spool, booted)):
            lines.put(sys.stdout, f"gemini-hpc: removed {path}: jobs that come back to this node run their prologs\n")
    except OSError as exc:
        lines.put(
            sys.stderr,
            f"gemini-hpc: {exc.filename}: {exc.strerror}: a job that comes back to this node may run without its "
            "prolog, unprotected\n",
        )
        return 1
    if any(map(os.path.isdir, spools)):
        with suppress(OSError), open(_MARK, "w", encoding="ascii") as file:  # without it, the files' times decide
            file.write(name)
    else:
        lines.put(sys.stdout, f"gemini-hpc: slurmd has no spool here yet: {', '.join(spools)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
