"""Other contents for a file that somebody may be reading: slurmd ends for good where it finds an empty slurm.conf."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, contents: str | bytes) -> None:
    """At once, in a new file with the old one's owner and mode."""
    before, new = path.stat(), path.with_name(f".{path.name}.new")
    new.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    new.chmod(before.st_mode & 0o7777)
    os.chown(new, before.st_uid, before.st_gid)
    new.rename(path)
