"""Versions to keep permanently (`Checkpointer.keep`), from the wish to the file on the tier.

A rank sends the wish to its agent, the agent to the root, and the root to all agents. The wish therefore outlives any
one node. The root has the version saved like any other (`saver`), before versions that are only due. A version that
becomes whole on the tier gets the names of all wishes for it or for an earlier version. Every agent with a wish
resends it until the root reports the outcome, also in the next incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.replicas.pledges import Pledges, Wish
from gemini_hpc.agent.replicas.rejections import Rejections
from gemini_hpc.agent.tier.choice import TierChoice
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer

MAX_WISHES = 32  # open wishes of one training at a time
_AGAIN_S = 1.0  # interval at which open wishes are resent
_KNOWN = 1024  # given names that are remembered
_SHOWN = 16  # given names that `inspect` shows


class NamedVersions:
    """The wishes of one agent to keep versions. They live as long as the agent."""

    def __init__(
        self,
        context: AgentContext,
        pledges: Pledges,
        rejections: Rejections,
        tier: TierChoice,
        *,
        on_waiting: Callable[[], None],
    ) -> None:
        """Create the wishes.

        Args:
            context: The agent's context.
            pledges: File of lasting requests.
            rejections: Rejected versions.
            tier: Choice of the job's tier.
            on_waiting: Called at the root, about once a second, while wishes wait.
        """
        self._membership, self._log = context.membership, context.log
        self._pledges, self._rejections, self._tier, self._on_waiting = pledges, rejections, tier, on_waiting
        self._given: dict[tuple[str, str], tuple[int, Stamp | None]] = {}  # None: another version has the name
        self._again_at = 0.0

    @property
    def wishes(self) -> tuple[Wish, ...]:
        """Return the open wishes."""
        return self._pledges.now.wishes

    def list_wished_names(self, name: str) -> tuple[str, ...]:
        """Return the names that wishes request for a training, for `inspect`."""
        return tuple(wish.name for wish in self.wishes if wish.training == name)

    def list_given_names(self, name: str) -> tuple[tuple[str, Stamp], ...]:
        """Return the newest names that versions of a training have, as far as this agent knows."""
        found = [(key[1], stamp) for key, (_, stamp) in self._given.items() if key[0] == name and stamp is not None]
        return tuple(found[-_SHOWN:])

    def find_due_names(self, name: str, stamp: Stamp) -> dict[str, int]:
        """Return the names for this version of a training, each with the version that was requested."""
        return {
            wish.name: wish.version for wish in self.wishes if wish.training == name and wish.version <= stamp.version
        }

    # ---- wishes ----------------------------------------------------------------------------------------

    def ask(self, wish: Wish) -> str:
        """Take a rank's wish to keep a version. Return the reason for a refusal, or "".

        A rank may repeat a wish.
        """
        if not self._tier.directory:
            return "the job has no tier; submit it with --gemini-tier=DIR"
        known = self._find_requested_version(wish)
        if known is not None and known != wish.version:
            return f"version {known} already has this name, and a name cannot be given twice"
        if self._given.get((wish.training, wish.name)) == (wish.version, None):
            return "another version already has this name, and a name cannot be given twice"
        if known is None:
            if sum(other.training == wish.training for other in self.wishes) >= MAX_WISHES:
                return f"{MAX_WISHES} versions already wait to be kept: repeat it once one of them is saved"
            self._add_wish(wish)
            self._log("keeping", version=wish.version, detail=f"{wish.training}: {wish.name}")
            self._send_wishes()
        return ""

    def _find_requested_version(self, wish: Wish) -> int | None:
        """Return the version that this name was requested for, or None."""
        given = self._find_outcome(wish)
        if given is not None and given[1] is not None:
            return given[0]
        return next((o.version for o in self.wishes if (o.training, o.name) == (wish.training, wish.name)), None)

    def _find_outcome(self, wish: Wish) -> tuple[int, Stamp | None] | None:
        """Return the outcome for a name, or None. The name of a rejected version may be given once more."""
        given = self._given.get((wish.training, wish.name))
        if given is None or given[1] is None:
            return given
        return None if self._rejections.is_rejected(wish.training, given[1]) else given

    def _add_wish(self, wish: Wish) -> None:
        if wish in self.wishes:
            return
        others = [o for o in self.wishes if (o.training, o.name) != (wish.training, wish.name)]
        self._replace_wishes((*others, wish))

    def _replace_wishes(self, wishes: tuple[Wish, ...]) -> None:
        self._pledges.put(msgspec.structs.replace(self._pledges.now, wishes=wishes))

    # ---- agents ----------------------------------------------------------------------------------------

    def tend(self, now: float) -> None:
        """Resend open wishes, and retry them at the root. Called a few times a second."""
        if self.wishes and now >= self._again_at:
            self._again_at = now + _AGAIN_S
            self._send_wishes()

    def _send_wishes(self) -> None:
        incarnation = self._membership.live
        if incarnation is None:
            return
        rounds = incarnation.rounds
        for wish in self.wishes:
            message = peer.KeepWish(rounds.round, wish.training, wish.name, wish.version)
            if rounds.parent is not None:
                incarnation.send(rounds.parent, message)
            else:
                incarnation.send_down(message)
        if incarnation.leads:
            self._on_waiting()

    def on_message(self, host: str, message: peer.KeepWish | peer.KeepDone) -> None:
        """Handle a message of the parent, which is authoritative, or of a child."""
        incarnation = self._membership.live
        if incarnation is None or message.round != incarnation.rounds.round:
            return
        rounds = incarnation.rounds
        if host == rounds.parent:
            if isinstance(message, peer.KeepDone):
                self._record_outcome(message)
            else:
                self._adopt_wish(incarnation, message)
        elif host in rounds.children and isinstance(message, peer.KeepWish):
            self._on_wish(incarnation, host, message)

    def _adopt_wish(self, incarnation: Incarnation, message: peer.KeepWish) -> None:
        """Take a wish that the root has."""
        self._given.pop((message.training, message.name), None)
        self._add_wish(Wish(message.training, message.name, message.version))
        incarnation.send_down(message)

    def _on_wish(self, incarnation: Incarnation, child: str, message: peer.KeepWish) -> None:
        wish = Wish(message.training, message.name, message.version)
        given = self._find_outcome(wish)
        known = self._find_requested_version(wish)
        if given is not None and (given[1] is not None or given[0] == wish.version):
            stamp = given[1] if given[0] == wish.version else None
            incarnation.send(child, peer.KeepDone(message.round, wish.training, wish.name, wish.version, stamp))
        elif known is not None and known != wish.version:
            incarnation.send(child, peer.KeepWish(message.round, wish.training, wish.name, known))
        elif known is None and sum(other.training == wish.training for other in self.wishes) < 2 * MAX_WISHES:
            self._add_wish(wish)
            self._send_wishes()

    # ---- outcomes --------------------------------------------------------------------------------------

    def record_names(self, name: str, stamp: Stamp, names: Mapping[str, tuple[int, Stamp]]) -> None:
        """Record the names given, at the agent that had a version made whole.

        Args:
            name: Name of the training.
            stamp: The version made whole.
            names: For each name, the version it was requested for and the version that has it.
        """
        number = self._membership.round
        for wish in self.wishes:
            if wish.training != name or wish.name not in names:
                continue
            asked, has = names[wish.name]
            granted = has if asked == wish.version else None
            self._record_outcome(peer.KeepDone(number, name, wish.name, wish.version, granted))
            if granted is None:
                detail = f"{name}: version {has[1]} already has the name {wish.name}"
                self._log("not_kept", version=wish.version, detail=detail)
            else:
                late = f", for version {wish.version}" if has[1] != wish.version else ""
                self._log("kept", version=has[1], detail=f"{name}: {wish.name}{late}")

    def _record_outcome(self, message: peer.KeepDone) -> None:
        key = message.training, message.name
        self._given.pop(key, None)
        self._given[key] = message.version, message.stamp
        while len(self._given) > _KNOWN:
            del self._given[next(iter(self._given))]
        self._replace_wishes(
            tuple(w for w in self.wishes if (w.training, w.name, w.version) != (*key, message.version))
        )
        if self._membership.incarnation is not None:
            self._membership.incarnation.send_down(message)
