"""The replacement of a small file as a whole."""

from __future__ import annotations

import os


def replace_file(path: str, data: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Replace a file in one step. Readers find the former contents or `data`, never a part.

    Args:
        path: The file. Its directory belongs to the writer: the name with `.new` behind it is used, too.
        data: The new contents.
        mode: Permissions of a new file, less the umask.
        durable: Whether the contents are on disk before the file has its name.

    Raises:
        OSError: The file could not be written. The former contents are still there.
    """
    fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with open(fd, "wb") as f:
        f.write(data)
        if durable:
            f.flush()
            os.fsync(f.fileno())
    os.replace(f"{path}.new", path)
