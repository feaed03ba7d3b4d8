"""What a training process maps of the copies: only what it fills."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
from training import Training

from gemini_hpc.core import placement
from gemini_hpc.devcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

Train = Callable[..., Training]


def mapped(cluster: Cluster, node: str) -> Counter[int]:
    """Shards of which the training process on a node has slots mapped, with the number of slots."""
    found = r"for p in $(pgrep -f '^[^ ]*python[^ ]* .*train_gpt[.]py'); do cat /proc/$p/smaps; done"
    text = cluster.exec(node, ["bash", "-c", found]).stdout
    names = set(re.findall(r"/memfd:gemini:(\S+)", text))
    assert not {name for name in names if name.startswith("guest:")}, names
    return Counter(int(name.split(":")[1]) for name in names if name.startswith("default:"))


def test_a_rank_maps_only_what_it_fills(train: Train) -> None:
    """Also after a recovery in which it has read every shard of the job."""
    job = train("mapped", "--gemini-replicas=2")
    job.reach(10)
    job.cluster.cut_power(job.hosts()[1])
    job.wait("recovery", lambda: any(line["restart"] == 1 for line in job.steps()), 90)
    job.reach(max(line["step"] for line in job.steps()) + 4)
    found = {node: mapped(job.cluster, node) for node in job.hosts()}
    by_holder = [set(placement.list_homes(r, 3, 2)) for r in range(3)]
    assert sorted(sorted(c) for c in found.values()) == sorted(sorted(s) for s in by_holder), found
    assert all(slots == 2 for c in found.values() for slots in c.values()), found
