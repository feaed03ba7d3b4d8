"""A job's share of a node, from what slurmd tells of the job and slurm.conf of the node."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_hpc.core import node_share
from gemini_hpc.core.node_share import WHOLE, Shape, Share
from gemini_hpc.node import share

CONF = """\
ClusterName=north
NodeName=DEFAULT Sockets=2 CoresPerSocket=32 ThreadsPerCore=2 RealMemory=500000
NodeName=c[1-4]   # 128 threads
nodename=g[1-2] Gres=gpu:a100:4(S:0-1),gpu:v100:2,shard:8 \\
    CoreSpecCount=2
NodeName=plain CPUs=64 Sockets=1 CoresPerSocket=1 ThreadsPerCore=1 Weight=2
NodeName=odd[1-3 CPUs=1
PartitionName=all Nodes=ALL
"""


def test_what_jobs_can_have_of_a_node() -> None:
    shapes = {node: node_share.parse_shape(CONF, node) for node in ("c3", "g2", "plain", "elsewhere", "odd1")}
    assert shapes == {
        "c3": Shape(64),  # a job with one thread a core has all of it
        "g2": Shape(62, 6),
        "plain": Shape(64),
        "elsewhere": Shape(),
        "odd1": Shape(),
    }
    assert node_share.parse_shape(
        "NodeName=n1 CPUs=128 Boards=1 SocketsPerBoard=2 CoresPerSocket=32 ThreadsPerCore=2", "n1"
    ) == (Shape(64))
    assert node_share.parse_shape("NodeName=n1 CPUs=64 Sockets=2 CoresPerSocket=32 ThreadsPerCore=2", "n1") == Shape(
        64
    )
    assert node_share.parse_shape("NodeName=n1 Procs=8 Gres=gpu", "n1") == Shape(8, 1)
    assert node_share.parse_shape("NodeName=n1", "n1") == Shape()


def test_the_larger_part_counts() -> None:
    there = Shape(cpus=64, gpus=8)

    def of(cpus: str, gpus: str = "", node: str = "n3") -> Share:
        return node_share.compute_share(there, node, "n[1-4]", cpus, gpus)

    assert of("4(x2),16,1") == Share(16 / 64, "16 of 64 CPUs")
    assert of("4(x2),16,1", node="n4") == Share(1 / 64, "1 of 64 CPUs")
    assert of("8(x4)", "0,1,2,3") == Share(4 / 8, "4 of 8 GPUs")
    assert of("8(x4)", "0-1,MIG-x") == Share(3 / 8, "3 of 8 GPUs")
    assert of("64(x4)") == of("128(x4)") == of("1(x4)", "0-7") == WHOLE


@pytest.mark.parametrize(
    "cpus", ["", "4", "4(x3)", "x", "4(x4", "-4(x4)", "0(x4)", "99999999999(x4)", "٤(x4)", ",,,"]
)
def test_what_cannot_be_known_is_the_whole(cpus: str) -> None:
    """A count that is missing for this node, or no count."""
    assert node_share.compute_share(Shape(64), "n4", "n[1-4]", cpus, "") == WHOLE


def test_a_node_of_which_nothing_is_known() -> None:
    assert node_share.compute_share(Shape(), "n1", "n1", "1", "") == WHOLE
    assert node_share.compute_share(Shape(64), "n1", "n1", "1", "0") == WHOLE, (
        "GPUs of which slurm.conf knows nothing"
    )
    assert node_share.compute_share(Shape(64), "n9", "n[1-4]", "1(x4)", "") == WHOLE
    assert node_share.compute_share(Shape(64), "n1", "n[1-", "1", "") == WHOLE


def test_slurm_conf_with_what_it_includes(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=north\ninclude nodes.conf\nInclude slurm.conf\n")
    (tmp_path / "nodes.conf").write_text("NodeName=n[1-2] CPUs=16\n")
    assert share.compute_share(str(conf), "n2", "n[1-2]", "4(x2)", "") == Share(0.25, "4 of 16 CPUs")
    assert share.compute_share("", "n2", "n[1-2]", "4(x2)", "") == WHOLE


def test_slurm_conf_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, Path("/dev/null")):
        with pytest.raises(OSError):
            share.compute_share(str(path), "n1", "n1", "1", "")
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)) * 64)
    assert share.compute_share(str(binary), "n1", "n1", "1", "") == WHOLE
