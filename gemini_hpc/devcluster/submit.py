"""Submission of batch scripts from outside of the cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from gemini_hpc.devcluster.accounts import Account


def copy_script(arguments: Sequence[str], user: Account) -> list[str]:
    """Return the arguments of sbatch, with its script replaced by a copy in the user's home.

    The script lies where the tool was called, which users inside may not be able to read. The script is the
    first argument that names a file starting with `#!`, as sbatch demands of scripts. All other arguments
    stay unchanged.
    """
    staged = list(arguments)
    for index, argument in enumerate(staged):
        path = Path(argument)
        if argument.startswith("-") or not _is_script(path) or path.resolve().is_relative_to(user.home):
            continue
        copy = user.home / path.name
        # The home belongs to the user: never write through a link in it.
        copy.unlink(missing_ok=True)
        fd = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o700)
        with open(fd, "wb") as target, path.open("rb") as script:
            os.fchown(fd, user.uid, user.gid)
            shutil.copyfileobj(script, target)
        staged[index] = str(copy)
        break
    return staged


def _is_script(path: Path) -> bool:
    try:
        return path.is_file() and path.open("rb").read(2) == b"#!"
    except OSError:
        return False
