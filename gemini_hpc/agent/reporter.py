"""The agent's line to the controller: registration, reports of silent peers, events; all optional."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from gemini_hpc import clock
from gemini_hpc.agent.picture import inspect_part
from gemini_hpc.config import ConfigError
from gemini_hpc.wire import controller, peer, picture
from gemini_hpc.wire.handshake import Client, HandshakeError
from gemini_hpc.wire.link import Link, LinkClosed, connect

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent

_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_BACKLOG = 500
_REPEAT_S = 2.0
_LOOK_S = 0.02
_SILENT_S = 5.0
_LAST_WORD_S = 1.0
_NOTICE_CHARS = 300
_LASTED_S = 20.0  # a line that was no mere refusal
_ENDED_S = 180.0  # so long after the job's end here a controller may have to hear of the death that has ended it


class Reporter:
    """Dials the controller for as long as the agent lives; without one, nothing is lost but speed."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._reported = 0.0
        self.refused_at = 0.0  # when the last call that nobody took was begun (monotonic)
        self._controller_uid = 0
        self._holders: asyncio.Future[dict[str, int]] | None = None
        self._backlog: deque[picture.EventRecord] = deque(maxlen=_BACKLOG)

    @property
    def connected(self) -> bool:
        """True while a controller listens."""
        return self._link is not None and not self._link.closed

    @property
    def configured(self) -> bool:
        """True where this site has a controller that can be dialled."""
        return self._task is not None

    def start(self) -> None:
        """Begin to dial, where there is a controller."""
        settings = self._agent.settings
        if not settings.controller_hosts():
            return
        try:
            self._controller_uid = settings.slurm_uid()
        except ConfigError as exc:
            self._agent.log("error", detail=f"no controller: {exc}")
            return
        self._task = self._agent.spawn(self._run())

    def close(self) -> None:
        """Hang up."""
        if self._task is not None:
            self._task.cancel()
        if self._link is not None:
            self._link.close()

    def register(self) -> None:
        """Tell which incarnation this agent is in."""
        agent = self._agent
        if self._link is not None and agent.restart >= 0:
            self._link.send(
                controller.Registration(
                    job=agent.job,
                    restart=agent.restart,
                    host=agent.node,
                    hosts=agent.hosts,
                    replicas=agent.replicas,
                    port=agent.port,
                    instance=agent.instance,
                    state="detached" if agent.detached else "attached",
                )
            )

    def tell(self, event: picture.EventRecord) -> None:
        """Pass an event on, now or when there is a line."""
        self._backlog.append(event)
        self._flush()

    def _flush(self) -> None:
        if self._link is not None and self._backlog:
            self._link.send(controller.EventsUp(self._agent.job, tuple(self._backlog)))
            self._backlog.clear()

    async def told(self) -> None:
        """Wait, for a moment, until what was told has left: the last thing that an agent tells is that it frees its
        memory."""
        link = self._link
        if link is not None and not link.closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await link.flush(peer.Ping())

    def report(self, host: str, witnesses: tuple[str, ...]) -> None:
        """A peer is silent."""
        if self._link is not None:
            agent = self._agent
            self._link.send(controller.Report(agent.job, agent.restart, host, witnesses, clock.time()))

    async def holders(self, timeout_s: float) -> dict[str, int]:
        """Where agents of this job are or have been, as far as the controller knows; port 0: any of the job's.

        Nothing without a controller. A new agent asks before its line is up, and one that is being started anew is
        worth waiting for: what nobody names is lost.
        """
        asked: Link | None = None
        answer = self._holders = asyncio.get_running_loop().create_future()
        deadline = clock.monotonic() + timeout_s
        while self.configured and not answer.done() and clock.monotonic() < deadline:
            if self._link is not None and self._link is not asked:
                asked = self._link
                asked.send(controller.HoldersAsk(self._agent.job))
            await asyncio.sleep(_LOOK_S)
        return answer.result() if answer.done() else {}

    def beat(self) -> None:
        """A sign of life, and again what is still silent; called a few times a second."""
        agent = self._agent
        if self._link is None:
            return
        self._link.send(peer.Ping())
        now = clock.monotonic()
        if agent.mesh is not None and self._matters(now) and now - self._reported > _REPEAT_S:
            self._reported = now
            for host in agent.mesh.dead:
                self.report(host, (agent.node,))

    def _matters(self, now: float) -> bool:
        """Whether a death may still be news: of a job that runs here, or has just ended here and is not pending
        again. Its script may have ended before a controller could act, and a new controller has heard of nothing."""
        agent = self._agent
        return not agent.detached or (not agent.waits and now - agent.detached_at < _ENDED_S)

    async def _run(self) -> None:
        tries, hosts = 0, self._agent.settings.controller_hosts()
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
        agent = self._agent
        settings = agent.settings
        client = Client(
            purpose="control",
            cluster=settings.cluster_name,
            job=agent.job,
            restart=max(agent.restart, 0),
            source=agent.node,
            target=host,
            instance=agent.instance,
            server_uid=self._controller_uid,
        )
        return await connect(host, settings.controller_port, client)

    async def _serve(self, link: Link) -> None:
        agent = self._agent
        link.fail_after(_SILENT_S)
        self._link = link
        try:
            self.register()
            self._flush()
            self._reported = 0.0
            while True:
                message = await link.receive()
                if isinstance(message, picture.InspectAsk):
                    link.send(inspect_part(agent, message.request))
                elif isinstance(message, controller.Holders) and message.job == agent.job:
                    if self._holders is not None and not self._holders.done():
                        self._holders.set_result(message.ports)
                elif isinstance(message, controller.Notice) and message.job == agent.job:
                    agent.notice = "".join(c for c in message.text[:_NOTICE_CHARS] if c.isprintable())
                elif isinstance(message, controller.Ending) and message.job == agent.job:
                    agent.drains.ends_in(message.left_s)
                elif isinstance(message, controller.Draining) and message.job == agent.job:
                    agent.drains.leaving(message.hosts, message.partition)
                elif isinstance(message, controller.Waits) and message.job == agent.job:
                    agent.waits = agent.detached
                elif isinstance(message, controller.Release) and message.job == agent.job:
                    await agent.release_on_word(f"controller: {message.reason}", save=message.save)
        finally:
            self._link = None
            link.close()
