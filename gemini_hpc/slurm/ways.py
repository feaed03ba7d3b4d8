"""Which way Slurm is asked: its commands' fields, their JSON, or pyslurm in a process of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import msgspec

from gemini_hpc.slurm.errors import SlurmError
from gemini_hpc.slurm.facts import Job, Node

COMMANDS, JSON, PYSLURM = "commands", "json", "pyslurm"


class Surprise(SlurmError):
    """This way does not work as expected here: it is not used again, and Slurm's commands are asked instead."""


class Unreadable(SlurmError):
    """One answer cannot be read this way, perhaps for somebody's text in it: the commands are asked this once."""


class Reader(Protocol):
    """A way beside the commands. All methods raise `SlurmError` for what Slurm refuses, `SlurmUnreachable`,
    `Unreadable` and `Surprise`."""

    name: str

    async def job(self, raw_id: int) -> Job:
        """One job by its raw id."""
        ...

    async def excluded(self, raw_id: int) -> tuple[str, ...]:
        """The nodes that the job's owner does not want."""
        ...

    async def nodes(self, names: tuple[str, ...]) -> dict[str, Node]:
        """These nodes, or all."""
        ...

    async def close(self) -> None:
        """End whatever belongs to it."""
        ...


@dataclass(frozen=True, slots=True)
class Way:
    """The way that is used, and why; `left`: another one was given up for it."""

    name: str
    why: str
    left: bool = False


class Told(msgspec.Struct):
    """What the controller writes down for `doctor`, in `FILE` below state_dir."""

    setting: str
    used: str
    why: str
    left: bool
    at: float


FILE = "slurm-api.json"


def installed_pyslurm() -> str:
    """The version of pyslurm beside this package, found out without importing it; "" for none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pyslurm")
    except PackageNotFoundError:
        return ""


def release_of(text: str) -> tuple[int, int] | None:
    """(major, minor) of `slurm-wlm 22.05.8` and of pyslurm's `22.5.3`."""
    found = re.search(r"([0-9]+)\.([0-9]+)", text)
    return (int(found[1]), int(found[2])) if found else None


def choose(setting: str, slurm: str, pyslurm: str) -> Way:
    """The way that `slurm_api` and the releases lead to. slurm: of Slurm's commands here (pyslurm loads its library).

    pyslurm: its version, "" for none. Each release of pyslurm fits one release of Slurm.
    """
    if setting in (JSON, COMMANDS):
        return Way(setting, f'slurm_api = "{setting}"')
    if not pyslurm:
        return Way(COMMANDS, "pyslurm is not installed")
    if release_of(slurm) is None or release_of(pyslurm) != release_of(slurm):
        return Way(COMMANDS, f"pyslurm {pyslurm} does not fit {slurm or 'an unknown Slurm'}")
    return Way(PYSLURM, f"pyslurm {pyslurm} fits {slurm}")
