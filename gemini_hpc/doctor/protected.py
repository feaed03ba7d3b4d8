"""Search for the jobs that were submitted with the option, in all places that show it, since Slurm does not."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from gemini_hpc.doctor.facts import NODE, HostFacts

_VARIABLE = b"SLURM_GEMINI_REPLICAS="
_MAX_READ = 2000
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Protected:
    """The raw ids of unfinished jobs that are protected, or may be.

    `sure` are known to be protected. `perhaps` are jobs that may be asked about.
    """

    sure: frozenset[int]
    perhaps: frozenset[int]
    complete: bool


def _numbers(directory: str, suffix: str = "") -> set[int]:
    names = [n[: len(n) - len(suffix)] for n in os.listdir(directory) if n.endswith(suffix)]
    return {int(n) for n in names if n.isascii() and n.isdecimal() and len(n) <= 10}


def _asks(save: str, raw_id: int) -> bool:
    """Return whether the environment that Slurm stores for a batch job has the plugin's variable."""
    try:
        with open(f"{save}/hash.{raw_id % 10}/job.{raw_id}/environment", "rb") as f:
            entries = f.read(_MAX_BYTES).split(b"\0")
    except OSError:
        return False
    # The first entry has a length in front.
    return any(e.startswith(_VARIABLE) for e in entries) or _VARIABLE in entries[0]


def protected(facts: HostFacts) -> Protected:
    """Return the protected jobs.

    Sources are the controller's records, slurmctld's (root and SlurmUser), this node's agents, and one's own
    jobs. Raises `Unavailable` if Slurm does not answer.
    """
    live = set(facts.queue)
    sure: set[int] = set()
    complete = False
    with suppress(OSError):
        sure |= _numbers(os.path.join(facts.settings.state_dir, "jobs"), ".job")
    save = facts.conf["StateSaveLocation"]
    if facts.uid in (0, facts.slurm_uid) and os.access(save, os.R_OK | os.X_OK):
        sure |= {raw_id for raw_id in sorted(live, reverse=True)[:_MAX_READ] if _asks(save, raw_id)}
        complete = True
    if NODE in facts.roles:
        with suppress(OSError):
            sure |= _numbers(facts.settings.run_dir)
        sure |= {p.agent_of for p in facts.processes if p.agent_of is not None}
    privileged = facts.root or facts.uid == facts.slurm_uid
    perhaps = live if privileged else {i for i, row in facts.queue.items() if row.user_id == facts.uid}
    sure &= live if privileged else perhaps
    return Protected(frozenset(sure), frozenset(perhaps - sure if not complete else ()), complete)
