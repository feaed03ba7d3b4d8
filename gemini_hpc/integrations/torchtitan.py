"""torchtitan's checkpoint manager with every step in the agents' memory, beside its own checkpoints on disk.

    from gemini_hpc.integrations.torchtitan import GeminiCheckpointManager

    config.checkpoint = GeminiCheckpointManager.Config(enable=True, interval=500)

This line goes into the function of torchtitan's config registry. The trainer is unchanged: it builds this manager,
and calls `load`, `maybe_wait_for_staging`, `save` after each step, and `close`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

try:
    from torchtitan.components.checkpointer import TRAIN_STATE, CheckpointManager
except ImportError as error:
    raise ImportError(f"gemini_hpc.integrations.torchtitan: pip install 'torchtitan>=0.3,<0.4' ({error})") from error

from gemini_hpc.train.checkpointer import Checkpointer
from gemini_hpc.wire.stored import Tier


class GeminiCheckpointManager(CheckpointManager):  # type: ignore[misc]  # torchtitan has no types that mypy finds
    """A checkpoint manager that keeps each step in memory (`Checkpointer`).

    A step consists of model parts, optimizers, schedulers, data loader and train state. If memory has a version,
    `load` takes it, whatever is on disk and whatever `load_step` is, because this very job has reached it. Disk
    checkpoints are made as before, every `interval` steps; `disk = False` makes none.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's configuration; `Checkpointer` documents name, max_repeated and tier."""

        disk: bool = True
        name: str = "default"
        max_repeated: int = 1
        tier: str = ""
        tier_interval_s: float = 0

    def __init__(
        self,
        config: Config,
        *,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        dataloader: Any,
        states: dict[str, Any],
        **others: Any,
    ) -> None:
        self._memory: Checkpointer | None = None
        train_state = states.get(TRAIN_STATE)
        super().__init__(
            config,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            dataloader=dataloader,
            states=states,
            **others,
        )
        if not config.enable:
            return
        self._disk, self._parts = config.disk, model_parts
        self._memory = Checkpointer(
            model_parts[0] if len(model_parts) == 1 else nn.ModuleList(model_parts),
            optimizers,
            lr_schedulers,
            loader=dataloader,
            extra={} if train_state is None else {TRAIN_STATE: train_state},
            name=config.name,
            max_repeated=config.max_repeated,
            tier=Tier(config.tier, round(config.tier_interval_s)),
        )

    def __del__(self) -> None:
        self._memory = None  # the object's end does not mean that the training has succeeded
        super().__del__()

    @property
    def memory(self) -> Checkpointer | None:
        """Return the `Checkpointer` that protects the steps; None if checkpoints are not enabled."""
        return self._memory

    def _load(self, step: int = -1) -> bool:
        memory = self._memory
        if memory is None or not memory.resume():
            return bool(super()._load(step))
        hooks: list[Any] = []

        def on_first_forward(*_: Any) -> None:
            """Restore the generators, because the data loader has begun meanwhile and has drawn from them."""
            while hooks:
                hooks.pop().remove()
                memory.restore_generators()

        hooks += [part.register_forward_pre_hook(on_first_forward) for part in self._parts]
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._memory is not None:
            self._memory.step()
        return bool(self._disk and super()._save(curr_step, last_step))

    def _close(self) -> None:
        """Close the manager, also after an error that is being handled: the copies are then still needed."""
        if self._memory is not None:
            self._memory.__exit__(*sys.exc_info())
        super()._close()
