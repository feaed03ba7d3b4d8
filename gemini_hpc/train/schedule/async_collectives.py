"""Collectives that all ranks exchange periodically without waiting for each other.

Every rank starts a round in the `step()` of the same version and reads the result in the next `step()`. By then, one
iteration later, the round is normally long over. Decisions that follow from a round are therefore the same on all
ranks, at the same version.

A round that is not over is given the rest of `PATIENCE_S`. After that this rank takes part in no further round, and
reports so. A host that runs ahead of its device may read several iterations before another rank's host. The time then
begins when its own device has caught up, which it does together with the other devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from gemini_hpc import clock
from gemini_hpc.train.schedule.trace import OperationRecord
from gemini_hpc.train.state.collectives import LentTensors

PATIENCE_S, _LEAST_PATIENCE_S = 1.5, 0.1  # ranks are an iteration apart at most; the training waits here
_POLL_S = 0.001  # short beside an iteration


class CollectivesBroken(Exception):
    """A round that did not end: the ranks can agree on nothing new."""


class AsyncCollectives:
    """The rounds over a process group of our own, used by the training's main thread only.

    The backend is called directly, because the hooks on the training's collectives must not see these rounds.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        follow_test: Callable[[Callable[[], bool]], OperationRecord],
        has_caught_up: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepare rounds over a process group.

        Args:
            group: The process group, used for nothing else.
            follow_test: Returns a record whose end is set when the given test becomes true. (A torch callback would
                run in a gloo thread and abort a process that ends meanwhile.)
            has_caught_up: Returns whether this rank's device has reached the newest step().
        """
        self._backend: Any = group._get_backend(torch.device("cpu"))
        self._world = group.size()
        self._work: dist.Work | None = None
        self._mine: torch.Tensor | None = None
        self._all: torch.Tensor | None = None
        self._broken = ""
        self._follow_test, self._has_caught_up = follow_test, has_caught_up
        self._record: OperationRecord | None = None
        self._lent = LentTensors([])
        self.over_at = 0.0  # when the last round that was read ended (CLOCK_MONOTONIC)

    @property
    def sitting(self) -> bool:
        """Return whether a round has been started and not been read."""
        return self._work is not None

    def start_max_round(self, words: Sequence[int]) -> None:
        """Start a round that takes the maximum of each number over all ranks."""
        self._mine, self._all = torch.tensor(list(words), dtype=torch.int64, device="cpu"), None
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._start(lambda: self._backend.allreduce([self._mine], options))

    def start_gather_round(self, blob: bytes, room_bytes: int) -> None:
        """Start a round that gathers a blob from every rank.

        Args:
            blob: This rank's data, at most room_bytes - 8 bytes.
            room_bytes: Bytes reserved for each rank; the same on all ranks.

        Raises:
            ValueError: If the blob does not fit.
        """
        if len(blob) > room_bytes - 8:
            raise ValueError(f"{len(blob)} bytes do not go into {room_bytes - 8}")
        send_buffer = torch.zeros(room_bytes, dtype=torch.uint8, device="cpu")
        packed = len(blob).to_bytes(8, "little") + blob
        send_buffer[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._mine, self._all = send_buffer, torch.empty(self._world * room_bytes, dtype=torch.uint8, device="cpu")
        self._start(lambda: self._backend._allgather_base(self._all, send_buffer, AllgatherOptions()))

    def _start(self, launch: Any) -> None:
        if self._broken:
            raise CollectivesBroken(self._broken)
        self._lent = LentTensors([tensor for tensor in (self._mine, self._all) if tensor is not None])
        try:
            self._work = launch()
            self._record = self._follow_test(self._work.get_future().done)
        except RuntimeError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        self._broken, self._work = reason, None
        raise CollectivesBroken(reason)

    def await_end(self, patience_s: float) -> bool:
        """Wait for a round that is not read any more, and return whether gloo has let go of it.

        Nothing else may hold the round's work by then.
        """
        deadline = clock.monotonic() + min(patience_s, PATIENCE_S)
        while self._work is not None:
            if self._work.is_completed():
                self._work = self._record = None
            elif clock.monotonic() > deadline:
                return False
            else:
                clock.sleep(_POLL_S)
        return self._lent.await_return(max(0.0, deadline - clock.monotonic()))

    def _finish(self, waited_s: float, patience_s: float | None) -> None:
        assert self._work is not None
        patience_s = patience_s or max(_LEAST_PATIENCE_S, PATIENCE_S - waited_s)
        deadline = clock.monotonic() + patience_s
        while not self._work.is_completed():
            if not self._has_caught_up():
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

    def read_maxima(self, waited_s: float = 0.0, patience_s: float | None = None) -> list[int]:
        """Return the result of `start_max_round`.

        Args:
            waited_s: Seconds that the training has been held up already.
            patience_s: Seconds to wait for the round's end; None: what is left of `PATIENCE_S`.

        Raises:
            CollectivesBroken: If the round does not end in time or fails.
        """
        self._finish(waited_s, patience_s)
        assert self._mine is not None
        return [int(n) for n in self._mine]

    def read_blobs(self, waited_s: float = 0.0, patience_s: float | None = None) -> list[bytes]:
        """Return the blobs of `start_gather_round`, by rank.

        Args:
            waited_s: Seconds that the training has been held up already.
            patience_s: Seconds to wait for the round's end; None: what is left of `PATIENCE_S`.

        Raises:
            CollectivesBroken: If the round does not end in time or fails.
        """
        self._finish(waited_s, patience_s)
        assert self._all is not None
        parts = self._all.view(self._world, -1).numpy()
        return [part[8 : 8 + int.from_bytes(part[:8].tobytes(), "little")].tobytes() for part in parts]
