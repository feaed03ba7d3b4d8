"""Checks that the Prolog and Epilog in effect are gemini-hpc's, or call them."""

from __future__ import annotations

import glob
import os
import re

from gemini_hpc.doctor.configuration import Configuration
from gemini_hpc.doctor.facts import NODE, HostFacts
from gemini_hpc.doctor.finding import Outcome, Unavailable, join_some, report_ok, report_warning, report_wrong

_MAX_BYTES = 1 << 20
_OURS = {"Prolog": "gemini_hpc.node.prolog", "Epilog": "gemini_hpc.node.epilog"}
_PATH = re.compile(r"/[A-Za-z0-9._+/-]{1,300}")
_DROP_IN = re.compile(r"\[ ! -x (/\S{1,300}) \] \|\| exec \1")  # prolog_epilog/prolog.d and epilog.d


def list_scripts(conf: Configuration, kind: str) -> list[str]:
    """Return the files that slurmd runs for `Prolog` or `Epilog`, in its order.

    Patterns are expanded on this host. slurmd runs the files of a pattern from the last name to the first.
    """
    paths: list[str] = []
    for value in conf.list_values(kind):
        paths += sorted(glob.glob(value), reverse=True) or [value]
    return paths


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read(_MAX_BYTES)


def find_drop_in_target(path: str) -> str:
    """Return the script to which a drop-in of ours gives way, "" if the file is none. Raises OSError."""
    code = [line for line in _read_text(path).splitlines() if line.strip() and not line.startswith("#")]
    found = _DROP_IN.fullmatch(code[0]) if len(code) == 1 else None
    return found[1] if found else ""


def find_our_script(path: str, kind: str) -> str | None:
    """Return `path` if it is our script or a drop-in for it, else the first of our scripts that it names, else None.

    Raises:
        OSError: The file cannot be read.
    """
    text = _read_text(path)
    if _OURS[kind] in text:
        return path
    target = find_drop_in_target(path)
    if target:
        return path if os.path.isfile(target) and _OURS[kind] in _read_text(target) else None
    names: list[str] = _PATH.findall("\n".join(line.partition("#")[0] for line in text.splitlines()))
    for named in dict.fromkeys(names):
        try:
            if os.path.isfile(named) and _OURS[kind] in _read_text(named):
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
