"""The public interface of a cluster: start, query, run commands, cut the power, end."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from gemini_hpc import clock
from gemini_hpc.devcluster import (
    accounts,
    bringup,
    enter,
    environment,
    hosts,
    lock,
    network,
    processes,
    profiles,
    requirements,
    services,
    slurm,
    status,
    teardown,
)
from gemini_hpc.devcluster.enter import ClusterProcess
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import ClusterFiles, load_cluster
from gemini_hpc.devcluster.processes import ProcessId
from gemini_hpc.devcluster.profiles import Profile, Setting
from gemini_hpc.devcluster.status import ClusterStatus


class Cluster:
    """A running cluster, made by `bring_up` or `attach`; a context manager takes it down at the end.

    Nodes are n1..nK, the controller host is ctl. Paths below `directory` are the same inside and outside.
    Every method raises `DevclusterError` if the cluster is gone or has no such node or user.
    """

    def __init__(
        self, layout: ClusterFiles, node_names: Sequence[str], profile: Profile, ready_s: float | None = None
    ) -> None:
        self._layout = layout
        self._profile = profile
        self.name = layout.name
        self.node_names = list(node_names)
        # seconds from the call of `bring_up` to all nodes idle; None after `attach`
        self.ready_s = ready_s

    @classmethod
    def bring_up(
        cls,
        name: str = "dev",
        nodes: int = 5,
        profile: str = "fast",
        *,
        cpus: int = 4,
        memory_mb: int = 2000,
        site: bool = True,
        controller: bool = True,
        settings: Mapping[str, Setting] | None = None,
        slurm_conf: Sequence[str] = (),
        replace: bool = False,
    ) -> Self:
        """Start a cluster and wait until all its nodes are idle; after a failure nothing is left of it.

        Remains of a dead cluster of this name are always removed first.

        Args:
            name: The cluster's name.
            nodes: The number of nodes.
            profile: The name of the profile.
            cpus: CPUs per node in Slurm's configuration.
            memory_mb: MiB per node in Slurm's configuration.
            site: Use the SPANK plugin, prolog and epilog, if this installation has them.
            controller: Start the gemini controller service, if this installation has it.
            settings: Keys for gemini.toml.
            slurm_conf: Lines for the end of slurm.conf.
            replace: Take a running cluster of this name down first.
        """
        began = clock.monotonic()
        layout, chosen = ClusterFiles(name), profiles.find_profile(profile)
        requirements.check(chosen)
        environment.find_interpreter()
        limits = (("nodes", nodes, network.MAX_NODES), ("cpus", cpus, 1024), ("memory_mb", memory_mb, 1 << 30))
        for what, value, most in limits:
            if not 1 <= value <= most:
                raise DevclusterError(f"{what}={value}: must be between 1 and {most}")
        if status.is_alive(layout) and not replace:
            raise DevclusterError(f"cluster {name} is already running: take it down first, or use --replace")
        teardown.tear_down(layout)
        cluster = cls(layout, network.list_node_names(nodes), chosen)
        try:
            with lock.hold_start_lock(), lock.hold_cluster_lock(layout):
                if layout.directory.exists():
                    raise _TakenError(f"somebody else is starting cluster {name} right now")
                bringup.bring_up(
                    layout,
                    chosen,
                    cluster.node_names,
                    cpus=cpus,
                    memory_mb=memory_mb,
                    site=site,
                    overrides=settings or {},
                    slurm_conf=slurm_conf,
                )
                slurm.wait_idle(layout, cluster._load_outer(), cluster.node_names, 30.0)
                cluster.ready_s = clock.monotonic() - began
                if controller and services.has_controller():
                    services.start_controller(layout, cluster._load_outer())
        except _TakenError:
            raise
        except BaseException:
            teardown.tear_down(layout)
            raise
        return cluster

    @classmethod
    def attach(cls, name: str = "dev") -> Self:
        """Return a cluster that is already running."""
        requirements.check_root()
        layout = ClusterFiles(name)
        _load_outer(layout)
        known = load_cluster(layout)
        return cls(layout, known.nodes, profiles.find_profile(known.profile))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tear_down()

    def tear_down(self) -> None:
        """End every process and remove every file of the cluster; do nothing if it is already down."""
        teardown.tear_down(self._layout)

    # Queries

    @property
    def directory(self) -> Path:
        """Return the directory of the cluster's files."""
        return self._layout.directory

    @property
    def log_directory(self) -> Path:
        """Return the directory of slurmctld.log, slurmd.nK.log, controller.log, plugin-build.log and init.log."""
        return self._layout.log

    def locate_home(self, user: str) -> Path:
        """Return a user's home directory."""
        return accounts.find_account(self._layout, user).home

    def find_address(self, host: str) -> str:
        """Return the IPv4 address of a node, or of "ctl"."""
        return (
            network.CONTROLLER_ADDRESS
            if host == network.CONTROLLER
            else network.derive_node_address(self._check_node(host))
        )

    def is_on(self, node: str) -> bool:
        """Return whether a node has power."""
        return hosts.find_init(self._layout, self._check_node(node)) is not None

    def find_node_pid(self, node: str) -> int:
        """Return the host pid of the init of a node that is on."""
        return self._require_init(node).pid

    def read_node_state(self, node: str) -> str:
        """Return Slurm's state of a node as sinfo prints it: "idle", "mixed", "down*", "drained"."""
        return self.read_node_states()[self._check_node(node)]

    def read_node_states(self) -> dict[str, str]:
        """Return Slurm's state of each node, as sinfo prints it."""
        return slurm.read_node_states(self._layout, self._load_outer())

    def read_job(self, job_id: int) -> dict[str, str]:
        """Return the fields of `scontrol show job` (JobState, NodeList, Restarts, ...)."""
        return slurm.read_record(self._layout, self._load_outer(), "job", str(job_id))

    def read_queue(self) -> list[tuple[int, str, str]]:
        """Return the unfinished jobs: id, state ("RUNNING", "PENDING"), list of nodes as Slurm writes it."""
        return slurm.read_queue(self._layout, self._load_outer())

    def wait_idle(self, nodes: Sequence[str] | None = None, timeout_s: float = 30.0) -> None:
        """Wait until Slurm reports these nodes (default: all) as idle."""
        chosen = self.node_names if nodes is None else [self._check_node(node) for node in nodes]
        slurm.wait_idle(self._layout, self._load_outer(), chosen, timeout_s)

    def read_status(self) -> ClusterStatus:
        """Return the nodes, their power, Slurm's view of them, and whether the controller service runs."""
        return status.collect(self._layout, self._load_outer())

    # Commands

    def run(
        self,
        argv: Sequence[str],
        user: str | None = None,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        *,
        stdin: str | None = None,
        node: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the controller host (or on `node`), as root or as `user` in their home.

        A non-zero exit status raises nothing; the caller checks it. After `timeout_s` seconds the command is
        killed and `subprocess.TimeoutExpired` raised.
        """
        pipe = subprocess.DEVNULL if stdin is None else subprocess.PIPE
        process = enter.start_command(self.build_command(argv, user, env, cwd, node=node), stdin=pipe)
        return enter.complete(process, stdin, timeout_s)

    def exec(
        self,
        node: str,
        argv: Sequence[str],
        user: str | None = None,
        timeout_s: float = 30.0,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node (see `run`)."""
        return self.run(argv, user, timeout_s, env, cwd, stdin=stdin, node=node)

    def start_command(
        self,
        argv: Sequence[str],
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        *,
        node: str | None = None,
        stdin: enter.Stream = subprocess.DEVNULL,
        stdout: enter.Stream = subprocess.PIPE,
        stderr: enter.Stream = subprocess.PIPE,
    ) -> ClusterProcess:
        """Start a command without waiting for it; its signals go to the whole process group."""
        return enter.start_command(self.build_command(argv, user, env, cwd, node=node), stdin, stdout, stderr)

    def build_command(
        self,
        argv: Sequence[str],
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        *,
        node: str | None = None,
    ) -> enter.Command:
        """Return argument vector and environment that run a command inside when executed on this machine."""
        host = self._load_outer() if node is None else self._require_init(node)
        configless = self._profile.configless and node is not None
        return enter.build_command(self._layout, host.pid, argv, user=user, env=env, cwd=cwd, configless=configless)

    def submit_job(
        self,
        args: Sequence[str],
        user: str = "alice",
        *,
        script: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> int:
        """Submit a job as `user` from their home; return the job id.

        `script` is a batch script's text in place of a file. A script file may be anywhere on this machine,
        since it is copied into the home.
        """
        argv = [requirements.find_program("sbatch"), "--parsable", *self.copy_script(args, user)]
        done = self.run(argv, user, timeout_s, env, stdin=script)
        if done.returncode:
            raise DevclusterError(" ".join(done.stderr.split()) or "sbatch failed")
        return int(done.stdout.strip().split(";")[0])

    def copy_script(self, args: Sequence[str], user: str) -> list[str]:
        """Return the arguments of sbatch, with the script copied to where `user` can read it."""
        return accounts.copy_script(args, accounts.find_account(self._layout, user))

    # Power and links

    def cut_power(self, node: str, reset: bool = False) -> None:
        """Cut a node's power.

        Its peers receive nothing more from it. With `reset` they see their connections closed.
        """
        with lock.hold_cluster_lock(self._layout):
            hosts.cut_power(self._layout, self._load_outer(), node, self._require_init(node), reset)

    def restore_power(self, node: str, timeout_s: float = 20.0) -> None:
        """Start a node with empty memory, and wait until its slurmd has registered.

        Slurm may still report the node as down (see `resume`).
        """
        with lock.hold_cluster_lock(self._layout):
            if self.is_on(node):
                raise DevclusterError(f"node {node} of cluster {self.name} is already on")
            outer, last = self._load_outer(), slurm.read_slurmd_start(self._layout, self._load_outer(), node)
            # Slurm distinguishes two slurmds only by the second in which they started.
            clock.sleep(max(0.0, last + 1.0 - clock.time()))
            began = int(clock.time())
            started = hosts.boot_nodes(self._layout, outer, self._profile, [node])
            if load_cluster(self._layout).prolog:
                services.run_boot_program(self._layout, self._profile, started)
            services.start_node_daemons(self._layout, self._profile, started)
        deadline = clock.monotonic() + timeout_s
        while slurm.read_slurmd_start(self._layout, outer, node) < began:
            if clock.monotonic() > deadline:
                raise DevclusterError(
                    f"slurmd of {node} has not registered within {timeout_s:g} s; see {self._layout.log}"
                )
            clock.sleep(0.05)

    def resume(self, node: str) -> None:
        """Resume a node from DOWN and DRAIN."""
        words = ("update", f"nodename={self._check_node(node)}", "state=resume")
        slurm.ask(self._layout, self._load_outer(), "scontrol", *words)

    def restore(self, timeout_s: float = 60.0) -> None:
        """Return every node to power and service, and wait until all are idle.

        A `timeout_s` of 0 skips the wait.
        """
        for node in self.node_names:
            if not self.is_on(node):
                self.restore_power(node)
        for node, state in self.read_node_states().items():
            if any(word in state.lower() for word in ("down", "drain", "fail")):
                with suppress(DevclusterError):  # Slurm has done it meanwhile
                    self.resume(node)
        if timeout_s:
            self.wait_idle(timeout_s=timeout_s)

    def limit_link(self, node: str, rate: str | None) -> None:
        """Limit a node's link in both directions ("1gbit"); None removes the limit.

        The limit outlives a power-off.
        """
        if rate is not None:
            network.parse_rate(rate)
        with lock.hold_cluster_lock(self._layout):
            if process := hosts.find_init(self._layout, self._check_node(node)):
                network.limit_link(self._load_outer().pid, node, process.pid, rate)
            hosts.set_rate(self._layout, node, rate)

    # The gemini controller service

    def start_controller(self) -> int:
        """Start the service as user slurm on the controller host; return its host pid."""
        return services.start_controller(self._layout, self._load_outer()).pid

    def stop_controller(self, sig: signal.Signals = signal.SIGTERM) -> bool:
        """End the service; return False if it did not run."""
        return services.stop_controller(self._layout, self._load_outer(), sig)

    def find_controller_pid(self) -> int | None:
        """Return the host pid of the service, None if it does not run."""
        found = services.find_controller(self._layout, self._load_outer())
        return found.pid if found else None

    def _load_outer(self) -> ProcessId:
        return _load_outer(self._layout)

    def _check_node(self, node: str) -> str:
        if node not in self.node_names:
            raise DevclusterError(f"cluster {self.name} has no node {node!r}, only {', '.join(self.node_names)}")
        return node

    def _require_init(self, node: str) -> ProcessId:
        process = hosts.find_init(self._layout, self._check_node(node))
        if process is None:
            raise DevclusterError(f"node {node} of cluster {self.name} is off")
        return process


def _load_outer(layout: ClusterFiles) -> ProcessId:
    outer = processes.load_living(layout.outer)
    if outer is None:
        raise DevclusterError(
            f"cluster {layout.name} is not running: gemini-hpc devcluster up --name {layout.name} starts it"
        )
    return outer


class _TakenError(DevclusterError):
    """The error that the files belong to another tool's cluster, and must not be cleaned up."""
