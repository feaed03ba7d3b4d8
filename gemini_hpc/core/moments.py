"""Moments: evidence that all ranks of a training mean the same point by a version (docs/dev/protocol.md, R7).

Each rank counts its own `step()` calls. A rank that omits a call, or makes one more, means another point by the same
count. Collectives and messages are common to the ranks. At one moment of the training all members of a process group
have launched the same number of the group's collectives. Each pair of ranks has as many receives as sends. A rank
adds up a weight for each launch. At one moment the sums of all ranks are 0 together:

- collectives: the k-th member of a group weighs `random(group, k) - random(group, k - 1)`. Equal counts cancel each
  other around the group. Unequal counts cancel by chance, once in 2^61.
- messages: a send weighs `random(sender, receiver)`, and a receive the same with the opposite sign.

Ranks without a common collective, not even by way of others, may be at any moments, because no state of theirs
depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, NamedTuple

import msgspec

from gemini_hpc.core.numbers import Count

MODULUS = (1 << 61) - 1
UNKNOWN = MODULUS  # a rank whose launches were not all counted
_NAMED = 4

Mark = Annotated[int, msgspec.Meta(ge=0, le=MODULUS)]
Launches = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Moment(NamedTuple):
    """A rank's point in the training at one version.

    Attributes:
        mark: Sum of the weights of its launches modulo MODULUS, or UNKNOWN.
        operations: Launches since the first `step()` of its process.
        usual: Launches in an iteration, 0 before the second `step()`.
    """

    mark: Mark = 0
    operations: Launches = 0
    usual: Launches = 0


UNCOUNTED = Moment()
"""The moment of a rank whose launches are not counted, like those of all other ranks of its training."""


class MomentReport(NamedTuple):
    """The moment of one rank, for a message."""

    rank: Count
    operations: Launches
    usual: Launches


def add_marks(marks: Iterable[int]) -> int:
    """Return the sum of marks; UNKNOWN if one of them is UNKNOWN."""
    total = 0
    for mark in marks:
        if mark == UNKNOWN:
            return UNKNOWN
        total += mark
    return total % MODULUS


def is_common(mark: int) -> bool:
    """Return whether ranks with this sum of marks may mean the same moment."""
    return mark in (0, UNKNOWN)


def weigh_collective(members: Sequence[int], rank: int) -> int:
    """Return the weight of a collective for one of its members.

    Args:
        members: Ranks of the group that save versions, without repetition.
        rank: Rank that launches the collective.

    Returns:
        0 for a group of fewer than two members, and for a rank outside the group.
    """
    ring = sorted(members)
    if len(ring) < 2 or rank not in ring:
        return 0
    at, name = ring.index(rank), f"group {ring}"
    return (_derive_random(f"{name} {at}") - _derive_random(f"{name} {(at - 1) % len(ring)}")) % MODULUS


def weigh_message(sender: int, receiver: int) -> int:
    """Return the weight of a send. The weight of the receive is its negative."""
    return _derive_random(f"message {sender} {receiver}")


def _derive_random(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little") % MODULUS


def describe_difference(version: int, reports: Iterable[MomentReport]) -> str:
    """Return a sentence on a version whose ranks mean different moments.

    The sentence names the ranks that differ, and by how much.
    """
    head = f"version {version} is void: its shards are of different moments of the training"
    done: dict[int, float] = {r.rank: r.operations / r.usual for r in reports if r.usual}
    ahead = _find_differences(done)
    if not ahead:
        return f"{head}. Call step() once in each iteration on every rank; nothing is sealed until they agree again"
    parts = []
    for amount, ranks in sorted(ahead.items(), key=lambda found: min(found[1])):
        calls = round(abs(amount))
        iterations = f"{abs(amount):g} iteration{'' if abs(amount) == 1 else 's'}"
        if abs(abs(amount) - calls) > 0.01:
            why = "calls step() at another place of the loop"
        else:
            why = f"has made {calls} step() call{'' if calls == 1 else 's'} {'fewer' if amount > 0 else 'more'}"
        parts.append(
            f"{name_ranks(ranks)} {why} ({iterations} {'ahead' if amount > 0 else 'behind'} by its collectives)"
        )
    return (
        f"{head}: {'; '.join(parts)}, compared with {name_ranks([r for r in done if not _is_among(r, ahead)])}. "
        "Call step() once in each iteration on every rank; nothing is sealed until they agree again"
    )


def _find_differences(done: Mapping[int, float]) -> dict[float, list[int]]:
    """Return the ranks by the number of iterations that they are ahead of most others.

    If several groups are equally large, the group with the lowest rank is the base.
    """
    rounded = {rank: round(iterations, 1) for rank, iterations in done.items()}
    if not rounded:
        return {}
    counted = Counter(rounded.values())
    most = max(counted.values())
    base = next(value for _, value in sorted(rounded.items()) if counted[value] == most)
    ahead: dict[float, list[int]] = {}
    for rank, value in sorted(rounded.items()):
        if value != base:
            ahead.setdefault(round(value - base, 1), []).append(rank)
    return ahead


def _is_among(rank: int, ahead: Mapping[float, Sequence[int]]) -> bool:
    return any(rank in ranks for ranks in ahead.values())


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a few ranks by number, for a sentence."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED} others" if len(ranks) > _NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED]))}{more}"
