"""Which version of the tier a user means: by the path of a version, of a set, of a job, or of the tier itself."""

from __future__ import annotations

import os

from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import version
from gemini_hpc.tier.version import Manifest


def find(path: str, set_name: str = "", number: int = 0) -> tuple[str, Manifest]:
    """Directory and manifest of the newest whole version below `path`, or of the one with this number. set_name:
    where a job has several. Raises ValueError with one sentence, OSError."""
    path = os.path.normpath(path)
    if not os.path.isdir(path):
        raise ValueError(f"{path}: no such directory")
    stamp = version.stamp_of(os.path.basename(os.path.abspath(path)))
    if stamp is not None:
        manifest = version.read(os.path.dirname(os.path.abspath(path)), stamp)
        if manifest is None:
            raise ValueError(f"{path}: is not whole (it has no {version.MANIFEST})")
        return path, manifest
    path = _down(path, set_name)
    for stamp in version.stamps(path):
        manifest = version.read(path, Stamp(*stamp)) if not number or stamp.version == number else None
        if manifest is not None:
            return f"{path}/{version.name(stamp)}", manifest
    raise ValueError(f"{path}: has no whole version" + (f" {number}" if number else ""))


def _down(path: str, set_name: str) -> str:
    """From the tier to a job's directory, and from there to a set's, where there is only one."""
    for kind in ("gemini-", ""):
        if version.stamps(path):
            return path
        inside = sorted(e for e in os.listdir(path) if e.startswith(kind) and os.path.isdir(f"{path}/{e}"))
        if not kind and set_name:
            inside = [entry for entry in inside if entry == set_name]
        if kind and not inside:
            continue
        if len(inside) != 1:
            which = ", ".join(inside[:10]) or "none"
            raise ValueError(f"{path}: wanted one {'job' if kind else 'set'} there, found {which}; name it")
        path = f"{path}/{inside[0]}"
    return path
