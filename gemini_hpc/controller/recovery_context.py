"""The parts of the acting controller that its work shares, and the view of one recovery on the others."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gemini_hpc import clock
from gemini_hpc.config import Settings
from gemini_hpc.controller import probe
from gemini_hpc.controller.alert import Alerts
from gemini_hpc.controller.event_log import EventLogs
from gemini_hpc.controller.fencing import Act, Claim, Verdict, Veto
from gemini_hpc.controller.gate import Gate
from gemini_hpc.controller.journal import Journal
from gemini_hpc.controller.lemons import Lemons
from gemini_hpc.controller.primary import Primary
from gemini_hpc.controller.progress import count_without_progress
from gemini_hpc.controller.reach import Reachability
from gemini_hpc.controller.registry import Registry, Track
from gemini_hpc.controller.reservation import RESERVED_MINUTES, parse_raw_id
from gemini_hpc.controller.survivors import Survivors
from gemini_hpc.controller.withheld import Withheld
from gemini_hpc.slurm.api import SlurmApi
from gemini_hpc.slurm.facts import COMPLETING, CONFIGURING, RUNNING, Node
from gemini_hpc.wire.inspect_schema import EventRecord

log = logging.getLogger("gemini_hpc.controller")

OUTAGE_S = 120.0  # a silent host counts for this long in a mass outage


@dataclass
class Suspect:
    """A node that is being judged."""

    host: str
    claim: Claim = Claim.REPORTED
    since: float = field(default_factory=clock.monotonic)
    found_at: float = field(default_factory=clock.time)  # Unix time at which it was found silent
    seen: probe.ProbeHistory | None = None
    node: Node | None = None  # as Slurm had it at the last judgement
    left: Veto | None = None  # the last reported reason for leaving it to Slurm
    is_down: bool = False  # the journal has recorded that it is being set DOWN
    verdict: Verdict = field(default_factory=lambda: Verdict(Act.WAIT, "just reported"))

    @property
    def silent_s(self) -> float:
        """Return for how many seconds the node has been silent."""
        return self.seen.silent_s if self.seen else 0.0

    def stop(self) -> None:
        """Stop probing."""
        if isinstance(self.seen, probe.RepeatedProbe):
            self.seen.stop()


@dataclass(eq=False)
class ActiveRecovery:
    """The state of a recovery in progress that all others see; `recovery.Recovery` adds the work.

    Attributes:
        user_id: The uid of the job's owner.
        suspects: The reported hosts, and survivors that have fallen silent.
    """

    user_id: int
    suspects: dict[str, Suspect] = field(default_factory=dict)
    survivors: Survivors | None = None
    is_acting: bool = False

    def list_accused(self) -> set[str]:
        """Return the suspects that are not cleared."""
        return {h for h, s in self.suspects.items() if s.verdict.act is not Act.DISMISS}

    def list_silent(self) -> set[str]:
        """Return the suspects that are silent and that no journal counts as fenced.

        A mass outage must show in this set until a node is really being set DOWN. A node that Slurm itself
        considers DOWN counts until that is acted on.
        """
        adopted = {h for h, s in self.suspects.items() if self.is_acting and s.verdict.act is Act.ADOPT}
        return {h for h, s in self.suspects.items() if s.silent_s > 0 and not s.is_down} - adopted


@dataclass(eq=False)
class RecoveryContext:
    """The shared parts; `recoveries.Recoveries` adds the work.

    Attributes:
        on_event: Called with job, restart and name of each event that is logged.
        reserving: Lock that one recovery holds while it chooses and reserves nodes.
        longest_epilog_s: Longest time for which a job was seen COMPLETING, mostly because of its epilogs.
    """

    settings: Settings
    slurm: SlurmApi
    journal: Journal
    logs: EventLogs
    registry: Registry
    primary: Primary
    lemons: Lemons

    def __post_init__(self) -> None:
        """Create the parts that are made from the others."""
        self.alerts = Alerts(self.settings, self.journal)
        self.gate, self.withheld = Gate(self.settings), Withheld(self.settings.state_dir, self.log_event)
        self.reach = Reachability(self.settings, self.registry)
        self.on_event: Callable[[int, int, str], None] = lambda raw_id, restart, event: None
        self.reserving = asyncio.Lock()
        self.longest_epilog_s = 0.0
        self._active: Mapping[tuple[int, int], ActiveRecovery] = {}
        self._resuming = set(self.journal.read_open())
        self._outage: dict[tuple[int, str], float] = {}  # (owner of the job, host)

    def log_event(self, raw_id: int, restart: int, event: str, host: str = "", detail: str = "") -> None:
        """Write one line to a job's event log and to the service's own log."""
        log.info("job=%d restart=%d event=%s host=%s detail=%s", raw_id, restart, event, host or "-", detail)
        self.on_event(raw_id, restart, event)
        self.logs.append_events(raw_id, [EventRecord(clock.time(), event, host, restart, 0, detail[:400])])

    def read_events(self, track: Track) -> tuple[EventRecord, ...]:
        """Return the events of a job in order of time."""
        return self.logs.read_events(track.raw_id, track.user_id)

    def compute_reservation_minutes(self) -> int:
        """Return how many minutes a reservation lasts if it is not deleted (requirement reservations)."""
        return max(RESERVED_MINUTES, math.ceil(3 * self.longest_epilog_s / 60))

    def list_accused(self) -> set[str]:
        """Return the hosts that some job's agents or our own probes suspect and that are not cleared."""
        return {host for recovery in self._active.values() for host in recovery.list_accused()}

    def list_silent(self, hosts: set[str], user_id: int | None = None) -> set[str]:
        """Return these hosts and all others that are, or recently were, silent.

        With `user_id`, only hosts of that user's jobs are added. A mass outage shows in the sum.
        """
        since = clock.monotonic() - OUTAGE_S
        self._outage = {key: t for key, t in self._outage.items() if t > since}
        found = {host for uid, host in self._outage if user_id in (None, uid)}
        for recovery in self._active.values():
            if user_id in (None, recovery.user_id):
                found |= recovery.list_silent()
        return hosts | found

    def list_protected(self, user_id: int) -> set[str]:
        """Return the nodes of other owners' protected jobs that run or are on their way back.

        A controller that has just started does not know the state of the jobs on its disk: these count as running.
        """
        found: set[str] = set()
        for track in self.registry.jobs.values():
            if track.user_id == user_id or not track.stored.allocations or track.stored.ended_at:
                continue
            runs = track.job is None or track.job.state in (RUNNING, CONFIGURING, COMPLETING, "SUSPENDED")
            if runs or self.is_active(track.raw_id):
                found |= set(track.list_members(max(track.stored.allocations)))
        return found

    def explain_hold(self, track: Track) -> str:
        """Return why this job must be held instead of running again: its recoveries make no progress. "" if not."""
        most, since = self.settings.recoveries_without_progress, track.stored.held_before
        count, version = count_without_progress(self.read_events(track), since) if most else (0, 0)
        if not most or count < most:
            return ""
        newest = f"newer than version {version}" if version else "at all"
        recoveries = "recoveries in a row" if count > 1 else "recovery"
        return f"{count} {recoveries} sealed nothing {newest}"

    def find_survivors(self, name: str) -> set[str] | None:
        """Return the survivors for whom a reservation of ours was made; None if they are not known."""
        raw_id = parse_raw_id(name)
        for (job, _), recovery in self._active.items():
            if job == raw_id and recovery.survivors is not None:
                return set(recovery.survivors.names)
        return None

    def remember_silent(self, hosts: set[str]) -> None:
        """Remember hosts that were too many to be fenced. They count again when the next host is judged."""
        now = clock.monotonic()
        for recovery in self._active.values():
            self._outage.update({(recovery.user_id, host): now for host in hosts & recovery.suspects.keys()})

    def is_active(self, raw_id: int) -> bool:
        """Return whether a recovery of this job is in progress.

        Its replicas are then needed, whatever Slurm reports meanwhile.
        """
        return any(key[0] == raw_id for key in self._active) or any(
            key.split(".")[0] == str(raw_id) for key in self._resuming
        )
