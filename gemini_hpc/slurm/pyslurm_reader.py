"""Access to pyslurm through a separate process (`pyslurm_worker`), which is killed at the first surprise.

pyslurm is never imported here: its import can end a process, and its calls block the interpreter for as long
as slurmctld does not answer.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from gemini_hpc import clock
from gemini_hpc.slurm.errors import build_error
from gemini_hpc.slurm.facts import Job, Node
from gemini_hpc.slurm.fair_queue import FairGate
from gemini_hpc.slurm.json_form import format_reason
from gemini_hpc.slurm.text import (
    ParseError,
    drop_none,
    parse_gres_needed,
    parse_hosts,
    parse_node_state,
    parse_state,
)
from gemini_hpc.slurm.ways import PYSLURM, Surprise, Unreadable

T = TypeVar("T")
WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pyslurm_worker.py")
# Importing takes part of this time; an import that finds no configuration can hang for a minute.
START_TIMEOUT_S = 5.0
KILLED_WITHIN_S = 1.0  # a worker that SIGKILL has not ended by then hangs in the kernel
MAX_ANSWER_BYTES = 256 << 20  # for a cluster with 100,000 nodes


class PyslurmReader:
    """A reader of Slurm through one pyslurm worker process."""

    name = PYSLURM

    def __init__(
        self,
        environment: Mapping[str, str],
        timeout_s: float,
        on_call: Callable[[str, float], None] | None = None,
        argv: tuple[str, ...] = (sys.executable, "-I", WORKER),
    ) -> None:
        """Create a reader; the first call starts its worker.

        Args:
            environment: The worker's environment.
            timeout_s: Time-out of each call in seconds.
            on_call: Called after every call with its words and its duration in seconds.
            argv: The worker's command.
        """
        self._environment, self._timeout_s = dict(environment), timeout_s
        self._on_call, self._argv = on_call, argv
        self._gate = FairGate(1)
        self._process: asyncio.subprocess.Process | None = None
        self._asked = 0

    async def _start_worker(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=self._environment,
                cwd="/",
                limit=MAX_ANSWER_BYTES,
            )
        except OSError as exc:
            raise Surprise(f"pyslurm's process does not start: {exc}") from None

    async def call_worker(self, call: str, *args: Any) -> Any:
        """Return the worker's answer. Raises as `ApiReader`."""
        async with self._gate:
            timeout_s = self._timeout_s
            if self._process is None:
                self._process = await self._start_worker()
                timeout_s += START_TIMEOUT_S
            began = clock.monotonic()
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await self._exchange(self._process, call, args)
            except TimeoutError:
                await self.close()
                raise Surprise(f"pyslurm gave no answer within {timeout_s:g} s ({call})") from None
            except (OSError, ValueError, msgspec.MsgspecError) as exc:
                await self.close()
                raise Surprise(f"pyslurm's process: {str(exc) or type(exc).__name__} ({call})") from None
            except asyncio.CancelledError:
                await self.close()  # otherwise its answer would be read as the next call's
                raise
            finally:
                if self._on_call is not None:
                    self._on_call(f"pyslurm {call} {' '.join(map(str, args))}".strip(), clock.monotonic() - began)
        kind, error = answer.get("kind"), str(answer.get("error", ""))
        if kind == "refused":
            raise build_error(error, "pyslurm")
        if kind == "unreadable":
            raise Unreadable(f"pyslurm: {error}")
        if kind is not None or "value" not in answer:
            await self.close()
            raise Surprise(f"pyslurm: {error[:300] or 'an answer of an unexpected form'} ({call})")
        return answer["value"]

    async def _exchange(self, process: asyncio.subprocess.Process, call: str, args: Any) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        self._asked += 1
        process.stdin.write(msgspec.json.encode({"id": self._asked, "call": call, "args": args}) + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ValueError("it has ended")
        answer = msgspec.json.decode(line)
        if not isinstance(answer, dict) or answer.get("id") != self._asked:
            raise ValueError("an unexpected answer")
        return answer

    async def read_job(self, raw_id: int) -> Job:
        """Return one job (see `ApiReader`)."""
        found = await self.call_worker("job", int(raw_id))
        job = await self._convert_record(lambda: build_job(found))
        if job.raw_id != raw_id:
            raise Unreadable(f"pyslurm answers with job {job.raw_id} for {raw_id}")
        return job

    async def read_excluded(self, raw_id: int) -> tuple[str, ...]:
        """Return the nodes that the job's owner excludes (see `ApiReader`)."""
        found = await self.call_worker("job", int(raw_id))
        return await self._convert_record(lambda: parse_hosts(found["excluded_nodes"] or ""))

    async def read_nodes(self, names: tuple[str, ...]) -> dict[str, Node]:
        """Return the named nodes, or all nodes (see `ApiReader`)."""
        found = await self.call_worker("nodes", list(names))
        return await self._convert_record(lambda: {node.name: node for node in map(build_node, found)})

    async def _convert_record(self, build: Callable[[], T]) -> T:
        try:
            return build()
        except ParseError as exc:
            raise Unreadable(f"pyslurm: {exc}") from None
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as exc:
            await self.close()
            raise Surprise(f"pyslurm: a record of an unexpected form: {type(exc).__name__} {exc}") from None

    async def set_node_state(self, name: str, state: str, reason: str = "") -> None:
        """Set a node's state, with a reason if one is given. Raises as `ApiReader`."""
        await self.call_worker("node_state", name, state, reason)

    async def requeue_job(self, raw_id: int) -> None:
        """Requeue one job; never an array's last task, whose id stands for the whole array."""
        await self.call_worker("requeue", int(raw_id))

    async def close(self) -> None:
        """Kill the worker; the next call would start another."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(TimeoutError):  # the worker may be stuck in a kernel call
                async with asyncio.timeout(KILLED_WITHIN_S):
                    await process.wait()


def _join_gres(value: Any) -> str:
    """Return `gpu:a100:2` for {"gpu": {"a100": 2}}, {"gpu:a100": 2} and text."""
    if isinstance(value, Mapping):
        return ",".join(
            ",".join(f"{name}:{kind}:{count}" for kind, count in what.items())
            if isinstance(what, Mapping)
            else f"{name}:{what}"
            for name, what in value.items()
        )
    return str(value or "")


def build_job(r: Mapping[str, Any]) -> Job:
    """Return the job of a worker's record. Raises `ParseError`, and errors such as KeyError for another shape."""
    array = int(r["array_id"] or 0) or None
    waiting, task_id = r["array_tasks_waiting"], r["array_task_id"]
    task = "" if array is None else str(waiting or ("" if task_id is None else task_id))
    return Job(
        id=f"{array}_{task}" if array is not None else str(r["id"]),
        raw_id=int(r["id"]),
        state=parse_state(r["state"]),
        reason=drop_none(r["state_reason"] or ""),
        user_id=int(r["user_id"]),
        user=str(r["user_name"] or ""),
        nodes=parse_hosts(r["allocated_nodes"] or ""),
        req_nodes=parse_hosts(r["required_nodes"] or ""),
        num_nodes=int(r["num_nodes"] or 0),
        restarts=int(r["requeue_count"] or 0),
        may_requeue=bool(r["is_requeueable"]),
        partition=r["partition"] or "",
        reservation=r["reservation"] or "",
        features=",".join(r["constraints"] or ()),
        array_job_id=array,
        array_task_id=task,
        is_het=bool(r["heterogeneous_id"]),
        is_batch=bool(r["is_batch_job"]),
        min_cpus=int(r["min_cpus_per_node"] or 0),
        min_memory_mb=int(r["memory_per_node"] or r["memory_per_cpu"] or 0),
        start_time=float(r["start_time"] or 0),
        end_time=float(r["end_time"] or 0),
        exit_code=f"{int(r['exit_code'] or 0)}:{int(r['exit_code_signal'] or 0)}",
        gres_per_node=parse_gres_needed(
            _join_gres(r["gres_per_node"]), r["tres_per_job"], r["tres_per_socket"], r["tres_per_task"]
        ),
    )


def build_node(r: Mapping[str, Any]) -> Node:
    """Return the node of a worker's record. Raises as `build_job`."""
    state, flags = parse_node_state(r["state"])
    return Node(
        name=str(r["name"]),
        state=state,
        flags=flags,
        address=r["address"] or r["name"],
        port=int(r["slurmd_port"] or 0),
        partitions=tuple(r["partitions"] or ()),
        features=frozenset(r["active_features"] or r["available_features"] or ()),
        cpus=int(r["total_cpus"] or 0),
        memory_mb=int(r["real_memory"] or 0),
        reason=format_reason(r["reason"] or "", r["reason_user"] or "", float(r["reason_time"] or 0)),
        boot_time=float(r["boot_time"] or 0),
        slurmd_start=float(r["slurmd_start_time"] or 0),
        gres=parse_gres_needed(_join_gres(r["configured_gres"])),
        hostname=r["hostname"] or r["name"],
        spec_memory_mb=int(r["memory_reserved_for_system"] or 0),
    )
