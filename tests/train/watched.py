"""What ranks do while a `CollectiveMonitor` looks (forked by zygote.py; the programs of test_watch.py)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.dispatch_hooks import list_operators

from .moment_trainings import honest, moments
from .watched_calls import mistakes, operations
from .watched_trainings import compiled, ddp, everywhere, pipeline, sharded, tensor_parallel


def free(storage: StorageWeakRef) -> bool:
    deadline = time.monotonic() + 5.0
    while not storage.expired():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def hooked() -> dict[str, Any]:
    """A hook that raises; numbers that it sees from several threads; a second watch; a stopped one."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    watch, numbers = CollectiveMonitor(everywhere), []

    def note(number: int) -> None:
        numbers.append(number)
        if number == 5:
            raise ValueError("a hook of ours fails")

    watch.after_launch = note
    watch.start()
    watch.mark()
    totals = [torch.zeros(1) for _ in groups]

    def work(i: int) -> None:
        for _ in range(50):
            totals[i] += 1 + rank
            dist.all_reduce(totals[i], group=groups[i])
            totals[i] /= 3

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launched = watch.launched
    second = CollectiveMonitor(everywhere)
    second.start()
    t = torch.ones(1)
    dist.all_reduce(t)
    after_second = watch.launched
    second.stop()
    dist.all_reduce(t)
    after_second_stopped = watch.launched
    kernels = [
        torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect") for name, _, _ in list_operators()
    ]
    watch.stop()
    gone = [torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect") for name, _, _ in list_operators()]
    dist.all_reduce(t)
    return {
        "numbers": sorted(numbers),
        "launched": launched,
        "problem": watch.problem,
        "second": second.problem,
        "later": [after_second, after_second_stopped, watch.launched],
        "kernels": [all(kernels), any(gone)],
        "threads": [t.name for t in threading.enumerate() if "watch" in t.name],
    }


def broken() -> dict[str, Any]:
    """Whatever fails in the watch, the collectives go on."""
    problems, sums = [], []

    def fail(*args: Any) -> Any:
        raise LookupError("no such thing")

    for at in ("on_network", "group", "flight"):
        watch = CollectiveMonitor(fail if at == "on_network" else everywhere)
        watch.start()
        if at == "group":
            watch._find_group = fail
        if at == "flight":
            watch._flight.record_launch = fail
        watch.recording = True
        watch.mark()
        t = torch.ones(2)
        dist.all_reduce(t)
        sums.append(t.sum().item())
        problems.append([watch.problem, watch.launched, watch.mark() is not None])
        watch.stop()
    return {"problems": problems, "sums": sums}


def spans() -> dict[str, Any]:
    """Rank 1 comes 0.3 s late to the second operation; sleeps between; a receive posted long ahead."""
    rank = dist.get_rank()
    watch = CollectiveMonitor(everywhere, bytes_per_s=4e7)
    watch.start()
    watch.recording = True
    big = torch.ones(1_000_000)  # 0.1 s by bytes_per_s
    small = torch.ones(4)
    dist.barrier()
    watch.mark()
    dist.all_reduce(small)
    time.sleep(0.2)
    if rank == 1:
        time.sleep(0.3)
    dist.all_reduce(small)
    time.sleep(0.2)
    before = watch.launched
    receive = dist.irecv(big, 1) if rank == 0 else None
    posted, waiting = watch.count_in_flight(), watch.launched - before
    if rank == 1:
        time.sleep(0.4)
        dist.send(big, 0)
        sending = watch.count_in_flight()
    else:
        receive.wait()
        sending = 0
    came = watch.launched - before
    time.sleep(0.2)
    work = dist.all_reduce(small, async_op=True)
    if rank == 0:
        work.wait()
    work.wait()
    watch.record_gate_reached()
    time.sleep(0.1)
    traces = [watch.mark()]
    watch.mark()
    # who waits for quiet
    if rank == 1:
        time.sleep(0.5)
    work = dist.all_reduce(small, async_op=True)
    waits = [watch.count_in_flight() > 0, watch.wait_span(0, 0.1), watch.wait_span(0, 30.0), watch.count_in_flight()]
    work.wait()
    # receives that wait come yet until something is launched behind them; times are not taken now
    watch.recording = False
    watch.mark()
    one, other = torch.ones(4), torch.ones(8)
    receives = [dist.irecv(t, 1 - rank, tag=t.numel()) for t in (one, other)]
    numbers = [watch.launched]
    spans = [watch.wait_span(1, 0.05)]
    sends = [dist.isend(t.clone(), 1 - rank, tag=t.numel()) for t in (one, other)]
    numbers.append(watch.launched)
    for sent in [*sends, *receives]:
        sent.wait()
    first = dist.irecv(one, 1 - rank, tag=1)
    sends = [dist.isend(torch.ones(4), 1 - rank, tag=2)]
    second = dist.irecv(other[:4], 1 - rank, tag=2)
    numbers.append(watch.launched)
    second.wait()
    numbers.append(watch.launched)
    sends.append(dist.isend(torch.ones(4), 1 - rank, tag=1))
    for work in [*sends, first]:
        work.wait()
    spans.append(watch.wait_span(8, 30.0))
    numbers.append(watch.launched)
    # who waits is told of the launch, and can be woken
    began = time.monotonic()
    threading.Timer(0.1, watch.wake).start()
    spans.append(watch.wait_span(99, 30.0))
    woken_s = time.monotonic() - began
    looker = threading.Timer(0.0, lambda: spans.append(watch.wait_span(9, 30.0)))
    looker.start()
    time.sleep(0.1)
    dist.all_reduce(small)
    looker.join()
    watch.stop()
    return {
        "numbers": numbers,
        "counted": [waiting, came],
        "reached": spans,
        "woken_s": woken_s,
        "trace": traces[0],
        "posted": posted,
        "sending": sending,
        "waits": waits,
        "problem": watch.problem,
    }


def garbage() -> dict[str, Any]:
    """Tensors of operations that are over are nobody's, whether times are taken or not."""
    rank = dist.get_rank()
    watch = CollectiveMonitor(everywhere)
    watch.start()
    found = {}
    for recording in (False, True):
        watch.recording = recording
        watch.mark()
        for name in ("all_reduce", "async", "p2p", "reduce_scatter"):
            t, out = torch.ones(1000), torch.ones(500)
            storages = [StorageWeakRef(t.untyped_storage()), StorageWeakRef(out.untyped_storage())]
            if name == "all_reduce":
                dist.all_reduce(t)
            elif name == "async":
                dist.all_reduce(t, async_op=True).wait()
            elif name == "p2p":
                (dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0)).wait()
            else:
                dist.reduce_scatter_tensor(out, t, async_op=True).wait()
            del t, out
            found[f"{name} {recording}"] = all(free(s) for s in storages)
    watch.stop()
    return {"found": found, "problem": watch.problem}


def leaving() -> dict[str, Any]:
    """Rank 0 exits while its operations wait for rank 1, which comes later."""
    watch = CollectiveMonitor(everywhere)
    watch.start()
    watch.recording = True
    watch.mark()
    t, u = torch.ones(4), torch.ones(4)
    if dist.get_rank() == 1:
        time.sleep(0.5)
        dist.all_reduce(t)
        dist.send(u, 0)
    else:
        KEPT.extend((dist.all_reduce(t, async_op=True), dist.irecv(u, 1)))
    return {"problem": watch.problem, "in_flight": watch.count_in_flight()}


KEPT: list[Any] = []


def forking() -> dict[str, Any]:
    """Children of a watching process: one that exits as any program does, while an operation is in flight."""
    watch = CollectiveMonitor(everywhere)
    watch.start()
    watch.recording = True
    watch.mark()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    t = torch.ones(4)
    work = dist.all_reduce(t, async_op=True)
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            watch._on_launched(list_operators()[0][2], (), None, 0.0)
            watch.stop()
            os._exit(3 if watch.problem else 0)
        os._exit(4)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    work.wait()
    trace = watch.mark()
    watch.stop()
    return {"code": code, "ops": trace.ops if trace is not None else None, "problem": watch.problem}


PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    program.__name__: program
    for program in (
        *(ddp, sharded, tensor_parallel, pipeline, compiled, operations, mistakes),
        *(hooked, broken, spans, garbage, leaving, forking, moments, honest),
    )
}


def main(options: dict[str, Any]) -> None:
    """All `programs` in this order; what each has found, by its name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name in options["programs"]:
        dist.barrier()
        found[name] = PROGRAMS[name]()
    print(json.dumps({"rank": dist.get_rank(), **found}, default=astuple), flush=True)
    if "leaving" not in found:
        dist.barrier()
        dist.destroy_process_group()
