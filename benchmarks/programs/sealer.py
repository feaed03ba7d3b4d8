"""One rank and its agent, m = 1: how long a version takes from step() to its seal, beside memcpy of the same bytes.

    python sealer.py DIRECTORY BYTES RUNS     prints a JSON line a version

The memcpy is one thread's, tensor by tensor, into memory that is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import gemini_hpc as gemini
from gemini_hpc.node import ask_agent

if TYPE_CHECKING:
    from benchmarks.programs import trainer
else:  # the programs lie beside each other
    import trainer

JOB, WARM = 900_001, 3
SEALED_S, UNSAVED_S = 60.0, 0.2


def attach(directory: str, job: int, node: str, nodes: Sequence[str]) -> None:
    """Have the agent in `directory` take its part of a job, one copy on each of `nodes`."""
    deadline = time.monotonic() + SEALED_S
    while True:
        try:
            sock = ask_agent.connect(directory, os.getuid(), deadline)
            break
        except ask_agent.NobodyAnswersError:
            time.sleep(0.01)
    question = {"op": "attach", "job": job, "restart": 0, "nodelist": ",".join(nodes), "node": node}
    more = {"replicas": len(nodes), "tier": "", "tier_interval": 0}
    answer = ask_agent.ask(sock, {**question, **more}, deadline)
    if answer.get("op") != "ready" or answer.get("state") != "mapped":
        raise SystemExit(f"the agent is not ready: {answer}")


def _is_sealed(ckpt: gemini.Checkpointer) -> bool:
    client = ckpt._session.client
    page = client.page if client is not None and ckpt._session.protected else None
    sealed = page.sealed if page is not None else (0, 0)
    return ckpt.version > 0 and sealed >= (ckpt._session.epoch, ckpt.version)


def _wait(ckpt: gemini.Checkpointer) -> bool:
    """Wait for the seal of the newest version; False: it was not saved."""
    deadline, idle_since = time.monotonic() + SEALED_S, 0.0
    while not _is_sealed(ckpt):
        now = time.monotonic()
        idle_since = 0.0 if ckpt._engine.under_way else idle_since or now
        if idle_since and now - idle_since > UNSAVED_S:
            return False
        if now > deadline:
            raise SystemExit(f"version {ckpt.version} is not sealed: {ckpt.report()}")
        time.sleep(0.0002)
    return True


def train(directory: str, state_bytes: int, runs: int) -> None:
    """Save so many versions, one after the other, nothing else going on."""
    os.environ["GEMINI_SOCKET"], os.environ["GEMINI_STEP"] = f"{directory}/agent.sock", f"{JOB}.0"
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = trainer.Model(state_bytes)
    optimizer = trainer.EmulatedAdam(model)
    tensors = [tensor.numpy() for tensor in optimizer.tensors().values()]
    there = [tensor.copy() for tensor in tensors]
    ckpt = gemini.Checkpointer(model, optimizer)
    ckpt.resume()
    counted = -WARM
    for _ in range(20 * (runs + WARM)):
        optimizer.step()
        began = time.perf_counter()
        for tensor, to in zip(tensors, there, strict=True):
            np.copyto(to, tensor)
        memcpy_s = time.perf_counter() - began
        began = time.perf_counter()
        ckpt.step()
        is_sealed = _wait(ckpt)  # not while memory is reserved, nor each version of so short iterations
        if is_sealed and counted >= 0:
            print(json.dumps({"sealed_s": time.perf_counter() - began, "memcpy_s": memcpy_s}), flush=True)
        counted += is_sealed
        if counted == runs:
            break
    ckpt.close()


def main() -> None:
    """Start the agent, train, and kill it."""
    directory = f"{sys.argv[1]}/{JOB}"
    os.mkdir(directory, 0o700)
    with subprocess.Popen([sys.executable, f"{sys.path[0]}/lone_agent.py", directory, str(JOB)]) as agent:
        try:
            attach(directory, JOB, "n1", ("n1",))
            train(directory, int(sys.argv[2]), int(sys.argv[3]))
        finally:
            agent.kill()


if __name__ == "__main__":
    main()
