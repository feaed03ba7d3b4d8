"""Reconstruction of a shard, or new parity, from the parts that other nodes of the stripe hold (`core.parity`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Event

from gemini_hpc.agent.replicas import galois
from gemini_hpc.agent.replicas.memory import Memfd, clear
from gemini_hpc.agent.transfer import pull
from gemini_hpc.core import parity
from gemini_hpc.core.copy import Copy
from gemini_hpc.wire.frames import FrameError
from gemini_hpc.wire.handshake import HandshakeError
from gemini_hpc.wire.link import LinkClosed

Parts = Sequence[tuple[pull.Source | Memfd, Copy]]


class Making:
    """A copy, or the parity beside it, that is reconstructed into `memory`.

    First call `clear`, then `fold` for each of the regions, in any threads, then `check_digest`.
    """

    def __init__(self, copy: Copy, memory: Memfd, parts: Parts) -> None:
        """Plan the reconstruction.

        Args:
            copy: The copy or parity to make.
            memory: Memory to write to.
            parts: Source and description of each part that it is made of.

        Raises:
            pull.PullFailed: The parts do not make the copy.
        """
        self._copy, self._memory = copy, memory
        self._parts = {(part.rank, bool(part.members)): (source, part) for source, part in parts}
        try:
            folds = _plan_folds(copy, [part for _, part in parts])
        except (KeyError, ValueError) as exc:
            raise pull.PullFailed(f"its parts do not make it: {exc}") from None
        if any(fold.offset + fold.end - fold.start > copy.used for fold in folds):
            raise pull.PullFailed("its parts are longer than it is")
        by_place: dict[int, list[parity.ParityTerm]] = {}
        for fold in folds:
            by_place.setdefault(fold.offset, []).append(fold)
        self.regions = list(by_place.values())  # the regions are disjoint

    def clear(self) -> None:
        """Fill the memory with zeros (blocking)."""
        with self._memory.view() as view, view[: self._copy.used] as used:
            clear(used)

    def fold(self, region: Sequence[parity.ParityTerm], stop: Event) -> int:
        """Fold the parts of a region into the memory (blocking). Return the bytes received for the region.

        Raises:
            pull.PullFailed: A part is not available, or `stop` is set meanwhile.
        """
        with self._memory.view() as view:
            return sum(_fold_in(one, view, self._parts, stop) for one in region)

    def check_digest(self, found: str) -> str:
        """Return the digest of the result.

        Raises:
            pull.PullFailed: The digest is not the expected one.
        """
        if not self._copy.members and found != self._copy.digest:
            raise pull.PullFailed("the digest does not match: what it was made of does not belong together")
        return found


def make(copy: Copy, memory: Memfd, parts: Parts, stop: Event) -> tuple[str, int]:
    """Reconstruct all regions in sequence (blocking). Return the digest of the result and the bytes received.

    Raises:
        pull.PullFailed: The parts do not make the copy, or `stop` is set meanwhile.
    """
    made = Making(copy, memory, parts)
    made.clear()
    came = sum(made.fold(region, stop) for region in made.regions)
    return made.check_digest(memory.digest(copy.used)), came


def _plan_folds(copy: Copy, parts: Sequence[Copy]) -> list[parity.ParityTerm]:
    shards, beside = [part for part in parts if not part.members], [part for part in parts if part.members]
    used = {member.rank: member.used for part in (copy, *beside) for member in part.members}
    used |= {part.rank: part.used for part in shards}
    whole, rooms = {part.rank for part in shards}, {part.rank: part.room for part in beside}
    ranks = tuple(sorted({copy.rank, *used, *rooms}))
    if len(ranks) > parity.MAX_MEMBERS:
        raise ValueError(f"a stripe of {len(ranks)} members")
    if copy.members:
        return parity.Stripe(ranks, copy.blocks).derive_encoding_without(copy.rank, used, whole, rooms, copy.room)
    stripe = parity.Stripe(ranks, beside[0].blocks if beside else 1)
    return stripe.derive_decoding(copy.rank, used | {copy.rank: copy.used}, whole, rooms)


def _fold_in(
    term: parity.ParityTerm,
    view: memoryview,
    parts: Mapping[tuple[int, bool], tuple[pull.Source | Memfd, Copy]],
    stop: Event,
) -> int:
    def add_bytes(at: int, data: memoryview) -> None:
        with view[term.offset + at : term.offset + at + len(data)] as into:
            galois.add(into, data, term.factor)

    found = parts.get((term.rank, term.parity))
    if found is None:
        raise pull.PullFailed(f"the {'parity beside' if term.parity else 'copy of'} shard {term.rank} is not known")
    source, part = found
    end = min(term.end, part.used)  # the rest of a parity is zero
    if end <= term.start:
        return 0
    if isinstance(source, Memfd):
        with source.view() as memory, memory[term.start : end] as data:
            add_bytes(0, data)
        return 0
    try:
        pull.fetch_part(part, term.start, end, source, add_bytes, stop)
    except (OSError, HandshakeError, LinkClosed, FrameError, pull.PullFailed) as exc:
        raise pull.PullFailed(f"{source.host}: {str(exc) or type(exc).__name__}") from None
    return end - term.start
