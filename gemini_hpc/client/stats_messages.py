"""Messages of a rank's traffic to its agent, made from plain values within the agent's bounds and a packet's size.

Nothing here raises for a strange number (not finite, negative, out of bounds): the number is clipped or left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from math import isfinite
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from gemini_hpc.core.numbers import MAX_RANKS, VERSION_BITS
from gemini_hpc.wire import local
from gemini_hpc.wire.traffic import (
    MAX_CHUNKS,
    MAX_COPIES,
    MAX_MOMENT_S,
    MAX_NAME,
    MAX_OPS,
    MAX_PER_SPAN,
    MAX_SPANS,
    MAX_WAITS,
    Chunk,
    CopyTime,
    Operation,
    Stretch,
    TimelineState,
    TrafficState,
)

T = TypeVar("T", Operation, Chunk, CopyTime, Stretch)
SEVERAL = "several"  # the name of merged operations of several names
_MAX_BYTES = (1 << 50) - 1
_FIELDS = {f.name: f.type for f in cast(inspect.StructType, inspect.type_info(TrafficState)).fields}


def build_profile_key(model: str, hosts: Iterable[str]) -> str:
    """Return the key of a profile.

    Args:
        model: Any text that identifies the model and how it is trained.
        hosts: Hostnames in the order of ranks.
    """
    digest = blake2b(digest_size=16)
    for text in (model, *hosts):
        packed = text.encode(errors="surrogatepass")
        digest.update(len(packed).to_bytes(8, "little") + packed)
    return digest.hexdigest()


def build_cache_bytes(training: str, rank: int, key: str, data: bytes) -> local.CacheBytes | None:
    """Return a message for `AgentClient.post`; None for more bytes than an agent keeps."""
    return local.CacheBytes(training, rank, key, data) if len(data) <= local.MAX_KEPT_BYTES else None


def bound_traffic(state: TrafficState) -> TrafficState:
    """Return a summary with the nearest values that its fields allow."""
    return TrafficState(**{name: _bound(kind, getattr(state, name)) for name, kind in _FIELDS.items()})


def _bound(kind: Any, value: Any) -> Any:
    """Return the nearest value that a field of this type allows. A number that is not finite may be unknown."""
    if isinstance(kind, inspect.StrType):
        return value[: kind.max_length].encode(errors="replace").decode()
    if isinstance(kind, inspect.VarTupleType):
        return tuple(_bound(kind.item_type, item) for item in value[: kind.max_length])
    if isinstance(kind, inspect.UnionType):
        number = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
        return _bound(number, value) if value is not None and isfinite(value) else None
    least, most = kind.ge, kind.lt - 1 if kind.le is None else kind.le
    if isinstance(kind, inspect.FloatType):
        return _clamp(value, float(least), most)
    return min(max(int(value), least), most)


def count_chunks_per_span(chunk_spans: Iterable[int], spans: int) -> tuple[int, ...]:
    """Return the number of chunks in each span, in order.

    Neighbouring spans are added up as far as needed for at most MAX_PER_SPAN numbers.
    """
    width = max(1, -(-spans // MAX_PER_SPAN))
    counts = [0] * -(-spans // width)
    for span in chunk_spans:
        if 0 <= span < spans:
            counts[span // width] += 1
    return tuple(_clamp_count(n) for n in counts)


def build_timeline(
    *,
    version: int,
    iteration_s: float,
    gate_s: float,
    ops: Iterable[tuple[str, float, float, int]] = (),
    chunks: Iterable[tuple[float, float, int, int]] = (),
    copies: Iterable[tuple[float, float, int]] = (),
    waits: Iterable[tuple[float, float]] = (),
    spans: Iterable[tuple[float, float]] = (),
) -> TimelineState:
    """Return one iteration, cut to its length and thinned to a packet's size (see `merge_neighbours`).

    All times are in seconds from the iteration's start.

    Args:
        version: Number of the step() before the iteration.
        iteration_s: Length of the iteration.
        gate_s: Time of the gate.
        ops: (name, start, end, bytes) of each operation.
        chunks: (start, end, bytes, replica) of each chunk.
        copies: (start, end, bytes) of each copy into the own slot.
        waits: (start, end) of each wait at the optimizer.
        spans: (start, end) of each idle span.
    """
    length_s = _clamp_moment(iteration_s, MAX_MOMENT_S)

    def cut(start: float, end: float) -> tuple[float, float]:
        start_s = _clamp_moment(start, length_s)
        return start_s, max(start_s, _clamp_moment(end, length_s))

    operations = [
        Operation(_sanitize_word(name), *cut(start, end), _clamp_bytes(size)) for name, start, end, size in ops
    ]
    sent = [
        Chunk(*cut(start, end), _clamp_bytes(size), _clamp_count(replica)) for start, end, size, replica in chunks
    ]
    sent.sort(key=lambda chunk: (chunk.replica, chunk.start_s))
    copied = [CopyTime(*cut(start, end), _clamp_bytes(size)) for start, end, size in copies]
    return TimelineState(
        version=min(max(version, 0), (1 << VERSION_BITS) - 1),
        iteration_s=length_s,
        gate_s=_clamp_moment(gate_s, length_s),
        ops=merge_neighbours(_sort_by_start(operations), MAX_OPS),
        chunks=merge_neighbours(sent, MAX_CHUNKS, lambda a, b: a.replica == b.replica),
        copies=merge_neighbours(_sort_by_start(copied), MAX_COPIES),
        waits=merge_neighbours(_sort_by_start([Stretch(*cut(*wait)) for wait in waits]), MAX_WAITS),
        spans=merge_neighbours(_sort_by_start([Stretch(*cut(*span)) for span in spans]), MAX_SPANS),
    )


def merge_neighbours(
    items: Sequence[T], most: int, alike: Callable[[T, T], bool] = lambda a, b: True
) -> tuple[T, ...]:
    """Return at most `most` items, merging neighbours with the least time between them.

    Neighbours that are not `alike` are merged last. Busy time never becomes idle; the least idle time becomes busy.
    """
    surplus = len(items) - most
    if surplus <= 0:
        return tuple(items)
    ends = sorted(range(1, len(items)), key=lambda i: _measure_gap(items[i - 1], items[i], alike))[:surplus]
    joined = set(ends)
    out: list[T] = []
    for index, item in enumerate(items):
        if index in joined:
            out[-1] = _merge(out[-1], item)
        else:
            out.append(item)
    return tuple(out)


def _measure_gap(a: T, b: T, alike: Callable[[T, T], bool]) -> tuple[bool, float]:
    return not alike(a, b), b.start_s - a.end_s


def _sort_by_start(items: list[T]) -> list[T]:
    return (
        items if all(a.start_s <= b.start_s for a, b in pairwise(items)) else sorted(items, key=lambda i: i.start_s)
    )


def _merge(a: T, b: T) -> T:
    changes: dict[str, Any] = {"start_s": min(a.start_s, b.start_s), "end_s": max(a.end_s, b.end_s)}
    if not isinstance(a, Stretch) and not isinstance(b, Stretch):
        changes["bytes"] = _clamp_bytes(a.bytes + b.bytes)
    if isinstance(a, Operation) and isinstance(b, Operation) and a.name != b.name:
        changes["name"] = SEVERAL
    return msgspec.structs.replace(a, **changes)


# ---- values that an agent takes ------------------------------------------------------------------------


def _clamp(value: float, least: float, most: float) -> float:
    return min(max(float(value), least), most) if isfinite(value) else least


def _clamp_moment(value: float, most: float) -> float:
    return min(round(_clamp(value, 0.0, most), 6), most)


def _clamp_count(value: int) -> int:
    return min(max(int(value), 0), MAX_RANKS)


def _clamp_bytes(value: int) -> int:
    return min(max(int(value), 0), _MAX_BYTES)


@lru_cache(maxsize=256)
def _sanitize_word(text: str) -> str:
    """Replace all characters that JSON would escape, so that a name's room in a packet is known."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-.: /") else "?" for c in text[:MAX_NAME])
