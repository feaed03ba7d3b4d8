"""Checks of the controller service: one instance, beside the slurmctld in charge, with a writable journal.

The lock's holder and a path's file system cannot be found by stat's device number. On btrfs it is a subvolume's own,
and on overlayfs that of a layer. /proc/locks has the number of the file system's super block instead.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gemini_hpc import clock
from gemini_hpc.controller import lemons, withheld
from gemini_hpc.controller.primary import LOCK, is_here
from gemini_hpc.doctor.facts import HostFacts, read_text
from gemini_hpc.doctor.finding import Outcome, Unavailable, join_some, report_ok, report_warning, report_wrong
from gemini_hpc.durations import format_time
from gemini_hpc.node import mounts
from gemini_hpc.node.mounts import Mount
from gemini_hpc.paths import name_user
from gemini_hpc.settings import CANARY
from gemini_hpc.slurm import Slurm
from gemini_hpc.slurm.ways import FILE, ApiRecord

_FREE_BYTES = 64 << 20
_TAIL_BYTES = 1 << 20
_MINUTE = "%Y-%m-%d %H:%M"
_HELD = re.compile(r"^lock:\s+[0-9]+: FLOCK\s+ADVISORY\s+WRITE\s", re.M)
_MAX_LOCKS_BYTES = 16 << 20
_ALERT_S = 86400.0  # a day: an administrator reads the doctor's report daily at the most


def _find_controller_pid(facts: HostFacts) -> int | None:
    """Return the pid of the controller that acts here, 0 if its pid is not visible, None if there is none."""
    facts.require_slurm_user("the controller's lock")
    likely = sorted(facts.processes, key=lambda p: not p.controller)
    try:
        return find_holder(os.path.join(facts.settings.state_dir, LOCK), [p.pid for p in likely])
    except FileNotFoundError:
        return None


def _find_other_host(facts: HostFacts) -> str:
    """Return the host that the settings name for the controller, "" if it is this host."""
    hosts = facts.settings.list_controller_hosts()
    return "" if any(is_here(host, "") for host in hosts) else ", ".join(hosts)


def _find_acting_slurmctld(facts: HostFacts) -> str:
    hosts = facts.ask_slurm(Slurm.ping_slurmctlds)
    return next((host.partition(".")[0] for host, up in hosts if up), "")


def check_service(facts: HostFacts) -> Outcome:
    """Check that exactly one controller holds the lock, as SlurmUser."""
    s = facts.settings
    pid = _find_controller_pid(facts)
    wanted = f"one controller, as {s.slurm_user}, on {s.controller_host or 'this host'}"
    if pid is None:
        if not s.controller_host:
            return report_ok("no controller runs, and the settings name none")
        if _find_other_host(facts):
            return report_ok(f"no controller runs here; the settings name {_find_other_host(facts)}")
        if len(facts.conf.controllers) > 1 and _find_acting_slurmctld(facts) != facts.hostname:
            return report_ok(
                f"none acts here: slurmctld on {_find_acting_slurmctld(facts) or 'no host'} is in charge"
            )
        return report_wrong("no controller runs here (nobody holds the lock in state_dir)", wanted, "start it")
    if _find_other_host(facts):
        found = f"a controller runs here (pid {pid}), and agents dial {_find_other_host(facts)}"
        return report_wrong(found, wanted, "stop this one, or correct controller_host on all hosts")
    try:
        uid = os.stat(f"/proc/{pid}").st_uid if pid else facts.slurm_uid
    except FileNotFoundError:
        raise Unavailable("it ended just now") from None
    if uid != facts.slurm_uid:
        return report_wrong(f"it runs as {name_user(uid)} (pid {pid})", wanted, f"run it as {s.slurm_user}")
    return report_ok(f"pid {pid}, as {s.slurm_user}")


def check_journal(facts: HostFacts) -> Outcome:
    """Check that the journal can be written.

    Every action is journaled on disk first, so a full or read-only disk prevents all recovery.
    """
    facts.require_slurm_user("the journal")
    directory = facts.settings.state_dir
    path = os.path.join(directory, "journal.jsonl")
    wanted = f"{path}: a file of {facts.settings.slurm_user}'s on a file system with {_FREE_BYTES >> 20} MiB free"
    try:
        space = os.statvfs(directory)
        info = os.lstat(path)
    except FileNotFoundError as exc:
        if exc.filename == path:
            return report_ok(f"{path} does not exist yet")
        return report_wrong(f"{directory} does not exist", wanted, "start the controller once as root")
    if not stat.S_ISREG(info.st_mode) or info.st_uid not in (0, facts.slurm_uid):
        found = f"{path} is not a file of {facts.settings.slurm_user}'s ({name_user(info.st_uid)})"
        return report_wrong(found, wanted, "find out who made it; move it away; start the controller again")
    if space.f_flag & os.ST_RDONLY:
        return report_wrong(f"{directory} is on a read-only file system", wanted, "mount it for writing")
    if space.f_bavail * space.f_frsize < _FREE_BYTES or (space.f_files and not space.f_favail):
        free = f"{space.f_bavail * space.f_frsize >> 20} MiB"
        return report_wrong(
            f"{directory} has {free} free: the controller takes no action that it cannot journal", wanted, "free some"
        )
    damaged = sum(record is None for record in read_journal(path))
    if damaged:
        text = f"{damaged} of the newest lines of {path} cannot be read"
        return report_warning(
            text, "whole lines", "a crash may leave one; if there are more, check the disk and keep the file"
        )
    return report_ok(f"{path}, {info.st_size} bytes, {space.f_bavail * space.f_frsize >> 20} MiB free")


def read_journal(path: str, most_bytes: int = _TAIL_BYTES) -> Iterator[dict[str, Any] | None]:
    """Yield the newest lines of a journal, None for one that cannot be read. Raises OSError."""
    with open(path, "rb") as f:
        begin = f.seek(max(0, os.fstat(f.fileno()).st_size - most_bytes))
        lines = f.read(most_bytes).split(b"\n")
    for line in lines[1:] if begin else lines:  # the first may be cut
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield record if isinstance(record, dict) else None


def check_alerts(facts: HostFacts) -> Outcome:
    """Check whether the controller has recently declined to act, according to its journal."""
    facts.require_slurm_user("the journal")
    path = os.path.join(facts.settings.state_dir, "journal.jsonl")
    alerts = []
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise Unavailable(f"{path} is no file")
        for record in read_journal(path):
            with suppress(TypeError, KeyError):
                if record and record["step"] == "alert" and clock.time() - record["t"] < _ALERT_S:
                    alerts.append(record)
    except FileNotFoundError:
        return report_ok(f"{path} does not exist yet")
    if not alerts:
        return report_ok("no alert within a day")
    data = alerts[-1].get("data", {})
    at = format_time(alerts[-1]["t"])
    last = f"{data.get('kind', '?')}: job {data.get('job', '?')} {data.get('node', '')}: {data.get('why', '')}"
    return report_warning(
        f"{len(alerts)} within a day, the last at {at}: {last}",
        "no alert: over its budget the controller fences no node, and such jobs wait for Slurm's own detection",
        "check the nodes that the alert names; see fence_budget_nodes, fence_budget_user_nodes",
    )


def check_lemons(facts: HostFacts) -> Outcome:
    """Check for nodes that were fenced, or found red by root's health check, repeatedly."""
    facts.require_slurm_user("the controller's records")
    days = facts.settings.lemon_days
    path = os.path.join(facts.settings.state_dir, lemons.FILE)
    try:
        found = lemons.read_visits(path, clock.time() - days * clock.DAY_S)
    except FileNotFoundError:
        return report_ok("no node was fenced or found red yet")
    except (OSError, msgspec.MsgspecError) as exc:
        raise Unavailable(f"{path}: {exc}") from None
    again = sorted((n for n in found if len(found[n]) >= lemons.AGAIN), key=lambda n: (-len(found[n]), n))
    if not again:
        return report_ok(f"no node was fenced or found red twice within {days:g} days")
    descriptions = []
    for node in again:
        last = found[node][-1]
        at = format_time(last.t, _MINUTE)
        descriptions.append(
            f"{node} {len(found[node])} times, the last at {at} (job {last.job}: {last.what}: {last.why})"
        )
    return report_warning(
        f"within {days:g} days: {join_some(descriptions)}",
        "no node that does harm again and again",
        f"test such a node before you resume it; {path} may be removed while the controller does not run",
    )


def check_mode(facts: HostFacts) -> Outcome:
    """Check what the controller may do, and tell how Slurm judged the acts that its mode withheld."""
    s = facts.settings
    where = f'mode = "{s.mode}"' + (f" in {join_some(s.canary_partitions, ', ')}" if s.mode == CANARY else "")
    if s.canary_partitions and (unknown := set(s.canary_partitions) - facts.ask_slurm(Slurm.read_partitions).keys()):
        return report_wrong(
            f"Slurm has no partition {join_some(sorted(unknown), ', ')}",
            "canary_partitions that exist",
            "correct canary_partitions",
        )
    facts.require_slurm_user("the controller's records")
    path = os.path.join(s.state_dir, withheld.FILE)
    try:
        acts = withheld.read_acts(path)
    except FileNotFoundError:
        acts = []
    except (OSError, msgspec.MsgspecError) as exc:
        raise Unavailable(f"{path}: {exc}") from None
    if not acts:
        return report_ok(f"{where}; nothing was withheld yet")
    since = format_time(acts[0].t, "%Y-%m-%d")
    count = withheld.count_verdicts(acts)
    summary = (
        f"{where}; withheld since {since}: {len(acts)} acts, of which Slurm confirmed {count[withheld.CONFIRMED]}"
    )
    summary += f" and refuted {count[withheld.REFUTED]}; {count[withheld.OPEN]} are open"
    false = [a for a in acts if a.verdict == withheld.REFUTED]
    if not false:
        return report_ok(summary)
    shown = [
        f"{format_time(a.t, _MINUTE)} {withheld.WORDS[a.act]} {a.node} (job {a.job}: {a.why}): {a.evidence}"
        for a in false
    ]
    return report_warning(
        f"{summary}. False alarms, the last first: {join_some(reversed(shown))}",
        "no act that Slurm refutes",
        "find out why such a node was silent (firewall, overload, a long pause) before the controller may act",
    )


def check_primary(facts: HostFacts) -> Outcome:
    """Check that the controller acts only where slurmctld is in charge."""
    hosts, acting = facts.ask_slurm(Slurm.ping_slurmctlds), _find_acting_slurmctld(facts)
    if not acting:
        host_states = join_some((f"{host} is {'UP' if up else 'DOWN'}" for host, up in hosts), ", ")
        text = f"no slurmctld answers ({host_states or 'none is named'})"
        return report_wrong(
            text, "one slurmctld that answers", "start slurmctld; the controller can do nothing until then"
        )
    if len(hosts) > 1 and not hosts[0][1]:
        text = f"the primary slurmctld ({hosts[0][0]}) is down, {acting} has taken over"
        if _find_controller_pid(facts) is not None and acting != facts.hostname:
            fix = f"start the controller on {acting}; controller_host must lead there"
            return report_wrong(f"{text}; the controller runs here", f"the controller on {acting}", fix)
        return report_warning(text, "the primary in charge", "start it again")
    if _find_controller_pid(facts) is not None and acting != facts.hostname:
        text = f"the controller runs here, slurmctld in charge is {acting}"
        return report_wrong(
            text, "both on one host", f'run the controller on {acting}, and controller_host = "{acting}"'
        )
    return report_ok(f"slurmctld on {acting} is in charge")


def check_lock(facts: HostFacts) -> Outcome:
    """Check that all hosts that can run slurmctld share one journal."""
    controllers = facts.conf.controllers
    if len(controllers) < 2:
        return report_ok("one slurmctld, one journal")
    state, save = facts.settings.state_dir, facts.conf["StateSaveLocation"]
    try:
        shared = find_file_system(state) == find_file_system(save)
    except OSError as exc:
        raise Unavailable(f"{exc.filename}: {exc.strerror}") from None
    if not shared:
        return report_wrong(
            f"slurmctld may run on {join_some(controllers, ', ')}, and {state} is not on the file system of {save}: "
            "after a takeover the new controller would not know which actions had begun",
            "state_dir on the file system that the slurmctlds share",
            f'state_dir = "{os.path.dirname(save.rstrip("/"))}/gemini-hpc" in gemini.toml',
        )
    return report_ok(f"{state} is on the file system of {save}")


def check_slurm_api(facts: HostFacts) -> Outcome:
    """Check by which API the controller asks Slurm, and why.

    A requested API that is not used is a warning.
    """
    facts.require_slurm_user("how the controller asks Slurm")
    setting = facts.settings.slurm_api
    wanted = f'slurm_api = "{setting}" in use'
    fix = 'remove the cause and restart the controller, or set slurm_api = "commands"'
    record = None
    if _find_controller_pid(facts) is not None:
        with suppress(OSError, msgspec.MsgspecError), open(os.path.join(facts.settings.state_dir, FILE), "rb") as f:
            record = msgspec.json.decode(f.read(1 << 16), type=ApiRecord)
    if record is None:
        way = facts.ask_slurm(lambda _: Slurm(api=setting).choose_way())
        record = ApiRecord(setting, way.name, way.why, way.is_fallback, 0.0)
        text = f"a controller started here would ask Slurm through {record.used}: {record.why}"
    else:
        text = f"the controller asks Slurm through {record.used}: {record.why}"
        if record.setting != setting:
            return report_warning(f"{text} (it was started with {record.setting})", wanted, "restart the controller")
    if record.left or setting not in ("auto", record.used):
        return report_warning(text, wanted, fix)
    return report_ok(text)


def holds_lock(pid: int, info: os.stat_result) -> bool:
    """Return whether a process has this file open and locked; False if its descriptors are not visible."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if not os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), info):
                    continue
                if _HELD.search(read_text(f"/proc/{pid}/fdinfo/{fd}")):
                    return True
    return False


def find_pids_by_inode(info: os.stat_result, locks: str) -> list[int]:
    """Return the pids in the text of /proc/locks that hold such a lock on a file of this inode number.

    The file may be on any file system. A pid of 0 is one that is not visible from here.
    """
    found = []
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1:4] != ["FLOCK", "ADVISORY", "WRITE"]:
            continue
        if fields[5].rpartition(":")[2] == str(info.st_ino):
            found.append(max(0, int(fields[4])))
    return found


def find_holder(path: str, candidates: Iterable[int]) -> int | None:
    """Return the pid of the process that holds a lock on `path`.

    The result is 0 if the holder is not visible from here, and None if there is none. `candidates` are
    possible holders, the likely ones first. Raises `FileNotFoundError`, OSError.
    """
    info = os.stat(path)
    pids = find_pids_by_inode(info, read_text("/proc/locks", _MAX_LOCKS_BYTES))
    for pid in dict.fromkeys((*candidates, *filter(None, pids))):
        if holds_lock(pid, info):
            return pid
    # Not root: others' descriptors are hidden from us, so the inode number alone must suffice.
    closed = [pid for pid in pids if pid == 0 or not _is_visible(pid)]
    return closed[0] if closed else None


def _is_visible(pid: int) -> bool:
    try:
        os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def find_file_system(path: str, visible: Sequence[Mount] = ()) -> str:
    """Return the identity of the file system of `path`: its device in /proc/self/mountinfo.

    The device is the same for all subvolumes. `visible` are mounts for tests.

    Raises:
        OSError: `path` does not exist.
    """
    real = os.path.realpath(path, strict=True)
    best, device = "", ""
    for mount in visible or mounts.list_mounts():
        within = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if within and len(mount.point) >= len(best):  # a later mount at the same place covers the earlier one
            best, device = mount.point, mount.device
    return device
