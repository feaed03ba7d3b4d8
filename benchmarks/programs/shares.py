"""What travels of a state that is replicated, or mostly frozen; and what a large late tensor costs inside step().

    srun python shares.py --mode ddp|lora|late --out FILE

ddp: all parameters are trained, Adam, DDP. lora: one layer in twelve is trained, FSDP2. late: DDP, and an average of
the weights that is no module begins in mid-training. Writes JSON lines to FILE.RANK: for each version after the first
ones the bytes that have gone to holders since the one before, those of this rank's copy and of what changes in it;
the seconds in step().
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gemini_hpc as gemini

COMPUTE_S = 0.1


class Average:
    """Of the weights, from some step on."""

    def __init__(self) -> None:
        self.shadow: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        """The averages."""
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Them back."""
        self.shadow = list(state["shadow"])


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["ddp", "lora", "late"], required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=60, help="the first third does not count")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gemini.set_ranks()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    width, layers = 512, 12 if args.mode != "late" else 13
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    if args.mode == "lora":
        for layer in list(net)[1:]:
            layer.requires_grad_(False)
    model: nn.Module = net
    if args.mode == "lora":
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    else:
        model = DistributedDataParallel(net)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-3)
    average = Average()
    ckpt = gemini.Checkpointer(model, optimizer, extra={"average": average})
    ckpt.resume()
    x = torch.randn(8, width)
    sent = 0
    with open(f"{args.out}.{rank}", "a", buffering=1, encoding="ascii") as out:
        for step in range(1, args.steps + 1):
            time.sleep(COMPUTE_S)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if args.mode == "late" and step >= args.steps // 6:
                if not average.shadow:
                    average.shadow = [p.detach().clone() for p in net.parameters()]
                with torch.no_grad():
                    torch._foreach_lerp_(average.shadow, list(net.parameters()), 0.1)
            began = time.perf_counter()
            ckpt.step()
            spent = time.perf_counter() - began
            report = ckpt.report()
            total = report["versions"].get("sent_bytes", 0)
            changing = 3 * sum(p.numel() * p.element_size() for p in trained) / dist.get_world_size()
            line = {
                "what": "version",
                "rank": rank,
                "version": step,
                "settled": step > args.steps // 3,
                "state": report["state"],
                "sent": total - sent,
                "copy": report["captured"]["own_tensor_bytes"],
                "changing": changing,
                "step_s": spent,
                "late_bytes": sum(t.numel() * t.element_size() for t in average.shadow),
            }
            sent = total
            out.write(json.dumps(line) + "\n")
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
