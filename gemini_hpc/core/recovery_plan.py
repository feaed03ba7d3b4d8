"""The recovery plan, which all agents compute alike from inventories after a restart (docs/dev/protocol.md, R4).

1. The previous node-rank map is that of the latest restart that a survivor remembers; replacements fill gaps. Its
   order of placement stays while the number of nodes is the same. Otherwise failure domains are separated anew.
2. The new epoch is above every epoch that any agent has seen.
3. Per training, the highest stamp is chosen of which every shard has a complete copy somewhere. The ranks must mean
   the same moment with this stamp (`core.moments`). The chosen stamp may never have been voted on.
4. Every agent voids all but the stamps to keep (`SlotPair.empty_except`) and acknowledges; only then training goes
   on.
5. Every holder of the new placement that lacks the chosen stamp pulls it, the home node first in its list of
   sources.

With parity (`core.parity`) a shard whose copy is lost counts as present if it can be rebuilt. All other shards of
its stripe must be present, and the parity beside each of them must be made of these very shards. The home rebuilds
the shard (`RebuiltCopy`), and each node rebuilds the parity that it lacks.

An agent that has sent its inventory accepts no write, vote or decision of the old epoch any more. Otherwise the
chosen version could be overwritten, by rights of the old epoch, before the plan arrives.

The chosen stamp may never have been sealed: every shard has a copy, but not every holder has one. One more failure
could then take the only copy of some shard. So the version to fall back on is kept beside the chosen version until
the new root has sealed the chosen one. Until then the chosen version does not count as sealed. The fields `keep` and
`sealed` of the plan express this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gemini_hpc.core import domains, moments, node_ranks
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.parity_plan import Parities, RebuiltCopy
from gemini_hpc.core.placement import AS_RANKED, PlacementOrder
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.core.slots import Stamp


@dataclass(frozen=True, slots=True)
class Inventory:
    """The copies and memory of one reachable agent.

    Attributes:
        host: Host of the agent.
        noderanks: Node-rank map of the incarnation that the agent last belonged to; None if it knows none.
        map_restart: Restart count of that incarnation.
        copies: Copies that the agent holds.
        max_epoch: Highest epoch that the agent has seen.
        sealed: Per training, the highest stamp that the agent knows to be sealed, in this epoch or by the plan of
            its recovery (`TrainingPlan.sealed`).
        order: Order of placement that belongs to the map (`placement.Order.ranks`).
    """

    host: str
    noderanks: dict[str, int] | None
    map_restart: int
    copies: tuple[Copy, ...]
    max_epoch: int
    sealed: tuple[tuple[str, Stamp], ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """A fetch: `dest_host` fetches a shard from the first of `sources` that delivers the digest."""

    dest_host: str
    shard: Copy
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LostShard:
    """A shard without a copy, and the reason."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The recovery plan of one training.

    `outcome` is one of:

    - `chosen`: `chosen` is the stamp to load and `world` its number of training ranks. `shards` has one copy per
      rank in rank order (for its digest, sizes and home). `holders` names the hosts of each shard's trusted copies,
      or the host that rebuilds the shard. `pulls` are the shards to move, `made` the shards and
      parities to rebuild. `keep` are the stamps that a holder does not void: the chosen stamp and the stamp to fall
      back on, if any. `sealed` is the stamp that counts as sealed, in R1 and before the next optimizer step, until
      the new root's first decision. `sealed` is the chosen stamp or an earlier one.
    - `lost`: more holders are gone than the replicas allow; `lost` names the missing shards of the newest stamp.
    - `never-sealed`: copies exist, but no loss of nodes explains the gaps, so no version was sealed yet.
    """

    training_name: str
    outcome: Literal["chosen", "lost", "never-sealed"]
    chosen: Stamp | None
    world: int
    shards: tuple[Copy, ...]
    pulls: tuple[Pull, ...]
    lost: tuple[LostShard, ...]
    keep: tuple[Stamp, ...] = ()
    sealed: Stamp | None = None
    newest: bool = True  # no newer stamp is known to be sealed
    made: tuple[RebuiltCopy, ...] = ()
    holders: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """The recovery plan of a job.

    `gone` are hosts of the previous map without an inventory. `survivable` tells whether m replicas are guaranteed
    to survive this loss. `latest` is the restart count of that map, -1 without a map. `sets` is empty if no agent
    has any copy: a first start, or everything is lost.

    The chosen version may be much older than the tier's last version in three cases: `survivable` is False, a
    warning reports that a sealed version has lost shards, or `latest` is not the previous incarnation. The caller
    then compares.
    """

    noderanks: dict[str, int]
    epoch: int
    trainings: tuple[TrainingPlan, ...]
    gone: tuple[str, ...]
    survivable: bool
    warnings: tuple[str, ...]
    latest: int = -1
    order: PlacementOrder = AS_RANKED

    def find_training_plan(self, training_name: str) -> TrainingPlan | None:
        """Return the plan of this training, or None."""
        return next((plan for plan in self.trainings if plan.training_name == training_name), None)


def compute_first_epoch(restart: int) -> int:
    """Return the first epoch of an incarnation, above the epochs of all earlier incarnations.

    The rule also holds if no survivor knows the earlier epochs. Each recovery round of an incarnation takes one
    epoch, and a launch of the training has one or two rounds.
    """
    return restart * EPOCHS_OF_A_RESTART + 1


EPOCHS_OF_A_RESTART = 64
INHERITED_EPOCH = 0  # below every epoch of the job itself


def inherit_stamp(stamp: Stamp) -> Stamp:
    """Return the stamp under which a job keeps a version of another job that it continues.

    The other job's epochs mean nothing here. They could be above the epochs of this job and outrank its own
    versions.
    """
    return Stamp(INHERITED_EPOCH, stamp.version)


def plan_recovery(
    inventories: Mapping[str, Inventory],
    hosts: Sequence[str],
    m: int,
    *,
    min_epoch: int = 0,
    nodes: int | None = None,
    noderanks: Mapping[str, int] | None = None,
    foreign: bool = False,
    parity: int = 0,
    order: PlacementOrder | None = None,
    by_host: Mapping[str, str] | None = None,
) -> RecoveryPlan:
    """Return the plan for a job that now has `hosts`, in host-list order, with m replicas.

    The new epoch is above every epoch in the inventories and at least `min_epoch` (`compute_first_epoch`). So the
    plan stays apart from lineages that no reachable agent remembers. The result depends on the arguments alone, so
    agents with the same inventories agree.

    Args:
        inventories: Inventories by host, of all reachable agents. Hosts outside the allocation may be sources.
        hosts: Hosts of the job, in host-list order.
        m: Number of replicas. With `nodes` or `noderanks` there are at most as many copies as training nodes.
        min_epoch: Lower bound of the new epoch.
        nodes: Number of hosts that train (default: all); the others are spares.
        noderanks: Node-rank map of this job, if it is decided already.
        foreign: True if the inventories are those of another job's agents. A host's copy is then in another agent's
            memory, so the host pulls it as well.
        parity: Blocks of parity in a row of a group of m nodes; 0 for whole copies.
        order: Order of placement of this job, if it is decided already.
        by_host: Failure domains by host.

    Raises:
        ValueError: m < 1, m > len(hosts) without spares, or a host is listed twice.
    """
    warnings: list[str] = []
    listed = _Order(hosts)
    last = _find_last_map(inventories, listed, warnings)
    previous, former_order = (last.noderanks, _read_order(last)) if last is not None else (None, AS_RANKED)
    if noderanks is not None:
        noderanks = dict(noderanks)
        m = min(m, len(noderanks))
    elif nodes is None:
        noderanks = node_ranks.assign_ranks(previous, hosts)
    else:
        former = None if foreign else previous  # another job's count does not matter: keep the wanted number
        noderanks = node_ranks.assign_ranks(
            previous, hosts, node_ranks.count_training_nodes(former, len(hosts), nodes)
        )
        m = min(m, len(noderanks))
    Redundancy(len(noderanks), m).list_receivers(0)  # report a wrong m before anything else
    if order is None:
        moved = foreign and bool(by_host)  # all copies are pulled anyway
        copies = any(i.copies for i in inventories.values())
        stands = copies and not moved and len(previous or ()) == len(noderanks)
        order = former_order if stands else domains.arrange_hosts(by_host or {}, noderanks, m)
    redundancy = Redundancy(len(noderanks), m, min(parity, m - 1), order)
    before = redundancy._replace(N=len(previous or ()), order=former_order)
    gone = tuple(sorted((previous or {}).keys() - inventories.keys(), key=listed))
    survivable = _can_survive(previous, gone, before)
    held = _collect_copies(inventories, listed, warnings)
    by_place = sorted(inventories, key=listed)
    parities = Parities(() if foreign else ((h, c) for h in by_place for c in inventories[h].copies if c.members))
    epoch = max(
        (
            epoch + 1
            for inventory in inventories.values()
            for epoch in (inventory.max_epoch, *(copy.stamp.epoch for copy in inventory.copies))
        ),
        default=0,
    )
    epoch = max(epoch, min_epoch)
    context = _Context(
        noderanks,
        previous or {},
        frozenset(inventories),
        frozenset(gone),
        survivable,
        redundancy,
        before,
        listed,
        parities,
        foreign,
    )
    sealed = _collect_sealed(inventories)
    trainings = tuple(
        _plan_training(name, held[name], sealed.get(name, set()), context, warnings) for name in sorted(held)
    )
    latest = max((i.map_restart for i in inventories.values() if i.noderanks is not None), default=-1)
    return RecoveryPlan(noderanks, epoch, trainings, gone, survivable, tuple(warnings), latest, order)


@dataclass(frozen=True, slots=True)
class _Context:
    noderanks: dict[str, int]
    previous: dict[str, int]
    reachable: frozenset[str]
    gone: frozenset[str]
    survivable: bool
    redundancy: Redundancy
    former: Redundancy
    listed: _Order
    parities: Parities
    foreign: bool


class _Order:
    """Sort key for hosts: the allocation's order, then the others by name."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._positions = {host: position for position, host in enumerate(hosts)}

    def __call__(self, host: str) -> tuple[int, str]:
        return (self._positions.get(host, len(self._positions)), host)


_Held = dict[tuple[str, int], dict[str, Copy]]  # (digest, used bytes) -> host -> its copy, in host order


def _find_last_map(inventories: Mapping[str, Inventory], listed: _Order, warnings: list[str]) -> Inventory | None:
    """Return an inventory that knows the newest node-rank map."""
    known = [inventories[host] for host in sorted(inventories, key=listed)]
    known = [inventory for inventory in known if inventory.noderanks is not None]
    if not known:
        return None
    latest = max(inventory.map_restart for inventory in known)
    known = [inventory for inventory in known if inventory.map_restart == latest]
    # Spares change the map within an incarnation: an agent of the last round that took place knows the newest.
    newest = max(inventory.max_epoch for inventory in known)
    known = [inventory for inventory in known if inventory.max_epoch == newest]
    for inventory in known[1:]:
        if (inventory.noderanks, inventory.order) != (known[0].noderanks, known[0].order):
            warnings.append(
                f"node-rank maps of restart {latest} differ: using that of {known[0].host}, not of {inventory.host}"
            )
    return known[0]


def _read_order(last: Inventory) -> PlacementOrder:
    """Return the order of placement of this inventory's map.

    If the agent reports an impossible order, the order is that of the ranks.
    """
    try:
        order = PlacementOrder(last.order)
    except ValueError:
        return AS_RANKED
    return order if len(order.ranks) == len(last.noderanks or ()) else AS_RANKED


def _can_survive(previous: dict[str, int] | None, gone: tuple[str, ...], redundancy: Redundancy) -> bool:
    if previous is None:
        return True
    N = len(previous)
    lost = {previous[host] for host in gone}
    if redundancy.m > N or any(not 0 <= rank < N for rank in lost):
        return not gone
    return redundancy.can_survive(lost)


def _collect_sealed(inventories: Mapping[str, Inventory]) -> dict[str, set[Stamp]]:
    sealed: dict[str, set[Stamp]] = defaultdict(set)
    for inventory in inventories.values():
        for name, stamp in inventory.sealed:
            sealed[name].add(stamp)
    return sealed


def _collect_copies(
    inventories: Mapping[str, Inventory], listed: _Order, warnings: list[str]
) -> dict[str, dict[tuple[Stamp, int], dict[int, _Held]]]:
    """Return set -> (stamp, world) -> rank -> contents -> host -> its copy.

    More than one content of a rank is a disagreement.
    """
    held: dict[str, dict[tuple[Stamp, int], dict[int, _Held]]] = {}
    for host in sorted(inventories, key=listed):
        for copy in inventories[host].copies:
            if not 0 <= copy.rank < copy.world or copy.home < 0:
                warnings.append(
                    f"{host}'s copy of training {copy.training!r} is ignored: rank {copy.rank} of {copy.world}, "
                    f"home {copy.home} is impossible"
                )
                continue
            if copy.members:
                continue
            stamps = held.setdefault(copy.training, {})
            found = stamps.setdefault((copy.stamp, copy.world), {}).setdefault(copy.rank, {})
            found.setdefault((copy.digest, copy.used), {})[host] = copy
    return held


def _plan_training(
    name: str,
    stamps: dict[tuple[Stamp, int], dict[int, _Held]],
    sealed: set[Stamp],
    context: _Context,
    warnings: list[str],
) -> TrainingPlan:
    made = {
        (stamp, world): context.parities.find_rebuildable(name, stamp, world, ranks)
        for (stamp, world), ranks in stamps.items()
    }
    complete = [
        (stamp, world)
        for (stamp, world), ranks in stamps.items()
        if len(ranks) + len(made[stamp, world]) == world and all(_is_known(found) for found in ranks.values())
    ]
    void = {key for key in complete if not _is_common(stamps[key], made[key], context)}
    choosable = [key for key in complete if key not in void]
    for stamp, _ in sorted(void):
        if not choosable or stamp > max(choosable)[0]:
            warnings.append(
                f"training {name!r}: version {stamp} is not used: its shards are of different moments of the training"
            )
    if not choosable:
        return _plan_lost_training(name, stamps, sealed, context)
    chosen, world = max(choosable)
    if any(stamp == chosen and other != world for stamp, other in stamps):
        warnings.append(
            f"training {name!r}: copies of version {chosen} disagree on the number of ranks; {world} is used"
        )
    if sealed and chosen < max(sealed):
        warnings.append(f"training {name!r}: version {max(sealed)} was sealed but has lost shards; {chosen} is used")
    keep = (chosen, *_choose_fallback(chosen, choosable, sealed))
    shards: list[Copy] = []
    pulls: list[Pull] = []
    by_rank = {rank: host for host, rank in context.noderanks.items()}
    N = len(by_rank)
    again: list[RebuiltCopy] = []
    where: dict[int, list[str]] = {}
    for rank in range(world):
        if (wanted := made[chosen, world].get(rank)) is not None:
            shards.append(wanted.copy)
            again.append(replace(wanted, dest_host=by_rank[wanted.copy.home % N]))
            continue
        keepers = _choose_trusted(name, stamps[chosen, world][rank], context, warnings)
        shard = next(iter(keepers.values()))
        shards.append(shard)
        where[rank] = list(keepers)
        home = shard.home % N
        for turn, holder in enumerate(context.redundancy.list_holders(home)):
            dest = by_rank[holder]
            if dest not in keepers:
                pulls.append(Pull(dest, shard, _order_sources(by_rank[home], list(keepers), rank + turn)))
            elif context.foreign:
                pulls.append(Pull(dest, shard, _order_sources(dest, list(keepers), rank + turn)))
    settled = max(sealed & set(keep), default=None)
    if context.redundancy.parity and not context.foreign:
        new, whole = context.parities.find_lacking(shards, where, by_rank, context.redundancy)
        again += new
        if not whole:  # it could never be sealed, so newer versions must be allowed to replace it
            settled = chosen
    newest = chosen >= max(sealed, default=chosen)
    holders = tuple(tuple(sorted(where.get(shard.rank, [by_rank[shard.home % N]]))) for shard in shards)
    return TrainingPlan(
        name, "chosen", chosen, world, tuple(shards), tuple(pulls), (), keep, settled, newest, tuple(again), holders
    )


def _is_common(ranks: Mapping[int, _Held], made: Mapping[int, RebuiltCopy], context: _Context) -> bool:
    """Return whether all shards of a version are of the same moment of the training."""
    marks = [next(iter(_rank_contents(found, context)[0].values())).mark for found in ranks.values()]
    return moments.is_common(moments.add_marks([*marks, *(wanted.copy.mark for wanted in made.values())]))


def _is_proven(keepers: Mapping[str, Copy]) -> bool:
    return any(copy.proven for copy in keepers.values())


def _is_known(found: _Held) -> bool:
    """Return whether the content of a shard is known: from its home, or from replicas that agree."""
    return len(found) == 1 or any(_is_proven(keepers) for keepers in found.values())


def _choose_fallback(chosen: Stamp, choosable: list[tuple[Stamp, int]], sealed: set[Stamp]) -> tuple[Stamp, ...]:
    """Return the stamp to keep beside the chosen stamp, if any.

    Until the chosen stamp is sealed, keep the last sealed stamp, or else the next best. If the chosen stamp is
    sealed, only a training that finds it bad needs another one, until the slots are needed.
    """
    older = {stamp for stamp, _ in choosable if stamp < chosen}
    return tuple(sorted(older if chosen in sealed else older & sealed or older)[-1:])


def _choose_trusted(name: str, found: _Held, context: _Context, warnings: list[str]) -> dict[str, Copy]:
    """Return the copies of the best content of a shard."""
    best, *rest = _rank_contents(found, context)
    for other in rest:
        shard = next(iter(best.values()))
        warnings.append(
            f"training {name!r}: digests of shard {shard.rank} at version {shard.stamp} differ: "
            f"using that of {', '.join(best)}, not of {', '.join(other)}"
        )
    return best


def _rank_contents(found: _Held, context: _Context) -> list[dict[str, Copy]]:
    """Return the contents of a shard, best first.

    The content that most hosts agree on comes first, then the home node's, then the first in host order. A replica's
    content made of its own tensors comes after all others.
    """
    return sorted(
        found.values(),
        key=lambda keepers: (
            not _is_proven(keepers),
            -len(keepers),
            all(context.previous.get(host) != copy.home for host, copy in keepers.items()),
            context.listed(next(iter(keepers))),
        ),
    )


def _order_sources(home_host: str, keepers: list[str], turn: int) -> tuple[str, ...]:
    first = [host for host in keepers if host == home_host]
    others = [host for host in keepers if host != home_host]
    start = turn % len(others) if others else 0
    return (*first, *others[start:], *others[:start])


def _plan_lost_training(
    name: str,
    stamps: dict[tuple[Stamp, int], dict[int, _Held]],
    sealed: set[Stamp],
    context: _Context,
) -> TrainingPlan:
    newest, world = max(stamps, key=lambda key: (key[0], len(stamps[key])))
    homes: dict[int, int] = {}
    others: dict[int, set[Stamp]] = defaultdict(set)
    for (stamp, size), ranks in sorted(stamps.items()):
        for rank, found in ranks.items():
            if size == world:
                homes[rank] = next(iter(next(iter(found.values())).values())).home
                others[rank].add(stamp)
    lost = tuple(
        LostShard(rank, _explain_loss(rank, newest, homes.get(rank), others.get(rank, set()), context))
        for rank in range(min(world, MAX_LISTED))
        if rank not in stamps[newest, world]
    )
    outcome: Literal["lost", "never-sealed"] = "never-sealed" if context.survivable and not sealed else "lost"
    return TrainingPlan(name, outcome, None, world, (), (), lost, newest=False)


MAX_LISTED = 65536  # most ranks scanned for lost shards, because a peer supplies `world`


def _explain_loss(rank: int, newest: Stamp, home: int | None, others: set[Stamp], context: _Context) -> str:
    text = f"no complete copy of shard {rank} at version {newest}"
    if others:
        text += f", only of {', '.join(map(str, sorted(others)))}"
    N = len(context.previous)
    if home is None or not 0 <= home < N or context.redundancy.m > N:
        return text + (f"; gone: {', '.join(sorted(context.gone, key=context.listed))}" if context.gone else "")
    by_rank = {rank: host for host, rank in context.previous.items()}
    former = (home, *context.former.list_receivers(home))
    keepers = [by_rank.get(holder, f"node rank {holder}") for holder in former]
    states = (
        f"{host} ({'gone' if host in context.gone else 'reachable' if host in context.reachable else 'unknown'})"
        for host in keepers
    )
    return f"{text}; its holders were {', '.join(states)}"
