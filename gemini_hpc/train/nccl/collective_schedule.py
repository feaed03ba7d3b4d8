"""What all ranks enqueue between the same collectives of the training: Algorithm 2, once for all of them.

A rank on gloo plans alone, since its receiver only has to listen. With NCCL both ends enqueue, and an operation whose
other end is enqueued after a later collective would hang both. So every rank computes this one program from the same
exchanged numbers, and follows it by counting collectives, never by a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gemini_hpc.core import schedule, spans
from gemini_hpc.core.spans import Profile, Span, Window


class Place(NamedTuple):
    """In iteration `iteration` (0 begins with the version's step()), before or after the optimizer has begun, after
    `after` collectives of the iteration. In order of time, as tuples are."""

    iteration: int
    past_gate: bool
    after: int


class Chunk(NamedTuple):
    """Number `number`: the bytes offset..offset+size of every rank's C, to its holder number `replica`. A rank whose
    shard ends earlier sends less, or nothing."""

    number: int
    replica: int
    offset: int
    size: int


@dataclass(frozen=True)
class Program:
    """chunks[i] goes at places[i], which never fall. The last place of all is the gate of iteration s - 1: what goes
    there holds the optimizer up for `late_s`."""

    places: tuple[Place, ...]
    chunks: tuple[Chunk, ...]
    s: int
    C: int
    late_s: float
    spilled_bytes: int

    def due(self, at: Place) -> int:
        """How many chunks, from the first, go here at the latest."""
        return bisect_right(self.places, at)


@dataclass(frozen=True)
class Terms:
    """What a program rests on, from all ranks: their profiles; C, the largest shard; B, the least bandwidth; alpha,
    the largest start-up time. Letters of Algorithm 2."""

    profiles: tuple[Profile, ...]
    C: int
    m: int
    R: int
    p: int
    B: float
    alpha: float
    mu: float


def alike(profiles: Sequence[Profile]) -> str:
    """Why these ranks cannot follow one program, as a sentence; '' if they can: their iterations must launch the same
    collectives of the same groups in the same order."""
    if not profiles:
        return "no rank has profiled its iterations"
    if len({(p.pattern, p.ops, p.gate_span.after) for p in profiles}) > 1:
        return (
            "the ranks do not all launch the same sequence of collectives (pipeline stages, or groups of some ranks "
            "only): copies over NCCL could then wait for each other for ever"
        )
    return ""


def common(profiles: Sequence[Profile]) -> tuple[Window, ...]:
    """Of each span that all ranks have, the shortest length that one of them has; the last before the gate is always
    there. Ranks of one pattern launch the same collectives, so that these tell the time better than clocks do.

    Raises ValueError for ranks that are not `alike`."""
    problem = alike(profiles)
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


def program(terms: Terms, s: int) -> Program:
    """Algorithm 2 over s iterations of all ranks. Equal terms give equal programs, on every machine.

    Raises ValueError for terms that `schedule` refuses, and for ranks that are not `alike`."""
    windows = common(terms.profiles)
    line = spans.timeline(windows, s)
    plan = schedule.plan(line.T, terms.C, terms.m, terms.R, terms.p, terms.B, terms.alpha, terms.mu)
    gate = Place(s - 1, True, 0)
    places, chunks = [], []
    last = len(line.T) - 1
    left_s = terms.mu * line.T[last]
    for number, part in enumerate(plan.partitions):
        iteration, index = line.at(part.span)
        place = Place(iteration, not windows[index].before_gate, windows[index].after)
        if part.span == last:  # Algorithm 2's infinite span: beyond its true length is the gate
            left_s -= schedule.seconds(part.size, terms.B, terms.alpha)
            place = place if left_s >= 0 else gate
        places.append(place)
        chunks.append(Chunk(number, part.replica, part.offset, part.size))
    return Program(tuple(places), tuple(chunks), s, terms.C, plan.late_s, plan.spilled_bytes)


def whole(C: int, m: int, part_bytes: int) -> Program:
    """For profiling: everything goes before the optimizer, none of it between collectives."""
    chunks: list[Chunk] = []
    places: list[Place] = []
    for replica in range(m - 1):
        for offset in range(0, C, part_bytes):
            chunks.append(Chunk(len(chunks), replica, offset, min(part_bytes, C - offset)))
            places.append(Place(0, True, 0))
    return Program(tuple(places), tuple(chunks), 1, C, 0.0, 0)
