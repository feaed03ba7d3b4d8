"""Progress of the ranks of one training on this node, read from their progress pages."""

from __future__ import annotations

import os
from collections import deque
from functools import reduce
from statistics import median

from gemini_hpc.core.numbers import VERSION_BITS
from gemini_hpc.core.standstill import HangStanding, Place
from gemini_hpc.wire import progress_page
from gemini_hpc.wire.progress_page import Progress

_RUNS_S = 5.0  # a rank writes its page once a second, but may be in C code that lets no other thread run
_KEPT = 32  # number of step lengths that the median is taken of
_STACK_BYTES = 16384  # most bytes of stacks read at once


class _Page:
    """The progress page of one rank, with its own duplicate of the file descriptor."""

    def __init__(self, fd: int, now: float) -> None:
        self.fd = os.dup(fd)
        self.seen = Progress()
        self.beat_at = now

    def read_page(self, now: float) -> bool:
        """Read the page. Return whether the rank has progressed since the last reading."""
        found = progress_page.read(self.fd)
        if found is None or found == self.seen:
            return False
        before, self.seen, self.beat_at = self.seen, found, now
        return (before.version, before.launched) != (found.version, found.launched)

    def read_step(self) -> int:
        """Return the step that the rank has completed last."""
        found = progress_page.read(self.fd)
        return min((found or self.seen).version, (1 << VERSION_BITS) - 1)


class RankPages:
    """The ranks on this node of one launch of one training."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._version, self._version_at = 0, 0.0
        self._last = 0  # the newest step of ranks that have gone
        self._moved_at = self._asleep_at = 0.0

    def reset(self) -> None:
        """Forget all pages: a new launch begins."""
        for rank in list(self._pages):
            self.drop(rank)
        self._steps.clear()
        self._version = self._last = 0

    @property
    def reached(self) -> int:
        """Return the newest step that a rank here has completed, also one that has gone since."""
        return max([self._last, *(page.read_step() for page in self._pages.values())])

    def add(self, rank: int, fd: int, now: float) -> None:
        """Add the page that a rank has handed over. A descriptor that is no progress page is ignored."""
        self.drop(rank)
        if progress_page.is_page(fd):
            self._pages[rank] = _Page(fd, now)
            self._moved_at = self._asleep_at = now

    def drop(self, rank: int) -> None:
        """Forget the page of a rank that has gone."""
        page = self._pages.pop(rank, None)
        if page is not None:
            self._last = max(self._last, page.read_step())
            os.close(page.fd)

    def read_pages(self, now: float, *, stopped: bool = False) -> bool:
        """Read all pages. Return whether any rank has progressed.

        Args:
            now: Current time in seconds.
            stopped: The pages have not been read for a while, so the silence before now does not count.
        """
        moved = [page.read_page(now) for page in self._pages.values()]
        self._record_version(max((page.seen.version for page in self._pages.values()), default=0), now)
        if any(moved) or stopped:
            self._moved_at = now
        if not any(now - page.beat_at < _RUNS_S for page in self._pages.values()):
            self._asleep_at = now
        return any(moved)

    def _record_version(self, version: int, now: float) -> None:
        if version > self._version:
            if self._version:
                self._steps.append((now - self._version_at) / (version - self._version))
            self._version, self._version_at = version, now

    def compute_silent_s(self, now: float) -> float:
        """Return the seconds since any rank progressed, as of the last reading."""
        return now - self._moved_at

    def build_standing(self, host: str, world: int, now: float) -> HangStanding | None:
        """Return how the ranks here stand, as of the last reading, or None without a rank."""
        if not self._pages:
            return None
        early = not self._steps
        usual_s = 0.0 if early else median(self._steps)
        silent_s, awake_s = self.compute_silent_s(now), now - self._asleep_at

        def build_rank_standing(rank: int, page: _Page) -> HangStanding:
            seen, unseen_s = page.seen, now - page.beat_at
            place = Place(seen.version, seen.launched, seen.usual, rank, host, seen.collective, unseen_s < _RUNS_S)
            return HangStanding(world, 1, silent_s, unseen_s, awake_s, usual_s, place, place, seen.flying > 0, early)

        return reduce(HangStanding.join, (build_rank_standing(rank, page) for rank, page in self._pages.items()))

    # ---- stacks ----------------------------------------------------------------------------------------

    def find_signal(self, rank: int) -> int:
        """Return the signal that makes this rank write its stack, or 0 if the rank offers none."""
        page = self._pages.get(rank)
        return page.seen.signal if page is not None else 0

    def find_stacks_end(self, rank: int) -> int:
        """Return the offset up to which this rank's page file holds stacks."""
        page = self._pages.get(rank)
        return os.fstat(page.fd).st_size if page is not None else 0

    def read_stacks(self, rank: int, begin: int) -> str:
        """Return the stacks that this rank has written from offset `begin` on."""
        page = self._pages.get(rank)
        return os.pread(page.fd, _STACK_BYTES, begin).decode(errors="replace") if page is not None else ""
