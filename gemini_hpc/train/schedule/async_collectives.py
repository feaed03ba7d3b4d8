"""Words that all ranks exchange now and then, without any of them waiting for it.

A round is started by every rank in the `step()` of the same version and read in the next one, an iteration later,
when it has long been over. What follows from it is therefore the same on all ranks, at the same version. A round that
is not over then is given what is left of `PATIENCE_S`; after that this rank takes part in no other, and says so. A
host that runs ahead of its device may be there several iterations before another rank's: then that time begins when
its own device has caught up, which it does with the others'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from gemini_hpc import clock
from gemini_hpc.train.schedule.trace import Record

PATIENCE_S, _LEAST_PATIENCE_S = 1.5, 0.1
_POLL_S = 0.001


class CollectivesBroken(Exception):
    """A round did not end: the ranks can agree on nothing new."""


class AsyncCollectives:
    """Rounds over a process group of our own, from the training's main thread only. The backend is spoken to
    directly: hooks on the training's collectives must not see this. follow: tells, in the record that it gives, when
    what it is told to ask becomes true. (A callback of torch would run in a thread of gloo's, and abort a process
    that ends meanwhile.) caught_up: whether this rank's device has come to the newest step()."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        follow: Callable[[Callable[[], bool]], Record],
        caught_up: Callable[[], bool] = lambda: True,
    ) -> None:
        self._backend: Any = group._get_backend(torch.device("cpu"))
        self._world = group.size()
        self._work: dist.Work | None = None
        self._mine: torch.Tensor | None = None
        self._all: torch.Tensor | None = None
        self._broken = ""
        self._follow, self._caught_up = follow, caught_up
        self._record: Record | None = None
        self.over_at = 0.0  # when the last round that was read ended (CLOCK_MONOTONIC)

    @property
    def sitting(self) -> bool:
        """A round has been started and not been read."""
        return self._work is not None

    def highest(self, words: Sequence[int]) -> None:
        """Start a round: of each word the largest of all ranks."""
        self._mine, self._all = torch.tensor(list(words), dtype=torch.int64, device="cpu"), None
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._start(lambda: self._backend.allreduce([self._mine], options))

    def everyone(self, blob: bytes, room_bytes: int) -> None:
        """Start a round: from every rank up to room_bytes - 8 bytes. Raises ValueError for more."""
        if len(blob) > room_bytes - 8:
            raise ValueError(f"{len(blob)} bytes do not go into {room_bytes - 8}")
        mine = torch.zeros(room_bytes, dtype=torch.uint8, device="cpu")
        packed = len(blob).to_bytes(8, "little") + blob
        mine[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._mine, self._all = mine, torch.empty(self._world * room_bytes, dtype=torch.uint8, device="cpu")
        self._start(lambda: self._backend._allgather_base(self._all, mine, AllgatherOptions()))

    def _start(self, launch: Any) -> None:
        if self._broken:
            raise CollectivesBroken(self._broken)
        try:
            self._work = launch()
            self._record = self._follow(self._work.get_future().done)
        except RuntimeError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        self._broken, self._work = reason, None
        raise CollectivesBroken(reason)

    def _finish(self, waited_s: float, patience_s: float | None) -> None:
        assert self._work is not None
        patience_s = patience_s or max(_LEAST_PATIENCE_S, PATIENCE_S - waited_s)
        deadline = clock.monotonic() + patience_s
        while not self._work.is_completed():
            if not self._caught_up():
                deadline = clock.monotonic() + patience_s
            if clock.monotonic() > deadline:
                self._fail(f"not all ranks have answered within {patience_s:g} s")
            clock.sleep(_POLL_S)
        try:
            self._work.wait()
        except RuntimeError as error:
            self._fail(str(error).split(". This is typically")[0])
        self._work = None
        ended_s = self._record.end_s if self._record is not None else math.nan
        self.over_at = clock.monotonic() if math.isnan(ended_s) else ended_s

    def words(self, waited_s: float = 0.0, patience_s: float | None = None) -> list[int]:
        """What `highest` came to. waited_s: how long the training has been held up already. Raises CouncilBroken."""
        self._finish(waited_s, patience_s)
        assert self._mine is not None
        return [int(n) for n in self._mine]

    def blobs(self, waited_s: float = 0.0, patience_s: float | None = None) -> list[bytes]:
        """What `everyone` gave, by rank. Raises CouncilBroken."""
        self._finish(waited_s, patience_s)
        assert self._all is not None
        parts = self._all.view(self._world, -1).numpy()
        return [part[8 : 8 + int.from_bytes(part[:8].tobytes(), "little")].tobytes() for part in parts]
