"""Search for the version of the tier that a user means.

The user gives the path of a version, a training, a job or the tier itself. `PATH@NAME` means the version with
that name (`Checkpointer.keep`).
"""

from __future__ import annotations

import os
from collections.abc import Callable

from gemini_hpc.core.numbers import NAME
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import names, version
from gemini_hpc.tier.version import VersionManifest


def check_directory(path: str) -> None:
    """Check that a user's path is a directory.

    Raises:
        ValueError: It is none. The text is one sentence.
    """
    if not os.path.isdir(path):
        there = bool(path) and os.path.lexists(path)
        raise ValueError(f"{path or repr(path)}: {'not a directory' if there else 'no such directory'}")


def find(
    path: str, training_name: str = "", number: int = 0, passed_over: Callable[[str], object] = lambda damage: None
) -> tuple[str, VersionManifest]:
    """Return directory and manifest of the newest whole version below `path`.

    A path that is a version's own directory means that version, regardless of `training_name` and `number`.
    Damaged versions are skipped. Versions that a training has rejected are skipped too, unless their name or
    number is asked for.

    Args:
        path: A path as the user gives it, possibly with `@NAME`.
        training_name: The training to search, needed if a job has several.
        number: The version number to search; 0 means the newest.
        passed_over: Called with one sentence for each skipped version, if a version is found.

    Raises:
        ValueError: No such version exists. The text is one sentence.
        OSError: The tier cannot be read.
    """
    path, name = split(path)
    check_directory(path)
    path = os.path.normpath(path)
    stamp = version.parse_name(os.path.basename(os.path.abspath(path)))
    if stamp is None and name:
        path = _walk_down(path, training_name)
        found = names.find_training_names(path)
        if name not in found:
            known = ", ".join(sorted(found)[:10]) or "none"
            raise ValueError(f"{path}: no version has the name {name}; the names there: {known}")
        stamp = found[name][1]
        path = f"{path}/{version.format_name(stamp)}"
    if stamp is not None:
        manifest = _read(os.path.dirname(os.path.abspath(path)), stamp)
        if manifest is None:
            raise ValueError(f"{path}: is not whole (it has no {version.MANIFEST})")
        return path, manifest
    path = _walk_down(path, training_name)
    damaged: list[str] = []
    for stamp in version.list_stamps(path):
        if not number and version.is_rejected(path, stamp):
            damaged.append(f"{path}/{version.format_name(stamp)} was rejected by a training")
            continue
        try:
            manifest = _read(path, stamp) if not number or stamp.version == number else None
        except ValueError as error:
            damaged.append(str(error))
            continue
        if manifest is not None:
            for damage in damaged:
                passed_over(damage)
            return f"{path}/{version.format_name(stamp)}", manifest
    more = "".join(f"; {damage}" for damage in damaged[:3])
    raise ValueError(f"{path}: has no whole version{f' {number}' if number else ''}{more}")


def split(path: str) -> tuple[str, str]:
    """Split a path into the path and the name behind its last "@".

    The name is "" if there is none, or if the path as a whole exists.
    """
    before, at, name = path.rpartition("@")
    if at and before and NAME.fullmatch(name) and not os.path.lexists(path):
        return before, name
    return path, ""


def _read(directory: str, stamp: Stamp) -> VersionManifest | None:
    try:
        return version.read(directory, stamp)
    except ValueError as error:  # the error's text begins with the manifest's name
        raise ValueError(f"{directory}/{version.format_name(stamp)}/{error}") from None


def _walk_down(path: str, training_name: str) -> str:
    """Descend from the tier to a job's directory, then to a training's: the named one, or the only one."""
    for kind in ("gemini-", ""):
        if version.list_stamps(path):
            return path
        inside = sorted(e for e in os.listdir(path) if e.startswith(kind) and os.path.isdir(f"{path}/{e}"))
        if kind and not inside:
            continue
        shown = ", ".join(inside[:10]) or "none"
        if not kind and training_name:
            if training_name not in inside:
                raise ValueError(f"{path}: has no training {training_name}; its trainings: {shown}")
            inside = [training_name]
        if len(inside) != 1:
            raise ValueError(
                f"{path}: wanted one {'job' if kind else 'training'} there, found {shown}; name the one you want"
            )
        path = f"{path}/{inside[0]}"
    return path
