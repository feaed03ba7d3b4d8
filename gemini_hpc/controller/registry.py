"""The connected agents and Slurm's facts about their jobs.

The facts are kept on disk. So a restarted controller still knows on which nodes each incarnation ran, which Slurm
forgets at the requeue.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from gemini_hpc import clock
from gemini_hpc.controller.reservation import HOLD_S, PREFIX
from gemini_hpc.controller.witnesses import Witnesses
from gemini_hpc.files import replace_file
from gemini_hpc.query.past import describe_freed_copies
from gemini_hpc.slurm import SlurmError
from gemini_hpc.slurm.api import SlurmApi
from gemini_hpc.slurm.facts import COMPLETING, CONFIGURING, PENDING, RUNNING, Job
from gemini_hpc.wire.controller import Registration
from gemini_hpc.wire.inspect_schema import EventRecord, InspectAsk
from gemini_hpc.wire.link import Link

log = logging.getLogger("gemini_hpc.controller")

_KEPT_INCARNATIONS = 4
FRESH_S = 1.0  # an agent whose last message is younger vouches for its node


@dataclass
class ConnectedAgent:
    """A connected agent.

    Attributes:
        is_verified: Whether its packets come from the address that Slurm has for its host. All other facts are the
            owner's claim in the last `wire.controller.Registration`.
        restart: The incarnation that the agent serves.
    """

    link: Link
    host: str
    job: int
    instance: str
    is_verified: bool = False
    restart: int = 0
    replicas: int = 0
    parity: int = 0
    port: int = 0
    state: str = ""
    spares: int = 0
    without: frozenset[str] = frozenset()
    is_rescuing: bool = False
    has_finished: bool | None = None
    sent_end: float = 0.0  # the job's end as sent to the agent (Unix time)
    logged_release_s: float = -math.inf  # last log line about its release (monotonic)
    has_sent_waits: bool = False  # whether `Waits` was sent: its job is pending
    since: float = field(default_factory=clock.time)

    def apply_registration(self, registration: Registration) -> None:
        """Take over the agent's facts about itself, from its first and each later registration."""
        self.restart, self.replicas, self.state = registration.restart, registration.replicas, registration.state[:32]
        self.parity = registration.parity
        self.port = registration.port if 0 < registration.port < 65536 else self.port
        self.spares, self.without = registration.spares, frozenset(registration.without)
        self.is_rescuing, self.has_finished = registration.rescuing, registration.finished

    @property
    def is_connected(self) -> bool:
        """Return whether its link is open, as far as this end knows."""
        return not self.link.closed


class StoredJob(msgspec.Struct):
    """The facts about a job that are kept on disk.

    Attributes:
        original: The user's own ReqNodeList, before any pin of ours.
        reservation: The user's own reservation, before any pin of ours.
        pinned: Whether the job's record has a pin of ours.
        slurmds: Start times of slurmd on the nodes of incarnation `slurmds_of`, by which a reboot is detected.
        addresses: Addresses of the nodes of all incarnations, as Slurm has them.
        shrunk: Nodes that an incarnation was made to leave while it ran.
        held_before: The last incarnation before which we have held the job.
    """

    raw_id: int
    user_id: int
    allocations: dict[int, list[str]] = {}
    original: list[str] = []
    reservation: str = ""
    pinned: bool = False
    first_seen: bool = False  # `original` was read from the first incarnation, which no pin can be in
    slurmds: dict[str, float] = {}
    addresses: dict[str, str] = {}
    slurmds_of: int = -1
    shrunk: dict[int, list[str]] = {}
    held_before: int = 1
    ended_at: float = 0.0
    ended_state: str = ""
    ended_told: bool = False  # the end is in the job's log


class Track:
    """A job and its agents."""

    def __init__(self, stored: StoredJob, path: str) -> None:
        self.stored = stored
        self._path = path
        self.job: Job | None = None
        self.agents: dict[str, ConnectedAgent] = {}
        self.witnesses = Witnesses()
        self.running_since: tuple[int, float] | None = None
        self.noticed = -1  # the last incarnation checked for a requeue that never comes
        self.looked = -1  # the last incarnation checked for missing agents
        self._freed: tuple[int, str] | None = None  # an incarnation and the text about its freed copies
        self._stood_at: float | None = None  # when it was last seen not running (monotonic)
        self._waits_since: float | None = None  # when it was first seen PENDING this time (monotonic)
        self._asked_of_wait: float | None = None
        self._is_unsaved = False  # the disk has an older state than this; logged when that began
        self._is_forgotten = False  # a forgotten entry is never written again

    @property
    def raw_id(self) -> int:
        """Return Slurm's raw job id."""
        return self.stored.raw_id

    @property
    def user_id(self) -> int:
        """Return the uid of the job's owner, from Slurm."""
        return self.stored.user_id

    @property
    def running_s(self) -> float | None:
        """Return for how many seconds the job has run without a pause; None if no pause was ever seen."""
        return None if self._stood_at is None else clock.monotonic() - self._stood_at

    def describe_freed(self, restart: int, read: Callable[[], Iterable[EventRecord]]) -> str:
        """Return the text about freed copies of an incarnation. `read` is called once for the events."""
        if self._freed is None or self._freed[0] != restart:
            self._freed = (restart, describe_freed_copies(read(), restart))
        return self._freed[1]

    def list_members(self, restart: int) -> tuple[str, ...]:
        """Return the nodes of an incarnation, as Slurm had them; empty if they were never seen."""
        return tuple(self.stored.allocations.get(restart, ()))

    def has_gone_on(self, restart: int, dead: Iterable[str]) -> bool:
        """Return whether the job's agents go on with spares in the place of these nodes of this incarnation."""
        gone = set(dead)
        return any(a.is_connected and a.restart == restart and a.without >= gone for a in self.agents.values())

    def is_rescuing(self, restart: int) -> bool:
        """Return whether the job's agents copy live state of which the dead nodes had the only copies."""
        return any(a.is_connected and a.restart == restart and a.is_rescuing for a in self.agents.values())

    def check_finished(self, restart: int) -> bool | None:
        """Return whether the training of this incarnation has succeeded; None while no agent has reported.

        The last report of each agent whose ranks trained counts, including agents that are gone. A node that the
        job goes on without does not count: a spare has finished its ranks' work.
        """
        agents = [a for a in self.agents.values() if a.restart == restart]
        without = frozenset[str]().union(*(a.without for a in agents))
        words = {a.has_finished for a in agents if a.host not in without}
        return (True in words and False not in words) if words else None

    def lacks(self, restart: int, host: str) -> bool:
        """Return whether Slurm has removed this node and the job goes on without it or no longer needs it."""
        out = self.job is not None and self.job.state == RUNNING and host not in self.job.nodes
        return out and (self.has_gone_on(restart, [host]) or bool(self.check_finished(restart)))

    def may_go_on(self, restart: int, left: Sequence[str]) -> bool:
        """Return whether the job's agents may go on with the nodes that Slurm has left to the job."""
        had = self.list_members(restart)
        spares = max((a.spares for a in self.agents.values() if a.is_connected and a.restart == restart), default=0)
        without = frozenset[str]().union(*(a.without for a in self.agents.values() if a.restart == restart))
        left = [host for host in left if host not in without]
        enough = len(had) - spares <= len(left) and 2 * len(left) > len(had)
        return bool(had) and had[0] in left and enough

    def give_up(self, restart: int, hosts: Iterable[str]) -> None:
        """Record that these healthy nodes were taken from a running incarnation.

        Their later fate is no failure of that incarnation.
        """
        gone = set(hosts)
        self.stored.allocations[restart] = [h for h in self.list_members(restart) if h not in gone]
        self.stored.shrunk = {restart: sorted(gone | set(self.stored.shrunk.get(restart, ())))}
        self.write_entry()

    def describe_nodes(self) -> str:
        """Return a note about its nodes for the job's owner; "" if there is none."""
        job, notes = self.job, []
        if job is None or job.state != RUNNING:
            return ""
        if left := self.stored.shrunk.get(job.restarts):
            now = ",".join(job.nodes[:16])
            notes.append(f"the job was made smaller while it ran: without {','.join(left[:16])}, now on {now}")
        if missing := sorted(set(self.stored.original) - set(job.nodes)):
            notes.append(
                f"submitted for {','.join(self.stored.original[:16])}, no longer on {','.join(missing[:16])}"
            )
        return "; ".join(notes)

    def list_hosts(self) -> set[str]:
        """Return the nodes of all remembered incarnations."""
        return {host for nodes in self.stored.allocations.values() for host in nodes}

    def find_holders(self, restart: int) -> dict[str, int]:
        """Return the hosts outside this incarnation where an agent may hold copies, with its port.

        The port is 0 if the agent is not connected: such an agent connects to a new controller only after a while.
        """
        own = set(self.list_members(restart))
        return {host: port for host, port in self.list_ports().items() if host not in own}

    def list_ports(self) -> dict[str, int]:
        """Return all hosts where an agent of the job is or was, with its port; 0 if it is not connected."""
        ports = {a.host: a.port for a in self.agents.values() if a.is_connected}
        return ports | dict.fromkeys(sorted(self.list_hosts() - ports.keys()), 0)

    def record_job(self, job: Job) -> None:
        """Take over Slurm's current facts."""
        self.job = job
        changed = False
        if job.state in (RUNNING, CONFIGURING) and job.nodes:
            known = self.stored.allocations.get(job.restarts, [])
            # A job that Slurm lets run on without a lost node (--no-kill) must still come back with another node.
            if tuple(known) != job.nodes and not set(job.nodes) < set(known):
                if job.restarts == 0:
                    self.stored.original, self.stored.first_seen = list(job.req_nodes), True
                if not job.reservation.startswith(PREFIX):
                    self.stored.reservation = job.reservation
                self.stored.allocations[job.restarts] = list(job.nodes)
                for old in sorted(self.stored.allocations)[:-_KEPT_INCARNATIONS]:
                    del self.stored.allocations[old]
                changed = True
            if job.state == RUNNING and (self.running_since is None or self.running_since[0] != job.restarts):
                self.running_since = (job.restarts, clock.monotonic())
        changed = self._record_end(job.state, job.has_ended) or changed
        self._record_wait(job.state)
        if self._was_held_long_ago():
            self._asked_of_wait = self._waits_since
            if not self.stored.pinned and self._has_pin(job):
                self.stored.pinned = changed = True
        if changed or self._is_unsaved:
            self.write_entry()

    async def remember_nodes(self, slurm: SlurmApi) -> None:
        """Record once per incarnation when slurmd was started on each of its nodes."""
        job = self.job
        if job is None or self.stored.slurmds_of == job.restarts or not self.list_members(job.restarts):
            return
        self.stored.slurmds_of, self.stored.slurmds = job.restarts, {}
        try:
            nodes = await slurm.read_nodes(self.list_members(job.restarts))
        except SlurmError:
            self.stored.slurmds_of = -1
            return
        self.stored.slurmds = {n.name: n.slurmd_start for n in nodes.values()}
        kept = self.list_hosts()
        addresses = self.stored.addresses | {n.name: n.address for n in nodes.values()}
        self.stored.addresses = {host: address for host, address in addresses.items() if host in kept}
        self.write_entry()

    def find_slurmd_start(self, restart: int, host: str) -> float:
        """Return the recorded start of slurmd on the host; 0.0 if it was not seen."""
        return self.stored.slurmds.get(host, 0.0) if self.stored.slurmds_of == restart else 0.0

    def remember_hold(self, restart: int) -> None:
        """Record that the job is held before this life. The progress of earlier lives no longer counts."""
        self.stored.held_before = restart
        self.write_entry()

    def remember_pin(self, is_pinned: bool) -> None:
        """Record that the job's record has, or no longer has, a pin of ours.

        Raises:
            OSError: A new pin cannot be recorded. The caller must not set it then.
        """
        if self.stored.pinned == is_pinned:
            return
        self.stored.pinned = is_pinned
        try:
            self._write()
        except OSError:
            self._is_unsaved = True
            if is_pinned:
                self.stored.pinned = False
                raise

    def _record_wait(self, state: str) -> None:
        if state != PENDING:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = clock.monotonic()

    def _was_held_long_ago(self) -> bool:
        """Return whether the job waits and no survivor's epilog can still steer it."""
        return self._waits_since is not None and clock.monotonic() - self._waits_since > HOLD_S

    def should_ask(self) -> bool:
        """Return whether to query Slurm for leftovers of an epilog's hold. True once for each wait.

        Such a hold had no controller.
        """
        return self._was_held_long_ago() and not self.stored.pinned and self._asked_of_wait != self._waits_since

    def _has_pin(self, job: Job) -> bool:
        """Return whether a waiting job's record has a reservation of ours, or a pin to nodes that the job has had."""
        if job.reservation.startswith(f"{PREFIX}{job.raw_id}_"):
            return True
        nodes, known = set(job.req_nodes), self.stored.first_seen or 0 in self.stored.allocations
        if not known or not nodes or nodes == set(self.stored.original):
            return False
        return any(nodes <= set(had) for restart, had in self.stored.allocations.items() if restart < job.restarts)

    def record_state(self, state: str, is_over: bool) -> None:
        """Take over a state from the watcher's table."""
        if state != RUNNING:
            self._stood_at = clock.monotonic()
        self._record_wait(state)
        if self._record_end(state, is_over) or self._is_unsaved:
            self.write_entry()

    def _record_end(self, state: str, is_over: bool) -> bool:
        if is_over and not self.stored.ended_at:
            self.stored.ended_at, self.stored.ended_state = clock.time(), state
            return True
        if not is_over and self.stored.ended_at and state != COMPLETING:
            self.stored.ended_at, self.stored.ended_state = 0.0, ""
            return True
        return False

    def write_entry(self) -> None:
        """Write the entry to disk. After a failure (full disk), the next change of the job writes it."""
        try:
            self._write()
        except OSError as exc:
            if not self._is_unsaved:
                log.error("job=%d event=job-not-kept detail=%s", self.raw_id, exc)
            self._is_unsaved = True

    def _write(self) -> None:
        if self._is_forgotten:
            return
        replace_file(self._path, msgspec.json.encode(self.stored))
        self._is_unsaved = False

    def remove_entry(self) -> None:
        """Remove the entry from disk for good."""
        self._is_forgotten = True
        with suppress(FileNotFoundError):
            os.unlink(self._path)


class Registry:
    """The jobs that have, or had, agents."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self.jobs: dict[int, Track] = {}
        decoder = msgspec.json.Decoder(StoredJob, strict=False)
        for name in os.listdir(directory):
            if name.endswith(".job"):
                with suppress(msgspec.MsgspecError, OSError), open(os.path.join(directory, name), "rb") as f:
                    stored = decoder.decode(f.read())
                    self.jobs[stored.raw_id] = Track(stored, self._build_path(stored.raw_id))

    def _build_path(self, raw_id: int) -> str:
        return os.path.join(self._directory, f"{int(raw_id)}.job")

    def track_job(self, job: Job) -> Track:
        """Return the job's entry, new or updated."""
        track = self.jobs.get(job.raw_id)
        if track is None or track.user_id != job.user_id:
            track = self.jobs[job.raw_id] = Track(StoredJob(job.raw_id, job.user_id), self._build_path(job.raw_id))
        track.record_job(job)
        return track

    def drop_job(self, raw_id: int) -> None:
        """Forget a job that is over."""
        track = self.jobs.pop(raw_id, None)
        if track is not None:
            track.remove_entry()

    def is_vouched(self, host: str) -> bool:
        """Return whether a verified agent on the host has sent a message within the last second.

        If none has, the agents there are asked for one. That saves slurmd from bare connections, each of which
        leaves two error lines in its log. Only agents that connect from that very node count: any user could claim
        from elsewhere that a node lives.
        """
        agents = [t.agents[host] for t in self.jobs.values() if host in t.agents]
        verified = [a for a in agents if a.is_connected and a.is_verified]
        if any(clock.monotonic() - a.link.last_heard < FRESH_S for a in verified):
            return True
        for agent in verified:
            agent.link.send(InspectAsk())
        return False

    def find_agent(self, raw_id: int, host: str) -> ConnectedAgent | None:
        """Return the connected agent of a job on a host."""
        track = self.jobs.get(raw_id)
        agent = track.agents.get(host) if track else None
        return agent if agent is not None and agent.is_connected else None
