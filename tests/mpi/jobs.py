"""MPI jobs of the tests: both flavours, as `make` installs them, and how a job of one is started and read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.train.fake_agent import FakeJob
from tests.train.launch import ROOT, free_port

MPI_HOME = Path(sys.prefix) / "mpi"

# MPI's segments stay in /dev/shm where its processes are killed: these go with the last process that sees them.
_OWN_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")


@dataclass(frozen=True)
class Mpi:
    """A flavour of MPI, installed as `make` does it. options: of its mpiexec. parameters: Open MPI's own."""

    name: str
    soname: str
    options: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return MPI_HOME / self.name

    def launch(self, directory: Path, world: int, program: Sequence[str], out: IO[bytes]) -> subprocess.Popen[bytes]:
        """An MPI job of one host that never leaves it, running a module of ours. `directory` may be left with things
        in it."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_", "PMI", "OMPI_"))}
        env.update(
            PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH")))),
            TMPDIR=str(directory),  # Open MPI leaves things there
            MPI4PY_LIBMPI=str(self.home / "lib" / self.soname),
            OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            **{f"OMPI_MCA_{name}": value for name, value in self.parameters.items()},
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
        )
        mpiexec = [str(self.home / "bin" / "mpiexec"), *self.options, "-n", str(world)]
        return subprocess.Popen(
            [*_OWN_SHM, *mpiexec, sys.executable, "-m", *program],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def end(mpiexec: subprocess.Popen[bytes]) -> None:
    """It ends its processes."""
    mpiexec.terminate()
    with suppress(subprocess.TimeoutExpired):
        mpiexec.wait(10.0)
    mpiexec.kill()
    mpiexec.wait()


OPENMPI = Mpi(
    "openmpi",
    "libmpi.so.40",
    ("--oversubscribe", "--bind-to", "none"),
    {"pml": "ob1", "btl": "self,sm"},
)
MPICH = Mpi("mpich", "libmpi.so.12", ("-iface", "lo", "-bind-to", "none"))


def lacking(mpi: Mpi) -> str:
    """Return what is missing of an MPI library and what installs it, "" for nothing."""
    return "" if (mpi.home / "bin" / "mpiexec").exists() else f"no {mpi.home}: `make test` installs it"


class MpiRun:
    """Two ranks started by mpiexec, one on each node of the job."""

    def __init__(self, mpi: Mpi, job: FakeJob, options: dict[str, Any]) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mpi-"))
        how = {
            "level": "multiple",
            "directory": str(self.directory),
            "sockets": [node.path for node in job.nodes],
            "step": f"1.{job.restart}",
            **options.get("mpi", {}),
        }
        patient = {"kwargs": {"seal_timeout_s": 20.0}}  # longer than any pause of a busy machine
        program = ["tests.mpi.program", json.dumps({**patient, **options, "mpi": how})]
        with (self.directory / "mpiexec").open("wb") as out:
            self._process = mpi.launch(self.directory, options.get("ranks", len(job.nodes)), program, out)

    def wait(self, timeout_s: float = 150.0) -> int | None:
        """mpiexec's exit code; None where it has not ended."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def words(self, name: str, rank: int | None = None) -> str:
        path = self.directory / (name if rank is None else f"{name}.{rank}")
        return path.read_text(errors="replace") if path.exists() else ""

    def said(self) -> str:
        return "\n".join(self.words(p.name) for p in sorted(self.directory.glob("[eom]*")) if p.is_file())

    def result(self, rank: int) -> dict[str, Any]:
        out = self.words("out", rank)
        at = out.rfind('{"rank"')
        assert at >= 0, self.said()
        found: dict[str, Any] = json.JSONDecoder().raw_decode(out[at:])[0]
        return found

    def close(self) -> None:
        end(self._process)
        for path in self.directory.glob("pid.*"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)
