"""What is broken on purpose, to see that the stories of the tier find it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from gemini_hpc.agent.coordinator import Coordinator
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.tier import salvage_rules
from gemini_hpc.agent.tier.salvage import Salvage
from gemini_hpc.agent.tier.saver import Saver
from gemini_hpc.core import recovery_plan, salvage
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import nodefile, publish, retention, version, worker
from gemini_hpc.wire import peer


class _NoTurns:
    """In place of the locks."""

    def __getitem__(self, name: str) -> AbstractAsyncContextManager[None]:
        return nullcontext()


def _put(where: Any, **values: Any) -> None:
    for name, value in values.items():
        # an attribute of its instances is replaced by a property
        own = where.__init__.__code__.co_names if isinstance(value, property) else ()
        assert hasattr(where, name) or name in own, f"{where} has no {name}"
        setattr(where, name, value)


def _unsynced() -> None:
    """Files get their names before they are on disk."""
    _put(publish, publish=lambda made, directory, name: publish.os.rename(made, f"{directory}/{name}"))  # type: ignore[attr-defined]


def _blind() -> None:
    """What cannot be seen counts as gone."""
    _put(version, is_present=version.os.path.lexists)  # type: ignore[attr-defined]


def _forgetful() -> None:
    """Names do not keep a version."""
    there = version.is_present
    _put(version, is_present=lambda path: not path.endswith(f"/{version.KEPT}") and there(path))


def _trusting() -> None:
    """A shard that was overwritten while it was written to a file is believed."""
    fill = nodefile._fill

    def believing(*given: Any) -> str:
        disk, shard, places, _, digests = given
        return fill(disk, shard, places, _Any(), digests)

    _put(nodefile, _fill=believing)


class _Any(str):
    """A digest that equals all others."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def _any_map() -> None:
    """What agents of an incarnation long ago have counts as the newest."""
    plan = recovery_plan.plan_recovery
    _put(recovery_plan, plan_recovery=lambda *given, **more: replace(plan(*given, **more), latest=math.inf))


def _memory_first() -> None:
    """What memory has is taken, however old."""
    make_plan = Coordinator._make_plan

    def content(self: Coordinator, *given: Any) -> tuple[peer.PlanDown, bool]:
        plan, sure = make_plan(self, *given)
        return plan, sure or any(s.chosen for s in plan.trainings)

    _put(Coordinator, _make_plan=content)


def _newest_held(have: dict[str, peer.SalvageHave], rejected: Callable[[str, Stamp], bool]) -> list[peer.Sealed]:
    """Of each set what is the newest that anybody has, sealed or not."""
    worlds = {sealed.training: sealed for said in have.values() for sealed in said.sealed}
    stamps: dict[str, Stamp] = {}
    for said in have.values():
        for copy in said.held:
            stamps[copy.training] = max(stamps.get(copy.training, copy.stamp), copy.stamp)
    return [peer.Sealed(name, stamps.get(name, sealed.stamp), sealed.world) for name, sealed in worlds.items()]


def _first_holder(
    held: dict[str, dict[int, set[int]]], noderanks: dict[str, int], world: int
) -> tuple[dict[str, set[int]], list[int]]:
    """The shards of a missing node are written by the next one in the list, whether it has got them yet or not."""
    by_rank, n = {noderanks[host]: host for host in held if host in noderanks}, len(noderanks)
    chosen: dict[str, set[int]] = {}
    missing = set(range(world))
    for home in {home for homes in held.values() for home in homes}:
        writer = next(by_rank[at % n] for at in range(home, home + n) if at % n in by_rank)
        if home in held[writer]:
            chosen.setdefault(writer, set()).add(home)
            missing -= set(held[writer][home])
    return chosen, sorted(missing)


BROKEN: dict[str, Callable[[], None]] = {
    "unsynced": _unsynced,
    "blind": _blind,
    "forgetful": _forgetful,
    "unmarked": lambda: _put(worker, _mark=lambda *_: None),
    "untidy": lambda: _put(retention, clean=lambda directory, keep_last, *, before=None: []),
    "at_once": lambda: _put(Saver, _turns=property(lambda self: _NoTurns(), lambda self, value: None)),
    "silent_leave": lambda: _put(Mesh, leave=lambda self: None),
    "trusting": _trusting,
    "any_map": _any_map,
    "memory_first": _memory_first,
    "unseen_forgotten": lambda: _put(Membership, doubt=property(lambda self: False, lambda self, value: None)),
    "unseen_begins": lambda: _put(RecoveryRounds, unseen=property(lambda self: "")),
    "unsealed": lambda: _put(salvage_rules, find_newest_seals=_newest_held),
    "first_holder": lambda: _put(salvage, assign_writers=_first_holder),
    "left": lambda: _put(Salvage, is_due=lambda self, now, *, last=False: False),
}
