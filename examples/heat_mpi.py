"""Heat equation on a square plate, in rows over the ranks of an MPI job, protected by gemini-hpc.

    sbatch --gemini-replicas=2 -N 3 heat_mpi.sh --steps 2000

When a node dies, Slurm requeues the job, and it goes on at the step that was sealed last: the final field is the
same, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time

import numpy as np
from mpi4py import MPI

from gemini_hpc import Tier
from gemini_hpc.mpi import Checkpointer, Part


def rows_of(rank: int, size: int, n: int) -> tuple[int, int]:
    """First row and number of rows of a rank."""
    first = rank * n // size
    return first, (rank + 1) * n // size - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=512, help="the plate has n x n points")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-s", type=float, default=0.0, help="a step takes so long at least")
    parser.add_argument(
        "--every", type=int, default=0, help="save one step in so many (0: as 1 % of the time allows)"
    )
    parser.add_argument("--tier", default="", help="save to this directory, where the submission names none")
    parser.add_argument("--tier-interval-s", type=int, default=0, help="every so many seconds")
    parser.add_argument("--log", default="", help="JSON lines of rank 0")
    parser.add_argument("--archive", default="", help="at the end, all ranks write this HDF5 file (h5py with MPI)")
    args = parser.parse_args()

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    first, rows = rows_of(rank, size, args.n)
    # a row of the neighbours at either end
    field = np.zeros((rows + 2, args.n))
    if rank == 0:
        field[0] = 100.0  # the upper edge is hot
    heat = np.zeros(1)  # that has come in through the upper edge

    # Each rank tells where its rows lie in the whole plate, and that all have the same heat: so another number of
    # ranks can go on with what is saved.
    arrays = {"field": Part(field[1:-1], (first, 0), (args.n, args.n)), "heat": Part(heat, (0,), (1,))}
    tier = Tier(args.tier, args.tier_interval_s)
    checkpointer = Checkpointer(comm, arrays, every=args.every, tier=tier)
    step = checkpointer.resume()
    up, down = (rank - 1 if rank else MPI.PROC_NULL), (rank + 1 if rank + 1 < size else MPI.PROC_NULL)
    log = open(args.log, "a", buffering=1) if args.log and rank == 0 else None  # noqa: SIM115
    if log:
        log.write(json.dumps({"start": step, "ranks": size, "t": time.time()}) + "\n")
    while step < args.steps:
        began = time.monotonic()
        comm.Sendrecv(field[1], up, recvbuf=field[-1], source=down)
        comm.Sendrecv(field[-2], down, recvbuf=field[0], source=up)
        change = field[:-2, 1:-1] + field[2:, 1:-1] + field[1:-1, :-2] + field[1:-1, 2:] - 4 * field[1:-1, 1:-1]
        field[1:-1, 1:-1] += 0.2 * change
        if rank == 0:
            heat[0] += 0.2 * float((field[0] - field[1]).sum())
        comm.Bcast(heat)
        step += 1
        checkpointer.step()
        time.sleep(max(0.0, began + args.step_s - time.monotonic()))
        if log:
            log.write(json.dumps({"step": step, "heat": heat[0].hex(), "t": time.time()}) + "\n")

    counts = [rows_of(r, size, args.n)[1] * args.n for r in range(size)]
    whole = np.empty((args.n, args.n)) if rank == 0 else None
    comm.Gatherv(np.ascontiguousarray(field[1:-1]), (whole, counts) if rank == 0 else None)
    if rank == 0 and whole is not None:
        digest = hashlib.sha256(whole.tobytes()).hexdigest()
        print(f"step {step}: mean temperature {whole.mean():.6f}, field {digest}", flush=True)
        if log:
            log.write(json.dumps({"final": digest}) + "\n")
    if args.archive:
        checkpointer.archive(args.archive)
    checkpointer.close()


if __name__ == "__main__":
    main()
