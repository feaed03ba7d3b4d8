"""The registry of transports under test, and teams of processes that are connected by one.

To add a transport: a `Library` in transport_program.py, and here a `Start` (how its processes come to be, where that
is not as plain training processes do) and its kinds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .launch import ROOT, Process, environments, free_port
from .transport_site import HANG_S

START_S = 90.0  # torch's import, many times at once on two cores
ANSWER_S = HANG_S + 10.0
MPI_HOME = Path(sys.prefix) / "mpi"


class Members:
    """The processes of a team."""

    def codes(self, timeout_s: float) -> list[int | None]:
        """Exit codes; None for one that has not ended in time. A launcher may have one for all."""
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError

    def words(self) -> str:
        """What they have printed."""
        raise NotImplementedError


class Forked(Members):
    """Training processes like those of the other tests, from the zygote."""

    def __init__(self, control: str, world: int, library: str, extra: Mapping[str, str] | None = None) -> None:
        options = {"transport": [control, library]}
        self.processes = [Process({**env, **(extra or {})}, options) for env in environments(world)]

    def codes(self, timeout_s: float) -> list[int | None]:
        deadline = time.monotonic() + timeout_s
        return [p.wait(max(0.0, deadline - time.monotonic())) for p in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.signal(signal.SIGKILL)

    def words(self) -> str:
        return "\n".join(text for p in self.processes for text in p.read())


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

    def environment(self, control: str) -> dict[str, str]:
        return {
            "TMPDIR": str(Path(control).parent),  # Open MPI leaves things there
            "MPI4PY_LIBMPI": str(self.home / "lib" / self.soname),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **{f"OMPI_MCA_{name}": value for name, value in self.parameters.items()},
        }

    def launch(
        self, directory: Path, world: int, program: Sequence[str], out: IO[bytes], options: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """An MPI job of one host that never leaves it, running a module of ours; options: further ones, of mpiexec.
        `directory` may be left with things in it."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_", "PMI", "OMPI_"))}
        env.update(
            PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH")))),
            **self.environment(str(directory / "control")),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
        )
        mpiexec = [str(self.home / "bin" / "mpiexec"), *self.options, *options, "-n", str(world)]
        return subprocess.Popen(
            [*_OWN_SHM, *mpiexec, sys.executable, "-m", *program],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )

    def __call__(self, control: str, world: int, library: str) -> Members:
        """A process alone need not be launched: that saves the import of torch."""
        if world == 1:
            segments = {"OMPI_MCA_btl_sm_backing_directory": str(Path(control).parent)}
            return Forked(control, world, library, self.environment(control) | segments)
        return Launched(self, control, world, library)


def end(mpiexec: subprocess.Popen[bytes]) -> None:
    """It ends its processes."""
    mpiexec.terminate()
    with suppress(subprocess.TimeoutExpired):
        mpiexec.wait(10.0)
    mpiexec.kill()
    mpiexec.wait()


class Launched(Members):
    """An MPI job."""

    def __init__(self, mpi: Mpi, control: str, world: int, library: str) -> None:
        directory = Path(control).parent
        self._out = Path(tempfile.mkdtemp(dir=directory)) / "out"
        program = ["tests.train.transport_program", control, library]
        with self._out.open("wb") as out:
            self._process = mpi.launch(directory, world, program, out)

    def codes(self, timeout_s: float) -> list[int | None]:
        with suppress(subprocess.TimeoutExpired):
            return [self._process.wait(timeout_s)]
        return [None]

    def kill(self) -> None:
        end(self._process)

    def words(self) -> str:
        return self._out.read_text(errors="replace")


@dataclass(frozen=True)
class Start:
    """How the processes of a library's teams are made: members(control, world, name of the Library). ends_together:
    a process that is killed takes the others with it."""

    library: str
    members: Callable[[str, int, str], Members]
    ends_together: bool = False


OPENMPI = Mpi(
    "openmpi",
    "libmpi.so.40",
    ("--oversubscribe", "--bind-to", "none"),
    {"pml": "ob1", "btl": "self,sm"},
)
MPICH = Mpi("mpich", "libmpi.so.12", ("-iface", "lo", "-bind-to", "none"))

STARTS = {
    "gloo": Start("gloo", Forked),
    "openmpi": Start("mpi", OPENMPI, ends_together=True),
    "mpich": Start("mpi", MPICH, ends_together=True),
}


@dataclass(frozen=True)
class Kind:
    """A transport as it is tested: how it is started, with how many landing parts at the receiver (0: none)."""

    start: str
    p: int = 0

    def __str__(self) -> str:
        return f"{self.start}-p{self.p}" if self.p else self.start


KINDS = [Kind("gloo"), Kind("gloo", 1), Kind("gloo", 4), Kind("openmpi"), Kind("mpich"), Kind("mpich", 4)]


class TeamFailed(AssertionError):
    """Of at least one rank: what it said, or that it hangs."""


class Team:
    """Connected processes that do what they are told, all the same at the same time."""

    def __init__(self, start: str, world: int) -> None:
        self.start, self.world = STARTS[start], world
        self._directory = tempfile.mkdtemp(prefix="team-")
        path = f"{self._directory}/control"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(world)
        self.members = self.start.members(path, world, self.start.library)
        self._streams: list[Any] = []
        self.pids: list[int] = []

    def connect(self) -> None:
        """Wait until all have come. Raises TeamFailed."""
        deadline = time.monotonic() + START_S
        found: dict[int, tuple[Any, int]] = {}
        while len(found) < self.world:
            self._listener.settimeout(0.5)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                ended = any(code is not None for code in self.members.codes(0.0))
                if ended or time.monotonic() > deadline:
                    raise TeamFailed(f"the team has not started:\n{self.members.words()}") from None
                continue
            connection.settimeout(ANSWER_S)
            stream = connection.makefile("rw")
            connection.close()
            hello = json.loads(stream.readline())
            found[hello["rank"]] = stream, hello["pid"]
        self._streams = [found[rank][0] for rank in range(self.world)]
        self.pids = [found[rank][1] for rank in range(self.world)]

    def tell(self, scenario: str, *, kind: Kind | None = None, inboxes: int = 1, **arguments: Any) -> None:
        """Begin a scenario on all ranks."""
        if not self._streams:
            self.connect()
        command = {
            "scenario": scenario,
            "parts": kind.p if kind else 0,
            "part_bytes": arguments.pop("part_bytes", 1 << 16),
            "inboxes": inboxes,
            "arguments": arguments,
        }
        for stream in self._streams:
            stream.write(json.dumps(command) + "\n")
            stream.flush()

    def hear(self, ranks: Sequence[int] | None = None) -> list[Any]:
        """What the scenario has returned on these ranks. Raises TeamFailed."""
        values, failures = [], []
        for rank in range(self.world) if ranks is None else ranks:
            try:
                line = self._streams[rank].readline()
            except (TimeoutError, ConnectionError) as error:
                line = ""
                failures.append(f"rank {rank}: {error or type(error).__name__}")
            answer = json.loads(line) if line else {"error": "no answer"}
            values.append(answer.get("value"))
            if "error" in answer:
                failures.append(f"rank {rank}: {answer['error']}")
        if failures:
            self.members.kill()
            raise TeamFailed("\n".join([*failures, self.members.words()]))
        return values

    def run(self, scenario: str, **arguments: Any) -> list[Any]:
        """All of it: what it returns, by rank; the transport ends on every rank when it is over on all of them."""
        self.tell(scenario, **arguments)
        values = self.hear()
        self.tell("over")
        self.hear()
        return values

    def hang_up(self) -> list[int | None]:
        """The end, in peace. Exit codes."""
        if not self._streams:
            with suppress(TeamFailed):
                self.connect()
        for stream in self._streams:
            with suppress(OSError):
                stream.close()
        codes = self.members.codes(20.0)
        self.close()
        return codes

    def close(self) -> None:
        """Whatever is left ends."""
        if None in self.members.codes(0.0):
            self.members.kill()
            self.members.codes(10.0)
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class Teams:
    """Teams of three, by kind of start; each serves many tests, one after the other."""

    def __init__(self) -> None:
        self._teams: dict[str, Team] = {}

    def prepare(self, starts: Iterable[str]) -> None:
        """Have some started, all at the same time: it takes a while."""
        new = [start for start in starts if start not in self._teams]
        for start in new:
            self._teams[start] = Team(start, 3)
        for start in new:
            self._teams[start].connect()

    def take(self, start: str) -> Team:
        """One to keep: the caller ends it."""
        self.prepare([start])
        return self._teams.pop(start)

    def run(self, kind: Kind, scenario: str, **arguments: Any) -> list[Any]:
        """A scenario on a team. A team that failed is not used again."""
        self.prepare([kind.start])
        try:
            return self._teams[kind.start].run(scenario, kind=kind, **arguments)
        except AssertionError:
            self._teams.pop(kind.start).close()
            raise

    def close(self) -> None:
        for team in self._teams.values():
            team.close()
        self._teams.clear()


def lacking(start: str) -> str:
    """What has to be installed for it, or nothing."""
    members = STARTS[start].members
    if isinstance(members, Mpi) and not (members.home / "bin" / "mpiexec").exists():
        return f"no {members.home}: `make test` installs it"
    return ""
