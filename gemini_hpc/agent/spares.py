"""Replacement of dead nodes, and of nodes that the job should leave, by spares (`core.views`).

Two decisions are made elsewhere: which nodes are dead (`peers.failure_detector`), and which version the new view
resumes from (`peers.recovery_round`).

A job leaves a drained or evacuated node at the next seal, and a sick node at once. With one replica it leaves none,
because a sealed shard there has no other copy. Before that seal the root sends `HoldDown`, the way of decisions. A
rank that sees the seal thus finds `held` on its control page, and neither makes another step nor repeats one. `held`
is an epoch, because ranks of the next attempt have a later one.

Each agent that changes its view begins the next attempt of all steps. Launchers start it when the view is live.
An agent that learns of its own loss ends its ranks and holds its memory until the job ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

import msgspec

from gemini_hpc import clock
from gemini_hpc.agent.launches import Launches
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.core.views import View
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.evacuate import NO_PART, EvacuateAsk, Evacuated
from gemini_hpc.wire.link import Link

_TOGETHER_S = 0.05  # reports of simultaneous deaths arrive within this time
_SEAL_S = 5.0  # seconds: a node is left at the next seal, or after this time
_HOLD_S = _SEAL_S + 1.0  # longest wait of ranks for that
_ASK_S = 5.0  # an admitted caller sends its request at once
_SUSPECTS_S = 4.0  # longer than a suspected node needs to be proved dead or alive
_STEADY_S = 3.0  # seconds without a node's return or death that count as steady
_BACK_S = 10.0  # seconds to wait for nodes without which sealed state is lost: they may only be cut off


class Spares:
    """An agent's part in replacing nodes by spares."""

    def __init__(
        self,
        context: AgentContext,
        launches: Launches,
        enter_view: Callable[[local.Attach, View], object],
        end_local_work: Callable[[], None],
        *,
        wait_until_ready: Callable[[], Awaitable[None]],
        would_lose_state: Callable[[Collection[str]], bool],
        hold_ranks: Callable[[int], None],
    ) -> None:
        """Create this agent's part.

        Args:
            context: The agent's context.
            launches: Restarts the ranks of steps.
            enter_view: Begins another view.
            end_local_work: Ends all that runs here, because the job goes on without this node.
            wait_until_ready: Returns when all that must precede another view is over.
            would_lose_state: Returns whether some sealed state could not be recovered without these nodes.
            hold_ranks: Makes ranks here, up to this epoch, stop at the next sealed version; 0 lets all go on.
        """
        self._node, self._membership = context.node, context.membership
        self._log, self._spawn = context.log, context.spawn
        self._launches, self._enter_view, self._end_local_work, self._wait_until_ready = (
            launches,
            enter_view,
            end_local_work,
            wait_until_ready,
        )
        self._would_lose_state, self._hold_ranks = would_lose_state, hold_ranks
        self._moving: set[str] = set()
        self._waits: Incarnation | None = None  # in which nodes are waited for
        self._holds: Incarnation | None = None  # whose ranks are held

    # ---- nodes that die --------------------------------------------------------------------------------

    def on_death(self) -> None:
        """Replace the dead nodes by spares."""
        if self._membership.incarnation is not None and self._membership.incarnation.view.spares:
            self._spawn(self._replace_dead())

    async def _replace_dead(self) -> None:
        """Replace the dead nodes a moment later.

        By then the reports of a death have been sent, and simultaneous deaths are known.
        """
        await asyncio.sleep(_TOGETHER_S)
        await self._wait_until_ready()
        incarnation = self._membership.incarnation
        # the earlier call goes on later, without all dead nodes
        if incarnation is None or self._waits is incarnation:
            return
        await self._wait_for_suspects(incarnation)
        if self._would_lose_state(incarnation.mesh.dead):
            self._waits = incarnation
            try:
                await self._wait_for_the_last(incarnation)
            finally:
                if self._waits is incarnation:
                    self._waits = None
        if self._membership.incarnation is incarnation:
            self._leave_nodes(incarnation.mesh.dead, "lost")

    async def _wait_for_suspects(self, incarnation: Incarnation) -> None:
        """Wait, for a bounded time, until the suspected nodes are known to be dead or alive.

        If the job could not go on without the suspects as well, this node may itself be cut off. A node that is cut
        off loses sight of the others one by one.
        """
        deadline = clock.monotonic() + _SUSPECTS_S
        while self._membership.incarnation is incarnation and clock.monotonic() < deadline:
            mesh = incarnation.mesh
            if (
                self._build_view_without(mesh.dead) is None
                or self._build_view_without(mesh.dead | mesh.list_silent()) is not None
            ):
                return
            await asyncio.sleep(_TOGETHER_S)

    async def _wait_for_the_last(self, incarnation: Incarnation) -> None:
        """Wait, for a bounded time, for nodes that alone hold sealed state.

        A silent node may only be cut off, and going on without it cannot be undone. Nodes that were cut off together
        do not come back at the same instant.
        """
        known = set(incarnation.mesh.dead)
        names = ", ".join(sorted(known))[:300]
        self._log(
            "waits", detail=f"{names} alone hold the newest state and may come back: waiting up to {_BACK_S:g} s"
        )
        began = changed = clock.monotonic()
        while known and self._membership.incarnation is incarnation:
            await asyncio.sleep(_TOGETHER_S)
            now, dead = clock.monotonic(), set(incarnation.mesh.dead)
            if dead != known:
                known, changed = dead, now
            if now - began > _BACK_S or (now - changed > _STEADY_S and not self._would_lose_state(dead)):
                return

    def on_nodes_lost(self, lost: tuple[str, ...]) -> None:
        """Follow a peer of this incarnation that goes on without these nodes."""
        if self._node not in lost:
            self._spawn(self._follow_others(lost))
        elif not self._membership.detached:
            self._log("left_out", detail="the job goes on without this node: ending the ranks that still run here")
            self._launches.note_left_out()
            self._end_local_work()

    async def _follow_others(self, lost: tuple[str, ...]) -> None:
        await self._wait_until_ready()
        self._leave_nodes(lost, "gone")

    def _build_view_without(self, nodes: Iterable[str]) -> View | None:
        membership = self._membership
        if membership.detached or membership.incarnation is None:
            return None
        return membership.incarnation.view.exclude(nodes, membership.nodes)

    def _leave_nodes(self, nodes: Iterable[str], why: str) -> None:
        incarnation, view = self._membership.incarnation, self._build_view_without(nodes)
        if incarnation is None or view is None or self._node in view.lost:
            return
        gone = sorted(view.lost - incarnation.view.lost)
        self._log("without", detail=f"{', '.join(gone)[:300]} {why}: a spare takes over")
        self._moving -= view.lost
        self._enter_view(msgspec.structs.replace(incarnation.attach, lost=tuple(sorted(view.lost))), view)
        self._launches.record_loss(gone, why)

    # ---- nodes that the job is to leave ----------------------------------------------------------------

    def move(self, hosts: Sequence[str]) -> str:
        """Leave these nodes right after the next seal, so that no step is repeated. Return why not, or ""."""
        wanted = set(hosts).intersection(self._membership.hosts)
        if reason := self._explain_refusal(hosts):
            return reason
        if not wanted <= self._moving:
            self._moving |= wanted
            self._log("moving", detail=f"moving off {', '.join(sorted(wanted))[:300]} at the next sealed version")
            incarnation = self._membership.incarnation
            assert incarnation is not None  # otherwise the nodes cannot be left
            self._spawn(self._leave_without_seal(frozenset(wanted), incarnation.restart))
            self._ask_to_hold(incarnation)
        return ""

    def leave(self, host: str, why: str) -> str:
        """Leave this node now, because a rank there has just failed. Return why not, or ""."""
        reason = self._explain_refusal([host])
        if not reason:
            self._leave_nodes([host], why)
        return reason

    def _explain_refusal(self, hosts: Sequence[str]) -> str:
        membership = self._membership
        if membership.incarnation is None or membership.detached:
            return NO_PART
        if not membership.incarnation.view.spares:
            return "the job has no spares: submit it with --gemini-spares to move it"
        if membership.replicas < 2:
            return "its only copy is on that node: submit the job with --gemini-replicas=2 to move it"
        wanted = set(hosts).intersection(membership.hosts)
        if not wanted:
            return "" if set(hosts) <= set(membership.lost) else f"the job does not run on {', '.join(hosts)[:200]}"
        if self._build_view_without(wanted | self._moving) is None:
            return "no spare of the job is free, or its batch script runs on that node"
        return ""

    # ---- no step beyond the version that is resumed from -----------------------------------------------

    def on_message(self, incarnation: Incarnation, host: str, m: peer.MoveUp | peer.HoldDown) -> None:
        """Handle a child's request to the root, or the root's decision."""
        rounds = incarnation.rounds
        if m.round != rounds.round or not incarnation.live:
            return
        if isinstance(m, peer.MoveUp) and host in rounds.children:
            self._ask_to_hold(incarnation)
        elif isinstance(m, peer.HoldDown) and host == rounds.parent:
            self._hold_all(incarnation)

    def _ask_to_hold(self, incarnation: Incarnation) -> None:
        """Request the root's decision to hold all ranks.

        The decision arrives everywhere before that of the next seal, because both take the same way. Ranks that wait
        for the seal see both.
        """
        rounds = incarnation.rounds
        if incarnation.leads:
            self._hold_all(incarnation)
        elif rounds.parent is not None:
            incarnation.send(rounds.parent, peer.MoveUp(rounds.round))

    def _hold_all(self, incarnation: Incarnation) -> None:
        if self._holds is not incarnation:
            self._holds = incarnation
            incarnation.send_down(peer.HoldDown(incarnation.rounds.round))
            self._hold_ranks(self._membership.epoch)
            self._spawn(self._release_late(incarnation))

    async def _release_late(self, incarnation: Incarnation) -> None:
        """Release held ranks after a while.

        Releasing at the moment when the job goes on without the node is too early: ranks of the last attempt may
        still run. Ranks of the next attempt have a later epoch.
        """
        await asyncio.sleep(_HOLD_S)
        if self._holds is incarnation:
            self._holds = None
            self._hold_ranks(0)

    def leave_after_seal(self) -> None:
        """Leave the nodes after a seal, if ranks are held: none of them then goes on."""
        if self._moving and self._holds is not None and self._holds is self._membership.incarnation:
            asyncio.get_running_loop().call_soon(self._leave_nodes, frozenset(self._moving), "left")

    async def _leave_without_seal(self, hosts: frozenset[str], restart: int) -> None:
        """Leave the nodes if no seal came in time. Do nothing after a requeue, which has chosen new nodes."""
        await asyncio.sleep(_SEAL_S)
        incarnation = self._membership.incarnation
        if hosts <= self._moving and incarnation is not None and incarnation.restart == restart:
            self._leave_nodes(hosts, "left")
        self._moving -= hosts

    async def answer(self, link: Link) -> None:
        """Serve one admitted caller of `gemini-hpc evacuate`."""
        async with asyncio.timeout(_ASK_S):
            message = await link.receive()
        if not isinstance(message, EvacuateAsk):
            return
        reason = self.move([message.host]) if message.host != self._node else "ask an agent of another node"
        deadline = clock.monotonic() + 2 * _SEAL_S
        while not reason and message.host not in self._membership.lost:
            if clock.monotonic() > deadline:
                reason = f"the job still runs on {message.host}: see gemini-hpc inspect"
            await asyncio.sleep(_TOGETHER_S)
        await link.flush(Evacuated(reason))
