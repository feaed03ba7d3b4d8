"""Trainings with real packages, for the tests: what a rank runs (see tests/train/worker.py), and what it tells.

On a cluster a copy of this file runs without the rest of the tests (tests/e2e/door.py). Each training is small, has
dropout, a schedule, accumulated gradients, several epochs, and data that draw random numbers in the training's own
process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.utils.data import Dataset

import gemini_hpc as gemini

VOCABULARY, LENGTH = 40, 8
ACCUMULATE = 2


class Texts(Dataset[Any]):
    """Samples of which a tenth of the tokens is replaced anew at each reading."""

    def __init__(self, size: int, noisy: bool = True) -> None:
        self.size, self.noisy = size, noisy

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.size:
            raise IndexError(index)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        read = tokens
        if self.noisy:
            read = torch.where(torch.rand(LENGTH) < 0.1, torch.randint(0, VOCABULARY, (LENGTH,)), tokens)
        return {"input_ids": read, "labels": tokens}


class Net(nn.Module):
    """For the stacks without models of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.BatchNorm1d(LENGTH)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.embed(input_ids))))


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Log:
    """One line a completed step, as the tests of tests/train/test_kills.py read them."""

    def __init__(self, o: dict[str, Any]) -> None:
        self._file = Path(f"{o['log']}.{rank()}").open("a", buffering=1) if "log" in o else None  # noqa: SIM115
        self._sleep_s = o.get("sleep_s", 0.0)
        self.losses: dict[int, str] = {}
        self._sum: list[float] = []
        self.start: int | None = None

    def micro(self, loss: torch.Tensor) -> None:
        self._sum.append(loss.item())

    def step(self, number: int) -> None:
        self.losses[number] = " ".join(part.hex() for part in self._sum).replace(" ", "+")
        if self.start is None:
            self.start = number - 1
        if self._file is not None:
            self._file.write(f"{self.start} {number} {self.losses[number]}\n")
        self._sum = []
        time.sleep(self._sleep_s)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def digest(model: nn.Module, optimizer: Any) -> str:
    tensors: Iterable[Any] = [*model.parameters(), *model.buffers()]
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    hasher = xxhash.xxh3_128()
    for tensor in (*tensors, *state):
        hasher.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def without(o: dict[str, Any]) -> bool:
    """The same training without a line of ours."""
    return bool(o.get("without"))


# ---- the stacks ---------------------------------------------------------------------------------------------------


def huggingface(o: dict[str, Any], log: Log) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from gemini_hpc.integrations.huggingface import GeminiMixin

    class Patience(TrainerCallback):  # type: ignore[misc]
        """Has a state of its own."""

        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            log.step(state.global_step)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    class Plain(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            log.micro(loss)
            return loss

    if o.get("behind"):

        class Wrong(Plain, GeminiMixin):
            pass

    class Mine(GeminiMixin, Plain):
        gemini_options = o.get("kwargs", {})

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0)
    config.eos_token_id = 0
    model: Any = GPT2LMHeadModel(config)
    if o.get("peft"):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)  # what is frozen is a checkpoint's, the same at each start
        model = GPT2LMHeadModel(config)
        torch.manual_seed(o.get("seed", 0))
        model = get_peft_model(
            model,
            LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, task_type="CAUSAL_LM", fan_in_fan_out=True),
        )
    arguments = TrainingArguments(
        output_dir=o["directory"],
        use_cpu=True,
        ddp_backend="gloo" if world() > 1 else None,
        per_device_train_batch_size=o.get("batch", 2),
        gradient_accumulation_steps=ACCUMULATE,
        max_steps=o["steps"],
        learning_rate=0.01,
        warmup_steps=3,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy=o.get("save", "no"),
        save_steps=6,
        auto_find_batch_size=bool(o.get("auto")),
        report_to=[],
        disable_tqdm=True,
        seed=1,
        accelerator_config={"use_seedable_sampler": not o.get("unseeded")},
        dataloader_num_workers=o.get("workers", 0),
        train_sampling_strategy=o.get("sampling", "random"),
    )
    patience = Patience()
    trainer = (Plain if without(o) else Mine)(
        model=model,
        args=arguments,
        train_dataset=Texts(70, not o.get("still")),
        eval_dataset=Texts(8, noisy=False),
        callbacks=[patience],
    )
    again: dict[str, Any] = {}
    if o.get("from_disk") and any(Path(o["directory"]).glob("checkpoint-*")):
        again = {"resume_from_checkpoint": True}
    output = trainer.train(**again)
    told: dict[str, Any] = {
        "digest": digest(trainer.model, trainer.optimizer),
        "history": [
            {k: v for k, v in line.items() if not k.endswith(("_runtime", "_per_second"))}
            for line in trainer.state.log_history
        ],
        "train_loss": output.training_loss.hex(),
        "seen": patience.seen,
        "epoch": trainer.state.epoch,
        "lr": trainer.lr_scheduler.get_last_lr(),
    }
    if not without(o) and trainer.checkpointer is not None:
        told["report"] = trainer.checkpointer.report()
    return told


def lightning(o: dict[str, Any], log: Log) -> dict[str, Any]:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from gemini_hpc.integrations.lightning import GeminiCallback

    class Events(Callback):  # type: ignore[misc]
        """What happened, in its order, over all launches."""

        def __init__(self) -> None:
            self.seen: list[str] = []
            self.logged = 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.logged = trainer.global_step
            torch.rand(3)  # at each start: what is drawn here must not count

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.seen.append(f"epoch {trainer.current_epoch} begins at {trainer.global_step}")

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(
                f"batch {batch_idx}, step {trainer.global_step}, rate {trainer.optimizers[0].param_groups[0]['lr']}"
            )
            if trainer.global_step > self.logged:
                self.logged = trainer.global_step
                log.step(self.logged)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                self.seen.append(
                    f"validated at {trainer.global_step}: {float(trainer.callback_metrics['val_loss']).hex()}"
                )

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.seen.append(f"epoch {trainer.current_epoch} ends at {trainer.global_step}")

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_of(self.net(batch["input_ids"]), batch["labels"])
            log.micro(loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", loss_of(self.net(batch["input_ids"]), batch["labels"]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5))
            if o.get("plateau"):
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
                of_steps = {
                    "scheduler": plateau,
                    "interval": "step",
                    "frequency": 4,
                    "monitor": "val_loss",
                    "strict": False,
                }
                return [optimizer], [of_steps]
            return [optimizer], [{"scheduler": warm, "interval": "step"}]

        def train_dataloader(self) -> Any:
            if o.get("loader") == "torch":
                return torch.utils.data.DataLoader(Texts(70), 2)
            place = {"rank": self.trainer.global_rank, "world": self.trainer.world_size}
            return gemini.StatefulLoader(
                Texts(70, not o.get("still")), o.get("batch", 2), seed=1, num_workers=o.get("workers", 0), **place
            )

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Texts(8, noisy=False), 2)

    class Adding(Module):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["beside"] = 1

    module, events = Adding() if o.get("adds") else Module(), Events()
    callbacks: list[Any] = [events, EarlyStopping("val_loss", patience=100)]
    ours = GeminiCallback(**o.get("kwargs", {}))
    if not without(o):
        callbacks.append(ours)
    if o.get("save"):
        callbacks.append(ModelCheckpoint(o["directory"], every_n_train_steps=6, save_last=True))
    trainer = Trainer(
        accelerator="cpu",
        devices=local_world(),
        num_nodes=world() // local_world(),
        strategy="ddp" if world() > 1 else "auto",
        plugins=[TorchElasticEnvironment()],
        max_steps=o.get("steps", -1) if not o.get("epochs") else -1,
        max_epochs=o.get("epochs", -1),
        accumulate_grad_batches=ACCUMULATE,
        val_check_interval=o.get("validate", 4),
        callbacks=callbacks,
        num_sanity_val_steps=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(o.get("save")),
    )
    last = Path(o["directory"]) / "last.ckpt"
    trainer.fit(module, ckpt_path=str(last) if o.get("save") and last.exists() else None)
    told: dict[str, Any] = {
        "digest": digest(module, trainer.optimizers[0]),
        "seen": events.seen,
        "best": float(callbacks[1].best_score).hex(),
        "loops": trainer.fit_loop.state_dict(),
    }
    if ours.checkpointer is not None:
        told["report"] = ours.checkpointer.report()
    return told


def fabric(o: dict[str, Any], log: Log) -> dict[str, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from gemini_hpc.integrations.fabric import build_checkpointer

    fabric = Fabric(accelerator="cpu", devices=world(), strategy="ddp", plugins=[TorchElasticEnvironment()])
    fabric.launch()
    bare = Net()
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda n: min(1.0, (n + 1) / 5))
    loader = gemini.StatefulLoader(Texts(70), 2, seed=1, rank=rank(), world=world())
    ckpt = (
        None if without(o) else build_checkpointer(fabric, model, optimizer, scheduler, loader, **o.get("kwargs", {}))
    )
    first = ckpt.resume() if ckpt else 0
    batches = loader.iterate_forever()
    for step in range(first + 1, o["steps"] + 1):
        for micro in range(ACCUMULATE):
            batch = fabric.to_device(next(batches))
            with fabric.no_backward_sync(model, enabled=micro + 1 < ACCUMULATE):
                loss = loss_of(model(batch["input_ids"]), batch["labels"])
                fabric.backward(loss)
            log.micro(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if ckpt:
            ckpt.step()
        log.step(step)
    return finished(bare, optimizer.optimizer, ckpt)


def accelerate(o: dict[str, Any], log: Log) -> dict[str, Any]:
    from accelerate import Accelerator

    from gemini_hpc.integrations.accelerate import build_checkpointer

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    bare = Net()
    plain = torch.optim.AdamW(bare.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda n: min(1.0, (n + 1) / 5))
    model, optimizer, scheduler = accelerator.prepare(bare, plain, scheduler)
    loader = gemini.StatefulLoader(Texts(70), 2, seed=1, rank=rank(), world=world())
    ckpt = (
        None
        if without(o)
        else build_checkpointer(accelerator, model, optimizer, scheduler, loader, **o.get("kwargs", {}))
    )
    step = ckpt.resume() if ckpt else 0
    for batch in loader.iterate_forever():
        with accelerator.accumulate(model):
            loss = loss_of(model(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss)
            log.micro(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            if ckpt:
                ckpt.step()
            log.step(step)
            if step == o["steps"]:
                break
    return finished(bare, plain, ckpt)


def finished(model: nn.Module, optimizer: Any, ckpt: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"digest": digest(model, optimizer)}
    if ckpt:
        told["report"] = ckpt.report()
        ckpt.close()
    return told


STACKS: dict[str, Callable[[dict[str, Any], Log], dict[str, Any]]] = {
    "huggingface": huggingface,
    "lightning": lightning,
    "fabric": fabric,
    "accelerate": accelerate,
}


def main(o: dict[str, Any]) -> None:
    """Train, and print what there is to tell as one JSON line."""
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_RANK", str(rank()))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(world()))
    for module in o.get("missing", []):
        sys.modules[module] = None  # type: ignore[assignment]
    if "missing" in o:
        importlib.import_module(f"gemini_hpc.integrations.{o['stack']}")
    torch.manual_seed(o.get("seed", 0))
    log = Log(o)
    told = STACKS[o["stack"]](o, log)
    print(json.dumps({"rank": rank(), "start": log.start, "losses": log.losses, **told}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
