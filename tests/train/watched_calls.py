"""Every way to call a collective, and every way to call one wrongly, watched and not (see watched.py)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor

from .watched_trainings import everywhere

CPU = torch.device("cpu")


def operations() -> dict[str, Any]:
    """Every way to call one, watched and not: results, and how many were launched by each."""
    rank = dist.get_rank()
    pair, alone = dist.new_group([0, 1]), dist.new_group([rank], use_local_synchronization=True)

    def seed() -> torch.Tensor:
        return torch.arange(4.0) + rank

    def objects() -> Any:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, {"rank": rank})
        return found

    def gathered() -> Any:
        found = [torch.empty(4) for _ in range(2)]
        dist.all_gather(found, seed())
        return found

    def to_rank_0() -> Any:
        found = [torch.empty(4) for _ in range(2)] if rank == 0 else None
        dist.gather(seed(), found, 0)
        return found

    def from_rank_0() -> Any:
        t = torch.empty(4)
        dist.scatter(t, [seed(), seed() + 1] if rank == 0 else None, 0)
        return t

    def into(call: Callable[..., Any], size: int, **kwargs: Any) -> Any:
        t = torch.empty(size)
        work = call(t, seed(), **kwargs)
        if work is not None:
            work.wait()
        return t

    def asynchronous() -> Any:
        t = seed()
        work = dist.all_reduce(t, async_op=True)
        work.get_future().wait()
        assert work.wait()
        return t

    def on_group(group: Any) -> Any:
        t = seed()
        dist.all_reduce(t, group=group)
        return t

    def coalesced() -> Any:
        a, b = seed(), seed() * 2
        with dist._coalescing_manager():
            dist.all_reduce(a)
            dist.all_reduce(b)
        return [a, b]

    def batched() -> Any:
        t = torch.empty(4)
        ops = [dist.P2POp(dist.isend, seed(), 1 - rank), dist.P2POp(dist.irecv, t, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return t

    def one_way() -> Any:
        t = seed()
        if rank == 0:
            dist.send(t, 1)
        else:
            assert dist.recv(t) == 0
        return t

    def functional() -> Any:
        from torch.distributed import _functional_collectives as fc

        return fc.all_reduce(seed(), "sum", dist.group.WORLD) + 0

    def behind() -> Any:
        """As our own traffic goes."""
        t = seed()
        backend = pair._get_backend(CPU)
        work = backend.send([t], 1, 7) if rank == 0 else backend.recv([t], 0, 7)
        work.wait()
        return t

    def quiet(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: call() or 0

    programs: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: on_group(None),
        "all_reduce of a pair": lambda: on_group(pair),
        "all_reduce alone": lambda: on_group(alone),
        "all_reduce async": asynchronous,
        "barrier": quiet(dist.barrier),
        "monitored_barrier": quiet(dist.monitored_barrier),
        "all_gather": gathered,
        "gather": to_rank_0,
        "scatter": from_rank_0,
        "all_gather_into_tensor": lambda: into(dist.all_gather_into_tensor, 8),
        "reduce_scatter_tensor": lambda: into(dist.reduce_scatter_tensor, 2),
        "reduce_scatter_tensor async": lambda: into(dist.reduce_scatter_tensor, 2, async_op=True),
        "all_to_all_single": lambda: into(dist.all_to_all_single, 4),
        "all_gather_object": objects,
        "coalesced": coalesced,
        "batch_isend_irecv": batched,
        "send or recv": one_way,
        "functional": functional,
        "behind the dispatcher": behind,
    }
    plain = {name: str(program()) for name, program in programs.items()}
    watch = CollectiveMonitor(everywhere)
    watch.start()
    found: dict[str, Any] = {name: {"same": True} for name in programs}
    for recording in (False, True):
        for name, program in programs.items():
            watch.recording = recording
            watch.mark()
            found[name]["same"] &= str(program()) == plain[name]
            found[name]["launched"] = watch.launched
            trace = watch.mark()
            found[name]["ops"] = trace.ops if trace is not None else None
    watch.stop()
    return {"found": found, "problem": watch.problem}


def mistakes() -> dict[str, Any]:
    """What the user sees of errors, watched and not."""
    rank = dist.get_rank()
    one = torch.ones(4)

    def late() -> None:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
        if rank == 0:
            dist.all_reduce(torch.ones(4), group=group)

    def shapes() -> None:
        dist.all_gather([torch.ones(3), torch.ones(4)], one)

    def root() -> None:
        dist.distributed_c10d._get_default_group().broadcast([one], dist.BroadcastOptions()).wait()
        dist.broadcast(one, 7)

    def sizes() -> None:
        dist.reduce_scatter_tensor(torch.ones(3), one)

    def dtype() -> None:
        dist.all_gather_into_tensor(torch.ones(8, dtype=torch.int64), one)

    found = []
    watch = CollectiveMonitor(everywhere)
    for watched in (False, True, True):
        if watched:
            watch.start()
            watch.recording = len(found) == 2
            watch.mark()
        seen = []
        for mistake in (shapes, root, sizes, dtype, late):
            try:
                mistake()
                seen.append("")
            except Exception as error:
                text = str(error).partition("\n")[0].partition("Timed out waiting")[0]  # for so many milliseconds
                text = text[text.find("Check failed") :] if "Check failed" in text else text  # at such a time
                seen.append(f"{type(error).__name__} {text}")
        watch.stop()
        found.append(seen)
    return {"found": found, "problem": watch.problem}
