"""Messages through MPI, over a communicator of our own. For trainings that are MPI jobs anyway.

MPI is polled, by one thread for all links: its own waits spin, and cannot be interrupted. An MPI job ends as a whole
when one of its processes dies (`mpiexec` and `srun --mpi` see to that), so a dead peer is no `LinkBroken` here but
this process's end too, unless the MPI has fault tolerance and was told to use it.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from gemini_hpc import clock
from gemini_hpc.train.state import collectives
from gemini_hpc.train.transport.base import LinkBroken
from gemini_hpc.train.transport.landing import Landing
from gemini_hpc.train.transport.messages import MessageTransport

if TYPE_CHECKING:
    from mpi4py import MPI

# Between two looks at MPI: an eighth of the time since something moved, within these.
_SHORTEST_S, _LONGEST_S = 2e-5, 2e-3
_CANCEL_S = 1.0
_CONTROL_TIMEOUT = timedelta(days=1)  # of the group; those who use it have bounds of their own
_TOKEN_BYTES = 16


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others at construction. token: its own, to be known again by."""

    mpi_rank: int = -1
    mpi_size: int = 0
    token: bytes = b""
    problem: str = ""


class _Work:
    """One request; only the polling thread touches it after it was made."""

    def __init__(
        self, progress: _Progress, request: MPI.Request, tensor: torch.Tensor, sending: bool, rank: int
    ) -> None:
        self._progress, self.request, self.tensor = progress, request, tensor
        self.sending, self._rank = sending, rank
        self._over, self._problem = threading.Event(), ""

    def wait(self) -> None:
        self._over.wait()
        if self._problem:
            raise LinkBroken(self._problem)

    def abandon(self) -> None:
        """A receive is cancelled: on return nothing comes into its memory any more, if the other end had not begun to
        fill it. MPI cannot cancel a send; its memory stays until it has gone, or for ever."""
        if not self.sending and not self._over.is_set():
            self._progress.cancel(self)
            self._over.wait(_CANCEL_S)

    def end(self, problem: str = "") -> None:
        """Let `wait` return, or raise LinkBroken for a problem."""
        self._problem = problem
        self._over.set()

    def test(self) -> bool:
        """Whether it is over. From the polling thread."""
        from mpi4py import MPI

        status = MPI.Status()
        try:
            if not self.request.Test(status):
                return False
        except MPI.Exception as error:
            self.end(f"MPI, rank {self._rank}: {error}")
            return True
        if self.sending:
            self.end()
        elif status.Is_cancelled():
            self.end("interrupted")
        elif (got := status.Get_count(MPI.BYTE)) != self.tensor.numel():
            self.end(f"rank {self._rank} sent {got} bytes where {self.tensor.numel()} were expected")
        else:
            self.end()
        return True


class _Progress:
    """The thread that polls MPI while there are requests."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._live: list[_Work] = []
        self._unwanted: list[_Work] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="gemini-mpi", daemon=True)
        self._thread.start()

    def begin(
        self, comm: MPI.Intracomm, sending: bool, rank: int, mpi_rank: int, tensor: torch.Tensor, tag: int
    ) -> _Work:
        """Make a request. Raises LinkBroken."""
        from mpi4py import MPI

        buffer = (tensor.numpy(), MPI.BYTE)
        with self._changed:
            if self._stopped:
                raise LinkBroken("interrupted")
            try:
                request = (comm.Isend if sending else comm.Irecv)(buffer, mpi_rank, tag)
            except MPI.Exception as error:
                raise LinkBroken(f"MPI, rank {rank}: {error}") from None
            work = _Work(self, request, tensor, sending, rank)
            self._live.append(work)
            self._changed.notify()
        return work

    def cancel(self, work: _Work) -> None:
        """Cancel a receive, soon."""
        with self._changed:
            self._unwanted.append(work)
            self._changed.notify()

    def stop(self) -> None:
        """End every wait with LinkBroken, then the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _CANCEL_S)

    def _run(self) -> None:
        try:
            self._poll()
        finally:
            self._end()

    def _poll(self) -> None:
        moved_at = clock.monotonic()
        known = 0
        while True:
            with self._changed:
                if known == len(self._live):  # nothing new
                    nap_s = min(max(_SHORTEST_S, (clock.monotonic() - moved_at) / 8), _LONGEST_S)
                    if not self._stopped and not self._unwanted:
                        self._changed.wait(nap_s if self._live else None)
                if self._stopped:
                    return
                live, unwanted, self._unwanted = list(self._live), self._unwanted, []
            for work in unwanted:
                if work in live:
                    work.request.Cancel()
            over = {id(work) for work in live if work.test()}
            if over or len(live) != known:
                moved_at = clock.monotonic()
            with self._changed:
                self._live = [work for work in self._live if id(work) not in over]
                known = len(live) - len(over)

    def _end(self) -> None:
        """Nothing is begun any more. What MPI does not let go keeps its memory."""
        from mpi4py import MPI

        with self._changed:
            self._stopped = True
        for work in self._live:
            if work.sending:
                work.end("interrupted")
            else:
                with suppress(MPI.Exception):
                    work.request.Cancel()
        deadline = clock.monotonic() + _CANCEL_S
        while True:
            self._live = [work for work in self._live if not work.test()]
            if all(work.sending for work in self._live) or clock.monotonic() > deadline:
                break
            clock.sleep(_LONGEST_S)
        for work in self._live:
            work.end("interrupted")


class MpiTransport(MessageTransport):
    """Links over MPI (mpi4py 4), which the training has initialised with MPI_THREAD_MULTIPLE (mpi4py's default).
    Making one is collective over the training's ranks, those of `within`, and over `comm` (default: MPI.COMM_WORLD),
    which must hold the same processes, in whatever order. Raises ValueError, on all ranks alike, where that is not
    so."""

    name = "mpi"

    def __init__(
        self,
        landing: Landing | None = None,
        comm: MPI.Intracomm | None = None,
        within: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(landing)
        comm, place = _place(comm)
        places = [
            msgspec.msgpack.decode(part, type=_Place)
            for part in collectives.gather_bytes(msgspec.msgpack.encode(place), within)
        ]
        _refuse([p.problem for p in places])
        _refuse([_mismatch(places)])
        assert comm is not None
        self._mpi_ranks = [p.mpi_rank for p in places]
        own, problem = _duplicate(comm, places, place)
        _refuse([part.decode() for part in collectives.gather_bytes(problem.encode(), within)])
        assert own is not None
        self._comm = own
        self.group = collectives.own_group(within, _CONTROL_TIMEOUT)
        self._progress = _Progress()

    def begin(self, sending: bool, rank: int, tensor: torch.Tensor, tag: int) -> _Work:
        return self._progress.begin(self._comm, sending, rank, self._mpi_ranks[rank], tensor, tag)

    def interrupt(self) -> None:
        self.interrupted = True
        self._progress.stop()


def _refuse(problems: list[str]) -> None:
    """Raises ValueError with the first of the ranks' problems."""
    for rank, problem in enumerate(problems):
        if problem:
            raise ValueError(problem if len(problems) == 1 else f"rank {rank}: {problem}")


def _place(comm: MPI.Intracomm | None) -> tuple[MPI.Intracomm | None, _Place]:
    """This rank's communicator, and its place in it. MPI is not initialised here: in a process that no MPI launcher
    has started that can end the process, and it is the training's to say how."""
    try:
        import mpi4py
    except ImportError as error:
        return None, _Place(problem=f"no MPI for Python ({error}): pip install 'mpi4py>=4' where an MPI library is")
    if sys.modules.get(f"{mpi4py.__name__}.MPI") is None:
        return None, _Place(
            problem="MPI is not initialised: `from mpi4py import MPI` before the Checkpointer is made, in a training "
            "that mpiexec or srun --mpi has started"
        )
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return None, _Place(problem="MPI is not initialised (or finalised already)")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return None, _Place(
            problem="MPI was initialised without MPI_THREAD_MULTIPLE, and several threads send and receive: set "
            "mpi4py.rc.thread_level = 'multiple' before the first import of mpi4py.MPI, with an MPI that has it"
        )
    comm = MPI.COMM_WORLD if comm is None else comm
    return comm, _Place(comm.Get_rank(), comm.Get_size(), os.urandom(_TOKEN_BYTES))


def _mismatch(places: list[_Place]) -> str:
    """Why torch's ranks are not the communicator's, or nothing."""
    sizes = sorted({p.mpi_size for p in places})
    if sizes != [len(places)]:
        found = " or ".join(map(str, sizes))
        return (
            f"torch.distributed has {len(places)} ranks, MPI's communicator {found}: start the training with mpiexec "
            "or srun --mpi, so that every rank is an MPI rank of one job"
        )
    if sorted(p.mpi_rank for p in places) != list(range(len(places))):
        return "two ranks have the same MPI rank: they are not of one MPI job"
    return ""


def _duplicate(comm: MPI.Intracomm, places: list[_Place], mine: _Place) -> tuple[MPI.Intracomm | None, str]:
    """A communicator of our own, or why there is none: MPI's ranks must be the processes that torch's are."""
    from mpi4py import MPI

    tokens = bytearray(_TOKEN_BYTES * len(places))
    try:
        own = comm.Dup()
        own.Set_errhandler(MPI.ERRORS_RETURN)
        own.Allgather((bytearray(mine.token), MPI.BYTE), (tokens, MPI.BYTE))
    except MPI.Exception as error:
        return None, f"MPI: {error}"
    if bytes(tokens) != b"".join(p.token for p in sorted(places, key=lambda p: p.mpi_rank)):
        return None, "the ranks are of several MPI jobs of the same size"
    return own, ""
