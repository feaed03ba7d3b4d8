"""Checks that gemini-hpc is installed on this host, and that the Prolog and Epilog in effect call it."""

from __future__ import annotations

import ctypes
import glob
import os
import re

from gemini_hpc.doctor.facts import NODE, Configuration, HostFacts, read_text
from gemini_hpc.doctor.finding import (
    Outcome,
    Unavailable,
    join_some,
    read_or,
    report_ok,
    report_warning,
    report_wrong,
)
from gemini_hpc.slurm import SlurmError, find_tool

PYTHON = "/opt/gemini-hpc/venv/bin/python3"  # fixed in prolog, epilog and plugin
SCRIPTS = "/opt/gemini-hpc/prolog_epilog"
GUIDE = "docs/install.md"
_OURS = {"Prolog": "gemini_hpc.node.prolog", "Epilog": "gemini_hpc.node.epilog"}
_PATH = re.compile(r"/[A-Za-z0-9._+/-]{1,300}")
_NHC, _NHC_CONF = "nhc", "/etc/nhc/*.conf"
# Commands that end all processes of a user: Slurm's own etc/slurm.epilog.clean has the first.
_CLEANS_UP = re.compile(
    r"^[^#\n]*\b((?:pkill|killall|skill)\b[^#\n;|&]*\s(?:-[uU]\b|--e?uid\b|--user\b)[^\n;|&]*"
    r"|loginctl\s+(?:terminate|kill)-user\b[^\n;|&]*|check_ps_unauth_users\b[^\n]*\bkill\b)",
    re.MULTILINE,
)
_DROP_IN = re.compile(r"\[ ! -x (/\S{1,300}) \] \|\| exec \1")  # prolog_epilog/prolog.d and epilog.d


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
    named: list[str] = read_or([], lambda: list_scripts(facts.conf, "Prolog"))
    return any(map(_is_there, (SCRIPTS, *named)))


def check_parts(facts: HostFacts) -> Outcome:
    """Check that the parts that the other checks examine are installed."""
    basis = {"Slurm's commands (scontrol)": _has_slurm()}
    if read_or("", lambda: facts.settings.auth) != "key":
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


def list_scripts(conf: Configuration, kind: str) -> list[str]:
    """Return the files that slurmd runs for `Prolog` or `Epilog`, in its order.

    Patterns are expanded on this host. slurmd runs the files of a pattern from the last name to the first.
    """
    paths: list[str] = []
    for value in conf.list_values(kind):
        paths += sorted(glob.glob(value), reverse=True) or [value]
    return paths


def find_drop_in_target(path: str) -> str:
    """Return the script to which a drop-in of ours gives way, "" if the file is none. Raises OSError."""
    code = [line for line in read_text(path).splitlines() if line.strip() and not line.startswith("#")]
    found = _DROP_IN.fullmatch(code[0]) if len(code) == 1 else None
    return found[1] if found else ""


def find_our_script(path: str, kind: str) -> str | None:
    """Return `path` if it is our script or a drop-in for it, else the first of our scripts that it names, else None.

    Raises:
        OSError: The file cannot be read.
    """
    text = read_text(path)
    if _OURS[kind] in text:
        return path
    target = find_drop_in_target(path)
    if target:
        return path if os.path.isfile(target) and _OURS[kind] in read_text(target) else None
    names: list[str] = _PATH.findall("\n".join(line.partition("#")[0] for line in text.splitlines()))
    for named in dict.fromkeys(names):
        try:
            if os.path.isfile(named) and _OURS[kind] in read_text(named):
                return named
        except OSError:
            continue
    return None


def _check_script(facts: HostFacts, kind: str) -> Outcome:
    name = kind.lower()
    wanted = f"{kind}=/opt/gemini-hpc/prolog_epilog/{name}, or a script of the site that calls it"
    paths = list_scripts(facts.conf, kind)
    if not paths:
        return report_wrong(
            f"{kind} is not set: no job is protected", wanted, f"{kind}=... in slurm.conf, then reconfigure"
        )
    problems = []
    for path in paths:
        try:
            ours = find_our_script(path, kind)
            target = find_drop_in_target(path)
        except OSError as exc:
            problems.append(f"{path}: {exc.strerror}")
            continue
        if ours == path:
            return report_ok(path)
        if target and not os.path.exists(target):
            if NODE not in facts.roles:
                return report_ok(f"{path} ({target} is not on this host)")
            problems.append(f"{path} runs {target}, which does not exist")
        if ours:
            found = f"{path} names {ours}; whether it is always reached cannot be seen from here"
            return report_warning(
                found, wanted, f"make sure that {path} calls it in every case, with its environment"
            )
    if NODE not in facts.roles and len(problems) == len(paths):
        return report_ok(f"{join_some(paths)} (not on this host)")
    if not facts.root and any("ermission" in p for p in problems):
        raise Unavailable(f"{join_some(problems)}: only root can see it; run it again as root")
    found = join_some(problems) or f"{join_some(paths, ', ')} does not call gemini-hpc's {name}"
    return report_wrong(found, wanted, f"call it from the site's {name}, or install it on this host")


def check_prolog(facts: HostFacts) -> Outcome:
    """Check the prolog, which starts the agents."""
    return _check_script(facts, "Prolog")


def check_epilog(facts: HostFacts) -> Outcome:
    """Check the epilog, which releases the agents' memory."""
    return _check_script(facts, "Epilog")


def check_clean_up(facts: HostFacts) -> Outcome:
    """Check whether scripts of the site end all processes of a job's owner, and the agents with them."""
    found = []
    for path in _list_site_scripts(facts.conf):
        text = _read_if_possible(path)
        is_script = "\0" not in text  # a script may name /usr/bin/pkill itself
        if is_script and "gemini" not in text and (command := _CLEANS_UP.search(text)):
            found.append(f"{path} ({command[1].strip()[:80]})")
    if not found:
        return report_ok("no script of the site is seen to end all processes of a job's owner")
    return report_warning(
        f"{join_some(found)} ends agents, too: a requeued job finds no copies",
        "a clean-up that leaves the agents' cgroup alone",
        "use the loop in docs/admin.md (Clean-up by the site)",
    )


def _list_site_scripts(conf: Configuration) -> list[str]:
    """Return the site's scripts that run on nodes as root, the scripts that these name, and NHC's settings."""
    health = conf["HealthCheckProgram"].split()[:1]
    paths = [*list_scripts(conf, "Prolog"), *list_scripts(conf, "Epilog"), *health]
    paths += [named for path in paths for named in _PATH.findall(_read_if_possible(path))]
    if any(os.path.basename(path) == _NHC for path in health):
        paths += sorted(glob.glob(_NHC_CONF))
    return [path for path in dict.fromkeys(paths) if os.path.isfile(path)]


def _read_if_possible(path: str) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""
