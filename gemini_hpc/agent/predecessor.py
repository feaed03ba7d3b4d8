"""The job that this one continues (`--gemini-after`): its agents provide copies, and learn when to free them.

An agent whose job has ended serves another job of the same owner (MUNGE vouches for the uid) while it keeps its
memory at all. No job ever writes to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from gemini_hpc import clock
from gemini_hpc.agent import handover
from gemini_hpc.agent.outside_inventory import HolderSource, request_inventory
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.round_plan import PredecessorState
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.core import recovery_plan
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer
from gemini_hpc.wire.handshake import HandshakeClient, HandshakeError
from gemini_hpc.wire.link import Link, LinkClosed, connect_any
from gemini_hpc.wire.ports import list_candidates

# Part of the prolog's whole wait. The predecessor's epilogs may not have run everywhere when this job begins.
ASK_PART, MAX_ASK_S = 0.3, 3.0
# dial as for other nodes of the job; its epilog may need a moment until the agent is free
DIAL_S, AGAIN_S = 1.0, 0.2
MAX_HOSTS = 1024
_AT_ONCE = 64
_SHOWN = 3
_TELL_S = (0.0, 1.0, 5.0)  # pauses before the attempts; an agent that misses all of them frees its memory by itself
STILL_RUNS = "still runs"


class Predecessor:
    """The predecessor as one agent sees it. Only the coordinator asks its agents and reports to them."""

    def __init__(self, context: AgentContext, controller: HolderSource) -> None:
        self._identity, self._membership, self._spawn = context.identity, context.membership, context.spawn
        self._controller = controller
        self._unreported: peer.Takeover | None = None  # takeover whose agents do not know so yet
        self._gate = asyncio.Semaphore(_AT_ONCE)

    @property
    def job(self) -> int:
        """Return the predecessor's job id, 0 if there is none."""
        incarnation = self._membership.incarnation
        return incarnation.attach.after if incarnation is not None else 0

    def build_client(self, host: str, purpose: str, job: int) -> HandshakeClient:
        """Return the calling side of a handshake with the predecessor's agent on a host."""
        identity = self._identity
        caller = identity.build_caller(self._membership.restart)
        return HandshakeClient(
            caller, purpose=purpose, job=job, target=host, server_uid=identity.uid, successor=identity.job
        )

    async def request_handover(self, job: int, copy: Copy, stamp: Stamp) -> Memfd | None:
        """Return the memory of a copy from the predecessor's agent on this node. Its bytes are not checked.

        Return None if the agent does not give it away.
        """
        identity = self._identity
        path = f"{identity.settings.run_dir}/{job}/agent.sock"
        with suppress(OSError, ValueError):
            return await asyncio.to_thread(handover.request_memory, path, identity.uid, copy, stamp, identity.job)
        return None

    # ---- asking ----------------------------------------------------------------------------------------

    async def gather_state(self) -> PredecessorState:
        """Return the copies of the predecessor's agents, and the reason for missing ones.

        The agents are on this job's nodes, and on nodes named by the controller or by one of these agents.
        """
        job, settings = self.job, self._identity.settings
        if job == self._identity.job:
            return PredecessorState(
                job, why="a job cannot go on from itself: name an earlier one with --gemini-after"
            )
        within_s = min(MAX_ASK_S, ASK_PART * settings.attach_timeout_s)
        deadline = clock.monotonic() + within_s
        own_hosts = self._membership.hosts[:MAX_HOSTS]
        named, first = await asyncio.gather(
            self._controller.find_holders(within_s, job), self._ask_agents(job, dict.fromkeys(own_hosts, 0), deadline)
        )
        more = {host: named.get(host, 0) for record in first[0] for host in sorted(record.noderanks or {})}
        more = {host: port for host, port in {**named, **more}.items() if host not in own_hosts}
        second = await self._ask_agents(job, dict(list(more.items())[:MAX_HOSTS]), deadline)
        records, failures = (*first[0], *second[0]), first[1] | second[1]
        return PredecessorState(
            job,
            records,
            why="" if any(r.copies for r in records) else _explain_missing(job, [*own_hosts, *more], failures),
        )

    async def _ask_agents(
        self, job: int, ports: dict[str, int], deadline: float
    ) -> tuple[tuple[peer.InventoryRecord, ...], dict[str, str]]:
        found = await asyncio.gather(*(self._ask_agent(job, host, port, deadline) for host, port in ports.items()))
        records = tuple(f for f in found if not isinstance(f, str))
        return records, {h: f for h, f in zip(ports, found, strict=True) if isinstance(f, str) and f}

    async def _ask_agent(self, job: int, host: str, port: int, deadline: float) -> peer.InventoryRecord | str:
        """Return an agent's inventory, or the reason for its absence. The reason is "" if no agent is there."""
        while True:
            try:
                async with self._gate:
                    link = await self._dial(job, host, port, "inventory")
                    return await request_inventory(link, host) or "its answer is not a list of its copies"
            except (HandshakeError, LinkClosed, TimeoutError) as exc:
                if STILL_RUNS not in str(exc) or clock.monotonic() > deadline:
                    return str(exc).removeprefix("refused: ") or "no answer"
            except OSError:
                return ""
            await asyncio.sleep(AGAIN_S)

    async def _dial(self, job: int, host: str, port: int, purpose: str) -> Link:
        settings = self._identity.settings
        ports = [port] if port else list_candidates(settings, job)
        address = settings.format_address(host)
        link, _ = await connect_any(address, ports, lambda: self.build_client(host, purpose, job), DIAL_S, wordy=True)
        return link

    # ---- telling ---------------------------------------------------------------------------------------

    def note_plan(self, plan: peer.PlanDown) -> None:
        """Note a plan that this agent has taken."""
        if plan.takeover is not None:
            self._unreported = plan.takeover if plan.takeover.stamps else None

    def release_after_seal(self, trainings: Iterable[Training]) -> None:
        """Release the predecessor's memory if the last seal has made it needless.

        The memory is needless once all that was taken over is sealed, and a newer version of this job as well. (A job
        that ends before that leaves it to the next job.)
        """
        unreported, incarnation = self._unreported, self._membership.incarnation
        if unreported is None or incarnation is None or not incarnation.leads:
            return
        sealed = {t.name: t.sealing.decision.sealed for t in trainings if t.sealing is not None}
        taken = {name: recovery_plan.inherit_stamp(stamp) for name, stamp in unreported.stamps.items()}
        words = {name: word for name in taken if (word := sealed.get(name)) is not None and word >= taken[name]}
        if words.keys() != taken.keys() or words == taken:
            return
        self._unreported = None
        for host, port in unreported.ports.items():
            self._spawn(self._report_taken(unreported.job, host, port))

    async def _report_taken(self, job: int, host: str, port: int) -> None:
        """Report to the predecessor's agent that its memory is no longer needed.

        An agent that misses this report frees its memory by itself after a while.
        """
        for wait_s in _TELL_S:
            await asyncio.sleep(wait_s)
            with suppress(OSError, HandshakeError, LinkClosed, TimeoutError):
                async with self._gate:
                    link = await self._dial(job, host, port, "taken")
                await link.flush(peer.TakenOver())
                link.close()
                return


def _explain_missing(job: int, hosts: list[str], failures: dict[str, str]) -> str:
    shown = ", ".join(f"{host}: {why}" for host, why in list(failures.items())[:_SHOWN])
    where = ", ".join(hosts[:_SHOWN]) + (f" and {len(hosts) - _SHOWN} more nodes" if len(hosts) > _SHOWN else "")
    return shown or f"no agent on {where} keeps copies of a job {job} of yours"
