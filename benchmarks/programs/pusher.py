"""Two agents and their ranks, m = 2: how long the bytes of a version take to the other node, beside plain sockets.

    python pusher.py DIRECTORY BYTES RUNS RANKS     BYTES of state a node, on so many ranks

Prints a JSON line a version. Both nodes are this one; credentials are open, and nothing else goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
import torch.distributed as dist

import gemini_hpc as gemini
from gemini_hpc.agent.transfer import stripes

if TYPE_CHECKING:
    from benchmarks.programs import sealer, trainer
else:  # the programs lie beside each other
    import sealer
    import trainer

JOB, WARM, NODES = 900_002, 3, ("n1", "n2")
_PORTS = 23000


def train(state_bytes: int) -> None:
    """One rank: save a version for each line that rank 0 reads, until there are no more."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = trainer.Model(state_bytes)
    optimizer = trainer.EmulatedAdam(model)
    ckpt = gemini.Checkpointer(model, optimizer, traffic=gemini.Traffic(scheme="background"))
    ckpt.resume()
    go_on = torch.ones(1)
    while True:
        if rank == 0:
            go_on[0] = bool(sys.stdin.readline())
        dist.broadcast(go_on, 0)
        if not go_on[0]:
            break
        optimizer.step()
        switches = _switches()
        ckpt.step()
        is_sealed, running = sealer._wait(ckpt), ckpt._engine.running
        ended = time.monotonic()
        job = running.replicator._current if running is not None else None
        copied = job.copied_at if job is not None else 0.0
        mine = torch.tensor([is_sealed and copied > 0, copied, ended, _switches() - switches], dtype=torch.float64)
        every = [torch.zeros(4, dtype=torch.float64) for _ in range(world)]
        dist.all_gather(every, mine)
        if rank == 0:
            line = {
                "sealed": all(bool(one[0]) for one in every),
                "push_s": max(float(one[2] - one[1]) for one in every),
                "wakes": max(float(one[3]) for one in every),
                "state": ckpt.report()["state"],
            }
            print(json.dumps(line), flush=True)
    ckpt.close()


def _switches() -> int:
    """Voluntary switches of this process's threads.

    Not those of the thread that asks, which waits for the seal, nor of gloo's loops, which wake up a hundred times a
    second whether or not anything goes on.
    """
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
            if task.name != str(threading.get_native_id()) and not lines["Name"].startswith("gloo_"):
                count += int(lines["voluntary_ctxt_switches"])
    return count


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of it, as clock_getcpuclockid has it


def _told(out: IO[str]) -> dict[str, float]:
    line = out.readline()
    if not line.startswith("{"):
        raise SystemExit(f"a process has ended: {line}")
    told: dict[str, float] = json.loads(line)
    return told


def _start(argv: list[str], **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **more}
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _ask(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def measure(directory: str, node_bytes: int, runs: int, ranks: int, started: list[subprocess.Popen[str]]) -> None:
    """Start everything, and print what each version took."""
    me, world = os.path.abspath(__file__), len(NODES) * ranks
    here = os.path.dirname(me)
    agents = []
    for node in NODES:
        os.mkdir(f"{directory}/{node}", 0o700)
        agent = [sys.executable, f"{here}/lone_agent.py", f"{directory}/{node}", str(JOB), node, str(_PORTS)]
        agents.append(_start(agent))
        started.append(agents[-1])
    attaching = [
        threading.Thread(target=sealer.attach, args=(f"{directory}/{node}", JOB, node, NODES)) for node in NODES
    ]
    for thread in attaching:
        thread.start()
    for thread in attaching:
        thread.join()
    plain: list[subprocess.Popen[str]] = []
    if ranks == 1:
        words = [sys.executable, f"{here}/plainpush.py", str(node_bytes), str(stripes.count_connections())]
        plain.append(_start(words))
        started.append(plain[0])
        assert plain[0].stdout is not None
        plain.append(_start([*words, plain[0].stdout.readline().strip()]))
        started.append(plain[1])
    team = []
    for rank in range(world):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank % ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_PORTS + 99),
            "GEMINI_SOCKET": f"{directory}/{NODES[rank // ranks]}/agent.sock",
            "GEMINI_STEP": f"{JOB}.0",
            "OMP_NUM_THREADS": "1",
        }
        team.append(_start([sys.executable, me, "--rank", str(node_bytes // ranks)], **place))
        started.append(team[-1])
    lead = team[0]
    outs = [one.stdout for one in plain if one.stdout is not None]
    assert lead.stdout is not None
    for out in outs:
        if out.readline() != "ready\n":
            raise SystemExit("the plain program has not started")
    counted = -WARM
    for _ in range(4 * (runs + WARM)):
        before = [_cpu_s(agent.pid) for agent in agents]
        _ask(lead)
        line: dict[str, float] = _told(lead.stdout)
        line["cpu_s"] = sum(_cpu_s(agent.pid) - was for agent, was in zip(agents, before, strict=True))
        for one in plain:
            _ask(one)
        told = [_told(out) for out in outs]
        if told:
            line["plain_s"] = max(t["ended"] for t in told) - min(t["began"] for t in told)
            line["plain_cpu_s"] = sum(t["cpu_s"] for t in told)
        if line["sealed"] and counted >= 0:
            print(json.dumps(line), flush=True)
        counted += bool(line["sealed"])
        if counted == runs:
            break


def main() -> None:
    """Measure, and end what was started."""
    started: list[subprocess.Popen[str]] = []
    directory = f"{sys.argv[1]}/{JOB}"
    os.mkdir(directory, 0o700)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        size, runs, ranks = (int(word) for word in sys.argv[2:5])
        measure(directory, size, runs, ranks, started)
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        train(int(sys.argv[2]))
    else:
        main()
