"""The kernel of `gpudigest`, in Triton's language: the only module that imports Triton.

A row of a tensor is a piece, and its eight columns are the accumulators of XXH3.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# Triton reads annotations and knows none but its own.

from __future__ import annotations

import triton
import triton.language as tl

# Rows of the table of keys, eight words each. The first 16 are the keys of a block's stripes.
SCRAMBLE_KEY, LAST_KEY, LOW_KEY, HIGH_KEY, START, LENGTH = map(tl.constexpr, range(16, 22))


@triton.jit
def shift_right(x, n: tl.constexpr):
    """Return signed words shifted to the right, with zeros from the left."""
    return (x >> n) & ((1 << (64 - n)) - 1)


@triton.jit
def fold_half(acc, keys, KEY: tl.constexpr, COLUMN: tl.constexpr, PIECES: tl.constexpr):
    """Return one half of each piece's digest."""
    x = acc ^ tl.load(keys + KEY * 8 + tl.arange(0, 8))[None, :]
    even, odd = tl.split(tl.reshape(x, (PIECES, 4, 2)))
    h = tl.sum((even * odd) ^ tl.umulhi(even, odd), 1) + tl.load(keys + LENGTH * 8 + COLUMN)
    h = (h ^ shift_right(h, 37)) * 0x165667919E3779F9
    return h ^ shift_right(h, 32)


@triton.jit
def digest_pieces(numbers, first, ends, bases, keys, out, count, PIECES: tl.constexpr, BLOCKS: tl.constexpr):
    """Make the digests of `count` pieces, of BLOCKS blocks of 1 KiB each.

    Runs are blocks that lie in memory one after the other. A run ends before block `ends`, counted from the slot's
    first one. Its block n lies at the address `bases` + 1024 n.

    Args:
        numbers: Numbers of the pieces in the slot.
        first: Number of the run in which each of them begins.
        ends: Ends of all runs.
        bases: Addresses of all runs, less that of their first block's place in the slot.
        keys: The table of keys.
        out: For the digests, two words each; the higher one is first.
        count: Number of pieces.
        PIECES: Number of pieces that a program takes.
        BLOCKS: Number of blocks in a piece.
    """
    row = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    lane = tl.arange(0, 8)
    live = row < count
    number = tl.load(numbers + row, mask=live, other=0)
    run = tl.load(first + row, mask=live, other=0)
    base = tl.zeros((PIECES,), tl.int64)
    end = tl.zeros((PIECES,), tl.int64)
    acc = tl.zeros((PIECES, 8), tl.int64) + tl.load(keys + START * 8 + lane)[None, :]
    for b in range(BLOCKS):
        block = number * BLOCKS + b
        turn = live & (block >= end)
        base = tl.where(turn, tl.load(bases + run, mask=turn, other=0), base)
        end = tl.where(turn, tl.load(ends + run, mask=turn, other=0), end)
        run += turn.to(tl.int64)
        words = ((base + block * 1024)[:, None] + lane[None, :] * 8).to(tl.pointer_type(tl.int64))
        own = tl.zeros((PIECES, 8), tl.int64)
        cross = tl.zeros((PIECES, 8), tl.int64)  # each column has the words that its neighbour gets
        for s in tl.static_range(16):
            word = tl.load(words + s * 8, mask=live[:, None], other=0)
            key = s
            if s == 15:  # the last stripe of a piece has a key of its own
                key = tl.where(b == BLOCKS - 1, LAST_KEY, 15)
            x = word ^ tl.load(keys + key * 8 + lane)[None, :]
            own += (x & 0xFFFFFFFF) * shift_right(x, 32)
            cross += word
        even, odd = tl.split(tl.reshape(cross, (PIECES, 4, 2)))
        acc += own + tl.reshape(tl.join(odd, even), (PIECES, 8))
        if b != BLOCKS - 1:
            acc = (acc ^ shift_right(acc, 47) ^ tl.load(keys + SCRAMBLE_KEY * 8 + lane)[None, :]) * 0x9E3779B1
    tl.store(out + row * 2, fold_half(acc, keys, HIGH_KEY, 1, PIECES), mask=live)
    tl.store(out + row * 2 + 1, fold_half(acc, keys, LOW_KEY, 0, PIECES), mask=live)
