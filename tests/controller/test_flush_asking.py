"""Which agents `gemini-hpc flush` asks, one after the other, and what it says where none can do it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc import slurm
from gemini_hpc.config import Settings
from gemini_hpc.core.slots import Stamp
from gemini_hpc.query import ask
from gemini_hpc.wire.flush import Flushing
from gemini_hpc.wire.inspect_schema import JobAnswer
from gemini_hpc.wire.link import LinkClosed

DONE = Flushing("default", Stamp(1, 5), over=True, where="/tier")


class World:
    """A job's nodes, the hosts that the controller knows (None: it does not answer), and what each agent says."""

    def __init__(self, nodes: str, says: dict[str, Flushing], known: str | None = None) -> None:
        self.nodes, self.says, self.known = nodes, says, known
        self.asked: list[str] = []
        self.ended = False

    async def allocation(self, settings: Settings, raw_id: int) -> ask.Allocation:
        job: Any = SimpleNamespace(user_id=1000, has_ended=self.ended, raw_id=7, state="FAILED")
        return ask.Allocation(settings, job, await self.addresses(self.nodes))

    async def addresses(self, hosts: Any) -> dict[str, Any]:
        return {host: SimpleNamespace(address=f"at {host}") for host in hosts}

    async def flush_at(self, of: ask.Allocation, name: str, told: Any) -> Any:
        assert (of.job.raw_id, of.job.user_id, of.nodes[name].address) == (7, 1000, f"at {name}")
        self.asked.append(name)
        return [self.says[name]] if name in self.says else []

    def line(self, settings: Settings, job: int) -> Any:
        if self.known is None:
            raise ask.NoControllerError("ctl:1: Connection refused")
        parts = tuple(SimpleNamespace(host=host.lower(), restart=int(host.islower())) for host in self.known)
        return SimpleNamespace(ask=lambda job: SimpleNamespace(parts=parts), close=lambda: None)


def flushed(world: World, monkeypatch: pytest.MonkeyPatch) -> list[Flushing]:
    monkeypatch.setattr(ask, "_read_allocation", world.allocation)
    monkeypatch.setattr(ask, "_flush_at", world.flush_at)
    monkeypatch.setattr(ask, "ControllerLine", world.line)
    monkeypatch.setattr(slurm.Slurm, "read_nodes", lambda _, hosts: world.addresses(hosts))
    return ask.flush(Settings(), 7, lambda word: None)


def to(host: str) -> Flushing:
    return Flushing(over=True, root=host)


@pytest.mark.parametrize(
    ("says", "asked"),
    [
        ({"a": DONE}, "a"),
        ({"b": DONE}, "ab"),
        ({"b": to("a"), "c": DONE}, "abc"),
        ({"a": to("c"), "c": DONE}, "ac"),
        ({"a": to("c"), "b": to("c"), "d": DONE}, "acbd"),
        ({"a": to("elsewhere"), "b": DONE}, "ab"),
    ],
)
def test_one_after_the_other_until_one_has_done_it(
    says: dict[str, Flushing], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("abcd", says)
    assert flushed(world, monkeypatch) == [DONE]
    assert world.asked == list(asked)


def test_nobody_can(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("abc", {"b": to("a"), "c": to("b")})
    with pytest.raises(ask.QueryError, match="job 7: the save is led by the agent on a, which does not answer"):
        flushed(world, monkeypatch)
    assert world.asked == ["a", "b", "c"]
    world = World("abc", {})
    with pytest.raises(ask.QueryError, match="job 7: no agent answers"):
        flushed(world, monkeypatch)
    assert world.asked == ["a", "b", "c"]
    world.ended = True
    with pytest.raises(ask.QueryError, match=r"job 7: it has ended \(FAILED\), and no agent holds copies of it"):
        flushed(world, monkeypatch)


def test_a_job_without_nodes_has_its_agents_where_the_controller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upper case: one that is left over of an earlier life."""
    world = World("", {"c": DONE, "a": Flushing("default", Stamp(1, 2), over=True)}, known="cAb")
    assert flushed(world, monkeypatch) == [DONE]
    assert world.asked == ["b", "c"]
    monkeypatch.setattr(ask, "_AGAIN_S", 0.01)
    with pytest.raises(ask.QueryError, match="no nodes now, and none of its agents is connected to the controller"):
        flushed(World("", {}, known=""), monkeypatch)
    with pytest.raises(ask.QueryError, match="only the controller knows its former nodes: ctl:1: Connection refused"):
        flushed(World("", {}), monkeypatch)


def test_slurm_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: Any) -> Any:
        raise slurm.SlurmRefused("timed out")

    world = World("", {}, known="a")
    monkeypatch.setattr(world, "addresses", silent)
    empty = ask.Allocation(Settings(), SimpleNamespace(), {})  # type: ignore[arg-type]
    monkeypatch.setattr(World, "allocation", lambda *_: asyncio.sleep(0, empty))
    with pytest.raises(ask.QueryError, match="Slurm does not answer: timed out"):
        flushed(world, monkeypatch)


def test_an_agent_that_dies_over_a_set_has_not_saved_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 0 says that every set is on the tier."""
    said = [DONE, Flushing("other", Stamp(1, 4), 1000), Flushing("other", Stamp(1, 4), 2000)]

    class Link:
        def send(self, message: object) -> None:
            pass

        async def receive(self) -> Flushing:
            if not said:
                raise LinkClosed("connection reset")
            return said.pop(0)

        def abort(self) -> None:
            pass

    async def connect(*_: object) -> tuple[Link, int]:
        return Link(), 0

    monkeypatch.setattr(ask, "connect_any", connect)
    heard: list[Flushing] = []
    job: Any = SimpleNamespace(raw_id=7, user_id=1000)
    nodes: Any = {"a": SimpleNamespace(address="at a")}
    over = asyncio.run(ask._flush_at(ask.Allocation(Settings(), job, nodes), "a", heard.append))
    assert [(word.training, word.reason) for word in over] == [
        ("default", ""),
        ("other", "the agent on a closed the connection before the version was on the tier"),
    ]
    assert len(heard) == 3


def test_a_watch_outlives_a_line_that_the_controller_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs up on who is silent for a minute, and is started anew at times."""
    made: list[int] = []

    class Line:
        def __init__(self, settings: Settings, job: int) -> None:
            made.append(job)
            self.asked = 0

        def ask(self, job: int) -> JobAnswer:
            self.asked += 1
            if self.asked > 1:
                raise ask.NoControllerError("connection closed in mid-frame")
            return JobAnswer(slurm={"state": "PENDING"})

        def close(self) -> None:
            pass

    monkeypatch.setattr(ask, "ControllerLine", Line)
    source = ask.AnswerSource(Settings())
    assert [source.ask(7)[1] for _ in range(3)] == [None] * 3
    assert made == [7, 7, 7]
