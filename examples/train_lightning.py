"""A small GPT trained by PyTorch Lightning on the source of Python's own standard library.

    sbatch -N2 --requeue --gemini-replicas=2 --wrap "gemini-hpc run -- srun python train_lightning.py"
    python train_lightning.py --steps 50             # one process, without Slurm

The lines that protect it are marked with "gemini:". It needs lightning.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.nn import functional as F
from train_gpt import GPT, Source

import gemini_hpc as gemini
from gemini_hpc.integrations.lightning import GeminiCallback

CONTEXT = 64


class Module(LightningModule):
    """The model, its loss, its optimizer, its data."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(layers=2, dim=64, heads=2, context=CONTEXT, dropout=0.1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)

    def train_dataloader(self) -> Any:
        place = {"rank": self.trainer.global_rank, "world": self.trainer.world_size}
        data = Source(CONTEXT, CONTEXT // 2, 0, 400_000)
        return gemini.StatefulLoader(data, 4, seed=1, **place)  # gemini: a loader with a position


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=200, help="optimizer steps")
    a = p.parse_args()
    gemini.set_ranks()  # gemini: RANK, WORLD_SIZE and the others, where nobody has set them
    torch.set_num_threads(1)
    torch.manual_seed(1)
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        max_steps=a.steps,
        accumulate_grad_batches=2,
        callbacks=[GeminiCallback()],  # gemini: what to protect
        strategy="ddp" if world > 1 else "auto",
        devices=local,
        num_nodes=world // local,
        plugins=[TorchElasticEnvironment()]
        if world > 1
        else None,  # gemini: the ranks that the agents have agreed on
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module())
    print(f"{trainer.global_step} steps done, loss {trainer.callback_metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
