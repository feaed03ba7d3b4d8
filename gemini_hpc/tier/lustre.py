"""Lustre: whether a directory lies there, and the layout of the files in a new one.

`lfs` is called as its manual describes it, and tested against a stand-in that records its calls: real Lustre was not
at hand.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess

MAGIC = 0x0BD00BD0  # of statfs(2)
_TIMEOUT_S = 10.0
_STRIPE = "4M"
_BYTES_PER_STRIPE = 8 << 30
_MOST_STRIPES = 16
_COUNT = re.compile(r"\bstripe_count:\s*(-?[0-9]+)")
_CHOSEN = re.compile(
    r"\b(lcm_|lcme_|pool:|pattern:\s*mdt)"
)  # progressive or mirrored, in a pool, on the metadata server
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


def is_lustre(path: str) -> bool:
    """Whether `path` lies on Lustre; what cannot be asked does not."""
    statfs = ctypes.CDLL(None, use_errno=True).statfs
    answer = ctypes.create_string_buffer(1024)
    if statfs(os.fsencode(path), answer) != 0:
        return False
    return ctypes.c_long.from_buffer(answer).value == MAGIC


def stripes(size_bytes: int) -> int:
    """Over how many servers a file of that size goes: one, and one more for each 8 GiB that are begun, up to 16. A
    version has one file a node, so that even files on one server each use many of them."""
    return min(_MOST_STRIPES, 1 + max(0, size_bytes - 1) // _BYTES_PER_STRIPE)


def lay_out(directory: str, size_bytes: int, lfs: str) -> bool:
    """Give the files of a new directory a layout for that size; whether it was given. A layout that someone has
    chosen (progressive, several stripes, a pool) stays; where there is no Lustre, or no `lfs`, nothing changes."""
    if not is_lustre(directory):
        return False
    known = _ask(lfs, "getstripe", "-d", directory)
    if known is None or _CHOSEN.search(known):
        return False
    counts = [int(count) for count in _COUNT.findall(known)]
    if any(count not in (0, 1) for count in counts):
        return False
    wanted = ("setstripe", "-c", str(stripes(size_bytes)), "-S", _STRIPE, directory)
    return _ask(lfs, *wanted) is not None


def _ask(lfs: str, *arguments: str) -> str | None:
    """What `lfs` prints; None where it fails or does not answer."""
    try:
        done = subprocess.run(
            [lfs, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            env=_ENVIRONMENT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
