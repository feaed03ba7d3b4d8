"""Starts agents, one after the other, the way the prolog does, and says how long each took to be ready.

    python starter.py NODE DIRECTORY...     each an empty directory of this user's, named after a job id

Prints one JSON line an agent. Ready means what it means to the prolog: it has answered that its one-node job is
mapped. Each agent is killed afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

from gemini_hpc.node import ask_agent, spawn

POLL_S = 0.002
DEADLINE_S = 20.0


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii") as f:
        return int(f.read().rpartition(")")[2].split()[1])


def start(directory: str, node: str) -> dict[str, float]:
    """One agent's start and end."""
    job, uid = int(os.path.basename(directory)), os.getuid()
    began = time.monotonic()
    deadline = began + DEADLINE_S
    supervisor = spawn.start_agent(directory, job, uid, node, (0, ""), lambda pid: None)
    while True:
        try:
            sock = ask_agent.connect(directory, uid, deadline)
            break
        except ask_agent.NobodyAnswersError:
            time.sleep(POLL_S)
    connected = time.monotonic()
    question = {"op": "attach", "job": job, "restart": 0, "nodelist": node, "node": node, "replicas": 1}
    answer = ask_agent.ask(sock, {**question, "tier": "", "tier_interval": 0}, deadline)
    ready = time.monotonic()
    if answer.get("op") != "ready" or answer.get("state") != "mapped":
        raise SystemExit(f"the agent is not ready: {answer}")
    agent = ask_agent.read_peer_pid(sock)
    cpu = _cpu_s(agent) + _cpu_s(_parent(agent))
    signal.pidfd_send_signal(supervisor, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(agent, signal.SIGKILL)
    return {"ready_s": ready - began, "connected_s": connected - began, "cpu_s": cpu}


def bare() -> float:
    """How long the interpreter alone takes to start and end."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
    return time.monotonic() - began


if __name__ == "__main__":
    for path in sys.argv[2:]:
        print(json.dumps({**start(path, sys.argv[1]), "python_s": bare()}), flush=True)
