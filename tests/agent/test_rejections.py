"""What one agent knows of versions that ranks have rejected, and of versions that they want kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.replicas.pledges import Pledged, Pledges, Wish
from gemini_hpc.agent.replicas.rejections import MOST, Rejections
from gemini_hpc.agent.tier.keeps import MAX_WISHES, NamedVersions
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.views import View
from gemini_hpc.wire import peer
from gemini_hpc.wire.local import Attach

from .contexts import made_context


class Agent:
    """Of an agent what these two ask for: `n1` in round 3, below `n0` and above `n2`, unless it is the root."""

    def __init__(self, directory: Path, *, root: bool = False) -> None:
        self.epoch = 5
        self.sent: list[tuple[str, Any]] = []
        self.events: list[str] = []
        pledges = Pledges(str(directory))
        self.rejections = Rejections(pledges, self.log)
        self.tier = SimpleNamespace(directory="/tier")
        rounds: Any = SimpleNamespace(stage="live", round=3, parent=None if root else "n0", children=("n2",))
        attach, view, unused = Attach(7, 0, "n[0-2]", "n1", 2), View(("n0", "n1", "n2")), cast(Any, None)
        mesh: Any = SimpleNamespace(send=self.send)
        membership = Membership()
        membership.incarnation = Incarnation(attach, view, mesh, rounds, unused)
        context = made_context(membership, log=self.log)
        self.keeps = NamedVersions(context, pledges, self.rejections, cast(Any, self.tier), on_waiting=lambda: None)

    def send(self, host: str, message: Any) -> bool:
        self.sent.append((host, message))
        return True

    def log(self, name: str, *, version: int = 0, detail: str = "", t: float | None = None) -> None:
        self.events.append(name)

    def reject(self, number: int, *, fresh: bool = False) -> str:
        training: Any = SimpleNamespace(name="default", chosen=Stamp(2, number))
        return self.rejections.reject(training, self.epoch, "NaN", fresh=fresh)


def test_it_is_on_disk_and_all_ranks_of_a_node_are_one(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    assert agent.reject(7) == agent.reject(7) == "" and agent.events == ["rejected"]
    for known in (agent, Agent(tmp_path)):
        assert [r.covers("default", s) for r in known.rejections.all for s in ((2, 6), (2, 7), (5, 99), (6, 7))] == [
            False,
            True,
            True,
            False,
        ]
        assert not known.rejections.all[0].covers("other", (2, 7))
        assert known.rejections.list_sentences("default") == ("version 7 was rejected: NaN",)
    assert Agent(tmp_path / "elsewhere").rejections.all == ()


def test_three_times_and_then_only_anew(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    for number in range(MOST):
        assert agent.reject(20 - number) == ""
        agent.epoch += 1
    assert "3 earlier versions were rejected too" in agent.reject(5) and len(agent.rejections.all) == MOST
    assert not agent.rejections.is_rejected("default", Stamp(2, 5)) and not agent.rejections.may_start_over("default")
    assert agent.reject(5, fresh=True) == ""
    assert agent.rejections.is_rejected("default", Stamp(1, 1)) and agent.rejections.may_start_over("default")
    assert not agent.rejections.is_rejected("default", Stamp(agent.epoch + 1, 1)), "what begins anew is none of it"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"wishes": [{"training": "../x"}]}', b"\xff", b"\0" * 100])
def test_a_file_that_is_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "pledges").write_bytes(text)
    assert Pledges(str(tmp_path)).now == Pledged()


def test_a_file_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    wishes = b'"wishes":[{"training":"default","name":"a","version":7}]'
    rejections = b'"rejections":[{"training":"default","low":[1,3],"high":[1,5]}]'
    (tmp_path / "pledges").write_bytes(b"{" + wishes + b"," + rejections + b"}")
    now = Pledges(str(tmp_path)).now
    assert now.wishes == (wish("a", 7),) and now.rejections[0].covers("default", Stamp(1, 4))


def wish(name: str, number: int) -> Wish:
    return Wish("default", name, number)


def test_a_wish_goes_up_until_it_is_done(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    up = peer.KeepWish(3, "default", "a", 7)
    assert agent.keeps.ask(wish("a", 7)) == agent.keeps.ask(wish("a", 7)) == ""
    assert agent.sent == [("n0", up)] and Agent(tmp_path).keeps.wishes == (wish("a", 7),)
    agent.keeps.on_message("n0", up)
    assert agent.sent[1:] == [("n2", up)], "the root knows, and so do all"
    done = peer.KeepDone(3, "default", "a", 7, (5, 8))
    agent.keeps.on_message("n0", done)
    assert agent.sent[2:] == [("n2", done)] and agent.keeps.wishes == () and agent.keeps.ask(wish("a", 7)) == ""
    assert "version 7 already has this name" in agent.keeps.ask(wish("a", 9))
    agent.keeps.on_message("n2", up)
    assert agent.sent[3:] == [("n2", done)], "it had not heard"
    agent.keeps.on_message("n2", peer.KeepWish(2, "default", "b", 7))
    agent.keeps.on_message("n9", peer.KeepWish(3, "default", "b", 7))
    assert agent.keeps.wishes == () and len(agent.sent) == 4, "of another round, of no child"


def test_of_two_versions_for_one_name_the_roots_counts(tmp_path: Path) -> None:
    root, other = Agent(tmp_path / "root", root=True), Agent(tmp_path / "other")
    assert root.keeps.ask(wish("a", 7)) == other.keeps.ask(wish("a", 9)) == ""
    root.keeps.on_message("n2", peer.KeepWish(3, "default", "a", 9))
    answer = root.sent[-1][1]
    assert answer == peer.KeepWish(3, "default", "a", 7)
    other.keeps.on_message("n0", answer)
    assert other.keeps.wishes == root.keeps.wishes == (wish("a", 7),)
    root.keeps.record_names("default", Stamp(5, 8), {"a": (7, (5, 8))})
    assert (
        root.keeps.wishes == ()
        and root.events[-1] == "kept"
        and root.keeps.list_given_names("default") == (("a", (5, 8)),)
    )


def test_a_name_that_is_taken_on_the_tier(tmp_path: Path) -> None:
    root = Agent(tmp_path, root=True)
    assert root.keeps.ask(wish("a", 7)) == ""
    root.keeps.record_names("default", Stamp(5, 8), {"a": (3, (1, 3))})
    assert root.keeps.wishes == () and root.events[-1] == "not_kept" and root.keeps.list_given_names("default") == ()
    assert "another version already has this name" in root.keeps.ask(wish("a", 7))


def test_only_so_many_wait(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    assert not any(agent.keeps.ask(wish(f"w{n}", n)) for n in range(MAX_WISHES))
    assert f"{MAX_WISHES} versions already wait" in agent.keeps.ask(wish("more", 1))
    assert agent.keeps.find_due_names("default", Stamp(5, 2)) == {"w0": 0, "w1": 1, "w2": 2}
    agent.tier.directory = ""
    assert "the job has no tier" in agent.keeps.ask(wish("w1", 1))
