"""How the ranks of one training on this node come on, as their progress pages show it."""

from __future__ import annotations

import os
from collections import deque
from functools import reduce
from statistics import median

from gemini_hpc.core.standstill import Place, Standing
from gemini_hpc.wire import progress_page
from gemini_hpc.wire.progress_page import Progress

_RUNS_S = 5.0  # a rank writes its page once a second, but may be in C code that lets no other thread run
_KEPT = 32  # lengths of steps that the usual one is taken of
_STACK_BYTES = 16384


class _Page:
    """Of one rank; its descriptor is a copy."""

    def __init__(self, fd: int, now: float) -> None:
        self.fd = os.dup(fd)
        self.seen = Progress()
        self.beat_at = now

    def look(self, now: float) -> bool:
        """Whether the rank has come on since the last look."""
        found = progress_page.read(self.fd)
        if found is None or found == self.seen:
            return False
        before, self.seen, self.beat_at = self.seen, found, now
        return (before.version, before.launched) != (found.version, found.launched)


class Ranks:
    """Of one launch of one training, here."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._version, self._version_at = 0, 0.0
        self._moved_at = self._asleep_at = 0.0

    def reset(self) -> None:
        """A new launch."""
        for rank in list(self._pages):
            self.drop(rank)
        self._steps.clear()
        self._version = 0

    def add(self, rank: int, fd: int, now: float) -> None:
        """A rank has handed its page over; what is no page does not count."""
        self.drop(rank)
        if progress_page.is_page(fd):
            self._pages[rank] = _Page(fd, now)
            self._moved_at = self._asleep_at = now

    def drop(self, rank: int) -> None:
        """A rank has gone."""
        page = self._pages.pop(rank, None)
        if page is not None:
            os.close(page.fd)

    def look(self, now: float, *, stopped: bool = False) -> bool:
        """Read all pages; whether any rank has come on. stopped: nobody has looked for a while, so nobody knows."""
        moved = [page.look(now) for page in self._pages.values()]
        self._reached(max((page.seen.version for page in self._pages.values()), default=0), now)
        if any(moved) or stopped:
            self._moved_at = now
        if not any(now - page.beat_at < _RUNS_S for page in self._pages.values()):
            self._asleep_at = now
        return any(moved)

    def _reached(self, version: int, now: float) -> None:
        if version > self._version:
            if self._version:
                self._steps.append((now - self._version_at) / (version - self._version))
            self._version, self._version_at = version, now

    def silent_s(self, now: float) -> float:
        """Since any of them has come on, as of the last look."""
        return now - self._moved_at

    def standing(self, host: str, world: int, now: float) -> Standing | None:
        """As of the last look; None without a rank."""
        if not self._pages:
            return None
        early = not self._steps
        usual_s = 0.0 if early else median(self._steps)
        silent_s, awake_s = self.silent_s(now), now - self._asleep_at

        def one(rank: int, page: _Page) -> Standing:
            seen, unseen_s = page.seen, now - page.beat_at
            place = Place(seen.version, seen.launched, seen.usual, rank, host, seen.collective, unseen_s < _RUNS_S)
            return Standing(world, 1, silent_s, unseen_s, awake_s, usual_s, place, place, seen.flying > 0, early)

        return reduce(Standing.join, (one(rank, page) for rank, page in self._pages.items()))

    # ---- stacks ----------------------------------------------------------------------------------------

    def signal_of(self, rank: int) -> int:
        """What asks this rank for its stack; 0: it gives none."""
        page = self._pages.get(rank)
        return page.seen.signal if page is not None else 0

    def stacks_end(self, rank: int) -> int:
        """Up to where there are stacks of this rank."""
        page = self._pages.get(rank)
        return os.fstat(page.fd).st_size if page is not None else 0

    def stack(self, rank: int, begin: int) -> str:
        """What this rank has written from there on."""
        page = self._pages.get(rank)
        return os.pread(page.fd, _STACK_BYTES, begin).decode(errors="replace") if page is not None else ""
