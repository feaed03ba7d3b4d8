"""The lines that slurm.conf and plugstack.conf need, against the files of this host; nothing is changed.

doctor asks the Slurm that runs. This module reads files, so it works before slurmctld has read them.
"""

from __future__ import annotations

import glob
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from gemini_hpc.doctor import installation, plugin
from gemini_hpc.doctor.facts import Configuration, SlurmRelease, read_text, run_program
from gemini_hpc.doctor.finding import Unavailable
from gemini_hpc.doctor.installation import SCRIPTS
from gemini_hpc.node import slurm_conf as files
from gemini_hpc.slurm import SlurmError, find_tool

DROP_IN = "/usr/share/gemini-hpc/plugstack.conf.d/gemini-hpc.conf"  # in the plugin's package
_USUAL_PLUGIN_DIRS = ("/usr/lib/*/slurm-wlm", "/usr/lib64/slurm", "/usr/lib/slurm", "/usr/local/lib/slurm")
_LONGEST_WAIT_S = 60.0  # Slurm's default for UnkillableStepTimeout
_SEVERAL_LINES = (24, 11)  # seen to run each Prolog= and Epilog= line; 22.05 runs the last one only
_VERSION_TIMEOUT_S = 10.0  # a command that asks nobody, on a busy host


@dataclass(frozen=True, slots=True)
class Need:
    """A line that a file needs, with the reason and what was found.

    `met` is whether the file says it already, `found` is what it says now; empty if it says nothing.
    """

    file: str
    line: str
    why: str
    met: bool
    found: str


def read_release(path: str) -> SlurmRelease | None:
    """Return the release of this host's Slurm, which need not run; None if it is not known."""
    try:
        done = run_program([find_tool("scontrol"), "--version"], _VERSION_TIMEOUT_S, SLURM_CONF=path)
        return SlurmRelease.parse(done.stdout)
    except (SlurmError, OSError, subprocess.TimeoutExpired, Unavailable):
        return None


def read_slurm_conf(path: str, release: SlurmRelease | None) -> Configuration:
    """Return the keys of a slurm.conf and of what it includes, as Slurm reads them.

    Args:
        path: The slurm.conf.
        release: Slurm's release; None, if it is not known, reads as the oldest.

    Raises:
        OSError: A file cannot be read.
    """
    values: dict[str, str] = {}
    several = runs_every_line(release)
    for name, value in files.parse_pairs(files.read_text(path)):
        key = _KEYS.get(name, name)
        if key in ("Prolog", "Epilog"):
            key += f"[{sum(k.startswith(f'{key}[') for k in values)}]" if several else ""
            values[key] = os.path.join(os.path.dirname(path), value) if value else ""
        else:
            values[key] = value
    return Configuration(values)


def runs_every_line(release: SlurmRelease | None) -> bool:
    """Return whether Slurm runs the scripts of each Prolog= and Epilog= line, not of the last one only."""
    return release is not None and release.series >= _SEVERAL_LINES


_NAMES = ("PrologFlags", "Prolog", "Epilog", "PlugStackConfig", "JobRequeue", "UnkillableStepTimeout", "PluginDir")
_KEYS = {name.lower(): name for name in _NAMES}


def list_needs(slurm_conf: str, release: SlurmRelease | None) -> list[Need]:
    """Return all needs of the two files, met or not. Raises OSError."""
    conf = read_slurm_conf(slurm_conf, release)
    return [
        _build_flags_need(conf, slurm_conf),
        *_build_script_needs(conf, slurm_conf, runs_every_line(release)),
        *_build_job_needs(conf, slurm_conf),
        _build_plugin_need(conf, slurm_conf),
    ]


def _build_flags_need(conf: Configuration, file: str) -> Need:
    found = conf["PrologFlags"]
    flags = [f for f in found.split(",") if f]
    # These imply Alloc, as slurm.conf(5) says.
    alloc = {f.lower() for f in flags} & {"alloc", "contain", "nohold", "x11"}
    kept = [f for f in flags if f.lower() != "runinjob"]
    line = "PrologFlags=" + ",".join(kept if alloc else ["Alloc", *kept])
    why = "the prolog starts the agents before the batch script. RunInJob would kill an agent with its job"
    return Need(file, line, why, bool(alloc) and kept == flags, found)


def _build_script_needs(conf: Configuration, file: str, several: bool) -> Iterator[Need]:
    for kind, does in (("Prolog", "starts the agents"), ("Epilog", "releases the agents' memory")):
        name = kind.lower()
        ours, found = f"{SCRIPTS}/{name}", conf.list_values(kind)
        directory = next((os.path.dirname(value) for value in found if glob.has_magic(value)), "")
        met = any(_calls(path, kind) for path in installation.list_scripts(conf, kind))
        why = f"{ours} {does}; it does nothing for jobs without --gemini-replicas"
        if met or not found:
            line = f"{kind}={found[-1] if met else ours}"
        elif directory:
            line = f"cp {SCRIPTS}/{name}.d/50-gemini-hpc {directory}/"
            why += ". slurmd runs what is in this directory on its node, so the file is for each node"
        elif several:
            line = f"{kind}={ours}"
            why += ". Slurm runs the scripts of each line, the site's own too"
        else:
            line = f"in {found[-1]}: {ours} || exit $?"
            why += ". This Slurm runs one line's scripts only"
        yield Need(file, line, why, met, ", ".join(found))


def _calls(path: str, kind: str) -> bool:
    ours = f"{SCRIPTS}/{kind.lower()}"
    try:
        return installation.find_our_script(path, kind) is not None or installation.find_drop_in_target(path) == ours
    except OSError:
        return path == ours  # the nodes have it, this host need not


def _build_job_needs(conf: Configuration, file: str) -> Iterator[Need]:
    requeue = conf["JobRequeue"]
    why = "Slurm requeues a job whose node died; users may still say --no-requeue. It is Slurm's default"
    yield Need(file, "JobRequeue=1", why, requeue in ("", "1"), requeue)
    wait = conf["UnkillableStepTimeout"]
    why = "a survivor whose step hangs on the dead node is not drained while it waits. It is Slurm's default"
    met = not wait or (conf.parse_number("UnkillableStepTimeout") or 0.0) >= _LONGEST_WAIT_S
    yield Need(file, f"UnkillableStepTimeout={_LONGEST_WAIT_S:.0f}", why, met, wait)


def _build_plugin_need(conf: Configuration, slurm_conf: str) -> Need:
    path = conf["PlugStackConfig"] or os.path.join(os.path.dirname(slurm_conf), "plugstack.conf")
    usual = [d for pattern in _USUAL_PLUGIN_DIRS for d in sorted(glob.glob(pattern))]
    seen: set[str] = set()
    try:
        lines = list(plugin.read_lines(path, conf["PluginDir"] or ":".join(usual) or "/usr/lib/slurm", seen))
    except OSError:
        lines = []
    ours = next((line for line in lines if os.path.basename(line.path) == plugin.NAME), None)
    directory = f"{path}.d"
    if os.path.isfile(DROP_IN) and _has_include(path, directory):
        line = f"cp {DROP_IN} {directory}/"
    else:
        line = f"optional {plugin.NAME}"
    why = "the plugin adds --gemini-replicas to sbatch and srun; `optional`, so that it can never stop other jobs"
    met = ours is not None and ours.need == "optional"
    return Need(path, line, why, met, f"{ours.need} {ours.path}" if ours else "")


def _has_include(path: str, directory: str) -> bool:
    """Return whether a plugstack.conf includes the files of a directory."""
    try:
        lines = [line.split() for line in read_text(path).splitlines()]
    except OSError:
        return False
    included = [
        os.path.join(os.path.dirname(path), words[1]) for words in lines if words[:1] == ["include"] and words[1:]
    ]
    return f"{directory}/*.conf" in included
