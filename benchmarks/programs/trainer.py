"""A training whose compute is sleep and whose state is real, saved after every iteration in one of several ways.

    srun python trainer.py --out PREFIX --bytes N --plan first,calibrate,none:6,gemini:6,sync:5

Each rank has its own N bytes of state: the tensors of a GPT and of Adam for them (nothing is replicated between
ranks, as in pipeline or expert parallelism). Forward and backward are a sleep; then come a small all-reduce, which
keeps the ranks in step, and an optimizer that changes every tensor but does no arithmetic, as on a GPU neither would
need this machine's cores. Each rank writes one JSON object a line to PREFIX.RANK.

plan: `first`: iterations until the first version is sealed; `calibrate`: sets the length of an iteration to 1.5 times
what a version takes to be sealed (or durable), unless --iteration says it; `settle`: iterations until the training's
traffic is profiled and there is a plan; MODE:K: a block of K iterations that are
saved in that way, one of `savers.py`'s: none, gemini, baseline, torch_save, checkfreq, chunked, dcp, remote; the ones
that write files do so in /dev/shm, or in a directory of the disk as `MODE@disk`; `speed:MODE:K`: K such saves, one
after the other, nothing else going on; `await:NAME`: goes on when there is a file PREFIX.go.NAME; `sync:K`: the copy
of the state into a slot and a memcpy of as many bytes to the same place, K times each, nothing else going on.

Reaches into the checkpointer (page, slots, capture) to see what its users need not see.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gemini_hpc as gemini

if TYPE_CHECKING:
    from benchmarks.programs import savers
else:  # in a job the programs lie beside each other
    import savers

LAYERS = 12
AWAIT_S = 120.0
SETTLE_STEPS, CALIBRATE_STEPS = 120, 240


def _protected(model: Any, optimizer: Any, scheme: Any) -> gemini.Checkpointer:
    return gemini.Checkpointer(model, optimizer, traffic=gemini.Traffic(scheme=scheme))


class Model(nn.Module):
    """The parameters of a GPT of 12 blocks; with Adam's two moments about `state_bytes`."""

    def __init__(self, state_bytes: int) -> None:
        super().__init__()
        dim = max(8, round(math.sqrt(state_bytes / (12 * 12 * LAYERS)) / 8) * 8)
        for layer in range(LAYERS):
            for name, shape in (
                ("qkv", (3 * dim, dim)),
                ("qkv_bias", (3 * dim,)),
                ("out", (dim, dim)),
                ("out_bias", (dim,)),
                ("up", (4 * dim, dim)),
                ("up_bias", (4 * dim,)),
                ("down", (dim, 4 * dim)),
                ("down_bias", (dim,)),
                ("norm1", (2, dim)),
                ("norm2", (2, dim)),
            ):
                self.register_parameter(f"b{layer}_{name}", nn.Parameter(torch.randn(shape)))


class EmulatedAdam(torch.optim.Optimizer):
    """Adam's state; a step changes a little of every tensor in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1e-3})
        for p in model.parameters():
            self.state[p] = {
                "step": torch.zeros(()),
                "exp_avg": torch.full_like(p, 0.5),
                "exp_avg_sq": torch.full_like(p, 0.25),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                for tensor in (p, state["exp_avg"], state["exp_avg_sq"]):
                    tensor.view(-1)[:16].add_(1.0)
                state["step"].add_(1.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of the state, by name."""
        found = {}
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            found[f"p{index}"] = p.detach()
            for name, value in self.state[p].items():
                found[f"p{index}.{name}"] = value
        return found


class Bench:
    """One rank of the training."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._out = open(f"{args.out}.{self.rank}", "w", buffering=1)  # noqa: SIM115
        self.iteration_s, self._fixed = args.iteration or 0.5, bool(args.iteration)
        self._first_iteration_s = args.first_iteration
        self._scheme = args.scheme
        self._prefix, self._disk, self._store = args.out, args.disk, args.store
        self._hook_began = self.hook_s = 0.0
        self._block = 0
        self._gradient = torch.zeros(256 << 10)
        torch.manual_seed(self.rank)
        self.model = Model(args.bytes)
        self.optimizer = EmulatedAdam(self.model)
        self._tensors = self.optimizer.tensors()
        # the hooks run in the order of registration: the checkpointer's own lies between these two
        register_optimizer_step_pre_hook(lambda *_: self._hook(began=True))
        self.ckpt = _protected(self.model, self.optimizer, args.scheme) if args.protect else None
        register_optimizer_step_pre_hook(lambda *_: self._hook(began=False))
        if self.ckpt is not None:
            self.ckpt.resume()
        size = sum(t.numel() * t.element_size() for t in self._tensors.values())
        self.say("ready", bytes=size, tensors=len(self._tensors))

    def say(self, what: str, **more: Any) -> None:
        """A line of the log."""
        self._out.write(json.dumps({"what": what, "rank": self.rank, **more}) + "\n")

    def _hook(self, *, began: bool) -> None:
        if began:
            self._hook_began = time.perf_counter()
        else:
            self.hook_s = time.perf_counter() - self._hook_began

    def _agree(self, value: float, op: Any = dist.ReduceOp.MAX) -> float:
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=op)
        return float(tensor.item())

    def _make(self, mode: str) -> savers.Nothing:
        way, _, medium = mode.partition("@")
        place = self._disk if medium == "disk" else savers.SHM
        if way == "gemini":
            assert self.ckpt is not None, "--protect is wanted"
            return savers.Gemini(self.ckpt, self._scheme)
        if way == "none" and self.ckpt is not None:
            return savers.Off(self.ckpt)
        makers: dict[str, Callable[[], savers.Nothing]] = {
            "none": savers.Nothing,
            "baseline": lambda: savers.Baseline(self._tensors, self.rank, self.world),
            "torch_save": lambda: savers.TorchSave(self._tensors, self.rank, place),
            "checkfreq": lambda: savers.CheckFreq(self._tensors, self.rank, place),
            "chunked": lambda: savers.Chunked(self._tensors, self.rank, place),
            "dcp": lambda: savers.DcpAsync(self._tensors, self.rank, place),
            "remote": lambda: savers.Remote(self._tensors, self._store),
        }
        return makers[way]()

    def _compute(self, seconds: float, seen: Callable[[], bool]) -> float:
        """Sleep as long as forward and backward would take; the moment at which `seen` became true, or 0."""
        until, at = time.perf_counter() + seconds, 0.0
        while (now := time.perf_counter()) < until:
            if not at and seen():
                at = now
            time.sleep(min(savers.SLICE_S, until - now))
        dist.all_reduce(self._gradient)
        return at

    def block(self, mode: str, count: int) -> None:
        """Iterations in one mode. The first has no save before it and is marked: its length does not count."""
        dist.barrier()
        saver = self._make(mode)
        dist.barrier()
        self._block += 1
        step_s, saved_at = 0.0, 0.0
        ended = time.perf_counter()
        for index in range(count):
            durable_at = self._compute(self.iteration_s, saver.durable)
            self.hook_s, began = 0.0, time.perf_counter()
            saver.fence()
            fence_s = time.perf_counter() - began
            self.optimizer.step()
            hook_s, now = fence_s + self.hook_s, time.perf_counter()
            if index:  # this iteration hid the save of the one before, and paid for it at both ends
                if not durable_at and saver.durable():
                    durable_at = now
                self.say(
                    "save",
                    mode=mode,
                    block=self._block,
                    step_s=step_s,
                    hook_s=hook_s,
                    durable_s=durable_at - saved_at if durable_at else None,
                )
            saved_at = time.perf_counter()
            saver.save()
            now = time.perf_counter()
            step_s = now - saved_at
            self.say("iteration", mode=mode, block=self._block, index=index, seconds=now - ended)
            ended = now
        if isinstance(saver, savers.Gemini) and self.ckpt is not None and self.ckpt._engine.running is not None:
            self.say("traffic", mode=mode, block=self._block, **self.ckpt._engine.running.controller.report())
        saver.close()

    def first(self) -> None:
        """From the first `step()` to the first sealed version, and what the training waited meanwhile."""
        saver = self._make("gemini")
        assert isinstance(saver, savers.Gemini)
        began = sealed_at = waited_s = longest_s = first_s = 0.0
        count = 0
        while True:
            at = self._compute(self._first_iteration_s, lambda: saver.sealed > (0, 0))
            self.hook_s = 0.0
            self.optimizer.step()
            sealed_at = sealed_at or at or (time.perf_counter() if saver.sealed > (0, 0) else 0.0)
            waited_s += self.hook_s
            longest_s = max(longest_s, self.hook_s)
            if self._agree(float(bool(sealed_at)), dist.ReduceOp.MIN):
                break
            now = time.perf_counter()
            began = began or now
            saver.save()
            count += 1
            spent = time.perf_counter() - now
            first_s = first_s or spent
            waited_s += spent
            longest_s = max(longest_s, spent)
        self.say(
            "first",
            sealed_s=sealed_at - began,
            waited_s=waited_s,
            longest_s=longest_s,
            first_step_s=first_s,
            steps=count,
            iteration_s=self._first_iteration_s,
        )
        saver.close()

    def calibrate(self) -> None:
        """Choose the length of an iteration."""
        saver, took = self._make("gemini"), []
        assert isinstance(saver, savers.Gemini)
        for _ in range(CALIBRATE_STEPS):  # paced: where versions take long, only one in many is saved
            self._compute(self._first_iteration_s, saver.durable)
            self.optimizer.step()
            began = time.perf_counter()
            saver.save()
            sealed = saver.rest()
            spent = time.perf_counter() - began
            if self._agree(float(sealed), dist.ReduceOp.MIN):
                took.append(spent)
            if len(took) == 5:
                break
        else:
            raise SystemExit(f"hardly a version is sealed: {self.ckpt.report() if self.ckpt else ''}")
        usual = self._agree(statistics.median(took))
        if not self._fixed:
            self.iteration_s = max(0.3, math.ceil(15 * usual) / 10)
        self.say("calibrated", sealed_s=usual, iteration_s=self.iteration_s)

    def settle(self) -> None:
        """Iterations until all ranks send by plan. They come to that at the same step, so nothing need be asked: the
        traffic is that of the blocks."""
        assert self.ckpt is not None and self.ckpt._engine.running is not None
        saver, rhythm = self._make("gemini"), self.ckpt._engine.running.controller
        for count in range(SETTLE_STEPS):
            if rhythm.build_state().stage == "steady":
                self.say("settled", steps=count)
                saver.close()
                return
            self._compute(self.iteration_s, saver.durable)
            self.optimizer.step()
            saver.save()
        raise SystemExit(f"no plan after {SETTLE_STEPS} iterations: {rhythm.report()}")

    def speed(self, mode: str, count: int) -> None:
        """Saves with nothing to hide behind. Seconds from the call until it returned, until the optimizer may change
        the state, and until the save was complete. The first one does not count."""
        saver = self._make(mode)
        for index in range(count + 1):
            dist.barrier()
            began = time.perf_counter()
            saver.save()
            returned = time.perf_counter()
            saver.fence()
            self.optimizer.step()
            free = self._hook_began + self.hook_s  # when all of its hooks had run
            saver.drain()
            done = time.perf_counter()
            if index:
                spent = {"returned_s": returned - began, "free_s": free - began, "done_s": done - began}
                self.say("speed", mode=mode, block=self._block, index=index, **spent)
        dist.barrier()
        self._block += 1
        saver.close()

    def until(self, name: str) -> None:
        """Wait for whoever runs the benchmark."""
        dist.barrier()
        self.say("awaiting", name=name)
        deadline = time.monotonic() + AWAIT_S
        while not os.path.exists(f"{self._prefix}.go.{name}"):
            if time.monotonic() > deadline:
                raise SystemExit(f"waited {AWAIT_S:g} s in vain for {name}")
            time.sleep(savers.SLICE_S)
        dist.barrier()

    def sync(self, count: int) -> None:
        """The copy that a trainer would wait for if it had to; memcpy of the same tensors to the same places; and one
        memcpy of as many bytes in a row, which large enough calls do with stores that go past the cache."""
        assert self.ckpt is not None and self.ckpt._engine.running is not None
        capture, replicator = self.ckpt._engine.running.plan.capture, self.ckpt._engine.running.replicator
        assert replicator.shard is not None
        copied, saved = replicator.counters.copy_s, replicator.counters.saved
        layout = replicator._layout
        area = replicator.shard.slots[0].bytes[layout.tensor_offset :][: layout.tensor_bytes]
        row = area.clone()
        for turn in range(3 * count + 3):
            dist.barrier()
            job = capture.begin_job(0, b"", False)
            tensors = [view for views in job.views for view in views]
            assert all(t.is_contiguous() for t in tensors)
            places = [
                (to.data_ptr(), t.data_ptr(), t.nbytes)
                for to, t in zip(capture._view_pieces(0, area), tensors, strict=True)
            ]
            how = ("capture", "memcpy", "row")[turn % 3]
            began = time.perf_counter()
            if how == "capture":
                capture.copy(job, 0, area)
            elif how == "row":
                ctypes.memmove(area.data_ptr(), row.data_ptr(), area.numel())
            else:
                for to, source, size in places:
                    ctypes.memmove(to, source, size)
            spent = time.perf_counter() - began
            if turn > 2:
                self.say("copied", how=how, seconds=spent, bytes=area.numel())
        self.say("background", copy_s=copied / max(1, saved), saved=saved)

    def end(self) -> None:
        """A good end."""
        if self.ckpt is not None:
            report = self.ckpt.report()
            self.say("report", **{k: report[k] for k in ("state", "versions", "unsaved", "times", "findings")})
            self.ckpt.close()
        self.say("done")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, help="prefix of the log files")
    p.add_argument("--bytes", type=int, required=True, help="training state of one rank")
    p.add_argument("--plan", required=True, help="what to do, in order")
    p.add_argument("--iteration", type=float, default=0.0, help="seconds of one iteration; 0: calibrated")
    p.add_argument("--first-iteration", type=float, default=0.25, help="seconds of one iteration of `first`")
    p.add_argument("--no-protect", dest="protect", action="store_false", help="make no checkpointer")
    p.add_argument("--scheme", default="gemini", help="the checkpointer's")
    p.add_argument("--disk", default=".", help="directory of MODE@disk")
    p.add_argument("--store", default="", help="host:port of `remote`'s store")
    args = p.parse_args()
    torch.set_num_threads(1)
    gemini.set_ranks()
    dist.init_process_group("gloo")
    bench = Bench(args)
    for item in args.plan.split(","):
        what, _, count = item.partition(":")
        if what == "first":
            bench.first()
        elif what == "calibrate":
            bench.calibrate()
        elif what == "settle":
            bench.settle()
        elif what == "sync":
            bench.sync(int(count))
        elif what == "await":
            bench.until(count)
        elif what == "speed":
            mode, _, count = count.partition(":")
            bench.speed(mode, int(count))
        else:
            bench.block(what, int(count))
    bench.end()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
