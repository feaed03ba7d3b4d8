"""Messages between agents and the controller."""

from __future__ import annotations

from enum import IntEnum

from gemini_hpc.core.numbers import Blocks, Count, Job, Port, Restart, Seconds, Time
from gemini_hpc.wire.inspect_schema import EventRecord
from gemini_hpc.wire.message import Message


class Registration(Message, frozen=True, tag="register"):
    """An agent's registration with the controller (agent -> controller).

    The agent sends it first after the handshake and again after each attach. The agent also sends it as a hint when a
    node that it reported as silent is heard again.

    Attributes:
        dead: Nodes that the agent considers dead; None: not reported.
        spares: Number of spare nodes the job was submitted with.
        without: Lost nodes that the job continues without, as all its agents agree.
        rescuing: Ranks of this node are copying live state whose only copies were on the dead nodes; the job must not
            end yet.
        finished: Whether all ranks that train on this node have closed their checkpointers; None: no rank trained
            here.
        parity: Parity blocks of a group of `replicas` nodes; 0: whole copies.
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
    parity: Blocks = 0


class Report(Message, frozen=True, tag="report"):
    """A report that a host of the job is silent (agent -> controller).

    Attributes:
        witnesses: Peers that could not reach the host either.
        t: Unix time at which the agent found the host silent, which may be long before this controller began.
    """

    job: Job
    restart: Restart
    host: str
    witnesses: tuple[str, ...]
    t: Time


class EventsUp(Message, frozen=True, tag="events"):
    """New lines of the event log (agent -> controller)."""

    job: Job
    events: tuple[EventRecord, ...]


HEALTH = "health"  # purpose of a connection that carries a `RedNode`


class HealthVerdict(IntEnum):
    """Outcomes of a site's health check; a node's Slurm reason may carry their names."""

    RED = 0
    HANGS = 1


class RedNode(Message, frozen=True, tag="red"):
    """A report that the site's health check just failed on this node (root user of the node -> controller).

    The check ran after the incarnation `restart` of the job.
    """

    job: Job
    restart: Restart
    verdict: HealthVerdict


class Release(Message, frozen=True, tag="release"):
    """An order to free everything and exit (controller -> agent).

    Attributes:
        reason: Reason for the order.
        save: The job has ended for good, so sealed versions that are not on the tier go there first.
    """

    job: Job
    reason: str
    save: bool = False


class Notice(Message, frozen=True, tag="notice"):
    """A line for the users of the job, printed by its first training rank (controller -> agent).

    Serves the requirement requeue.
    """

    job: Job
    text: str


class Ending(Message, frozen=True, tag="ending"):
    """A warning that Slurm ends the job in `left_s` seconds; None: no limit (controller -> agent)."""

    job: Job
    left_s: Seconds | None


class Draining(Message, frozen=True, tag="draining"):
    """Nodes of the job that are being drained (controller -> agent).

    Attributes:
        partition: State of the job's partition if the partition is no longer up.
    """

    job: Job
    hosts: tuple[str, ...]
    partition: str = ""


class Waits(Message, frozen=True, tag="waits"):
    """A statement that the job is pending in Slurm, held or queued, and has not ended (controller -> agent).

    State held for the job then stays for `held_retention_s` instead of `retention_s`.
    """

    job: Job


class MayAct(Message, frozen=True, tag="may-act"):
    """A statement that the job is in a partition where `mode = "canary"` acts (controller -> agent).

    An agent does not know its job's partition. Without this message it acts in no canary.
    """

    job: Job


class HoldersAsk(Message, frozen=True, tag="holders?"):
    """A request for agents of a job (agent -> controller).

    For the sender's own job, the request asks for agents on nodes that the job has left. For another job of the same
    owner, the request asks for all agents.
    """

    job: Job


class Holders(Message, frozen=True, tag="holders"):
    """Hosts on which agents of the job run or have run (controller -> agent).

    Attributes:
        ports: Port of the agent by host, 0 if unknown. All entries are hints, as is all that the controller sends.
    """

    job: Job
    ports: dict[str, Port]
