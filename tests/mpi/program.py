"""One rank of an MPI program with arrays: `python -m tests.mpi.program OPTIONS`, started by mpiexec; `mpi` of the
options (JSON) says how MPI is entered. kwargs: of the `Checkpointer`, with every=1 unless they say else. kwargs_of:
by rank. work_s: what an iteration takes before `step()`. apart: the ranks do not talk to each other. skips: [rank,
step] of a `step()` that is left out. resumes_not: the rank that leaves out `resume()`. hashes_not: making a digest in
a rank fails."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def enter(how: dict[str, Any]) -> None:
    """level: of threads. directory: for what the ranks print, and their pids. sockets: of the agents, by rank."""
    import mpi4py

    mpi4py.rc.thread_level = how["level"]
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    os.environ["GEMINI_SOCKET"] = how["sockets"][rank]
    os.environ["GEMINI_STEP"] = how["step"]
    for name, number in (("out", 1), ("err", 2)):
        fd = os.open(Path(how["directory"]) / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, number)
        os.close(fd)
    (Path(how["directory"]) / f"pid.{rank}").write_text(str(os.getpid()))


def main(o: dict[str, Any]) -> None:
    enter(o["mpi"])
    import numpy as np
    from mpi4py import MPI

    from gemini_hpc.mpi import Checkpointer, Part, checkpointer

    if o.get("hashes_not"):
        checkpointer.digest_bytes = None  # type: ignore[assignment]
    comm = MPI.COMM_WORLD
    rank, size, n = comm.Get_rank(), comm.Get_size(), o.get("n", 60)
    first = rank * n // size
    rows = (rank + 1) * n // size - first
    dice = np.random.default_rng(o.get("seed", 0))
    field = dice.random((n, 7))[first : first + rows].copy()
    new = np.empty_like(field)
    flags = np.zeros(5, dtype=bool)
    wide = np.zeros(3, dtype=">f8")  # of the other byte order: kept as bytes
    own = np.zeros((2, 3), order="F")
    count = np.zeros((), dtype=np.int64)
    whole = o.get("whole", True)
    given = {"field": Part(field, (first, 0), (n, 7)) if whole else field, "count": Part(count, (), ())}
    if o.get("private", True):
        given |= {"flags": flags, "wide": wide, "own": own.T}
    kwargs = {"every": 1, **o.get("kwargs", {}), **o.get("kwargs_of", [{}] * size)[rank]}
    ckpt = Checkpointer(comm, given, **kwargs)
    start = ckpt.resume() if rank != o.get("resumes_not") else 0
    held = ckpt._arrays._held["field"].array
    assert held is field
    for step in range(start + 1, o["steps"] + 1):
        total = 0.0 if o.get("apart") else comm.allreduce(float(field.sum()))
        np.multiply(field, 1.0 + 1e-4 * (step % 7), out=new)
        new += 1e-9 * total
        field, new = new, field  # as stencils do
        flags[step % 5] ^= True
        wide[step % 3] += step * (rank + 1)
        own[step % 2, step % 3] += step
        count += 1
        time.sleep(o.get("work_s", 0.0))
        if step == o.get("die_at") and rank == 0:
            os.kill(os.getpid(), 9)
        if [rank, step] != o.get("skips"):
            ckpt.step(field=field)
        time.sleep(o.get("sleep_s", 0.0))
    whole_field = None if o.get("apart") else comm.gather(field)
    private = [flags.tolist(), wide.tolist(), own.tolist()]
    told = {"rank": rank, "start": start, "count": int(count), "private": private}
    if whole_field is not None:
        told["field"] = [float(x).hex() for x in np.concatenate(whole_field).ravel()]
    if o.get("close", True):
        ckpt.close()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
