"""Two agents and a rank of each, m = 2: how late the agents' event loops are while versions are pushed.

    python late_loop.py DIRECTORY BYTES RUNS     prints a JSON line an agent: {"late_ms": [99 % of each version]}

Both nodes are this one; credentials are open. A timer of 1 ms on each agent's loop is late by what it waits longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

import torch
import torch.distributed as dist

import gemini_hpc as gemini
from gemini_hpc.agent.daemon import Agent
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.config import Settings
from gemini_hpc.wire import munge

if TYPE_CHECKING:
    from benchmarks.programs import sealer, trainer
else:  # the programs lie beside each other
    import sealer
    import trainer

JOB, NODES, WARM = 900_003, ("n1", "n2"), 2
_PORTS, _TIMER_S, _SHARE = 23_200, 0.001, 0.99


async def _timed(windows: list[list[float]]) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(_TIMER_S)
        if windows:
            windows[-1].append(time.monotonic() - began - _TIMER_S)


def serve(directory: str, node: str) -> None:
    """Be an agent. Each line that it reads begins a version; the empty line ends the last one."""
    munge.encode = lambda payload, *, for_uid: payload
    munge.decode = lambda credential: (credential, os.getuid(), 0)
    settings = Settings(
        cluster_name="bench",
        memory_floor_bytes=0,
        interface="lo",
        peer_address="127.0.0.1",
        agent_port_base=_PORTS,
        agent_port_count=16,
    )
    windows: list[list[float]] = []

    def hear() -> None:
        if sys.stdin.readline().strip():
            windows.append([])
            return
        late_ms = [1000 * sorted(window)[int(_SHARE * len(window))] for window in windows if window]
        print(json.dumps({"late_ms": late_ms}), flush=True)
        windows.clear()

    async def run() -> None:
        asyncio.get_running_loop().add_reader(sys.stdin, hear)
        timer = asyncio.ensure_future(_timed(windows))
        await Agent(AgentIdentity(settings, JOB, os.getuid(), node, directory)).run()
        timer.cancel()

    asyncio.run(run())


def train(state_bytes: int, runs: int) -> None:
    """Be a rank, and say before each version that counts that it comes."""
    dist.init_process_group("gloo")
    model = trainer.Model(state_bytes)
    optimizer = trainer.EmulatedAdam(model)
    ckpt = gemini.Checkpointer(model, optimizer, traffic=gemini.Traffic(scheme="background"))
    ckpt.resume()
    counted = -WARM
    while counted < runs:
        optimizer.step()
        if counted >= 0:
            print("version", flush=True)
        ckpt.step()
        sealed = torch.tensor(int(sealer._wait(ckpt)))
        dist.all_reduce(sealed, dist.ReduceOp.MIN)  # ranks that count differently would leave each other waiting
        counted += int(sealed)
    print("", flush=True)
    ckpt.close()


def _start(started: list[subprocess.Popen[str]], *words: str, **more: str) -> tuple[IO[str], IO[str]]:
    argv = [sys.executable, os.path.abspath(__file__), *words]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **more}
    )
    started.append(process)
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def measure(directory: str, state_bytes: str, runs: str, started: list[subprocess.Popen[str]]) -> None:
    """Start everything, and print how late each agent's loop was."""
    agents = []
    for node in NODES:
        os.mkdir(f"{directory}/{node}", 0o700)
        agents.append(_start(started, "--agent", f"{directory}/{node}", node))
    attaching = [
        threading.Thread(target=sealer.attach, args=(f"{directory}/{node}", JOB, node, NODES)) for node in NODES
    ]
    for thread in attaching:
        thread.start()
    for thread in attaching:
        thread.join()
    ranks = [
        _start(
            started,
            "--rank",
            state_bytes,
            runs,
            RANK=str(rank),
            WORLD_SIZE=str(len(NODES)),
            LOCAL_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(_PORTS + 99),
            GEMINI_SOCKET=f"{directory}/{node}/agent.sock",
            GEMINI_STEP=f"{JOB}.0",
            OMP_NUM_THREADS="1",
        )
        for rank, node in enumerate(NODES)
    ]
    while line := ranks[0][1].readline():
        for hears, _ in agents:
            hears.write(line)
            hears.flush()
        if not line.strip():
            break
    else:
        raise SystemExit("a rank has ended")
    for _, says in agents:
        print(says.readline(), end="", flush=True)


def main() -> None:
    """Measure, and end what was started."""
    started: list[subprocess.Popen[str]] = []
    directory = f"{sys.argv[1]}/{JOB}"
    os.mkdir(directory, 0o700)
    try:
        measure(directory, sys.argv[2], sys.argv[3], started)
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--agent":
        serve(*sys.argv[2:])
    elif sys.argv[1] == "--rank":
        train(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
