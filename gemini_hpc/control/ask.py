"""The asking side of `inspect`: the controller, or, where none answers, the agents themselves."""

from __future__ import annotations

import asyncio
import os
import pwd
import secrets
import socket

from gemini_hpc.config import Settings
from gemini_hpc.operators import Operators
from gemini_hpc.wire import peer
from gemini_hpc.wire.handshake import Client, HandshakeError
from gemini_hpc.wire.link import BlockingLink, LinkClosed, connect_any

CONTROLLER_TIMEOUT_S = 2.0
AGENT_TIMEOUT_S = 1.0
PARALLEL = 64


class AskError(Exception):
    """One line for the user."""


class NoControllerError(Exception):
    """Nobody answers at the controller's address."""


def _client(settings: Settings, job: int, target: str, server_uid: int) -> Client:
    return Client(
        purpose="query",
        cluster=settings.cluster_name,
        job=job,
        restart=0,
        source=socket.gethostname(),
        target=target,
        instance=secrets.token_hex(8),
        server_uid=server_uid,
    )


class ControllerLine:
    """A connection to the controller that can be asked again and again (`--watch`)."""

    def __init__(self, settings: Settings, job: int) -> None:
        """Raises `NoControllerError` where there is none, `AskError` where it turns us away."""
        hosts = settings.controller_hosts()
        if not hosts:
            raise NoControllerError("no controller_host in the settings")
        try:
            uid = pwd.getpwnam(settings.slurm_user).pw_uid
        except KeyError:
            raise AskError(f"slurm_user {settings.slurm_user!r} of the settings is not a user of this host") from None
        failed = []
        for host in hosts:
            client = _client(settings, job, host, uid)
            where = f"{host}:{settings.controller_port}"
            try:
                self._link = BlockingLink.connect(host, settings.controller_port, client, CONTROLLER_TIMEOUT_S)
                return
            except OSError as exc:
                failed.append(f"{where}: {exc.strerror or exc}")
            except HandshakeError as exc:
                raise AskError(f"controller {where}: {exc}") from None
        raise NoControllerError("; ".join(failed))

    def ask(self, job: int) -> peer.JobAnswer:
        """Raises `AskError` with the controller's own words, `NoControllerError` if it went away."""
        try:
            self._link.send(peer.JobAsk(job))
            answer = self._link.receive(peer.JobAnswer)
        except (OSError, LinkClosed) as exc:
            raise NoControllerError(str(exc)) from None
        if answer.error:
            raise AskError(answer.error)
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._link.close()


def agents(settings: Settings, raw_id: int) -> peer.JobAnswer:
    """The same answer without a controller: Slurm's node list, and every agent asked at its deterministic ports.

    Raises `AskError`.
    """
    return asyncio.run(_agents(settings, raw_id))


async def _agents(settings: Settings, raw_id: int) -> peer.JobAnswer:
    from gemini_hpc.control.questions import NOT_YOURS, slurm_facts
    from gemini_hpc.control.slurm import Slurm, SlurmError, UnknownJob

    slurm = Slurm()
    try:
        job = await slurm.job(raw_id)
        # A courtesy: the agents ask MUNGE and decide for themselves.
        allowed = Operators(settings.operators, (0, job.user_id, *settings.slurm_uids()))
        if not await allowed.allows(os.geteuid()):
            raise AskError(f"job {raw_id}: {NOT_YOURS}")
        nodes = await slurm.nodes(job.nodes) if job.nodes else {}
    except UnknownJob:
        raise AskError(f"job {raw_id}: {NOT_YOURS}") from None
    except SlurmError as exc:
        raise AskError(f"no controller answers, and Slurm neither: {exc}") from None
    gate = asyncio.Semaphore(PARALLEL)

    async def one(name: str, address: str) -> peer.InspectPart | None:
        async with gate:
            return await _ask_agent(settings, raw_id, job.user_id, name, address)

    answers = await asyncio.gather(*(one(n.name, n.address) for n in nodes.values()))
    parts = tuple(a for a in answers if a is not None)
    missing = tuple(n for n in job.nodes if n not in {p.host for p in parts})
    return peer.JobAnswer(parts=parts, slurm=slurm_facts(job), missing=missing)


async def _ask_agent(settings: Settings, job: int, uid: int, name: str, address: str) -> peer.InspectPart | None:
    from gemini_hpc.agent.ports import candidates

    ports = candidates(settings, job)
    try:
        async with asyncio.timeout(AGENT_TIMEOUT_S):
            link, _ = await connect_any(address, ports, lambda: _client(settings, job, name, uid), AGENT_TIMEOUT_S)
            try:
                link.send(peer.InspectAsk())
                while True:
                    message = await link.receive()
                    if isinstance(message, peer.InspectPart):
                        return message
            finally:
                link.abort()
    except (OSError, HandshakeError, LinkClosed):
        return None
