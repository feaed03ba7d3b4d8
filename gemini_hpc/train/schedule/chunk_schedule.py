"""Timetable of one rank's sender, made from profiles: the idle span and iteration of each chunk."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from gemini_hpc.core import schedule, spans
from gemini_hpc.core.spans import Profile


class Window(NamedTuple):
    """A stretch of idle network time in an iteration after a version's step().

    Attributes:
        iteration: Number of the iteration; 0 begins with the version's step().
        after: Number of collectives that must have completed before.
        gated: Whether the training must have passed the optimizer's pre-hook.
        delay_s: Seconds from the moment that both conditions hold to the window's beginning.
        length_s: Length in seconds.
    """

    iteration: int
    after: int
    gated: bool
    delay_s: float
    length_s: float


@dataclass(frozen=True)
class Timetable:
    """The result of Algorithm 2 for one rank.

    Attributes:
        windows: The windows of the version, in order.
        chunks: For each replica, (window, bytes) of each chunk in order. Window number len(windows) is the infinite
            one at the end.
        s: Iterations that a version may take.
        usual_s: Usual seconds of s + 1 iterations.
        B: Rate of the link, bytes per second.
        alpha: Startup time of a chunk, seconds.
        places: Iteration, collectives and gate of each window.
    """

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

    def find_planned_window(self, replica: int, offset: int) -> int:
        """Return the number of the window that is planned for byte `offset` of a replica.

        Bytes without a place in the plan get the last window that is used before them. The link may be faster now
        than when the plan was made.
        """
        if replica >= len(self.chunks):
            return len(self.windows)
        return self._from[replica][bisect_right(self._ends[replica], offset)]

    def find_planned_end(self, replica: int, window: int) -> int:
        """Return the first byte of a replica that is planned for a later window than this one.

        Bytes without a place in the plan have no later window.
        """
        if replica >= len(self.chunks) or not (ends := self._ends[replica]):
            return sys.maxsize
        count = bisect_right(self._from[replica], window, hi=len(ends))
        if count == len(ends):
            return sys.maxsize
        return ends[count - 1] if count else 0

    def find_lull(self, seconds: float) -> Window | None:
        """Return the first window of at least `seconds` whose time the chunks can spare; None if there is none.

        The windows up to its end must not be needed for the chunks. Windows after the first iteration or behind the
        gate do not count.
        """
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

    def compute_room(self, seconds: float, backlog_bytes: int) -> int:
        """Return the size of the largest chunk that arrives within `seconds`; 0 or less if none does.

        Args:
            seconds: Time for the chunk and for all bytes in flight before it.
            backlog_bytes: Bytes in flight before the chunk.
        """
        return int((seconds - self.alpha) * self.B) - backlog_bytes


# Time from the end of a collective until a chunk is sent: a Python thread polls for the end every millisecond.
REACTION_S = 0.0015
# After a collective the host of a training on CPU is busy: it copies out the received data and starts the next
# computation. A sender would take processors and the interpreter from it. With three or more ranks, the first to
# finish would also send into the last receives of others, for one step of a ring. Hence this much of a window's
# beginning is left out, but at most a share of the window: the first of these shares that leaves enough.
PAUSE_S = 0.009
PAUSE_SHARES = (1 / 4, 1 / 5, 1 / 6, 1 / 8)


def cut_beginnings(windows: Sequence[spans.Window], share: float) -> tuple[spans.Window, ...]:
    """Return the windows without their beginnings, in which some ranks may still be busy with a collective.

    Args:
        windows: The windows.
        share: Largest share of a window that is left out, see `PAUSE_SHARES`.
    """
    cut = []
    for window in windows:
        pause_s = max(0.0, min(PAUSE_S, share * window.length_s) - window.delay_s)
        cut.append(window._replace(delay_s=window.delay_s + pause_s, length_s=window.length_s - pause_s))
    return tuple(cut)


@dataclass(frozen=True)
class Route:
    """The inputs of Algorithm 2 for one rank's versions, by the letters of the paper.

    Attributes:
        profile: The rank's profile.
        windows: Windows of the profile that are idle at both ends.
        C: Bytes to each holder.
        m: Number of holders plus 1.
        R: Bytes of buffer.
        p: Parts of the buffer.
        B: Rate of the link, bytes per second.
        alpha: Startup time of a chunk, seconds.
        mu: Share of each idle span that is used.
    """

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
        """Return the parts of the windows that a sender can use.

        A window begins when its sender can have noticed it. The startup time of its first chunk is left out.
        """
        startup_s = self.alpha - self.start_s
        return tuple(
            w._replace(length_s=max(0.0, w.length_s - max(0.0, REACTION_S - w.delay_s) - startup_s))
            for w in self.windows
        )

    @property
    def start_s(self) -> float:
        """Return the startup time of each chunk for Algorithm 2 (its alpha), in seconds.

        With p chunks in flight, one chunk starts while others are sent, so the time is alpha / p.
        """
        return self.alpha / self.p

    def plan(self, s: int) -> schedule.Plan:
        """Return the result of Algorithm 2 over s iterations."""
        T = spans.build_timeline(self.usable, s).T
        return schedule.plan_chunks(T, self.C, self.m, self.R, self.p, self.B, self.start_s, self.mu)

    def build_timetable(self, s: int) -> Timetable:
        """Return the timetable for the sender, for versions that may take s iterations."""
        line = spans.build_timeline(self.windows, s)
        windows = []
        for index in range(len(line.T)):
            iteration, number = line.locate_span(index)
            window = self.windows[number]
            span = self.profile.spans[window.span]
            windows.append(Window(iteration, span.after, not span.before_gate, window.delay_s, window.length_s))
        chunks: list[list[tuple[int, int]]] = [[] for _ in range(self.m - 1)]
        for part in self.plan(s).partitions:
            chunks[part.replica].append((part.span, part.size))
        usual_s = (s + 1) * self.profile.iteration_s
        return Timetable(tuple(windows), tuple(tuple(c) for c in chunks), s, usual_s, self.B, self.alpha)


def find_common_windows(own_profile: Profile, others: Sequence[tuple[Profile, float]]) -> tuple[spans.Window, ...]:
    """Return the windows in which all of these ranks are idle.

    Args:
        own_profile: This rank's profile.
        others: Profiles of the other ranks, each with its shift in seconds. The shift matters only where the other
            rank's operations differ from this rank's.
    """
    unlike = [(profile, shift) for profile, shift in others if profile.pattern != own_profile.pattern]
    alike = [profile for profile, _ in others if profile.pattern == own_profile.pattern]
    return tuple(spans.cap_windows(own_profile, spans.intersect_profiles(own_profile, unlike), alike))
