"""The read and the replacement of a small file as a whole."""

from __future__ import annotations

import errno
import os
import stat


def read_regular_file(path: str, most_bytes: int) -> bytes:
    """Return the content of a regular file, or the beginning of a larger one.

    A pipe, which could block the reader, is refused like a device or a directory.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read(most_bytes)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


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
