"""One rank of an MPI program that archives its arrays: `python -m tests.mpi.archiver OPTIONS`, started by mpiexec. It
needs neither torch nor pytest. OPTIONS (JSON) by their use in `main`; on stdout a line of JSON for each rank."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any


def plate(n: int) -> Any:
    """The global array."""
    import numpy as np

    return np.arange(n * n, dtype=np.float64).reshape(n, n) ** 0.5


def main(o: dict[str, Any]) -> None:
    import numpy as np
    from mpi4py import MPI

    from gemini_hpc.mpi import Checkpointer, Part

    comm = MPI.COMM_WORLD
    rank, size, n = comm.Get_rank(), comm.Get_size(), o.get("n", 12)
    down, across = (2, size // 2) if o.get("boxes") else (size, 1)
    i, j = divmod(rank, across)
    first, last = (i * n // down, j * n // across), ((i + 1) * n // down, (j + 1) * n // across)
    field = plate(n)[first[0] : last[0], first[1] : last[1]].copy()
    shape = (n + 1, n) if rank == o.get("differs_on") else (n, n)
    given = {
        "field": Part(field, first, shape),
        "halo": Part(plate(n)[: n // 2].copy(), (0, 0), (n, n)),  # the same on all ranks; below it nobody writes
        "time/s": Part(np.array(0.25), (), ()),
        "flags": np.array([rank == 0, rank == 1]),
        "other": np.arange(3, dtype=">i4") + rank,
        "columns": np.asfortranarray(np.full((2, 3), rank, dtype=np.complex64)),
        "nothing": np.empty((0, 2), dtype=np.float32),
    }
    if rank == 1:
        given["alone"] = np.array([7], dtype=np.uint16)
    ckpt = Checkpointer(comm, given, name="plate")
    told: list[str] = []
    if rank == o.get("limited"):  # what is further behind in a file cannot be written
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    for path in o["paths"]:
        ckpt.step()
        field += 1
        try:
            ckpt.archive(path if isinstance(path, str) else path[rank])
            told.append("")
        except (OSError, RuntimeError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")
    ckpt.close()
    for line in comm.gather({"rank": rank, "told": told}) or ():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
