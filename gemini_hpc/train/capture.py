"""What of the training state this rank keeps, and how it gets from the tensors into a slot.

Between `step()` and the first optimizer pre-hook after it, parameters and optimizer tensors are expected not to
change; in that time a background thread copies them. The expectation is checked, by version counters, addresses and a
few elements of each tensor: one that changed before its copy was made voids the version, and is copied at `step()`
from then on (it becomes eager).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
import xxhash

from gemini_hpc.core.directory import Manifest
from gemini_hpc.train import hostcopy
from gemini_hpc.train.nccl.device import Event
from gemini_hpc.train.ownership import Block, Entry
from gemini_hpc.train.sample import OTHERS, PARAMETERS, Turns, few
from gemini_hpc.train.tree import Leaf, local

_BATCH_BYTES = 1 << 20  # pieces below this go through one _foreach_copy_


class StateChangedError(Exception):
    """The training state no longer has the shape that was planned."""


@dataclass
class _Source:
    """A tensor with pieces in this rank's shard."""

    key: str
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]  # (offset in the local tensor, size)
    first_piece: int
    shape: torch.Size
    dtype: torch.dtype
    parameter: bool
    eager: bool = False
    ptr: int = -1
    base: torch.Tensor | None = None  # its part in this process
    whole: torch.Tensor | None = None  # the same, or the DTensor around it
    views: list[torch.Tensor] = field(default_factory=list)
    flats: list[bool] = field(default_factory=list)  # whether each is contiguous
    fews: list[torch.Tensor] = field(default_factory=list)  # where each is sampled
    staging: list[torch.Tensor] = field(default_factory=list)


class Bound:
    """The sources as they were found at a step(), in lists, which the next one can compare at once: a training has
    thousands of them."""

    def __init__(self, sources: Sequence[_Source]) -> None:
        self.eager = [source for source in sources if source.eager]
        sampled = [source for source in sources if not source.eager]
        self.views = [source.views for source in sources]
        self.watch: list[tuple[_Source, torch.Tensor]] = []  # and what counts its changes
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
                if not source.eager:  # what changes a DTensor is counted there, not within
                    self.watch.append((source, source.whole))
        self._watched = [tensor for _, tensor in self.watch]
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
        self._targets: dict[int, tuple[int, list[torch.Tensor]]] = {}  # by slot: where it is, samples of it

    def holds(self) -> bool:
        """Whether each tensor still has the memory that it had."""
        parts = [whole._local_tensor for whole in self._wholes]
        return all(map(is_, parts, self._parts)) and [t.data_ptr() for t in self._bases] == self._ptrs

    def samples(self, version: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A few elements of what has its turn in this version: of parameters, and of optimizer tensors."""
        return self._parameters.of(version).read(), self._others.of(version).read()

    def other(self, job: Job, index: int, copies: Sequence[torch.Tensor]) -> list[str]:
        """Names of those that had other elements when the job was made than their copies in slot `index` have now. If
        that is most of the parameters that had their turn, all of them were swapped."""
        where = copies[0].data_ptr() if copies else 0
        known = self._targets.get(index)
        if known is None or known[0] != where:
            pairs = zip(self._pieces, self._flats, strict=True)
            known = self._targets[index] = where, [few(copies[number], flat=flat) for number, flat in pairs]
        parameters, others = self._parameters.of(job.version), self._others.of(job.version)
        found = parameters.differing(job.samples[0], known[1])
        if 2 * len(found) > parameters.count:
            found = [number for number, source in enumerate(self._owners) if source.parameter]
        found += others.differing(job.samples[1], known[1])
        return [self._owners[number].key for number in found]

    def counts(self) -> list[int]:
        """The version counters of all that is watched."""
        return [tensor._version for tensor in self._watched]


@dataclass
class Job:
    """One version on its way into a slot. `left` is set when the training may change its tensors again."""

    version: int
    small: bytes
    views: Sequence[list[torch.Tensor]]
    bound: Bound
    counts: list[int]  # at step()
    digests: list[str] | None
    samples: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # at step()
    ready: Event | None = None  # of a training with state on a device: where that has come to step()
    left: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    saved: bool = True
    bereaved: bool = False  # not saved because another rank or agent is gone
    lock: threading.Lock = field(default_factory=threading.Lock)
    started: bool = False
    cancelled: bool = False
    hurried: bool = False  # the training waits for this version
    wanted: bool = False  # the training waits for its tensors
    streamed: bool = False  # the device brings its tensors to the other holders: they need not be sent

    @property
    def hopeless(self) -> bool:
        """No use to wait for it. Where another is gone that may be dead, the wait is for Slurm to end the job."""
        return not self.saved and not self.bereaved

    def start(self) -> bool:
        """From the copying thread: True if the copy may begin."""
        with self.lock:
            self.started = not self.cancelled
            return self.started

    def cancel(self) -> bool:
        """From the training: True if the copy had not begun, and never will."""
        with self.lock:
            self.cancelled = not self.started
            return self.cancelled

    def give_up(self, *, bereaved: bool = False) -> None:
        """This version will not be complete. bereaved: because another rank or agent is gone, which may be dead."""
        self.bereaved = bereaved
        self.saved = False
        self.left.set()


def _bytes_of(view: torch.Tensor) -> memoryview:
    flat = view.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _digest(views: Sequence[torch.Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    for view in views:
        hasher.update(_bytes_of(view))
    return hasher.hexdigest()


class Capture:
    """The tensors behind the pieces of a manifest, found anew at every step."""

    def __init__(
        self, manifest: Manifest, leaves: Sequence[Leaf], entries: Sequence[Entry], blocks: Sequence[Block]
    ) -> None:
        """blocks: as dealt, by entry; the manifest's pieces are the same ones in the same order."""
        self.manifest = manifest
        self._planned = {leaf.key for leaf in leaves}
        self._sources: list[_Source] = []
        self._by_key: dict[str, _Source] = {}
        self._targets: dict[int, tuple[int, list[torch.Tensor]]] = {}
        self.eager_since: dict[str, str] = {}
        self.lock = threading.Lock()
        self._leaves: Sequence[Leaf] | None = None  # that were bound last
        self._late: list[Leaf] = []
        self._bound: Bound | None = None
        for number, block in enumerate(blocks):
            leaf, entry = leaves[block.entry], entries[block.entry]
            offset = tuple(b - e for b, e in zip(block.offset, entry.offset, strict=True))
            source = self._by_key.get(leaf.key)
            if source is None:
                here = local(leaf.tensor)
                source = _Source(leaf.key, [], number, here.shape, here.dtype, leaf.optimizer < 0)
                self._by_key[leaf.key] = source
                self._sources.append(source)
            source.boxes.append((offset, block.size))
        devices = (local(leaf.tensor).device for leaf in leaves)
        self.device = next((device for device in devices if device.type == "cuda"), None)
        self._copies = hostcopy.of_training(self.device)

    @property
    def on_device(self) -> bool:
        """Whether state is there."""
        return self._copies is not None

    @property
    def keys(self) -> list[str]:
        """Names of the tensors of which this rank keeps something."""
        return [source.key for source in self._sources]

    def bind(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Find the planned tensors among the present ones. Returns those that are not in the plan, which have to go
        with the small state. Raises StateChangedError where one is gone or has another shape."""
        bound = self._bound
        if self._leaves is leaves and bound is not None and bound.holds():
            return self._late
        self._leaves = self._bound = None
        found = {leaf.key: leaf.tensor for leaf in leaves}
        for source in self._sources:
            tensor = found.get(source.key)
            if tensor is None:
                raise StateChangedError(f"{source.key} is gone from the training state")
            here = local(tensor)
            if here.data_ptr() != source.ptr or here is not source.base:
                self._bind_one(source, here)
            source.whole = tensor
        few = len(found) == len(self._planned)
        self._leaves, self._late = leaves, [] if few else [leaf for leaf in leaves if leaf.key not in self._planned]
        return self._late

    @staticmethod
    def _bind_one(source: _Source, here: torch.Tensor) -> None:
        if here.shape != source.shape or here.dtype != source.dtype:
            raise StateChangedError(
                f"{source.key} was {tuple(source.shape)} {source.dtype}, is {tuple(here.shape)} {here.dtype} now"
            )
        source.ptr, source.base = here.data_ptr(), here
        detached = here.detach()
        source.views = []
        for offset, size in source.boxes:
            view = detached
            for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
                if length != view.shape[dim]:
                    view = view.narrow(dim, start, length)
            source.views.append(view)
        source.flats = [view.is_contiguous() for view in source.views]
        source.fews = [few(view, flat=flat) for view, flat in zip(source.views, source.flats, strict=True)]

    def snapshot(self, version: int, small: bytes, audit: bool) -> Job:
        """Begin the capture of a version: eager tensors are copied now, the others are noted."""
        with torch.no_grad(), self.lock:
            bound = self._bound
            if bound is None:
                bound = self._bound = Bound(self._sources)
            for source in bound.eager:
                if not source.staging:
                    source.staging = [v.contiguous().clone() for v in source.views]
                for stage, view in zip(source.staging, source.views, strict=True):
                    stage.copy_(view)
            views = [s.staging if s.eager else s.views for s in self._sources] if bound.eager else bound.views
            digests = [_digest(each) for each in views] if audit else None
            samples = bound.samples(version)
        job = Job(version, small, views, bound, bound.counts(), digests, samples)
        if self._copies is not None:
            job.ready = self._copies.mark()
        return job

    # ---- from the copying thread -----------------------------------------------------------------------

    def _target(self, index: int, area: torch.Tensor) -> list[torch.Tensor]:
        """Views of the pieces in a slot's tensor area (kept by slot index)."""
        kept = self._targets.get(index)
        if kept is not None and kept[0] == area.data_ptr():
            return kept[1]
        manifest = self.manifest
        views = []
        dtypes = [source.dtype for source in self._sources for _ in source.boxes]
        for piece, dtype in zip(manifest.pieces, dtypes, strict=True):
            raw = area[piece.at : piece.at + manifest.nbytes(piece)]
            views.append(raw.view(dtype).view(piece.size))
        self._targets[index] = (area.data_ptr(), views)
        return views

    def copy(self, job: Job, index: int, area: torch.Tensor) -> float:
        """Copy everything that the job noted into the tensor area of slot `index`. How long that took, in seconds,
        without the wait for a device to come to step()."""
        began = time.monotonic()
        targets, pieces = self._target(index, area), self.pieces(job)
        if self._copies is not None and job.ready is not None:
            return self._fetch(job, list(zip(targets, pieces, strict=True)))
        small_from: list[torch.Tensor] = []
        small_to: list[torch.Tensor] = []
        with torch.no_grad():
            for target, view in zip(targets, pieces, strict=True):
                if target.numel() * target.element_size() < _BATCH_BYTES:
                    small_from.append(view)
                    small_to.append(target)
                else:
                    target.copy_(view)
            if small_to:
                torch._foreach_copy_(small_to, small_from)
        return time.monotonic() - began

    def _fetch(self, job: Job, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> float:
        """These, and the samples, to host memory."""
        assert self._copies is not None and job.ready is not None
        first, second = ([torch.empty_like(t, device="cpu") for t in read] for read in job.samples)
        samples = zip([*first, *second], [*job.samples[0], *job.samples[1]], strict=True)
        took_s = self._copies.bring(job.ready, [*samples, *pairs])
        job.samples = first, second
        return took_s

    def changed(self, job: Job, index: int, area: torch.Tensor) -> list[str]:
        """After `copy`: names of tensors whose copy cannot be trusted. They are eager from now on."""
        bad = self._moved(job) + self._torn(job, index, area)
        return self.make_eager(bad, "changed before its copy was made")

    def moved(self, job: Job) -> list[str]:
        """The same for copies that the device makes later, in order with what it is given from here on: what has
        changed since step()."""
        return self.make_eager(self._moved(job), "changed before its copy was made")

    def torn(self, job: Job, index: int, area: torch.Tensor) -> list[str]:
        """And when these have been made: copies that differ, by their samples or, in an audited version, at all."""
        if job.ready is not None:
            self._fetch(job)
        return self.make_eager(self._torn(job, index, area), "changed before its copy was made")

    def bases(self) -> list[torch.Tensor]:
        """The tensors as they are now."""
        return [source.base for source in self._sources if source.base is not None]

    def pieces(self, job: Job) -> list[torch.Tensor]:
        """The job's tensors, in the order of the manifest's pieces."""
        return [view for views in job.views for view in views]

    def _moved(self, job: Job) -> list[str]:
        bound = job.bound
        counts = bound.counts()
        if counts == job.counts and bound.holds():
            return []
        pairs = zip(bound.watch, counts, job.counts, strict=True)
        return [source.key for (source, _), now, then in pairs if now != then] + [
            source.key
            for source in self._sources
            if not source.eager and source.base is not None and source.whole is not None
            if local(source.whole) is not source.base or source.base.data_ptr() != source.ptr
        ]

    def _torn(self, job: Job, index: int, area: torch.Tensor) -> list[str]:
        targets = self._target(index, area)
        bad = job.bound.other(job, index, targets)
        if job.digests is not None:
            number = 0
            for source, views, digest in zip(self._sources, job.views, job.digests, strict=True):
                count = len(views)
                if _digest(targets[number : number + count]) != digest:
                    bad.append(source.key)
                number += count
        return bad

    # ---- at the pre-hook -------------------------------------------------------------------------------

    def audit(self, job: Job) -> list[str]:
        """Names of tensors that have changed since `step()` without an optimizer; they are eager from now on."""
        if job.digests is None:
            return []
        bad = [
            source.key
            for source, digest in zip(self._sources, job.digests, strict=True)
            if not source.eager and _digest(source.views) != digest
        ]
        return self.make_eager(bad, "changed between step() and the optimizer")

    def make_eager(self, keys: Sequence[str], why: str) -> list[str]:
        """Copy these at `step()` from now on."""
        with self.lock:
            if keys:
                self._bound = None
            for key in keys:
                source = self._by_key[key]
                self.eager_since.setdefault(key, why)
                source.eager = True
        return list(dict.fromkeys(keys))
