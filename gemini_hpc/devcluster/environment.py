"""The tool's Python environment, made visible to every user inside at a path that they can reach.

Inside, `/opt/gemini-hpc/venv` is a virtual environment made of links. Third-party packages lead to a
read-only bind mount of this environment (`base`). `gemini_hpc` leads to one of the directory that is imported
here (`src`). A wheel, an editable install and a bare checkout thus look alike, even below a user's 0700 home.
`python3 -I` finds everything.
"""

from __future__ import annotations

import compileall
import os
import shutil
import stat
import sys
import sysconfig
from pathlib import Path

import gemini_hpc
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import INSIDE, INSIDE_PYTHON, ClusterFiles

Mount = list[str | int | bool]  # a step of `init.apply`
INIT = Path("devcluster") / "init.py"
# paths hidden by a cluster's own tmpfs
_PRIVATE = (Path("/tmp"), Path("/run"), Path("/dev/shm"))
_CONSOLE_SCRIPT = f"""#!{INSIDE_PYTHON} -I
import sys

from gemini_hpc.cli.main import main

sys.exit(main())
"""


def locate_package() -> Path:
    """Return the directory of the imported package."""
    return Path(gemini_hpc.__file__).resolve().parent


def find_interpreter() -> str:
    """Return the interpreter of the virtual environment.

    Raises `DevclusterError` if users inside could not run it.
    """
    if sys.prefix == sys.base_prefix:
        raise DevclusterError(
            f"this tool runs with {sys.executable}, which is not in a virtual environment: install gemini-hpc in "
            "one made with /usr/bin/python3 -m venv"
        )
    found = Path(os.path.realpath(sys.executable))
    if found.is_relative_to(sys.prefix):
        # A copy instead of a link: it is bound with the rest of the environment.
        return str(found)
    closed = [path for path in (found, *found.parents) if not path.stat().st_mode & stat.S_IXOTH]
    hidden = [path for path in _PRIVATE if found.is_relative_to(path)]
    if closed or hidden:
        raise DevclusterError(
            f"the environment {sys.prefix} was made from {found}, which other users inside cannot execute "
            f"({(closed + hidden)[-1]} is {'closed to them' if closed else 'private there'}): make it with "
            "/usr/bin/python3 -m venv"
        )
    return str(found)


def build(layout: ClusterFiles) -> list[Mount]:
    """Lay out `layout.opt`; return the mounts that make it visible as `INSIDE`."""
    base, venv, source = layout.opt / "base", layout.opt / "venv", layout.opt / "src" / "gemini_hpc"
    for directory in (base, venv, source):
        directory.mkdir(parents=True)
    _link_environment(Path(sys.prefix), venv)
    if not locate_package().is_relative_to(sys.prefix):
        # pip compiles installed packages; a checkout would be compiled again at each start by users who
        # cannot write it.
        compileall.compile_dir(locate_package(), quiet=2)
        examples = locate_package().parent / "examples"  # an installed package has its own
        shutil.copytree(examples, source.parent / examples.name, ignore=shutil.ignore_patterns("__pycache__"))
    return [
        ["bind", sys.prefix, str(base), True],
        ["bind", str(locate_package()), str(source), True],
        ["bind", str(layout.opt), str(INSIDE), False],
    ]


def _link_environment(prefix: Path, venv: Path) -> None:
    inside_base = INSIDE / "base"
    libraries = {Path(sysconfig.get_path(kind)).relative_to(prefix) for kind in ("purelib", "platlib")}
    for entry in prefix.iterdir():
        if entry.is_symlink() and not os.path.isabs(os.readlink(entry)):
            (venv / entry.name).symlink_to(os.readlink(entry))
        elif entry.name not in {"bin", "pyvenv.cfg", *(library.parts[0] for library in libraries)}:
            (venv / entry.name).symlink_to(inside_base / entry.name)
    # Python searches this file beside the link that it is called by, so it must be a file here.
    (venv / "pyvenv.cfg").write_bytes((prefix / "pyvenv.cfg").read_bytes())
    for library in libraries:
        packages = venv / library
        if packages.resolve() in {(venv / other).resolve() for other in libraries if other < library}:
            continue
        packages.mkdir(parents=True)
        for entry in (prefix / library).iterdir():
            if entry.name not in {"gemini_hpc", "__pycache__"}:
                (packages / entry.name).symlink_to(inside_base / library / entry.name)
        (packages / "gemini_hpc").symlink_to(INSIDE / "src" / "gemini_hpc")
    _link_programs(prefix, venv / "bin", inside_base / "bin")


def _link_programs(prefix: Path, target: Path, inside_base: Path) -> None:
    target.mkdir()
    outside_bin, inside_bin = f"{prefix}/bin/".encode(), f"{INSIDE}/venv/bin/".encode()
    for entry in (prefix / "bin").iterdir():
        link = target / entry.name
        resolved = Path(os.path.realpath(entry))
        if not resolved.is_relative_to(prefix):
            link.symlink_to(resolved)
            continue
        with entry.open("rb") as file:
            script = file.read() if file.read(2) == b"#!" else b""
        if outside_bin in script[:512]:
            link.write_bytes(b"#!" + script.replace(outside_bin, inside_bin, 2))
            link.chmod(0o755)
        else:
            link.symlink_to(inside_base / entry.name)
    console = target / "gemini-hpc"
    console.unlink(missing_ok=True)
    console.write_text(_CONSOLE_SCRIPT)
    console.chmod(0o755)
