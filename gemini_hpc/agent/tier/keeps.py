"""Versions that users want for good (`Checkpointer.keep`), from the wish to the file on the tier.

A rank tells its agent, that tells the root, and the root tells all: so the wish outlives any one node. The root has
the version saved as any other (`saver`), before what is only due; whatever becomes whole on the tier takes the names
of all wishes for it or for an earlier version. Until the root has said what became of it, every agent that knows of a
wish says so again, also in the next incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from gemini_hpc.agent.peers.event_log import Log
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.replicas.pledges import Pledges, Wish
from gemini_hpc.agent.replicas.rejections import Rejections
from gemini_hpc.agent.tier.choice import TierChoice
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer

MAX_WISHES = 32  # of one set, at a time
_AGAIN_S = 1.0
_KNOWN = 1024  # names that are known to be given
_SHOWN = 16


class Keeps:
    """One agent's part in it; it lives as long as the agent."""

    def __init__(
        self,
        membership: Membership,
        pledges: Pledges,
        rejections: Rejections,
        tier: TierChoice,
        log: Log,
        *,
        wanted: Callable[[], None],
    ) -> None:
        """wanted: called at the root, now and then, while wishes wait."""
        self._membership, self._pledges, self._rejections = membership, pledges, rejections
        self._tier, self._log, self._wants = tier, log, wanted
        self._given: dict[tuple[str, str], tuple[int, Stamp | None]] = {}  # None: never
        self._again_at = 0.0

    @property
    def wishes(self) -> tuple[Wish, ...]:
        """What has not been done."""
        return self._pledges.now.wishes

    def of_set(self, name: str) -> tuple[str, ...]:
        """Names that versions of a set are to have, for `inspect`."""
        return tuple(wish.name for wish in self.wishes if wish.set == name)

    def given(self, name: str) -> tuple[tuple[str, Stamp], ...]:
        """Names that versions of a set have, the newest ones, as far as this agent has heard."""
        found = [(key[1], stamp) for key, (_, stamp) in self._given.items() if key[0] == name and stamp is not None]
        return tuple(found[-_SHOWN:])

    def due(self, name: str, stamp: Stamp) -> dict[str, int]:
        """The names for this version of a set, each with the number that was asked for."""
        return {wish.name: wish.version for wish in self.wishes if wish.set == name and wish.version <= stamp.version}

    # ---- the wish --------------------------------------------------------------------------------------

    def ask(self, wish: Wish) -> str:
        """A rank wants this version; why it will not be kept, or "". The same wish may come again."""
        if not self._tier.directory:
            return "the job has no tier; submit it with --gemini-tier=DIR"
        known = self._known(wish)
        if known is not None and known != wish.version:
            return f"version {known} already has this name, and a name cannot be given twice"
        if self._given.get((wish.set, wish.name)) == (wish.version, None):
            return "another version already has this name, and a name cannot be given twice"
        if known is None:
            if sum(other.set == wish.set for other in self.wishes) >= MAX_WISHES:
                return f"{MAX_WISHES} versions already wait to be kept"
            self._take(wish)
            self._log("keeping", version=wish.version, detail=f"{wish.set}: {wish.name}")
            self._tell()
        return ""

    def _known(self, wish: Wish) -> int | None:
        """The version that this name was asked for."""
        given = self._has(wish)
        if given is not None and given[1] is not None:
            return given[0]
        return next((o.version for o in self.wishes if (o.set, o.name) == (wish.set, wish.name)), None)

    def _has(self, wish: Wish) -> tuple[int, Stamp | None] | None:
        """What became of a name. One that a rejected version has may be given once more."""
        given = self._given.get((wish.set, wish.name))
        if given is None or given[1] is None:
            return given
        return None if self._rejections.covers(wish.set, given[1]) else given

    def _take(self, wish: Wish) -> None:
        if wish in self.wishes:
            return
        others = [o for o in self.wishes if (o.set, o.name) != (wish.set, wish.name)]
        self._put((*others, wish))

    def _put(self, wishes: tuple[Wish, ...]) -> None:
        self._pledges.put(msgspec.structs.replace(self._pledges.now, wishes=wishes))

    # ---- agents ----------------------------------------------------------------------------------------

    def tend(self, now: float) -> None:
        """Called a few times a second: what is not done is said again, and at the root tried again."""
        if self.wishes and now >= self._again_at:
            self._again_at = now + _AGAIN_S
            self._tell()

    def _tell(self) -> None:
        incarnation = self._membership.live
        if incarnation is None:
            return
        rounds = incarnation.rounds
        for wish in self.wishes:
            message = peer.KeepWish(rounds.round, wish.set, wish.name, wish.version)
            if rounds.parent is not None:
                incarnation.send(rounds.parent, message)
            else:
                incarnation.send_down(message)
        if incarnation.leads:
            self._wants()

    def on_message(self, host: str, message: peer.KeepWish | peer.KeepDone) -> None:
        """From the parent, whose word counts, or from a child."""
        incarnation = self._membership.live
        if incarnation is None or message.round != incarnation.rounds.round:
            return
        rounds = incarnation.rounds
        if host == rounds.parent:
            if isinstance(message, peer.KeepDone):
                self._done(message)
            else:
                self._wanted(incarnation, message)
        elif host in rounds.children and isinstance(message, peer.KeepWish):
            self._heard(incarnation, host, message)

    def _wanted(self, incarnation: Incarnation, message: peer.KeepWish) -> None:
        """The root has this wish."""
        self._given.pop((message.set, message.name), None)
        self._take(Wish(message.set, message.name, message.version))
        incarnation.send_down(message)

    def _heard(self, incarnation: Incarnation, child: str, message: peer.KeepWish) -> None:
        wish = Wish(message.set, message.name, message.version)
        given = self._has(wish)
        known = self._known(wish)
        if given is not None and (given[1] is not None or given[0] == wish.version):
            stamp = given[1] if given[0] == wish.version else None
            incarnation.send(child, peer.KeepDone(message.round, wish.set, wish.name, wish.version, stamp))
        elif known is not None and known != wish.version:
            incarnation.send(child, peer.KeepWish(message.round, wish.set, wish.name, known))
        elif known is None and sum(other.set == wish.set for other in self.wishes) < 2 * MAX_WISHES:
            self._take(wish)
            self._tell()

    # ---- what became of it -----------------------------------------------------------------------------

    def saved(self, name: str, stamp: Stamp, names: Mapping[str, tuple[int, Stamp]]) -> None:
        """At whoever had a version made whole: for each name, the number that it was given for, and the version that
        has it."""
        number = self._membership.round
        for wish in self.wishes:
            if wish.set != name or wish.name not in names:
                continue
            asked, has = names[wish.name]
            mine = has if asked == wish.version else None
            self._done(peer.KeepDone(number, name, wish.name, wish.version, mine))
            if mine is None:
                detail = f"{name}: version {has[1]} already has the name {wish.name}"
                self._log("not_kept", version=wish.version, detail=detail)
            else:
                late = f", for version {wish.version}" if has[1] != wish.version else ""
                self._log("kept", version=has[1], detail=f"{name}: {wish.name}{late}")

    def _done(self, message: peer.KeepDone) -> None:
        key = message.set, message.name
        self._given.pop(key, None)
        self._given[key] = message.version, message.stamp
        while len(self._given) > _KNOWN:
            del self._given[next(iter(self._given))]
        self._put(tuple(w for w in self.wishes if (w.set, w.name, w.version) != (*key, message.version)))
        if self._membership.incarnation is not None:
            self._membership.incarnation.send_down(message)
