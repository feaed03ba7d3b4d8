"""Directories on a tier that have no final name yet, and the removal of whole directories.

Agents import the tier's modules, but only their workers come here. So the libraries for it, half a MiB of an
agent's memory, are imported at use.
"""

from __future__ import annotations


def make(above: str, name: str) -> str:
    """Make a hidden directory (mode 0700) that will get this name below `above`, and return its path.

    Raises OSError.
    """
    import tempfile

    return tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=above)


def remove(path: str, *, ignore_errors: bool = False) -> None:
    """Remove a directory with everything in it. Raises OSError, unless errors are ignored."""
    import shutil

    shutil.rmtree(path, ignore_errors=ignore_errors)
