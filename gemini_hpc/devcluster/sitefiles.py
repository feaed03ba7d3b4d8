"""Plugin, prolog and epilog as a site would install them: root-owned copies, with the plugin built on the spot."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import gemini_hpc
from gemini_hpc.devcluster.errors import DevclusterError, read_log_tail
from gemini_hpc.devcluster.layout import BUILD, MARKER, ROLE, ClusterFiles


@dataclass(frozen=True)
class SiteFiles:
    """The site files that Slurm uses; None for a file that is omitted."""

    plugin: Path | None = None
    prolog: Path | None = None
    epilog: Path | None = None


class SiteBuild:
    """A build of the site files: copies them and starts `make`, which runs while the hosts boot.

    `files` are the files that exist after the build.
    """

    def __init__(self, layout: ClusterFiles) -> None:
        self._layout = layout
        self._make: subprocess.Popen[bytes] | None = None
        source = find_source()
        for part in ("slurm", "prolog_epilog"):
            if source and (source / part).is_dir():
                _copy(source / part, layout.site / part)
        if (layout.site / "slurm" / "Makefile").exists():
            with (layout.log / "plugin-build.log").open("wb") as log:
                self._make = _start_make(layout, log.fileno())
        scripts = layout.site / "prolog_epilog"
        self.files = SiteFiles(
            layout.site / "slurm" / "gemini_spank.so" if self._make else None,
            *(path if path.exists() else None for path in (scripts / "prolog", scripts / "epilog")),
        )

    def wait(self) -> None:
        """Wait until the plugin is built. Raises `DevclusterError` if the build fails."""
        plugin = self.files.plugin
        if self._make is not None and plugin is not None and (self._make.wait(120.0) or not plugin.exists()):
            log = self._layout.log / "plugin-build.log"
            raise DevclusterError(
                f"the SPANK plugin did not build: {read_log_tail(log)} (it needs Debian's make, gcc and "
                "libslurm-dev; `up --no-site` goes without it)"
            )

    def cancel(self) -> None:
        """Kill the build if it is still running."""
        if self._make is not None and self._make.poll() is None:
            os.killpg(self._make.pid, signal.SIGKILL)
            self._make.wait()


def find_source() -> Path | None:
    """Return the installed package's copy of the sources, or the top of the checkout that holds the package."""
    package = Path(gemini_hpc.__file__).parent
    for candidate in (package / "_site", package.parent):
        if (candidate / "slurm" / "Makefile").exists() or (candidate / "prolog_epilog" / "prolog").exists():
            return candidate
    return None


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for path in [target, *target.rglob("*")]:
        os.chown(path, 0, 0)
        script = path.is_file() and path.open("rb").read(2) == b"#!"
        path.chmod(0o755 if path.is_dir() or script or os.access(path, os.X_OK) else 0o644)


def _start_make(layout: ClusterFiles, output: int) -> subprocess.Popen[bytes]:
    make = shutil.which("make")
    if make is None:
        raise DevclusterError("make is not installed (Debian package make); `up --no-site` goes without the plugin")
    return subprocess.Popen(
        [make, f"-j{os.cpu_count() or 1}", "-C", str(layout.site / "slurm")],
        env={**os.environ, MARKER: layout.name, ROLE: BUILD, "TMPDIR": str(layout.site)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
