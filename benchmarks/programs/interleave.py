"""FSDP2 training on shaped links whose iterations are saved by one scheme after the other, in one process.

    srun python interleave.py --out PREFIX --schemes none,blocking,background --rounds 30 --forward 0.013

A GPT under `fully_shard` (each block and the root), Adam, gloo. What a GPU would compute is a sleep in an autograd
function around each block: `--forward` seconds, twice as long in the backward pass; the arithmetic of the block, on a
few tokens, hides in it. Without a GPU, FSDP2's collectives are synchronous: each lies on the critical path, nothing
of it hides behind compute, and each sleep is an idle span of the network. So a collective that is late costs its
whole delay, which makes this harder on a scheme than a GPU would; 3 * blocks * forward seconds are idle.

First the training is profiled, and goes on until its plan no longer changes. A round then runs no checkpoints and
gemini once each, one round in five the other schemes too, from another one on each time: first `--warm` iterations
that do not count, then `--measured` ones. All ranks change at the same step. Each rank writes one JSON
object a line to PREFIX.RANK.

Reaches into the checkpointer (replicator) to see what its users need not see.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp

import gemini_hpc as gemini
from gemini_hpc.train.schedule.traffic import Scheme

TOKENS, VOCABULARY = 8, 512
PROBE_BYTES, PROBE_CHUNK_BYTES = 24 << 20, 2 << 20
PROTECTED_S = 300.0
PIECE = 64 << 10  # elements
POLL_S = 0.0005
ALWAYS, OTHERS_EVERY = ("none", "gemini"), 5
ADAPTING = 24


class _Begin(torch.autograd.Function):
    """Start of a block: notes the time on the way forward, sleeps the rest of `seconds` on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, span: Span) -> torch.Tensor:
        ctx.span = span
        span.began = time.perf_counter()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.span.rest(2)
        return grads[0], None


class _End(torch.autograd.Function):
    """End of a block: the other way round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, span: Span) -> torch.Tensor:
        ctx.span = span
        span.rest(1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.span.began = time.perf_counter()
        return grads[0], None


class Span:
    """What the GPU would compute for one block."""

    late_s = 0.0  # of all blocks so far: how much longer it took

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.began = 0.0

    def rest(self, times: int) -> None:
        """Sleep until `times * forward_s` have passed since `began`."""
        over = self.began + times * self.forward_s
        time.sleep(max(0.0, over - time.perf_counter()))
        Span.late_s += time.perf_counter() - over


class Block(nn.Module):
    """One layer of a GPT."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.span = Span()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (tokens, dim)."""
        x = _Begin.apply(x, self.span)  # type: ignore[no-untyped-call]
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return _End.apply(x, self.span)  # type: ignore[no-any-return, no-untyped-call]


class Gpt(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, dim: int, blocks: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, dim), nn.Embedding(TOKENS, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (tokens,); logits: (tokens, vocabulary)."""
        x = self.token(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def sent_bytes() -> int:
    """What this node has put on its link so far."""
    with open("/proc/self/net/dev") as file:
        line = next(line for line in file if "eth0:" in line)
    return int(line.split(":")[1].split()[8])


class AllGather(fsdp.DefaultAllGather):
    """FSDP2's all-gather in pieces. gloo announces a receive behind the data it is sending on the same connection, so
    a large message goes one way after the other as often as both ways at once; other libraries do not do that."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        rows = output_tensor.view(group.size(), -1)
        works = []
        for at in range(0, input_tensor.numel(), PIECE):
            into = [row[at : at + PIECE] for row in rows]
            works.append(dist.all_gather(into, input_tensor[at : at + PIECE], group=group, async_op=True))
        for work in works:
            work.wait()


class Probe:
    """The raw rate of the link, in both directions at once, over a group of its own: the B of the paper."""

    def __init__(self, rank: int, world: int) -> None:
        self._to, self._from = (rank + 1) % world, (rank - 1) % world
        self._backend = dist.new_group(backend="gloo")._get_backend(torch.device("cpu"))
        self._out = torch.ones(PROBE_BYTES, dtype=torch.uint8)
        self._in = torch.empty(PROBE_BYTES, dtype=torch.uint8)

    def _pump(self, start: Callable[..., dist.Work], tensor: torch.Tensor, rank: int, window: int) -> None:
        flying: list[dist.Work] = []
        for chunk in torch.split(tensor, PROBE_CHUNK_BYTES):
            if len(flying) == window:
                flying.pop(0).wait()
            flying.append(start([chunk], rank, 1))
        for work in flying:
            work.wait()

    def rate(self) -> float:
        """Bytes per second, of this rank. Collective."""
        dist.barrier()
        began = time.perf_counter()
        # gloo uses both directions of a connection only when the two ends are driven by threads of their own
        receiver = threading.Thread(target=self._pump, args=(self._backend.recv, self._in, self._from, 2))
        receiver.start()
        self._pump(self._backend.send, self._out, self._to, 1)
        receiver.join()
        return PROBE_BYTES / (time.perf_counter() - began)


class Bench:
    """One rank of the training."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._out = open(f"{args.out}.{self.rank}", "w", buffering=1)  # noqa: SIM115
        self._probe = Probe(self.rank, self.world)
        torch.manual_seed(0)
        model = Gpt(args.dim, args.blocks)
        params = sum(p.numel() for p in model.parameters())
        self._spans = [block.span for block in model.modules() if isinstance(block, Block)]
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(AllGather())
        self.model: nn.Module = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=True)
        self.ckpt = gemini.Checkpointer(model, self.optimizer)
        self.ckpt.resume()
        self._micro = args.micro
        self.spent = 0.0, 0.0  # in the optimizer's step and in the checkpointer's, in the last iteration
        self._tokens = torch.randint(VOCABULARY, (TOKENS,))
        for span in self._spans:
            span.forward_s = args.forward
        self.say("ready", parameters=params, blocks=args.blocks, forward_s=args.forward)

    def say(self, what: str, **more: Any) -> None:
        """A line of the log."""
        self._out.write(json.dumps({"what": what, "rank": self.rank, **more}) + "\n")

    def agree(self, value: float) -> float:
        """The least value of all ranks."""
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return float(tensor.item())

    def measure_rate(self) -> None:
        """B, without training."""
        rates = [self._probe.rate() for _ in range(4)]
        self.say("rate", bytes_per_s=self.agree(statistics.median(rates[1:])))

    def iterate(self) -> None:
        """One iteration."""
        for _ in range(self._micro):
            logits = self.model(self._tokens)
            loss = nn.functional.cross_entropy(logits, self._tokens.roll(-1))
            torch.autograd.backward(loss)
        began = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        stepped = time.perf_counter()
        self.ckpt.step()
        self.spent = stepped - began, time.perf_counter() - stepped

    def settle(self) -> None:
        """Wait until this rank's copies have been sent."""
        while self.ckpt._engine.under_way:
            self.ckpt._engine.pacer.hurry()
            time.sleep(POLL_S)

    def change(self, scheme: Scheme) -> None:
        """From the next step() on; nothing of the former scheme is under way on any rank."""
        self.settle()
        dist.barrier()
        self.ckpt.scheme = scheme
        self.iterate()

    def protect(self) -> None:
        """Iterations until the training is profiled and planned on every rank; then what a version takes to be sent
        when all else is silent, as the median of three."""
        deadline = time.monotonic() + PROTECTED_S
        while self.agree(float(self.ckpt.report()["traffic"].get("stage") == "steady")) == 0.0:
            if time.monotonic() > deadline:
                raise SystemExit(f"the training is not protected: {self.ckpt.report()}")
            for _ in range(5):
                self.iterate()
        self.change("blocking")
        running = self.ckpt._engine.running
        assert running is not None
        spent, sizes, counters = [], [], running.replicator.counters
        copied_s, sending_s = counters.copy_s, counters.send_s
        for _ in range(3):
            dist.barrier()
            before, began = sent_bytes(), time.perf_counter()
            self.ckpt.step()
            self.settle()
            dist.barrier()
            spent.append(time.perf_counter() - began)
            sizes.append(sent_bytes() - before)
        report = self.ckpt.report()
        self.say(
            "checkpoint",
            bytes=report["captured"]["own_tensor_bytes"],
            sent_bytes=statistics.median(sizes),
            seconds=statistics.median(spent),
            copy_s=(counters.copy_s - copied_s) / 3,
            send_s=(counters.send_s - sending_s) / 3,
        )

    def rounds(self, schemes: Sequence[Scheme], rounds: int, warm: int, measured: int) -> None:
        """The measurement."""
        gc.collect()
        gc.freeze()
        self.change("gemini")
        for _ in range(ADAPTING):
            self.iterate()
        for number in range(rounds):
            self.measure_rate()
            now = [s for s in schemes if s in ALWAYS or number % OTHERS_EVERY == 0]
            turn = number % len(now)
            for scheme in [*now[turn:], *now[:turn]]:
                self.change(scheme)
                for index in range(-warm, measured):
                    self._one(number, scheme, index)
                self.say("traffic", round=number, scheme=scheme, **self.traffic())

    def _one(self, number: int, scheme: str, index: int) -> None:
        sent, cpu, late, began = sent_bytes(), time.process_time(), Span.late_s, time.perf_counter()
        self.iterate()
        self.say(
            "iteration",
            round=number,
            scheme=scheme,
            index=index,
            seconds=time.perf_counter() - began,
            cpu_s=time.process_time() - cpu,
            late_s=Span.late_s - late,
            optimizer_s=self.spent[0],
            step_s=self.spent[1],
            sent_bytes=sent_bytes() - sent,
        )

    def traffic(self) -> dict[str, Any]:
        """Of the scheme at work."""
        report = self.ckpt.report()["traffic"]
        kept = ("stage", "problem", "j", "s", "B", "alpha", "idle_s", "iteration_s", "chunks", "spilled_bytes")
        more = ("largest_chunk_bytes", "fitting_bytes", "overlap", "deviation", "late_s", "waited_s")
        return {k: report[k] for k in (*kept, *more)}

    def end(self) -> None:
        """A good end."""
        self.change("gemini")
        report = self.ckpt.report()
        kept = ("state", "versions", "unsaved", "times", "findings")
        self.say("report", **{k: report[k] for k in kept}, traffic=report.get("traffic", {}))
        self.ckpt.close()
        self.say("done")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, help="prefix of the log files")
    p.add_argument("--schemes", required=True, help="in the order of the first round")
    p.add_argument("--rounds", type=int, required=True)
    p.add_argument("--warm", type=int, default=1, help="iterations after each change that do not count")
    p.add_argument("--measured", type=int, default=2, help="iterations that do")
    p.add_argument("--dim", type=int, required=True)
    p.add_argument("--blocks", type=int, required=True)
    p.add_argument("--forward", type=float, required=True, help="seconds of compute in the forward pass of a block")
    p.add_argument("--micro", type=int, default=1, help="micro-batches in an iteration")
    args = p.parse_args()
    torch.set_num_threads(1)
    gemini.set_ranks()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    dist.init_process_group("gloo")
    bench = Bench(args)
    bench.protect()
    bench.rounds(args.schemes.split(","), args.rounds, args.warm, args.measured)
    bench.end()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
