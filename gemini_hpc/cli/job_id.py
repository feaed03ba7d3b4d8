"""What the verbs that ask about a job have in common: its id, and their errors."""

from __future__ import annotations

import re

_ID = re.compile(r"([0-9]{1,10})(_[0-9]{1,10})?")


class UserError(Exception):
    """One line for the user."""


class WrongIdError(Exception):
    """What should have been a job id is none: a wrong command line."""


def raw_id(text: str) -> int:
    """The raw id of a job, or of an array task (`10_3`), for which Slurm is asked. Raises `WrongIdError` and
    `UserError`."""
    m = _ID.fullmatch(text)
    if m is None:
        raise WrongIdError(f"{text[:80]!r} is not a job id: wanted a number")
    job = int(m[1]) if m[2] is None else _of_task(text)
    if job >= 1 << 32:
        raise UserError(f"job {job}: unknown, or not yours")
    return job


def _of_task(task: str) -> int:
    import asyncio

    from gemini_hpc.slurm import Slurm, SlurmError, UnknownJob

    async def find() -> int:
        return await Slurm().raw_id(task)

    try:
        return asyncio.run(find())
    except UnknownJob:
        raise UserError(f"job {task}: unknown, or not yours") from None
    except SlurmError as exc:
        raise UserError(str(exc)) from None
