"""A small byte-level GPT, trained with DDP or FSDP2 on the source of Python's own standard library.

    sbatch --gemini-replicas=2 job.sh          # see job.sh
    srun -N3 python train_gpt.py               # unprotected
    python train_gpt.py --steps 50             # one process, without Slurm

The lines that protect it are marked with "gemini:". Rank 0 appends one JSON line a step to --log; the file goes on
after a requeue. Losses are written as hexadecimal floats, so that two runs can be compared bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import gemini_hpc as gemini


class Source(Dataset[Tensor]):
    """Windows of `context + 1` bytes of the standard library's source, in a fixed order."""

    def __init__(self, context: int, stride: int, first: int, last: int) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        text = bytearray()
        for path in sorted(root.glob("*.py")):
            text += path.read_bytes()
            if len(text) >= last:
                break
        self.data = torch.frombuffer(text[first:last], dtype=torch.uint8)
        self.context, self.stride = context, stride

    def __len__(self) -> int:
        return (len(self.data) - self.context - 1) // self.stride

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index * self.stride :][: self.context + 1].long()


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(a.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """A decoder over bytes; input and output embeddings are one tensor."""

    def __init__(self, layers: int, dim: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp", help="how the model is distributed")
    p.add_argument("--steps", type=int, default=200, help="optimizer steps")
    p.add_argument("--layers", type=int, default=4, help="transformer blocks")
    p.add_argument("--dim", type=int, default=192, help="model width")
    p.add_argument("--heads", type=int, default=4, help="attention heads")
    p.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    p.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    p.add_argument("--workers", type=int, default=2, help="data loader processes per rank")
    p.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    p.add_argument("--dropout", type=float, default=0.1, help="dropout probability")
    p.add_argument("--seed", type=int, default=1, help="seed of everything")
    p.add_argument("--log", type=Path, default=Path("train_gpt.jsonl"), help="JSON lines are appended here")
    p.add_argument("--iteration-s", type=float, default=0.0, help="shortest iteration; the rest is slept")
    p.add_argument("--replicas-report", action="store_true", help="print the checkpointer's report at the end")
    return p.parse_args()


def distribute(model: nn.Module, how: str, device: torch.device) -> nn.Module:
    """Wrap the model for the process group, if there is one."""
    if not dist.is_initialized():
        return model
    if how == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """xxh3 of all parameters and optimizer state, whole tensors."""
    hasher = xxhash.xxh3_64()
    state = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
    for t in [*model.parameters(), *state]:
        whole = t.full_tensor() if hasattr(t, "full_tensor") else t
        hasher.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def main() -> None:
    a = arguments()
    torch.set_num_threads(1)
    gemini.set_ranks()  # gemini: RANK, WORLD_SIZE and the others, where nobody has set them
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if gpu else "gloo")
    train(a, rank, world, device)
    gc.collect()  # DDP's model goes before its process group, or torch may wait for gloo's threads for ever
    if world > 1:
        dist.destroy_process_group()


def train(a: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
    """All steps, from where the job had come."""
    torch.manual_seed(a.seed)  # the same weights everywhere ...
    model = distribute(GPT(a.layers, a.dim, a.heads, a.context, a.dropout).to(device), a.parallel, device)
    torch.manual_seed(a.seed + 1000 * rank)  # ... but each rank its own dropout

    text = Source(a.context, a.context // 2, 0, 4_000_000)
    held_out = Source(a.context, a.context, 4_000_000, 4_100_000)
    loader = gemini.StatefulLoader(text, a.batch, seed=a.seed, rank=rank, world=world, num_workers=a.workers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.1)
    warmup = 20
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda n: min(1.0, (n + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, n / max(1, a.steps))))),
    )

    ckpt = gemini.Checkpointer(model, optimizer, scheduler, loader=loader)  # gemini: what to protect
    start = ckpt.resume()  # gemini: 0, or the version recovered
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0") or "0")

    def record(**fields: object) -> None:
        if rank == 0:
            with a.log.open("a") as f:
                f.write(json.dumps({**fields, "time": time.time(), "restart": restart}) + "\n")

    def loss_of(batch: Tensor) -> Tensor:
        batch = batch.to(device)
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        batch = torch.stack([held_out[i] for i in range(rank, len(held_out), max(1, len(held_out) // 16))])
        total = loss_of(batch)
        model.train()
        if world > 1:
            dist.all_reduce(total)
        return total.item() / world

    batches = loader.iterate_forever()
    began = time.monotonic() - a.iteration_s
    for step in range(start + 1, a.steps + 1):
        time.sleep(max(0.0, began + a.iteration_s - time.monotonic()))  # stands for a forward pass that takes longer
        began = time.monotonic()
        loss = loss_of(next(batches))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        line = {"step": step, "loss": loss.item().hex(), "lr": scheduler.get_last_lr()[0]}
        if step % 10 == 0:
            line["eval"] = evaluate().hex()
        record(**line)
        ckpt.step()  # gemini: the state of this iteration is complete (the last statement of the loop)

    final = [digest(model, optimizer)] * world
    if world > 1:
        dist.all_gather_object(final, final[rank])
    print(f"rank {rank}: {a.steps} steps done, state {final[rank]}", flush=True)
    record(final=final, start=start)
    if a.replicas_report and rank == 0:
        print(json.dumps(ckpt.report(), indent=1), flush=True)
    ckpt.close()  # gemini: the training has succeeded


if __name__ == "__main__":
    main()
