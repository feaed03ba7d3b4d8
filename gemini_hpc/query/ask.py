"""Queries to the controller, or to the agents themselves if no controller answers."""

from __future__ import annotations

import asyncio
import os
import pwd
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gemini_hpc.config import Settings
from gemini_hpc.operators import Operators
from gemini_hpc.wire import inspect_schema, site_key
from gemini_hpc.wire.credentials import CredentialError
from gemini_hpc.wire.evacuate import NO_PART, EvacuateAsk, Evacuated
from gemini_hpc.wire.flush import FlushAsk, Flushing
from gemini_hpc.wire.handshake import Caller, HandshakeClient, HandshakeError
from gemini_hpc.wire.link import BlockingLink, Link, LinkClosed, connect_any
from gemini_hpc.wire.message import Message

if TYPE_CHECKING:
    from gemini_hpc.query.inspect_document import Document
    from gemini_hpc.slurm.facts import Job, Node

CONTROLLER_TIMEOUT_S = 2.0  # a person waits; another controller, or the agents, are asked next
AGENT_TIMEOUT_S = 1.0  # a person waits; of many nodes some are down
PARALLEL = 64
WITHOUT_CONTROLLER = "gemini-hpc inspect JOBID asks the agents themselves"
A = TypeVar("A", inspect_schema.JobAnswer, inspect_schema.JobsAnswer)


class QueryError(Exception):
    """A failed query; its text is one line for the user."""


class NoControllerError(Exception):
    """The error that no controller answers at its address."""


def build_client(
    settings: Settings, job: int, target: str, server_uid: int, purpose: str = "query"
) -> HandshakeClient:
    """Return the calling side of a handshake with the controller or an agent. Raises `QueryError`."""
    try:
        site_key.adopt(settings)
    except CredentialError as exc:
        raise QueryError(str(exc)) from None
    caller = Caller(settings.cluster_name, socket.gethostname(), secrets.token_hex(8))
    return HandshakeClient(caller, purpose=purpose, job=job, target=target, server_uid=server_uid)


class ControllerLine:
    """A connection to the controller for repeated queries (`--watch`)."""

    def __init__(self, settings: Settings, job: int) -> None:
        """Connect to the first controller host that answers.

        Raises:
            NoControllerError: No controller answers.
            QueryError: The controller refuses the connection, or its user is unknown here.
        """
        hosts = settings.list_controller_hosts()
        if not hosts:
            raise NoControllerError("no controller_host in the settings")
        try:
            uid = pwd.getpwnam(settings.slurm_user).pw_uid
        except KeyError:
            raise QueryError(
                f"slurm_user {settings.slurm_user!r} of the settings is not a user of this host"
            ) from None
        failed = []
        for host in hosts:
            client = build_client(settings, job, host, uid)
            where = f"{host}:{settings.controller_port}"
            try:
                self._link = BlockingLink.connect(host, settings.controller_port, client, CONTROLLER_TIMEOUT_S)
                return
            except OSError as exc:
                failed.append(f"{where}: {exc.strerror or exc}")
            except UnicodeError:
                failed.append(f"{where}: not a host name")
            except HandshakeError as exc:
                raise QueryError(f"controller {where}: {exc}") from None
        raise NoControllerError("; ".join(failed))

    def ask(self, job: int) -> inspect_schema.JobAnswer:
        """Return the controller's answer about a job.

        Raises `QueryError` with the controller's own text, `NoControllerError` if the connection is lost.
        """
        return self._ask(inspect_schema.JobAsk(job), inspect_schema.JobAnswer)

    def list_jobs(self, everything: bool) -> inspect_schema.JobsAnswer:
        """Return the jobs that this user may see. Raises as `ask`."""
        try:
            return self._ask(inspect_schema.JobsAsk(everything), inspect_schema.JobsAnswer)
        except NoControllerError as exc:
            raise NoControllerError(
                f"{exc}; a controller of an earlier version does not know this question"
            ) from None

    def _ask(self, question: Message, kind: type[A]) -> A:
        try:
            self._link.send(question)
            answer = self._link.receive(kind)
        except (OSError, LinkClosed) as exc:
            raise NoControllerError(str(exc)) from None
        if answer.error:
            raise QueryError(answer.error)
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._link.close()


def fetch_documents(line: ControllerLine, jobs: Iterable[int], now: float) -> dict[int, Document]:
    """Return the inspect documents of those jobs that the controller shows to this user.

    Raises:
        NoControllerError: The connection is lost.
    """
    found = {}
    for job in jobs:
        with suppress(QueryError):
            found[job] = describe_answer(job, line.ask(job), "controller", now)
    return found


def describe_answer(job: int, answer: inspect_schema.JobAnswer, asked: str, now: float) -> Document:
    """Return the inspect document of an answer that came from `asked`: "controller" or "agents"."""
    from gemini_hpc.query.inspect_document import build_inspect_document

    reported = (answer.parts, answer.events, answer.slurm, answer.missing)
    return build_inspect_document(job, *reported, asked, now, answer.lemons)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job and its nodes by name, whose agents are asked with these settings."""

    settings: Settings
    job: Job
    nodes: dict[str, Node]

    async def connect(self, name: str, purpose: str = "query") -> Link | None:
        """Connect to the agent on a node; None if it does not answer, or refuses a mere query.

        Raises `QueryError`.
        """
        from gemini_hpc.wire.ports import list_candidates

        def build() -> HandshakeClient:
            return build_client(self.settings, self.job.raw_id, name, self.job.user_id, purpose)

        ports = list_candidates(self.settings, self.job.raw_id)
        try:
            return (await connect_any(self.nodes[name].address, ports, build, AGENT_TIMEOUT_S))[0]
        except (OSError, LinkClosed):
            return None
        except HandshakeError as exc:
            if purpose == "query":
                return None
            raise QueryError(f"{name}: {exc}") from None


async def _read_allocation(settings: Settings, raw_id: int, silent: str = "Slurm does not answer") -> Allocation:
    """Return the job and its nodes. Raises `QueryError`, with the words `silent` if Slurm does not answer."""
    from gemini_hpc.query.slurm_facts import NOT_YOURS
    from gemini_hpc.slurm import Slurm, SlurmError, UnknownJob

    refusal = f"job {raw_id}: {NOT_YOURS} (the controller knows how an ended job ended: gemini-hpc inspect {raw_id})"
    slurm = Slurm()
    try:
        job = await slurm.read_job(raw_id)
        # A courtesy check: the agents know the caller from its credential and decide for themselves.
        allowed = Operators(settings.operators, (0, job.user_id, *settings.list_slurm_uids()))
        if not await allowed.allows(os.geteuid()):
            raise QueryError(refusal)
        if settings.auth == "key" and os.geteuid() not in (0, job.user_id, *settings.list_slurm_uids()):
            raise QueryError(f"job {raw_id}: without MUNGE, only the controller answers others than owner and root")
        return Allocation(settings, job, await slurm.read_nodes(job.nodes) if job.nodes else {})
    except UnknownJob:
        raise QueryError(refusal) from None
    except SlurmError as exc:
        raise QueryError(f"{silent}: {exc}") from None


async def _collect_parts(allocation: Allocation) -> tuple[inspect_schema.InspectPart, ...]:
    gate = asyncio.Semaphore(PARALLEL)

    async def ask_one(name: str) -> inspect_schema.InspectPart | None:
        async with gate:
            return await _ask_agent(allocation, name, inspect_schema.InspectAsk())

    answers = await asyncio.gather(*map(ask_one, allocation.nodes))
    return tuple(a for a in answers if a is not None)


async def _ask_agent(
    allocation: Allocation, name: str, question: inspect_schema.InspectAsk
) -> inspect_schema.InspectPart | None:
    try:
        async with asyncio.timeout(AGENT_TIMEOUT_S):
            if (link := await allocation.connect(name)) is None:
                return None
            try:
                link.send(question)
                while True:
                    message = await link.receive()
                    if isinstance(message, inspect_schema.InspectPart):
                        return message
            finally:
                link.abort()
    except (OSError, LinkClosed):
        return None


def ask_agents(settings: Settings, raw_id: int) -> inspect_schema.JobAnswer:
    """Return the same answer without a controller, from Slurm's node list and every agent on its deterministic ports.

    Raises `QueryError`.
    """
    return asyncio.run(_ask_agents(settings, raw_id))


async def _ask_agents(settings: Settings, raw_id: int) -> inspect_schema.JobAnswer:
    from gemini_hpc.query.slurm_facts import build_slurm_facts

    allocation = await _read_allocation(settings, raw_id, "neither the controller nor Slurm answers")
    parts = await _collect_parts(allocation)
    missing = tuple(n for n in allocation.job.nodes if n not in {p.host for p in parts})
    return inspect_schema.JobAnswer(parts=parts, slurm=build_slurm_facts(allocation.job), missing=missing)


class AnswerSource:
    """The source of answers about jobs: the controller, or the agents while no controller answers.

    Attributes:
        without: Number of questions so far that the controller did not answer.
    """

    def __init__(self, settings: Settings, *, again: bool = True) -> None:
        """Create a source; `again` is whether a controller that did not answer is asked the next time, too."""
        self._settings, self._again = settings, again
        self._line: ControllerLine | None = None
        self._failure: NoControllerError | None = None
        self.without = 0

    def ask(self, job: int) -> tuple[inspect_schema.JobAnswer, NoControllerError | None]:
        """Return the answer about a job, and why it comes from the agents, if it does. Raises `QueryError`."""
        try:
            if self._failure is not None and not self._again:
                raise self._failure
            return self._ask_controller(job), None
        except NoControllerError as exc:
            self.close()
            self._failure = exc
            self.without += 1
            return ask_agents(self._settings, job), exc

    def _ask_controller(self, job: int) -> inspect_schema.JobAnswer:
        """Return the controller's answer, over the previous connection if that still works.

        The controller closes a connection that is silent for a minute. It may also have been restarted since.
        """
        if self._line is not None:
            try:
                return self._line.ask(job)
            except NoControllerError:
                self.close()
        self._line = ControllerLine(self._settings, job)
        return self._line.ask(job)

    def close(self) -> None:
        """Close the connection to the controller, if there is one."""
        line, self._line = self._line, None
        if line is not None:
            line.close()


@dataclass(frozen=True)
class Recorded:
    """A question to an agent about a rank, and its answer.

    The answer is None if the agent does not answer, knows no such rank, or is of a version without records.
    """

    host: str
    ask: inspect_schema.RecordAsk
    record: inspect_schema.Record | None


Choose = Callable[[tuple[inspect_schema.InspectPart, ...]], Sequence[tuple[str, inspect_schema.RecordAsk]]]


def fetch_records(
    settings: Settings, raw_id: int, choose: Choose
) -> tuple[tuple[inspect_schema.InspectPart, ...], list[Recorded]]:
    """Query all agents of a job for their parts, then the hosts that `choose` selects for the records of a rank.

    The agents are always queried directly, because the controller does not forward records.

    Raises `QueryError`.
    """
    return asyncio.run(_fetch_records(settings, raw_id, choose))


async def _fetch_records(
    settings: Settings, raw_id: int, choose: Choose
) -> tuple[tuple[inspect_schema.InspectPart, ...], list[Recorded]]:
    allocation = await _read_allocation(settings, raw_id)
    parts = await _collect_parts(allocation)
    if not parts and allocation.job.has_ended:
        raise QueryError(f"job {raw_id}: {_explain_silence(allocation.job)}")
    gate = asyncio.Semaphore(PARALLEL)

    async def fetch_record(host: str, ask: inspect_schema.RecordAsk) -> Recorded:
        async with gate:
            part = await _ask_agent(allocation, host, inspect_schema.InspectAsk(record=ask))
        record = part.record if part is not None else None
        asked_for = record is not None and (record.training, record.rank) == (ask.training, ask.rank)
        return Recorded(host, ask, record if asked_for else None)

    wanted = [(host, ask) for host, ask in choose(parts) if host in allocation.nodes]
    return parts, await asyncio.gather(*(fetch_record(host, ask) for host, ask in wanted))


Told = Callable[[Flushing], None]
EVACUATE_S = 20.0  # longer than the agents wait for a seal and for the job to leave the node
FLUSH_SILENT_S = 30.0  # a writing agent reports each second
_NO_AGENTS = "the job has no nodes now, and none of its agents is connected to the controller"
_AGAIN_S = 2.0  # seconds until the controller is queried again


def flush(settings: Settings, raw_id: int, on_report: Told) -> list[Flushing]:
    """Have the job's agents save the sealed versions to the tier; return the last report on each training.

    `on_report` is called with every report. Raises `QueryError`.
    """
    return asyncio.run(_flush(settings, raw_id, on_report))


async def _flush(settings: Settings, raw_id: int, on_report: Told) -> list[Flushing]:
    allocation = await _read_allocation(settings, raw_id)
    if not allocation.nodes:
        allocation = replace(allocation, nodes=await _find_former_nodes(settings, raw_id))
    left, silent, root = list(allocation.nodes), "", ""
    while left:
        left.remove(name := root if root in left else left[0])
        over = await _flush_at(allocation, name, on_report)
        root = next((word.root for word in over if word.root), "")
        silent = silent or root
        if over and not root:
            return over
    if silent:
        raise QueryError(f"job {raw_id}: the save is led by the agent on {silent}, which does not answer")
    raise QueryError(f"job {raw_id}: {_explain_silence(allocation.job) if allocation.nodes else _NO_AGENTS}")


def _explain_silence(job: Job) -> str:
    """Return why no agent of a job with nodes answers."""
    if job.has_ended:
        return f"it has ended ({job.state}), and no agent holds copies of it: gemini-hpc inspect {job.raw_id}"
    return "no agent answers"


async def _find_former_nodes(settings: Settings, raw_id: int) -> dict[str, Node]:
    """Return the nodes that held agents in the last incarnation of a waiting job, as the controller knows them.

    Raises `QueryError`.
    """
    from gemini_hpc.slurm import Slurm, SlurmError

    try:
        with closing(await asyncio.to_thread(ControllerLine, settings, raw_id)) as line:
            parts = (await asyncio.to_thread(line.ask, raw_id)).parts
            if not parts:  # the agents may have been slow, or have just lost their connection to the controller
                await asyncio.sleep(_AGAIN_S)
                parts = (await asyncio.to_thread(line.ask, raw_id)).parts
        last = max((part.restart for part in parts), default=0)
        hosts = tuple(sorted(part.host for part in parts if part.restart == last))
        return await Slurm().read_nodes(hosts) if hosts else {}
    except NoControllerError as exc:
        why = f"job {raw_id} has no nodes now, and only the controller knows its former nodes: {exc}"
        raise QueryError(why) from None
    except SlurmError as exc:
        raise QueryError(f"Slurm does not answer: {exc}") from None


async def _flush_at(allocation: Allocation, name: str, on_report: Told) -> list[Flushing]:
    """Return an agent's last reports, [] if it did not answer. Raises `QueryError`."""
    over: list[Flushing] = []
    begun: dict[str, Flushing] = {}
    if (link := await allocation.connect(name, "flush")) is None:
        return []
    try:
        link.send(FlushAsk())
        while True:
            async with asyncio.timeout(FLUSH_SILENT_S):
                message = await link.receive()
            if isinstance(message, Flushing):
                on_report(message)
                over += [message] if message.over else []
                begun[message.training] = message
    except LinkClosed:  # the agent closes the connection after its last report
        return over + [
            msgspec.structs.replace(
                word,
                over=True,
                reason=f"the agent on {name} closed the connection before the version was on the tier",
            )
            for word in begun.values()
            if not word.over
        ]
    except TimeoutError:
        raise QueryError(f"the agent on {name} has not answered for {FLUSH_SILENT_S:.0f} s") from None
    finally:
        link.abort()


def evacuate(settings: Settings, raw_id: int, host: str) -> None:
    """Have the job's agents replace this node by a spare, and wait until they have. Raises `QueryError`."""
    asyncio.run(_evacuate(settings, raw_id, host))


async def _evacuate(settings: Settings, raw_id: int, host: str) -> None:
    allocation = await _read_allocation(settings, raw_id)
    if host not in allocation.nodes:
        raise QueryError(f"job {raw_id} does not run on {host}")
    for name in allocation.nodes:
        if name == host:
            continue
        reason = await _evacuate_at(allocation, name, host)
        if reason == "":
            return
        if reason not in (None, NO_PART):
            raise QueryError(f"job {raw_id}: {reason}")
    raise QueryError(f"job {raw_id}: no agent answers on another node")


async def _evacuate_at(allocation: Allocation, name: str, host: str) -> str | None:
    """Return an agent's answer: "" for success, or the reason against it; None if it did not answer.

    Raises `QueryError`.
    """
    if (link := await allocation.connect(name, "evacuate")) is None:
        return None
    try:
        link.send(EvacuateAsk(host))
        async with asyncio.timeout(EVACUATE_S):
            message = await link.receive()
        return message.reason if isinstance(message, Evacuated) else None
    except (LinkClosed, TimeoutError):
        raise QueryError(
            f"the agent on {name} has closed the connection, or not answered for {EVACUATE_S:.0f} s"
        ) from None
    finally:
        link.abort()
