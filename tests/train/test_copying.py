"""The copy into the own slot in parts: complete whoever makes which, checked once, never raising."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gemini_hpc.train import ownership
from gemini_hpc.train.capture import Capture
from gemini_hpc.train.copying import Copying
from gemini_hpc.train.directory import Manifest, place
from gemini_hpc.train.tree import StateTree


class Piece:
    """Notes that it was copied."""

    def __init__(self, end: int, done: list[int], fails: bool = False) -> None:
        self.end, self._done, self._fails = end, done, fails

    def copy(self) -> None:
        if self._fails:
            raise MemoryError("no copy today")
        self._done.append(self.end)


def of(ends: list[int], check: Callable[[], list[str]] = list, fails_at: int = -1) -> tuple[Copying, list[int]]:
    done: list[int] = []
    parts = [Piece(end, done, number == fails_at) for number, end in enumerate(ends)]
    return Copying(parts, check, threading.Event()), done


def test_only_what_is_wanted_is_copied_and_only_once() -> None:
    copying, done = of([10, 20, 30])
    copying.up_to(0)
    copying.up_to(-5)
    assert done == []
    copying.up_to(11)
    copying.up_to(20)
    assert done == [10, 20] and not copying._over.is_set()
    copying.finish()
    copying.finish()
    assert done == [10, 20, 30] and copying._over.is_set()
    assert sum(spent.size for spent in copying.spent) == 30


def test_it_is_checked_when_all_is_there() -> None:
    checks: list[str] = []

    def check() -> list[str]:
        checks.append("")
        return ["a.weight"]

    copying, _ = of([10, 20], check)
    copying.up_to(10)
    assert not checks
    copying.finish()
    assert copying.changed == ["a.weight"] and len(checks) == 1


def test_nothing_to_copy_is_over_at_once() -> None:
    copying, _ = of([])
    copying.finish()
    assert copying._over.is_set() and copying.error is None


def test_a_failure_is_kept_and_ends_it() -> None:
    copying, done = of([10, 20, 30], fails_at=1)
    copying.finish()
    assert isinstance(copying.error, MemoryError) and copying._over.is_set() and done == [10]
    copying.finish()
    assert done == [10]


def test_threads_share_it() -> None:
    copying, done = of(list(range(1, 400)))
    threads = [
        threading.Thread(target=lambda at=at: [copying.up_to(n) for n in range(at, 400, 3)]) for at in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert done == list(range(1, 400))


SHAPES = st.lists(
    st.sampled_from([(3,), (700_000,), (), (5, 70_000), (64, 4096), (1, 300_001)]), min_size=1, max_size=7
)


def capture_of(tensors: list[torch.Tensor]) -> Capture:
    model = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)
    tree = StateTree(model, [torch.optim.SGD(model.parameters())], {}, {})
    leaves, _ = tree.leaves()
    described = [tree.describe(leaf, 1) for leaf in leaves]
    rows, entries = tuple(r for r, _ in described), [e for _, e in described]
    blocks = ownership.deal([entries])[0]
    manifest = Manifest(0, 1, rows, place(rows, [(b.entry, b.offset, b.size) for b in blocks]))
    capture = Capture(manifest, leaves, entries, blocks)
    capture.bind(leaves)
    return capture


@settings(max_examples=30, deadline=None)
@given(shapes=SHAPES, turned=st.integers(0, 6), stops=st.lists(st.integers(0, 12_000_000), max_size=5))
def test_every_byte_arrives_in_whatever_steps(shapes: list[tuple[int, ...]], turned: int, stops: list[int]) -> None:
    """Also of a tensor that is not contiguous; and after up_to(n), n bytes are there."""
    tensors = [torch.rand(shape) for shape in shapes]
    if turned < len(tensors) and tensors[turned].dim() == 2:
        tensors[turned] = tensors[turned].t()
    capture = capture_of(tensors)
    manifest = capture.manifest
    wanted, area = (torch.zeros(manifest.tensor_bytes(), dtype=torch.uint8) for _ in range(2))
    for piece, view in zip(manifest.pieces, capture.pieces(capture.snapshot(1, b"", audit=False)), strict=True):
        raw = view.contiguous().reshape(-1).view(torch.uint8)
        wanted[piece.at : piece.at + raw.numel()] = raw
    for _ in range(2):  # the second time with what was kept
        area.zero_()
        job = capture.snapshot(1, b"", audit=False)
        copying = capture.copying(job, 0, area)
        for stop in stops:
            copying.up_to(stop)
            assert torch.equal(area[:stop], wanted[:stop])
        assert not job.left.is_set() or torch.equal(area, wanted)
        copying.finish()
        assert torch.equal(area, wanted) and job.left.is_set() and not copying.changed


def test_the_parts_are_small_enough_to_wait_for() -> None:
    """A training that needs its tensors waits for the part that another thread is at."""
    capture = capture_of([torch.rand(3_000_000), *(torch.rand(40_000) for _ in range(30))])
    area = torch.zeros(capture.manifest.tensor_bytes(), dtype=torch.uint8)
    parts = capture._parts(capture.snapshot(1, b"", audit=False), 0, area)
    assert max(b - a for a, b in pairwise([0, *(part.end for part in parts)])) <= 2 << 20
