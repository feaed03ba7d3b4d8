"""Joining of a program's ranks: each greets its agent, then all compare the agents' answers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from gemini_hpc.core import parity, placement
from gemini_hpc.core.numbers import NAME
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier
from gemini_hpc.wire.version import CURRENT, OLDEST

SOCKET_ENV = "GEMINI_SOCKET"  # set by the SPANK plugin if the job has an agent
UNPROTECTED_ENV = "GEMINI_UNPROTECTED"  # set by the plugin to the prolog's reason if the job has none
STEP_ENV = "GEMINI_STEP"  # names this launch if Slurm's step id does not
SPARES_ENV = "GEMINI_SPARES"  # number of nodes that wait to replace a lost one
ATTEMPT_ENV = "GEMINI_ATTEMPT"  # set by a launcher (`gemini_hpc.launch`) that restarted this rank
FAILED_ENV = "GEMINI_FAILED_AT"  # set by such a launcher to the Unix time at which the attempt before had failed
# set by `gemini-hpc run`, which restarts the step when a rank fails: a value common to these steps
RESTARTS_ENV = "GEMINI_RESTARTS_STEP"
TRY_AGAIN_EXIT = 75  # EX_TEMPFAIL: `gemini-hpc run` restarts the step

_closed: Counter[tuple[str, ...]] = Counter()  # trainings that this process has closed


class JoinNotice(msgspec.Struct, frozen=True, array_like=True):
    """A rank's message to the other ranks when they join.

    Attributes:
        chosen: Epoch, version and number of ranks of the version to resume from.
        problem: Reason why the rank cannot be protected.
        later: With a problem: a version may exist that cannot be seen now.
        holders: Nodes that keep this node's shards, this node first.
        nth: Number of this training among those of its name in this process.
        sentences: Sentences that are printed once, however many ranks have them.
    """

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
    sentences: tuple[str, ...] = ()

    @property
    def redundancy(self) -> Redundancy:
        """Return the scheme by which shards survive a loss of nodes."""
        return Redundancy(self.nodes, self.replicas, self.parity)

    @classmethod
    def from_welcome(cls, welcome: local.Welcome) -> JoinNotice:
        """Return the notice for the agent's welcome."""
        return cls(
            node_rank=welcome.node_rank,
            replicas=welcome.replicas,
            parity=welcome.parity,
            nodes=welcome.nodes,
            epoch=welcome.epoch,
            chosen=(welcome.chosen_epoch, welcome.chosen_version, welcome.chosen_world),
            holders=_list_holders(welcome),
        )


def check_name(name: object) -> None:
    """Check the name of a training, with an agent and without one.

    Raises:
        TypeError: The name is no text.
        ValueError: The name does not fit into the paths and messages of agents.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is a {type(name).__name__}, wanted a str")
    if not NAME.fullmatch(name):
        raise ValueError(f"name is {name[:80]!r}: use 1 to 64 letters, digits, '.', '_' or '-', no '.' or '-' first")


def explain_missing_agent() -> str:
    """Return why this process has no agent, as far as the plugin knows."""
    why = os.environ.get(UNPROTECTED_ENV, "")
    return f"no agent here ({why[:300] or f'{SOCKET_ENV} is not set: see --gemini-replicas'})"


def build_hello(training_name: str, rank: int, world: int, local_rank: int, tier: Tier) -> local.Hello:
    """Return the greeting of this process."""
    return local.Hello(
        OLDEST,
        CURRENT,
        training_name,
        rank,
        world,
        local_rank,
        derive_step_name(os.environ),
        os.getpid(),
        tier=tier,
        restarts=RESTARTS_ENV in os.environ,
        nth=number_training(training_name),
        series=derive_series(os.environ),
    )


def number_training(name: str) -> int:
    """Return the number of the current training of this name in this process, counted from 1."""
    return _closed[_build_key(name)] + 1


def record_closed(name: str) -> None:
    """Record that a training of this name is closed."""
    _closed[_build_key(name)] += 1


def _build_key(name: str) -> tuple[str, ...]:
    """Return the name with launch and job, so that a process of another launch or job counts from 1 again."""
    return (name, *(os.environ.get(key, "") for key in (SOCKET_ENV, STEP_ENV, "SLURM_STEP_ID")))


def derive_step_name(environ: Mapping[str, str]) -> str:
    """Return the name of this launch of the training, the same on all its ranks."""
    return environ.get(STEP_ENV) or f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"


def derive_series(environ: Mapping[str, str]) -> str:
    """Return the name that all starts of this step share within one allocation."""
    known = environ.get(RESTARTS_ENV, "")
    return known[:64] if len(known) > 1 else derive_step_name(environ).partition("+")[0]


def describe_wait(waited_s: float, why: str) -> str:
    """Return a line for the user about a slow welcome, or "" for none.

    Args:
        waited_s: Seconds waited so far.
        why: The agent's reason, "" if it gave none.
    """
    if why:
        return f"waiting: {why}"
    return "waiting for the agents of all nodes to agree on what to resume from" if waited_s > 5 else ""


def _list_holders(welcome: local.Welcome) -> tuple[int, ...]:
    if welcome.parity:
        return welcome.group
    usual = min(welcome.replicas, welcome.nodes)
    return welcome.group[: welcome.replicas] or placement.list_holders(welcome.node_rank, welcome.nodes, usual)


def collect_keepers(notices: Sequence[JoinNotice]) -> placement.Keepers:
    """Return, by node rank, the nodes that keep its shards; with parity the nodes of its group."""
    return {n.node_rank: n.holders for n in sorted(notices, key=lambda n: n.node_rank)}


def list_targets(notices: Sequence[JoinNotice], own_notice: JoinNotice) -> list[list[int]]:
    """Return for each rank the ranks to whose nodes its shard goes, in the order of sending.

    Raises:
        ValueError: These ranks cannot have parity.
    """
    homes, found = [n.node_rank for n in notices], collect_keepers(notices)
    if not own_notice.redundancy.parity:
        return placement.list_targets(homes, found)
    return parity.list_targets(homes, list(found.values()))


def describe_unclosed(notices: Sequence[JoinNotice]) -> str:
    """Return which ranks have not closed the previous training; "" if all have, or none."""
    most = max(n.nth for n in notices)
    behind = [str(rank) for rank, n in enumerate(notices) if n.nth < most]
    if not behind:
        return ""
    return (
        f"rank {', '.join(behind[:8])} did not call close() on the training before this one, other ranks did: "
        "call it on all ranks"
    )


def find_problem(notices: Sequence[JoinNotice], own_notice: JoinNotice, *, with_parity: bool = False) -> str:
    """Return why this program cannot be protected, or "" if it can.

    Args:
        notices: Notices of all ranks.
        own_notice: Notice of this rank.
        with_parity: The program supports parity.
    """
    found = next((n.problem for n in notices if n.problem), "")
    if found:
        return found
    if any(
        (n.redundancy, n.epoch, n.chosen) != (own_notice.redundancy, own_notice.epoch, own_notice.chosen)
        for n in notices
    ):
        return "the agents of the ranks disagree about the job: see gemini-hpc inspect"
    if own_notice.redundancy.parity and not with_parity:
        return "it cannot use parity: submit it with --gemini-replicas, not with --gemini-redundancy"
    nodes, m = sorted({n.node_rank for n in notices}), own_notice.replicas
    if m > len(nodes):
        wanted = f"groups of {m} nodes" if own_notice.parity else f"{m} replicas"
        runs_on = f"{len(nodes)} node{'s' * (len(nodes) > 1)}"
        return f"{wanted} asked for, but the training runs on {runs_on}: start ranks on more nodes, or ask for fewer"
    lacking = placement.find_stranger(collect_keepers(notices))
    if lacking:
        return (
            f"the training has ranks on only {len(nodes)} of the job's {own_notice.nodes} nodes: node rank "
            f"{lacking[1]} has to hold the copies of node rank {lacking[0]}, but has no ranks; start the training "
            "on all nodes of the job"
        )
    try:
        list_targets(notices, own_notice)
    except ValueError as exc:
        return str(exc)
    return ""


def describe_resume(welcome: local.Welcome, version: int, load_s: float, now: float) -> str:
    """Return the line for the user about a resume: the version, its place, and what the failure has cost.

    Args:
        welcome: The agent's answer, with the chosen version.
        version: The version resumed from.
        load_s: Seconds in which it was loaded.
        now: Unix time.
    """
    where = "the tier" if welcome.stored else "memory"
    where += f" of job {welcome.after}" if welcome.after else ""
    line = f"resumed at version {version} from {where} ({load_s:.2f} s)"
    if welcome.reached >= version:
        steps = welcome.reached - version
        line += f", {steps or 'no'} step{'s' * (steps > 1)} repeated"
    failed_at, what = _read_failure_time(), "failure"
    if not failed_at:
        failed_at, what = welcome.stopped_at, "training stopped"
    return f"{line}, {now - failed_at:.1f} s after the {what}" if 0 < failed_at <= now else line


def _read_failure_time() -> float:
    """Return when a launcher saw the attempt before fail (Unix time), or 0.0."""
    try:
        return float(os.environ.get(FAILED_ENV, ""))
    except ValueError:
        return 0.0
