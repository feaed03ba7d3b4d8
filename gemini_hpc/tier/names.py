"""Names that users have given to versions (`Checkpointer.keep`), in the file `kept` of a version's directory.

A version with that file is never removed by retention. The file is empty if the administrator's
`tier_keep_every` asked for it. Otherwise it holds a JSON object that maps each name to the version number
that was asked for. The name belongs to that version, or to the first later version that could be saved.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Annotated

import msgspec

from gemini_hpc.core.numbers import NAME, TrainingName, Version
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import publish, version
from gemini_hpc.wire.bounds import Strict

MAX_NAMES = 1024  # per version
_MAX_BYTES = 1 << 20
_NO_NAMES = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM)

Names = Annotated[dict[TrainingName, Version], msgspec.Meta(max_length=MAX_NAMES)]
_decoder = Strict(msgspec.json.Decoder(Names))


def check_name(name: object) -> str:
    """Return `name` if a version may have it. Raises TypeError, ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"a version's name is a str, not a {type(name).__name__}")
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name[:80]!r} cannot be a version's name: use letters, digits, '.', '_' and '-', 64 at most, "
            "the first a letter, a digit or '_'"
        )
    return name


def read_version_names(where: str) -> dict[str, int]:
    """Return the names of the version in this directory, each with the version number that was asked for.

    An absent, foreign or invalid file yields no names. Raises OSError if the file system fails, since the
    version may have names then.
    """
    try:
        fd = os.open(f"{where}/{version.KEPT}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        return dict(_decoder.decode(data)) if data and len(data) <= _MAX_BYTES else {}
    except msgspec.MsgspecError:
        return {}
    except OSError as error:
        if error.errno in _NO_NAMES:
            return {}
        raise


def find_training_names(directory: str) -> dict[str, tuple[int, Stamp]]:
    """Return each name in a training's directory, with the number asked for and the whole version that has it.

    If several versions have a name, the newest version that no training has rejected is returned. Raises
    OSError.
    """
    found: dict[str, tuple[int, Stamp]] = {}
    for stamp in sorted(version.list_stamps(directory), key=lambda stamp: version.is_rejected(directory, stamp)):
        where = f"{directory}/{version.format_name(stamp)}"
        if version.is_present(f"{where}/{version.MANIFEST}"):
            for name, asked in read_version_names(where).items():
                found.setdefault(name, (asked, stamp))
    return found


def keep_version(where: str, names: Mapping[str, int]) -> None:
    """Keep the version in this directory permanently, and add names to those it has.

    Raises OSError, and ValueError if the version would have too many names.
    """
    wanted = {**read_version_names(where), **names}
    if len(wanted) > MAX_NAMES:
        raise ValueError(f"{where}: a version has at most {MAX_NAMES} names")
    with publish.replace_file(where, version.KEPT) as path, open(path, "xb") as file:
        file.write(msgspec.json.encode(wanted) if wanted else b"")
