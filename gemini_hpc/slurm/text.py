"""Parsers of Slurm's output on nodes, partitions, reservations and configuration, and of squeue's rows.

`scontrol` prints records as `Key=value`, with operators' texts unescaped among them. The first occurrence of
a key counts, and no key behind the first text counts. Jobs are not read this way, because their owners write
most of such a record (see `fields`).
"""

from __future__ import annotations

import calendar
import re
import time

from gemini_hpc.core import hostlist
from gemini_hpc.slurm.errors import SlurmRefused
from gemini_hpc.slurm.facts import COMPLETING, CONFIGURING, Node, Reservation, SlurmConfig, WatchedJob

_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:]*)=")
_STATE_MARKS = "*~#!%$@^-+"
# keys of a node's record whose values are operators' texts
_NODE_TEXTS = frozenset(("Comment", "Extra", "Reason"))
_NONE = frozenset(("", "(null)", "None", "none", "N/A", "n/a", "Unknown", "NONE"))


class ParseError(SlurmRefused):
    """The error that a Slurm command's output cannot be read, or is ambiguous."""


def split_pairs(line: str) -> list[tuple[str, str]]:
    """Return the key=value pairs of one `scontrol -o` line; values may contain spaces."""
    found = list(_KEY.finditer(line))
    if not found:
        return []
    ends = [m.start() for m in found[1:]] + [len(line)]
    return [(m[1], line[m.end() : end].strip()) for m, end in zip(found, ends, strict=True)]


def drop_none(value: str) -> str:
    """Return the value, "" if it is one of Slurm's words for none."""
    return "" if value in _NONE else value


def parse_number(value: str) -> int:
    """Return the number that the value begins with, 0 if there is none."""
    m = re.match(r"[0-9]+", value)
    return int(m[0]) if m else 0


def parse_hosts(value: str) -> tuple[str, ...]:
    """Return the hosts of a host list. Raises `ParseError`."""
    try:
        return tuple(hostlist.expand(drop_none(value)))
    except ValueError as exc:
        raise ParseError(str(exc)) from None


def parse_megabytes(value: str) -> int:
    """Return the MiB in `1536M`, `4G`, `100Mc` (per CPU); 0 for anything else."""
    m = re.fullmatch(r"([0-9.]+)([KMGT]?)[cn]?", value)
    if not m:
        return 0
    return int(float(m[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1 << 20}[m[2]])


def parse_time(value: str) -> float:
    """Return the Unix time of Slurm's time stamp, which is UTC because the client asks for it; 0.0 if invalid."""
    try:
        return float(calendar.timegm(time.strptime(value, "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return 0.0


def parse_state(value: str) -> str:
    """Return one word for a job's state.

    Later releases print several (`PENDING,COMPLETING`). The most transient one is returned then.
    """
    words = [w for w in re.split(r"[,+ ]", value.upper()) if w]
    for passing in (COMPLETING, CONFIGURING, "STAGE_OUT"):
        if passing in words:
            return passing
    return words[0] if words else ""


def count_gres(value: str) -> dict[str, int]:
    """Return the counts by name, such as `gpu:a100` and `gpu`, in a list of generic resources.

    Slurm spells such lists in several ways, for example `gpu:a100:4(S:0-1),gres/nvme:1`.
    """
    found: dict[str, int] = {}
    for part in re.sub(r"\([^()]*\)", "", drop_none(value)).split(","):
        words = re.sub(r"^gres[:/]", "", part.strip()).replace("=", ":").split(":")
        count = 1
        if len(words) > 1 and (m := re.fullmatch(r"([0-9]+)([KMGT]?)", words[-1])):
            count = int(m[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}[m[2]]
            words.pop()
        if words[0]:
            for name in {words[0], ":".join(words)}:
                found[name] = found.get(name, 0) + count
    return found


def _parse_own(record: str, texts: frozenset[str] = frozenset()) -> dict[str, str]:
    """Return the values that Slurm itself has written: each key's first value, up to the first key of `texts`."""
    fields: dict[str, str] = {}
    for key, value in split_pairs(record):
        fields.setdefault(key, value)
        if key in texts:
            break
    return fields


def split_nodes(out: str) -> list[str]:
    """Return the records of `scontrol show node -o`; a line break within a text does not end a record."""
    return re.split(r"\n(?=NodeName=)", out.strip()) if out.strip() else []


def hides_reason(record: str) -> bool:
    """Return whether another text precedes the place of a reason, so that the record cannot show it."""
    own = _parse_own(record, _NODE_TEXTS)
    return "Reason" not in own and "Reason=" in record and bool(own.keys() & _NODE_TEXTS)


def parse_node_state(word: str) -> tuple[str, frozenset[str]]:
    """Return base state and flags of a word such as `DOWN*+DRAIN`.

    The star of a node that does not answer becomes the flag NOT_RESPONDING.
    """
    base, *extra = word.upper().split("+")
    flags = {flag.rstrip(_STATE_MARKS) for flag in extra}
    if "*" in word:
        flags.add("NOT_RESPONDING")
    return base.rstrip(_STATE_MARKS), frozenset(flags)


def _parse_reason(record: str) -> str:
    """Return the whole reason, whatever words it contains, up to its author and time."""
    text = record.partition("Reason=")[2]
    stamped = re.match(r".*?\[[^][\s]+@[0-9-]{10}T[0-9:]{8}\]", text, re.DOTALL)
    return drop_none((stamped[0] if stamped else text).strip())


def parse_node(record: str) -> Node:
    """Return the node of one record of `scontrol show node -o`. Raises `ParseError`."""
    fields = _parse_own(record, _NODE_TEXTS)
    state = fields.get("State", "").split()
    if not fields.get("NodeName") or not state:
        raise ParseError(f"not a node record: {record[:80]!r}")
    name = fields["NodeName"]
    base, flags = parse_node_state(state[0])
    active = drop_none(fields.get("ActiveFeatures", "")) or drop_none(fields.get("AvailableFeatures", ""))
    return Node(
        name=name,
        state=base,
        flags=flags,
        address=drop_none(fields.get("NodeAddr", "")) or name,
        port=parse_number(fields.get("Port", "0")),
        partitions=tuple(p for p in drop_none(fields.get("Partitions", "")).split(",") if p),
        features=frozenset(f for f in active.split(",") if f),
        cpus=parse_number(fields.get("CPUTot", "0")),
        memory_mb=parse_number(fields.get("RealMemory", "0")),
        reason=_parse_reason(record) if "Reason" in fields else "",
        boot_time=parse_time(fields.get("BootTime", "")),
        slurmd_start=parse_time(fields.get("SlurmdStartTime", "")),
        gres=count_gres(fields.get("Gres", "")),
        hostname=drop_none(fields.get("NodeHostName", "")) or name,
        spec_memory_mb=parse_number(fields.get("MemSpecLimit", "0")),
    )


def parse_reservation(line: str) -> Reservation:
    """Return the reservation of one line of `scontrol show reservation -o`. Raises `ParseError`."""
    fields = _parse_own(line)
    if "ReservationName" not in fields:
        raise ParseError(f"not a reservation record: {line[:80]!r}")
    return Reservation(
        name=fields["ReservationName"],
        nodes=parse_hosts(fields.get("Nodes", "")),
        users=tuple(u for u in drop_none(fields.get("Users", "")).split(",") if u),
        state=fields.get("State", ""),
        flags=frozenset(f for f in fields.get("Flags", "").split(",") if f),
        start_time=parse_time(fields.get("StartTime", "")),
    )


def parse_partition(line: str) -> tuple[str, str]:
    """Return a partition's name and state from one line of `scontrol show partition -o`.

    The state is UP, DRAIN, DOWN or INACTIVE. Raises `ParseError`.
    """
    fields = _parse_own(line)
    if not fields.get("PartitionName") or not fields.get("State"):
        raise ParseError(f"not a partition record: {line[:80]!r}")
    return fields["PartitionName"], fields["State"]


_HOST = re.compile(r"([^()\s]+)(?:\(([^()\s]*)\))?")


def parse_config(text: str) -> SlurmConfig:
    """Return the configuration from the whole output of `scontrol show config`. Raises `ParseError`."""
    values = parse_configuration(text)
    hosts = []
    for i in range(16):
        match = _HOST.fullmatch(values.get(f"SlurmctldHost[{i}]", ""))
        if match:
            hosts.append((match[1], match[2] or match[1]))
    if not hosts or not values.get("StateSaveLocation"):
        raise ParseError(f"not Slurm's configuration: {text[:80]!r}")
    return SlurmConfig(tuple(hosts), values["StateSaveLocation"], parse_time(values.get("BOOT_TIME", "")), values)


ROW_FORMAT = "%A|%U|%T|%N|%e"


def parse_row(line: str) -> WatchedJob:
    """Return the row of one line of `squeue -h -o ROW_FORMAT`. Raises `ParseError`."""
    parts = line.strip().split("|")
    if len(parts) != 5 or not (parts[0].isdigit() and parts[1].isdigit()):
        raise ParseError(f"not a row of squeue: {line[:80]!r}")
    return WatchedJob(
        int(parts[0]), parse_state(parts[2]), int(parts[1]), parse_hosts(parts[3]), parse_time(parts[4])
    )


def parse_admin_level(text: str, user: str) -> str:
    """Return the AdminLevel of `user`, "" unless there is exactly one row of that user.

    `text` is the output of `sacctmgr -nP show user name=USER format=user,admin`.
    """
    rows = [line.split("|") for line in text.splitlines() if line.strip()]
    levels = [row[1] for row in rows if len(row) == 2 and row[0] == user]
    return levels[0] if len(levels) == 1 else ""


def parse_configuration(text: str) -> dict[str, str]:
    """Return the values of `scontrol show config` by key, empty if Slurm prints (null)."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z0-9_]+(\[[0-9]+\])?", key.strip()):
            found.setdefault(key.strip(), "" if value.strip() in ("(null)", "(null type)") else value.strip())
    return found


def parse_ping(text: str) -> list[tuple[str, bool]]:
    """Return each host in the output of `scontrol ping` and whether it answers, in the printed order."""
    found = re.finditer(r"^Slurmctld\([a-z0-9]+\) at (\S+) is (UP|DOWN)", text, re.M)
    return [(match[1], match[2] == "UP") for match in found]


def parse_gres_needed(per_node: str, *otherwise: str) -> dict[str, int]:
    """Return the generic resources that each node must have.

    Resources requested per node count in full. Resources requested in another way count as one.
    """
    need: dict[str, int] = {}
    for value in otherwise:
        need.update(dict.fromkeys(count_gres(value), 1))
    for name, count in count_gres(per_node).items():
        need[name] = max(count, need.get(name, 0))
    return {name: count for name, count in need.items() if name not in ("cpu", "mem", "node", "billing")}
