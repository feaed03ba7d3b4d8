"""Saves of sealed versions to the tier, in the background.

The root chooses a version right after it seals it, and orders all agents to save it. Each agent writes its node's
shards (see `node_writer`) and reports to the root. When every rank is reported, the root has the index and the
manifest written.

The training waits for no part of a save. A failed save is reported, dropped, and retried with a newer version.
`save_rules` decides. This module sends messages, writes files and reads the tier.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count

from gemini_hpc import clock
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.replicas.rejections import Rejections
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.tier import save_events as events
from gemini_hpc.agent.tier import worker_process
from gemini_hpc.agent.tier.choice import TierChoice
from gemini_hpc.agent.tier.failures import SaveFailures
from gemini_hpc.agent.tier.keeps import NamedVersions
from gemini_hpc.agent.tier.node_writer import NodeWriter, WantedVersion
from gemini_hpc.agent.tier.save_progress import SaveProgress
from gemini_hpc.agent.tier.save_rules import SaveRules
from gemini_hpc.core.slots import Stamp
from gemini_hpc.lines import replace_unprintable
from gemini_hpc.tier import orders, version
from gemini_hpc.tier.errors import TierFailed
from gemini_hpc.tier.version import VersionManifest
from gemini_hpc.wire import inspect_schema, peer
from gemini_hpc.wire.stored import NodeFile

_LOOK_S = 1.0  # interval of retries while the tier cannot be read
_SHOWN = 16  # nodes shown in a line
_SAID = 200  # characters kept of another process's text
_LEAVE_S = 10.0  # time limit to remove unfinished versions before the agent ends
_TICK_S = 0.2  # interval of `Tick` events while the rules need them


class Saver:
    """An agent's part in the saves. It lives as long as the agent."""

    def __init__(
        self,
        context: AgentContext,
        trainings: Iterable[Training],
        tier: TierChoice,
        keeps: NamedVersions,
        rejections: Rejections,
        node: NodeWriter,
        *,
        is_salvaging: Callable[[], bool],
    ) -> None:
        """Create the saver.

        Args:
            context: The agent's context.
            trainings: Trainings of this agent.
            tier: Choice of the job's tier.
            keeps: Wishes to keep versions.
            rejections: Rejected versions.
            node: Writer of this node's files.
            is_salvaging: Returns whether the surviving nodes save the job's last versions by themselves (`salvage`).
        """
        self._identity, self._membership = context.identity, context.membership
        self._log, self._spawn = context.log, context.spawn
        self._trainings, self._choice, self._keeps, self._rejections = trainings, tier, keeps, rejections
        self.node, self._is_salvaging = node, is_salvaging
        self._decides = SaveRules()
        self._events: deque[events.Event] = deque()
        self._stepping = False
        self._clock: asyncio.Task[None] | None = None
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[tuple[Stamp, str]]] = {}
        self._settled: dict[int, asyncio.Future[None]] = {}
        self._publishing: dict[int, asyncio.Future[None]] = {}  # by attempt
        self.troubles = SaveFailures()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # publish or remove, by training
        self.directory = ""  # the job's directory on the tier, as last seen by a worker
        self.succeeded = False  # the training has succeeded: no agent will complete a half-written version

    @property
    def tier(self) -> str:
        """Return the tier's directory, or "" without a tier."""
        return self._choice.directory

    @property
    def last(self) -> bool:
        """Return whether the job has ended here and its last versions are not yet reported as saved."""
        return self._decides.last

    @property
    def busy(self) -> bool:
        """Return whether a save is being written here or waited for."""
        return bool(self._decides.gathering) or self.node.busy

    def count_written_bytes(self, name: str) -> int:
        """Return the bytes of a training on the tier, as far as the root knows.

        They are the root's own written bytes and the finished files of other nodes.
        """
        gathering = self._decides.gathering.get(name)
        files = {} if gathering is None else gathering.files
        rank = self._membership.noderanks.get(self._identity.node)
        own_file = "" if rank is None else version.format_node_file(rank)
        return self.node.count_written_bytes(name) + sum(f.bytes for f in files.values() if f.name != own_file)

    def describe_saves(self, name: str) -> inspect_schema.TierState | None:
        """Return the root's knowledge of a training's saves, for `inspect`."""
        incarnation = self._membership.incarnation
        if not self.tier or incarnation is None or not incarnation.leads:
            return None
        stored, at = self._decides.saved.get(name, (None, 0.0))
        gathering = self._decides.gathering.get(name)
        return inspect_schema.TierState(
            directory=self.tier,
            stored=stored,
            time=at,
            saving=None if gathering is None else gathering.stamp,
            written=self.count_written_bytes(name) if gathering is not None else 0,
            problem=self.troubles.describe_last(name) or self.problem,
            keeping=self._keeps.list_wished_names(name),
            kept=self._keeps.list_given_names(name),
            interval_s=self._decides.compute_interval_s(name, self._choice.interval_s, self._choice.unserved_per_day),
            interval_reason=self._choice.explain_interval(self._decides.compute_duration_s(name)),
        )

    # ---- events ----------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Abort pending saves: a round begins, so they will not become whole."""
        self._process_event(events.Freeze())

    def forget(self) -> None:
        """Forget rejected versions, whose copies on the tier are useless."""
        self._process_event(events.Rejected())

    def on_sealed(self, training: Training, stamp: Stamp) -> None:
        """Handle a seal by the root, and save the version if it is due."""
        self._process_event(events.Sealed(training.name, stamp))

    def keep_all(self) -> None:
        """Save the versions that are to be kept. Called at the root."""
        for training in self._trainings:
            self._process_event(events.Keep(training.name))

    def on_message(
        self, incarnation: Incarnation, host: str, message: peer.SaveDown | peer.SaveUp | peer.SaveOver
    ) -> None:
        """Handle the parent's orders and the children's reports."""
        rounds = incarnation.rounds
        match message:
            case peer.SaveDown() if host == rounds.parent:
                self.on_order(message)
            case peer.SaveUp() if host in rounds.children:
                self.on_report(message)
            case peer.SaveOver() if host == rounds.parent and message.round == rounds.round:
                self.stop_waiting()

    def on_order(self, message: peer.SaveDown) -> None:
        """Save a version that the root has ordered, here and on the nodes below."""
        self._process_event(events.Wanted(message))

    def on_report(self, message: peer.SaveUp) -> None:
        """Handle a report of an agent. It goes up to the root, which counts."""
        self._process_event(events.Heard(message))

    def record_time_left(self, left_s: int | None) -> None:
        """Record the seconds until Slurm ends the job, or None without a time limit."""
        self._process_event(events.EndsIn(left_s))

    def on_detached(self, *, dead: bool) -> None:
        """Save the newest version before the memory is freed: the job has ended here without success.

        Args:
            dead: A node of the job is dead. The job may come back. Otherwise see `salvage`.
        """
        self._process_event(events.Detached(dead))

    def stop_waiting(self) -> None:
        """Stop waiting for the last versions, here and on the nodes below."""
        self._process_event(events.Ended())

    def record_last_stored(self) -> None:
        """Record that the last versions are on the tier, no matter which agent saved them."""
        self._process_event(events.Found())

    def on_draining(self, hosts: Sequence[str], partition: str) -> None:
        """Save the newest version now, at the root: nodes or a partition are being drained and may go soon.

        Args:
            hosts: The nodes being drained.
            partition: The partition being drained, or "".
        """
        incarnation = self._membership.incarnation
        if not self.tier or self._membership.detached or incarnation is None or not incarnation.leads:
            return
        shown = ", ".join(hosts[:_SHOWN]) + ("" if len(hosts) <= _SHOWN else f" and {len(hosts) - _SHOWN} more")
        drained = "; ".join(filter(None, (shown, replace_unprintable(partition[:_SAID]))))
        for training in self._trainings:
            if training.sealed is not None:
                self._log(
                    "draining", version=training.sealed.version, detail=f"{drained}: saving this version to the tier"
                )
        self._process_event(events.Leaving())

    async def flush(self, training: Training) -> tuple[Stamp, str]:
        """Bring the newest sealed version to the tier now, at the root.

        Return the version, and the reason why it is not on the tier, or "".
        """
        number = next(self._numbers)
        answer: asyncio.Future[tuple[Stamp, str]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._process_event(events.Ask(number, training.name))
        return await answer

    async def wait_idle(self, stalled_s: float) -> None:
        """Wait for the root's saves while they make progress, then abort them.

        Args:
            stalled_s: Seconds without progress after which a save is aborted.
        """
        number = next(self._numbers)
        settled = self._settled[number] = asyncio.get_running_loop().create_future()
        self._process_event(events.Settle(number, stalled_s))
        try:
            await settled
        finally:
            self._settled.pop(number, None)
            self._process_event(events.Unsettle(number))

    # ---- decisions and effects -------------------------------------------------------------------------

    def _collect_facts(self, now: float) -> events.SaveFacts:
        membership, incarnation, settings = self._membership, self._membership.incarnation, self._identity.settings
        return events.SaveFacts(
            here=None if incarnation is None else (incarnation.restart, incarnation.rounds.round),
            leads=incarnation is not None and incarnation.leads,
            parent=None if incarnation is None else incarnation.rounds.parent,
            epoch=membership.epoch,
            sealed={t.name: (t.sealed, t.world) for t in self._trainings if t.sealed is not None},
            missing=incarnation is not None and incarnation.is_incomplete(now),
            silent_s=0.0 if incarnation is None else incarnation.silent_s,
            salvaging=self._is_salvaging(),
            tier=bool(self.tier),
            interval_s=self._choice.interval_s,
            unserved_per_day=self._choice.unserved_per_day,
            before_end_s=settings.tier_before_end_s,
            flushes=bool(settings.tier_flush_s),
            is_rejected=self._rejections.is_rejected,
            any_rejected=bool(self._rejections.all),
            find_names=self._keeps.find_due_names,
            count_written_bytes=self.count_written_bytes,
            attempt=int.from_bytes(os.urandom(4)),
        )

    def _process_event(self, event: events.Event) -> None:
        """Step through events in sequence, including events caused by the effects of earlier events."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                now = clock.monotonic()
                for effect in self._decides.step(self._events.popleft(), self._collect_facts(now), now):
                    self._perform_effect(effect)
        finally:
            self._stepping = False
        if self._decides.waits and (self._clock is None or self._clock.done()):
            self._clock = self._spawn(self._run_clock())

    async def _run_clock(self) -> None:
        while self._decides.waits:
            await asyncio.sleep(_TICK_S)
            self._process_event(events.Tick())

    def _perform_effect(self, effect: events.Effect) -> None:
        incarnation = self._membership.incarnation
        match effect:
            case events.Order():  # messages being sent at the decision go first
                asyncio.get_running_loop().call_soon(self.on_order, effect.message)
            case events.Write():
                self._write(effect.message)
            case events.Down() if incarnation is not None:
                incarnation.send_down(effect.message)
            case events.Up() if incarnation is not None:
                incarnation.send(effect.host, effect.message)
            case events.Answer():
                answer = self._answers.pop(effect.id)
                if not answer.done():
                    answer.set_result((effect.stamp, effect.reason))
            case events.Settled():
                if not self._settled[effect.id].done():
                    self._settled[effect.id].set_result(None)
            case events.Failed():
                self.say(effect.name, effect.stamp.version, effect.reason, effect.host)
            case events.NotSaved():
                self._log("not_saved", version=effect.stamp.version, detail=effect.reason)
            case events.Clean() | events.Publish() | events.Name() | events.Look():
                self._spawn(self._perform_slow_effect(effect))

    async def _perform_slow_effect(self, effect: events.Clean | events.Publish | events.Name | events.Look) -> None:
        """Perform a slow effect and report its outcome, also after an internal error."""
        reason = "an internal error of gemini-hpc"
        try:
            match effect:
                case events.Clean():
                    await self.clean(effect.name)
                case events.Publish():
                    reason = await self.publish(effect.name, effect.gathering)
                case events.Name():
                    reason = await self._name(effect.name, effect.stamp)
                case events.Look():
                    with suppress(TierFailed):
                        await self._find_versions(())
        finally:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                match effect:
                    case events.Clean():
                        self._process_event(events.Cleaned(effect.name, effect.number))
                    case events.Publish():
                        self._process_event(events.Published(effect.name, effect.gathering, reason))
                    case events.Name():
                        self._process_event(events.Named(effect.name, effect.stamp, effect.flush, reason))
                    case events.Look():
                        self._process_event(events.Looked())

    def _write(self, message: peer.SaveDown) -> None:
        """Write this node's part of a save."""

        def report_files(files: tuple[NodeFile, ...], reason: str) -> None:
            for file in (None,) if reason else files:
                up = peer.SaveUp(
                    message.round, message.training, message.stamp, self._identity.node, file, reason, message.attempt
                )
                self.on_report(up)

        self.node.begin_save(WantedVersion(message.training, message.stamp, message.attempt), self.tier, report_files)

    # ---- the agent's end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Free all copies and end the processes."""
        self.node.close()

    async def leave(self, others: Mapping[str, SaveProgress]) -> None:
        """Remove unfinished versions before the agent ends, for at most `_LEAVE_S` seconds.

        The root removes its own pending version. After a successful training each node that was still writing also
        removes it, because its file may have been begun after the root's removal.

        Args:
            others: Pending versions of the salvage that this agent leads, by training.
        """
        begun = {**self._decides.gathering, **others}
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                for name, gathering in begun.items():
                    if gathering.whole:  # the manifest is being written
                        await asyncio.wait([self._expect_publication(gathering)])
                    else:  # a newer version may belong to another incarnation
                        await self.clean(name, Stamp(gathering.stamp.epoch, gathering.stamp.version + 1))
                for cut in await self.node.wait_cut_short() if self.succeeded else ():
                    await self.clean(cut.training, Stamp(cut.stamp.epoch, cut.stamp.version + 1))

    def _expect_publication(self, gathering: SaveProgress) -> asyncio.Future[None]:
        """Return a future that is done when the manifest exists or will not exist."""
        if gathering.attempt not in self._publishing:
            self._publishing[gathering.attempt] = asyncio.get_running_loop().create_future()
        return self._publishing[gathering.attempt]

    # ---- the tier --------------------------------------------------------------------------------------

    async def find_stored(
        self, without: Iterable[tuple[str, Stamp]], within_s: float, job: int = 0
    ) -> tuple[VersionManifest, ...]:
        """Return the newest whole version of each training on the tier, except those in `without`.

        Args:
            without: Versions to skip, each with its training.
            within_s: Seconds within which the tier must answer.
            job: Another job's id, or 0 for this job.

        Raises:
            TierFailed: The tier cannot be read within that time.
        """
        reason = f"{self.tier}: the file system does not answer"
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        return await (self._find_in_job(without, job) if job else self._find_versions(without))
                    except TierFailed as error:
                        reason = str(error)
                    await asyncio.sleep(_LOOK_S)
        raise TierFailed(self._report_unreadable(reason))

    async def _find_in_job(self, without: Iterable[tuple[str, Stamp]], job: int) -> tuple[VersionManifest, ...]:
        found = await worker_process.carry_out(
            orders.Look(self.tier, job, "", tuple(without), key=None, cluster=self._membership.cluster)
        )
        self.troubles.record_success("")
        return found.manifests if isinstance(found, orders.Found) else ()

    async def _find_versions(
        self, without: Iterable[tuple[str, Stamp]], *, begin: bool = False, make: bool = False
    ) -> tuple[VersionManifest, ...]:
        rejected = self._rejections.all
        order = orders.Look(
            self.tier,
            self._identity.job,
            "",
            tuple(without),
            begin,
            make,
            rejected,
            key=self._membership.key,
            cluster=self._membership.cluster,
        )
        found = await worker_process.carry_out(order)
        self.troubles.record_success("")
        if not isinstance(found, orders.Found):
            return ()
        manifests, self.directory = found.manifests, found.directory
        if found.beside:
            self._log("tier_beside", detail=found.beside)
        self._process_event(events.Stored({m.training: (m.stamp, m.time) for m in manifests}))
        return manifests

    async def check_once(self) -> None:
        """Read the tier at the job's start, so that the user hears of a missing directory now, not when it is needed.

        A user's own directory of the site is created now, and never later: if it vanishes, agents must wait for it.
        """
        try:
            await self._find_versions((), begin=True, make=self._choice.users)
        except TierFailed as error:
            self._report_unreadable(str(error))

    def _report_unreadable(self, reason: str) -> str:
        sentence = f"cannot read the tier: {reason}"
        self.say("", 0, sentence)
        return sentence

    @property
    def problem(self) -> str:
        """Return the reason why the tier's content is unknown, or ""."""
        return self.troubles.describe_last("")

    def say(self, name: str, number: int, reason: str, host: str = "") -> None:
        """Log once why a training's version is not on the tier."""
        if self.troubles.record_failure(name, reason, host):
            self._log(
                "not_saved" if name else "tier_silent", version=number, detail=self.troubles.describe_last(name)
            )

    async def _name(self, name: str, stamp: Stamp) -> str:
        """Give this version on the tier its names. Return the reason for a failure, or ""."""
        names = self._keeps.find_due_names(name, stamp)
        order = orders.Name(self.tier, self._identity.job, name, stamp, names, key=self._membership.key)
        try:
            done = await worker_process.carry_out(order) if names else None
        except TierFailed as error:
            return str(error)
        if isinstance(done, orders.Finished):
            self._keeps.record_names(name, stamp, done.names)
        return ""

    async def clean(self, name: str, before: Stamp | None = None) -> None:
        """Remove older versions that have not become whole."""
        order = orders.Clean(self.tier, self._identity.job, name, before, key=self._membership.key)
        try:
            async with self._turns[name]:  # a version of an earlier round may just become whole
                await worker_process.carry_out(order)
        except TierFailed as error:
            self.say(name, 0, f"cannot remove incomplete versions: {error}")

    async def publish(self, name: str, gathering: SaveProgress) -> str:
        """Make a version whole, after all its files are written. Return the reason for a failure, or ""."""
        over = self._expect_publication(gathering)
        try:
            return await self._publish(name, gathering)
        finally:
            self._publishing.pop(gathering.attempt, None)
            if not over.done():
                over.set_result(None)

    async def _publish(self, name: str, gathering: SaveProgress) -> str:
        settings, stamp = self._identity.settings, gathering.stamp
        if self._rejections.is_rejected(name, stamp):
            return "a training has rejected this version"
        order = orders.Finish(
            self.tier,
            self._identity.job,
            name,
            stamp,
            gathering.world,
            tuple(sorted(gathering.files.values(), key=lambda f: f.name)),
            settings.tier_keep_last,
            settings.tier_keep_every,
            self._keeps.find_due_names(name, stamp),
            key=self._membership.key,
            cluster=self._membership.cluster,
        )
        try:
            async with self._turns[name]:
                done = await worker_process.carry_out(order)
        except TierFailed as error:
            return str(error)
        trouble = done.trouble if isinstance(done, orders.Finished) else ""
        if isinstance(done, orders.Finished):
            self.directory = done.directory
            self._keeps.record_names(name, stamp, done.names)
        if trouble:
            self.say(name, stamp.version, trouble)
        else:
            self.troubles.record_success(name)
        self.troubles.record_success("")
        self._process_event(events.Stored({name: (stamp, clock.time())}))
        took_s = clock.monotonic() - gathering.began
        detail = f"{gathering.bytes} bytes in {len(gathering.files)} files in {took_s:.1f} s"
        self._log("saved", version=stamp.version, detail=detail)
        return ""
