"""Check of the private directories that Slurm gives each job; a private /run hides the agent's socket from ranks.

The plugins are job_container/tmpfs, and namespace/tmpfs and namespace/linux (25.11 and later).
"""

from __future__ import annotations

import os
import re

from gemini_hpc.doctor.configuration import Configuration
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Outcome, Unavailable, ok, some, warning, wrong

_MAX_BYTES = 1 << 20
_NONE = ("", "none", "(null)")
_UNTRIED = ("CLONE_NEWPID", "CLONE_NEWUSER")


def kind(conf: Configuration) -> str:
    """Return the plugin in effect, as the release names it; "" if there is none."""
    return next(
        (v for key in ("NamespaceType", "JobContainerType") if (v := conf[key]).rpartition("/")[2] not in _NONE), ""
    )


def places(plugin: str) -> tuple[str, ...]:
    """Return the names of the plugin's files beside slurm.conf; the first existing file counts."""
    older = ("namespace.conf", "job_container.conf")
    return ("namespace.yaml", *older) if plugin.endswith("linux") else older


def hidden_directories(text: str, directories: tuple[str, ...]) -> list[str]:
    """Return those of `directories` that each job gets a private copy of, by the text of one of these files."""
    found = re.findall(r"^[^#\n]*\bdirs\s*[=:]\s*[\"']?([^\s\"'#]+)", text, re.M | re.I)
    tops = [d.rstrip("/") or "/" for dirs in found for d in dirs.split(",") if d]
    return [d for d in directories if any(d == t or d.startswith(t.rstrip("/") + "/") for t in tops)]


def job_container(facts: HostFacts) -> Outcome:
    """Check that the ranks see their agent's directory."""
    plugin = kind(facts.conf)
    if not plugin.endswith(("/tmpfs", "/linux")):
        return ok(plugin or "none")
    beside, names = os.path.dirname(facts.conf["SLURM_CONF"]), places(plugin)
    path = next((p for p in (os.path.join(beside, n) for n in names) if os.path.lexists(p)), "")
    if not path:
        raise Unavailable(f"{plugin}, and none of {', '.join(names)} is in {beside} on this host")
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            text = f.read(_MAX_BYTES)
    except OSError as exc:
        raise Unavailable(f"{plugin}, and {path} cannot be read: {exc.strerror}") from None
    run_dir = facts.settings.run_dir
    if hidden := hidden_directories(text, (run_dir,)):
        return wrong(
            f"{path} gives each job its own {', '.join(hidden)}: ranks do not find their agent",
            f"dirs without {run_dir} and the directories above it",
            f"take it out of the dirs in {path}",
        )
    own = [flag for flag in _UNTRIED if re.search(rf"^[^#\n]*\b{flag}\b", text, re.M)]
    if own:
        return warning(
            f"{path} has {some(own, ', ')}: gemini-hpc is not tested in such a namespace",
            "jobs in the process and user namespace of their node",
            f"take the flags out of {path}, or run a protected job and check that gemini-hpc inspect says protected",
        )
    return ok(f"{plugin}, which leaves {run_dir} alone (replica memory has no name in /dev/shm)")
