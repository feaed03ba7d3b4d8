"""The daemons of a cluster: munged, Slurm's, and the gemini controller service."""

from __future__ import annotations

import importlib.util
import pwd
import secrets
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from gemini_hpc import clock
from gemini_hpc.devcluster import cgroups, enter, network, processes
from gemini_hpc.devcluster.configuration import SLURMCTLD_PORT
from gemini_hpc.devcluster.errors import DevclusterError, read_log_tail
from gemini_hpc.devcluster.layout import CONTROLLER, INSIDE_PYTHON, MARKER, ROLE, ClusterFiles
from gemini_hpc.devcluster.processes import ProcessId
from gemini_hpc.devcluster.profiles import Profile
from gemini_hpc.devcluster.requirements import find_program

CONTROLLER_MODULE = "gemini_hpc.controller"
START_S = 20.0  # a command that starts a daemon ends at once, unless the machine is overloaded
SETTLE_S = 0.4  # a service with wrong settings ends before this time
# after the two execs, the shell's pid is the service's
_RECORD_AND_EXEC = 'echo $$ >"$0" && exec "$@"'


def create_munge_key(layout: ClusterFiles) -> None:
    """Create the key that all hosts share."""
    key = layout.munge / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def start_munged(layout: ClusterFiles, hosts: Mapping[str, ProcessId]) -> None:
    """Start munged on several hosts at once, at its usual socket; they answer when the function returns."""

    def build_argv(host: str) -> list[str]:
        return [
            find_program("munged"),
            f"--key-file={layout.munge / 'munge.key'}",
            f"--log-file={layout.munge / f'munged.{host}.log'}",
            f"--seed-file={layout.munge / f'munged.{host}.seed'}",
            "--pid-file=/run/munge/munged.pid",
            "--socket=/run/munge/munge.socket.2",
            "--num-threads=4",
        ]

    _start_on_hosts(
        "munged", {host: enter.build_command(layout, init.pid, build_argv(host)) for host, init in hosts.items()}
    )


def start_node_daemons(layout: ClusterFiles, profile: Profile, nodes: Mapping[str, ProcessId]) -> None:
    """Start munged, if each node has its own, and slurmd, on several nodes at once.

    The slurmds have read their configuration when the function returns.
    """
    if profile.munge_per_node:
        start_munged(layout, nodes)
    source = ["-f", str(layout.slurm_conf)]
    if profile.configless:
        source = ["--conf-server", f"{network.CONTROLLER}:{SLURMCTLD_PORT}"]
    slurmd = [find_program("slurmd"), *source, "-N"]
    commands = {}
    for node, init in nodes.items():
        argv = cgroups.wrap_for_slurmd([*slurmd, node])
        commands[node] = enter.build_command(layout, init.pid, argv, configless=profile.configless)
    _start_on_hosts("slurmd", commands)


def run_boot_program(layout: ClusterFiles, profile: Profile, nodes: Mapping[str, ProcessId]) -> None:
    """Run what a site's unit gemini-hpc-boot runs before slurmd, on nodes that were switched on again."""
    for node, init in nodes.items():
        copy = {"SLURM_CONF": f"{layout.spool}/{node}/conf-cache/slurm.conf"} if profile.configless else {}
        argv = [str(INSIDE_PYTHON), "-I", "-m", "gemini_hpc.node.boot"]
        done = enter.complete(
            enter.start_command(enter.build_command(layout, init.pid, argv, env=copy)), None, START_S
        )
        if done.returncode:
            raise DevclusterError(f"gemini_hpc.node.boot failed on {node}: {' '.join(done.stderr.split())}")


def _start_on_hosts(name: str, commands: Mapping[str, enter.Command]) -> None:
    """Run the commands that start a daemon, by host and at once, until each has put it into the background."""
    started = {host: enter.start_command(command) for host, command in commands.items()}
    for host, process in started.items():
        done = enter.complete(process, None, START_S)
        if done.returncode:
            raise DevclusterError(f"{name} did not start on {host}: {' '.join(done.stderr.split())}")


def start_daemon(layout: ClusterFiles, outer: ProcessId, name: str, *arguments: str) -> None:
    """Start a daemon of Slurm's on the controller host."""
    argv = [find_program(name), *arguments]
    done = enter.complete(enter.start_command(enter.build_command(layout, outer.pid, argv)), None, START_S)
    if done.returncode:
        why = " ".join(done.stderr.split()) or read_log_tail(layout.log / f"{name}.log")
        raise DevclusterError(f"{name} did not start: {why}")


def wait_for_daemon(layout: ClusterFiles, outer: ProcessId, name: str, port: int, timeout_s: float) -> None:
    """Wait until a daemon of Slurm's on the controller host listens."""
    log, deadline = layout.log / f"{name}.log", clock.monotonic() + timeout_s
    while not network.listens(outer.pid, port):
        fatal = log.exists() and "fatal:" in log.read_text(errors="replace")
        if fatal or clock.monotonic() > deadline:
            raise DevclusterError(f"{name} did not come up: {read_log_tail(log)}")
        clock.sleep(0.01)


def has_controller() -> bool:
    """Return whether this installation has the controller service."""
    return importlib.util.find_spec(f"{CONTROLLER_MODULE}.__main__") is not None


def find_controller(layout: ClusterFiles, outer: ProcessId) -> ProcessId | None:
    """Return the gemini controller service, None if it does not run."""
    try:
        inner = int(layout.controller_pid.read_text())
    except (OSError, ValueError):
        return None
    found = processes.find_in_namespace(processes.read_namespace(outer.pid, "pid"), inner)
    ours = processes.find_by_environment(f"{MARKER}={layout.name}", f"{ROLE}={CONTROLLER}")
    return found if found in set(ours) else None


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _has_ended(layout: ClusterFiles, outer: ProcessId) -> bool:
    """Return whether the process that recorded its pid has ended."""
    inner = int(layout.controller_pid.read_text())
    return processes.find_in_namespace(processes.read_namespace(outer.pid, "pid"), inner) is None


def start_controller(layout: ClusterFiles, outer: ProcessId) -> ProcessId:
    """Start the service as user slurm, with its own log, and return once it runs."""
    if not has_controller():
        raise DevclusterError(f"this installation has no controller service ({CONTROLLER_MODULE} cannot be run)")
    if running := find_controller(layout, outer):
        raise DevclusterError(f"the controller service of {layout.name} already runs (pid {running.pid})")
    slurm = pwd.getpwnam("slurm")
    layout.controller_pid.unlink(missing_ok=True)
    argv = [
        *(find_program("setsid"), "--fork", "/bin/sh", "-c", _RECORD_AND_EXEC, str(layout.controller_pid)),
        *(find_program("setpriv"), f"--reuid={slurm.pw_uid}", f"--regid={slurm.pw_gid}", "--init-groups", "--"),
        *(str(INSIDE_PYTHON), "-I", "-m", CONTROLLER_MODULE),
    ]
    extra = {ROLE: CONTROLLER, "HOME": "/nonexistent", "USER": "slurm", "LOGNAME": "slurm"}
    log = layout.log / "controller.log"
    with log.open("a") as output:
        start = enter.build_command(layout, outer.pid, argv, env=extra)
        enter.start_command(start, stdout=output, stderr=subprocess.STDOUT).wait(START_S)
    deadline = clock.monotonic() + 5.0
    # During an exec a process shows no environment, and cannot be recognized as ours.
    while (found := find_controller(layout, outer)) is None and clock.monotonic() < deadline:
        if _has_content(layout.controller_pid) and _has_ended(layout, outer):
            break
        clock.sleep(0.005)
    # A service that cannot be imported, or rejects its settings, ends within this time.
    if found is None or processes.end(found, None, SETTLE_S):
        raise DevclusterError(f"the controller service ended at once: {read_log_tail(log)}")
    return found


def stop_controller(layout: ClusterFiles, outer: ProcessId, sig: signal.Signals, wait_s: float = 5.0) -> bool:
    """End the service with `sig`, and after `wait_s` seconds by force; return False if it did not run."""
    found = find_controller(layout, outer)
    if found is None:
        return False
    if not processes.end(found, sig, wait_s):
        processes.end(found)
    return True
