"""The shared file system: a real directory, whose operations take time, fail, hang, and end with who asked for them.

Code of the tier gets `Files` in place of `os`. Each operation of a worker is a moment at which everybody else goes
on, and at which it may be killed: then the operation has happened, or not, and nothing comes after it.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeVar

from .kernel import _PROCESS, Process, SimLoop

T = TypeVar("T")
READ, CHANGE, WRITE = "read", "change", "write"  # CHANGE: in a directory, of what is there; WRITE: needs room


class Faults:
    """What is wrong with the file system now."""

    def __init__(self) -> None:
        self.slow_s = 0.0  # an operation takes up to so much longer
        self.hangs = False
        self.full = self.broken = 0.0  # the share of operations that fail: ENOSPC, EIO

    def clear(self) -> None:
        """All is well."""
        self.__init__()  # type: ignore[misc]


class FileSystem:
    """The directory, and what is done there."""

    def __init__(self, loop: SimLoop, root: str) -> None:
        self.loop, self.rng, self.root = loop, random.Random(loop.rng.random()), root
        self.faults = Faults()
        self.named: Callable[[str], object] = lambda path: None  # a file has got its name
        self.removed: Callable[[str], object] = lambda path: None
        self.renamed: Callable[[str, Callable[[], None]], object] = lambda path, rename: rename()
        self._waiting: list[Callable[[], None]] = []
        self._late: list[Callable[[], object]] = []  # what hangs, of workers that have been killed
        self._pending: dict[Process, Callable[[], object]] = {}
        self._unsynced: dict[int, str] = {}  # host, by inode
        self.temporary = 0

    # ---- faults ----------------------------------------------------------------------------------------

    def over(self) -> None:
        """All is well again: what hung goes on."""
        self.faults.clear()
        late, self._late = self._late, []
        for do in late:
            _quietly(do)
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def vanish(self) -> None:
        """It is not mounted any more."""
        os.rename(self.root, f"{self.root}.away")

    def come_back(self) -> None:
        """It is mounted again. Raises OSError where somebody has made another one in its place."""
        with suppress(FileNotFoundError):
            os.rename(f"{self.root}.away", self.root)

    def lost_power(self, host: str) -> None:
        """What nobody has synced is gone, in part or as a whole."""
        for directory, _, names in os.walk(self.root):
            for name in names:
                path = f"{directory}/{name}"
                info = os.stat(path)
                if self._unsynced.get(info.st_ino) == host:
                    os.truncate(path, self.rng.randint(0, info.st_size))
                    del self._unsynced[info.st_ino]

    def killed(self, process: Process) -> bool:
        """Its operation is carried out nevertheless, now or when nothing hangs, or never; whether it hangs."""
        do = self._pending.pop(process, None)
        if do is not None and self.rng.random() < 0.5:
            if self.faults.hangs:
                self._late.append(do)
            else:
                _quietly(do)
        return do is not None and self.faults.hangs

    # ---- operations ------------------------------------------------------------------------------------

    def operate(self, kind: str, do: Callable[[], T]) -> T:
        """Do this as the process at work. Raises OSError."""
        process = _PROCESS.get()
        if process is None or not process.name.startswith("worker"):
            return do()
        self._pending[process] = do
        while self.faults.hangs:
            self.loop.block(self._waiting.append)
        took_s = self.rng.uniform(0.0001, 0.002) if self.rng.random() < 0.95 else self.rng.uniform(0.002, 0.05)
        self.loop.block(lambda _: None, took_s + self.rng.uniform(0.0, self.faults.slow_s))
        while self.faults.hangs:
            self.loop.block(self._waiting.append)
        del self._pending[process]
        if self.rng.random() < self.faults.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kind == WRITE and self.rng.random() < self.faults.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return do()

    def made(self, path: str, host: str) -> None:
        """A file is new, and not on disk yet."""
        self._unsynced[os.stat(path).st_ino] = host

    def synced(self, fd: int) -> None:
        """All of a file is on disk."""
        self._unsynced.pop(os.fstat(fd).st_ino, None)


def _quietly(do: Callable[[], object]) -> None:
    with suppress(OSError):
        do()


class Files:
    """In place of `os`."""

    def __init__(self, system: FileSystem) -> None:
        self._system = system
        self.path = _Paths(self)
        # shutil asks whether a function `is os.lstat`, from Python 3.13 on; a bound method is new at each look.
        vars(self).update(lstat=self.lstat, rmdir=self.rmdir)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _do(self, kind: str, do: Callable[[], T]) -> T:
        return self._system.operate(kind, do)

    @staticmethod
    def getpid() -> int:
        found = _PROCESS.get()
        return int(getattr(found, "pid", 0)) or os.getpid()

    def create(self, path: str, make: Callable[[], T]) -> T:
        """A file that is made with `make`."""
        process = _PROCESS.get()

        def do() -> T:
            made = make()
            self._system.made(path, process.host if process is not None else "")
            return made

        return self._do(WRITE, do)

    def open(self, path: str, flags: int, *args: Any, **options: Any) -> int:
        kind = WRITE if flags & os.O_CREAT else READ
        return self._do(kind, lambda: os.open(path, flags, *args, **options))

    def open_file(self, path: str, mode: str = "r") -> Any:
        """In place of `open`."""
        return self.create(path, lambda: open(path, mode))

    def fsync(self, fd: int) -> None:
        def do() -> None:
            self._system.synced(fd)

        self._do(WRITE, do)

    fdatasync = fsync

    def pwrite(self, fd: int, data: Any, at: int) -> int:
        return self._do(WRITE, lambda: os.pwrite(fd, data, at))

    def preadv(self, fd: int, views: Any, at: int) -> int:
        return self._do(READ, lambda: os.preadv(fd, views, at))

    def mkdir(self, path: str, *args: Any, **options: Any) -> None:
        self._do(WRITE, lambda: os.mkdir(path, *args, **options))

    def rmdir(self, path: str, **options: Any) -> None:
        self._do(CHANGE, lambda: os.rmdir(path, **options))

    def unlink(self, path: str, **options: Any) -> None:
        def do() -> None:
            os.unlink(path, **options)
            self._system.removed(path)

        self._do(CHANGE, do)

    def rename(self, source: str, target: str) -> None:
        def do() -> None:
            self._system.renamed(source, lambda: os.rename(source, target))
            self._system.named(target)

        self._do(CHANGE, do)

    def listdir(self, path: str) -> list[str]:
        return self._do(READ, lambda: sorted(os.listdir(path)))

    def scandir(self, path: Any) -> Any:
        return self._do(READ, lambda: os.scandir(path))

    def stat(self, path: Any, **options: Any) -> os.stat_result:
        return self._do(READ, lambda: os.stat(path, **options))

    def lstat(self, path: Any, **options: Any) -> os.stat_result:
        return self._do(READ, lambda: os.lstat(path, **options))

    def mkdtemp(self, *, prefix: str, suffix: str, dir: str) -> str:
        """In place of tempfile's."""
        self._system.temporary += 1
        path = f"{dir}/{prefix}{self._system.temporary}{suffix}"
        self.mkdir(path, 0o700)
        return path


class _Paths:
    """In place of `os.path`, as far as it looks at files: what cannot be seen counts as not there, as ever."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(os.path, name)

    def lexists(self, path: str) -> bool:
        try:
            self._files.lstat(path)
        except OSError:
            return False
        return True

    def isdir(self, path: str) -> bool:
        try:
            return os.path.isdir(path) and bool(self._files.stat(path))
        except OSError:
            return False


class Straight:
    """In place of `Behind`: one writer."""

    def __init__(self, files: Files, path: str) -> None:
        self._files, self._fd = files, files.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def put(self, data: memoryview, at: int) -> memoryview:
        copy = bytes(data)
        self._files.pwrite(self._fd, copy, at)
        return memoryview(copy)

    def wait(self) -> None: ...

    def sync(self) -> None:
        self._files.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class NothingAhead:
    """In place of `Ahead`: the caller reads all himself."""

    def __init__(self, path: str, begin: int, length: int) -> None: ...

    def copy_ahead(self, into: memoryview, at: int) -> int:
        return 0

    def close(self) -> None: ...


def copy_of(name: str, files: Files) -> ModuleType:
    """Another copy of a module of Python's, on these files."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.os = files  # type: ignore[attr-defined]
    return made


def below(root: str) -> Iterator[str]:
    """All paths in a directory."""
    for directory, directories, names in os.walk(root):
        for name in sorted([*directories, *names]):
            yield f"{directory}/{name}"
