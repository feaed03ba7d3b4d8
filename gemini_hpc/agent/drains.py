"""Saving sealed versions to the tier, in the background (DESIGN section 3).

The root chooses a version right when it seals it, and tells all agents. Each writes what its node has of it (see
`nodesaver`) and tells the root; when that has heard of every rank it has the index and the manifest written. Nothing
here is waited for by the training, and what fails is told, dropped, and tried again with a newer version.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from gemini_hpc import clock
from gemini_hpc.agent import tierwork
from gemini_hpc.agent.eventlog import Log
from gemini_hpc.agent.gathering import Gathering
from gemini_hpc.agent.identity import Identity
from gemini_hpc.agent.keeps import Keeps
from gemini_hpc.agent.membership import Membership
from gemini_hpc.agent.nodesaver import NodeSaver, Wanted
from gemini_hpc.agent.rejections import Rejections
from gemini_hpc.agent.tasks import Spawn
from gemini_hpc.agent.tierchoice import TierChoice
from gemini_hpc.agent.tierwork import TierFailed
from gemini_hpc.agent.trainingset import TrainingSet
from gemini_hpc.agent.troubles import Troubles
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import orders, version
from gemini_hpc.tier.version import Manifest
from gemini_hpc.wire import bounds, peer, picture
from gemini_hpc.wire.stored import NodeFile

_AGAIN_S = 5.0  # after a failure, or the interval if that is less
_LOOK_S = 1.0  # from one look at the tier to the next, where it cannot be seen
_GATHER_S = 3600.0
_FLUSH_TRIES = 3
_SHOWN = 16  # nodes in a line
_SAID = 200  # characters of another's sentence
_LEAVE_S = 10.0
_STEP_S = 0.2


class Drains:
    """One agent's part in it; it lives as long as the agent."""

    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        trainings: Iterable[TrainingSet],
        tier: TierChoice,
        keeps: Keeps,
        rejections: Rejections,
        node: NodeSaver,
        log: Log,
        spawn: Spawn,
        *,
        scavenging: Callable[[], bool],
    ) -> None:
        """scavenging: whether the nodes that are left save the job's last versions by themselves (`scavenge`)."""
        self._identity, self._membership, self._trainings = identity, membership, trainings
        self._choice, self._keeps, self._rejections, self.node = tier, keeps, rejections, node
        self._log, self._spawn, self._scavenging = log, spawn, scavenging
        self._gathering: dict[str, Gathering] = {}
        self._due: dict[str, float] = {}
        self.troubles = Troubles()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by set: to make whole, or to remove
        self._tidy: dict[str, asyncio.Task[None]] = {}  # at the root: removes what a life before has left half done
        self._ends_at = math.inf  # by Slurm's word (monotonic)
        self._before_end: dict[str, float] = {}  # at the root: the end before which a version has been saved
        self._took_s: dict[str, float] = {}  # the last save
        self.succeeded = False  # the training has: nobody will complete what is half written
        self.last = False  # the job has ended here, and nobody has said that its last versions are saved
        self._ended = (-1, -1)  # restart and round in which that was said
        self._keep_at: dict[str, float] = {}  # at the root: after a failure: when it tries to keep one again
        self._naming: set[str] = set()
        self.saved: dict[str, tuple[Stamp, float]] = {}  # at the root: the newest on the tier, and when (Unix time)

    @property
    def tier(self) -> str:
        """The directory; empty: none."""
        return self._choice.directory

    def freeze(self) -> None:
        """A round begins: what is on its way will not become whole."""
        self.last = False
        self.give_up("a recovery round came between")
        self._tidy.clear()

    def give_up(self, reason: str) -> None:
        """What the root has begun will not become whole."""
        for gathering in self._gathering.values():
            gathering.end(reason)
        self._gathering.clear()

    @property
    def busy(self) -> bool:
        """Whether something is being written here, or waited for."""
        return bool(self._gathering) or self.node.busy

    def progress(self, name: str) -> int:
        """Bytes of a set that are on the tier, as far as the root knows: what it has written itself, and the files of
        nodes that are done."""
        gathering = self._gathering.get(name)
        files = {} if gathering is None else gathering.files
        mine = version.node_file(self._membership.noderanks.get(self._identity.node, 0))
        return self.node.through(name) + sum(f.bytes for f in files.values() if f.name != mine)

    def state(self, name: str) -> picture.TierState | None:
        """For `inspect`: what the root knows of a set."""
        incarnation = self._membership.incarnation
        if not self.tier or incarnation is None or not incarnation.leads:
            return None
        stored, at = self.saved.get(name, (None, 0.0))
        gathering = self._gathering.get(name)
        return picture.TierState(
            directory=self.tier,
            stored=None if stored is None else (stored.epoch, stored.version),
            time=at,
            saving=None if gathering is None else (gathering.stamp.epoch, gathering.stamp.version),
            written=self.progress(name) if gathering is not None else 0,
            problem=self.troubles.text(name) or self.problem,
            keeping=self._keeps.of_set(name),
            kept=self._keeps.given(name),
        )

    def forget(self, rejected: Callable[[str, Stamp], bool]) -> None:
        """Such versions are on the tier in vain."""
        self.saved = {name: found for name, found in self.saved.items() if not rejected(name, found[0])}

    def close(self) -> None:
        """Free everything; processes end."""
        self.node.close()

    async def leave(self, others: Mapping[str, Gathering]) -> None:
        """The agent ends: a version that is on its way, of ours or of the others', will not become whole. For a few
        seconds. The root removes it; so does each node that was still writing, for it may have begun its file after
        that."""
        begun = {**self._gathering, **others}
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                for name, gathering in begun.items():
                    if gathering.whole:  # its manifest is being written
                        await asyncio.wait([gathering.done])
                    else:  # a newer one may be another incarnation's
                        await self.clean(name, Stamp(gathering.stamp.epoch, gathering.stamp.version + 1))
                for cut in await self.node.cut_short() if self.succeeded else ():
                    await self.clean(cut.set, Stamp(cut.stamp.epoch, cut.stamp.version + 1))

    async def stored(self, without: Iterable[tuple[str, bounds.Stamp]], within_s: float) -> tuple[Manifest, ...]:
        """The newest whole version of each set on the tier, but for these. Raises `TierFailed` where that cannot be
        seen within so many seconds."""
        reason = f"{self.tier}: the file system does not answer"
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        return await self._look(without)
                    except TierFailed as error:
                        reason = str(error)
                    await asyncio.sleep(_LOOK_S)
        raise TierFailed(self._silent(reason))

    async def _look(
        self, without: Iterable[tuple[str, bounds.Stamp]], *, begin: bool = False, make: bool = False
    ) -> tuple[Manifest, ...]:
        rejected = self._rejections.all
        order = orders.Look(self.tier, self._identity.job, "", tuple(without), begin, make, rejected)
        found = await tierwork.carry_out(order)
        self.troubles.over("")
        manifests = found.manifests if isinstance(found, orders.Found) else ()
        self.saved.update({m.set: (Stamp(*m.stamp), m.time) for m in manifests})
        return manifests

    async def glance(self) -> None:
        """A job begins: where there is no such directory, its user hears of it now, and not when it is wanted. A
        user's own one of the site's is made then, and never later: where it has vanished it is to be waited for."""
        try:
            await self._look((), begin=True, make=self._choice.users)
        except TierFailed as error:
            self._silent(str(error))

    def _silent(self, reason: str) -> str:
        told = f"what is on the tier cannot be seen: {reason}"
        self.say("", 0, told)
        return told

    @property
    def problem(self) -> str:
        """Why it is not known what is on the tier."""
        return self.troubles.text("")

    def say(self, name: str, number: int, reason: str, host: str = "") -> None:
        """Why a set's version is not on the tier, once."""
        if self.troubles.met(name, reason, host):
            self._log("not_saved" if name else "tier_silent", version=number, detail=self.troubles.text(name))

    # ---- the root --------------------------------------------------------------------------------------

    def sealed(self, training: TrainingSet, number: int, stamp: Stamp) -> None:
        """The root has sealed a version: is it one to save?"""
        name, now = training.name, clock.monotonic()
        if not self.tier or stamp.epoch != self._membership.epoch or self._rejections.covers(name, stamp):
            return
        self.keep(training)
        due = now >= self._due.setdefault(name, now + self._choice.interval_s) or self._near_end(name, now)
        if self._under_way(name) is None and self._tidied(name).done() and due:
            self._begin(training, number, stamp)

    def keep(self, training: TrainingSet) -> None:
        """The root saves what is wanted for good, before what is only due: a save that began with an earlier version
        gives way. Where what is on the tier is wanted, that gets its name."""
        name, stamp, now = training.name, training.sealed, clock.monotonic()
        wanted = self._keeps.due(name, stamp) if stamp is not None else {}
        incarnation = self._membership.incarnation
        if not wanted or stamp is None or incarnation is None or not incarnation.leads or not self.tier:
            return
        if self._rejections.covers(name, stamp):
            return
        first, gathering, there = min(wanted.values()), self._under_way(name), self._serves(name, stamp, wanted)
        if there is not None:
            if name not in self._naming:
                self._naming.add(name)
                self._spawn(self._name(name, there))
            return
        waits = now < self._keep_at.get(name, 0.0) or self._scavenging() or not self._tidied(name).done()
        if waits or (gathering is not None and gathering.stamp.version >= first):
            return
        if gathering is not None and not gathering.whole:  # nodes have written all of one whose manifest is missing
            del self._gathering[name]
            gathering.end(f"version {stamp.version} goes before it, which is to be kept")
        self._begin(training, incarnation.rounds.round, stamp)

    def keep_all(self) -> None:
        """The same for every set."""
        for training in self._trainings:
            self.keep(training)

    def _serves(self, name: str, sealed: Stamp, wanted: dict[str, int]) -> Stamp | None:
        """The version on the tier, where a wish can have that: of this lineage, and not before what was asked for."""
        known = self.saved.get(name)
        if known is None or (known[0].epoch != self._membership.epoch and known[0] != sealed):
            return None
        return known[0] if min(wanted.values()) <= known[0].version <= sealed.version else None

    async def _name(self, name: str, stamp: Stamp) -> str:
        """This version of the tier gets the names that it is to have; why it has not, or ""."""
        names = self._keeps.due(name, stamp)
        order = orders.Name(self.tier, self._identity.job, name, (stamp.epoch, stamp.version), names)
        try:
            done = await tierwork.carry_out(order) if names else None
        except TierFailed as error:
            self.saved.pop(name, None)  # perhaps it is not there any more: then the next one is saved
            self.say(name, stamp.version, str(error))
            return str(error)
        finally:
            self._naming.discard(name)
        if isinstance(done, orders.Finished):
            self._keeps.saved(name, stamp, done.names)
        return ""

    def ends_in(self, left_s: int | None) -> None:
        """Slurm ends the job in so many seconds; None: it sets no time."""
        self._ends_at = math.inf if left_s is None else clock.monotonic() + left_s

    def _near_end(self, name: str, now: float) -> bool:
        """Whether it is time for the save before the job's time limit."""
        ahead_s = self._identity.settings.tier_before_end_s
        if not ahead_s or self._before_end.get(name) == self._ends_at:
            return False
        return now >= self._ends_at - max(ahead_s, 2 * self._took_s.get(name, 0.0))

    def _tidied(self, name: str) -> asyncio.Task[None]:
        """Ends when what was begun before, and has not become whole, is gone; nothing is written until then."""
        if name not in self._tidy:
            self._tidy[name] = self._spawn(self.clean(name))
        return self._tidy[name]

    async def clean(self, name: str, before: Stamp | None = None) -> None:
        """Remove what has not become whole, and is older."""
        limit = None if before is None else (before.epoch, before.version)
        try:
            async with self._turns[name]:  # of a round before one may just become whole
                await tierwork.carry_out(orders.Clean(self.tier, self._identity.job, name, limit))
        except TierFailed as error:
            self.say(name, 0, f"half versions cannot be removed: {error}")

    def _under_way(self, name: str) -> Gathering | None:
        found = self._gathering.get(name)
        if found is not None and clock.monotonic() - found.began >= _GATHER_S:
            self._failed(name, found, f"not all nodes have written it within {_GATHER_S:.0f} s")
            return None
        return found

    def _begin(self, training: TrainingSet, number: int, stamp: Stamp) -> Gathering:
        name = training.name
        now = clock.monotonic()
        self._due[name] = now + self._choice.interval_s
        if self._near_end(name, now):
            self._before_end[name] = self._ends_at
        gathering = self._gathering[name] = Gathering(stamp, training.world)
        message = peer.DrainDown(number, name, (stamp.epoch, stamp.version), gathering.attempt)
        self._spawn(self._ask(message, gathering))
        return gathering

    async def _ask(self, message: peer.DrainDown, gathering: Gathering) -> None:
        """All agents, again and again: one that has died meanwhile has forgotten it, and says so."""
        while not gathering.whole and self._under_way(message.set) is gathering:
            self.wanted(message)
            await asyncio.wait([gathering.done], timeout=_AGAIN_S)

    async def flush(self, training: TrainingSet) -> tuple[Stamp, str]:
        """The root brings the newest sealed version to the tier now: which one, and why it is not there or "". A
        training that goes on may overtake a version before it is copied: then the next one is tried."""
        reason, wanted = "", training.sealed
        for _ in range(_FLUSH_TRIES):
            incarnation, stamp = self._membership.incarnation, training.sealed
            if incarnation is None or not incarnation.leads or stamp is None or wanted is None:
                return stamp or Stamp(0, 0), reason or "nothing of it has been sealed yet"
            if self._rejections.covers(training.name, stamp):
                return stamp, ""  # nobody wants it
            kept = self.saved.get(training.name)
            if kept is not None and kept[0] >= wanted:
                return kept[0], await self._name(training.name, kept[0])
            if not self._scavenging():
                await asyncio.wait([self._tidied(training.name)])
            if self._scavenging():
                return wanted, reason or "a node is missing, and the others save it by themselves"
            gathering = self._under_way(training.name) or self._begin(training, incarnation.rounds.round, stamp)
            reason = await asyncio.shield(gathering.done)
            if not reason and gathering.stamp >= wanted:
                return gathering.stamp, ""
        return wanted or Stamp(0, 0), reason

    def detached(self, *, dead: bool) -> None:
        """The job has ended here, without success: the newest version goes to the tier before the memory is freed.
        dead: a node of it is, and it may come back; if it does not, see `scavenge`."""
        incarnation, ended = self._membership.incarnation, self._now
        sealed = [training for training in self._trainings if training.sealed is not None]
        possible = bool(self.tier and self._identity.settings.tier_flush_s and sealed)
        if incarnation is None or ended == self._ended:
            return
        self.last = possible
        if incarnation.leads and not dead:
            self._spawn(self._end(sealed if possible else [], ended))

    @property
    def _now(self) -> tuple[int, int]:
        """Restart and round."""
        incarnation = self._membership.incarnation
        return (-1, -1) if incarnation is None else (incarnation.restart, incarnation.rounds.round)

    async def _end(self, sealed: Sequence[TrainingSet], ended: tuple[int, int]) -> None:
        """The root saves the last versions, and lets all agents go; not where a node is missing, nor where the job
        has come back meanwhile."""
        await asyncio.gather(*(self._last(training) for training in sealed))
        if sealed and self._rejections.all:
            with suppress(TierFailed):  # for who looks later, when no agent knows
                await self._look(())
        if not all(map(self._stored, sealed)) and self._membership.incarnation is not None:
            await asyncio.sleep(self._membership.incarnation.silent_s)  # a node may just have been lost
        incarnation = self._membership.incarnation
        whole = incarnation is None or not incarnation.incomplete() or all(map(self._stored, sealed))
        if ended == self._now and whole:
            self.ended()

    def _stored(self, training: TrainingSet) -> bool:
        """Whether the tier has what was sealed last."""
        if training.sealed is not None and self._rejections.covers(training.name, training.sealed):
            return True
        known = self.saved.get(training.name)
        return known is not None and training.sealed is not None and known[0] >= training.sealed

    def ended(self) -> None:
        """Nobody need wait for the last versions any more, here and on the nodes below."""
        self.last, incarnation = False, self._membership.incarnation
        if incarnation is not None:
            self._ended = self._now
            if self.tier:
                incarnation.send_down(peer.DrainOver(incarnation.rounds.round))

    def found(self) -> None:
        """The last versions are on the tier, by whoever saved them."""
        self.last = False

    async def settle(self, stalled_s: float) -> None:
        """Wait for what the root has begun, as long as it gets on; then give it up."""
        known, since = -1, clock.monotonic()
        while self._gathering and clock.monotonic() - since < stalled_s:
            through = sum(self.progress(name) for name in self._gathering)
            if through != known:
                known, since = through, clock.monotonic()
            await asyncio.sleep(_STEP_S)
        self.give_up("a node is missing: the others save what is left")
        if tidying := [task for task in self._tidy.values() if not task.done()]:
            await asyncio.wait(tidying, timeout=stalled_s)

    def leaving(self, hosts: Sequence[str], partition: str) -> None:
        """These nodes, or the partition, are being drained, and may be gone soon: the root saves the newest version
        now."""
        incarnation = self._membership.incarnation
        if not self.tier or self._membership.detached or incarnation is None or not incarnation.leads:
            return
        shown = ", ".join(hosts[:_SHOWN]) + ("" if len(hosts) <= _SHOWN else f" and {len(hosts) - _SHOWN} more")
        said = "; ".join(filter(None, (shown, "".join(c for c in partition[:_SAID] if c.isprintable()))))
        for training in self._trainings:
            if training.sealed is not None:
                self._log("draining", version=training.sealed.version, detail=f"{said}: saving it to the tier")
                self._spawn(self._last(training))

    async def _last(self, training: TrainingSet) -> None:
        stamp, reason = await self.flush(training)
        if reason:
            self._log("not_saved", version=stamp.version, detail=reason)

    def wanted(self, message: peer.DrainDown) -> None:
        """The root wants this version saved, here and on the nodes below."""
        incarnation = self._membership.incarnation
        if incarnation is None or message.round != incarnation.rounds.round or not self.tier or self._scavenging():
            return
        incarnation.send_down(message)
        what = Wanted(message.set, Stamp(*message.stamp), message.attempt)
        self.node.wanted(what, self.tier, lambda files, reason: self._written(message, files, reason))

    def _written(self, message: peer.DrainDown, files: tuple[NodeFile, ...], reason: str) -> None:
        for file in (None,) if reason else files:
            up = peer.DrainUp(
                message.round, message.set, message.stamp, self._identity.node, file, reason, message.attempt
            )
            self.heard(up)

    def heard(self, message: peer.DrainUp) -> None:
        """From an agent, or through one: it goes up to the root, which counts."""
        incarnation = self._membership.incarnation
        if incarnation is None or message.round != incarnation.rounds.round:
            return
        if incarnation.rounds.parent is not None:
            incarnation.send(incarnation.rounds.parent, message)
            return
        gathering = self._gathering.get(message.set)
        if gathering is None or (gathering.stamp, gathering.attempt) != (Stamp(*message.stamp), message.attempt):
            return
        if message.file is None:
            self._failed(message.set, gathering, message.reason, message.host)
            return
        gathering.take((message.file,))
        if gathering.whole:
            self._spawn(self._finish(message.set, gathering))

    def _failed(self, name: str, gathering: Gathering, reason: str, host: str = "") -> None:
        if self._gathering.get(name) is gathering:
            del self._gathering[name]
            self._due[name] = min(self._due.get(name, 0.0), clock.monotonic() + _AGAIN_S)
            self._keep_at[name] = clock.monotonic() + _AGAIN_S
            self._tidy.pop(name, None)
        self.say(name, gathering.stamp.version, reason, host)
        gathering.end(f"{host}: {reason}" if host else reason)

    async def _finish(self, name: str, gathering: Gathering) -> None:
        reason = await self.publish(name, gathering)
        if reason:
            self._failed(name, gathering, reason)
            return
        if self._gathering.get(name) is gathering:
            del self._gathering[name]
        self._took_s[name] = clock.monotonic() - gathering.began
        gathering.end()

    async def publish(self, name: str, gathering: Gathering) -> str:
        """All files are there: the version becomes whole. Why it has not, or ""."""
        settings, stamp = self._identity.settings, gathering.stamp
        if self._rejections.covers(name, stamp):
            return "a training has rejected it"
        order = orders.Finish(
            self.tier,
            self._identity.job,
            name,
            (stamp.epoch, stamp.version),
            gathering.world,
            tuple(sorted(gathering.files.values(), key=lambda f: f.name)),
            settings.tier_keep_last,
            settings.tier_keep_every,
            self._keeps.due(name, stamp),
        )
        try:
            async with self._turns[name]:
                done = await tierwork.carry_out(order)
        except TierFailed as error:
            return str(error)
        trouble = done.trouble if isinstance(done, orders.Finished) else ""
        if isinstance(done, orders.Finished):
            self._keeps.saved(name, stamp, done.names)
        if trouble:
            self.say(name, stamp.version, trouble)
        else:
            self.troubles.over(name)
        self.troubles.over("")
        if not self._rejections.covers(name, stamp):  # meanwhile
            self.saved[name] = stamp, clock.time()
        took_s = clock.monotonic() - gathering.began
        detail = f"{gathering.bytes} bytes in {len(gathering.files)} files in {took_s:.1f} s"
        self._log("saved", version=stamp.version, detail=detail)
        return ""
