"""Replacement of dead nodes, and of nodes that the job should leave, by spares (`core.views`).

Two decisions are made elsewhere: which nodes are dead (`peers.failure_detector`), and which version the new view
resumes from (`peers.recovery_round`).

A job leaves a drained or evacuated node at the next seal, and a sick node at once. With one replica it leaves none,
because a sealed shard there has no other copy. Before that seal the root sends `HoldDown`, the way of decisions. A
rank that sees the seal thus finds `held` on its control page, and neither makes another step nor repeats one. `held`
is an epoch, because ranks of the next attempt have a later one.

Each agent that changes its view begins the next attempt of all steps. Launchers start it when the view is live.
An agent that learns of its own loss ends its ranks and holds its memory until the job ends.

The rules contain no clock, no socket and no waiting. Each event comes with the time (monotonic). The rules return the
effects, in order. The agent carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.round_events import Heard, Log, Send
from gemini_hpc.core.views import View
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.evacuate import NO_PART

_TOGETHER_S = 0.05  # reports of simultaneous deaths arrive within this time
SEAL_S = 5.0  # seconds: a node is left at the next seal, or after this time
_HOLD_S = SEAL_S + 1.0  # longest wait of ranks for that
_SUSPECTS_S = 4.0  # longer than a suspected node needs to be proved dead or alive
_STEADY_S = 3.0  # seconds without a node's return or death that count as steady
_BACK_S = 10.0  # seconds to wait for nodes without which sealed state is lost: they may only be cut off

# ---- events --------------------------------------------------------------------------------------------


class Died(msgspec.Struct, frozen=True):
    """The death of a peer."""


class Replace(msgspec.Struct, frozen=True):
    """The end of a moment after a death: simultaneous deaths are known, and their reports have been sent."""


class Wait(msgspec.Struct, frozen=True):
    """A look at dead nodes that spares are to replace.

    Attributes:
        incarnation: The incarnation of these nodes.
        began: Time of the first look, in seconds.
        dead: The nodes at the last look, if they alone hold sealed state. None while suspected nodes matter.
        changed: Time of the last change of `dead`, in seconds.
    """

    incarnation: Incarnation
    began: float
    dead: frozenset[str] | None = None
    changed: float = 0.0


class NodesLost(msgspec.Struct, frozen=True):
    """The view of a peer of this incarnation, which goes on without these nodes."""

    hosts: Collection[str]


class Move(msgspec.Struct, frozen=True):
    """A request to leave these nodes right after the next seal, so that no step is repeated."""

    hosts: frozenset[str]


class Sealed(msgspec.Struct, frozen=True):
    """A seal."""


class Unsealed(msgspec.Struct, frozen=True):
    """The end of the wait for a seal after `Move`, and the incarnation's number then."""

    hosts: frozenset[str]
    restart: int


class Leave(msgspec.Struct, frozen=True):
    """A request to leave these nodes now."""

    hosts: Collection[str]
    why: str


class Release(msgspec.Struct, frozen=True):
    """The end of the longest hold of an incarnation's ranks."""

    incarnation: Incarnation


Event = Died | Replace | Wait | NodesLost | Move | Sealed | Unsealed | Leave | Release | Heard

# ---- effects -------------------------------------------------------------------------------------------


class Later(msgspec.Struct, frozen=True):
    """An order to report an event after so many seconds, and if `rescued` not before rescues are over."""

    event: Event
    after_s: float = 0.0
    rescued: bool = False


class Hold(msgspec.Struct, frozen=True):
    """An order that ranks here, up to this epoch, stop at the next sealed version. 0 lets all go on."""

    epoch: int


class EnterView(msgspec.Struct, frozen=True):
    """An order to begin a view, and the next attempt of all steps.

    Attributes:
        attach: The message that begins the incarnation in this view.
        gone: The nodes that it leaves.
        why: Reason for that.
    """

    attach: local.Attach
    gone: Sequence[str]
    why: str


class EndLocalWork(msgspec.Struct, frozen=True):
    """An order to end all that runs here: the job goes on without this node."""


Effect = Send | Log | Later | Hold | EnterView | EndLocalWork


class Spares:
    """The decisions of one agent on the replacement of nodes by spares."""

    def __init__(
        self, node: str, membership: Membership, would_lose_state: Callable[[Collection[str]], bool]
    ) -> None:
        """Create the rules.

        Args:
            node: This agent's node.
            membership: The agent's view of its job.
            would_lose_state: Returns whether some sealed state could not be recovered without these nodes.
        """
        self._node, self._membership, self._would_lose_state = node, membership, would_lose_state
        self._moving: set[str] = set()
        self._waits: Incarnation | None = None  # in which nodes are waited for
        self._holds: Incarnation | None = None  # whose ranks are held

    def step(self, event: Event, now: float) -> Iterator[Effect]:
        """Yield the effects of an event, in order."""
        incarnation = self._membership.incarnation
        if incarnation is None:
            return
        rounds = incarnation.rounds
        match event:
            case Died() if incarnation.view.spares:
                yield Later(Replace(), _TOGETHER_S, rescued=True)
            case Replace() if self._waits is not incarnation:  # otherwise the earlier wait goes on
                yield from self._replace_dead(Wait(incarnation, now), now)
            case Wait():
                yield from self._replace_dead(event, now)
            case NodesLost(hosts) if self._node not in hosts:
                yield Later(Leave(hosts, "gone"), rescued=True)
            case NodesLost() if not self._membership.detached:
                yield Log("left_out", "the job goes on without this node: ending the ranks that still run here")
                yield EndLocalWork()
            case Move(hosts) if not hosts <= self._moving:
                self._moving |= hosts
                yield Log("moving", f"moving off {', '.join(sorted(hosts))[:300]} at the next sealed version")
                yield Later(Unsealed(hosts, incarnation.restart), SEAL_S)
                yield from self._hold_all(incarnation, decided=False)
            case Sealed() if self._moving and self._holds is incarnation:  # no rank goes on
                yield Later(Leave(frozenset(self._moving), "left"))
            case Unsealed(hosts, restart):
                if hosts <= self._moving and incarnation.restart == restart:  # a requeue has chosen new nodes
                    yield from self._leave_nodes(hosts, "left")
                self._moving -= hosts
            case Leave(hosts, why):
                yield from self._leave_nodes(hosts, why)
            case Heard(host, peer.MoveUp(rounds.round)) if incarnation.live and host in rounds.children:
                yield from self._hold_all(incarnation, decided=False)
            case Heard(rounds.parent, peer.HoldDown(rounds.round)) if incarnation.live:
                yield from self._hold_all(incarnation, decided=True)
            case Release(of) if of is self._holds:
                self._holds = None
                yield Hold(0)

    # ---- nodes that die --------------------------------------------------------------------------------

    def _replace_dead(self, wait: Wait, now: float) -> Iterator[Effect]:
        """Leave the dead nodes of an incarnation, after two waits, each for a bounded time.

        The first wait is for suspected nodes, until each is known to be dead or alive. If the job could not go on
        without the suspects as well, this node may itself be cut off. A node that is cut off loses sight of the
        others one by one.

        The second wait is for nodes that alone hold sealed state. A silent node may only be cut off, and going on
        without it cannot be undone. Nodes that were cut off together do not come back at the same instant.
        """
        incarnation, mesh, dead = wait.incarnation, wait.incarnation.mesh, frozenset(wait.incarnation.mesh.dead)
        here = self._membership.incarnation is incarnation
        if wait.dead is None:
            doubtful = self._exclude(dead) is not None and self._exclude(dead | mesh.list_silent()) is None
            if here and doubtful and now < wait.began + _SUSPECTS_S:
                yield Later(wait, _TOGETHER_S)
                return
            if self._would_lose_state(dead):
                self._waits, wait = incarnation, Wait(incarnation, now, dead, now)
                names, most = ", ".join(sorted(dead))[:300], f"{_BACK_S:g} s"
                yield Log("waits", f"{names} alone hold the newest state and may come back: waiting up to {most}")
        if wait.dead is not None:
            changed = wait.changed if dead == wait.dead else now
            over = now - wait.began > _BACK_S or (now - changed > _STEADY_S and not self._would_lose_state(dead))
            if here and dead and not over:
                yield Later(Wait(incarnation, wait.began, dead, changed), _TOGETHER_S)
                return
            self._waits = None if self._waits is incarnation else self._waits
        if here:
            yield from self._leave_nodes(dead, "lost")

    def _exclude(self, nodes: Iterable[str]) -> View | None:
        here = self._membership
        return None if here.detached or not here.incarnation else here.incarnation.view.exclude(nodes, here.nodes)

    def _leave_nodes(self, nodes: Iterable[str], why: str) -> Iterator[Effect]:
        incarnation, view = self._membership.incarnation, self._exclude(nodes)
        if incarnation is None or view is None or self._node in view.lost:
            return
        gone = sorted(view.lost - incarnation.view.lost)
        yield Log("without", f"{', '.join(gone)[:300]} {why}: a spare takes over")
        self._moving -= view.lost
        yield EnterView(msgspec.structs.replace(incarnation.attach, lost=tuple(sorted(view.lost))), gone, why)

    # ---- nodes that the job is to leave ----------------------------------------------------------------

    def explain_refusal(self, hosts: Collection[str]) -> str:
        """Return why the job cannot leave these nodes, or ""."""
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
        if self._exclude(wanted | self._moving) is None:
            return "no spare of the job is free, or its batch script runs on that node"
        return ""

    # ---- no step beyond the version that is resumed from -----------------------------------------------

    def _hold_all(self, incarnation: Incarnation, *, decided: bool) -> Iterator[Effect]:
        """Hold all ranks here and below for a bounded time, or request that decision of the root.

        The decision arrives everywhere before that of the next seal, because both take the same way. Ranks that wait
        for the seal see both.

        Releasing at the moment when the job goes on without the node is too early: ranks of the last attempt may
        still run. Ranks of the next attempt have a later epoch.
        """
        rounds = incarnation.rounds
        if rounds.parent is not None and not decided:
            yield Send(rounds.parent, peer.MoveUp(rounds.round))
        elif self._holds is not incarnation:
            self._holds = incarnation
            for child in rounds.children:
                yield Send(child, peer.HoldDown(rounds.round))
            yield Hold(self._membership.epoch)
            yield Later(Release(incarnation), _HOLD_S)
