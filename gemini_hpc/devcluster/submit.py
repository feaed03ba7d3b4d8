"""sbatch for people who sit outside of the cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from gemini_hpc.devcluster.accounts import Account


def stage_script(arguments: Sequence[str], user: Account) -> list[str]:
    """The arguments of sbatch, its script replaced by a copy in the user's home.

    The script lies where the tool was called, which users inside need not be able to read. It is the first argument
    that names a file starting with `#!`, as sbatch demands of scripts; everything else is left alone.
    """
    staged = list(arguments)
    for index, argument in enumerate(staged):
        path = Path(argument)
        if argument.startswith("-") or not _is_script(path) or path.resolve().is_relative_to(user.home):
            continue
        copy = user.home / path.name
        # The home is the user's: do not write through a link that lies there.
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
