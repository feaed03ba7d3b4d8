"""Jobs as `squeue -O` prints them, in fields that no text of a job's owner can imitate.

Slurm itself writes the first fields (numbers, states, host lists). Each ends with a `|`, which none of them
can contain. Fields that may hold a person's text follow, each exactly as many bytes wide as requested. A text
with line breaks, `|` or whole records is cut out by its position, and its content is not parsed. The job's
name, comments, paths and similar fields are not requested at all.
"""

from __future__ import annotations

import re

from gemini_hpc.slurm.facts import Job
from gemini_hpc.slurm.text import (
    ParseError,
    drop_none,
    parse_gres_needed,
    parse_hosts,
    parse_megabytes,
    parse_number,
    parse_state,
    parse_time,
)

WRITTEN = (
    "JobID",
    "ArrayTaskID",
    "ArrayJobID",
    "HetJobID",
    "UserID",
    "State",
    "NodeList",
    "ReqNodes",
    "NumNodes",
    "RestartCnt",
    "Requeue",
    "BatchFlag",
    "MinCpus",
    "MinMemory",
    "StartTime",
    "EndTime",
    "exit_code",
)
# slurmctld accepts at most 1024 bytes for each of these; a longer text is cut, and no decision depends on it
TEXTS = (
    "UserName",
    "Reason",
    "Partition",
    "Reservation",
    "tres-per-job",
    "tres-per-node",
    "tres-per-socket",
    "tres-per-task",
    "Feature",
)
TEXT_BYTES = 1024
FORMAT = ",".join([f"{name}:0|" for name in WRITTEN] + [f"{name}:{TEXT_BYTES}" for name in TEXTS])
IDS_FORMAT = "JobID:0|,ArrayTaskID:0|,ArrayJobID:0|"
# for `squeue -o`: release 22.05 has the excluded nodes in no other form
EXCLUDED_FORMAT = "%A|%x|"
# for `sinfo -N -O`: one row per node and partition
REASON_FORMAT = f"NodeHost:0|,User:0|,Timestamp:0|,Reason:{TEXT_BYTES}"


def split_rows(out: bytes) -> list[dict[str, str]]:
    """Return the fields of each row of `squeue -h -O FORMAT`. Raises `ParseError`."""
    rows = []
    at = 0
    while at < len(out):
        row: dict[str, str] = {}
        for name in WRITTEN:
            end = out.find(b"|", at)
            if end < 0:
                raise ParseError(f"not a row of squeue: {out[at : at + 80]!r}")
            row[name] = out[at:end].decode("ascii", errors="replace").strip()
            at = end + 1
        end = at + TEXT_BYTES * len(TEXTS)
        if out[end : end + 1] != b"\n":
            raise ParseError(f"a row of squeue has another length than was asked for: {out[at : at + 80]!r}")
        for i, name in enumerate(TEXTS):
            cut = out[at + i * TEXT_BYTES : at + (i + 1) * TEXT_BYTES]
            row[name] = cut.decode(errors="replace").rstrip(" ")
        at = end + 1
        rows.append(row)
    return rows


def parse_ids(out: bytes) -> list[tuple[int, str]]:
    """Return (raw id, id) of each row of `squeue -h -O IDS_FORMAT`. Raises `ParseError`."""
    found = []
    for line in out.decode("ascii", errors="replace").splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != 4 or not parts[0].isdigit():
            raise ParseError(f"not a row of ids: {line[:80]!r}")
        found.append((int(parts[0]), f"{parts[2]}_{parts[1]}" if drop_none(parts[1]) else parts[0]))
    return found


def build_job(row: dict[str, str]) -> Job:
    """Return the job of one row. Raises `ParseError`."""
    if not row["JobID"].isdigit() or not row["UserID"].isdigit() or not row["State"]:
        raise ParseError(f"not a job: {row['JobID'][:40]!r} of user {row['UserID'][:40]!r}")
    raw_id = int(row["JobID"])
    task = drop_none(row["ArrayTaskID"]).partition("%")[0]
    array = parse_number(row["ArrayJobID"]) if task else None
    return Job(
        id=f"{array}_{task}" if array is not None else str(raw_id),
        raw_id=raw_id,
        state=parse_state(row["State"]),
        reason=drop_none(row["Reason"]),
        user_id=int(row["UserID"]),
        user=row["UserName"],
        nodes=parse_hosts(row["NodeList"]),
        req_nodes=parse_hosts(row["ReqNodes"]),
        num_nodes=parse_number(row["NumNodes"]),
        restarts=parse_number(row["RestartCnt"]),
        may_requeue=parse_number(row["Requeue"]) != 0,
        partition=drop_none(row["Partition"]),
        reservation=drop_none(row["Reservation"]),
        features=drop_none(row["Feature"]),
        array_job_id=array,
        array_task_id=task,
        is_het=parse_number(row["HetJobID"]) != 0,
        is_batch=parse_number(row["BatchFlag"]) != 0,
        min_cpus=parse_number(row["MinCpus"]),
        min_memory_mb=parse_megabytes(row["MinMemory"]),
        start_time=parse_time(row["StartTime"]),
        end_time=parse_time(row["EndTime"]),
        exit_code=_parse_exit_code(row["exit_code"]),
        gres_per_node=parse_gres_needed(
            row["tres-per-node"], row["tres-per-job"], row["tres-per-socket"], row["tres-per-task"]
        ),
    )


def _parse_exit_code(value: str) -> str:
    """Return `3:0` (status, signal), from that form or from the status of wait()."""
    if not re.fullmatch(r"[0-9]+", value):
        return value
    status = int(value)
    return f"{status >> 8 & 255}:{status & 127}"


def parse_excluded(out: str, raw_id: int) -> tuple[str, ...]:
    """Return the nodes that a job excludes, from `squeue -h -o EXCLUDED_FORMAT`. Raises `ParseError`."""
    parts = out.split("|")
    found = {a.strip(): b for a, b in zip(parts[::2], parts[1::2], strict=False)}
    return parse_hosts(found.get(str(raw_id), ""))


def parse_reasons(out: bytes) -> dict[str, str]:
    """Return why nodes are drained or down, from `sinfo -h -N -O REASON_FORMAT`.

    Each reason ends with its author and time, as in `scontrol show node`. Raises `ParseError`.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(out):
        *written, rest = out[at:].split(b"|", 3)
        if len(written) != 3 or rest[TEXT_BYTES : TEXT_BYTES + 1] != b"\n":
            raise ParseError(f"not a row of sinfo: {out[at : at + 80]!r}")
        name, user, stamp = (value.decode("ascii", errors="replace").strip() for value in written)
        reason = rest[:TEXT_BYTES].decode(errors="replace").rstrip(" ")
        found[name] = f"{reason} [{user}@{stamp}]" if drop_none(reason) else ""
        at = len(out) - len(rest) + TEXT_BYTES + 1
    return found
