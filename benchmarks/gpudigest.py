"""The digests of a slot's pieces, made by the device from the tensors that the slot is copied from.

They are the digests of `core.digest`, which agents make from the slot's bytes: xxh3_128 of each piece of 1 MiB. XXH3
keeps eight accumulators, to which each stripe of 64 bytes is added, one thread each. They are scrambled after each
block of 16 stripes. Pieces have no order, so one thread does one accumulator of one piece.

Tensors begin at multiples of 64 bytes in a slot, not at multiples of a block. Blocks that lie in one tensor of the
device are read in place. All others are first put together in device memory.

Pieces with bytes of some tensors are left out, so that only the agent makes their digests. Such a tensor is not
contiguous, or a conjugate or negative view. Or it has more bytes than a block, and is on the host or not aligned to 8
bytes. The slot's first and last pieces are left out, too: they have bytes that are no tensor's.

Triton compiles the kernel. The tests run it in Triton's interpreter; it has not been run on a device. `find_fault`
compares it with the processor, and has to be asked first.

No training uses these digests so far, only `python -m benchmarks.gpu`. They could show whether the copy from the
device is right, spare the home a digest where another node holds a copy, and leave unchanged pieces out of a push.
The first two change R5 (docs/dev/protocol.md). Each costs the GPU a reading of the state in every version, which has
not been measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from gemini_hpc.core.digest import PIECE_BYTES, PIECE_DIGEST_BYTES

BLOCK_BYTES = 1024
_BLOCKS = PIECE_BYTES // BLOCK_BYTES
_WORD_BYTES = 8
_PIECES_A_PROGRAM, _WARPS = 16, 4  # a thread for each accumulator of each piece
_MASK = (1 << 64) - 1

# The default secret and the primes of XXH3 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_P32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = (_P32[2], _P64[0], _P64[1], _P64[2], _P64[3], _P32[1], _P64[4], _P32[0])


class Placed(NamedTuple):
    """A tensor whose bytes are at this offset of the slot, a multiple of 64."""

    at: int
    tensor: torch.Tensor


class _Run(NamedTuple):
    """Blocks from `first` to before `end`, which lie in device memory, the first one at `address`."""

    first: int
    end: int
    address: int


class PieceDigests:
    """The digests of the pieces that these tensors fill, for as long as the tensors keep their memory.

    The object must live until the device has made them.

    Attributes:
        numbers: Numbers of the pieces that have digests here, in ascending order.
    """

    def __init__(self, placed: Sequence[Placed], device: torch.device) -> None:
        """Plan the reading of the tensors.

        Args:
            placed: All tensors of the slot, by their offsets. Bytes between two of them are zeros.
            device: The device of the tensors.
        """
        self._device = device
        runs: list[_Run] = []
        parts: list[tuple[int, torch.Tensor]] = []  # what blocks of several tensors are put together from
        left_out: set[int] = set()
        for at, tensor in placed:
            end = at + tensor.nbytes
            on_device = tensor.device == device
            in_place = on_device and tensor.data_ptr() % _WORD_BYTES == 0
            plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
            if not plain or (tensor.nbytes > BLOCK_BYTES and not in_place):
                left_out.update(range(at // PIECE_BYTES, -(-end // PIECE_BYTES)))
                continue
            line = tensor.detach().reshape(-1).view(torch.uint8)
            first, last = -(-at // BLOCK_BYTES), end // BLOCK_BYTES
            if first >= last or not on_device:
                parts.append((at, line))
                continue
            head, tail = first * BLOCK_BYTES - at, last * BLOCK_BYTES - at
            runs.append(_Run(first, last, tensor.data_ptr() + head))
            parts += [(at, line[:head]), (at + tail, line[tail:])]
        parts = [(at, line) for at, line in parts if line.numel()]
        bounds = (placed[0].at, placed[-1].at + placed[-1].tensor.nbytes) if placed else (0, 0)
        pieces = range(-(-bounds[0] // PIECE_BYTES), bounds[1] // PIECE_BYTES)
        self.numbers = tuple(number for number in pieces if number not in left_out)
        self._prepare_shared_blocks(runs, parts)

    def _prepare_shared_blocks(self, runs: list[_Run], parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Reserve memory for blocks of several tensors, and make the kernel's tables."""
        blocks = sorted({b for at, line in parts for b in _list_blocks(at, at + line.numel())})
        rows = {block: row for row, block in enumerate(blocks)}
        self._memory = torch.zeros(len(blocks) * BLOCK_BYTES, dtype=torch.uint8, device=self._device)
        self._targets: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []  # of parts on the device, on the host
        self._sources: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for at, line in parts:
            into = rows[at // BLOCK_BYTES] * BLOCK_BYTES + at % BLOCK_BYTES
            kind = int(line.device != self._device)
            self._targets[kind].append(self._memory[into : into + line.numel()])
            self._sources[kind].append(line)
        where = self._memory.data_ptr()
        every = sorted([*runs, *(_Run(b, b + 1, where + rows[b] * BLOCK_BYTES) for b in blocks)])
        ends = np.array([run.end for run in every], np.int64)
        bases = np.array([run.address - run.first * BLOCK_BYTES for run in every], np.int64)
        numbers = np.array(self.numbers, np.int64)
        first = np.searchsorted(ends, numbers * _BLOCKS, side="right").astype(np.int64)
        tables = (numbers, first, ends, bases, _build_table())
        self._tables = [torch.from_numpy(table).to(self._device) for table in tables]

    def begin(self) -> torch.Tensor:
        """Enqueue the digests on the current stream. Return device memory for `read_digests`, once it is reached."""
        found = torch.empty((len(self.numbers), 2), dtype=torch.int64, device=self._device)
        with torch.no_grad():
            if self._sources[1]:
                ends = list(accumulate(line.numel() for line in self._sources[1]))
                brought = torch.cat(self._sources[1]).to(self._device, non_blocking=True)
                torch._foreach_copy_(self._targets[1], list(brought.tensor_split(ends[:-1])))
            if self._sources[0]:
                torch._foreach_copy_(self._targets[0], self._sources[0])
        if self.numbers:
            programs = -(-len(self.numbers) // _PIECES_A_PROGRAM)
            _load_kernel()[(programs,)](
                *self._tables, found, len(self.numbers), PIECES=_PIECES_A_PROGRAM, BLOCKS=_BLOCKS, num_warps=_WARPS
            )
        return found


def read_digests(found: torch.Tensor) -> list[bytes]:
    """Return the digests of the pieces `PieceDigests.numbers`, 16 bytes each, from what `begin` has returned."""
    raw = found.cpu().numpy().astype(">i8").tobytes()
    return [raw[at : at + PIECE_DIGEST_BYTES] for at in range(0, len(raw), PIECE_DIGEST_BYTES)]


def find_fault(device: torch.device) -> str:
    """Return why digests cannot be made on this device; "" once some have been found equal to the processor's.

    The call compiles the kernel, which takes some seconds. It enqueues on the current stream, and waits.
    """
    slot = torch.randint(0, 255, (2 * PIECE_BYTES,), dtype=torch.uint8, device="cpu")
    one, other = PIECE_BYTES + 100, PIECE_BYTES + 128  # a tensor's end, and the place of the next one
    slot[one:other] = 0
    placed = [Placed(0, slot[:one].to(device)), Placed(other, slot[other:].to(device))]
    try:
        found = read_digests(PieceDigests(placed, device).begin())
    except Exception as error:  # whatever Triton, its compiler or the driver raise
        return f"{type(error).__name__}: {error}"
    right = [xxhash.xxh3_128_digest(piece.numpy()) for piece in slot.view(2, PIECE_BYTES)]
    return "" if found == right else "the device's digests are not those of the processor"


def _list_blocks(start: int, end: int) -> range:
    return range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))


def _load_kernel() -> Any:
    """Return the compiled kernel. Tests replace it.

    Raises:
        ImportError: Triton is not installed.
    """
    from benchmarks.gpudigest_kernel import digest_pieces

    return digest_pieces


@cache
def _build_table() -> Any:
    """Return the kernel's keys: of the 16 stripes of a block, and the rows that `gpudigest_kernel` names."""
    keys = [_SECRET[8 * s : 8 * s + 64] for s in range(16)]
    keys += [_SECRET[at : at + 64] for at in (128, 121, 11, 117)]
    rows = [np.frombuffer(key, "<i8") for key in keys]
    ends = PIECE_BYTES * _P64[0] & _MASK, ~(PIECE_BYTES * _P64[1]) & _MASK
    rows += [np.array(words, np.uint64).view(np.int64) for words in (_START, (*ends, *[0] * 6))]
    return np.concatenate(rows)
