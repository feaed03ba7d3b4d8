"""PyTorch Lightning: `Trainer(callbacks=[GeminiCallback()])`, and a `StatefulLoader` as the training's loader."""

from __future__ import annotations

from typing import Any

from gemini_hpc import lines
from gemini_hpc.integrations.naming import choose_next_name
from gemini_hpc.train.checkpointer import Checkpointer
from gemini_hpc.train.state.loader import StatefulLoader

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("gemini_hpc.integrations.lightning needs lightning: pip install lightning") from error


def _forget_the_checkpoint_on_disk(trainer: Trainer) -> None:
    """Drop the state that `fit(ckpt_path=...)` has read, which would overwrite the state from memory.

    This is the only private part of Lightning that the callback must use.
    """
    trainer._checkpoint_connector._loaded_checkpoint = {}


class _Progress:
    """The progress of the loops, the loader and the other callbacks, as Lightning's state_dicts."""

    def __init__(self, trainer: Trainer, callback: GeminiCallback) -> None:
        self._trainer = trainer
        self._others = [other for other in trainer.callbacks if other is not callback]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "loops": self._trainer.fit_loop.state_dict(),
            "callbacks": {other.state_key: own for other in self._others if (own := other.state_dict())},
        }
        if self._trainer.datamodule is not None:
            state["data"] = self._trainer.datamodule.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state["loops"])
        for other in self._others:
            if other.state_key in state["callbacks"]:
                other.load_state_dict(state["callbacks"][other.state_key])
        if self._trainer.datamodule is not None and "data" in state:
            self._trainer.datamodule.load_state_dict(state["data"])


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        lines.write_line(text)


def _report_unprotected(trainer: Trainer, why: str) -> None:
    _say(trainer, f"this training is not protected: {why}")


class GeminiCallback(Callback):  # type: ignore[misc]
    """A callback that protects `fit()`, and resumes it from the agents' memory.

    The training resumes in mid-epoch, at the batch that it had reached.

    The training's loader must be a `StatefulLoader` (rank and world are `trainer.global_rank` and
    `trainer.world_size`). With any other loader, one line reports that the training is not protected. A version is
    made for each new `trainer.global_step`. It is made when validation and all other callbacks are done with the
    step, just before the next batch is read. A version in memory takes precedence over `ckpt_path`. Without an agent
    one line reports so.

    Attributes:
        checkpointer: The `Checkpointer` that `fit()` has made; None before.
    """

    def __init__(self, **options: Any) -> None:
        """Create a callback.

        Args:
            **options: Keyword arguments for `Checkpointer`.
        """
        self.checkpointer: Checkpointer | None = None
        self._options = options
        self._captured = 0  # newest global_step with a version
        self._resumed = False
        self._limit: int | float | None = None  # the limit of validation batches, while it is set aside

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume, because the model is wrapped and the optimizers are made."""
        self.checkpointer, self._resumed = None, False
        if trainer.strategy.restore_checkpoint_after_setup and trainer.ckpt_path:  # the restore runs after this hook
            _report_unprotected(
                trainer, "this strategy would load ckpt_path over the state from memory: leave ckpt_path out"
            )
            return
        options = dict(self._options)
        options["name"] = choose_next_name(options.get("name", "default"))
        self.checkpointer = Checkpointer(
            trainer.model,
            trainer.optimizers,
            [config.scheduler for config in trainer.lr_scheduler_configs] or None,
            getattr(trainer.precision_plugin, "scaler", None),
            _Progress(trainer, self),
            **options,
        )
        if type(pl_module).on_save_checkpoint is not LightningModule.on_save_checkpoint:
            _say(
                trainer,
                f"what {type(pl_module).__name__}.on_save_checkpoint adds is not captured and begins anew after a "
                "resume: make it a buffer or extra state (get_extra_state, set_extra_state)",
            )
        self.checkpointer.gate_in_closure = True  # Lightning computes loss and gradients in the optimizer's step
        self._resumed = self.checkpointer.resume() > 0
        self._captured = trainer.global_step
        if self._resumed:
            _forget_the_checkpoint_on_disk(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the loader, which exists now and has not been read from."""
        loader = trainer.train_dataloader
        if not isinstance(loader, StatefulLoader):
            _report_unprotected(
                trainer,
                f"its loader is a {type(loader).__name__}, whose position is unknown. Return a "
                "gemini_hpc.StatefulLoader from train_dataloader()",
            )
            return
        self._captured = trainer.global_step  # the step of a checkpoint on disk
        loader.run_between_batches(lambda: self._make_version(trainer))
        if self._resumed and self.checkpointer is not None:
            loader.run_before_next_batch(self.checkpointer.restore_generators)
            # A restored loop tests whether validation is due before it reads a batch. It was done already.
            self._limit, trainer.limit_val_batches = trainer.limit_val_batches, 0
            if loader.dealt_anew:
                _say(
                    trainer,
                    "batch size or number of ranks have changed in mid-epoch: the loader goes on after the samples "
                    "that were read, but Lightning counts batches, and may end this epoch before all are read",
                )

    def _make_version(self, trainer: Trainer) -> None:
        """Make a version of the last step.

        The previous batch is done, and the next is not yet read.
        """
        if self._limit is not None:
            trainer.limit_val_batches, self._limit = self._limit, None
        if trainer.global_step != self._captured and self.checkpointer is not None:
            self._captured = trainer.global_step
            self.checkpointer.step()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the checkpointer, because the training has succeeded."""
        if self.checkpointer is not None:
            self.checkpointer.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the checkpointer with the error, because the training has not succeeded."""
        if self.checkpointer is not None:
            self.checkpointer.__exit__(type(exception), exception, exception.__traceback__)
