"""The training's script: the launcher imports its modules once, and each attempt is a fork that runs it."""

from __future__ import annotations

import ast
import importlib.util
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

# Modules that a training with torch imports only when it runs. torch._dynamo comes with the first optimizer and takes
# longer than all others. The launcher of a spare has no earlier attempt to learn the names from.
_LATER = ("torch._dynamo", "gemini_hpc.train.checkpointer")


@dataclass(frozen=True)
class Program:
    """The script of a rank and its arguments.

    Attributes:
        script: A file, or with `module` the name of a module.
        module: The script is a module's name, as for `python -m`.
        arguments: Arguments of the script.
    """

    script: str
    module: bool
    arguments: tuple[str, ...]

    def build_argv(self) -> list[str]:
        """Return the command that runs the script as a new process, with this interpreter's options."""
        given = sys.orig_argv[1:]
        options = given[: given.index("-m")] if "-m" in given else []
        return [sys.executable, *options, *(["-m"] if self.module else []), self.script, *self.arguments]

    def find_problem(self) -> str:
        """Return why there is nothing to run, or "". Nothing is imported."""
        if self.module:
            top = self.script.partition(".")[0]  # to find the rest would import it
            with suppress(ImportError, ValueError):
                if top and importlib.util.find_spec(top) is not None:
                    return ""
            return f"no module named {self.script[:80]!r}"
        if os.path.isdir(self.script) and not os.path.exists(os.path.join(self.script, "__main__.py")):
            return f"{self.script}: a directory without __main__.py"
        return "" if os.path.exists(self.script) else f"{self.script}: no such file"

    def prepare(self) -> None:
        """Import the modules that the script imports at its top level.

        A module that cannot be imported is left to the script.
        """
        self._set_path_and_argv()
        if self.module:
            return
        try:
            with open(self.script, "rb") as file:
                names = list_imports(file.read())
        except (OSError, SyntaxError, ValueError):
            return
        for name, taken in names.items():
            import_names(name, taken)
        if "torch" in sys.modules:
            for name in _LATER:
                import_names(name)

    def _set_path_and_argv(self) -> None:
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd() if self.module else os.path.dirname(os.path.realpath(self.script))
        sys.argv = [self.script, *self.arguments]

    def run(self) -> None:
        """Run the script in the process of one attempt. Raises whatever the script raises."""
        _draw_seeds()
        self._set_path_and_argv()
        if self.module:
            runpy.run_module(self.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.script, run_name="__main__")


def list_imports(source: bytes) -> dict[str, list[str]]:
    """Return modules that a script imports at its top level, in order.

    Each comes with the names that `from` imports. Relative imports are not included.
    """
    found: dict[str, list[str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, [])
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module != "__future__":
            found.setdefault(node.module, []).extend(alias.name for alias in node.names)
    return found


def import_names(name: str, taken: Sequence[str] = ()) -> None:
    """Import a module that the rank imports, and modules among the names imported from it.

    A failed import is ignored. mpi4py is skipped, because MPI starts on import and belongs to the rank.
    """
    if name.partition(".")[0] != "mpi4py":
        with suppress(Exception, SystemExit):
            __import__(name, fromlist=taken)


def find_fork_obstacle() -> str:
    """Return why this process must not be forked, or "".

    A child has only the thread that forks, and cannot use a device that its parent has opened.
    """
    if threading.active_count() > 1:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        return f"an import has started a thread ({', '.join(names)[:100]})"
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                return f"an import has opened {target}"
    return ""


def _draw_seeds() -> None:
    """Draw anew the random seeds that an interpreter draws at its start."""
    import random

    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
