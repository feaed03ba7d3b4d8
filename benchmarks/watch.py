"""What it costs a training that its collectives are watched: by call, in this process, on nothing but gloo.

A process group of one rank; a call is the launch of an asynchronous all_reduce of 1 KB (its wait does not count, and
would hide the cost). Blocks of calls without the
watch, with it, and with it while times are taken follow each other, so that all see the same machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.bench import Options
from benchmarks.rows import Row, median_row
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor

BLOCKS, CALLS = 40, 200


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        return _measure(options)
    finally:
        dist.destroy_process_group()


def _measure(options: Options) -> list[Row]:
    watch = CollectiveMonitor(lambda ranks: True)
    bare: list[float] = []
    watched: list[float] = []
    recorded: list[float] = []
    blocks = options.count(BLOCKS)
    for number in range(blocks):
        options.progress.say("watch", f"block {number + 1} of {blocks}")
        bare.append(_block())
        watch.start()
        watch.mark()
        watched.append(_block())
        watch.recording = True
        watch.mark()
        recorded.append(_block())
        watch.recording = False
        watch.stop()
    return [
        median_row("watch.bare_us", "launch of an all_reduce of 1 KB over one rank", "us", _us(bare)),
        median_row(
            "watch.cost_us", "what the watch adds to a collective", "us", _us(_over(watched, bare)), limit=25.0
        ),
        median_row(
            "watch.recorded_us", "the same in iterations whose times are taken", "us", _us(_over(recorded, bare))
        ),
    ]


def _block() -> float:
    """Seconds of a call: the median, as threads of others fall into some of them."""
    tensor = torch.zeros(256)
    return statistics.median(_timed(lambda: dist.all_reduce(tensor, async_op=True)) for _ in range(CALLS))


def _timed(launch: Callable[[], dist.Work | None]) -> float:
    began = time.perf_counter()
    work = launch()
    took_s = time.perf_counter() - began
    if work is not None:
        work.wait()
    return took_s


def _over(these: list[float], bare: list[float]) -> list[float]:
    return [a - b for a, b in zip(these, bare, strict=True)]


def _us(seconds: list[float]) -> list[float]:
    return [1e6 * s for s in seconds]
