"""`python -m tests.train.digest_program interpret|compile`: the kernel of a device's digests, by Triton itself.

interpret   its digests are xxhash's, of tensors of many types and lengths (TRITON_INTERPRET=1)
compile     it compiles for two generations of GPUs; no GPU is needed for that
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import xxhash

from benchmarks import gpudigest
from gemini_hpc.core.digest import PIECE_BYTES

from .slot_of import slot_of

TYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def interpret() -> None:
    """Fails where a digest differs."""
    torch.manual_seed(3)
    sizes = [300_001, 1, 77_777, 131_073, 511, 1_100_003, 65, 0]
    tensors = [(torch.randn(size) * 50).to(kind) for size, kind in zip(sizes, TYPES, strict=True)]
    tensors += [torch.empty(1_500_000, dtype=torch.uint8).random_(), torch.zeros(3 * PIECE_BYTES // 4)]
    placed, slot = slot_of(12_288, tensors)
    made = gpudigest.PieceDigests(placed, torch.device("cpu"))
    assert made.numbers == tuple(range(1, slot.numel() // PIECE_BYTES)) and len(made.numbers) > 12, made.numbers
    pieces = slot.split(PIECE_BYTES)
    right = [xxhash.xxh3_128_digest(pieces[number].numpy()) for number in made.numbers]
    assert gpudigest.read_digests(made.begin()) == right  # in one launch: each takes half a minute


def compiled() -> None:
    """Fails where Triton or the assembler does, or registers spill into memory."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.gpudigest_kernel import digest_pieces

    cuobjdump, here = Path(nvidia.__path__[0]) / "bin" / "cuobjdump", Path(tempfile.mkdtemp(dir="."))
    types = dict.fromkeys(("numbers", "first", "ends", "bases", "keys", "out"), "*i64")
    types |= {"count": "i32", "PIECES": "constexpr", "BLOCKS": "constexpr"}
    sizes = {"PIECES": 16, "BLOCKS": PIECE_BYTES // gpudigest.BLOCK_BYTES}
    for architecture in (80, 90):
        made = triton.compile(
            ASTSource(digest_pieces, types, sizes),
            target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": 4},
        )
        (here / "kernel.cubin").write_bytes(made.asm["cubin"])
        told = subprocess.check_output([cuobjdump, "-res-usage", here / "kernel.cubin"], text=True)
        assert "STACK:0" in told and "LOCAL:0" in told, told


if __name__ == "__main__":
    {"interpret": interpret, "compile": compiled}[sys.argv[1]]()
    print("right")
