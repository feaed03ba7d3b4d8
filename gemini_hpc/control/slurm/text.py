"""What Slurm's commands print, as typed facts: `scontrol -o` lines and `squeue -o` rows of 22.05 and later.

A job's name, command and comments are its owner's text and stand in the same line as the fields that decide
what is done to nodes. A key that the decisions need and that occurs twice is therefore an error, never a guess.
"""

from __future__ import annotations

import calendar
import re
import time

from gemini_hpc.control.slurm.facts import COMPLETING, CONFIGURING, Config, Job, Node, Reservation, Row
from gemini_hpc.core import hostlist

_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:]*)=")
_ID = re.compile(r"(.*)\(([0-9]+)\)")
_STATE_MARKS = "*~#!%$@^-+"
# Fields that decide something; any of them twice in one line means that a name imitates a field.
_IDENTITY = frozenset(("JobId", "ArrayJobId", "ArrayTaskId", "HetJobId", "HetJobOffset", "PackJobId"))
_OPTIONAL = frozenset(("ArrayJobId", "ArrayTaskId", "HetJobId", "HetJobOffset", "PackJobId", "Reservation"))
_STATE_FIELDS = frozenset(("JobState", "Reason", "Requeue", "Restarts", "BatchFlag", "StartTime", "EndTime"))
_NODE_FIELDS = frozenset(("NodeList", "ReqNodeList", "ExcNodeList", "NumNodes"))
_GUARDED = _IDENTITY | _STATE_FIELDS | _NODE_FIELDS | {"UserId", "GroupId", "Partition", "Features", "Reservation"}
# Their owner's text begins with these keys: what stands behind them is read only for the fields always printed.
_FREE_TEXT = frozenset(("Network", "Command", "WorkDir", "StdErr", "Comment", "AdminComment", "SystemComment"))
_NONE = frozenset(("", "(null)", "None", "none", "N/A", "Unknown", "NONE"))


class ParseError(ValueError):
    """Text of a Slurm command that cannot be read, or that could be read in two ways."""


def pairs(line: str) -> list[tuple[str, str]]:
    """The key=value pairs of one `scontrol -o` line, none of a line without; values may hold spaces."""
    found = list(_KEY.finditer(line))
    if not found:
        return []
    ends = [m.start() for m in found[1:]] + [len(line)]
    return [(m[1], line[m.end() : end].strip()) for m, end in zip(found, ends, strict=True)]


def _text(value: str) -> str:
    return "" if value in _NONE else value


def _int(value: str) -> int:
    m = re.match(r"[0-9]+", value)
    return int(m[0]) if m else 0


def _hosts(value: str) -> tuple[str, ...]:
    try:
        return tuple(hostlist.expand(_text(value)))
    except ValueError as exc:
        raise ParseError(str(exc)) from None


def _megabytes(value: str) -> int:
    m = re.fullmatch(r"([0-9.]+)([KMGT]?)", value)
    if not m:
        return 0
    return int(float(m[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1 << 20}[m[2]])


def _time(value: str) -> float:
    """Unix time of Slurm's stamp; the client asks for UTC."""
    try:
        return float(calendar.timegm(time.strptime(value, "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return 0.0


def state_of(value: str) -> str:
    """One word for a job's state; later releases print several (`PENDING,COMPLETING`), the most passing one rules."""
    words = [w for w in re.split(r"[,+ ]", value.upper()) if w]
    for passing in (COMPLETING, CONFIGURING, "STAGE_OUT"):
        if passing in words:
            return passing
    return words[0] if words else ""


def _gres(value: str) -> dict[str, int]:
    """`gpu:a100:4(S:0-1),gres/nvme:1`, in Slurm's several spellings, as `gpu:a100` and `gpu` -> how many."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^()]*\)", "", _text(value)).split(","):
        words = re.sub(r"^gres[:/]", "", part.strip()).replace("=", ":").split(":")
        count = 1
        if len(words) > 1 and (m := re.fullmatch(r"([0-9]+)([KMGT]?)", words[-1])):
            count = int(m[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}[m[2]]
            words.pop()
        if words[0]:
            for name in {words[0], ":".join(words)}:
                found[name] = found.get(name, 0) + count
    return found


def _gres_per_node(found: list[tuple[str, str]]) -> dict[str, int]:
    """What each node must have: as asked for per node, and one of whatever is asked for otherwise.

    Slurm prints these fields behind its owner's texts, so the last one of a name is Slurm's own.
    """
    last = {key: value for key, value in found if key.startswith("TresPer")}
    need: dict[str, int] = {}
    for key in ("TresPerJob", "TresPerSocket", "TresPerTask"):
        need.update(dict.fromkeys(_gres(last.get(key, "")), 1))
    for name, count in _gres(last.get("TresPerNode", "")).items():
        need[name] = max(count, need.get(name, 0))
    return {name: count for name, count in need.items() if name not in ("cpu", "mem", "node", "billing")}


def parse_job(line: str) -> Job:
    """One line of `scontrol show job -o`. Raises `ParseError`."""
    fields: dict[str, str] = {}
    section = "identity"  # then "name" (its owner's text), "body", "text" (its owner's text again)
    for key, value in pairs(line):
        if key in fields and key in _GUARDED:
            raise ParseError(f"the job's text fields imitate Slurm's field {key}=")
        if key == "JobName":
            section = "name"
        elif section == "name" and key == "UserId":
            section = "body"
        elif section == "body" and key in _FREE_TEXT:
            section = "text"
        if section == ("identity" if key in _IDENTITY else "body") or key in _GUARDED - _OPTIONAL:
            fields.setdefault(key, value)
    missing = {"JobId", "UserId", "JobState", "NodeList", "Restarts", "Requeue"} - fields.keys()
    owner = _ID.fullmatch(fields.get("UserId", ""))
    if missing or owner is None:
        raise ParseError(f"not a job record (no {', '.join(sorted(missing)) or 'UserId'}): {line[:80]!r}")
    raw_id = int(fields["JobId"])
    array = int(fields["ArrayJobId"]) if fields.get("ArrayJobId", "").isdigit() else None
    task = fields.get("ArrayTaskId", "")
    return Job(
        id=f"{array}_{task}" if array is not None else str(raw_id),
        raw_id=raw_id,
        state=state_of(fields["JobState"]),
        reason=_text(fields.get("Reason", "")),
        user_id=int(owner[2]),
        user=owner[1],
        nodes=_hosts(fields["NodeList"]),
        req_nodes=_hosts(fields.get("ReqNodeList", "")),
        exc_nodes=_hosts(fields.get("ExcNodeList", "")),
        num_nodes=_int(fields.get("NumNodes", "0")),
        restarts=_int(fields["Restarts"]),
        requeue=fields["Requeue"].split()[0] != "0",
        partition=_text(fields.get("Partition", "")),
        reservation=_text(fields.get("Reservation", "")),
        features=_text(fields.get("Features", "")),
        array_job_id=array,
        array_task_id=task,
        het="HetJobId" in fields or "HetJobOffset" in fields or "PackJobId" in fields,
        batch=fields.get("BatchFlag", "1") != "0",
        batch_host=_text(fields.get("BatchHost", "")),
        min_cpus=_int(fields.get("MinCPUsNode", "0")),
        min_memory_mb=_megabytes(fields.get("MinMemoryNode", "0")),
        start_time=_time(fields.get("StartTime", "")),
        end_time=_time(fields.get("EndTime", "")),
        exit_code=fields.get("ExitCode", ""),
        gres_per_node=_gres_per_node(pairs(line)),
    )


def parse_node(line: str) -> Node:
    """One line of `scontrol show node -o`. Raises `ParseError`."""
    fields: dict[str, str] = {}
    for key, value in pairs(line):
        fields.setdefault(key, value)
    if "NodeName" not in fields or "State" not in fields:
        raise ParseError(f"not a node record: {line[:80]!r}")
    name = fields["NodeName"]
    base, *extra = fields["State"].split()[0].upper().split("+")
    flags = {f.rstrip(_STATE_MARKS) for f in extra}
    if "*" in fields["State"].split()[0]:
        flags.add("NOT_RESPONDING")
    active = _text(fields.get("ActiveFeatures", "")) or _text(fields.get("AvailableFeatures", ""))
    return Node(
        name=name,
        state=base.rstrip(_STATE_MARKS),
        flags=frozenset(flags),
        address=_text(fields.get("NodeAddr", "")) or name,
        port=_int(fields.get("Port", "0")),
        partitions=tuple(p for p in _text(fields.get("Partitions", "")).split(",") if p),
        features=frozenset(f for f in active.split(",") if f),
        cpus=_int(fields.get("CPUTot", "0")),
        memory_mb=_int(fields.get("RealMemory", "0")),
        reason=_text(fields.get("Reason", "")),
        boot_time=_time(fields.get("BootTime", "")),
        slurmd_start=_time(fields.get("SlurmdStartTime", "")),
        gres=_gres(fields.get("Gres", "")),
        hostname=_text(fields.get("NodeHostName", "")) or name,
        spec_memory_mb=_int(fields.get("MemSpecLimit", "0")),
    )


def parse_reservation(line: str) -> Reservation:
    """One line of `scontrol show reservation -o`. Raises `ParseError`."""
    fields: dict[str, str] = {}
    for key, value in pairs(line):
        fields.setdefault(key, value)
    if "ReservationName" not in fields:
        raise ParseError(f"not a reservation record: {line[:80]!r}")
    return Reservation(
        name=fields["ReservationName"],
        nodes=_hosts(fields.get("Nodes", "")),
        users=tuple(u for u in _text(fields.get("Users", "")).split(",") if u),
        state=fields.get("State", ""),
        flags=frozenset(f for f in fields.get("Flags", "").split(",") if f),
        start_time=_time(fields.get("StartTime", "")),
    )


def parse_partition(line: str) -> tuple[str, str]:
    """Name and state (UP, DRAIN, DOWN, INACTIVE) in one line of `scontrol show partition -o`. Raises `ParseError`."""
    fields: dict[str, str] = {}
    for key, value in pairs(line):
        fields.setdefault(key, value)
    if not fields.get("PartitionName") or not fields.get("State"):
        raise ParseError(f"not a partition record: {line[:80]!r}")
    return fields["PartitionName"], fields["State"]


_HOST = re.compile(r"([^()\s]+)(?:\(([^()\s]*)\))?")


def parse_config(text: str) -> Config:
    """All of `scontrol show config`. Raises `ParseError`."""
    values = parse_configuration(text)
    hosts = []
    for i in range(16):
        match = _HOST.fullmatch(values.get(f"SlurmctldHost[{i}]", ""))
        if match:
            hosts.append((match[1], match[2] or match[1]))
    if not hosts or not values.get("StateSaveLocation"):
        raise ParseError(f"not Slurm's configuration: {text[:80]!r}")
    return Config(tuple(hosts), values["StateSaveLocation"], _time(values.get("BOOT_TIME", "")), values)


ROW_FORMAT = "%A|%U|%T|%N|%e"


def parse_row(line: str) -> Row:
    """One row of `squeue -h -o ROW_FORMAT`. Raises `ParseError`."""
    parts = line.strip().split("|")
    if len(parts) != 5 or not (parts[0].isdigit() and parts[1].isdigit()):
        raise ParseError(f"not a row of squeue: {line[:80]!r}")
    return Row(int(parts[0]), state_of(parts[2]), int(parts[1]), _hosts(parts[3]), _time(parts[4]))


def parse_admin_level(text: str, user: str) -> str:
    """AdminLevel of `user` in `sacctmgr -nP show user name=USER format=user,admin`; "" unless there is just one."""
    rows = [line.split("|") for line in text.splitlines() if line.strip()]
    levels = [row[1] for row in rows if len(row) == 2 and row[0] == user]
    return levels[0] if len(levels) == 1 else ""


def parse_configuration(text: str) -> dict[str, str]:
    """`scontrol show config`: key -> value, empty where Slurm says (null)."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z0-9_]+(\[[0-9]+\])?", key.strip()):
            found.setdefault(key.strip(), "" if value.strip() in ("(null)", "(null type)") else value.strip())
    return found


def parse_ping(text: str) -> list[tuple[str, bool]]:
    """`scontrol ping`: (host, whether it answers), in its order."""
    found = re.finditer(r"^Slurmctld\([a-z0-9]+\) at (\S+) is (UP|DOWN)", text, re.M)
    return [(match[1], match[2] == "UP") for match in found]
