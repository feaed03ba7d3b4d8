"""A job's share of this node, read in root's prolog: slurmd reports the job's part, slurm.conf the whole."""

from __future__ import annotations

from gemini_hpc.core import node_share
from gemini_hpc.core.node_share import Share
from gemini_hpc.node import slurm_conf as conf


def compute_share(slurm_conf: str, node: str, nodelist: str, cpus: str, gpus: str) -> Share:
    """Return a job's share of the node; the whole node if the share cannot be known.

    Args:
        slurm_conf: Path of slurm.conf.
        node: See `core.node_share.compute_share`.
        nodelist: See `core.node_share.compute_share`.
        cpus: See `core.node_share.compute_share`.
        gpus: See `core.node_share.compute_share`.

    Raises:
        OSError: A file could not be read.
    """
    if not cpus or not slurm_conf:
        return node_share.WHOLE
    return node_share.compute_share(
        node_share.parse_shape(conf.read_text(slurm_conf), node), node, nodelist, cpus, gpus
    )
