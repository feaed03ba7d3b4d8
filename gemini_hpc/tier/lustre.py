"""Detection of Lustre, and the file layout in a new directory on it.

`lfs` is called as its manual describes. The tests use a stand-in that records its calls, because no real
Lustre was available.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess

MAGIC = 0x0BD00BD0  # Lustre's f_type in statfs(2)
_TIMEOUT_S = 10.0  # lfs may hang with its file system, and a save waits for it
_STRIPE = "4M"
_BYTES_PER_STRIPE = 8 << 30
_MOST_STRIPES = 16
_COUNT = re.compile(r"\bstripe_count:\s*(-?[0-9]+)")
_CHOSEN = re.compile(
    r"\b(lcm_|lcme_|pool:|pattern:\s*mdt)"
)  # progressive or mirrored layout, layout in a pool, or data on the metadata server
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


def is_lustre(path: str) -> bool:
    """Return whether `path` lies on Lustre; False if the file system cannot be queried."""
    statfs = ctypes.CDLL(None, use_errno=True).statfs
    answer = ctypes.create_string_buffer(1024)
    if statfs(os.fsencode(path), answer) != 0:
        return False
    return ctypes.c_long.from_buffer(answer).value == MAGIC


def choose_stripe_count(size_bytes: int) -> int:
    """Return the number of servers over which to stripe a file of that size.

    The number is one per begun 8 GiB, from 1 to 16. A version has one file per node, so files with one stripe
    each already use many servers.
    """
    return min(_MOST_STRIPES, 1 + max(0, size_bytes - 1) // _BYTES_PER_STRIPE)


def lay_out(directory: str, size_bytes: int, lfs: str) -> bool:
    """Set the layout of a new directory's files for that size; return whether it was set.

    A layout that someone has chosen (progressive, several stripes, a pool) is kept. Without Lustre or `lfs`
    nothing changes.
    """
    if not is_lustre(directory):
        return False
    known = _ask(lfs, "getstripe", "-d", directory)
    if known is None or _CHOSEN.search(known):
        return False
    counts = [int(count) for count in _COUNT.findall(known)]
    if any(count not in (0, 1) for count in counts):
        return False
    wanted = ("setstripe", "-c", str(choose_stripe_count(size_bytes)), "-S", _STRIPE, directory)
    return _ask(lfs, *wanted) is not None


def _ask(lfs: str, *arguments: str) -> str | None:
    """Return the output of `lfs`, None if it fails or does not answer in time."""
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
