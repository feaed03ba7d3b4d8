"""How the ranks of a program join: each greets its agent, then all compare what they were told."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from gemini_hpc.client import finished
from gemini_hpc.core import parity, placement
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier

SOCKET_ENV = "GEMINI_SOCKET"  # set by the SPANK plugin where the job has an agent
UNPROTECTED_ENV = "GEMINI_UNPROTECTED"  # by the plugin, where the prolog has said why the job has none
STEP_ENV = "GEMINI_STEP"  # names this launch where Slurm's step id does not
SPARES_ENV = "GEMINI_SPARES"  # nodes of the job that wait until another one is lost
ATTEMPT_ENV = "GEMINI_ATTEMPT"  # by a launcher (`gemini_hpc.launch`) that has started this rank again
# by `gemini-hpc run`, which starts the step again when a rank fails: what these steps have in common
RESTARTS_ENV = "GEMINI_RESTARTS_STEP"
TRY_AGAIN_EXIT = 75  # EX_TEMPFAIL: `gemini-hpc run` starts the step again


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others. chosen: epoch, version and number of ranks of what there is to resume from;
    later: with a problem, that there may be something which cannot be seen now. holders: the nodes that keep this
    one's shards, itself the first. nth: which training of its name this is, in this process. told: sentences that are
    said once, whatever number of ranks have them."""

    node_rank: int = -1
    replicas: int = 0
    parity: int = 0
    nodes: int = 0
    epoch: int = 0
    chosen: tuple[int, int, int] = (0, 0, 0)
    problem: str = ""
    later: bool = False
    holders: tuple[int, ...] = ()
    nth: int = 1
    told: tuple[str, ...] = ()

    @property
    def redundancy(self) -> Redundancy:
        """How shards survive a loss of nodes."""
        return Redundancy(self.nodes, self.replicas, self.parity)

    @classmethod
    def of(cls, welcome: local.Welcome) -> Notice:
        """What the agent has said."""
        return cls(
            node_rank=welcome.node_rank,
            replicas=welcome.replicas,
            parity=welcome.parity,
            nodes=welcome.nodes,
            epoch=welcome.epoch,
            chosen=(welcome.chosen_epoch, welcome.chosen_version, welcome.chosen_world),
            holders=_holders(welcome),
        )


def no_agent() -> str:
    """Why there is no agent for this process, as far as the plugin has been told."""
    why = os.environ.get(UNPROTECTED_ENV, "")
    return f"no agent here ({why[:300] or f'{SOCKET_ENV} is not set'})"


def hello(set_name: str, rank: int, world: int, local_rank: int, tier: Tier) -> local.Hello:
    """The greeting of this process."""
    step, pid = step_name(os.environ), os.getpid()
    return local.hello(
        set=set_name,
        rank=rank,
        world=world,
        local_rank=local_rank,
        step=step,
        pid=pid,
        tier=tier,
        restarts=RESTARTS_ENV in os.environ,
        nth=finished.nth(set_name),
        series=series(os.environ),
    )


def step_name(environ: Mapping[str, str]) -> str:
    """This launch of the training, the same on all its ranks."""
    return environ.get(STEP_ENV) or f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"


def series(environ: Mapping[str, str]) -> str:
    """Return the name that all starts of this step share within one allocation."""
    known = environ.get(RESTARTS_ENV, "")
    return known[:64] if len(known) > 1 else step_name(environ).partition("+")[0]


def waiting(waited_s: float, why: str) -> str:
    """What the user hears of a welcome that takes so long, if the agent has said `why`; "" for nothing."""
    if why:
        return f"waiting: {why}"
    return "waiting for the agents of all nodes to agree on what to resume from" if waited_s > 5 else ""


def _holders(welcome: local.Welcome) -> tuple[int, ...]:
    if welcome.parity:
        return welcome.group
    usual = min(welcome.replicas, welcome.nodes)
    return welcome.group[: welcome.replicas] or placement.holders(welcome.node_rank, welcome.nodes, usual)


def keepers(notices: Sequence[Notice]) -> placement.Keepers:
    """By node rank, the nodes that keep its shards; with parity those of its group."""
    return {n.node_rank: n.holders for n in sorted(notices, key=lambda n: n.node_rank)}


def targets(notices: Sequence[Notice], mine: Notice) -> list[list[int]]:
    """For each rank those to whose nodes its shard goes, in the order of sending. Raises ValueError for ranks that
    cannot have parity."""
    homes, found = [n.node_rank for n in notices], keepers(notices)
    if not mine.redundancy.parity:
        return placement.targets(homes, found)
    return parity.targets(homes, list(found.values()))


def unclosed(notices: Sequence[Notice]) -> str:
    """Return which ranks have not closed the training before this one, "" where all have, or none."""
    most = max(n.nth for n in notices)
    behind = [str(rank) for rank, n in enumerate(notices) if n.nth < most]
    if not behind:
        return ""
    return (
        f"rank {', '.join(behind[:8])} did not call close() on the training before this one, other ranks did: "
        "call it on all ranks"
    )


def problem(notices: Sequence[Notice], mine: Notice, *, with_parity: bool = False) -> str:
    """Why this program cannot be protected; "" where it can. with_parity: whether it can do with that."""
    found = next((n.problem for n in notices if n.problem), "")
    if found:
        return found
    if any((n.redundancy, n.epoch, n.chosen) != (mine.redundancy, mine.epoch, mine.chosen) for n in notices):
        return "the ranks' agents do not agree about the job"
    if mine.redundancy.parity and not with_parity:
        return "it cannot do with parity: submit it with --gemini-replicas, not with --gemini-redundancy"
    nodes, m = sorted({n.node_rank for n in notices}), mine.replicas
    if m > len(nodes):
        wanted = f"groups of {m} nodes" if mine.parity else f"{m} replicas"
        return f"{wanted} asked for, but the training runs on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    lacking = placement.stranger(keepers(notices))
    if lacking:
        return (
            f"the training has ranks on only {len(nodes)} of the job's {mine.nodes} nodes: node rank {lacking[1]} "
            f"has to hold the copies of node rank {lacking[0]}, but has no ranks; start the training on all nodes "
            "of the job"
        )
    try:
        targets(notices, mine)
    except ValueError as exc:
        return str(exc)
    return ""


def place(welcome: local.Welcome) -> str:
    """Where the version to resume from is."""
    where = "the tier" if welcome.stored else "memory"
    return f"{where} of job {welcome.after}" if welcome.after else where
