"""Jobs and nodes as `scontrol --json` prints them, in the forms of all releases that support it.

Numbers are plain or `{"set", "infinite", "number"}`. States are one word or a list of words. The set of keys
differs between releases.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from gemini_hpc.slurm.errors import SlurmError, SlurmUnreachable, UnknownJob
from gemini_hpc.slurm.facts import Job, Node
from gemini_hpc.slurm.text import ParseError, count_gres, drop_none, parse_gres_needed, parse_hosts, parse_state
from gemini_hpc.slurm.ways import JSON, Surprise, Unreadable

T = TypeVar("T")
Run = Callable[..., Awaitable[bytes]]
# flag names of `scontrol show node`
_FLAGS = {"MAINTENANCE": "MAINT", "REBOOT_REQUESTED": "REBOOT", "REBOOT_ISSUED": "REBOOT"}


class JsonReader:
    """A reader of Slurm through `scontrol --json`; `run` runs a command and returns its output."""

    name = JSON

    def __init__(self, run: Run) -> None:
        self._run = run

    async def _read_records(self, key: str, *args: str) -> list[dict[str, Any]]:
        try:
            out = await self._run("scontrol", "--json", *args)
        except (SlurmUnreachable, UnknownJob):
            raise
        except SlurmError as exc:
            raise Surprise(f"scontrol --json: {exc}") from None
        return parse_records(out, key)

    async def _read_record(self, raw_id: int) -> dict[str, Any]:
        own = [
            r for r in await self._read_records("jobs", "show", "job", str(int(raw_id))) if r.get("job_id") == raw_id
        ]
        if not own:
            raise UnknownJob(f"job {raw_id} is not known")
        return own[0]

    async def read_job(self, raw_id: int) -> Job:
        """Return one job (see `ApiReader`)."""
        return build_job(await self._read_record(raw_id))

    async def read_excluded(self, raw_id: int) -> tuple[str, ...]:
        """Return the nodes that the job's owner excludes (see `ApiReader`)."""
        record = await self._read_record(raw_id)
        return _convert_record(record, lambda: parse_hosts(str(record["excluded_nodes"])))

    async def read_nodes(self, names: tuple[str, ...]) -> dict[str, Node]:
        """Return the named nodes, or all nodes (see `ApiReader`)."""
        found = await self._read_records("nodes", "show", "node", *([",".join(names)] if names else []))
        return {node.name: node for node in map(build_node, found)}

    async def close(self) -> None:
        """Do nothing: this reader has no helper process (see `ApiReader`)."""


def parse_records(out: bytes, key: str) -> list[dict[str, Any]]:
    """Return the records below `key`. Raises `Unreadable` for invalid JSON, `Surprise` for another shape."""
    try:
        found = msgspec.json.decode(out.decode(errors="replace"))
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise Unreadable(f"scontrol --json: {exc}") from None
    rows = found.get(key) if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Surprise(f"scontrol --json: no list of {key}")
    return rows


def _convert_record(record: Mapping[str, Any], build: Callable[[], T]) -> T:
    try:
        return build()
    except (ParseError, KeyError, TypeError, ValueError, IndexError, AttributeError) as exc:
        what = record.get("job_id", record.get("name", "a record"))
        raise Surprise(f"scontrol --json: {str(what)[:80]}: {type(exc).__name__} {exc}") from None


def _parse_number(value: Any) -> int:
    """Return a number, 0 if Slurm leaves it unset."""
    if isinstance(value, dict):
        return int(value["number"]) if value.get("set", True) and not value.get("infinite") else 0
    return int(value or 0)


def _parse_state(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _parse_names(value: Any) -> list[str]:
    """Return the names in a list, or in a text with commas."""
    return [str(v) for v in value] if isinstance(value, list) else [v for v in drop_none(str(value)).split(",") if v]


def _parse_exit_code(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{_parse_number(value) >> 8 & 255}:{_parse_number(value) & 127}"
    signal = value.get("signal") or {}
    return f"{_parse_number(value['return_code'])}:{_parse_number(signal.get('id', signal.get('signal_id', 0)))}"


def build_job(r: Mapping[str, Any]) -> Job:
    """Return the job of a record. Raises `Surprise`."""
    return _convert_record(r, lambda: _convert_job(r))


def _convert_job(r: Mapping[str, Any]) -> Job:
    array = _parse_number(r["array_job_id"]) or None
    task_id = r["array_task_id"]
    has_task = bool(task_id.get("set")) if isinstance(task_id, dict) else task_id is not None
    waiting = drop_none(r.get("array_task_string") or "").partition("%")[0]
    task = "" if array is None else waiting or (str(_parse_number(task_id)) if has_task else "")
    memory = _parse_number(r["memory_per_node"]) or _parse_number(r["memory_per_cpu"])
    return Job(
        id=f"{array}_{task}" if array is not None else str(r["job_id"]),
        raw_id=int(r["job_id"]),
        state=parse_state(_parse_state(r["job_state"])),
        reason=drop_none(r.get("state_description") or r["state_reason"]),
        user_id=int(r["user_id"]),
        user=str(r["user_name"]),
        nodes=parse_hosts(r["nodes"]),
        req_nodes=parse_hosts(r["required_nodes"]),
        num_nodes=_parse_number(r["node_count"]),
        restarts=_parse_number(r["restart_cnt"]),
        may_requeue=bool(r["requeue"]),
        partition=drop_none(r["partition"]),
        reservation=drop_none(r["resv_name"]),
        features=drop_none(r["features"]),
        array_job_id=array,
        array_task_id=task,
        is_het=_parse_number(r["het_job_id"]) != 0,
        is_batch=bool(r["batch_flag"]),
        min_cpus=_parse_number(r["minimum_cpus_per_node"]),
        min_memory_mb=memory,
        start_time=float(_parse_number(r["start_time"])),
        end_time=float(_parse_number(r["end_time"])),
        exit_code=_parse_exit_code(r["exit_code"]),
        gres_per_node=parse_gres_needed(
            r["tres_per_node"], r["tres_per_job"], r["tres_per_socket"], r["tres_per_task"]
        ),
    )


def build_node(r: Mapping[str, Any]) -> Node:
    """Return the node of a record. Raises `Surprise`."""
    return _convert_record(r, lambda: _convert_node(r))


def _convert_node(r: Mapping[str, Any]) -> Node:
    base, *flags = (word.upper() for word in _parse_state(r["state"]).replace("+", ",").split(","))
    return Node(
        name=str(r["name"]),
        state=base,
        flags=frozenset(_FLAGS.get(flag, flag) for flag in flags),
        address=drop_none(r["address"]) or str(r["name"]),
        port=_parse_number(r["port"]),
        partitions=tuple(_parse_names(r["partitions"])),
        features=frozenset(_parse_names(r["active_features"]) or _parse_names(r["features"])),
        cpus=_parse_number(r["cpus"]),
        memory_mb=_parse_number(r["real_memory"]),
        reason=format_reason(r["reason"], r["reason_set_by_user"], _parse_number(r["reason_changed_at"])),
        boot_time=float(_parse_number(r["boot_time"])),
        slurmd_start=float(_parse_number(r["slurmd_start_time"])),
        gres=count_gres(str(r["gres"])),
        hostname=drop_none(r["hostname"]) or str(r["name"]),
        spec_memory_mb=_parse_number(r["specialized_memory"]),
    )


def format_reason(reason: str, user: str, time_s: float) -> str:
    """Return a reason in the form of `scontrol show node`: text, author and time (UTC)."""
    if not drop_none(reason):
        return ""
    return f"{reason} [{user}@{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(time_s))}]" if user else reason
