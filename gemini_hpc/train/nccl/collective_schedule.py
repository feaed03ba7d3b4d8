"""Program that all ranks enqueue between the same collectives of the training: Algorithm 2, once for all of them.

A rank on gloo plans alone, because its receiver only has to listen. With NCCL both ends enqueue. An operation whose
other end is enqueued after a later collective would hang both. Every rank therefore computes this one program from
the same exchanged numbers. It follows the program by counting collectives, never by a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gemini_hpc.core import schedule, spans
from gemini_hpc.core.spans import Profile, Span, Window
from gemini_hpc.train.schedule.chunk_schedule import Route


class Place(NamedTuple):
    """A place in the training's sequence of collectives. Tuples order places by time.

    Attributes:
        iteration: Iteration since the version's step(), from 0.
        past_gate: Whether the optimizer has begun.
        after: Number of collectives of the iteration before the place.
    """

    iteration: int
    past_gate: bool
    after: int


class Chunk(NamedTuple):
    """A chunk of every rank's copy.

    A rank whose shard ends earlier sends less, or nothing.

    Attributes:
        number: Number of the chunk.
        replica: Number of the holder that it goes to.
        offset: First byte, in every rank's C.
        size: Size in bytes.
    """

    number: int
    replica: int
    offset: int
    size: int


@dataclass(frozen=True)
class Program:
    """The chunks of a version and their places.

    Attributes:
        places: Place of each chunk, in ascending order. The last possible place is the gate of iteration s - 1.
            Chunks there hold the optimizer up for `late_s`.
        chunks: The chunks.
        s: Iterations that a version may take.
        C: Bytes of the largest shard.
        late_s: Seconds by which the version is late.
        spilled_bytes: Bytes without a place in an idle window.
    """

    places: tuple[Place, ...]
    chunks: tuple[Chunk, ...]
    s: int
    C: int
    late_s: float
    spilled_bytes: int

    def count_due(self, place: Place) -> int:
        """Return the number of chunks, from the first, that must be enqueued by this place."""
        return bisect_right(self.places, place)


@dataclass(frozen=True)
class Terms:
    """The inputs of a program from all ranks, by the letters of Algorithm 2.

    Attributes:
        profiles: Profiles of all ranks.
        C: Bytes of the largest shard.
        m: Number of replicas, the own copy included.
        R: Bytes of buffer.
        p: Parts of the buffer.
        B: Least rate of all ranks, bytes per second.
        alpha: Largest startup time of all ranks, seconds.
        mu: Share of each idle span that is used.
    """

    profiles: tuple[Profile, ...]
    C: int
    m: int
    R: int
    p: int
    B: float
    alpha: float
    mu: float


def check_alike(profiles: Sequence[Profile]) -> str:
    """Return a sentence on why these ranks cannot follow one program; '' if they can.

    Their iterations must launch the same collectives of the same groups in the same order.
    """
    if not profiles:
        return "no rank has profiled its iterations"
    if len({(p.pattern, p.ops, p.gate_span.after) for p in profiles}) > 1:
        return (
            "the ranks do not all launch the same sequence of collectives (pipeline stages, or groups of some ranks "
            "only): copies over NCCL could then wait for each other for ever"
        )
    return ""


def find_shared_windows(profiles: Sequence[Profile]) -> tuple[Window, ...]:
    """Return a window for each span that all ranks have, with the shortest length of any rank.

    The last window before the gate is always there. Ranks of one pattern launch the same collectives, which tell the
    time better than clocks do.

    Raises:
        ValueError: If `check_alike` finds a difference.
    """
    problem = check_alike(profiles)
    if problem:
        raise ValueError(problem)
    found: list[dict[tuple[bool, int], Span]] = [
        {(not span.before_gate, span.after): span for span in profile.spans} for profile in profiles
    ]
    shared = sorted(set(found[0]).intersection(*found[1:]))
    windows = [
        Window(0, after, not past, 0.0, min(spans_of[past, after].length_s for spans_of in found))
        for past, after in shared
    ]
    closing = profiles[0].gate_span.after
    before = [window for window in windows if window.before_gate and window.after <= closing]
    return (*before, *(window for window in windows if not window.before_gate))


def build_program(terms: Terms, s: int) -> Program:
    """Return the result of Algorithm 2 over s iterations of all ranks.

    Equal terms give equal programs on every machine.

    Raises:
        ValueError: If `schedule` refuses the terms, or `check_alike` finds a difference.
    """
    windows = find_shared_windows(terms.profiles)
    line = spans.build_timeline(windows, s)
    plan = schedule.plan_chunks(line.T, terms.C, terms.m, terms.R, terms.p, terms.B, terms.alpha, terms.mu)
    gate = Place(s - 1, True, 0)
    places, chunks = [], []
    last = len(line.T) - 1
    left_s = terms.mu * line.T[last]
    for number, part in enumerate(plan.partitions):
        iteration, index = line.locate_span(part.span)
        place = Place(iteration, not windows[index].before_gate, windows[index].after)
        if part.span == last:  # Algorithm 2's infinite span: what exceeds its true length goes at the gate
            left_s -= schedule.compute_transfer_s(part.size, terms.B, terms.alpha)
            place = place if left_s >= 0 else gate
        places.append(place)
        chunks.append(Chunk(number, part.replica, part.offset, part.size))
    return Program(tuple(places), tuple(chunks), s, terms.C, plan.late_s, plan.spilled_bytes)


def build_profiling_program(C: int, m: int, part_bytes: int) -> Program:
    """Return a program for profiling: all chunks go before the optimizer, and none between collectives."""
    chunks: list[Chunk] = []
    places: list[Place] = []
    for replica in range(m - 1):
        for offset in range(0, C, part_bytes):
            chunks.append(Chunk(len(chunks), replica, offset, min(part_bytes, C - offset)))
            places.append(Place(0, True, 0))
    return Program(tuple(places), tuple(chunks), 1, C, 0.0, 0)


@dataclass(frozen=True)
class Joint(Route):
    """A route with a program that all ranks share.

    `terms` and everything that follows from them are the same on all ranks. The profile is this rank's.
    """

    terms: Terms

    @property
    def usable(self) -> tuple[Window, ...]:
        """Return all windows in full, because no sender has to notice that a window has begun."""
        return self.windows

    def build_program(self, s: int) -> Program:
        """Return the program that all ranks enqueue, for versions that may take s iterations."""
        return build_program(self.terms, s)
