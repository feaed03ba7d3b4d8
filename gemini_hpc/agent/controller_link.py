"""The agent's optional connection to the controller: registration, reports of silent peers, events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from gemini_hpc import clock
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.config import ConfigError
from gemini_hpc.lines import replace_unprintable
from gemini_hpc.wire import controller, inspect_schema, peer, protocol
from gemini_hpc.wire.handshake import HandshakeClient, HandshakeError
from gemini_hpc.wire.link import Link, LinkClosed, connect

# a controller that starts again is found at once; one that stays away is dialled every 5 s
_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_BACKLOG = 500
# seconds for which a dead node that the job goes on without is reported, so that it is fenced all the same
_LOST_S = 15.0
_REPEAT_S = 2.0  # the controller needs reports of several beats; each costs a message for each dead node
_LOOK_S = 0.02  # pause of a poll: short beside a round trip to the controller
_SILENT_S = 5.0  # a controller answers within milliseconds: it hangs, or is cut off
_LAST_WORD_S = 1.0  # the last message arrives within a round trip; a job's end waits no longer for it
_NOTICE_CHARS = 300
_LASTED_S = 20.0  # a connection of this length was no mere refusal


class Listener(Protocol):
    """The agent, as far as the controller's messages concern it."""

    def inspect(self, request: int) -> inspect_schema.InspectPart:
        """Return this node's view of the job."""

    def on_ending(self, left_s: int | None) -> None:
        """Note that Slurm ends the job in so many seconds. None means that no time is set."""

    def on_draining(self, hosts: Sequence[str], partition: str) -> None:
        """Note that these nodes, or the partition, are being drained."""

    def on_job_pending(self) -> None:
        """Note that the job is pending."""

    @property
    def rescuing(self) -> bool:
        """Return whether live state is being copied whose other copies all were on dead nodes."""

    @property
    def finished(self) -> bool | None:
        """Return whether all ranks that train here have closed their checkpointers; None if none has trained."""

    def should_report_deaths(self, now: float) -> bool:
        """Return whether a death may still be news for the controller.

        A death is news while the job runs here, or has just ended here and is not pending again. The job's script may
        have ended before a controller could act, and a new controller knows of no death.
        """

    async def release_on_word(self, reason: str, *, save: bool = False) -> None:
        """End this incarnation on the controller's order.

        Args:
            reason: Reason for the log.
            save: The job is over, too: save all unsaved versions first.
        """


class ControllerLink:
    """A link that dials the controller for as long as the agent lives. Without a controller only speed is lost."""

    def __init__(self, context: AgentContext, listener: Listener) -> None:
        self._identity, self._membership, self._listener = context.identity, context.membership, listener
        self._log, self._spawn = context.log, context.spawn
        self.notice = ""  # the controller's notice for users
        self.may_act = False  # the job is in a partition of the canary
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._reported = 0.0
        self._reported_silent: set[str] = set()  # peers reported in this incarnation
        self._without: tuple[str, ...] = ()  # as last registered
        self._finished: bool | None = None  # as last registered
        self._died: set[str] = set()  # peers ever reported
        self._silent_since: dict[str, float] = {}  # Unix times at which peers were found silent that still are
        # nodes that the job goes on without; those of them that are reported, and until when (monotonic)
        self._lost: tuple[tuple[str, ...], tuple[str, ...], float] = ((), (), 0.0)
        self.refused_at = 0.0  # when the last unsuccessful round of calls began (monotonic)
        self._controller_uid = 0
        self._holders: dict[int, asyncio.Future[dict[str, int]]] = {}  # by job
        self._backlog: deque[inspect_schema.EventRecord] = deque(maxlen=_BACKLOG)

    @property
    def connected(self) -> bool:
        """Return whether a controller is connected."""
        return self._link is not None and not self._link.closed

    @property
    def configured(self) -> bool:
        """Return whether this site has a controller that can be dialled."""
        return self._task is not None

    def start(self) -> None:
        """Begin to dial, if there is a controller."""
        settings = self._identity.settings
        if not settings.list_controller_hosts():
            return
        try:
            self._controller_uid = settings.find_slurm_uid()
        except ConfigError as exc:
            self._log("error", detail=f"no controller is used, so only Slurm detects a lost node: {exc}")
            return
        self._task = self._spawn(self._run())

    async def hang_up(self) -> None:
        """Close the connection when the controller has read all messages, or after a short wait.

        The last message of an agent is that it frees its memory.
        """
        link = self._link
        if link is not None and not link.closed:
            link.finish(peer.Ping())
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    while self._link is link:
                        await asyncio.sleep(_LOOK_S)
        if self._task is not None:
            self._task.cancel()
        if self._link is not None:
            self._link.close()

    def register(self) -> None:
        """Report the incarnation that this agent is in, and its dead peers."""
        identity, incarnation = self._identity, self._membership.incarnation
        self._reported_silent.clear()
        self._without = incarnation.attach.lost if incarnation is not None and incarnation.live else ()
        self._finished = self._listener.finished
        if self._link is not None and incarnation is not None:
            self._link.send(
                controller.Registration(
                    job=identity.job,
                    restart=incarnation.restart,
                    host=identity.node,
                    hosts=incarnation.hosts,
                    replicas=self._membership.replicas,
                    port=identity.port,
                    instance=identity.instance,
                    state="detached" if self._membership.detached else "attached",
                    dead=tuple(sorted(incarnation.mesh.dead | incarnation.view.lost)),
                    spares=incarnation.view.spares,
                    without=self._without,
                    rescuing=self._listener.rescuing,
                    finished=self._finished,
                    parity=self._membership.redundancy.parity,
                )
            )

    def send_event(self, event: inspect_schema.EventRecord) -> None:
        """Send an event to the controller, now or once a connection exists."""
        self._backlog.append(event)
        self._flush()

    def _flush(self) -> None:
        if self._link is not None and self._backlog:
            self._link.send(controller.EventsUp(self._identity.job, tuple(self._backlog)))
            self._backlog.clear()

    def report_death(self, host: str, witnesses: tuple[str, ...]) -> None:
        """Report that a peer is silent."""
        if self._link is not None:
            job, restart = self._identity.job, self._membership.restart
            self._reported_silent.add(host)
            self._died.add(host)
            since = self._silent_since.get(host, clock.time())
            self._link.send(controller.Report(job, restart, host, witnesses, since))

    async def find_holders(self, timeout_s: float, job: int = 0) -> dict[str, int]:
        """Return the hosts, with ports, of agents of a job, as far as the controller knows.

        The agents are or have been there. Port 0 means any of the job's ports.

        The result is empty without a controller. A new agent asks before its connection is up. A controller that is
        being restarted is worth the wait: a host that it does not name is lost.

        Args:
            timeout_s: Longest wait in seconds.
            job: Another job of the same owner; 0 means this job.
        """
        asked: Link | None = None
        job = job or self._identity.job
        answer = self._holders[job] = asyncio.get_running_loop().create_future()
        deadline = clock.monotonic() + timeout_s
        while self.configured and not answer.done() and clock.monotonic() < deadline:
            if self._link is not None and self._link is not asked:
                asked = self._link
                asked.send(controller.HoldersAsk(job))
            await asyncio.sleep(_LOOK_S)
        self._holders.pop(job, None)
        return answer.result() if answer.done() else {}

    def beat(self, now: float) -> None:
        """Send a sign of life, and report peers that are still silent or are back. Called a few times a second."""
        incarnation = self._membership.incarnation
        if incarnation is not None:  # whether or not a controller is there to hear of it
            silent = incarnation.mesh.dead | incarnation.view.lost
            self._silent_since = {host: self._silent_since.get(host, clock.time()) for host in silent}
        if self._link is None:
            return
        self._link.send(peer.Ping())
        if incarnation is not None:
            without = incarnation.attach.lost if incarnation.live else ()
            is_reported = (without, self._listener.finished) == (self._without, self._finished)
            if self._reported_silent - incarnation.mesh.dead - incarnation.view.lost or not is_reported:
                self.register()
            if incarnation.attach.lost != self._lost[0]:
                # the other nodes were left on purpose
                died = tuple(host for host in incarnation.attach.lost if host in self._died)
                self._lost = (incarnation.attach.lost, died, now + _LOST_S)
        due = now - self._reported > _REPEAT_S
        if incarnation is not None and due and self._listener.should_report_deaths(now):
            self._reported = now
            _, lost, until = self._lost
            for host in incarnation.mesh.dead.union(lost if now < until else ()):
                self.report_death(host, (self._identity.node,))

    async def _run(self) -> None:
        tries, hosts = 0, self._identity.settings.list_controller_hosts()
        while True:
            began, answered = clock.monotonic(), False
            for host in hosts:
                dialled = clock.monotonic()
                with suppress(OSError, TimeoutError, HandshakeError, LinkClosed):
                    link = await self._dial(host)
                    answered = True
                    await self._serve(link)
                if answered and clock.monotonic() - dialled > _LASTED_S:
                    tries = 0
                self._link = None
            if not answered:
                self.refused_at = began
            await asyncio.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
            tries += 1

    async def _dial(self, host: str) -> Link:
        identity, uid = self._identity, self._controller_uid
        caller = identity.build_caller(self._membership.restart)
        client = HandshakeClient(caller, purpose="control", job=identity.job, target=host, server_uid=uid)
        return await connect(host, identity.settings.controller_port, client)

    async def _serve(self, link: Link) -> None:
        link.fail_after(_SILENT_S)
        self._link = link
        try:
            self.register()
            self._flush()
            self._reported = 0.0
            while True:
                message = await link.receive()
                if isinstance(message, inspect_schema.InspectAsk):
                    link.send(self._listener.inspect(message.request))
                else:
                    await self._on_message(message)
        finally:
            self._link = None
            link.close()

    async def _on_message(self, message: protocol.AnyMessage) -> None:
        if isinstance(message, controller.Holders):
            waiting = self._holders.get(message.job)
            if waiting is not None and not waiting.done():
                waiting.set_result(message.ports)
            return
        if getattr(message, "job", None) != self._identity.job:
            return
        if isinstance(message, controller.Notice):
            self.notice = replace_unprintable(message.text[:_NOTICE_CHARS])
        elif isinstance(message, controller.Ending):
            self._listener.on_ending(message.left_s)
        elif isinstance(message, controller.Draining):
            self._listener.on_draining(message.hosts, message.partition)
        elif isinstance(message, controller.Waits):
            self._listener.on_job_pending()
        elif isinstance(message, controller.MayAct):
            self.may_act = True
        elif isinstance(message, controller.Release):
            await self._listener.release_on_word(f"controller: {message.reason}", save=message.save)
