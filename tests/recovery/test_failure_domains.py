"""A whole rack loses its power at once: the job comes back from memory where it is known which nodes are in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from harness import LiteJob

from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.devcluster.layout import ClusterFiles

pytestmark = pytest.mark.cluster

Lite = Any
TOPOLOGY = """\
SwitchName=rack1 Nodes=n[1-2]
SwitchName=rack2 Nodes=n[3-4]
SwitchName=rack3 Nodes=n[5-7]
SwitchName=spine Switches=rack[1-3]
"""


@pytest.fixture
def topology(cluster: Cluster) -> Iterator[None]:
    """Slurm's own file, as it lies on every node."""
    path = ClusterFiles(cluster.name).slurm_etc / "topology.conf"
    path.write_text(TOPOLOGY)
    yield
    path.unlink()


def lose_rack2(job: LiteJob) -> None:
    job.reach(10)
    assert job.hosts() == ["n1", "n2", "n3", "n4"]
    for node in ("n3", "n4"):
        job.cluster.cut_power(node)
    job.finish()
    assert not {"n3", "n4"} & set(job.hosts())


def picture(job: LiteJob) -> tuple[dict[str, Any], str]:
    said = [job.cluster.run(["gemini-hpc", "inspect", str(job.id), *more], user="alice") for more in (["--json"], [])]
    return json.loads(said[0].stdout), said[1].stdout


def test_a_rack_is_lost(lite: Lite, topology: None) -> None:
    job = lite(nodes=4)
    job.reach(5)
    before = {line["rank"]: line["node_rank"] for line in job.lines("resumed", 0)}
    document, text = picture(job)
    groups = {node["host"]: node["group"] for node in document["nodes"]}
    assert groups["n1"] == groups["n3"] != groups["n2"] == groups["n4"]
    assert before == {0: 0, 1: 1, 2: 2, 3: 3}, "ranks are where Slurm has them"
    assert document["domains"] == {"known": 4, "shared": [], "more": 0}
    assert "no group has two nodes of one" in text
    lose_rack2(job)
    assert job.repeated(1) in (0, 1) and job.resumed(1) > 0, job.story()
    assert {line["rank"]: line["node_rank"] for line in job.lines("resumed", 1)} == before


@pytest.mark.long
def test_a_rack_is_lost_of_which_nobody_knows(lite: Lite) -> None:
    job = lite(nodes=4)
    job.reach(5)
    assert picture(job)[0]["domains"] is None
    lose_rack2(job)
    assert job.resumed(1) == 0, job.story()


def test_where_all_nodes_are_in_one_rack_that_is_told(lite: Lite, topology: None) -> None:
    job = lite(nodes=2, options=("-w", "n3,n4"))
    job.reach(5)
    document, text = picture(job)
    assert document["domains"]["shared"] == [{"domain": "spine.rack2", "hosts": ["n3", "n4"]}]
    assert "n3 and n4 share spine.rack2" in text
    job.finish()
