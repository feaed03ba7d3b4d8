"""Your own model, checkpointed to a file and in the memory of its nodes: what each costs, and how soon it is back.

    sbatch -N4 --gemini-replicas=2 disk_or_memory.sh --model my_models:build   # see disk_or_memory.sh
    sbatch -N1 --gemini-replicas=1 disk_or_memory.sh                           # one rank, a model of this file's

`build()` returns the model and a function that gives its loss, such as `lambda model: model(batch).sum()`. The file
is what most trainings do: every 25th iteration rank 0 writes model and optimizer with torch.save, and all wait until
the data is on the disk (fsync). Memory: gemini-hpc, a version in each iteration. In each of the two the last rank is
ended by SIGKILL once, and `python -m gemini_hpc.launch` starts all ranks again. Rank 0 prints the table at the end.

The measures are those of a report on four A100 GPUs: Albahrani and Alkhalifah, KAUST, 2025, tables 1 and 2.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gemini_hpc as gemini

Loss = Callable[[nn.Module], Tensor]


def build() -> tuple[nn.Module, Loss]:
    """The default model: 25 million parameters, 300 MB with Adam's state, in float32."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(24)))
    batch = torch.randn(4, 1024)
    return model, lambda m: m(batch.to(next(m.parameters()).device)).square().mean()


class Way(Protocol):
    """A way to keep checkpoints. saves: seconds that the training has waited, each time."""

    saves: list[float]

    def load(self) -> int:
        """The last iteration that is kept is in model and optimizer; 0: there is none."""

    def after(self, iteration: int) -> None:
        """This iteration is complete."""

    def close(self) -> None:
        """The training has succeeded."""


class Disk:
    """A file that rank 0 writes and all read."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, every: int) -> None:
        self._model, self._optimizer, self._path, self._every = model, optimizer, path, every
        self.saves: list[float] = []

    def load(self) -> int:
        """See `Way`."""
        if not self._path.exists():
            return 0
        state = torch.load(self._path, map_location="cpu", weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["iteration"])

    def after(self, iteration: int) -> None:
        """See `Way`."""
        if iteration % self._every:
            return
        began = time.perf_counter()
        if rank() == 0:
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            part = self._path.with_suffix(".part")
            with part.open("wb") as file:
                torch.save({**state, "iteration": iteration}, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        meet()
        self.saves.append(time.perf_counter() - began)

    def close(self) -> None:
        """See `Way`."""


class Memory:
    """gemini-hpc: copies in the memory of the job's nodes."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._checkpointer = gemini.Checkpointer(model, optimizer)
        self._before_s = 0.0
        self.saves: list[float] = []

    def load(self) -> int:
        """See `Way`."""
        return self._checkpointer.resume()

    def after(self, iteration: int) -> None:
        """See `Way`. What the training has waited since the last call, in the hook before the optimizer as well."""
        self._checkpointer.step()
        times = self._checkpointer.report()["times"]
        spent = times["step_s"] + times["hook_s"]
        self.saves.append(spent - self._before_s)
        self._before_s = spent

    def close(self) -> None:
        """See `Way`."""
        self._checkpointer.close()


def rank() -> int:
    """Of this process."""
    return int(os.environ["RANK"])


def world() -> int:
    """Ranks in all."""
    return int(os.environ["WORLD_SIZE"])


def meet() -> None:
    """All ranks are here."""
    if world() > 1:
        dist.barrier()


class Notes:
    """What rank 0 has found, in a file that outlives the ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, way: str, name: str) -> list[dict[str, Any]]:
        """All notes of this name."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        notes: Iterable[dict[str, Any]] = map(json.loads, lines)
        return [note for note in notes if (note["way"], note["name"]) == (way, name)]

    def add(self, way: str, name: str, **found: Any) -> None:
        """One more; the other ranks write nothing."""
        if rank() == 0:
            with self.path.open("a") as file:
                file.write(json.dumps({"way": way, "name": name, **found}) + "\n")
                file.flush()
                os.fsync(file.fileno())


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="", metavar="MODULE:FUNCTION", help="gives (model, loss); default: this file's")
    p.add_argument("--iterations", type=int, default=100, help="of each way (default: %(default)s)")
    p.add_argument(
        "--every", type=int, default=25, help="iterations from one file to the next (default: %(default)s)"
    )
    p.add_argument("--kill-at", type=int, default=0, help="iteration with the SIGKILL (default: three quarters)")
    p.add_argument("--where", type=Path, default=Path(), help="directory of the files, on a shared file system")
    a = p.parse_args()
    a.kill_at = a.kill_at or 3 * a.iterations // 4
    if not 4 <= a.every <= a.kill_at < a.iterations:
        p.error("wanted 4 <= --every <= --kill-at < --iterations")
    return a


def built(name: str) -> tuple[nn.Module, Loss]:
    """The model, the same on all ranks, on the rank's device."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    torch.manual_seed(1)
    model, loss = getattr(importlib.import_module(module), function)() if name else build()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        model = model.to(device)
    return (DistributedDataParallel(model) if world() > 1 else model), loss


def train(a: argparse.Namespace, name: str, notes: Notes) -> None:
    """All iterations in one of the two ways, from where it had come."""
    if notes.of(name, "done"):
        return
    meet()  # nobody writes that before all have read
    again = bool(notes.of(name, "killed"))
    model, loss = built(a.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    file = notes.path.with_suffix(".pt")
    way: Way = Disk(model, optimizer, file, a.every) if name == "disk" else Memory(model, optimizer)
    began = time.perf_counter()
    start = way.load()
    if again:
        notes.add(name, "back", iteration=start, seconds=time.perf_counter() - began)
    began, measured = time.perf_counter(), start + 3  # the first ones prepare
    for iteration in range(start + 1, a.iterations + 1):
        optimizer.zero_grad()
        torch.autograd.backward(loss(model))
        optimizer.step()
        way.after(iteration)
        if iteration == measured:
            way.saves.clear()
            began = time.perf_counter()
        if iteration == a.kill_at and not again:
            notes.add(name, "killed", iteration=iteration, rate=rate(began, iteration - measured), saves=way.saves)
            meet()
            if rank() == world() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    notes.add(name, "done", bytes=held(model, optimizer))
    meet()
    way.close()


def rate(began: float, iterations: int) -> float:
    """Iterations a second since then."""
    return iterations / (time.perf_counter() - began)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of model and optimizer."""
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers(), *state])


def table(notes: Notes) -> str:
    """Both ways side by side, and how many times better memory is."""

    def one(way: str) -> tuple[float, float, float, int]:
        (killed,), (back,) = notes.of(way, "killed")[-1:], notes.of(way, "back")[-1:]
        return (
            1000 * statistics.median(killed["saves"]),
            1000 * back["seconds"],
            killed["rate"],
            killed["iteration"] - back["iteration"],
        )

    disk, memory = one("disk"), one("memory")
    size = notes.of("memory", "done")[-1]["bytes"]
    who = f"{world()} ranks" if world() > 1 else "one rank"
    lines = [f"{who}, {size / 1e6:.3g} MB of state", f"{'':34}{'disk':>10}{'memory':>10}"]
    for what, of_disk, of_memory, factor in (
        ("a checkpoint keeps training, ms", disk[0], memory[0], disk[0] / max(memory[0], 1e-3)),
        ("loading after a SIGKILL, ms", disk[1], memory[1], disk[1] / max(memory[1], 1e-3)),
        ("iterations a second", disk[2], memory[2], memory[2] / disk[2]),
    ):
        lines.append(f"{what:34}{of_disk:10.1f}{of_memory:10.1f}   {factor:.3g} x")
    lines.append(f"{'iterations repeated':34}{disk[3]:10d}{memory[3]:10d}")
    return "\n".join(lines)


def main() -> None:
    a = arguments()
    gemini.set_ranks()
    if world() > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    notes = Notes(a.where / f"disk_or_memory.{os.environ.get('SLURM_JOB_ID', 'local')}.jsonl")
    for way in ("disk", "memory"):
        train(a, way, notes)
        gc.collect()
    if rank() == 0:
        print(table(notes), flush=True)
    if world() > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
