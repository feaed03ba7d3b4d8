"""Messages between agents and the controller."""

from __future__ import annotations

from enum import IntEnum

from gemini_hpc.core.numbers import Count, Job, Port, Restart, Seconds, Time
from gemini_hpc.wire.inspect_schema import EventRecord
from gemini_hpc.wire.message import Message


class Registration(Message, frozen=True, tag="register"):
    """Agent -> controller, first message after the handshake, again after each attach, and when a node of which it
    has reported that it is silent is heard again (a hint).

    dead: nodes that it holds for dead; None: not said. spares: that the job was submitted with; without: lost nodes
    that it goes on without, as all its agents agree. rescuing: ranks of this node are copying live state of which the
    dead nodes had the only copies: the job is not to end yet. finished: whether all ranks that train on this node
    have closed their checkpointers; None: none has trained here.
    """

    job: Job
    restart: Restart
    host: str
    hosts: tuple[str, ...]
    replicas: Count
    port: Port
    instance: str
    state: str
    dead: tuple[str, ...] | None = None
    spares: Count = 0
    without: tuple[str, ...] = ()
    rescuing: bool = False
    finished: bool | None = None


class Report(Message, frozen=True, tag="report"):
    """Agent -> controller: this host of my job is silent; witnesses: peers that could not reach it either."""

    job: Job
    restart: Restart
    host: str
    witnesses: tuple[str, ...]
    t: Time


class EventsUp(Message, frozen=True, tag="events"):
    """Agent -> controller: new lines of the event log."""

    job: Job
    events: tuple[EventRecord, ...]


HEALTH = "health"  # purpose of a connection that brings a `RedNode`


class HealthVerdict(IntEnum):
    """The outcome of a site's health check, in words that a node's reason may have."""

    RED = 0
    HANGS = 1


class RedNode(Message, frozen=True, tag="red"):
    """Root of a node -> controller: the site's health check has just failed here, after this life of a job."""

    job: Job
    restart: Restart
    verdict: HealthVerdict


class Release(Message, frozen=True, tag="release"):
    """Controller -> agent: free everything and exit, for this reason. save: the job has ended for good, so what is
    sealed and not on the tier goes there first."""

    job: Job
    reason: str
    save: bool = False


class Notice(Message, frozen=True, tag="notice"):
    """Controller -> agent: one line for the users of the job, which its first training rank prints (requirement
    requeue)."""

    job: Job
    text: str


class Ending(Message, frozen=True, tag="ending"):
    """Controller -> agent: Slurm ends the job in so many seconds; None: it sets no time."""

    job: Job
    left_s: Seconds | None


class Draining(Message, frozen=True, tag="draining"):
    """Controller -> agent: these nodes of the job are being drained, or its partition is no longer up: its state."""

    job: Job
    hosts: tuple[str, ...]
    partition: str = ""


class Waits(Message, frozen=True, tag="waits"):
    """Controller -> agent: the job is pending in Slurm, held or in the queue, and has not ended: what is held for it
    stays for `held_retention_s` instead of `retention_s`."""

    job: Job


class HoldersAsk(Message, frozen=True, tag="holders?"):
    """Agent -> controller: which other agents of my job are there, on nodes that the job has left? Or, of another job
    of the same owner: where are its agents?"""

    job: Job


class Holders(Message, frozen=True, tag="holders"):
    """Controller -> agent: hosts on which agents of the job are or have been; their ports, 0 where that is not known
    (hints, like all of this)."""

    job: Job
    ports: dict[str, Port]
