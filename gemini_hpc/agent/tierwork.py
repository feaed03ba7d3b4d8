"""The process that reads and writes on the tier for this agent: started for one order, bounded in what it may say."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from gemini_hpc.agent.launch import ENVIRONMENT
from gemini_hpc.tier import orders

_LINE_BYTES = 64 << 20
STUCK_S = 120.0  # without a sign of life: the file system hangs


class TierFailed(Exception):
    """An order was not carried out; one sentence."""


async def carry_out(
    order: orders.Order,
    fds: Sequence[int] = (),
    progress: Callable[[int], None] = lambda _: None,
    *,
    stuck_s: float = STUCK_S,
) -> orders.Answer:
    """Have an order carried out and return its last answer. fds: descriptors that it names. Raises `TierFailed`,
    also where nothing is heard for `stuck_s`; a process that hangs in the kernel is then left to end when it can.
    Cancelled, it ends the process."""
    argv = [sys.executable, "-I", "-m", "gemini_hpc.tier.worker", str(os.getpid())]
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=tuple(fds),
            env=ENVIRONMENT,
            limit=_LINE_BYTES,
        )
    except OSError as error:
        raise TierFailed(f"no process for it could be started: {error.strerror}") from None
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(orders.encode(order) + b"\n")
        process.stdin.close()
        while True:
            async with asyncio.timeout(stuck_s):
                line = await process.stdout.readline()
            if not line:
                raise TierFailed("its process has ended without a word")
            answer = orders.answer_decoder.decode(line)
            if isinstance(answer, orders.Failed):
                raise TierFailed(answer.reason)
            if not isinstance(answer, orders.Progress):
                return answer
            progress(answer.bytes)
    except TimeoutError:
        raise TierFailed(f"{order.tier}: the file system has not answered for {stuck_s:.0f} s") from None
    except (msgspec.MsgspecError, ValueError, OSError) as error:
        raise TierFailed(f"its process does not make itself understood: {str(error)[:100]}") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()
