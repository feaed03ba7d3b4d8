"""In a process namespace of its own: a caller hands its connection to a child and ends, its number is given to
another process, and the agent's server is asked to end the caller. Then one that is still there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from gemini_hpc.wire import local
from gemini_hpc.wire.local_server import LocalClient, LocalServer, Reply

_CALL = (
    "import os, socket, sys, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
    's.connect(sys.argv[1]); s.send(b\'{"op":"verdict?"}\'); s.recv(100); '
)
_LEAVE = _CALL + "os.fork() and os._exit(0); time.sleep(60)"
_STAY = _CALL + "time.sleep(60)"


async def main(path: str) -> None:
    clients: list[LocalClient] = []

    async def handle(client: LocalClient, request: local.Request, fds: list[int]) -> Reply:
        clients.append(client)
        return local.Verdict(), []

    server = LocalServer(path, os.getuid(), handle, lambda client: None, lambda text: None)
    caller = subprocess.Popen([sys.executable, "-c", _LEAVE, path])
    while caller.poll() is None:
        await asyncio.sleep(0.01)
    assert len(clients) == 1 and clients[0].pid == caller.pid and not clients[0].closed.is_set()
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(caller.pid - 1))
    other = subprocess.Popen(["sleep", "60"])
    print("same number" if other.pid == caller.pid else f"{other.pid} {caller.pid}")
    clients[0].signal(signal.SIGKILL)
    await asyncio.sleep(0.2)
    print("lives" if other.poll() is None else "killed")

    staying = subprocess.Popen([sys.executable, "-c", _STAY, path])
    while len(clients) < 2:
        await asyncio.sleep(0.01)
    clients[1].signal(signal.SIGTERM)
    print("caller ended" if await asyncio.to_thread(staying.wait, 5) == -signal.SIGTERM else "lives on")
    server.close()


with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main(f"{directory}/agent.sock"))
