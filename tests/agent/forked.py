"""The zygote of agents, which has their modules imported: 0.4 CPU seconds each time."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from gemini_hpc.agent import __main__ as supervisor
from gemini_hpc.agent.daemon import serve as run_agent
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.agent.replicas import replica_fills
from gemini_hpc.agent.tier import worker_process, workers
from gemini_hpc.agent.transfer import arrival, stripes
from gemini_hpc.config import Settings
from gemini_hpc.wire import munge, version
from tests.forking import Request, serve


def flip(at: int) -> None:
    """Change a bit of the byte at this place of a slot when it first arrives, as bad memory of a switch would."""
    take, done = arrival.Connection._hash_next, [False]

    def flipped(me: arrival.Connection, data: memoryview) -> None:
        if not done[0] and me._offset <= at < me._offset + len(data):
            data[at - me._offset] ^= 1
            done[0] = True
        take(me, data)

    arrival.Connection._hash_next = flipped  # type: ignore[method-assign]


def start(request: Request) -> None:
    """Run an agent of this user, without MUNGE where "open"; where "tiered" with what works on the tier.

    speaks: the oldest and the newest version of the protocol; else this release's.
    stripes: connections of a pair of agents; else as this machine's cores make it.
    flips: see `flip`. fill_wait_s: `replica_fills.WAIT_S`.
    """
    if request["open"]:  # credentials that anybody can open
        munge.encode = lambda payload, *, for_uid: payload
        munge.decode = lambda credential: (credential, os.geteuid(), 0)
    if request.get("speaks"):  # of another release
        version.OLDEST, version.CURRENT = request["speaks"]
    if at := request.get("flips"):
        flip(at)
    if request.get("stripes"):
        stripes.count_connections = lambda: request["stripes"]
    if request.get("fill_wait_s"):
        replica_fills.WAIT_S = request["fill_wait_s"]
    if request["tiered"]:  # workers are forked by a supervisor, with which the agent dies
        mine = workers.Workers(workers.run_tier_worker)
        if agent := os.fork():
            mine.theirs.close()
            sys.exit(supervisor._attend(agent, mine, supervisor._watch_for_sigterm()))
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        mine.sock.close()
        worker_process.use(workers.SupervisorChannel(mine.theirs))
    settings = Settings(interface="lo", memory_floor_bytes=0, **request["settings"])
    sys.exit(run_agent(AgentIdentity(settings, uid=os.geteuid(), **request["agent"])))


if __name__ == "__main__":
    serve(start)
