"""Digests of a slot's pieces from the tensors on the device: where they are read, and that they are the agents'.

Most tests have xxhash in place of the kernel. The kernel itself runs in Triton's interpreter, and is compiled, by the
Triton in .venv/triton (`make deps-stacks`). No test shows it on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import gpudigest
from benchmarks.gpudigest import PieceDigests, Placed
from gemini_hpc.core.digest import PIECE_BYTES, PIECE_DIGEST_BYTES, Digest

from .fake_kernel import FakeKernel
from .launch import ROOT
from .slot_of import slot_of

TRITON = Path(sys.prefix) / "triton"
HERE = torch.device("cpu")
TYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.uint8,
]


@pytest.fixture(autouse=True, scope="module")
def kernel() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        made = FakeKernel()
        patch.setattr(gpudigest, "_load_kernel", lambda: made)
        yield made


def of_slot(slot: torch.Tensor) -> list[bytes]:
    """The digests of the slot's pieces, as an agent makes them."""
    hasher = Digest()
    hasher.update(slot.numpy().data)
    found = hasher.pieces
    return [found[at : at + PIECE_DIGEST_BYTES] for at in range(0, len(found), PIECE_DIGEST_BYTES)]


def check(placed: list[Placed], slot: torch.Tensor) -> tuple[int, ...]:
    made, right = PieceDigests(placed, HERE), of_slot(slot)
    assert gpudigest.read_digests(made.begin()) == [right[number] for number in made.numbers]
    return made.numbers


def whole(placed: list[Placed]) -> tuple[int, ...]:
    """The numbers of the pieces in which there is nothing but tensors."""
    end = placed[-1].at + placed[-1].tensor.nbytes
    return tuple(range(-(-placed[0].at // PIECE_BYTES), end // PIECE_BYTES))


SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(0, 5000),
    st.sampled_from([1024, 2048, PIECE_BYTES, PIECE_BYTES - 64, PIECE_BYTES + 64, 2 * PIECE_BYTES + 1]),
    st.integers(0, 3 * PIECE_BYTES),
)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 600), st.lists(st.tuples(SIZES, st.sampled_from(TYPES)), min_size=1, max_size=12))
def test_each_piece_of_nothing_but_tensors_has_the_digest_of_its_bytes(
    pages: int, wanted: list[tuple[int, torch.dtype]]
) -> None:
    tensors = [torch.randint(0, 2, (size // kind.itemsize,)).to(kind) for size, kind in wanted]
    placed, slot = slot_of(4096 * pages, tensors)
    assert check(placed, slot) == whole(placed)


def test_a_digest_is_of_what_the_tensors_hold_now(kernel: FakeKernel) -> None:
    one, other = torch.zeros(PIECE_BYTES // 4 + 9), torch.zeros(PIECE_BYTES // 4)
    placed, _ = slot_of(4096, [one, other])
    made = PieceDigests(placed, HERE)
    before = gpudigest.read_digests(made.begin())
    one[-1] = 1.0  # in a block of two tensors
    assert gpudigest.read_digests(made.begin()) != before
    one[-1] = 0.0
    assert gpudigest.read_digests(made.begin()) == before
    other[-1] = 1.0  # in the last piece, which is not whole
    assert made.numbers == (1,) and gpudigest.read_digests(made.begin()) == before


def test_pieces_of_a_tensor_that_cannot_be_read_in_place_are_left_to_the_agent() -> None:
    plain = torch.randn(PIECE_BYTES)  # four pieces
    columns = torch.randn(700, 700)[:, 100:500]
    odd = torch.zeros(PIECE_BYTES + 1, dtype=torch.uint8)[1:]
    conjugate = torch.randn(PIECE_BYTES // 8, dtype=torch.complex64).conj()
    for misfit in (columns, odd, conjugate, torch.randn(9, 9).t(), conjugate.imag):
        placed, slot = slot_of(4096, [plain, misfit, plain.clone()])
        first, end = placed[1].at // PIECE_BYTES, -(-(placed[1].at + misfit.nbytes) // PIECE_BYTES)
        assert check(placed, slot) == tuple(n for n in whole(placed) if not first <= n < end)


def test_tensors_of_the_host_are_brought_if_they_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [torch.tensor(float(n)) for n in range(40)]  # as Adam counts, beside moments on the device
    there, more = torch.randn(2 * PIECE_BYTES // 4), torch.randn(2 * PIECE_BYTES // 4)
    placed, slot = slot_of(4096, [there, *steps, more])
    of_the_host = {t.data_ptr() for t in steps}

    class Told(torch.Tensor):
        """Says that it is elsewhere."""

        device = torch.device("meta")

    def seen(tensors: list[torch.Tensor]) -> list[Placed]:
        return [
            Placed(at, t.as_subclass(Told) if t.data_ptr() in of_the_host else t)
            for (at, _), t in zip(placed, tensors, strict=True)
        ]

    assert check(seen([p.tensor for p in placed]), slot) == whole(placed)
    of_the_host = {more.data_ptr()}
    assert check(seen([p.tensor for p in placed]), slot) == (1,)


def test_without_a_whole_piece_nothing_is_launched(kernel: FakeKernel) -> None:
    before = kernel.launches
    for placed in ([], slot_of(4096, [torch.ones(1000)])[0]):
        made = PieceDigests(placed, HERE)
        assert made.numbers == () and gpudigest.read_digests(made.begin()) == []
    assert kernel.launches == before


def test_a_device_is_compared_with_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpudigest.find_fault(HERE) == ""

    class Wrong(FakeKernel):
        def __getitem__(self, grid: tuple[int]) -> Any:
            launch = super().__getitem__(grid)

            def wrong(*tables: Any, **sizes: Any) -> None:
                launch(*tables, **sizes)
                tables[-2][-1, 0] ^= 1

            return wrong

    monkeypatch.setattr(gpudigest, "_load_kernel", Wrong)
    assert "not those of the processor" in gpudigest.find_fault(HERE)

    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(gpudigest, "_load_kernel", missing)
    assert gpudigest.find_fault(HERE) == "ModuleNotFoundError: No module named 'triton'"


# Half a minute of work: the interpreter takes every operation by itself.
@pytest.mark.slow
@pytest.mark.parametrize(("what", "more"), [("interpret", {"TRITON_INTERPRET": "1"}), ("compile", {})])
def test_the_kernel_itself(tmp_path: Path, what: str, more: dict[str, str]) -> None:
    assert (TRITON / "triton").is_dir(), "make deps-stacks installs Triton"
    path = os.pathsep.join([str(ROOT), str(TRITON)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path), **more}
    argv = [sys.executable, "-m", "tests.train.digest_program", what]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0 and done.stdout == "right\n", done.stdout + done.stderr
