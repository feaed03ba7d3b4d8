"""Parsing of job ids, and the errors of all verbs that query a job."""

from __future__ import annotations

import re

_ID = re.compile(r"([0-9]{1,10})(_[0-9]{1,10})?")


class UserError(Exception):
    """An error of the user; its text is one line."""


class WrongIdError(Exception):
    """The error that an argument is not a job id, and so the command line is wrong."""


def raw_id(text: str) -> int:
    """Return the raw id of a job, or of an array task (`10_3`), for which Slurm is asked.

    Raises `WrongIdError` and `UserError`.
    """
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
        return await Slurm().find_raw_id(task)

    try:
        return asyncio.run(find())
    except UnknownJob:
        raise UserError(f"job {task}: unknown, or not yours") from None
    except SlurmError as exc:
        raise UserError(str(exc)) from None
