"""A program whose gloo threads get the processor only while its main thread waits (forked by zygote.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from gemini_hpc.train.schedule import async_collectives
from gemini_hpc.train.schedule.async_collectives import AsyncCollectives
from gemini_hpc.train.schedule.trace import OperationRecord
from gemini_hpc.train.state import collectives
from gemini_hpc.train.state.collectives import LentTensors

PATIENCE_S = 60.0  # gloo's threads come late here, and later still where the machine is busy


class Watched(LentTensors):
    """A `LentTensors` that keeps a list of all that were made."""

    made: ClassVar[list[LentTensors]] = []

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        self.made.append(self)

    def await_return(self, patience_s: float = PATIENCE_S) -> bool:
        return super().await_return(patience_s)


def yield_to_main() -> None:
    """Bind all threads to one core, and let gloo's have it last."""
    core = min(os.sched_getaffinity(0))
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})
        if (task / "comm").read_text().startswith("pt_gloo"):
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def main(o: dict[str, Any]) -> None:
    """Count the collectives that return while gloo holds their tensors, of ten each, and print the counts.

    Without the wait in `_gather_tensors` the count is 8 to 10.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    async_collectives.PATIENCE_S = PATIENCE_S
    collectives.LentTensors = Watched  # type: ignore[misc]
    rounds = AsyncCollectives(collectives.build_own_group(), lambda asked: OperationRecord(0, 0, 0.0))
    yield_to_main()
    held = {"gather_bytes": 0, "round": 0}
    for _ in range(10):
        collectives.gather_bytes(b"word")
        held["gather_bytes"] += not all(lent.await_return(0.0) for lent in Watched.made)
        rounds.start_max_round([7])
        held["round"] += not rounds.await_end(PATIENCE_S)
    print(json.dumps({"rank": 0, "held": held}), flush=True)
