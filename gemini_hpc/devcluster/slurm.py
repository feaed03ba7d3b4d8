"""Slurm's view of nodes and jobs, queried on the controller host as root."""

from __future__ import annotations

import functools
import re
import subprocess
import time
from collections.abc import Sequence

from gemini_hpc import clock
from gemini_hpc.devcluster import enter
from gemini_hpc.devcluster.errors import DevclusterError, read_log_tail
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.devcluster.processes import ProcessId
from gemini_hpc.devcluster.requirements import find_program

_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")


@functools.cache
def read_release() -> tuple[int, int]:
    """Return major and minor number of this machine's Slurm, such as (22, 5).

    Raises `DevclusterError` if slurmd does not print it.
    """
    try:
        done = subprocess.run(
            [find_program("slurmd"), "-V"], capture_output=True, text=True, timeout=20.0, check=False
        )
    except subprocess.TimeoutExpired:
        raise DevclusterError("slurmd -V did not print its release within 20 s") from None
    found = re.search(r"\b(\d+)\.(\d+)\.", done.stdout)
    if found is None:
        raise DevclusterError(f"slurmd -V did not print its release: {' '.join((done.stdout + done.stderr).split())}")
    return int(found[1]), int(found[2])


def ask(layout: ClusterFiles, outer: ProcessId, name: str, *arguments: str, timeout_s: float = 10.0) -> str:
    """Return the standard output of a Slurm command. Raises `DevclusterError` with its error text if it fails."""
    process = enter.start_command(enter.build_command(layout, outer.pid, [find_program(name), *arguments]))
    done = enter.complete(process, None, timeout_s)
    if done.returncode:
        raise DevclusterError(f"{name} {' '.join(arguments)}: {' '.join(done.stderr.split()) or 'failed'}")
    return done.stdout


def read_node_states(layout: ClusterFiles, outer: ProcessId) -> dict[str, str]:
    """Return the state of each node as sinfo prints it, in lower case ("idle", "down*", "drained")."""
    lines = ask(layout, outer, "sinfo", "-h", "-N", "-o", "%N %T").splitlines()
    return {node: state for node, _, state in (line.partition(" ") for line in lines)}


def read_record(layout: ClusterFiles, outer: ProcessId, kind: str, name: str) -> dict[str, str]:
    """Return the fields of `scontrol show KIND NAME` (the first record)."""
    line = ask(layout, outer, "scontrol", "show", kind, name, "-o").splitlines()[0]
    parts = _FIELD.split(line)
    return {key: value.strip() for key, value in zip(parts[1::2], parts[2::2], strict=True)}


def read_queue(layout: ClusterFiles, outer: ProcessId) -> list[tuple[int, str, str]]:
    """Return id, state and nodes ("n[1-3]", empty while it waits) of each unfinished job."""
    lines = ask(layout, outer, "squeue", "-h", "-r", "-o", "%A|%T|%N").splitlines()
    found = (line.split("|") for line in lines if line)
    return [(int(job), state, nodes) for job, state, nodes in found]


def wait_idle(layout: ClusterFiles, outer: ProcessId, nodes: Sequence[str], timeout_s: float) -> None:
    """Wait until Slurm reports every one of `nodes` as idle."""
    deadline = clock.monotonic() + timeout_s
    while True:
        try:
            states = read_node_states(layout, outer)
        except DevclusterError:
            # Newer releases listen before they have loaded everything that slurm.conf names.
            log = layout.log / "slurmctld.log"
            if log.exists() and "fatal:" in log.read_text(errors="replace"):
                raise DevclusterError(f"slurmctld did not stay up: {read_log_tail(log)}") from None
            raise
        late = {node: states.get(node, "unknown") for node in nodes if states.get(node) != "idle"}
        if not late:
            return
        if clock.monotonic() > deadline:
            text = ", ".join(f"{node} is {state}" for node, state in late.items())
            log = layout.log / f"slurmd.{next(iter(late))}.log"
            raise DevclusterError(f"not idle within {timeout_s:g} s: {text}; {log.name} ends: {read_log_tail(log)}")
        clock.sleep(0.1)


def read_slurmd_start(layout: ClusterFiles, outer: ProcessId, node: str) -> float:
    """Return the start time of the slurmd that last registered, in seconds since the epoch; 0 if there is none."""
    text = read_record(layout, outer, "node", node).get("SlurmdStartTime", "None")
    return 0.0 if text in ("None", "Unknown") else time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
