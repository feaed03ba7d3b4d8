"""Parts of the integrations by themselves."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

pytestmark = pytest.mark.slow

NAMES = """
from gemini_hpc.integrations.naming import choose_next_name
assert [choose_next_name() for _ in range(3)] == ["default", "default-2", "default-3"]
found = [choose_next_name("tuning"), choose_next_name(), choose_next_name("tuning")]
assert found == ["tuning", "default-4", "tuning-2"], found
"""


def test_each_training_of_a_process_has_a_name_of_its_own() -> None:
    """Also where each has an object of its own: two trainers in one script."""
    subprocess.run([sys.executable, "-c", NAMES], check=True, timeout=60)


class Epochs(BatchSampler):
    """Another order in each epoch, of which only it is told."""

    epoch = 0

    def __init__(self) -> None:
        super().__init__(SequentialSampler(range(8)), 2, False)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([[n + 8 * self.epoch] for n in range(4)])


def test_a_batch_sampler_that_is_dealt_out_hears_of_the_epoch() -> None:
    from accelerate.data_loader import prepare_data_loader

    from gemini_hpc.integrations.huggingface import _Order  # the quick check has no accelerate

    loader = torch.utils.data.DataLoader(list(range(64)), batch_sampler=Epochs())
    order = _Order(prepare_data_loader(loader, num_processes=2, process_index=1, put_on_device=False))
    first = [batch for _ in [order.set_epoch(0)] for batch in order]
    second = [batch for _ in [order.set_epoch(1)] for batch in order]
    assert [n + 8 for batch in first for n in batch] == [n for batch in second for n in batch]


class Trainer:
    def __init__(self, best: str) -> None:
        self.state = type("State", (), {"best_model_checkpoint": best, "log_history": []})()
        self.control, self.current_flos = None, 0.0
        self.callback_handler = type("Handler", (), {"callbacks": []})()


def test_a_best_checkpoint_that_is_gone_is_forgotten(tmp_path: Any) -> None:
    """It was on a node that was lost; Trainer would look for it at its end, and fail."""
    from gemini_hpc.integrations.huggingface import _Progress  # the quick check has no accelerate

    for path, wanted in ((tmp_path, str(tmp_path)), (tmp_path / "gone", None)):
        trainer = Trainer("")
        saved = {"state": {"best_model_checkpoint": str(path)}, "log": b"", "flos": 0.0, "sums": {}, "callbacks": []}
        _Progress(trainer).load_state_dict(saved)
        assert trainer.state.best_model_checkpoint == wanted
