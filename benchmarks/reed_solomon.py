"""What Reed-Solomon parity costs an agent's processors, as `benchmarks.parity` has it of the exclusive or."""

from __future__ import annotations

from benchmarks import parity
from benchmarks.bench import MeasureError, Options
from benchmarks.rows import Row, median_row
from gemini_hpc.agent.replicas import galois

DATA, BLOCKS = 4, 2  # rs:4+2


def measure(options: Options) -> list[Row]:
    """All rows of the family: shards of 256 MiB, groups of six that may lose two. Raises MeasureError."""
    if galois.load_library() is None:
        raise MeasureError(f"{galois.LIBRARY} is not installed: make deps-site")
    ratios, encoded, decoded = parity.measured(options, "rs", DATA + BLOCKS, BLOCKS)
    what = "folding five members' bytes into parity of two blocks (4+2): speed against NumPy's xor of the same bytes"
    again = "one of two lost shards made again of what is here, digest included"
    return [
        median_row("rs.encode_ratio", what, "x", ratios),
        median_row("rs.encode_gbps", "the same: bytes folded in", "GB/s", encoded),
        median_row("rs.decode_gbps", again, "GB/s", decoded),
    ]
