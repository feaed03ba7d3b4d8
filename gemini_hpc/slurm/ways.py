"""The choice of Slurm's API: fields of its commands, their JSON, or pyslurm in a separate process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import msgspec

from gemini_hpc.slurm.errors import SlurmRefused
from gemini_hpc.slurm.facts import Job, Node

COMMANDS, JSON, PYSLURM = "commands", "json", "pyslurm"


class Surprise(SlurmRefused):
    """The error that an API does not work as expected here; it is replaced by Slurm's commands from then on."""


class Unreadable(SlurmRefused):
    """The error that one answer cannot be read, perhaps because of a person's text; commands are used this once."""


class ApiReader(Protocol):
    """A reader of Slurm by an API other than the commands.

    All methods raise `SlurmRefused` if Slurm refuses, `SlurmUnreachable`, `Unreadable` and `Surprise`.
    """

    name: str

    async def read_job(self, raw_id: int) -> Job:
        """Return one job by its raw id."""

    async def read_excluded(self, raw_id: int) -> tuple[str, ...]:
        """Return the nodes that the job's owner excludes."""

    async def read_nodes(self, names: tuple[str, ...]) -> dict[str, Node]:
        """Return the named nodes, or all nodes if none is named."""

    async def close(self) -> None:
        """End the reader's helper process, if there is one."""


@dataclass(frozen=True, slots=True)
class Way:
    """The API in use and the reason for its choice; `is_fallback` means that it replaced an API that failed."""

    name: str
    why: str
    is_fallback: bool = False


class ApiRecord(msgspec.Struct):
    """The record of the API in use that the controller writes for `doctor`, in `FILE` below state_dir."""

    setting: str
    used: str
    why: str
    left: bool
    at: float


FILE = "slurm-api.json"


def find_pyslurm() -> str:
    """Return the version of the installed pyslurm without importing it, "" if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pyslurm")
    except PackageNotFoundError:
        return ""


def parse_release(text: str) -> tuple[int, int] | None:
    """Return (major, minor) of a version text such as `slurm-wlm 22.05.8` or pyslurm's `22.5.3`."""
    found = re.search(r"([0-9]+)\.([0-9]+)", text)
    return (int(found[1]), int(found[2])) if found else None


def choose_way(setting: str, slurm: str, pyslurm: str) -> Way:
    """Choose the API from the setting `slurm_api` and the installed releases.

    Each release of pyslurm fits one release of Slurm.

    Args:
        setting: The value of `slurm_api`.
        slurm: The release of Slurm's commands here, whose library pyslurm loads.
        pyslurm: The version of pyslurm, "" if it is not installed.
    """
    if setting in (JSON, COMMANDS):
        return Way(setting, f'slurm_api = "{setting}"')
    if not pyslurm:
        return Way(COMMANDS, "pyslurm is not installed")
    if parse_release(slurm) is None or parse_release(pyslurm) != parse_release(slurm):
        return Way(COMMANDS, f"pyslurm {pyslurm} does not fit {slurm or 'an unknown Slurm'}")
    return Way(PYSLURM, f"pyslurm {pyslurm} fits {slurm}")
