"""A DDP training that goes on after failures, from memory or from files: for `chaos.py`.

    srun python chaotic.py --way gemini|dcp --steps N --log FILE [--every K --directory DIR]

Compute is a sleep; model, optimizer, collectives and saves are real. Rank 0 appends one JSON line a step to --log:
step, Unix time, restart. dcp: torch.distributed.checkpoint.async_save into DIR every K steps; the newest complete one
there is loaded at the start, the last two are kept. gemini: the checkpointer as users have it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_hpc as gemini

WIDTH, LAYERS = 512, 8
BATCH = 4


class Dcp:
    """What a careful user of torch alone does."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path, every: int) -> None:
        self._model, self._optimizer = model, optimizer
        self._directory, self._every = directory, every
        self._group = dist.new_group(backend="gloo")  # of its own: the training's collectives go on meanwhile
        self._saving: Any = None

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _complete(self) -> list[int]:
        return sorted(int(path.parent.name) for path in self._directory.glob("*/.metadata"))  # it is written last

    def resume(self) -> int:
        """The step of the newest complete checkpoint, which is loaded; 0 without one."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        found = [max(self._complete(), default=0)]
        dist.broadcast_object_list(found)
        if found[0]:
            state = self._state()
            dcp.load(  # type: ignore[attr-defined]
                state, checkpoint_id=self._directory / str(found[0])
            )
            model, optimizer = state["model"], state["optimizer"]
            set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return int(found[0])

    def step(self, step: int) -> None:
        """After each step; waits only for a save before it that is not over yet."""
        import torch.distributed.checkpoint as dcp

        if step % self._every:
            return
        self.close()
        self._saving = dcp.async_save(  # type: ignore[attr-defined]
            self._state(), checkpoint_id=self._directory / str(step), process_group=self._group
        )

    def close(self) -> None:
        """Wait for the last save, and forget old ones."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None
            if dist.get_rank() == 0:
                for old in self._complete()[:-2]:
                    shutil.rmtree(self._directory / str(old), ignore_errors=True)


class Gemini:
    """This project's."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._checkpointer = gemini.Checkpointer(model, optimizer)
        self.resume, self.close = self._checkpointer.resume, self._checkpointer.close

    def step(self, step: int) -> None:
        """After each step."""
        self._checkpointer.step()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--way", choices=("dcp", "gemini"), required=True, help="how the state is kept")
    p.add_argument("--steps", type=int, required=True, help="steps in all")
    p.add_argument("--iteration", type=float, default=0.5, help="seconds of one")
    p.add_argument("--log", type=Path, required=True, help="JSON lines are appended here")
    p.add_argument("--every", type=int, default=1, help="dcp: steps from save to save")
    p.add_argument("--directory", type=Path, help="dcp: where to")
    args = p.parse_args()
    torch.set_num_threads(1)
    gemini.set_ranks()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    way = Gemini(model, optimizer) if args.way == "gemini" else Dcp(model, optimizer, args.directory, args.every)
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0") or "0")
    for step in range(way.resume() + 1, args.steps + 1):
        began = time.monotonic()
        loss = model(torch.randn(BATCH, WIDTH)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(max(0.0, args.iteration - (time.monotonic() - began)))
        if dist.get_rank() == 0:
            with args.log.open("a") as log:
                log.write(json.dumps({"step": step, "t": time.time(), "restart": restart}) + "\n")
        way.step(step)
    way.close()
    del model, way
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
