"""Which failure domains the coordinator knows of, what a plan makes of them, and hostile plans."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from gemini_hpc.agent.peers import failure_domains
from gemini_hpc.agent.peers.failure_domains import FailureDomains
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.round_events import Decide
from gemini_hpc.agent.peers.round_plan import JobFacts, make_plan
from gemini_hpc.core.domains import MAX_SHARED, Separation, Shared
from gemini_hpc.core.placement import AS_RANKED, PlacementOrder
from gemini_hpc.core.views import View
from gemini_hpc.wire import peer
from gemini_hpc.wire.local import Attach
from gemini_hpc.wire.stored import Tier

from .test_agreed_map import record

HOSTS = ("n1", "n2", "n3", "n4")


def look(setting: str) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    domains = FailureDomains(setting, said.append)
    for _ in range(2):
        asyncio.run(domains.read_domains(HOSTS))
    return dict(domains.by_host), said


def test_the_sites_file(tmp_path: Path) -> None:
    (tmp_path / "racks").write_text("n[1-2] rack1\nn[3-9] rack2\n")
    found, said = look(str(tmp_path / "racks"))
    assert found == {"n1": "rack1", "n2": "rack1", "n3": "rack2", "n4": "rack2"} and not said


def test_slurms_own_where_the_site_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = str(tmp_path / "etc"), str(tmp_path / "run")
    monkeypatch.setattr(failure_domains, "SLURMS", paths)
    assert look("") == ({}, [])
    Path(paths[1]).write_text("SwitchName=leaf1 Nodes=n[1-4]\n")
    assert look("")[0]["n4"] == "leaf1"
    assert look("none") == ({}, [])


@pytest.mark.parametrize(
    ("text", "sentence"), [(None, "No such file or directory"), ("n1", "line 1: wanted NODES DOMAIN")]
)
def test_a_file_that_cannot_be_used_is_told_once(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "racks"
    if text is not None:
        path.write_text(text)
    found, said = look(str(path))
    assert not found and len(said) == 1 and sentence in said[0] and str(path) in said[0]


def test_a_file_system_that_is_away_holds_no_round_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(failure_domains, "LOOK_S", 0.05)
    monkeypatch.setattr(asyncio, "to_thread", never)
    assert look("/net/racks") == (
        {},
        [
            "failure domains are not known, so nodes side by side hold each other's copies: "
            "/net/racks could not be read within 0.05 s"
        ],
    )


def planned(domains: dict[str, str], replicas: int = 2) -> peer.PlanDown:
    """Of the first round of a job on n1 to n4."""
    facts = JobFacts(Attach(7, 0, "n[1-4]", "n1", replicas), View(HOSTS), domains)
    return make_plan(facts, Decide(1, "", tuple(map(record, HOSTS)), search=True), (), (), Tier())[0]


def test_a_plan_keeps_racks_apart() -> None:
    racks = {"n1": "rack1", "n2": "rack1", "n3": "rack2", "n4": "rack2"}
    plan = planned(racks)
    assert plan.noderanks == {"n1": 0, "n2": 1, "n3": 2, "n4": 3}
    assert (plan.order, plan.domains) == ((0, 2, 1, 3), Separation(4))
    assert plan.map_hash != planned({}).map_hash, "agents that disagree do not agree on the map"
    assert (planned({}).order, planned({}).domains) == ((), None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=peer.PlanDown) == plan


def test_a_plan_says_what_it_could_not_keep_apart() -> None:
    plan = planned({"n2": "rack1", "n3": "rack1", "n4": "rack1"})
    assert plan.domains == Separation(3, (Shared("rack1", ("n3", "n4")),))


@pytest.mark.parametrize(
    "changes",
    [
        {"order": [0, 1]},
        {"order": [0, 0, 1, 2]},
        {"order": [0, 1, 2, 4]},
        {"order": [0, -1, 1, 2]},
        {"order": [1 << 40, 0, 1, 2]},
        {"domains": {"known": -1}},
        {"domains": {"known": 1, "shared": [{"domain": "r" * 999, "hosts": []}]}},
        {"domains": {"known": 1, "shared": [{"domain": "r", "hosts": []}] * (MAX_SHARED + 1)}},
        {"domains": {"known": 1, "shared": [{"domain": "r", "hosts": ["n"] * 999}]}},
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    plan = msgspec.to_builtins(planned({}))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plan | changes, type=peer.PlanDown)


def test_an_order_of_other_nodes_is_not_used() -> None:
    here = Membership()
    here.placed = PlacementOrder((1, 0))
    assert here.nodes == 1 and here.order is AS_RANKED
