"""The program that checks this node's health after a job and reports a red node to the controller.

    python3 -I -m gemini_hpc.node.health_report JOB RESTART NODE

The epilog starts it as root, in a session of its own, if the job's agent doubts the node. Only one runs at a time
on a node. A red node is logged as one line in the system log, with the check's own words. The controller gets one
of two fixed values and alone decides whether to drain the node.

Exit status: 0, always.
"""

from __future__ import annotations

import os
import secrets
import sys

from gemini_hpc import clock
from gemini_hpc.config import ConfigError, Settings, find_program_problem, load_site_settings
from gemini_hpc.node import ledger, spawn
from gemini_hpc.node.complaint import log_fault
from gemini_hpc.node.health_check import Problem, find_problem
from gemini_hpc.node.prolog import parse_number

LOCK = "health"
REPORT_S = 60.0  # retry for this long to reach a controller
RETRY_S = 2.0  # pause between two rounds over the controller's hosts


def start(settings: Settings, job: int, restart: int, node: str) -> None:
    """Start the health check if the site has one. Requires root; called in an epilog. Never raise."""
    if not settings.health_check:
        return
    argv = [sys.executable, "-I", "-m", "gemini_hpc.node.health_report", str(job), str(restart), node]
    try:
        os.close(spawn.start_daemon(argv, lambda pid: None))
    except (spawn.LaunchError, OSError) as exc:
        log_fault("epilog", job, f"could not check this node's health: {exc}")


def main(argv: list[str]) -> int:
    """Check the node, report a red result, and return 0."""
    job = 0
    try:
        if len(argv) != 3:
            raise ValueError(f"wanted 3 arguments, found {len(argv)}")
        job = parse_number("job id", argv[0], 1, 2**32 - 1)
        restart = parse_number("restart count", argv[1], 0, 2**32 - 1)
        settings = load_site_settings()
        lock = ledger.acquire_lock(settings.run_dir, LOCK)
        if lock < 0:
            return 0  # another job's epilog has started the check
        problem = _check(settings, job)
        if problem is not None:
            log_fault("health", job, f"this node is not healthy: {problem.text}")
            _report(settings, job, restart, argv[2], hangs=problem.hangs)
        os.close(lock)
    except (ValueError, ConfigError, ImportError, OSError) as exc:
        log_fault("health", job, f"this node's health is not known: {exc}")
    return 0


def _check(settings: Settings, job: int) -> Problem | None:
    if why := find_program_problem(settings.health_check):
        raise OSError(f"health_check {settings.health_check}: {why}")
    return find_problem(settings.health_check, lambda: False, lambda text: log_fault("health", job, text))


def _report(settings: Settings, job: int, restart: int, node: str, *, hangs: bool) -> None:
    """Report the red node to the acting controller, whichever host it runs on, and log the answer."""
    # Imported only here: the check of a healthy node needs nothing but the standard library.
    from gemini_hpc.wire import controller, site_key
    from gemini_hpc.wire.credentials import CredentialError
    from gemini_hpc.wire.handshake import Caller, HandshakeClient, HandshakeError
    from gemini_hpc.wire.link import BlockingLink, LinkClosed
    from gemini_hpc.wire.message import Message

    red = controller.RedNode(job, restart, controller.HealthVerdict.HANGS if hangs else controller.HealthVerdict.RED)
    try:
        site_key.adopt(settings)
    except CredentialError as exc:
        log_fault("health", job, f"no controller knows of it, so nothing drains this node: {exc}")
        return
    hosts, deadline, why = (
        settings.list_controller_hosts(),
        clock.monotonic() + REPORT_S,
        "this site has no controller",
    )
    while hosts:
        for host in hosts:
            caller, uid = Caller(settings.cluster_name, node, secrets.token_hex(8)), settings.find_slurm_uid()
            client = HandshakeClient(caller, purpose=controller.HEALTH, job=job, target=host, server_uid=uid)
            try:
                link = BlockingLink.connect(host, settings.controller_port, client)
                try:
                    link.send(red)
                    answer = link.receive(Message)
                finally:
                    link.close()
            except (OSError, HandshakeError, LinkClosed) as exc:
                why = f"{host}: {exc}"
                continue
            if isinstance(answer, controller.Notice):
                log_fault("health", job, f"the controller on {host} answers: {answer.text}")
                return
        if clock.monotonic() > deadline:
            break
        clock.sleep(RETRY_S)
    log_fault("health", job, f"no controller knows of it, so nothing drains this node: {why}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
