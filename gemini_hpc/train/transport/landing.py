"""The receiving side's pipeline: chunks come into sub-buffers while earlier ones are copied into the slot.

GEMINI paper, section 5.2, Figure 5d: R bytes in p parts. A receive is posted for as many chunks as there are free
parts, so that the network does not wait for the copies; a chunk for which no part is free waits at the sender.
Where the network can write into the slot itself (gloo and MPI in host memory) no part is needed.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Arriving(Protocol):
    """A posted receive."""

    def wait(self) -> None:
        """Return when the chunk is there. Raises LinkBroken."""


Post = Callable[[torch.Tensor], Arriving]


class Landing:
    """p parts of `part_bytes` each, shared by `inboxes` threads that receive at the same time (each gets an equal
    number of the parts, so that a slow sender takes none from the others; of more threads some wait for their turn).
    `copy(into, part)` brings a part's bytes into the slot, and returns when they are there."""

    def __init__(
        self,
        p: int,
        part_bytes: int,
        *,
        inboxes: int = 1,
        device: torch.device | None = None,
        copy: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
    ) -> None:
        if p < inboxes or inboxes < 1 or part_bytes < 1:
            raise ValueError(f"{p} parts of {part_bytes} bytes for {inboxes} inboxes: at least one part for each")
        self.part_bytes, self.bytes = part_bytes, p * part_bytes
        self._quota, self._copy = p // inboxes, copy
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._taking = threading.Lock()  # two threads that each have half of their parts would wait for ever
        for _ in range(p):
            self._free.put(torch.empty(part_bytes, dtype=torch.uint8, device=device or "cpu"))

    def receive(self, into: torch.Tensor, sizes: Sequence[int], post: Post, landed: Callable[[int], None]) -> None:
        """Fill `into` with chunks of these sizes. landed(k): chunk k has come over the network. On return all copies
        are made. Raises what `post`, its results and the copies raise, the latter when no posted receive is left;
        then nothing of ours runs any more."""
        if any(size > self.part_bytes for size in sizes):
            raise ValueError(f"a chunk of {max(sizes)} bytes does not go into a part of {self.part_bytes}")
        mine: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        full: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor] | None] = queue.SimpleQueue()
        failures: list[BaseException] = []
        with self._taking:
            parts = [self._free.get() for _ in range(min(self._quota, len(sizes)))]
        for part in parts:
            mine.put(part)

        def copier() -> None:
            while (job := full.get()) is not None:
                part, target = job
                try:
                    if not failures:
                        self._copy(target, part[: target.numel()])
                except BaseException as error:
                    failures.append(error)
                mine.put(part)

        thread = threading.Thread(target=copier, name="gemini-landing", daemon=True)
        thread.start()
        coming: deque[tuple[int, Arriving, torch.Tensor, torch.Tensor]] = deque()

        def take() -> None:
            k, arriving, part, target = coming.popleft()
            arriving.wait()
            landed(k)
            full.put((part, target))

        try:
            at = 0
            for k, size in enumerate(sizes):
                while mine.empty() and coming:
                    take()
                part = mine.get()
                if failures:
                    break
                coming.append((k, post(part[:size]), part, into[at : at + size]))
                at += size
            while coming:
                take()
        finally:
            full.put(None)
            thread.join()
            for part in parts:
                self._free.put(part)
        if failures:
            raise failures[0]


def receive_directly(
    into: torch.Tensor, sizes: Sequence[int], post: Post, landed: Callable[[int], None], ahead: int = 8
) -> None:
    """The same where the network writes into the slot: `ahead` receives are posted at a time."""
    coming: deque[tuple[int, Arriving]] = deque()

    def take() -> None:
        k, arriving = coming.popleft()
        arriving.wait()
        landed(k)

    at = 0
    for k, size in enumerate(sizes):
        if len(coming) == ahead:
            take()
        coming.append((k, post(into[at : at + size])))
        at += size
    while coming:
        take()
