"""Names that users have given to versions (`Checkpointer.keep`): in the file `kept` of a version's directory.

A version with that file stays for good. It is empty where the administrator's `tier_keep_every` has asked for it,
else a JSON object: each name with the number of the version that was asked for. The version that has the name is that
one, or the first one after it that could be saved.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Annotated

import msgspec

from gemini_hpc.core.numbers import NAME, SetName, Version
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import publish, version
from gemini_hpc.wire.bounds import Strict

MAX_NAMES = 1024  # of one version
_MAX_BYTES = 1 << 20
_NO_NAMES = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM)

Names = Annotated[dict[SetName, Version], msgspec.Meta(max_length=MAX_NAMES)]
_decoder = Strict(msgspec.json.Decoder(Names))


def checked(name: object) -> str:
    """A name that a version may have. Raises TypeError, ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"a version's name is a str, not a {type(name).__name__}")
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name[:80]!r} cannot be a version's name: use letters, digits, '.', '_' and '-', 64 at most, "
            "the first a letter, a digit or '_'"
        )
    return name


def of_version(where: str) -> dict[str, int]:
    """The names of the version in this directory, each with the number that was asked for. A file that is none, is
    another's or says something else names nothing. Raises OSError where the file system fails: it may have names."""
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


def of_set(directory: str) -> dict[str, tuple[int, Stamp]]:
    """The names in a set's directory: the number that was asked for, and the whole version that has the name; of
    several the newest that no training has rejected. Raises OSError."""
    found: dict[str, tuple[int, Stamp]] = {}
    for stamp in sorted(version.stamps(directory), key=lambda stamp: version.rejected(directory, stamp)):
        where = f"{directory}/{version.name(stamp)}"
        if version.there(f"{where}/{version.MANIFEST}"):
            for name, asked in of_version(where).items():
                found.setdefault(name, (asked, stamp))
    return found


def give(where: str, names: Mapping[str, int]) -> None:
    """The version in this directory stays for good, and has these names beside those that it has. Raises OSError,
    ValueError."""
    wanted = {**of_version(where), **names}
    if len(wanted) > MAX_NAMES:
        raise ValueError(f"{where}: a version has at most {MAX_NAMES} names")
    with publish.replaced(where, version.KEPT) as path, open(path, "xb") as file:
        file.write(msgspec.json.encode(wanted) if wanted else b"")
