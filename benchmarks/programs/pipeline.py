"""A pipeline (1F1B) on shaped links, one stage a rank, whose iterations are saved by one scheme after the other.

    srun python pipeline.py --out PREFIX --schemes none,blocking,background,gemini --rounds 10 --forward 0.005

torch's own `Schedule1F1B` and `PipelineStage` over gloo, Adam. A stage is `--blocks` blocks of a GPT, each with its
sleep for what a GPU would compute (`interleave.py`, from which all but the training is taken). The real arithmetic
is done for a few rows of a micro-batch; the others pass unchanged, so that what is sent between stages has the size
that it should have.

Besides the length of each iteration, a rank tells when it came to its optimizer and when it went on from there: hooks
before and behind the checkpointer's own. All nodes are one machine's, so that their clocks are one.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from interleave import Bench, Block, Probe, sent_bytes  # type: ignore[import-not-found]  # beside it on a node
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gemini_hpc as gemini

COMPUTED = 8  # rows of a micro-batch that are computed with


class Stage(nn.Module):
    """Some layers of a GPT; in the whole model their numbers begin with `first`."""

    def __init__(self, dim: int, blocks: int, first: int) -> None:
        super().__init__()
        self.place = nn.Embedding(COMPUTED, dim)
        self.blocks = nn.ModuleDict({str(first + k): Block(dim) for k in range(blocks)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, dim), to the next stage the same."""
        few = x[:COMPUTED] + self.place.weight
        for block in self.blocks.values():
            few = block(few)
        return torch.cat([few, x[COMPUTED:]])


class Pipeline(Bench):  # type: ignore[misc]
    """One stage of the training."""

    def __init__(self, args: argparse.Namespace) -> None:
        # not the base's: another model, and another way through it
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._out = open(f"{args.out}.{self.rank}", "w", buffering=1)  # noqa: SIM115
        self._probe = Probe(self.rank, self.world)
        torch.manual_seed(self.rank)
        self.model = Stage(args.dim, args.blocks, self.rank * args.blocks)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, foreach=True)
        self._came = self._went = self._begin = 0.0
        register_optimizer_step_pre_hook(self._coming)
        self.ckpt = gemini.Checkpointer(self.model, self.optimizer)
        register_optimizer_step_pre_hook(self._going)
        self.ckpt.resume()
        self._batch = torch.randn(args.microbatches * args.rows, args.dim)
        stage = PipelineStage(self.model, self.rank, self.world, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, args.microbatches, loss_fn=nn.functional.mse_loss)
        for module in self.model.modules():
            if isinstance(module, Block):
                module.span.forward_s = args.forward
        params = sum(p.numel() for p in self.model.parameters())
        self.say("ready", parameters=params, activation_bytes=4 * args.rows * args.dim)

    def _coming(self, *_: Any) -> None:
        self._came = time.perf_counter()

    def _going(self, *_: Any) -> None:
        self._went = time.perf_counter()

    def iterate(self) -> None:
        """One iteration. It counts from when the state of the one before was complete."""
        first, last = self.rank == 0, self.rank == self.world - 1
        self._schedule.step(
            *([self._batch] if first else []),
            target=self._batch if last else None,
            return_outputs=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._begin = time.perf_counter()
        self.ckpt.step()

    def _one(self, number: int, scheme: str, index: int) -> None:
        sent, began = sent_bytes(), self._begin
        self.iterate()
        self.say(
            "iteration",
            round=number,
            scheme=scheme,
            index=index,
            seconds=self._begin - began,
            began=began,
            came=self._came,
            went=self._went,
            sent_bytes=sent_bytes() - sent,
        )

    def traffic(self) -> dict[str, Any]:
        """Of the scheme at work; common_s: idle time, before the first stage comes to its optimizer, in which the
        peer is idle too."""
        running = self.ckpt._engine.running
        route = running.controller._route if running is not None else None
        windows = route.usable if route is not None else ()
        return {**super().traffic(), "common_s": sum(w.length_s for w in windows if w.before_gate)}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, help="prefix of the log files")
    p.add_argument("--schemes", required=True, help="in the order of the first round")
    p.add_argument("--rounds", type=int, required=True)
    p.add_argument("--warm", type=int, default=2, help="iterations after each change that do not count")
    p.add_argument("--measured", type=int, default=4, help="iterations that do")
    p.add_argument("--microbatches", type=int, required=True)
    p.add_argument("--rows", type=int, required=True, help="of a micro-batch: what is sent between two stages")
    p.add_argument("--dim", type=int, required=True)
    p.add_argument("--blocks", type=int, required=True, help="of a stage")
    p.add_argument("--forward", type=float, required=True, help="seconds of compute in the forward pass of a block")
    args = p.parse_args()
    torch.set_num_threads(1)
    gemini.set_ranks()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    dist.init_process_group("gloo")
    bench = Pipeline(args)
    bench.protect()
    bench.rounds(args.schemes.split(","), args.rounds, args.warm, args.measured)
    bench.end()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
