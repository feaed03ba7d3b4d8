"""The acting controller: agents register and report to it, users query it.

See requirements believe-slurm and one-controller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from gemini_hpc import clock
from gemini_hpc.config import Settings
from gemini_hpc.controller import tasks
from gemini_hpc.controller.access import find_operators
from gemini_hpc.controller.event_log import MAX_EVENTS_AT_ONCE, EventLogs, estimate_bytes, sanitize_event
from gemini_hpc.controller.gate import Gate, GatedSlurm
from gemini_hpc.controller.give_back import GiveBack
from gemini_hpc.controller.job_watch import JobWatch
from gemini_hpc.controller.journal import Journal
from gemini_hpc.controller.lemons import Lemons
from gemini_hpc.controller.metrics import Metrics
from gemini_hpc.controller.primary import LOCK, Primary, acquire_lock, is_here
from gemini_hpc.controller.query_server import QueryServer
from gemini_hpc.controller.recoveries import Recoveries
from gemini_hpc.controller.registry import ConnectedAgent, Registry, Track
from gemini_hpc.controller.sick_nodes import SickNodeDrains
from gemini_hpc.query.slurm_facts import explain_no_requeue
from gemini_hpc.settings import CANARY
from gemini_hpc.slurm import SlurmError, UnknownJob
from gemini_hpc.slurm.api import SlurmApi
from gemini_hpc.slurm.facts import Job
from gemini_hpc.slurm.fair_queue import BEHALF, PerUser
from gemini_hpc.wire import controller, inspect_schema, protocol
from gemini_hpc.wire.frames import FrameError
from gemini_hpc.wire.handshake import Greeting, HandshakeError
from gemini_hpc.wire.hostname import resolve_in_thread
from gemini_hpc.wire.link import Link, LinkClosed, accept
from gemini_hpc.wire.preauth_limit import PreauthLimit
from gemini_hpc.wire.rate_limit import RateLimit

log = logging.getLogger("gemini_hpc.controller")

MAX_STRANGERS = 256  # connections that are not yet authenticated
MAX_QUERIES_PER_UID = 16
MAX_AGENTS_PER_UID = 20_000
MAX_STRANGERS_PER_UID = 512  # links that have not yet registered
REGISTER_TIMEOUT_S = 15.0  # an agent connects while its prolog still waits for the peers
EARLY_EVENTS = 64
GOODBYE_S = 5.0  # the link stays open this long after `Release`, so that the agent receives it
STEP_DOWN_S = 5.0  # cancelled tasks have ended by then
RESOLVE_S = 2.0  # time limit to resolve the address of an agent's node
MESSAGES_PER_S, MESSAGES_BURST = 200.0, 2000.0  # of one agent, which is disconnected beyond
# a job read from Slurm is used again up to the first age; if fresh facts are needed, up to the second
JOB_CACHE_S, FRESH_JOB_S = 0.5, 0.1
# Frame limits: a registration lists the nodes; a part contains an agent's events and slots.
EARLY_FRAME_BYTES, AGENT_FRAME_BYTES = 256 << 10, 4 << 20
# Per user, over all jobs and agents (requirement believe-slurm).
REPORTS_PER_S, REPORTS_BURST = 50.0, 1000.0
EVENT_BYTES_PER_S, EVENT_BYTES_BURST = 500.0, 16e6
LINES_PER_S, LINES_BURST = 1.0, 10_000.0
MAX_JUDGED_PER_UID = 32  # jobs whose silent nodes are judged at the same time
MAX_UNPLACED = 64  # agents of a job for which Slurm has named no nodes


class Controller:
    """The controller on the host whose slurmctld is in charge.

    `serve` runs until another slurmctld is in charge, or until cancelled.
    """

    def __init__(self, settings: Settings, slurm: SlurmApi, primary: Primary, state_save: str) -> None:
        """Take the locks and read the state on disk. `state_save` is Slurm's StateSaveLocation.

        Raises:
            LockTakenError: Another controller acts.
        """
        self.settings, self.slurm, self._primary = settings, GatedSlurm(slurm, Gate(settings)), primary
        os.makedirs(settings.state_dir, mode=0o700, exist_ok=True)
        self._locks = [acquire_lock(os.path.join(place, LOCK)) for place in (settings.state_dir, state_save)]
        jobs = os.path.join(settings.state_dir, "jobs")
        self.registry = Registry(jobs)
        self.logs = EventLogs(jobs)
        self.journal = Journal(os.path.join(settings.state_dir, "journal.jsonl"))
        self.lemons = Lemons(settings.state_dir, settings.lemon_days)
        self.recoveries = Recoveries(
            settings, self.slurm, self.journal, self.logs, self.registry, primary, self.lemons
        )
        self._sick = SickNodeDrains(self.recoveries)
        self.watcher = JobWatch(self.recoveries)
        self._preauth_limit = PreauthLimit(MAX_STRANGERS)
        self._turned_away = RateLimit(per_s=1.0, burst=1.0)
        self._reports = PerUser(REPORTS_PER_S, REPORTS_BURST)
        self._event_bytes = PerUser(EVENT_BYTES_PER_S, EVENT_BYTES_BURST)
        self._lines = PerUser(LINES_PER_S, LINES_BURST)
        self._open: Counter[tuple[str, int]] = Counter()
        self._reads: dict[int, tuple[float, asyncio.Future[Job]]] = {}
        self._links: set[Link] = set()
        self._host = find_own_name(settings)
        self._instance = secrets.token_hex(8)
        self._queries = QueryServer(
            find_operators(settings, self.slurm), self.registry, self.logs, self.lemons, self.read_job
        )
        self._metrics = Metrics(self.recoveries, self._queries.build_document)
        self.recoveries.on_event = self._metrics.count_event

    async def serve(self) -> None:
        """Listen, watch and recover until cancelled, or until another slurmctld is in charge."""
        server = await asyncio.start_server(self._serve_connection, port=self.settings.controller_port, backlog=1024)
        log.info("event=ready port=%d pid=%d", self.settings.controller_port, os.getpid())
        died = self.recoveries.on_task_death
        work: dict[str, Callable[[], Awaitable[None]]] = {
            "watcher": self.watcher.run,
            "resume": self.recoveries.resume_open,
            "give-back": GiveBack(self.recoveries).run,
            "metrics": self._metrics.run,
            "withheld": lambda: self.recoveries.withheld.run(self.slurm),
        }
        ending: list[asyncio.Task[Any]] = [tasks.start(name, run, died) for name, run in work.items()]
        try:
            async with server:
                log.warning("event=stepping-down slurmctld=%s", await self._primary.wait_lost())
        finally:
            for task in ending:
                task.cancel()
            ending += [*self.recoveries.cancel(), *self._sick.cancel()]
            for open_link in list(self._links):
                open_link.close()
            # The locks are released, so that another controller acts, only when no task of this one acts.
            try:
                await asyncio.wait(ending, timeout=STEP_DOWN_S)
            finally:
                self.journal.close()
                for lock in self._locks:
                    lock.close()

    # ---- connections -----------------------------------------------------------------------------------

    def _admit(self, greeting: Greeting) -> str:
        hello = greeting.hello
        if hello.cluster != self.settings.cluster_name:
            return (
                f"this is the controller of cluster {self.settings.cluster_name}: the caller's cluster_name differs"
            )
        if hello.purpose == "control":
            if self._open["stranger", greeting.uid] >= MAX_STRANGERS_PER_UID:
                return "too many connections that have not registered"
            return "too many agents" if self._open["control", greeting.uid] >= MAX_AGENTS_PER_UID else ""
        if hello.purpose == "query":
            return "too many questions at once" if self._open["query", greeting.uid] >= MAX_QUERIES_PER_UID else ""
        if hello.purpose == controller.HEALTH:
            return "only root reports a node's health" if greeting.uid else ""
        return f"the controller serves only control, query and {controller.HEALTH}"

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _enable_keepalive(writer.transport.get_extra_info("socket"))
        address = str((writer.get_extra_info("peername") or ("",))[0])
        ticket = self._preauth_limit.enter(address, writer.transport.abort)
        try:
            link = await accept(
                reader, writer, self._admit, host=self._host, read_restart=lambda: 0, instance=self._instance
            )
        except HandshakeError as exc:
            if self._turned_away.take_tokens():
                log.info("event=turned-away reason=%r others=%d", str(exc)[:200], self._turned_away.take_missed())
            return
        finally:
            self._preauth_limit.leave(address, ticket)
        uid, purpose = link.session.peer_uid, link.session.purpose
        BEHALF.set(uid)
        self._open[purpose, uid] += 1
        self._links.add(link)
        try:
            if purpose == "control":
                await self._serve_agent(link)
            elif purpose == controller.HEALTH:
                await self._judge_red_node(link)
            else:
                await self._queries.serve_client(link)
        except (LinkClosed, TimeoutError, FrameError):
            pass
        except Exception:
            log.exception("a connection of uid %d failed", uid)
        finally:
            self._open[purpose, uid] -= 1
            self._links.discard(link)
            link.close()

    # ---- agents ----------------------------------------------------------------------------------------

    async def read_job(self, raw_id: int, must_be_fresh: bool = False) -> Job:
        """Return a job from Slurm. A thousand agents of one job cost one call.

        Raises:
            SlurmError: Slurm did not answer.
        """
        asked = clock.monotonic()
        known = self._reads.get(raw_id)
        while must_be_fresh and known is not None and known[0] < asked:
            # A thousand agents of one job, or one agent that asks endlessly, still cost one call.
            if (age_s := clock.monotonic() - known[0]) >= FRESH_JOB_S:
                known = None
            else:
                await asyncio.sleep(FRESH_JOB_S - age_s)
                known = self._reads.get(raw_id)
        if known is None or clock.monotonic() - known[0] > JOB_CACHE_S:
            future = asyncio.ensure_future(self.slurm.read_job(raw_id))
            future.add_done_callback(_retrieve_exception)
            known = self._reads[raw_id] = (clock.monotonic(), future)
            self._reads = {k: v for k, v in self._reads.items() if clock.monotonic() - v[0] < 10 * JOB_CACHE_S}
        return await asyncio.shield(known[1])

    async def _serve_agent(self, link: Link) -> None:
        uid = link.session.peer_uid
        self._open["stranger", uid] += 1
        link.limit_bytes = EARLY_FRAME_BYTES
        try:
            early: list[inspect_schema.EventRecord] = []
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                # An agent that is not attached yet may have events to send before it can register.
                while not isinstance(first := await link.receive(), controller.Registration):
                    if isinstance(first, controller.EventsUp):
                        room = first.events[: EARLY_EVENTS - len(early)]
                        early += [sanitize_event(e, link.session.peer_host[:255]) for e in room]
            if first.job != link.session.job:
                return
            agent = await self._register(link, first)
        finally:
            self._open["stranger", uid] -= 1
        if agent is None:
            return
        link.limit_bytes = AGENT_FRAME_BYTES
        rate = RateLimit(MESSAGES_PER_S, MESSAGES_BURST)
        try:
            if early:
                await self._process_message(agent, controller.EventsUp(agent.job, tuple(early)))
            while True:
                message = await link.receive()
                if not rate.take_tokens():
                    self._log_for_user(
                        uid, "job=%d host=%s event=cut-off reason=too-many-messages", agent.job, agent.host
                    )
                    return
                await self._process_message(agent, message)
        finally:
            track = self.registry.jobs.get(agent.job)
            if track is not None and track.agents.get(agent.host) is agent:
                self._log_for_user(uid, "job=%d event=agent-gone host=%s", agent.job, agent.host)

    def _log_for_user(self, uid: int, line: str, *values: object) -> None:
        """Log a line that this user has caused. The lines count against the user's budget."""
        if self._lines.take_tokens(uid):
            log.info(line, *values)

    async def _register(self, link: Link, message: controller.Registration) -> ConnectedAgent | None:
        """Return the agent's entry if, by Slurm, the job belongs to its uid; None if it is refused or released."""
        uid, raw_id = link.session.peer_uid, message.job
        while True:
            try:
                job = await self.read_job(raw_id)
                if message.restart > job.restarts or (not job.nodes and message.restart == job.restarts):
                    job = await self.read_job(raw_id, must_be_fresh=True)
                break
            except UnknownJob:
                # The job is over and forgotten; an agent that holds memory for it may free it.
                if raw_id not in self.registry.jobs:
                    self._log_for_user(uid, "job=%d event=release host=%s reason=unknown", raw_id, message.host[:64])
                    link.send(controller.Release(raw_id, "job unknown to Slurm", save=True))
                    await asyncio.sleep(GOODBYE_S)
                return None
            except SlurmError as exc:
                self._log_for_user(uid, "job=%d event=register-waits slurm=%s", raw_id, exc)
                if link.closed:
                    return None
                await asyncio.sleep(1.0)
        if job.user_id != uid or message.host != link.session.peer_host:
            self._log_for_user(uid, "job=%d uid=%d event=refused host=%s", raw_id, uid, message.host[:64])
            return None
        track = self.registry.track_job(job)
        self.logs.claim_log(raw_id, uid)
        await track.remember_nodes(self.slurm)
        verified = await self._is_node_of(track, message.host, link.address)
        if track.stored.allocations:
            known = message.host in track.list_hosts()
        else:  # Slurm has never named its nodes to us: accept only an agent that connects from the node that it names
            known = verified and len(track.agents) < MAX_UNPLACED
        if not known:
            self._log_for_user(
                uid, "job=%d event=refused host=%s reason=not-in-allocation", raw_id, message.host[:64]
            )
            return None
        agent = ConnectedAgent(link, message.host, raw_id, message.instance[:64], verified)
        agent.apply_registration(message)
        old = track.agents.get(agent.host)
        track.agents[agent.host] = agent
        if old is not None and old.link is not link:
            old.link.close()
        self._log_for_user(uid, "job=%d restart=%d event=registered host=%s", raw_id, agent.restart, agent.host)
        if self.settings.mode == CANARY and not self.recoveries.gate.explain_job_refusal(job):
            link.send(controller.MayAct(raw_id))
        notices = [f"{why}: the loss of a node ends the job"] if (why := explain_no_requeue(job)) else []
        if 0 < agent.restart == job.restarts:
            notices.append(track.describe_freed(agent.restart - 1, lambda: self.logs.read_events(raw_id, uid)))
        if text := "; ".join(filter(None, notices)):
            link.send(controller.Notice(raw_id, text))
        return agent

    async def _is_node_of(self, track: Track, host: str, address: str) -> bool:
        """Return whether packets from `address` come from this node of a job."""
        name = track.stored.addresses.get(host)
        if name is None and track.stored.allocations:
            return False
        return await self._is_there(host, address, name)

    async def _is_there(self, host: str, address: str, name: str | None = None) -> bool:
        """Return whether packets from `address` come from this node.

        `name` is the node's address; with None, Slurm's address for it is used.
        """
        try:
            async with asyncio.timeout(RESOLVE_S):
                if name is None:
                    name = (await self.slurm.read_nodes([host]))[host].address
                if not name:
                    return False
                found = await asyncio.get_running_loop().getaddrinfo(await resolve_in_thread(name), None)
        except (SlurmError, KeyError, OSError, ValueError):
            return False
        return address in {str(entry[4][0]) for entry in found}

    # ---- root's report of a node -----------------------------------------------------------------------

    async def _judge_red_node(self, link: Link) -> None:
        """Judge root's report of a red node, and answer with the result."""
        host = link.session.peer_host
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            message = await link.receive()
        if not isinstance(message, controller.RedNode):
            return
        if not await self._is_there(host, link.address):
            log.warning("event=refused host=%s reason=its health is reported from elsewhere", host[:64])
            return
        link.send(controller.Notice(message.job, await self._sick.judge_node(host, message)))

    # ---- agents' messages ------------------------------------------------------------------------------

    async def _process_message(self, agent: ConnectedAgent, message: protocol.AnyMessage) -> None:
        track = self.registry.jobs.get(agent.job)
        if track is None:
            return
        if isinstance(message, controller.Report):
            if message.job == agent.job:
                await self._report(agent, track, message)
        elif isinstance(message, controller.HoldersAsk):
            if message.job == agent.job:
                agent.link.send(controller.Holders(agent.job, track.find_holders(agent.restart)))
            else:  # the job's predecessor; an unknown job and another user's are answered alike
                other = self.registry.jobs.get(message.job)
                is_same_owner = other is not None and other.user_id == track.user_id
                ports = other.list_ports() if other is not None and is_same_owner else {}
                agent.link.send(controller.Holders(message.job, ports))
        elif isinstance(message, controller.EventsUp):
            if message.job == agent.job:
                events = [sanitize_event(e, agent.host) for e in message.events[:MAX_EVENTS_AT_ONCE]]
                if self._event_bytes.take_tokens(track.user_id, estimate_bytes(events)):
                    self.logs.append_events(agent.job, events)
                else:
                    self._log_for_user(track.user_id, "job=%d event=not-kept events=%d", agent.job, len(events))
        elif isinstance(message, inspect_schema.InspectPart):
            self._queries.accept_part(agent, message)
        elif isinstance(message, controller.Registration) and (message.job, message.host) == (agent.job, agent.host):
            agent.apply_registration(message)
            if message.dead is not None:
                track.witnesses.withdraw_reports(message.restart, agent.host, message.dead)
            if message.restart not in track.stored.allocations:
                with suppress(SlurmError):
                    track.record_job(await self.read_job(agent.job, must_be_fresh=True))
                    await track.remember_nodes(self.slurm)

    async def _report(self, agent: ConnectedAgent, track: Track, message: controller.Report) -> None:
        """Accept a report as a hint, up to a limit for each user. Agents repeat reports that matter."""
        uid = track.user_id
        if not self._reports.take_tokens(uid):
            return
        if not track.list_members(message.restart):
            with suppress(SlurmError):
                track.record_job(await self.read_job(agent.job))
        members = track.list_members(message.restart)
        if message.host not in members or agent.host not in members or message.host == agent.host:
            text = "job=%d reporter=%s host=%s event=report-ignored reason=not plausible"
            self._log_for_user(uid, text, agent.job, agent.host, message.host[:64])
            return
        if not self.recoveries.is_active(agent.job):
            judged = sum(self.recoveries.is_active(t.raw_id) for t in self.registry.jobs.values() if t.user_id == uid)
            if judged >= MAX_JUDGED_PER_UID:
                self._log_for_user(
                    uid, "job=%d event=report-ignored reason=%d jobs of uid %d", agent.job, judged, uid
                )
                return
        self.recoveries.accept_report(track, agent.host, message)


def _retrieve_exception(read: asyncio.Future[Job]) -> None:
    """Retrieve the exception of a failed read: the agents that asked for it may be gone."""
    if not read.cancelled():
        read.exception()


def _enable_keepalive(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


def find_own_name(settings: Settings) -> str:
    """Return the name in `controller_host` under which agents connect to this host."""
    hosts = settings.list_controller_hosts()
    return next((h for h in hosts if is_here(h, "")), hosts[0] if hosts else socket.gethostname())
