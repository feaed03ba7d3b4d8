"""The hold of survivors from a survivor's epilog, if no controller answers (requirement hold-only-after-a-death).

    python3 -I -m gemini_hpc.controller.epilog_fallback --job J --restart R --node N [--nodes HOSTLIST]

The program runs as root or SlurmUser on one elected survivor. It trusts only Slurm: the job must be on its way back
to pending (Restarts > R) because one of its nodes is DOWN. It returns when survivors are reserved and pinned, after
5 s at most. That is before the job leaves COMPLETING, because the job waits for this epilog. A child of at most 60
s sets the start time and then releases. It releases the pin in any case, and the reservation once the job runs.
`--nodes` is the incarnation's node list as slurmd gave it to the epilog (default: $SLURM_NODELIST). Slurm's own
record has lost the dead node by then.

Exit status: 0, always.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import select
import signal
import sys
import syslog

from gemini_hpc import clock
from gemini_hpc.config import CONFIG_PATH, ConfigError, Settings, load_site_settings
from gemini_hpc.controller import probe
from gemini_hpc.controller.fencing import Port
from gemini_hpc.controller.gate import Gate, GatedSlurm
from gemini_hpc.controller.probe import Target
from gemini_hpc.controller.requeue import Requeue
from gemini_hpc.controller.reservation import HOLD_S, PREFIX, Held
from gemini_hpc.controller.survivors import Survivors
from gemini_hpc.core import hostlist
from gemini_hpc.lines import replace_unprintable
from gemini_hpc.slurm import Slurm, SlurmError
from gemini_hpc.slurm.facts import COMPLETING, PENDING, Job
from gemini_hpc.wire import ports

LIMIT_S = 4.5  # Slurm waits for this epilog, which may take 5 s
SLURM_TIMEOUT_S = LIMIT_S - 0.5  # Slurm's silence is logged within the limit
_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")


class NothingToHoldError(Exception):
    """An error with the reason why no survivors are held."""


def _log(text: str) -> None:
    syslog.openlog("gemini-hpc", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_NOTICE, f"hold: {replace_unprintable(text[:500])}")


def find_objection(job: Job, restart: int) -> str:
    """Return why this job's survivors must not be held; "" if they may be."""
    if job.is_het or not job.is_actable:
        return "heterogeneous job or array record"
    if not job.may_requeue or not job.is_batch:
        return "the job cannot be requeued"
    if job.restarts <= restart:
        return "the job was not requeued"
    if job.state not in (COMPLETING, PENDING):
        return f"the job is {job.state}"
    return ""


async def prepare_hold(settings: Settings, raw_id: int, restart: int, node: str, members: list[str]) -> Requeue:
    """Do all steps up to the reservation. Return the requeue to follow.

    Raises:
        NothingToHoldError: The survivors must not, or need not, be held.
        SlurmError: Slurm did not answer, or refused.
    """
    gate = Gate(settings)
    slurm = GatedSlurm(Slurm(SLURM_TIMEOUT_S), gate)
    job = await slurm.read_job(raw_id)
    if against := find_objection(job, restart):
        raise NothingToHoldError(against)
    if mode := gate.explain_job_refusal(job):
        raise NothingToHoldError(f"would have held the survivors; {mode}")
    if node not in members:
        raise NothingToHoldError(f"{node} is not in the job's node list")
    nodes, reservations = await asyncio.gather(slurm.read_nodes(), slurm.read_reservations())
    if any(r.name.startswith(f"{PREFIX}{raw_id}_") for r in reservations):
        raise NothingToHoldError("another survivor, or a controller, already holds the nodes")
    dead = [n for n in members if n in nodes and nodes[n].is_down]
    if not dead:
        raise NothingToHoldError("no node of the job is DOWN: requeued for another reason")
    port = settings.slurmd_port
    targets = {n: (nodes[n].address, nodes[n].port or port) for n in members if n in nodes and n not in dead}
    seen = await probe.probe_ports(targets)
    survivors = [n for n in targets if seen[n] is Port.ANSWERS]

    def say(event: str, host: str, detail: str) -> None:
        _log(f"job={raw_id} restart={restart} event={event} host={host} {detail}")

    def note(step: str, phase: str, **data: object) -> None:
        """Discard the journal line: this program has no journal."""

    rescue = Requeue(
        slurm=slurm,
        raw_id=raw_id,
        restart=restart,
        survivors=Survivors(
            names=survivors,
            dead=dead,
            log_event=say,
            build_target=lambda node: Target.build(
                settings, node.address, node.port, ports.list_candidates(settings, raw_id)[:1]
            ),
            is_vouched=lambda host: False,
            confirm_s=settings.fence_confirm_s,
        ),
        held=Held(slurm=slurm, raw_id=raw_id, user_id=job.user_id, log_event=say, write_journal=note),
        # On the first restart the requested nodes are still the user's own; later they may be a pin of ours.
        original=list(job.req_nodes) if restart == 0 else [],
        own_request="" if job.reservation.startswith(PREFIX) else job.reservation,
        log_event=say,
        write_journal=note,
    )
    await rescue.reserve_nodes(job, nodes, len(dead) + settings.reserve_candidates, is_alone=False)
    if not rescue.held.name and any(r.name.startswith(f"{PREFIX}{raw_id}_") for r in await slurm.read_reservations()):
        raise NothingToHoldError("another survivor was faster")
    return rescue


async def _hold_job(settings: Settings, args: argparse.Namespace, members: list[str], ready: int) -> None:
    rescue = await prepare_hold(settings, args.job, args.restart, args.node, members)
    say = rescue.log_event

    def report_event(event: str, host: str, detail: str) -> None:
        say(event, host, detail)
        if event == "pinned":
            os.write(ready, b"p")

    rescue.log_event = report_event
    outcome = await rescue.steer_requeue(HOLD_S - 5.0, leave_held=True)
    _log(f"job={args.job} outcome={outcome}")


def _hold_in_child(settings: Settings, args: argparse.Namespace, members: list[str], ready: int) -> None:
    """Run the hold in a child that keeps no resource of slurmd's and lives at most a minute."""
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.alarm(HOLD_S)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, ready)
    os.closerange(ready + 1, 4096)
    os.chdir("/")
    try:
        asyncio.run(_hold_job(settings, args, members, ready))
    except NothingToHoldError as exc:
        _log(f"job={args.job} nothing held: {exc}")
    except (SlurmError, OSError, ValueError) as exc:
        _log(f"job={args.job} failed: {exc}")
    finally:
        os._exit(0)


def main(argv: list[str] | None = None) -> int:
    """Start the hold, wait until the survivors are pinned, and return 0."""
    began = clock.monotonic()
    parser = argparse.ArgumentParser(prog="gemini_hpc.controller.epilog_fallback", exit_on_error=False)
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--restart", type=int, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--nodes", default=os.environ.get("SLURM_NODELIST", ""))
    parser.add_argument("--config", default=CONFIG_PATH)
    try:
        args = parser.parse_args(argv)
        settings = load_site_settings(args.config)
        members = hostlist.expand(args.nodes)
        if not _NAME.fullmatch(args.node) or args.job <= 0 or args.restart < 0:
            raise ValueError("implausible arguments")
    except (argparse.ArgumentError, ConfigError, ValueError, SystemExit) as exc:
        _log(f"not started: {exc}")
        return 0
    end, ready = os.pipe()
    child = os.fork()
    if child == 0:
        _hold_in_child(settings, args, members, ready)
    os.close(ready)
    os.waitpid(child, 0)
    # A byte means pinned; the end of the pipe means that the finisher has ended without a pin. Either way Slurm
    # need not wait longer.
    select.select([end], [], [], max(0.0, LIMIT_S - (clock.monotonic() - began)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
