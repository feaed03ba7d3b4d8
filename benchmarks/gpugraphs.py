"""A training whose whole step is one CUDA graph, killed and resumed: see `benchmarks.gpu`.

The agent is one of the tests', in this process; trainings are processes of their own, which run this module.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

import gemini_hpc as gemini

ROOT = Path(__file__).parents[1]
STEPS, KILLED_AT, WARM = 40, 25, 3
WAIT_S = 120.0


class NotResumed(Exception):
    """The training did not come back bit for bit."""


def measure(row: Callable[[str, str], None], *, fake: bool, width: int) -> None:
    """Train undisturbed; train, die and resume; compare losses, weights and optimizer state. Raises NotResumed."""
    with tempfile.TemporaryDirectory() as directory:
        job = _of_tests("fake_agent").FakeJob(Path(directory), 1, 1)
        try:
            options = {"fake": fake, "width": width}
            whole = _train("", options)
            saved = _train(job.nodes[0].path, {**options, "dies": True})
            chosen = job.requeue()
            if chosen is None or chosen.version != KILLED_AT:
                raise NotResumed(f"version {KILLED_AT} was to be resumed, not {chosen}")
            resumed = _train(job.nodes[0].path, options)
        finally:
            job.close()
    wrong = [step for step, loss in resumed["losses"].items() if whole["losses"][step] != loss]
    if resumed["start"] != KILLED_AT or wrong or resumed["digest"] != whole["digest"]:
        raise NotResumed(f"resumed at {resumed['start']}; other losses at steps {wrong}; digests {resumed['digest']}")
    row("graphs: a whole step, killed and resumed, all bits right", "yes")
    row("graphs: an iteration, nothing saved", f"{whole['iteration_s'] * 1e3:.2f} ms")
    row("graphs: the same, every version saved", f"{saved['iteration_s'] * 1e3:.2f} ms")


def _of_tests(module: str) -> Any:
    return importlib.import_module(f"tests.train.{module}")


def _train(socket: str, options: dict[str, Any]) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GEMINI_SOCKET": socket}
    argv = [sys.executable, "-m", "benchmarks.gpugraphs", json.dumps(options)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != (1 if options.get("dies") else 0) or not done.stdout.startswith("{"):
        raise NotResumed(f"a training ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _sealed(ckpt: gemini.Checkpointer, version: int) -> bool:
    sealed = ckpt.report()["sealed"]
    return bool(sealed and sealed[1] >= version)


def _until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not there():
        if time.monotonic() > deadline:
            raise SystemExit("a version that was waited for is not sealed")
        time.sleep(0.01)


def main(o: dict[str, Any]) -> None:
    """Be one of the trainings."""
    torch.manual_seed(5)
    torch.use_deterministic_algorithms(True, warn_only=True)
    place, width = ("cpu" if o["fake"] else "cuda"), o["width"]
    layers = [nn.Linear(width, width), nn.Dropout(0.2), nn.GELU(), nn.Linear(width, width)]
    model = nn.Sequential(*layers).to(place)
    batch = torch.zeros(16, width, device=place)
    on_cuda: dict[str, Any] = {"capturable": True, "fused": True}
    optimizer: torch.optim.Optimizer = (
        torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
        if o["fake"]
        else torch.optim.AdamW(model.parameters(), lr=1e-3, **on_cuda)
    )
    ckpt = gemini.Checkpointer(model, optimizer, traffic=gemini.Traffic(every=1, overhead=0.99))

    def whole() -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    replay, loss = _captured(whole, optimizer, fake=o["fake"])
    start, losses, times = ckpt.resume(), dict[int, str](), list[float]()
    for step in range(start + 1, STEPS + 1):
        began = time.perf_counter()
        batch.copy_(torch.randn(16, width, generator=torch.Generator().manual_seed(step)))
        replay()
        ckpt.step()
        losses[step] = float(loss).hex()
        times.append(time.perf_counter() - began)
        if step == start + 2 and ckpt._session.client is not None:
            _until(lambda: not ckpt._session.protected or ckpt._session.verdict.vote != 0)  # memory is there
        if step == KILLED_AT and o.get("dies"):
            _until(lambda: _sealed(ckpt, KILLED_AT))
            break
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    told = {"start": start, "losses": losses, "iteration_s": sorted(times)[len(times) // 2]}
    told["digest"] = [xxhash.xxh3_128_hexdigest(t.detach().cpu().numpy().tobytes()) for t in tensors]
    print(json.dumps(told), flush=True)
    if o.get("dies"):
        os._exit(1)
    ckpt.close()


def _captured(
    whole: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, *, fake: bool
) -> tuple[Callable[[], None], torch.Tensor]:
    """Return what replays a step, and where its loss will be."""
    if fake:
        for _ in range(WARM):
            optimizer.zero_grad()
            whole()
        optimizer.zero_grad()
        graph: Any = torch.cuda.CUDAGraph()
        with _of_tests("fake_graph").capture(graph):
            loss = whole()
        return graph.replay, loss
    cuda: Any = torch.cuda
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(WARM):
            optimizer.zero_grad()
            whole()
    cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        loss = whole()
    return graph.replay, loss


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given["fake"]:
        _of_tests("fake_graph").install(setattr)
    main(given)
