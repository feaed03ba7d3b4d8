"""The daemons of the controller host: slurmctld and the gemini controller service."""

from __future__ import annotations

import importlib.util
import pwd
import signal
import subprocess
from pathlib import Path

from gemini_hpc import clock
from gemini_hpc.devcluster import enter, network, processes
from gemini_hpc.devcluster.errors import DevclusterError, read_log_tail
from gemini_hpc.devcluster.layout import CONTROLLER, INSIDE_PYTHON, MARKER, ROLE, ClusterFiles
from gemini_hpc.devcluster.processes import ProcessId
from gemini_hpc.devcluster.requirements import find_program
from gemini_hpc.devcluster.slurmconf import SLURMCTLD_PORT

CONTROLLER_MODULE = "gemini_hpc.controller"
SETTLE_S = 0.4  # a service with wrong settings ends before this time
# after the two execs, the shell's pid is the service's
_RECORD_AND_EXEC = 'echo $$ >"$0" && exec "$@"'


def start_slurmctld(layout: ClusterFiles, outer: ProcessId) -> None:
    """Start slurmctld as user slurm."""
    argv = [find_program("slurmctld"), "-f", str(layout.slurm_conf), "-i"]
    done = enter.complete(enter.start_command(enter.build_command(layout, outer.pid, argv)), None, 20.0)
    if done.returncode:
        raise DevclusterError(f"slurmctld did not start: {' '.join(done.stderr.split())}")


def wait_for_slurmctld(layout: ClusterFiles, outer: ProcessId, timeout_s: float = 15.0) -> None:
    """Wait until slurmctld answers, because a slurmd that registers earlier retries only after seconds."""
    log, deadline = layout.log / "slurmctld.log", clock.monotonic() + timeout_s
    while not network.listens(outer.pid, SLURMCTLD_PORT):
        fatal = log.exists() and "fatal:" in log.read_text(errors="replace")
        if fatal or clock.monotonic() > deadline:
            raise DevclusterError(f"slurmctld did not come up: {read_log_tail(log)}")
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
        enter.start_command(start, stdout=output, stderr=subprocess.STDOUT).wait(20.0)
    deadline = clock.monotonic() + 5.0
    # During an exec a process shows no environment, and cannot be recognized as ours.
    while (found := find_controller(layout, outer)) is None and clock.monotonic() < deadline:
        if _has_content(layout.controller_pid) and _has_ended(layout, outer):
            break
        clock.sleep(0.005)
    # A service that cannot be imported, or rejects its settings, ends within this time.
    if found is None or processes.ends(found, SETTLE_S):
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
