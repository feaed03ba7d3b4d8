"""The agent of a job of one node, without its supervisor: python lone_agent.py DIRECTORY JOB"""

from __future__ import annotations

import asyncio
import os
import sys

from gemini_hpc.agent.daemon import Agent
from gemini_hpc.config import Settings


async def serve(directory: str, job: int) -> None:
    """Serve until killed."""
    settings = Settings(cluster_name="bench", memory_floor_bytes=0)
    await Agent(settings, job=job, uid=os.getuid(), node="n1", directory=directory, again=False).run()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
