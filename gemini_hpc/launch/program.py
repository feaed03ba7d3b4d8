"""The training's script: what it imports is imported once, in the launcher; each attempt is a fork that runs it."""

from __future__ import annotations

import ast
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

# What a training with torch imports only when it runs; torch._dynamo comes with the first optimizer, and takes longer
# than all the rest. A spare has no earlier attempt from which its launcher could know.
_LATER = ("torch._dynamo", "gemini_hpc.train.checkpointer")


@dataclass(frozen=True)
class Program:
    """script: a file, or, with `module`, the name of a module; arguments: what follows it."""

    script: str
    module: bool
    arguments: tuple[str, ...]

    def argv(self) -> list[str]:
        """As a command of its own, with the options of this interpreter."""
        given = sys.orig_argv[1:]
        options = given[: given.index("-m")] if "-m" in given else []
        return [sys.executable, *options, *(["-m"] if self.module else []), self.script, *self.arguments]

    def prepare(self) -> None:
        """Import what the script imports at its top level. What cannot be imported is left to the script."""
        self._arrive()
        if self.module:
            return
        try:
            with open(self.script, "rb") as file:
                names = imported(file.read())
        except (OSError, SyntaxError, ValueError):
            return
        for name, taken in names.items():
            get(name, taken)
        if "torch" in sys.modules:
            for name in _LATER:
                get(name)

    def _arrive(self) -> None:
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd() if self.module else os.path.dirname(os.path.realpath(self.script))
        sys.argv = [self.script, *self.arguments]

    def run(self) -> None:
        """In the process of one attempt. Raises whatever the script raises."""
        _as_if_new()
        self._arrive()
        if self.module:
            runpy.run_module(self.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.script, run_name="__main__")


def imported(source: bytes) -> dict[str, list[str]]:
    """Modules that a script imports at its top level, in order, each with the names that `from` takes of it; relative
    ones are not among them."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, [])
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module != "__future__":
            found.setdefault(node.module, []).extend(alias.name for alias in node.names)
    return found


def get(name: str, taken: Sequence[str] = ()) -> None:
    """Import a module that the rank imports, and the modules among what it takes of that one. What cannot be imported
    is none of ours. MPI begins when it is imported, and is the rank's."""
    if name.partition(".")[0] != "mpi4py":
        with suppress(Exception, SystemExit):
            __import__(name, fromlist=taken)


def unfit() -> str:
    """Why this process is not to be forked, or "": a child has no thread but the one that forks, and cannot use a
    device that its parent has opened."""
    if threading.active_count() > 1:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        return f"an import has started a thread ({', '.join(names)[:100]})"
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                return f"an import has opened {target}"
    return ""


def _as_if_new() -> None:
    """What an interpreter draws when it starts is drawn anew."""
    import random

    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
