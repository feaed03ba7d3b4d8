"""The tensors of the training state that this rank keeps, and their way into a slot.

Between `step()` and the first optimizer pre-hook after it, parameters and optimizer tensors are expected not to
change. A background thread copies them in that time. Version counters, addresses and a few elements of each tensor
check the expectation. A tensor that changed before its copy was made voids the version. Such a tensor becomes eager:
from then on it is copied at `step()`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
import xxhash

from gemini_hpc import clock
from gemini_hpc.core.moments import UNCOUNTED, Moment
from gemini_hpc.core.ranges import Range, merge_ranges
from gemini_hpc.core.seal_latency import VersionTimes
from gemini_hpc.format.shard_manifest import LIFTED, PARAMETER, ShardManifest
from gemini_hpc.format.slot_header import TENSOR_ALIGN_BYTES
from gemini_hpc.train.device import host_copy
from gemini_hpc.train.device.interface import Event
from gemini_hpc.train.state.encode import Gaps
from gemini_hpc.train.state.lifted import LiftedSources, LiftedTensor
from gemini_hpc.train.state.ownership import Block, TensorEntry
from gemini_hpc.train.state.sample import OTHERS, PARAMETERS, Turns, have_same_bits, sample_elements
from gemini_hpc.train.state.source import TensorSource
from gemini_hpc.train.state.tensors import get_local, pass_bytes
from gemini_hpc.train.state.tree import Leaf

_TURNS = 32  # one in so many of the pieces not copied again is compared in each version
_BATCH_BYTES = 1 << 20  # pieces below this go through one _foreach_copy_


class Bound:
    """The sources as found at a step(), in lists that the next step() can compare at once.

    Lists are needed because a training has thousands of sources.
    """

    def __init__(self, sources: Sequence[TensorSource]) -> None:
        self.eager = [source for source in sources if source.eager]
        sampled = [source for source in sources if not source.eager]
        self.views = [source.views for source in sources]
        self.watch: list[tuple[TensorSource, torch.Tensor]] = []  # a source and the tensor that counts its changes
        self._wholes: list[Any] = []
        self._parts: list[torch.Tensor | None] = []
        self._bases: list[torch.Tensor] = []
        self._ptrs = [source.ptr for source in sources]
        for source in sources:
            assert source.base is not None and source.whole is not None
            self._bases.append(source.base)
            if not source.eager:
                self.watch.append((source, source.base))
            if source.whole is not source.base:
                self._wholes.append(source.whole)
                self._parts.append(source.base)
                if not source.eager:  # changes through a DTensor are counted at the DTensor, not at its local part
                    self.watch.append((source, source.whole))
        self._watched = [tensor for _, tensor in self.watch]
        found = [(s, s.base, s.whole) for s in sampled if s.may_stay and s.base is not None and s.whole is not None]
        self._frozen = [each for each in found if not each[2].requires_grad]
        self._frozen_counts: list[int] = []
        still = {id(each[0]) for each in self._frozen}
        for source in sampled:
            if id(source) not in still:  # also a source that was frozen when bound last
                source.since, source.token = 0, ()
        self._owners = [source for source in sampled for _ in source.views]
        self._flats = [flat for source in sampled for flat in source.flats]
        fews = [line for source in sampled for line in source.fews]
        numbers = range(len(fews))
        parameters = [number for number in numbers if self._owners[number].parameter]
        others = [number for number in numbers if not self._owners[number].parameter]
        self._parameters = Turns(fews, parameters, PARAMETERS)
        self._others = Turns(fews, others, OTHERS)
        every = [source for source in sources for _ in source.views]
        self._pieces = [number for number, source in enumerate(every) if not source.eager]
        self._targets: dict[int, tuple[int, list[torch.Tensor]]] = {}  # by slot: address, samples of its copies

    def is_current(self) -> bool:
        """Return whether each tensor still has the memory that it had."""
        parts = [whole._local_tensor for whole in self._wholes]
        return all(map(is_, parts, self._parts)) and [t.data_ptr() for t in self._bases] == self._ptrs

    def record_changes(self, version: int) -> None:
        """Record for every tensor with which version it changed last.

        A version counter without a change proves nothing, except for parameters that are not trained. All other
        tensors count as changed.
        """
        counts = [count for _, base, whole in self._frozen for count in (base._version, whole._version)]
        thawed = [whole.requires_grad for _, _, whole in self._frozen]
        if counts == self._frozen_counts and not any(thawed):
            return
        self._frozen_counts = counts
        for (source, base, whole), trained in zip(self._frozen, thawed, strict=True):
            token = base._version, whole._version
            if trained or token != source.token:
                source.token, source.since = token, version

    def read_samples(self, turn: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return a few elements of the parameters, and of the optimizer tensors, whose turn it is."""
        return self._parameters.choose_places(turn).read(), self._others.choose_places(turn).read()

    def find_differing(self, job: CaptureJob, index: int, copies: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of tensors whose copies have other elements than the job's samples.

        If most of the parameters whose turn it was differ, all parameters were swapped and all are returned.

        Args:
            job: The job, with the samples taken when it was made.
            index: The slot with the copies.
            copies: The copies in the slot, by piece.
        """
        where = copies[0].data_ptr() if copies else 0
        known = self._targets.get(index)
        if known is None or known[0] != where:
            pairs = zip(self._pieces, self._flats, strict=True)
            known = self._targets[index] = (
                where,
                [sample_elements(copies[number], flat=flat) for number, flat in pairs],
            )
        parameters, others = self._parameters.choose_places(job.turn), self._others.choose_places(job.turn)
        found = parameters.find_differing(job.samples[0], known[1])
        if 2 * len(found) > parameters.count:
            found = [number for number, source in enumerate(self._owners) if source.parameter]
        found += others.find_differing(job.samples[1], known[1])
        return [self._owners[number].key for number in found]

    def read_counts(self) -> list[int]:
        """Return the version counters of all watched tensors."""
        return [tensor._version for tensor in self._watched]


@dataclass
class CaptureJob(VersionTimes):
    """A version under way into a slot. `left` is set when the training may change its tensors again."""

    small: bytes | bytearray
    views: Sequence[list[torch.Tensor]]
    bound: Bound
    counts: list[int]  # at step()
    digests: list[str] | None
    samples: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # at step()
    lifted: Sequence[LiftedTensor] = ()  # at step()
    leaves: Sequence[Leaf] = ()  # all leaves of this rank, also those that other ranks keep
    memory: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of the leaves by key, as at step()
    unchanged: frozenset[int] = frozenset()  # numbers of pieces that the slot had already
    turn: int = 0  # what is compared by turns: versions that are not saved have no turn
    all_counts: Sequence[int] | None = None  # version counters of the leaves at step(); None: not needed
    gaps: Gaps | None = None  # in the small state, until they are filled
    ready: Event | None = None  # with state on a device: the device's position at step()
    left: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    peer_lost: bool = False  # not saved because another rank or agent is gone
    lock: threading.Lock = field(default_factory=threading.Lock)
    started: bool = False
    cancelled: bool = False
    hurried: bool = False  # the training waits for this version
    wanted: bool = False  # the training waits for its tensors
    urgent: bool = False  # all that is left of the training may depend on this version: it goes at once
    moment: Moment = UNCOUNTED  # of the training, at step()
    taken_at: float = field(default_factory=clock.monotonic, kw_only=True)
    streamed: bool = False  # the device brings its tensors to the other holders: they need not be sent

    @property
    def hopeless(self) -> bool:
        """Return whether waiting for this version is useless.

        A version lost with another rank or agent, which may be dead, is still waited for: Slurm is expected to end
        the job.
        """
        return not self.saved and not self.peer_lost

    def start(self) -> bool:
        """Start the copy, from the copying thread. Return whether it may begin."""
        with self.lock:
            self.started = not self.cancelled
            return self.started

    def cancel(self) -> bool:
        """Cancel the copy, from the training. Return whether it had not begun, and so never will."""
        with self.lock:
            self.cancelled = not self.started
            return self.cancelled

    def is_untouched(self) -> bool:
        """Return whether no tensor's version counter has changed since step()."""
        return self.all_counts is not None and self.all_counts == [leaf.tensor._version for leaf in self.leaves]

    def give_up(self, *, peer_lost: bool = False) -> None:
        """Record that this version will not be complete.

        Args:
            peer_lost: The reason is that another rank or agent is gone, which may be dead.
        """
        self.peer_lost = peer_lost
        self.saved = False
        self.left.set()


def _digest(views: Sequence[torch.Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    for view in views:
        pass_bytes(view, hasher.update)
    return hasher.hexdigest()


class Capture:
    """The tensors behind the pieces of a manifest, found anew at every step."""

    def __init__(
        self, manifest: ShardManifest, leaves: Sequence[Leaf], entries: Sequence[TensorEntry], blocks: Sequence[Block]
    ) -> None:
        """Create the sources of the pieces.

        Args:
            manifest: The manifest. Its pieces are the blocks, in the same order.
            leaves: The tensors of this rank.
            entries: The entries of the leaves.
            blocks: The blocks that this rank keeps, by entry; those of lifted tensors last.
        """
        self.manifest = manifest
        self._planned = {leaf.key for leaf in leaves if leaf.optimizer != LIFTED}
        self._sources: list[TensorSource] = []
        lifted: list[TensorSource] = []
        self._by_key: dict[str, TensorSource] = {}
        self._targets: dict[int, tuple[int, list[torch.Tensor]]] = {}
        self.eager_since: dict[str, str] = {}
        self.watches_all = False
        self.compared = 0  # copies compared with their tensors
        self.lock = threading.Lock()
        self._leaves: Sequence[Leaf] | None = None  # bound last
        self._late: list[Leaf] = []
        self._bound: Bound | None = None
        self._memory: tuple[Sequence[Leaf], list[int], Mapping[str, torch.Tensor]] = ((), [], {})
        for number, block in enumerate(blocks):
            leaf, entry = leaves[block.entry], entries[block.entry]
            offset = tuple(b - e for b, e in zip(block.offset, entry.offset, strict=True))
            source = self._by_key.get(leaf.key)
            if source is None:
                local_tensor = get_local(leaf.tensor)
                parameter = leaf.optimizer == PARAMETER
                source = TensorSource(
                    leaf.key, [], number, local_tensor.shape, local_tensor.dtype, parameter, leaf.may_stay
                )
                self._by_key[leaf.key] = source
                (lifted if leaf.optimizer == LIFTED else self._sources).append(source)
                source.eager = leaf.eager
            source.boxes.append((offset, block.size))
        rows = manifest.rows
        self.lifted = LiftedSources(
            {leaf.key: leaf.tensor for leaf in leaves if leaf.optimizer == LIFTED},
            lifted,
            frozenset(row.key for row in rows if row.optimizer == LIFTED and row.shared and manifest.world > 1),
        )
        self._all = [*self._sources, *lifted]  # in the order of the pieces
        devices = (get_local(leaf.tensor).device for leaf in leaves)
        self.device = next((device for device in devices if device.type == "cuda"), None)
        self._copies = host_copy.create_copies(self.device)

    @property
    def on_device(self) -> bool:
        """Return whether state is on a device."""
        return self._copies is not None

    def learn_from(self, former: Capture) -> None:
        """Make the tensors eager that were eager in the capture of the former plan."""
        for key in former.eager_since.keys() & self._by_key.keys():
            self.make_eager([key], former.eager_since[key])

    @property
    def keys(self) -> list[str]:
        """Return the names of the tensors of which this rank keeps pieces."""
        return [source.key for source in self._all]

    def bind(self, leaves: Sequence[Leaf]) -> tuple[list[Leaf], dict[str, str]]:
        """Find the planned tensors among the present ones.

        Returns:
            The tensors that are not in the plan, which have to go with the small state. Beside them, by name, the
            faults of planned tensors that are gone or have another shape. With faults no version can be captured.
        """
        bound = self._bound
        if self._leaves is leaves and bound is not None and bound.is_current():
            return self._late, {}
        self._leaves = self._bound = None
        found = {leaf.key: leaf.tensor for leaf in leaves}
        misfits: dict[str, str] = {}
        for source in self._sources:
            tensor = found.get(source.key)
            if tensor is None:
                misfits[source.key] = f"{source.key} is gone from the training state"
                continue
            local_tensor = get_local(tensor)
            if local_tensor.data_ptr() != source.ptr or local_tensor is not source.base:
                if not source.fits(local_tensor):
                    misfits[source.key] = source.describe_mismatch(local_tensor)
                    continue
                source.bind(local_tensor)
            source.whole = tensor
        if misfits:
            return [], misfits
        few = len(found) == len(self._planned)
        self._leaves, self._late = leaves, [] if few else [leaf for leaf in leaves if leaf.key not in self._planned]
        return self._late, {}

    def defers(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the small state is on the device, which must not be waited for."""
        return self._copies is not None and self._copies.holds(tensor)

    def mark(self) -> Event | None:
        """Return an event at the present position of the training's device; None without a device."""
        return self._copies.record_mark() if self._copies is not None else None

    def begin_job(self, version: int, small: bytes | bytearray, audit: bool, gaps: Gaps | None = None) -> CaptureJob:
        """Begin the capture of a version: copy eager tensors now, record the others."""
        with torch.no_grad(), self.lock:
            bound = self._bound
            if bound is None:
                bound = self._bound = Bound(self._sources)
            for source in bound.eager:
                source.copy_to_staging(version, compare=False)
            bound.record_changes(version)
            views = [s.staging if s.eager else s.views for s in self._sources] if bound.eager else bound.views
            lifted, seen = self.lifted.prepare_version(version)
            views = [*views, *lifted]
            digests = [_digest(view) for view in views] if audit else None
            turn = self.compared
            samples = bound.read_samples(turn)
        job = CaptureJob(
            version, small, views, bound, bound.read_counts(), digests, samples, seen, self._leaves or (), gaps=gaps
        )
        job.turn = turn
        if self.watches_all:
            job.all_counts = [leaf.tensor._version for leaf in job.leaves]
            job.memory = self._find_local_tensors(job.leaves)
        job.ready = self.mark()
        return job

    def _find_local_tensors(self, leaves: Sequence[Leaf]) -> Mapping[str, torch.Tensor]:
        """Return the local tensor of each leaf, by key.

        These tensors keep their memory where the training puts other memory behind a parameter, as encoders that
        follow others do (`p.data = ...`).
        """
        ptrs = [get_local(leaf.tensor).data_ptr() for leaf in leaves]
        if self._memory[0] is not leaves or self._memory[1] != ptrs:
            self._memory = leaves, ptrs, {leaf.key: get_local(leaf.tensor).detach() for leaf in leaves}
        return self._memory[2]

    # ---- called by the copying thread -----------------------------------------------------------------------

    def _view_pieces(self, index: int, area: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the pieces in a slot's tensor area. The views are cached by slot index."""
        kept = self._targets.get(index)
        if kept is not None and kept[0] == area.data_ptr():
            return kept[1]
        manifest = self.manifest
        views = []
        dtypes = [source.dtype for source in self._all for _ in source.boxes]
        for piece, dtype in zip(manifest.pieces, dtypes, strict=True):
            raw = area[piece.start : piece.start + manifest.count_bytes(piece)]
            views.append(raw.view(dtype).view(piece.size))
        self._targets[index] = (area.data_ptr(), views)
        return views

    def find_unchanged(self, base: int) -> frozenset[int]:
        """Return the numbers of the pieces that are the same as in version `base`.

        The answer holds while a job has not `left`.
        """
        return frozenset(
            number
            for source in self._all
            if 0 < source.since <= base
            for number in range(source.first_piece, source.first_piece + len(source.boxes))
        )

    def list_ranges(self, pieces: Iterable[int]) -> list[Range]:
        """Return the ranges of these pieces in the tensor area."""
        found = (self.manifest.pieces[number] for number in pieces)
        return merge_ranges(
            ((p.start, p.start + self.manifest.count_bytes(p)) for p in found), TENSOR_ALIGN_BYTES - 1
        )

    def copy(self, job: CaptureJob, index: int, area: torch.Tensor, without: frozenset[int] = frozenset()) -> float:
        """Copy all tensors of the job into the tensor area of slot `index`.

        Args:
            job: The job.
            index: The slot.
            area: The slot's tensor area.
            without: Numbers of pieces that the slot already has.

        Returns:
            The duration in seconds, see `copy_pairs`.
        """
        targets, pieces = self._view_pieces(index, area), enumerate(self.list_pieces(job))
        job.unchanged = without
        return self.copy_pairs(job, [(targets[number], piece) for number, piece in pieces if number not in without])

    def clear_padding(self, area: torch.Tensor) -> None:
        """Set the bytes between the pieces to zero.

        A holder that fills this shard from its own tensors has zeros there, too.
        """
        at = 0
        for piece in self.manifest.pieces:
            area[at : piece.start].zero_()
            at = piece.start + self.manifest.count_bytes(piece)

    def copy_pairs(self, job: CaptureJob, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Copy from the second of each pair into the first.

        Args:
            job: The job.
            pairs: (target, source) tensors. Targets are in host memory, sources are parts of the training's state.

        Returns:
            The duration in seconds, without the wait for a device to reach step().
        """
        began = clock.monotonic()
        if self._copies is not None and job.ready is not None:
            return self._fetch(job, pairs)
        small_from: list[torch.Tensor] = []
        small_to: list[torch.Tensor] = []
        with torch.no_grad():
            for target, view in pairs:
                if target.numel() * target.element_size() < _BATCH_BYTES:
                    small_from.append(view)
                    small_to.append(target)
                else:
                    target.copy_(view)
            if small_to:
                torch._foreach_copy_(small_to, small_from)
        return clock.monotonic() - began

    def copy_pairs_concurrently(self, job: CaptureJob, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy as `copy_pairs` does, from a thread beside the one that saves.

        The copies run on a stream of their own, because the training's streams may be blocked forever.
        """
        copies = host_copy.create_copies(self.device) if job.ready is not None else None
        if copies is not None and job.ready is not None:
            copies.bring(job.ready, pairs)
            return
        with torch.no_grad():
            for target, view in pairs:
                target.copy_(view)

    def _fetch(self, job: CaptureJob, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> float:
        """Copy these pairs, the samples, and the missing tensors of the small state to host memory."""
        assert self._copies is not None and job.ready is not None
        gaps, job.gaps = job.gaps, None
        content = [torch.empty_like(gaps.content, device="cpu")] if gaps is not None else []
        first, second = ([torch.empty_like(t, device="cpu") for t in read] for read in job.samples)
        samples = zip([*first, *second], [*job.samples[0], *job.samples[1]], strict=True)
        lifted = [[torch.empty_like(t, device="cpu") for t in seen.samples] for seen in job.lifted]
        both = zip(lifted, job.lifted, strict=True)
        more = [pair for to, seen in both for pair in zip(to, seen.samples, strict=True)]
        lacking = [(to, gaps.content) for to in content] if gaps is not None else []
        took_s = self._copies.bring(job.ready, [*samples, *more, *lacking, *pairs])
        if gaps is not None:
            gaps.fill(content[0])
        job.samples = first, second
        job.lifted = [seen._replace(samples=to) for to, seen in zip(lifted, job.lifted, strict=True)]
        return took_s

    def find_changed(self, job: CaptureJob, index: int, area: torch.Tensor) -> list[str]:
        """Return, after `copy`, the names of tensors whose copy cannot be trusted. Make these eager from now on."""
        bad = self._list_moved(job) + self._list_torn(job, index, area)
        return self.make_eager(bad, "changed before its copy was made")

    def find_moved(self, job: CaptureJob) -> list[str]:
        """Return the names of tensors that have changed since step(), or have other memory, and make these eager.

        This is the first check for copies that the device makes later, in order with the work it gets from here on.
        """
        return self.make_eager(self._list_moved(job) + self._list_replaced(job), "changed before its copy was made")

    def find_torn(self, job: CaptureJob, index: int, area: torch.Tensor) -> list[str]:
        """Return the names of tensors whose copies by the device differ, and make these eager.

        This is the second check, after the device has made the copies. It compares samples and, in an audited
        version, all bytes.
        """
        if job.ready is not None:
            self._fetch(job)
        return self.make_eager(self._list_torn(job, index, area), "changed before its copy was made")

    def list_pieces(self, job: CaptureJob) -> list[torch.Tensor]:
        """Return the job's tensors, in the order of the manifest's pieces."""
        return [view for views in job.views for view in views]

    def _list_moved(self, job: CaptureJob) -> list[str]:
        """Return the names of tensors that were written since step().

        A tensor that got other memory was copied from its old memory. The old memory is unchanged unless its samples
        differ.
        """
        bound = job.bound
        counts = bound.read_counts()
        lifted = [seen.source.key for seen in job.lifted if seen.has_moved()]
        if counts == job.counts:
            return lifted
        pairs = zip(bound.watch, counts, job.counts, strict=True)
        return lifted + [source.key for (source, _), now, then in pairs if now != then]

    def _list_replaced(self, job: CaptureJob) -> list[str]:
        """Return the names of tensors that have other memory since step()."""
        if job.bound.is_current():
            return []
        return [
            source.key
            for source in self._sources
            if not source.eager and source.base is not None and source.whole is not None
            if get_local(source.whole) is not source.base or source.base.data_ptr() != source.ptr
        ]

    def _list_torn(self, job: CaptureJob, index: int, area: torch.Tensor) -> list[str]:
        targets = self._view_pieces(index, area)
        bad = job.bound.find_differing(job, index, targets)
        bad += [seen.source.key for seen in job.lifted if seen.is_torn(targets)]
        bad += self._list_stale(job, targets)
        if job.digests is not None:
            number = 0
            for source, views, digest in zip(self._all, job.views, job.digests, strict=True):
                count = len(views)
                if _digest(targets[number : number + count]) != digest:
                    bad.append(source.key)
                number += count
        self.compared += 1
        return bad

    def _list_stale(self, job: CaptureJob, targets: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of uncopied pieces whose copy in the slot is stale.

        These pieces were not copied again, because no version counter changed. Some are compared whole in each
        version: collectives, for one, write without being counted.
        """
        if not job.unchanged or self._copies is not None:
            return []
        turn = job.turn % _TURNS
        owners = [source for source in self._all for _ in source.boxes]
        pairs = enumerate(self.list_pieces(job))
        return [
            owners[number].key
            for number, piece in pairs
            if number in job.unchanged and number % _TURNS == turn and not have_same_bits(piece, targets[number])
        ]

    # ---- at the pre-hook -------------------------------------------------------------------------------

    def audit(self, job: CaptureJob) -> list[str]:
        """Return the names of tensors that have changed since `step()` without an optimizer, and make these eager."""
        if job.digests is None:
            return []
        bad = [
            source.key
            for source, digest in zip(self._all, job.digests, strict=True)
            if not source.eager and _digest(source.views) != digest
        ]
        return self.make_eager(bad, "changed between step() and the optimizer")

    def make_eager(self, keys: Sequence[str], why: str) -> list[str]:
        """Copy these tensors at `step()` from now on."""
        with self.lock:
            if keys:
                self._bound = None
            for key in keys:
                source = self._by_key[key]
                self.eager_since.setdefault(key, why)
                source.eager = True
        return list(dict.fromkeys(keys))
