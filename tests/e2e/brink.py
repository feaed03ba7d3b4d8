"""train_gpt.py (here: usual.py), with a stop on the brink: in iteration 8, after its last collective and before the
optimizer's step, the second node's rank stops for ever, its copies still to be sent; the others wait for a file."""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

AT, HERE = 8, Path(__file__).parent
_steps = itertools.count(1)


def _brink(*_: Any) -> None:
    if next(_steps) != AT or os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        return
    if os.environ["SLURM_NODEID"] == "1":
        (HERE / "brink").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    until = time.monotonic() + 60
    while not (HERE / "go").exists() and time.monotonic() < until:
        time.sleep(0.02)


if __name__ == "__main__":
    register_optimizer_step_pre_hook(_brink)  # before the checkpointer's own, which comes after it
    runpy.run_path(str(HERE / "usual.py"), run_name="__main__")
