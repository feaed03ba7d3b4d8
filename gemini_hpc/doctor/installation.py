"""Check that gemini-hpc is installed on this host, for administrators who have just unpacked it."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from gemini_hpc.doctor import scripts
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Outcome, Unavailable, report_ok, report_wrong
from gemini_hpc.slurm import SlurmError, find_tool

PYTHON = "/opt/gemini-hpc/venv/bin/python3"  # fixed in prolog, epilog and plugin
SCRIPTS = "/opt/gemini-hpc/prolog_epilog"
GUIDE = "docs/install.md"


def _has_slurm() -> bool:
    try:
        return bool(find_tool("scontrol"))
    except SlurmError:
        return False


def _has_munge() -> bool:
    try:
        ctypes.CDLL("libmunge.so.2")
    except OSError:
        return False
    return True


def _uses_key(facts: HostFacts) -> bool:
    with suppress(Unavailable):
        return facts.settings.auth == "key"
    return False


def _is_there(path: str) -> bool:
    """Return whether a path exists; True if a directory bars this user from seeing it."""
    try:
        os.lstat(path)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _has_prolog(facts: HostFacts) -> bool:
    """Return whether our prolog is at its usual place, or any prolog of the configuration exists."""
    named: list[str] = []
    with suppress(Unavailable):
        named = scripts.list_scripts(facts.conf, "Prolog")
    return any(map(_is_there, (SCRIPTS, *named)))


def check_parts(facts: HostFacts) -> Outcome:
    """Check that the parts that the other checks examine are installed."""
    basis = {"Slurm's commands (scontrol)": _has_slurm()}
    if not _uses_key(facts):
        basis["MUNGE (libmunge.so.2)"] = _has_munge()
    ours = {
        f"the interpreter of prolog and epilog ({PYTHON})": _is_there(PYTHON),
        f"prolog and epilog ({SCRIPTS})": _has_prolog(facts),
        f"the settings ({facts.config_path})": _is_there(facts.config_path),
    }
    no_basis = [name for name, is_present in basis.items() if not is_present]
    missing = [name for name, is_present in ours.items() if not is_present]
    wanted = "Slurm, MUNGE and gemini-hpc on every host of the cluster"
    if no_basis:
        first = "install Slurm and MUNGE first"
        fix = f"{first}, then gemini-hpc ({GUIDE}); `make demo` in a checkout shows it on this host alone"
        return report_wrong(f"not on this host: {'; '.join(no_basis + missing)}", wanted, fix)
    if len(missing) == len(ours):
        found = f"gemini-hpc is not installed on this host. Not here: {'; '.join(missing)}"
        return report_wrong(
            found, wanted, f"{GUIDE}, steps 1 to 5; `make demo` in a checkout shows it on this host alone"
        )
    return report_ok("Slurm, MUNGE and gemini-hpc are here" + (f"; not {'; '.join(missing)}" if missing else ""))
