"""The only Slurm client: every Slurm command of this package is run here, and nowhere else.

Commands are run by absolute path, as argument vectors, with a fixed environment and a hard time-out. After
every change the object is read again. Jobs and nodes may be read by another API (`ways`), and a few changes
made by it. The first surprise ends the use of that API, and the commands are used again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from gemini_hpc import clock
from gemini_hpc.core.numbers import JOB_ID
from gemini_hpc.slurm import accounting, fields, ways
from gemini_hpc.slurm.errors import SlurmRefused, SlurmUnreachable, UnknownJob, build_error
from gemini_hpc.slurm.facts import COMPLETING, PENDING, Job, Node, Reservation, SlurmConfig, WatchedJob
from gemini_hpc.slurm.fair_queue import FairGate
from gemini_hpc.slurm.json_form import JsonReader
from gemini_hpc.slurm.pyslurm_reader import PyslurmReader
from gemini_hpc.slurm.text import (
    ROW_FORMAT,
    hides_reason,
    parse_admin_level,
    parse_config,
    parse_node,
    parse_partition,
    parse_ping,
    parse_reservation,
    parse_row,
    split_nodes,
)
from gemini_hpc.slurm.ways import ApiReader, Surprise, Unreadable, Way

log = logging.getLogger("gemini_hpc.controller")
T = TypeVar("T")
TIMEOUT_S = 10.0  # Slurm's own MessageTimeout, by default
PARALLEL_COMMANDS = 4
_DIRECTORIES = ("/usr/bin", "/usr/local/bin", "/opt/slurm/bin", "/usr/local/slurm/bin")
_IDS_PER_CALL = 400
_OF_ACCOUNTING = ("sacctmgr", "sacct")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_SAFE_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")
_SAFE_LINE = re.compile(r"[A-Za-z0-9 .,:;-]{1,300}")
_START = re.compile(r"now(\+[0-9]{1,6})?")


def find_tool(name: str) -> str:
    """Return the absolute path of a Slurm command.

    Raises `SlurmRefused`, which names the directories that were searched.
    """
    places = list(_DIRECTORIES)
    conf = os.environ.get("SLURM_CONF", "")
    if conf.startswith("/"):
        prefix = os.path.dirname(os.path.dirname(conf))
        places += [os.path.join(prefix, "bin"), os.path.join(os.path.dirname(prefix), "bin")]
    for place in places:
        path = os.path.join(place, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise SlurmRefused(f"{name} was not found in {', '.join(places)}: install Slurm's commands or set SLURM_CONF")


def _build_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k == "SLURM_CONF"}
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC", **kept}


def _make_pyslurm_reader(timeout_s: float, on_call: Callable[[str, float], None] | None) -> PyslurmReader:
    return PyslurmReader(_build_environment(), timeout_s, on_call)


def _join_names(names: Iterable[str]) -> str:
    out = list(names)
    for name in out:
        if not _SAFE_NAME.fullmatch(name):
            raise SlurmRefused(f"{name!r} is not a node name")
    return ",".join(out)


def _clean_text(text: str) -> str:
    return " ".join(text.replace('"', "'").split())


def _check_value(pattern: re.Pattern[str], value: str, wanted: str) -> str:
    if not pattern.fullmatch(value):
        raise SlurmRefused(f"{value!r} is not {wanted}")
    return value


class Slurm:
    """The Slurm client, with the operations of an operator.

    `close` ends the helper process that an API other than the commands may use.
    """

    def __init__(
        self,
        timeout_s: float = TIMEOUT_S,
        on_call: Callable[[str, float], None] | None = None,
        *,
        api: str = ways.COMMANDS,
        on_way: Callable[[Way], None] = lambda way: None,
    ) -> None:
        """Create a client.

        Args:
            timeout_s: Time-out of each command in seconds.
            on_call: Called after every command with its words and its duration in seconds.
            api: The setting `slurm_api`.
            on_way: Called with the API in use and its reason, at the first use and after each change.
        """
        self._timeout_s = timeout_s
        self._api, self._on_way = api, on_way
        self._way: Way | None = None
        self._reader: ApiReader | None = None
        self._choosing = asyncio.Lock()
        self._on_call = on_call
        self._gate = FairGate(PARALLEL_COMMANDS)
        self._accounting_gate = FairGate(1)  # a hanging database must not delay scontrol
        self._tools: dict[str, str] = {}
        # monotonic time when slurmctld last failed to answer
        self.unreachable_at = -math.inf

    async def _run_tool(self, tool: str, *args: str) -> str:
        return (await self._run_bytes(tool, *args)).decode(errors="replace")

    async def _run_bytes(self, tool: str, *args: str) -> bytes:
        try:
            return await self._call_tool(tool, *args)
        except SlurmUnreachable:
            self.unreachable_at = clock.monotonic()
            raise

    async def _call_tool(self, tool: str, *args: str, refuses: bool = True) -> bytes:
        """Return the output of a command.

        With `refuses` False, the output is returned even if the command fails.
        """
        if tool not in self._tools:
            self._tools[tool] = find_tool(tool)
        async with self._accounting_gate if tool in _OF_ACCOUNTING else self._gate:
            began = clock.monotonic()
            process = await asyncio.create_subprocess_exec(
                self._tools[tool],
                *args,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_build_environment(),
                cwd="/",
            )
            try:
                async with asyncio.timeout(self._timeout_s):
                    out, err = await process.communicate()
            except TimeoutError:
                raise SlurmUnreachable(f"{tool} gave no answer within {self._timeout_s:g} s") from None
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        process.kill()
                if self._on_call is not None:
                    self._on_call(" ".join((tool, *args)), clock.monotonic() - began)
        if process.returncode and refuses:
            raise build_error((err or out).decode(errors="replace"), tool)
        return out

    async def _run_lines(self, *args: str) -> list[str]:
        return [line for line in (await self._run_tool("scontrol", *args)).splitlines() if line.strip()]

    # ---- reading ---------------------------------------------------------------------------------------

    async def _run_squeue(self, *args: str) -> bytes:
        return await self._run_bytes("squeue", "-h", "-a", "-t", "all", *args)

    async def choose_way(self) -> Way:
        """Return the API by which jobs and nodes are read, and the reason for its choice."""
        if self._way is None:
            async with self._choosing:
                if self._way is None:
                    self._use_way(await self._choose_api())
        assert self._way is not None
        return self._way

    async def _choose_api(self) -> Way:
        if self._api == ways.COMMANDS:
            return ways.choose_way(self._api, "", "")
        return ways.choose_way(self._api, await self.read_release(), ways.find_pyslurm())

    def _use_way(self, way: Way) -> None:
        self._way = way
        if way.name == ways.JSON:
            self._reader = JsonReader(self._run_bytes)
        elif way.name == ways.PYSLURM:
            self._reader = _make_pyslurm_reader(self._timeout_s, self._on_call)
        else:
            self._reader = None
        self._on_way(way)

    async def _read_by_either(
        self, fast: Callable[[ApiReader], Awaitable[T]], commands: Callable[[], Awaitable[T]]
    ) -> T:
        """Run `fast` with the API in use, or `commands` if there is none or it does not work."""
        await self.choose_way()
        reader = self._reader
        if reader is not None:
            try:
                return await fast(reader)
            except Unreadable as exc:
                log.warning("slurm_api=%s event=asked-by-commands %s", reader.name, exc)
            except Surprise as exc:
                await self._leave_api(reader, exc)
            except SlurmUnreachable:
                self.unreachable_at = clock.monotonic()
                raise
        return await commands()

    async def _leave_api(self, reader: ApiReader, why: Surprise) -> None:
        """Switch from an API that surprised to the commands, permanently."""
        log.warning("slurm_api=%s event=left-for-commands %s", reader.name, why)
        if self._reader is reader:
            self._use_way(Way(ways.COMMANDS, f"{reader.name} is no longer used: {why}", is_fallback=True))
        await reader.close()

    async def close(self) -> None:
        """Close the API's helper process, if there is one."""
        reader, self._reader, self._way = self._reader, None, None
        if reader is not None:
            await reader.close()

    async def read_job(self, raw_id: int) -> Job:
        """Return one job by its raw id. Raises `UnknownJob`, `SlurmUnreachable`, `SlurmRefused`."""
        return await self._read_by_either(lambda reader: reader.read_job(raw_id), lambda: self._read_job(raw_id))

    async def _read_job(self, raw_id: int) -> Job:
        out = await self._run_squeue("-j", str(int(raw_id)), "-O", fields.FORMAT)
        found = [row for row in fields.split_rows(out) if row["JobID"] == str(raw_id)]
        if not found:
            raise UnknownJob(f"job {raw_id} is not known")
        if len(found) > 1:
            raise SlurmRefused(f"job {raw_id}: Slurm's answer names it {len(found)} times")
        return fields.build_job(found[0])

    async def read_excluded(self, raw_id: int) -> tuple[str, ...]:
        """Return the nodes that the job's owner excludes. Raises as `read_job`."""
        return await self._read_by_either(
            lambda reader: reader.read_excluded(raw_id), lambda: self._read_excluded(raw_id)
        )

    async def _read_excluded(self, raw_id: int) -> tuple[str, ...]:
        out = await self._run_squeue("-j", str(int(raw_id)), "-o", fields.EXCLUDED_FORMAT)
        return fields.parse_excluded(out.decode(errors="replace"), raw_id)

    async def find_raw_id(self, task: str) -> int:
        """Return the raw id of an array task written as `10_3`. Raises `UnknownJob`, `SlurmRefused`."""
        out = await self._run_squeue("-j", _check_value(JOB_ID, task, "a job id"), "-O", fields.IDS_FORMAT)
        for raw_id, name in fields.parse_ids(out):
            if task in (name, str(raw_id)):
                return raw_id
        raise UnknownJob(f"job {task} is not known")

    async def read_rows(self, raw_ids: Sequence[int]) -> dict[int, WatchedJob]:
        """Return state and nodes of many jobs, with one call per 400 ids; jobs unknown to Slurm are left out."""
        found: dict[int, WatchedJob] = {}
        for at in range(0, len(raw_ids), _IDS_PER_CALL):
            ids = raw_ids[at : at + _IDS_PER_CALL]
            with suppress(UnknownJob):
                rows = await self._list_rows("-t", "all", "-j", ",".join(str(int(i)) for i in ids))
                found |= {row.raw_id: row for row in rows if row.raw_id in ids}
        return found

    async def _list_rows(self, *args: str) -> list[WatchedJob]:
        out = await self._run_tool("squeue", "-h", "-a", "-r", *args, "-o", ROW_FORMAT)
        return [parse_row(line) for line in out.splitlines() if line.strip()]

    async def read_nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        """Return the named nodes, or all nodes if none is named."""
        wanted = tuple(names)
        _join_names(wanted)
        return await self._read_by_either(lambda reader: reader.read_nodes(wanted), lambda: self._read_nodes(wanted))

    async def _read_nodes(self, names: tuple[str, ...]) -> dict[str, Node]:
        wanted = _join_names(names)
        records = split_nodes(await self._run_tool("scontrol", "show", "node", "-o", *([wanted] if wanted else [])))
        found: dict[str, Node] = {}
        doubtful: set[str] = set()
        hidden: list[str] = []
        for record in records:
            node = parse_node(record)
            if node.name in found:  # an operator's text imitates a record
                doubtful.add(node.name)
            elif hides_reason(record):
                hidden.append(node.name)
            found.setdefault(node.name, node)
        for name in doubtful:
            own = split_nodes(await self._run_tool("scontrol", "show", "node", "-o", name))
            found[name] = parse_node(next(iter(own), ""))
        if hidden:
            out = await self._run_bytes("sinfo", "-h", "-N", "-n", _join_names(hidden), "-O", fields.REASON_FORMAT)
            reasons = fields.parse_reasons(out)
            found |= {name: replace(found[name], reason=reasons.get(name, "")) for name in hidden}
        return found

    async def read_partitions(self) -> dict[str, str]:
        """Return the state of each partition."""
        return dict(parse_partition(line) for line in await self._run_lines("show", "partition", "-o"))

    async def read_reservations(self) -> list[Reservation]:
        """Return all reservations."""
        lines = await self._run_lines("show", "reservation", "-o")
        return [parse_reservation(line) for line in lines if line.startswith("ReservationName=")]

    async def read_owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        """Return (uid, raw job id) of each job that is running or ending on each of these nodes."""
        wanted = tuple(names)
        states = "RUNNING,SUSPENDED,COMPLETING,CONFIGURING,STOPPED"
        found: dict[str, set[tuple[int, int]]] = {name: set() for name in wanted}
        for row in await self._list_rows("-t", states, "-w", _join_names(wanted)):
            for name in found.keys() & set(row.nodes):
                found[name].add((row.user_id, row.raw_id))
        return found

    async def read_attached(self, reservation: str) -> list[WatchedJob]:
        """Return the jobs, running or waiting, that name a reservation."""
        checked = _check_value(_SAFE_NAME, reservation, "a reservation name")
        return await self._list_rows("-t", "all", "-R", checked)

    async def sort_by_end(self, names: Iterable[str]) -> list[str]:
        """Return these busy nodes, sorted by the end of their jobs, earliest first."""
        wanted = tuple(names)
        ends = dict.fromkeys(wanted, 0.0)
        for row in await self._list_rows("-t", "RUNNING", "-w", _join_names(wanted)):
            for name in ends.keys() & set(row.nodes):
                ends[name] = max(ends[name], row.end_time or math.inf)
        return sorted(wanted, key=lambda name: (ends[name], name))

    async def read_config(self) -> SlurmConfig:
        """Return slurmctld's configuration in effect."""
        return parse_config(await self._run_tool("scontrol", "show", "config"))

    async def has_accounting(self) -> bool:
        """Return whether the cluster keeps its users in slurmdbd."""
        return (await self.read_config()).values.get("AccountingStorageType", "").endswith("slurmdbd")

    async def read_admin_level(self, user: str) -> str:
        """Return slurmdbd's AdminLevel of a user: "None", "Operator" or "Administrator".

        The level is "" if slurmdbd does not know the user.
        """
        name = _check_value(_SAFE_USER, user, "a user name")
        out = await self._call_tool("sacctmgr", "-n", "-P", "show", "user", f"name={name}", "format=user,admin")
        return parse_admin_level(out.decode(errors="replace"), name)

    async def read_queue(self) -> list[WatchedJob]:
        """Return all unfinished jobs that this user may see."""
        return await self._list_rows()

    async def read_history(self, days: int) -> str:
        """Return accounting's rows on all jobs that this user may see, in the form that `accounting` parses.

        Raises `SlurmRefused` if there is no accounting.
        """
        return await self._run_tool("sacct", *accounting.ARGUMENTS, "-S", f"now-{int(days)}days")

    async def read_configuration(self) -> dict[str, str]:
        """Return the configuration values that slurmctld runs with."""
        return (await self.read_config()).values

    async def read_release(self) -> str:
        """Return the release of Slurm's commands on this host, as they print it."""
        return (await self._call_tool("scontrol", "--version")).decode(errors="replace").strip()

    async def ping_slurmctlds(self) -> list[tuple[str, bool]]:
        """Return the hosts of slurmctld, the primary first, and whether each answers.

        The first host that answers is in charge.
        """
        return parse_ping((await self._call_tool("scontrol", "ping", refuses=False)).decode(errors="replace"))

    # ---- changing --------------------------------------------------------------------------------------

    async def set_node_down(self, name: str, reason: str) -> Node:
        """Set a node DOWN and DRAIN.

        Without the drain, a stale reply of a dead node makes it idle again (ReturnToService).
        """
        for state in ("DRAIN", "DOWN"):
            await self._set_node_state(name, state, reason)
        node = (await self._read_nodes((name,)))[name]
        if not node.is_down:
            raise SlurmRefused(f"node {name} was set DOWN, but is {node.state}")
        return node

    async def drain_node(self, name: str, reason: str) -> None:
        """Drain a node: no new job begins there, and running jobs continue.

        Raises `SlurmRefused` if the node is not drained afterwards.
        """
        await self._set_node_state(name, "DRAIN", reason)
        node = (await self._read_nodes((name,)))[name]
        if "DRAIN" not in node.flags:
            raise SlurmRefused(f"node {name} was drained, but is {node.state}")

    async def resume_node(self, name: str) -> None:
        """Resume a node that was drained in error."""
        await self._set_node_state(name, "RESUME")

    async def _set_node_state(self, name: str, state: str, reason: str = "") -> None:
        """Set a node's state; fall back to the commands if another API fails.

        The fallback is harmless, because setting the same state twice has the effect of setting it once.
        """
        reason = _clean_text(reason)
        words = [f"NodeName={_join_names([name])}", f"State={state}", *([f"Reason={reason}"] if reason else [])]

        async def set_by_commands() -> None:
            await self._run_tool("scontrol", "update", *words)

        async def set_by_api(reader: ApiReader) -> None:
            if not isinstance(reader, PyslurmReader):
                return await set_by_commands()
            return await reader.set_node_state(name, state, reason)

        await self._read_by_either(set_by_api, set_by_commands)

    async def create_reservation(self, name: str, nodes: Sequence[str], user_id: int, minutes: int = 10) -> None:
        """Reserve nodes for one user, regardless of the jobs that run there.

        Raises `SlurmRefused`, for example if another reservation overlaps.
        """
        await self._run_tool(
            "scontrol",
            "create",
            "reservation",
            f"ReservationName={_check_value(_SAFE_NAME, name, 'a reservation name')}",
            f"Nodes={_join_names(nodes)}",
            f"Users={int(user_id)}",
            "StartTime=now",
            f"Duration={int(minutes)}",
            "Flags=IGNORE_JOBS,FLEX,NO_HOLD_JOBS_AFTER",
        )

    async def change_reservation(self, name: str, nodes: Sequence[str]) -> None:
        """Replace a reservation's nodes in one step, so that no node is free in between.

        Raises `SlurmRefused`, for example if another reservation overlaps.
        """
        checked = _check_value(_SAFE_NAME, name, "a reservation name")
        await self._run_tool("scontrol", "update", f"ReservationName={checked}", f"Nodes={_join_names(nodes)}")

    async def delete_reservation(self, name: str) -> bool:
        """Delete a reservation; return False if a job still references it.

        A reservation that is already gone counts as deleted.
        """
        checked = _check_value(_SAFE_NAME, name, "a reservation name")
        try:
            await self._run_tool("scontrol", "delete", f"ReservationName={checked}")
        except SlurmRefused:
            return name not in {r.name for r in await self.read_reservations()}
        return True

    async def pin_job(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        """Make a job start next on these nodes (and more), out of this reservation.

        The job must be pending. `ResetAccrueTime` makes Slurm refuse the whole update of a running job.
        Without it, a shorter ReqNodeList would silently shrink a running job.
        """
        if reservation:
            _check_value(_SAFE_NAME, reservation, "a reservation name")
        await self._update_job(
            job, "ResetAccrueTime", f"ReqNodeList={_join_names(nodes)}", f"ReservationName={reservation}"
        )
        after = await self.read_job(job.raw_id)
        if set(after.req_nodes) != set(nodes) or after.reservation != reservation:
            found = ",".join(after.req_nodes) or "none"
            raise SlurmRefused(f"job {job.id} was pinned to {_join_names(nodes)} and has {found}")
        return after

    async def set_start_time(self, job: Job, start: str) -> None:
        """Set a job's earliest start, such as `now+2`.

        A plain `now` can fail the job permanently with a revoked credential.
        """
        await self._update_job(job, f"StartTime={_check_value(_START, start, 'a relative start time')}")

    async def nudge_scheduler(self, job: Job) -> None:
        """Send an update that changes nothing, because the scheduler runs after each update."""
        await self._update_job(job, "ResetAccrueTime")

    async def detach_reservation(self, job: Job, previous: str = "") -> None:
        """Return a job to its own reservation, or to none."""
        if previous:
            _check_value(_SAFE_NAME, previous, "a reservation name")
        await self._update_job(job, f"ReservationName={previous}")

    async def hold_job(self, job: Job, why: str) -> None:
        """Hold a pending job until its owner or an operator releases it; `why` becomes its AdminComment."""
        if not job.is_actable:
            raise SlurmRefused(f"job {job.id}: a hold would hold other jobs too")
        await self._run_tool("scontrol", "uhold", _check_value(JOB_ID, job.id, "a job id"))
        text = f"gemini-hpc: held: {why}; scontrol release {job.id} starts it again"
        await self._update_job(job, f"AdminComment={_clean_text(text)}")

    async def note_end(self, job: Job, line: str, prefix: str) -> None:
        """Write a line into an ended job's AdminComment in slurmdbd, unless another program has written there.

        slurmctld changes no ended job ("Job has already finished"). Without accounting nothing is written.

        Args:
            job: The job.
            line: One line without quotes.
            prefix: A comment that begins so is one of ours and is replaced.
        """
        if not _SAFE_LINE.fullmatch(line):
            raise SlurmRefused(f"{line!r} is not an AdminComment")
        if not job.is_actable:
            raise SlurmRefused(f"job {job.id}: an update would change other jobs too")
        if not await self.has_accounting():
            return
        raw_id = str(int(job.raw_id))
        found = (await self._call_tool("sacct", "-n", "-P", "-X", "-j", raw_id, "-o", "AdminComment")).decode(
            errors="replace"
        )
        if not found.strip() or found.startswith(prefix):
            words = ("-i", "modify", "job", "where", f"jobid={raw_id}", "set", f"AdminComment={line}")
            await self._call_tool("sacctmgr", *words)

    async def requeue_job(self, job: Job) -> None:
        """Requeue a running or ended job."""
        reader = self._reader
        # The raw id of an array's last task means the whole array.
        if isinstance(reader, PyslurmReader) and job.array_job_id is None and job.is_actable:
            try:
                await reader.requeue_job(job.raw_id)
            except Surprise as exc:
                await self._leave_api(reader, exc)
            except Unreadable:
                pass
            after = await self._read_job(job.raw_id)
            if after.restarts > job.restarts or after.state in (PENDING, COMPLETING):
                return
        await self._run_tool("scontrol", "requeue", _check_value(JOB_ID, job.id, "a job id"))

    async def _update_job(self, job: Job, *changes: str) -> None:
        if not job.is_actable:
            raise SlurmRefused(f"job {job.id}: an update would change other jobs too")
        await self._run_tool("scontrol", "update", f"JobId={_check_value(JOB_ID, job.id, 'a job id')}", *changes)
