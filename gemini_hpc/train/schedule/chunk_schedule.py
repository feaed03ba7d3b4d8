"""From profiles to what one rank's sender follows: which chunk goes in which idle span of which iteration."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from gemini_hpc.core import schedule, spans
from gemini_hpc.core.spans import Profile


class Window(NamedTuple):
    """A stretch of idle network in iteration `iteration` (0 begins with the version's step()): `delay_s` after the
    first `after` collectives have completed, and, where `gated`, the training has passed the optimizer's pre-hook;
    for `length_s`."""

    iteration: int
    after: int
    gated: bool
    delay_s: float
    length_s: float


@dataclass(frozen=True)
class Timetable:
    """Algorithm 2's result for one rank. chunks[r]: for replica r, (window, bytes) of each chunk in order; a window
    of len(windows) is the infinite one at the end. s: iterations that a version may take; usual_s: how long these and
    one more take."""

    windows: tuple[Window, ...]
    chunks: tuple[tuple[tuple[int, int], ...], ...]
    s: int
    usual_s: float
    B: float
    alpha: float
    places: tuple[tuple[int, int, bool], ...] = field(init=False)
    _ends: tuple[tuple[int, ...], ...] = field(init=False)
    _from: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", tuple((w.iteration, w.after, w.gated) for w in self.windows))
        ends = tuple(tuple(accumulate(size for _, size in chunks)) for chunks in self.chunks)
        object.__setattr__(self, "_ends", ends)
        last, windows = 0, []
        for chunks in self.chunks:
            windows.append([last := number if number < len(self.windows) else last for number, _ in chunks] + [last])
        object.__setattr__(self, "_from", tuple(map(tuple, windows)))

    def planned(self, replica: int, at: int) -> int:
        """The window of a replica's byte `at`. For what finds no place in the plan that of the last which does: the
        link may be faster than it was when the plan was made."""
        if replica >= len(self.chunks):
            return len(self.windows)
        return self._from[replica][bisect_right(self._ends[replica], at)]

    def lull(self, seconds: float) -> Window | None:
        """The first window that is so long, if what lies before it is not needed for the chunks; None: it is."""
        spare_s = sum(w.length_s for w in self.windows) - sum(size for c in self.chunks for _, size in c) / self.B
        for window in self.windows:
            if window.iteration or window.gated:
                break
            if window.length_s >= seconds:
                return window
            spare_s -= window.length_s
            if spare_s < seconds:
                break
        return None

    def room(self, seconds: float, backlog_bytes: int) -> int:
        """Bytes of a chunk that arrives within so long, behind those that are on their way; at most, and 0 or less
        for none."""
        return int((seconds - self.alpha) * self.B) - backlog_bytes


# From the end of a collective until a chunk is on its way: it is looked for every millisecond, by a thread of Python.
REACTION_S = 0.0015
# After a collective a host that computes is busy first: it copies out what came, and starts the next computation. Who
# sends beside that takes processors from it, and the interpreter. Nor are three ranks or more done at one moment: who
# is first would send into the last receives of others, for one step of a ring. So this much of a window's beginning
# is left out, but no more than a share of it: the first of these with which enough is left.
PAUSE_S = 0.009
PAUSE_SHARES = (1 / 4, 1 / 5, 1 / 6, 1 / 8)


def settled(windows: Sequence[spans.Window], share: float) -> tuple[spans.Window, ...]:
    """The same windows, each from when all are probably done with the collective before it."""
    cut = []
    for window in windows:
        pause_s = max(0.0, min(PAUSE_S, share * window.length_s) - window.delay_s)
        cut.append(window._replace(delay_s=window.delay_s + pause_s, length_s=window.length_s - pause_s))
    return tuple(cut)


@dataclass(frozen=True)
class Route:
    """What a rank's checkpoints have to pass through: `windows` of its profile that are idle at both ends, C bytes to
    each of m - 1 holders, R bytes of buffer in p parts (letters of Algorithm 2)."""

    profile: Profile
    windows: tuple[spans.Window, ...]
    C: int
    m: int
    R: int
    p: int
    B: float
    alpha: float
    mu: float

    @property
    def usable(self) -> tuple[spans.Window, ...]:
        """The windows from when a sender can have noticed that they have begun, without the startup of their first
        chunk."""
        startup_s = self.alpha - self.start_s
        return tuple(
            w._replace(length_s=max(0.0, w.length_s - max(0.0, REACTION_S - w.delay_s) - startup_s))
            for w in self.windows
        )

    @property
    def start_s(self) -> float:
        """What each chunk takes beyond its bytes, Algorithm 2's alpha: with p on their way at a time, one starts
        while others are sent."""
        return self.alpha / self.p

    def plan(self, s: int) -> schedule.Plan:
        """Algorithm 2 over s iterations."""
        T = spans.timeline(self.usable, s).T
        return schedule.plan(T, self.C, self.m, self.R, self.p, self.B, self.start_s, self.mu)

    def late_s(self, s: int) -> float:
        """How long the training has to wait for a version that may take s iterations."""
        return self.plan(s).late_s

    def timetable(self, s: int) -> Timetable:
        """For the sender."""
        line = spans.timeline(self.windows, s)
        windows = []
        for index in range(len(line.T)):
            iteration, number = line.at(index)
            window = self.windows[number]
            span = self.profile.spans[window.span]
            windows.append(Window(iteration, span.after, not span.before_gate, window.delay_s, window.length_s))
        chunks: list[list[tuple[int, int]]] = [[] for _ in range(self.m - 1)]
        for part in self.plan(s).partitions:
            chunks[part.replica].append((part.span, part.size))
        usual_s = (s + 1) * self.profile.iteration_s
        return Timetable(tuple(windows), tuple(tuple(c) for c in chunks), s, usual_s, self.B, self.alpha)


def common(mine: Profile, others: Sequence[tuple[Profile, float]]) -> tuple[spans.Window, ...]:
    """Where all of these ranks are idle. Each other comes with its shift in seconds, which matters where it launches
    other operations than mine."""
    unlike = [(profile, shift) for profile, shift in others if profile.pattern != mine.pattern]
    alike = [profile for profile, _ in others if profile.pattern == mine.pattern]
    return tuple(spans.capped(mine, spans.intersect(mine, unlike), alike))
