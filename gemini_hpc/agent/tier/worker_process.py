"""A process that reads and writes on the tier for this agent, started for one order, with bounded answers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from gemini_hpc.agent.tier.workers import NoWorker, SupervisorChannel
from gemini_hpc.tier import orders
from gemini_hpc.tier.errors import TierFailed, TierUnanswered

_LINE_BYTES = 64 << 20
STUCK_S = 120.0  # after this time without an answer the file system hangs


_supervisor: list[SupervisorChannel] = []


def use(channel: SupervisorChannel) -> None:
    """Register the supervisor whose end of the channel forks this agent's workers from now on."""
    _supervisor[:] = [channel]


async def _await_end(call: Callable[[dict[int, int]], int], fds: dict[int, int]) -> int:
    """Run `call` in a thread. A cancelled caller still waits for its end, because it uses descriptors by number."""
    task = asyncio.ensure_future(asyncio.to_thread(call, fds))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(NoWorker):
            pidfd = await task
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        raise


class _Process:
    """A worker with the pipe for its orders and the pipe for its answers."""

    def __init__(self, pidfd: int, reader: asyncio.StreamReader, ways: Sequence[asyncio.BaseTransport]) -> None:
        self._pidfd, self.answers, self._ways = pidfd, reader, ways

    @classmethod
    async def start(cls, channel: SupervisorChannel, order: bytes, fds: Sequence[int]) -> _Process:
        """Start a worker and send it the order.

        Raises:
            NoWorker: The supervisor has started no process.
            OSError: The pipes cannot be created.
        """
        loop = asyncio.get_running_loop()
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        try:
            numbers = {0: theirs_in, 1: theirs_out, **{fd: fd for fd in fds}}
            pidfd = await _await_end(channel.start, numbers)
        except BaseException:
            os.close(ours_in)
            os.close(ours_out)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        out, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(ours_out, "wb", 0))
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        into, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb", 0)
        )
        out.write(order)
        out.close()
        return cls(pidfd, reader, (out, into))

    async def end(self) -> None:
        """Kill the worker if it has not ended. A worker that hangs in the kernel is left to end when it can."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, gone.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await gone.wait()
        finally:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            for way in self._ways:
                way.close()


async def carry_out(
    order: orders.Order,
    fds: Sequence[int] = (),
    on_progress: Callable[[int], None] = lambda _: None,
    *,
    stuck_s: float = STUCK_S,
) -> orders.Answer:
    """Have an order carried out and return its last answer. Cancelling the call ends the process.

    Args:
        order: The order.
        fds: Descriptors that the order names.
        on_progress: Called with the bytes done so far.
        stuck_s: Seconds without an answer after which the process counts as stuck. If it hangs in the kernel, it
            is left to end when it can.

    Raises:
        TierFailed: The order fails.
        TierUnanswered: No process can be started, or no answer arrives for `stuck_s` seconds.
    """
    if not _supervisor:
        raise TierUnanswered("this agent has no supervisor to start a tier process")
    try:
        process = await _Process.start(_supervisor[0], orders.encode(order) + b"\n", fds)
    except NoWorker as error:
        raise TierUnanswered(str(error)) from None
    except OSError as error:
        raise TierUnanswered(f"could not start a tier process: {error.strerror}") from None
    try:
        while True:
            async with asyncio.timeout(stuck_s):
                line = await process.answers.readline()
            if not line:
                raise TierUnanswered("the tier process ended without an answer")
            answer = orders.answer_decoder.decode(line)
            if isinstance(answer, orders.Failed):
                raise TierFailed(answer.reason)
            if not isinstance(answer, orders.Progress):
                return answer
            on_progress(answer.bytes)
    except TimeoutError:
        raise TierUnanswered(f"{order.tier}: the file system has not answered for {stuck_s:.0f} s") from None
    except (msgspec.MsgspecError, ValueError, OSError) as error:
        raise TierUnanswered(f"cannot decode the tier process's answer: {str(error)[:100]}") from None
    finally:
        await process.end()
