"""The agents that `gemini-hpc run --own-agents` starts: an overlapping step of the job, for as long as `run` lives.

Nothing of a site's installation is needed. The agents know each other, and the owner's commands, by a key of the job
in a file of the owner. Only the file's path is in the step's arguments.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from gemini_hpc import clock, lines
from gemini_hpc.agent import own_start
from gemini_hpc.agent.own_directory import SOCKET
from gemini_hpc.cli import sendback
from gemini_hpc.client.joining import SOCKET_ENV, SPARES_ENV
from gemini_hpc.config import build_own_settings
from gemini_hpc.core import hostlist
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.node.meminfo import read_meminfo
from gemini_hpc.wire import keyed, own_key

SHARE = 0.5  # of the job's memory; the training itself needs the rest
NO_KILL_ENV = "SLURM_NO_KILL"
CLOCKS_APART_S = 60.0  # of slurmctld and a file server, at most
READY_S = own_start.START_S + build_own_settings().attach_timeout_s + 30.0  # srun asks slurmctld for the step before
# the agents' own limits, and the end of an srun
CLOSED_S = build_own_settings().tier_flush_s + own_start.GRACE_S + 5.0
LESS = (
    "less than where a site has installed gemini-hpc: copies end with this allocation, so a requeued job needs a "
    "tier; no lost node is fenced; copies count as the job's memory"
)
# srun takes these as the step's; all others describe the allocation for the training, and could be refused.
_KEPT = {"SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CLUSTER_NAME", "SLURM_WORKING_CLUSTER"}
_COUNT = re.compile(r"([0-9]{1,7})(\(x[0-9]{1,7}\))?")


class OwnAgentsError(Exception):
    """A job that cannot have its own agents; the text is one line."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The job, as its batch script sees it.

    Attributes:
        job: The job's id.
        restart: Restart count.
        nodelist: The job's nodes as a Slurm host list.
        hosts: Their names.
        cluster: Slurm's name of the cluster, as file names have it.
        memory_bytes: Memory of the job on the node where it has the least; without a limit, its part of the node's.
    """

    job: int
    restart: int
    nodelist: str
    hosts: tuple[str, ...]
    cluster: str
    memory_bytes: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Return the allocation that Slurm's variables describe.

        Raises:
            OwnAgentsError: There is none, or it is of a kind that cannot have agents.
        """
        job, nodelist = parse_number(environ.get("SLURM_JOB_ID", "")), environ.get("SLURM_JOB_NODELIST", "")
        if not job or not nodelist:
            raise OwnAgentsError("--own-agents needs a Slurm allocation: use it in a script for sbatch, or in salloc")
        if environ.get("SLURM_HET_SIZE"):
            raise OwnAgentsError("--own-agents cannot serve a heterogeneous job")
        try:
            hosts = tuple(hostlist.expand(nodelist))
        except ValueError as exc:
            raise OwnAgentsError(f"SLURM_JOB_NODELIST: {exc}") from None
        cluster = own_key.sanitize_cluster_name(environ.get("SLURM_CLUSTER_NAME", ""))
        return cls(
            job,
            parse_number(environ.get("SLURM_RESTART_COUNT", "")),
            nodelist,
            hosts,
            cluster,
            _read_memory_bytes(environ),
        )

    def compute_share_bytes(self) -> int:
        """Return the most that copies may take on a node."""
        return int(SHARE * self.memory_bytes)


def _read_memory_bytes(environ: Mapping[str, str]) -> int:
    counts = [_COUNT.fullmatch(part) for part in environ.get("SLURM_JOB_CPUS_PER_NODE", "").split(",")]
    cpus = min(int(found[1]) if found else 1 for found in counts)
    limit = parse_number(environ.get("SLURM_MEM_PER_NODE", "")) or cpus * parse_number(
        environ.get("SLURM_MEM_PER_CPU", "")
    )
    return limit << 20 or int(read_meminfo()["MemTotal"] * min(1.0, cpus / (os.cpu_count() or 1)))


class OwnAgents:
    """The step with the agents, from `start` to `end`."""

    def __init__(self, replicas: int, spares: int, environ: Mapping[str, str]) -> None:
        """Check that the agents can be started.

        Args:
            replicas: Copies of each shard.
            spares: Nodes that wait to replace a lost one.
            environ: Variables of the batch script.

        Raises:
            OwnAgentsError: They cannot be started here.
        """
        # A job that is submitted from within another inherits its variables.
        if os.path.exists(environ.get(SOCKET_ENV, "")):
            raise OwnAgentsError("this job has the agents of its site (--gemini-replicas): leave out --own-agents")
        self._job, self._replicas, self._spares = Allocation.from_environ(environ), replicas, spares
        if replicas + spares > (nodes := len(self._job.hosts)):
            raise OwnAgentsError(
                f"--replicas {replicas}{f' and --spares {spares}' if spares else ''} want {replicas + spares} nodes, "
                f"and the job has {nodes}"
            )
        self._key_file = own_key.build_path(self._job.cluster, self._job.job)
        self._environ = {k: v for k, v in environ.items() if not k.startswith("SLURM_") or k in _KEPT}
        self._step: subprocess.Popen[bytes] | None = None
        self._said = b""

    def start(self, environ: MutableMapping[str, str]) -> None:
        """Start the agents, wait until they agree, and set the variables by which the job's ranks find them.

        Raises:
            OwnAgentsError: An agent could not be started.
        """
        try:
            if not self._job.restart and self._has_former_key():
                os.unlink(self._key_file)
            key = own_key.make(self._key_file)
            directory = f"/tmp/gemini-hpc-{keyed.fingerprint(key)}"  # others cannot know the name and take it before
            self._step = subprocess.Popen(
                self._build_argv(directory), env=self._environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except keyed.KeyFileError as exc:
            raise OwnAgentsError(str(exc)) from None
        except OSError as exc:
            raise OwnAgentsError(f"srun: {exc.strerror}: --own-agents starts a step of the job with it") from None
        self._await_agents()
        environ[SOCKET_ENV] = f"{directory}/{SOCKET}"
        if self._spares:
            environ[SPARES_ENV] = str(self._spares)
            environ[NO_KILL_ENV] = "set"
        nodes, copies = _format_count(len(self._job.hosts), "node"), _format_count(self._replicas, "replica")
        mib = self._job.compute_share_bytes() >> 20
        spares = f", {self._spares} of them spare" if self._spares else ""
        _say(f"own agents on {nodes}{spares}, {copies} in up to {mib:,} MiB a node, {SHARE:.0%} of the job's memory")
        _say(LESS)

    def _has_former_key(self) -> bool:
        """Return whether the key file is of a former job that had this number."""
        try:
            made = os.lstat(self._key_file).st_mtime
        except OSError:
            return False
        return made < sendback.read_start_time() - CLOCKS_APART_S

    def _build_argv(self, directory: str) -> list[str]:
        job, nodes = self._job, len(self._job.hosts)
        srun = ["srun", f"--jobid={job.job}", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        srun += ["--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpus-per-task=1", "--mem=0"]
        srun += ["--gres=none", "--mpi=none", "--job-name=gemini-hpc", "--quiet", "--unbuffered"]
        own = [sys.executable, "-P", "-m", own_start.__name__, "--job", str(job.job), "--restart", str(job.restart)]
        own += ["--nodelist", job.nodelist, "--replicas", str(self._replicas), "--spares", str(self._spares)]
        own += ["--cluster", job.cluster, "--directory", directory, "--key-file", self._key_file]
        own += ["--share-bytes", str(job.compute_share_bytes()), "--share", f"{SHARE:.0%} of the job's memory"]
        return srun + own

    def _await_agents(self) -> None:
        """Wait until each node has told of its agent.

        Raises:
            OwnAgentsError: An agent could not be started, or the step has ended.
        """
        missing, deadline = set(self._job.hosts), clock.monotonic() + READY_S
        while missing:
            line = self._read_line(deadline)
            if line is None:
                names = " ".join(sorted(missing)[:8])
                raise OwnAgentsError(f"no agent on {names}: the step of the agents did not start, or ended at once")
            node, state, text = (*line.split(" ", 2), "", "")[:3]
            if state == own_start.FAILED:
                raise OwnAgentsError(f"no agent on {node}: {text}")
            if state == own_start.UNMAPPED:
                raise OwnAgentsError(
                    f"the agents do not reach each other: {node} finds none on {text or 'its peers'}"
                )
            missing.discard(node)

    def _read_line(self, deadline: float) -> str | None:
        """Return the next line of the step, None at its end and after the deadline."""
        assert self._step is not None and self._step.stdout is not None
        while b"\n" not in self._said:
            left_s = deadline - clock.monotonic()
            if left_s <= 0 or not select.select([self._step.stdout], [], [], left_s)[0]:
                return None
            part = os.read(self._step.stdout.fileno(), 1 << 16)
            if not part:
                return None
            self._said += part
        line, _, self._said = self._said.partition(b"\n")
        return line.decode(errors="replace")

    def end(self, status: int) -> None:
        """Tell the agents how the job's command has ended, and wait until they have ended.

        After success nothing of the job is left, its key included. Otherwise the key stays, since a requeued job has
        to find its versions on the tier.

        Args:
            status: Exit status of the command.
        """
        if self._step is None:
            return
        try:
            self._step.communicate(f"{status}\n".encode(), CLOSED_S)
        except subprocess.TimeoutExpired:
            _say("the agents have not ended in time: Slurm ends them with the job")
        if status == 0:
            with suppress(OSError):
                os.unlink(self._key_file)


def _format_count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _say(text: str) -> None:
    lines.write_line(f"run: {text}")
