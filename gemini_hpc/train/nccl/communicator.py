"""Our own NCCL communicator over all ranks of the training, outside torch's process groups and their watchdog.

Not run between two GPUs so far. Every call is a non-blocking NCCL call. An operation that has not been launched when
a call returns is polled, with a time limit. A launching thread of the training is therefore never held up for longer.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from gemini_hpc import clock
from gemini_hpc.train.device.interface import Broken, Message, Stream
from gemini_hpc.train.nccl.library import IN_PROGRESS, SUCCESS, UINT8, Library, UniqueId, build_config

MOST_CTAS = 4  # blocks on SMs that the training then lacks; a guess at enough for a network of 400 Gbit/s
LAUNCH_S = 0.25  # longest time that a launch may hold up the training's thread; normally far below a millisecond
_POLL_S = 20e-6  # short beside a launch, which takes some 0.1 ms


class NcclCommunicator:
    """A rank's end of the communicator; call `connect` before anything else."""

    def __init__(
        self, library: Library, rank: int, world: int, handle: Callable[[Stream], int], *, launch_s: float = LAUNCH_S
    ) -> None:
        """Create an unconnected communicator.

        Args:
            library: NCCL.
            rank: This rank.
            world: Number of ranks.
            handle: Returns the CUDA stream of a stream, as a number.
            launch_s: Longest wait for a launch in `exchange`, in seconds.
        """
        self._library, self._rank, self._world, self._handle = library, rank, world, handle
        self._launch_s = launch_s
        self._comm = ctypes.c_void_p()
        self._lock = threading.Lock()
        self._aborted = ""

    def connect(self, unique_id: bytes, timeout_s: float) -> None:
        """Connect to all ranks. Collective, each rank with the same id.

        No rank's device may be inside a collective: creating a communicator allocates device memory, which may wait
        for running work.

        Raises:
            Broken: If NCCL fails or takes longer than `timeout_s` seconds.
        """
        id_struct = UniqueId.from_buffer_copy(unique_id)
        with self._lock:
            self._library.call(
                "ncclCommInitRankConfig",
                ctypes.byref(self._comm),
                self._world,
                id_struct,
                self._rank,
                ctypes.byref(build_config(MOST_CTAS)),
            )
            self._wait_launched(timeout_s)

    def warm(self, stream: Stream, sends: Sequence[Message], receives: Sequence[Message], timeout_s: float) -> None:
        """Send a message along every link. Collective, right after `connect`.

        NCCL connects two ranks at their first message, which takes long and waits for the other rank.

        Raises:
            Broken: If NCCL fails or takes longer than `timeout_s` seconds.
        """
        self._enqueue_group(stream, sends, receives, timeout_s)

    def exchange(self, stream: Stream, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Enqueue messages as one operation, which ends when all of them have ended.

        Raises:
            Broken: If NCCL fails or does not launch the operation in time.
        """
        self._enqueue_group(stream, sends, receives, self._launch_s)

    def _enqueue_group(
        self, stream: Stream, sends: Sequence[Message], receives: Sequence[Message], timeout_s: float
    ) -> None:
        with self._lock:
            if self._aborted or not self._comm:
                raise Broken(self._aborted or "the communicator is not connected")
            call, where = self._library.call, self._handle(stream)
            call("ncclGroupStart")
            failure: Broken | None = None
            try:
                for name, messages in (("ncclSend", sends), ("ncclRecv", receives)):
                    for peer, data in messages:
                        call(name, data.data_ptr(), data.numel(), UINT8, peer, self._comm, where)
            except Broken as error:
                failure = error
            try:
                call("ncclGroupEnd")  # after a failure too: an open group would swallow the training's calls
                self._wait_launched(timeout_s)
            except Broken as error:
                failure = failure or error
            if failure is not None:
                raise failure

    def _wait_launched(self, timeout_s: float) -> None:
        """Wait until the last call has been launched."""
        deadline = clock.monotonic() + timeout_s
        while (state := self._query_state()) == IN_PROGRESS:
            if self._aborted:
                raise Broken(self._aborted)
            if clock.monotonic() > deadline:
                raise Broken(f"NCCL has not launched an operation within {timeout_s:g} s")
            clock.sleep(_POLL_S)
        if state != SUCCESS:
            raise Broken(self._library.describe(state))

    def _query_state(self) -> int:
        state = ctypes.c_int()
        self._library.call("ncclCommGetAsyncError", self._comm, ctypes.byref(state))
        return state.value

    def poll_error(self) -> str:
        """Return the error of the communicator, '' if there is none. Never blocks; thread-safe."""
        if self._aborted:
            return self._aborted
        # a thread inside a call sees the error itself; a concurrent query is not safe in all versions
        if not self._comm or not self._lock.acquire(blocking=False):
            return ""
        try:
            state = self._query_state()
        except Broken as error:
            return str(error)
        finally:
            self._lock.release()
        return "" if state in (SUCCESS, IN_PROGRESS) else self._library.describe(state)

    def abort(self) -> None:
        """Abort everything enqueued and running. Thread-safe; may be called again."""
        if self._aborted:
            return
        self._aborted = "aborted"
        held = self._lock.acquire(timeout=2 * self._launch_s)  # on timeout go on: abort has to end a call that hangs
        try:
            if self._comm:
                with suppress(Broken):
                    self._library.call("ncclCommAbort", self._comm)
                self._comm = ctypes.c_void_p()
        finally:
            if held:
                self._lock.release()
