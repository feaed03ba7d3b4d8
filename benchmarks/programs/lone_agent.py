"""An agent without its supervisor.

python lone_agent.py DIRECTORY JOB               the agent of a job of one node
python lone_agent.py DIRECTORY JOB NODE PORT     one of several on this host: ports from PORT on, open credentials
"""

from __future__ import annotations

import asyncio
import os
import sys

from gemini_hpc.agent.daemon import Agent
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.config import Settings
from gemini_hpc.wire import munge


async def serve(directory: str, job: int, node: str, port: int) -> None:
    """Serve until killed."""
    settings = Settings(cluster_name="bench", memory_floor_bytes=0)
    if port:
        places = {"interface": "lo", "peer_address": "127.0.0.1", "agent_port_base": port, "agent_port_count": 16}
        settings = Settings(cluster_name="bench", memory_floor_bytes=0, **places)  # type: ignore[arg-type]
        munge.encode = lambda payload, *, for_uid: payload
        munge.decode = lambda credential: (credential, os.geteuid(), 0)
    await Agent(AgentIdentity(settings, job, os.getuid(), node, directory)).run()


if __name__ == "__main__":
    one = sys.argv[3:5] or ("n1", "0")
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), one[0], int(one[1])))
