"""Hugging Face's Trainer: `class MyTrainer(GeminiMixin, Trainer)` is all that a script needs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from gemini_hpc import lines
from gemini_hpc.integrations.accelerate import unwrap_prepared
from gemini_hpc.integrations.naming import choose_next_name
from gemini_hpc.train.checkpointer import Checkpointer
from gemini_hpc.train.state import rng

try:
    from transformers import Trainer
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        "gemini_hpc.integrations.huggingface needs transformers and accelerate: pip install transformers accelerate"
    ) from error

# Private parts of Trainer that must be used. These methods are overridden:
# `_init_training_state` (the last place where the epochs and steps to skip can be set), `_prepare_for_training`
# (makes the captured state), `_run_epoch` (skips batches), `_load_rng_state` (generators come from memory).
_OVERRIDDEN = ("_init_training_state", "_prepare_for_training", "_run_epoch", "_load_rng_state")
# These attributes are sums from which the next logged loss and the final loss are computed. Trainer's own checkpoints
# lack them.
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")

_PROGRESS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
# Attributes that the loader copies from the loader that Trainer has made.
_LOADING = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
_MEMORY = "the agents' memory"  # in the place of a checkpoint directory in Trainer

if missing := [name for name in _OVERRIDDEN if not hasattr(Trainer, name)]:
    raise ImportError(f"this release of transformers has no Trainer.{missing[0]}: pip install 'transformers>=5.24'")


class _Order:
    """The batches of an epoch as Trainer's own loader has them, drawn when the epoch begins.

    Its state is that of the generators before the drawing, so a resumed epoch has the same order with any sampler.
    """

    def __init__(self, prepared: Any) -> None:
        """Create the order of batches.

        Args:
            prepared: Trainer's loader that has the batches.
        """
        self._prepared = prepared
        self._began: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None
        self._drawn: Iterator[Any] | None = None
        self.before_batch: Any = None  # called once, when the order is drawn and no data is read yet

    @property
    def batch_size(self) -> int:
        """Return the number of samples in a batch of all ranks, because Trainer's position counts batches."""
        return int(self._prepared.total_batch_size)

    @property
    def dataset(self) -> Any:
        """Return the data set of the batches."""
        return self._prepared.dataset

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch."""
        own = getattr(self._prepared, "synchronized_generator", None)
        if self._resumed is None:
            self._began = {"all": rng.capture(), "own": None if own is None else own.get_state()}
        else:
            self._began, self._resumed = self._resumed, None
            rng.restore(self._began["all"])
            if own is not None and self._began["own"] is not None:
                own.set_state(self._began["own"])
        if hasattr(self._prepared, "set_epoch"):
            self._prepared.set_epoch(epoch)
        within: Any = getattr(self._prepared.batch_sampler, "batch_sampler", None)
        if hasattr(within, "set_epoch"):  # accelerate's loader does not pass the epoch to the sampler that it shards
            within.set_epoch(epoch)
        if getattr(self._prepared, "rng_types", None):
            from accelerate.utils import synchronize_rng_states

            synchronize_rng_states(self._prepared.rng_types, self._prepared.synchronized_generator)
        batches = iter(self._prepared.batch_sampler)
        self._drawn = chain(list(islice(batches, 1)), batches)

    def __iter__(self) -> Iterator[Any]:
        drawn, self._drawn = self._drawn, None
        if self.before_batch is not None:
            call, self.before_batch = self.before_batch, None
            call()
        yield from iter(self._prepared.batch_sampler) if drawn is None else drawn

    def __len__(self) -> int:
        return len(self._prepared.batch_sampler)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state["began"]


class _Loader(DataLoader[Any]):
    """A loader of Trainer's batches in Trainer's order.

    Accelerate's loader reads one batch ahead. Random numbers for a data set or a collator are then drawn before the
    previous step is complete. This loader does not read ahead (without workers).
    """

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def _rebuild_loader(prepared: Any, order: _Order) -> Any:
    """Return the same batches in a loader that can be resumed at any batch.

    Without indices (an IterableDataset) the result is Trainer's own loader, which reads the batches that it skips.
    """
    if getattr(prepared, "batch_sampler", None) is None or isinstance(prepared.dataset, IterableDataset):
        return prepared
    given = {name: getattr(prepared, name) for name in _LOADING if hasattr(prepared, name)}
    return _Loader(prepared.dataset, batch_sampler=order, **given)


class _Progress:
    """Trainer's knowledge of its own progress, as plain values."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._log = bytearray()  # JSON lines: a step encodes only the new entries
        self._logged = 0
        self.sums: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        for line in state.log_history[self._logged :]:
            self._log += json.dumps(line, default=str).encode() + b"\n"
        self._logged = len(state.log_history)
        return {
            "state": {name: getattr(state, name) for name in _PROGRESS},
            "log": bytes(self._log),
            "sums": {name: getattr(trainer, name) for name in _SUMS if hasattr(trainer, name)},
            "flos": trainer.current_flos,
            "callbacks": [(name, _read_state(callback)) for name, callback in self._list_callbacks()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer, state = self._trainer, self._trainer.state
        for name, value in saved["state"].items():
            setattr(state, name, value)
        if state.best_model_checkpoint and not os.path.isdir(state.best_model_checkpoint):
            state.best_model_checkpoint = None  # the directory is on a lost node; Trainer would fail at its end
        state.log_history = [json.loads(line) for line in saved["log"].splitlines()]
        self._log, self._logged = bytearray(saved["log"]), len(state.log_history)
        trainer.current_flos = saved["flos"]
        self.sums = saved["sums"]
        callbacks = self._list_callbacks()
        for name, value in saved["callbacks"]:
            at = next((k for k, (other, _) in enumerate(callbacks) if other == name), None)
            if at is not None:
                _restore(callbacks.pop(at)[1], value)

    def _list_callbacks(self) -> list[tuple[str, Any]]:
        found = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [
            (type(item).__name__, item) for item in found if isinstance(item, ExportableState) or _is_stateful(item)
        ]


def _is_stateful(item: Any) -> bool:
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def _read_state(callback: Any) -> Any:
    return callback.state_dict() if _is_stateful(callback) else callback.state()


def _restore(callback: Any, saved: Any) -> None:
    if _is_stateful(callback):
        callback.load_state_dict(saved)
        return
    for name, value in {**saved.get("args", {}), **saved.get("attributes", {})}.items():
        setattr(callback, name, value)


class GeminiMixin:
    """A mixin to put before Trainer: `class MyTrainer(GeminiMixin, Trainer)`.

    `train()` resumes from the agents' memory if they have a version of this job. Otherwise it begins as Trainer
    does, also from a checkpoint on disk. A version is made when everything of an optimizer step is done (logs,
    evaluation and saving included), just before the next batch is read. Without an agent one line reports so.

    Attributes:
        gemini_options: Keyword arguments for `Checkpointer`, a class attribute of your trainer.
        checkpointer: The `Checkpointer` that `train()` has made. It is None before, and if a line reports that this
            training cannot be protected.
    """

    gemini_options: dict[str, Any] = {}  # noqa: RUF012 (subclasses set it)
    checkpointer: Checkpointer | None = None
    _order: _Order | None = None
    _progress: _Progress | None = None
    _given_loader: Any = None
    _prepared: Any = None
    _captured = 0  # optimizer steps that have a version
    _from_memory = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the order of base classes.

        Raises:
            TypeError: Trainer comes first, and its methods would hide these.
        """
        super().__init_subclass__(**kwargs)
        if Trainer in cls.__mro__ and cls.__mro__.index(Trainer) < cls.__mro__.index(GeminiMixin):
            raise TypeError(f"GeminiMixin has to come before Trainer: class {cls.__name__}(GeminiMixin, Trainer)")

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does, from the point that the job had reached."""
        self.checkpointer, self._from_memory = None, False
        try:
            output = super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            if self.checkpointer is not None:
                self.checkpointer.__exit__(type(error), error, error.__traceback__)
            raise
        if self.checkpointer is not None:
            self.checkpointer.close()
        return output

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any, **kwargs: Any) -> Any:
        """Record the loader before the state is made, then do as Trainer does."""
        self._given_loader = dataloader
        return super().set_initial_training_values(args, dataloader, *more, **kwargs)  # type: ignore[misc]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Make a version of the previous step, which is done, and return the batches of one optimizer step."""
        done = self.state.global_step  # type: ignore[attr-defined]
        if self.checkpointer is not None and done > self._captured:
            self._captured = done
            self.checkpointer.step()
        return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]

    # ---- overrides of private methods ---------------------------------------------------------------------

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume_from: Any, trial: Any
    ) -> tuple[int, int]:
        """Return the number of finished epochs, and of finished batches in the epoch after them.

        This is the last place where the numbers can be set. So the captured objects are made here and handed out
        when Trainer asks for them.
        """
        begun: tuple[int, int] = super()._init_training_state(  # type: ignore[misc]
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from, trial
        )
        if reason := self._explain_unsupported(trial):
            if self.is_world_process_zero():  # type: ignore[attr-defined]
                lines.write_line(f"this training is not protected: {reason}")
            return begun
        model, loader = super()._prepare_for_training(max_steps, self._given_loader, resume_from)  # type: ignore[misc]
        self._order, self._progress = _Order(loader), _Progress(self)
        loader = _rebuild_loader(loader, self._order)
        self.callback_handler.train_dataloader = loader  # type: ignore[attr-defined]
        self._prepared = model, loader
        self.checkpointer = self._build_checkpointer(model)
        version = self.checkpointer.resume()
        self._captured = self.state.global_step  # type: ignore[attr-defined]
        self._from_memory = version > 0 and bool(self._progress.sums)
        if not self._from_memory:
            return begun
        self._order.before_batch = self.checkpointer.restore_generators
        self.args.ignore_data_skip = False  # type: ignore[attr-defined]
        epochs, steps = divmod(self._captured, num_update_steps_per_epoch)
        return epochs, steps * self.args.gradient_accumulation_steps  # type: ignore[attr-defined]

    def _explain_unsupported(self, trial: Any) -> str:
        """Return why there is no checkpointer; "" if there is one."""
        if self.is_deepspeed_enabled:  # type: ignore[attr-defined]
            return "DeepSpeed keeps its state where gemini-hpc cannot find it"
        if self.args.accelerator_config.dispatch_batches:  # type: ignore[attr-defined]
            return "with dispatch_batches one rank reads for all, and its place in the data is unknown: turn it off"
        if self.args.auto_find_batch_size:  # type: ignore[attr-defined]
            return "with auto_find_batch_size optimizer steps cannot be repeated: set a batch size"
        return "a hyperparameter search runs many trainings" if trial is not None else ""

    def _build_checkpointer(self, model: Any) -> Checkpointer:
        options = dict(self.gemini_options)
        options["name"] = choose_next_name(options.get("name", "default"))
        options["extra"] = {**options.get("extra", {}), "trainer": self._progress}
        return Checkpointer(
            model,
            unwrap_prepared(self.optimizer),  # type: ignore[attr-defined]
            self.lr_scheduler,  # type: ignore[attr-defined]
            self.accelerator.scaler,  # type: ignore[attr-defined]
            self._order,
            **options,
        )

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared, self._prepared = self._prepared, None
        return prepared or super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        if self._from_memory:
            assert self._progress is not None
            for name, value in self._progress.sums.items():
                setattr(self, name, value)
            self._progress.sums = {}
            kwargs["resume_from_checkpoint"] = _MEMORY  # otherwise Trainer skips no batches
        return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        if not self._from_memory:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif self._order is not None and self._order.before_batch is not None:  # Trainer's own loader
            self._order.before_batch()
