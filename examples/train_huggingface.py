"""A small GPT-2 trained by Hugging Face's Trainer on the source of Python's own standard library.

    sbatch -N2 --requeue --gemini-replicas=2 --wrap "gemini-hpc run -- srun python train_huggingface.py"
    python train_huggingface.py --steps 50             # one process, without Slurm

The lines that protect it are marked with "gemini:". It needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import Dataset
from train_gpt import Source
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gemini_hpc as gemini
from gemini_hpc.integrations.huggingface import GeminiMixin


class Samples(Dataset[Any]):
    """As Trainer wants them."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.source[index], "labels": self.source[index]}


class ProtectedTrainer(GeminiMixin, Trainer):  # gemini: all that it takes
    pass


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=200, help="optimizer steps")
    p.add_argument("--output", default="train_huggingface", help="Trainer's directory")
    a = p.parse_args()
    gemini.set_ranks()  # gemini: RANK, WORLD_SIZE and the others, where nobody has set them
    torch.set_num_threads(1)
    torch.manual_seed(1)
    context = 64
    tokens = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_positions=context + 1, n_embd=64, n_layer=2, n_head=2, **tokens)
    arguments = TrainingArguments(
        a.output,
        max_steps=a.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=5,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    data = Samples(Source(context, context // 2, 0, 400_000))
    trainer = ProtectedTrainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
    print(trainer.train())


if __name__ == "__main__":
    main()
