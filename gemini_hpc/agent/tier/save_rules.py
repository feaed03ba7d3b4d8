"""Rules of saves: one agent's decisions on which sealed versions go to the tier, and when a save is over.

The root chooses a version right after it seals it, repeats the order down the tree, and counts the files that nodes
report. A failed save is reported, dropped, and retried with a newer version. When the job ends, or on request, the
newest version is saved at once.

The rules contain no clock, no socket and no waiting. Each event comes with the time (monotonic) and with the agent's
facts. The rules return the effects, in order. `saver` carries them out.

Before the first save of a round, and after a failed save, the root removes what never became whole. The successor of
a dead agent reports that it lacks the version, and a newer one is begun. An agent told of another version gives up
its own. Shortly before Slurm ends the job, a version is saved whatever the interval. At an end without a missing node
the last versions are saved: agents stay until `SaveOver`, for at most `tier_flush_s`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from gemini_hpc.agent.tier import save_events as events
from gemini_hpc.agent.tier.save_events import Effect, SaveFacts
from gemini_hpc.agent.tier.save_progress import SaveProgress
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.tier_interval import choose_interval_s
from gemini_hpc.wire import peer

AGAIN_S = 5.0  # wait after a failure, unless the interval is shorter; also the interval of repeated orders
GATHER_S = 3600.0  # all nodes write their part within this time, or the save fails
FLUSH_TRIES = 3  # saves that one flush tries
SAVES = 5  # number of last saves whose durations count
_NOTHING = Stamp(0, 0)


@dataclass
class _Flush:
    """A request to save the newest version of a training now: `wanted` or a later one.

    Attributes:
        name: Name of the training.
        wanted: Oldest version that satisfies the request.
        asked: A caller waits for the answer.
        waits: What the flush waits for: a save, a removal or a naming.
        tries: Number of tries.
        reason: Why the last try has failed.
    """

    name: str
    wanted: Stamp | None
    asked: bool
    waits: SaveProgress | Literal["", "clean", "name"] = ""
    tries: int = 0
    reason: str = ""


@dataclass
class _End:
    """The end of the job in this restart and round.

    First flushes save the last versions of the trainings. Then the tier is read. Then a node that may just have been
    lost gets time to show by its silence.

    Attributes:
        here: Restart and round.
        names: Trainings whose last versions are saved.
        flushes: Pending flushes.
        stage: Current stage.
        until: End of the last stage, in seconds.
    """

    here: tuple[int, int]
    names: tuple[str, ...]
    flushes: set[int]
    stage: Literal["saving", "looking", "silent"] = "saving"
    until: float = 0.0


@dataclass
class _Settling:
    """A wait until pending saves end or stall.

    Attributes:
        stalled_s: Seconds without progress after which saves are aborted.
        since: Time of the last progress, in seconds.
        through: Bytes written at the last check.
        tidying: No save is pending any more.
    """

    stalled_s: float
    since: float
    through: int = -1
    tidying: bool = False


class SaveRules:
    """The save decisions of one agent. They live as long as the agent."""

    def __init__(self) -> None:
        self.gathering: dict[str, SaveProgress] = {}  # pending saves at the root, by training
        self.saved: dict[str, tuple[Stamp, float]] = {}  # at the root: newest on the tier, and its Unix time
        self.last = False  # the job has ended here, and its last versions are not yet reported as saved
        self._ended: tuple[int, int] | None = None  # restart and round in which they were reported as saved
        self._due: dict[str, float] = {}
        self._keep_at: dict[str, float] = {}  # after a failure: time of the next try to keep a version
        self._asked: dict[str, float] = {}  # time of the last order to the nodes
        self._finishing: dict[str, SaveProgress] = {}  # saves whose manifest is being written
        self._cleans = 0
        self._tidy: dict[str, tuple[int, bool]] = {}  # by training: the last removal, and whether it is over
        self._naming: set[str] = set()
        self._ends_at = math.inf  # as Slurm reports
        self._before_end: dict[str, float] = {}  # the job's end for which the save before the end was begun
        self._took_s: dict[str, deque[float]] = {}  # durations of the last saves
        self._flushes: dict[int, _Flush] = {}
        self._own_flushes = 0  # own flushes have negative numbers
        self._end: _End | None = None
        self._settling: dict[int, _Settling] = {}

    def compute_duration_s(self, name: str) -> float | None:
        """Return the median duration of the last saves of a training in seconds, or None before the first."""
        took = self._took_s.get(name)
        return median(took) if took else None

    def compute_interval_s(self, name: str, named_s: float, unserved_per_day: float | None) -> float:
        """Return the seconds from the start of one save of a training to the next.

        Args:
            name: Name of the training.
            named_s: The interval as in `SaveFacts.interval_s`.
            unserved_per_day: As in `SaveFacts`.
        """
        took_s = self.compute_duration_s(name)
        return named_s if unserved_per_day is None or took_s is None else choose_interval_s(took_s, unserved_per_day)

    def _derive_interval_s(self, name: str, facts: SaveFacts) -> float:
        return self.compute_interval_s(name, facts.interval_s, facts.unserved_per_day)

    @property
    def waits(self) -> bool:
        """Return whether ticks are needed."""
        silent = self._end is not None and self._end.stage == "silent"
        return bool(self.gathering or self._flushes or self._settling or silent)

    def step(self, event: events.Event, facts: SaveFacts, now: float) -> list[Effect]:
        """Return the effects of an event."""
        return list(self._step(event, facts, now))

    def _step(self, event: events.Event, facts: SaveFacts, now: float) -> Iterator[Effect]:
        match event:
            case events.Sealed():
                yield from self._on_sealed(event.name, event.stamp, facts, now)
            case events.Keep():
                yield from self._save_kept(event.name, facts, now)
            case events.Wanted():
                if facts.here is not None and event.message.round == facts.here[1] and self._accepts_saves(facts):
                    yield events.Down(event.message)
                    yield events.Write(event.message)
            case events.Heard():
                yield from self._on_report(event.message, facts, now)
            case events.Ask():
                yield from self._flush(event.id, event.name, True, facts, now)
            case events.Leaving():
                if facts.leads and facts.tier:
                    for name in facts.sealed:
                        yield from self._flush(self._issue_number(), name, False, facts, now)
            case events.Detached():
                yield from self._on_detached(event.dead, facts, now)
            case events.Ended():
                yield from self._stop_waiting(facts)
            case events.Found():
                self.last = False
            case events.EndsIn():
                self._ends_at = math.inf if event.left_s is None else now + event.left_s
            case events.Stored():
                self.saved.update(
                    {n: found for n, found in event.there.items() if not facts.is_rejected(n, found[0])}
                )
            case events.Rejected():  # rejected versions on the tier are useless
                self.saved = {n: found for n, found in self.saved.items() if not facts.is_rejected(n, found[0])}
            case events.Freeze():
                self.last = False
                self._tidy.clear()
                yield from self._give_up("a recovery round began meanwhile", facts, now)
            case events.Settle():
                self._settling[event.id] = _Settling(event.stalled_s, now)
                yield from self._check_waits(facts, now)
            case events.Unsettle():
                self._settling.pop(event.id, None)
            case events.Tick():
                yield from self._tick(facts, now)
            case events.Cleaned():
                yield from self._on_cleaned(event, facts, now)
            case events.Published():
                yield from self._on_published(event, facts, now)
            case events.Named():
                yield from self._on_named(event, facts, now)
            case events.Looked():
                if self._end is not None and self._end.stage == "looking":
                    yield from self._listen(self._end, facts, now)

    def _tick(self, facts: SaveFacts, now: float) -> Iterator[Effect]:
        yield from self._check_waits(facts, now)
        for name in list(self.gathering):
            yield from self._expire(name, facts, now)
            gathering = self.gathering.get(name)
            if gathering is not None and not gathering.whole and now - self._asked[name] >= AGAIN_S:
                yield from self._order(name, gathering, facts, now)
        if self._end is not None and self._end.stage == "silent" and now >= self._end.until:
            yield from self._finish_end(self._end, facts)

    # ---- choice of a version and its time --------------------------------------------------------------

    @staticmethod
    def _accepts_saves(facts: SaveFacts) -> bool:
        return facts.tier and not facts.salvaging

    def _on_sealed(self, name: str, stamp: Stamp, facts: SaveFacts, now: float) -> Iterator[Effect]:
        """Save the sealed version if a save is due."""
        if not facts.tier or stamp.epoch != facts.epoch or facts.is_rejected(name, stamp):
            return
        yield from self._save_kept(name, facts, now)
        due = now >= self._due.setdefault(name, now + self._derive_interval_s(name, facts)) or self._is_near_end(
            name, facts, now
        )
        yield from self._expire(name, facts, now)
        tidied = yield from self._ensure_tidy(name)
        if name not in self.gathering and tidied and due:
            yield from self._begin_save(name, stamp, facts, now)

    def _save_kept(self, name: str, facts: SaveFacts, now: float) -> Iterator[Effect]:
        """Save a version to keep before versions that are only due.

        A pending save of an earlier version gives way. If the version on the tier satisfies the wish, it gets the
        name.
        """
        stamp, _ = facts.sealed.get(name, (None, 0))
        wanted = facts.find_names(name, stamp) if stamp is not None else {}
        if not wanted or stamp is None or not facts.leads or not facts.tier or facts.is_rejected(name, stamp):
            return
        yield from self._expire(name, facts, now)
        first, gathering, serving = (
            min(wanted.values()),
            self.gathering.get(name),
            self._find_serving(name, stamp, wanted, facts),
        )
        if serving is not None:
            if name not in self._naming:
                self._naming.add(name)
                yield events.Name(name, serving, 0)
            return
        tidied = False
        if now >= self._keep_at.get(name, 0.0) and not facts.salvaging:
            tidied = yield from self._ensure_tidy(name)
        if not tidied or (gathering is not None and gathering.stamp.version >= first):
            return
        if gathering is not None and not gathering.whole:  # a whole save has all files and lacks only its manifest
            del self.gathering[name]
            reason = f"version {stamp.version} goes first, because it is to be kept"
            yield from self._end_save(gathering, reason, facts, now)
        if name not in self.gathering or gathering is self.gathering[name]:
            yield from self._begin_save(name, stamp, facts, now)

    def _find_serving(self, name: str, sealed: Stamp, wanted: Mapping[str, int], facts: SaveFacts) -> Stamp | None:
        """Return the version on the tier if it satisfies a wish, or None.

        It must be of this lineage, and not older than the requested version.
        """
        known = self.saved.get(name)
        if known is None or (known[0].epoch != facts.epoch and known[0] != sealed):
            return None
        return known[0] if min(wanted.values()) <= known[0].version <= sealed.version else None

    def _find_last_duration_s(self, name: str) -> float:
        took = self._took_s.get(name)
        return took[-1] if took else 0.0

    def _is_near_end(self, name: str, facts: SaveFacts, now: float) -> bool:
        """Return whether the save before the job's time limit is due."""
        if not facts.before_end_s or self._before_end.get(name) == self._ends_at:
            return False
        return now >= self._ends_at - max(facts.before_end_s, 2 * self._find_last_duration_s(name))

    def _ensure_tidy(self, name: str) -> Generator[Effect, None, bool]:
        """Return whether earlier unfinished versions are removed. No save is written until then."""
        if name not in self._tidy:
            self._cleans += 1
            self._tidy[name] = self._cleans, False
            yield events.Clean(name, self._cleans)
        return self._tidy[name][1]

    def _on_cleaned(self, event: events.Cleaned, facts: SaveFacts, now: float) -> Iterator[Effect]:
        if self._tidy.get(event.name) == (event.number, False):
            self._tidy[event.name] = event.number, True
        for number, flush in list(self._flushes.items()):
            if flush.waits == "clean" and flush.name == event.name:
                yield from self._try(number, flush, facts, now)
        yield from self._check_waits(facts, now)

    # ---- one version -----------------------------------------------------------------------------------

    def _begin_save(self, name: str, stamp: Stamp, facts: SaveFacts, now: float) -> Iterator[Effect]:
        self._due[name] = now + self._derive_interval_s(name, facts)
        if self._is_near_end(name, facts, now):
            self._before_end[name] = self._ends_at
        gathering = self.gathering[name] = SaveProgress(stamp, facts.sealed[name][1], facts.attempt, now)
        yield from self._order(name, gathering, facts, now)

    def _order(self, name: str, gathering: SaveProgress, facts: SaveFacts, now: float) -> Iterator[Effect]:
        """Order all agents to save, repeatedly: an agent that has been restarted has forgotten the order."""
        if facts.here is not None:
            self._asked[name] = now
            yield events.Order(peer.SaveDown(facts.here[1], name, gathering.stamp, gathering.attempt))

    def _on_report(self, message: peer.SaveUp, facts: SaveFacts, now: float) -> Iterator[Effect]:
        """Pass a report up to the root, which counts it."""
        if facts.here is None or message.round != facts.here[1]:
            return
        if facts.parent is not None:
            yield events.Up(facts.parent, message)
            return
        name, gathering = message.training, self.gathering.get(message.training)
        if gathering is None or (gathering.stamp, gathering.attempt) != (message.stamp, message.attempt):
            return
        if self._finishing.get(name) is gathering:
            return
        if message.file is None:
            yield from self._fail_save(name, gathering, message.reason, facts, now, message.host)
            return
        gathering.record_files((message.file,))
        if gathering.whole:
            self._finishing[name] = gathering
            yield events.Publish(name, gathering)

    def _on_published(self, event: events.Published, facts: SaveFacts, now: float) -> Iterator[Effect]:
        name, gathering = event.name, event.gathering
        if self._finishing.get(name) is gathering:
            del self._finishing[name]
        if event.reason:
            yield from self._fail_save(name, gathering, event.reason, facts, now)
            return
        if self.gathering.get(name) is gathering:
            del self.gathering[name]
        self._took_s.setdefault(name, deque(maxlen=SAVES)).append(now - gathering.began)
        if facts.unserved_per_day is not None:
            self._due[name] = gathering.began + self._derive_interval_s(name, facts)
        yield from self._end_save(gathering, "", facts, now)

    def _fail_save(
        self, name: str, gathering: SaveProgress, reason: str, facts: SaveFacts, now: float, host: str = ""
    ) -> Iterator[Effect]:
        if self.gathering.get(name) is gathering:
            del self.gathering[name]
            self._due[name] = min(self._due.get(name, 0.0), now + AGAIN_S)
            self._keep_at[name] = now + AGAIN_S
            self._tidy.pop(name, None)
        yield events.Failed(name, gathering.stamp, reason, host)
        yield from self._end_save(gathering, f"{host}: {reason}" if host else reason, facts, now)

    def _expire(self, name: str, facts: SaveFacts, now: float) -> Iterator[Effect]:
        gathering = self.gathering.get(name)
        if gathering is not None and now - gathering.began >= GATHER_S:
            yield from self._fail_save(
                name, gathering, f"not all nodes have written their part within {GATHER_S:.0f} s", facts, now
            )

    def _give_up(self, reason: str, facts: SaveFacts, now: float) -> Iterator[Effect]:
        """Abort the root's pending saves, which will not become whole."""
        begun = list(self.gathering.values())
        self.gathering.clear()
        for gathering in begun:
            yield from self._end_save(gathering, reason, facts, now)

    def _end_save(self, gathering: SaveProgress, reason: str, facts: SaveFacts, now: float) -> Iterator[Effect]:
        """End a save, and continue the flushes that wait for it."""
        for number, flush in list(self._flushes.items()):
            if flush.waits is not gathering:
                continue
            if not reason and flush.wanted is not None and gathering.stamp >= flush.wanted:
                yield from self._answer(number, gathering.stamp, "", facts, now)
                continue
            flush.reason, flush.tries = reason, flush.tries + 1
            if flush.tries < FLUSH_TRIES:
                yield from self._try(number, flush, facts, now)
            else:
                yield from self._answer(number, flush.wanted or _NOTHING, reason, facts, now)

    def _on_named(self, event: events.Named, facts: SaveFacts, now: float) -> Iterator[Effect]:
        if event.reason:
            self.saved.pop(event.name, None)  # the version may have vanished: the next one is saved then
            yield events.Failed(event.name, event.stamp, event.reason)
        if not event.flush:
            self._naming.discard(event.name)
        elif event.flush in self._flushes:
            yield from self._answer(event.flush, event.stamp, event.reason, facts, now)

    # ---- flushes ---------------------------------------------------------------------------------------

    def _issue_number(self) -> int:
        self._own_flushes -= 1
        return self._own_flushes

    def _flush(self, number: int, name: str, asked: bool, facts: SaveFacts, now: float) -> Iterator[Effect]:
        """Bring the newest version of a training to the tier.

        A running training may overtake a version before it is copied. The next version is tried then.
        """
        stamp, _ = facts.sealed.get(name, (None, 0))
        self._flushes[number] = flush = _Flush(name, stamp, asked)
        yield from self._try(number, flush, facts, now)

    def _try(self, number: int, flush: _Flush, facts: SaveFacts, now: float) -> Iterator[Effect]:
        name, wanted = flush.name, flush.wanted
        stamp, _ = facts.sealed.get(name, (None, 0))
        if not facts.leads or stamp is None or wanted is None:
            reason = flush.reason or "no version of this training has been sealed yet"
            yield from self._answer(number, stamp or _NOTHING, reason, facts, now)
            return
        if facts.is_rejected(name, stamp):  # a rejected version is not needed
            yield from self._answer(number, stamp, "", facts, now)
            return
        kept = self.saved.get(name)
        if kept is not None and kept[0] >= wanted:
            flush.waits = "name"
            yield events.Name(name, kept[0], number)
            return
        if facts.salvaging:
            reason = flush.reason or "a node is missing, and the other nodes save the version by themselves"
            yield from self._answer(number, wanted, reason, facts, now)
            return
        flush.waits = "clean"
        if not (yield from self._ensure_tidy(name)):
            return
        yield from self._expire(name, facts, now)
        if name not in self.gathering:
            yield from self._begin_save(name, stamp, facts, now)
        flush.waits = self.gathering[name]

    def _answer(self, number: int, stamp: Stamp, reason: str, facts: SaveFacts, now: float) -> Iterator[Effect]:
        flush = self._flushes.pop(number)
        if flush.asked:
            yield events.Answer(number, stamp, reason)
        elif reason:
            yield events.NotSaved(stamp, reason)
        if self._end is not None and number in self._end.flushes:
            self._end.flushes.discard(number)
            yield from self._release_agents(self._end, facts, now)

    # ---- the job's end ---------------------------------------------------------------------------------

    def _on_detached(self, dead: bool, facts: SaveFacts, now: float) -> Iterator[Effect]:
        """Save the newest version before the memory is freed.

        If a node is dead the job may come back. Otherwise see `salvage`.
        """
        possible = bool(facts.tier and facts.flushes and facts.sealed)
        if facts.here is None or facts.here == self._ended:
            return
        self.last = possible
        if facts.leads and not dead:
            names = tuple(facts.sealed) if possible else ()
            flushes = {self._issue_number(): name for name in names}
            self._end = end = _End(facts.here, names, set(flushes))
            for number, name in flushes.items():
                yield from self._flush(number, name, False, facts, now)
            if not names:
                yield from self._release_agents(end, facts, now)

    def _release_agents(self, end: _End, facts: SaveFacts, now: float) -> Iterator[Effect]:
        """Release all agents after the root has saved the last versions.

        They are not released if a node is missing or the job has come back meanwhile.
        """
        if end.flushes or end.stage != "saving":
            return
        if end.names and facts.any_rejected:
            end.stage = "looking"  # marks rejected versions on the tier, for readers after all agents have gone
            yield events.Look()
        else:
            yield from self._listen(end, facts, now)

    def _listen(self, end: _End, facts: SaveFacts, now: float) -> Iterator[Effect]:
        end.stage, end.until = "silent", now
        if self._are_all_stored(end, facts):
            yield from self._finish_end(end, facts)
        else:
            end.until = now + facts.silent_s  # a node may just have been lost

    def _finish_end(self, end: _End, facts: SaveFacts) -> Iterator[Effect]:
        self._end = None
        if end.here == facts.here and (not facts.missing or self._are_all_stored(end, facts)):
            yield from self._stop_waiting(facts)

    def _are_all_stored(self, end: _End, facts: SaveFacts) -> bool:
        """Return whether the tier has the last sealed versions."""
        return all(self._is_stored(name, facts) for name in end.names)

    def _is_stored(self, name: str, facts: SaveFacts) -> bool:
        if name not in facts.sealed:
            return False
        (stamp, _), known = facts.sealed[name], self.saved.get(name)
        return facts.is_rejected(name, stamp) or (known is not None and known[0] >= stamp)

    def _stop_waiting(self, facts: SaveFacts) -> Iterator[Effect]:
        """Stop waiting for the last versions, here and on the nodes below."""
        self.last = False
        if facts.here is not None:
            self._ended = facts.here
            if facts.tier:
                yield events.Down(peer.SaveOver(facts.here[1]))

    # ---- before a salvage -----------------------------------------------------------------------------

    def _check_waits(self, facts: SaveFacts, now: float) -> Iterator[Effect]:
        for number, settling in list(self._settling.items()):
            if not settling.tidying:
                through = sum(facts.count_written_bytes(name) for name in self.gathering)
                if through != settling.through:
                    settling.through, settling.since = through, now
                if self.gathering and now - settling.since < settling.stalled_s:
                    continue
                settling.tidying, settling.since = True, now
                yield from self._give_up(
                    "a node is missing: the other nodes save the copies that are left", facts, now
                )
            tidying = not all(done for _, done in self._tidy.values())
            if number in self._settling and (not tidying or now - settling.since >= settling.stalled_s):
                del self._settling[number]
                yield events.Settled(number)
