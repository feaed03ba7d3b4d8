"""Check that job owners can use the installation: agents, plugin and commands run as the jobs' owners.

An installation under umask 027 or 077, or with an interpreter below root's home, works for root alone.
Prologs start then, and no job is protected.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import suppress

from gemini_hpc import paths
from gemini_hpc.doctor import files, plugin
from gemini_hpc.doctor.check import ANYWHERE, Check
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Outcome, Unavailable, ok, some, wrong
from gemini_hpc.doctor.installation import PYTHON

FIX = (
    "install again under umask 022 with an interpreter that everybody can reach, such as /usr/bin/python3 (README, "
    "Installing on a cluster); or run chmod -R go+rX on the named paths, except root's home"
)


def _code() -> list[str]:
    """Return the interpreter, its environment's packages, and its search path if it can report one."""
    environment = os.path.dirname(os.path.dirname(PYTHON))
    places = [PYTHON, *sorted(glob.glob(f"{environment}/lib*/python3*/site-packages"))]
    with suppress(files.InterpreterError, Unavailable, ValueError):
        _, package, _, *search = files.interpreter()
        modules = [os.path.dirname(package)]
        modules += [os.path.join(p, name) for p in search for name in ("msgspec", "xxhash")]
        places += [p for p in (*search, *modules) if os.path.lexists(p)]
    return places


def _others(facts: HostFacts) -> list[str]:
    """Return the files that sbatch, srun and agents read as the user."""
    found = [facts.config_path]
    with suppress(Unavailable):
        found.append(plugin.plugstack(facts))
        if line := plugin.our_line(facts):
            found.append(line.path)
    return [p for p in found if os.path.lexists(p)]


def _within(place: str) -> Iterator[str]:
    """Yield the barriers of every directory and file below a package."""
    for path, info in files.below(os.path.realpath(place)):
        if found := paths.barrier(path, info, look=True):
            yield found


def access(facts: HostFacts) -> Outcome:
    """Check every component of every path with the rights of a job's owner."""
    if not os.path.lexists(PYTHON) and facts.root:
        raise Unavailable(f"{PYTHON} does not exist (see install.parts)")
    told: list[str] = []
    code = list(dict.fromkeys(_code()))
    for path in (*code, *_others(facts)):
        try:
            told += paths.barriers(path)
        except PermissionError as exc:
            told.append(f"{exc.filename} cannot be reached as {paths.user(facts.uid)}")
        except OSError as exc:
            told.append(f"{exc.filename or path}: {exc.strerror}")
    if not told:
        told = [found for place in code[1:] if os.path.isdir(place) for found in _within(place)]
    if told:
        wanted = "interpreter, packages, plugin and settings that every owner of jobs can read and execute"
        told = list(dict.fromkeys(told))
        return wrong(f"agents and commands of users cannot run here: {some(told)}", wanted, FIX)
    return ok(f"everybody can use {PYTHON}, its packages, the plugin and {facts.config_path}")


CHECKS = (Check("files.access", "installation", ANYWHERE, access),)
