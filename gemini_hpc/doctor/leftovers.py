"""Checks for remnants of recoveries and dead agents in Slurm and on this node."""

from __future__ import annotations

import calendar
import errno
import os
import re
import time
from contextlib import suppress

import msgspec

from gemini_hpc import clock
from gemini_hpc.controller.registry import StoredJob
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.doctor import canary
from gemini_hpc.doctor.controller import read_journal
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Outcome, Unavailable, join_some, report_ok, report_warning, report_wrong
from gemini_hpc.durations import format_age
from gemini_hpc.node import mounts
from gemini_hpc.slurm.facts import PENDING, RUNNING

OURS = "gemini-hpc:"
YOUNG_S = 60.0  # a job that has just begun or ended may still be tidied up after
MAX_LOOKED_AT = 256
_RESERVATION = re.compile(r"gemini_([0-9]{1,10})_[0-9a-f]{12}")
_STAMP = re.compile(r"\[[^\]@]*@([0-9T:-]{19})\]$")
_MAX_BYTES = 4 << 20


def check_reservations(facts: HostFacts) -> Outcome:
    """Check for nodes that are still reserved for a job that is over."""
    named = [(r, m) for r in facts.reservations if (m := _RESERVATION.fullmatch(r.name))]
    if named and "jobs" in facts.conf["PrivateData"].lower():
        facts.require_slurm_user("other users' jobs (PrivateData)")
    stale = []
    for reservation, match in named[:MAX_LOOKED_AT]:
        row = facts.queue.get(int(match[1]))
        job = facts.find_job(int(match[1])) if row is not None and row.state == RUNNING else None
        if row is None:
            stale.append(f"{reservation.name} on {join_some(reservation.nodes, ',')}: its job is over")
        elif job and job.reservation != reservation.name and clock.time() - reservation.start_time > YOUNG_S:
            stale.append(f"{reservation.name} on {join_some(reservation.nodes, ',')}: its job runs without it")
    if stale:
        fix = (
            "scontrol delete ReservationName=...; it ends by itself in 10 minutes; the controller's journal says why"
        )
        return report_wrong(join_some(stale), "no gemini_* reservation except for a job that waits to run again", fix)
    return report_ok(
        f"{len(named)} reservations of gemini-hpc, each for a waiting job"
        if named
        else "no reservation of gemini-hpc"
    )


def parse_age_s(reason: str, now: float) -> float | None:
    """Return how many seconds ago a node's reason was set; Slurm reports it in UTC."""
    stamp = _STAMP.search(reason)
    if not stamp:
        return None
    with suppress(ValueError):
        return max(0.0, now - calendar.timegm(time.strptime(stamp[1], "%Y-%m-%dT%H:%M:%S")))
    return None


def check_nodes(facts: HostFacts) -> Outcome:
    """Check for fenced nodes, which wait for the administrator."""
    now = clock.time()
    fenced = [
        f"{n.name} {n.state}{'+DRAIN' if 'DRAIN' in n.flags else ''} for "
        f"{'an unknown time' if (age_s := parse_age_s(n.reason, now)) is None else format_age(age_s)}"
        for n in facts.nodes.values()
        if n.reason.startswith(OURS) and (n.is_down or "DRAIN" in n.flags)
    ]
    if fenced:
        fix = "look at the node; then scontrol update NodeName=... State=RESUME"
        return report_warning(
            f"fenced by the controller: {join_some(fenced)}", "no node that waits for an administrator", fix
        )
    return report_ok(f"none of {len(facts.nodes)} nodes is down or drained with gemini-hpc's reason")


def read_change_time(path: str) -> float:
    """Return when a job's directory was last changed.

    Raises OSError if a user has mounted a file system over it, whose server may not answer.
    """
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    above = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
    try:
        mount = mounts.find_mount(fd)
        if mounts.read_mount_number(fd) != mounts.read_mount_number(above) and (mount is None or not mount.ours):
            raise OSError(errno.EBUSY, "its owner has mounted something over it")
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        os.close(above)


def check_directories(facts: HostFacts) -> Outcome:
    """Check for directories of jobs that are over, and for agents that outlive their retention."""
    run_dir, now = facts.settings.run_dir, clock.time()
    try:
        names = sorted(os.listdir(run_dir))[:MAX_LOOKED_AT]
    except FileNotFoundError:
        return report_ok(f"{run_dir} does not exist yet")
    with_agent = {p.agent_of for p in facts.processes}
    # At the end of the retention an agent may still save a last version to the tier.
    live, keep_s = facts.queue, facts.settings.retention_s + facts.settings.tier_flush_s + YOUNG_S
    problems = []
    for name in names:
        path = os.path.join(run_dir, name)
        if not parse_number(name):
            problems.append(f"{path} does not belong to gemini-hpc")
            continue
        try:
            quiet_s = now - read_change_time(path)
        except FileNotFoundError:
            continue
        except OSError as exc:
            problems.append(f"{path}: {exc.strerror}")
            continue
        if int(name) in live or quiet_s < YOUNG_S:
            continue
        if int(name) not in with_agent:
            problems.append(f"{path}: its job is over, no agent runs")
        elif quiet_s > keep_s:
            job = facts.find_job(int(name))
            if job is None or (job.has_ended and now - job.end_time > keep_s):
                problems.append(
                    f"{path}: its job is over for longer than retention_s, and its agent still holds memory"
                )
    if problems:
        fix = "the next protected job's prolog removes directories; end the agents that remain with kill"
        return report_warning(join_some(problems), f"in {run_dir} only directories of live or retained jobs", fix)
    return report_ok(f"{run_dir} has {len(names)} entries, all of live or retained jobs")


def _open_recoveries(path: str) -> set[int]:
    """Return the raw ids of jobs whose recovery the journal has not closed."""
    found: dict[str, bool] = {}
    with suppress(FileNotFoundError):
        for record in read_journal(path, _MAX_BYTES):
            if record and record.get("step") in ("open", "close"):
                found[str(record.get("key"))] = record["step"] == "open"
    return {parse_number(key.partition(".")[0]) for key, is_open in found.items() if is_open} - {0}


def check_pins(facts: HostFacts) -> Outcome:
    """Check for waiting jobs with a node list that is not the user's."""
    facts.require_slurm_user("the controller's records")
    state_dir = facts.settings.state_dir
    recovering = _open_recoveries(os.path.join(state_dir, "journal.jsonl"))
    pinned, kept = [], 0
    for raw_id, row in list(facts.queue.items())[: 16 * MAX_LOOKED_AT]:
        try:
            with open(os.path.join(state_dir, "jobs", f"{raw_id}.job"), "rb") as f:
                stored = msgspec.json.decode(f.read(_MAX_BYTES), type=StoredJob, strict=False)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.MsgspecError) as exc:
            raise Unavailable(f"{state_dir}/jobs/{raw_id}.job: {exc}") from None
        job = facts.find_job(raw_id)
        if job is None or not job.req_nodes or set(job.req_nodes) == set(stored.original):
            continue
        if row.state == PENDING and raw_id not in recovering:
            pinned.append(
                f"job {job.id} waits for {join_some(job.req_nodes, ',')} ({job.reason[:40] or 'no reason'})"
            )
        else:
            kept += 1
    if pinned:
        fix = "scontrol update JobId=J ReqNodeList= (the user's own list, if there was one)"
        return report_warning(
            f"pinned by a recovery that is over: {join_some(pinned)}", "the user's own request", fix
        )
    return report_ok(
        f"no waiting job has a stale pin{f' ({kept} running or recovering jobs have one)' if kept else ''}"
    )


def check_canary(facts: HostFacts) -> Outcome:
    """Check for a node that a canary has taken away on this host and could not bring back."""
    facts.require_root("what a canary has left")
    taken = canary.read_taken()
    if taken is None:
        return report_ok("no canary has left a node taken away")
    if clock.time() - taken.t < canary.LONGEST_S:
        return report_ok(f"a canary is at work on {taken.node}")
    return report_wrong(
        f"slurmd of {taken.node} was stopped by a canary and not started again",
        "a node that is back",
        f"start slurmd there, or run doctor --canary again; then remove {canary.FILE}",
    )
