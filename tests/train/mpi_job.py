"""One rank of a training that is an MPI job: `python -m tests.train.mpi_job OPTIONS`, started by mpiexec; OPTIONS are
those of worker.py as JSON, with `mpi`: how MPI is entered. Plain training processes of the tests can enter it too."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist


def enter(how: dict[str, Any]) -> None:
    """level: of threads; "": MPI is left alone. missing_on: rank that has no mpi4py. directory: for what the ranks
    print, and their pids. sockets: of the agents, by rank. alone: the training makes no process group.
    library, scratch: MPI's."""
    if "library" in how:
        segments = {"OMPI_MCA_btl_sm_backing_directory": how["scratch"]}
        os.environ.update(MPI4PY_LIBMPI=how["library"], TMPDIR=how["scratch"], **segments)
    if how.get("level"):
        import mpi4py

        mpi4py.rc.thread_level = how["level"]
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        if "directory" in how:  # torch's ranks are not MPI's: nothing may rely on that
            os.environ.update(RANK=str((world.rank + 1) % world.size), WORLD_SIZE=str(world.size))
    rank = int(os.environ["RANK"])
    if how.get("missing_on") == rank:
        sys.modules["mpi4py"] = None  # type: ignore[assignment]
    if "sockets" in how:
        os.environ["GEMINI_SOCKET"] = how["sockets"][rank]
        os.environ["GEMINI_STEP"] = how["step"]
    if "directory" in how:
        for name, number in (("out", 1), ("err", 2)):
            fd = os.open(Path(how["directory"]) / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, number)
            os.close(fd)
        (Path(how["directory"]) / f"pid.{rank}").write_text(str(os.getpid()))
    if how.get("alone"):
        dist.init_process_group("gloo")


if __name__ == "__main__":
    from tests.train import worker

    worker.main(json.loads(sys.argv[1]))
