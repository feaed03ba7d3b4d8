"""Copies over NCCL, what needs no two ranks: programs, the own copy's plan, refusals, captured graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core import spans
from gemini_hpc.core.spans import Op, Profile, Trace
from gemini_hpc.train.nccl import joint_planner, platform
from gemini_hpc.train.nccl.collective_schedule import (
    Chunk,
    Place,
    Program,
    Terms,
    build_profiling_program,
    build_program,
    check_alike,
)
from gemini_hpc.train.nccl.exchange import Exchange, Links, Save
from gemini_hpc.train.nccl.launch_log import EnqueuedOperation, LaunchLog, describe_difference, pack
from gemini_hpc.train.nccl.own_copy import OwnCopy, Piecework, list_busy_times, plan_copy
from gemini_hpc.train.nccl.progress import Arrival, Operation, Progress
from gemini_hpc.train.nccl.source import Piece, Tensors

from .fake_device import FakeEvent, Heard, World
from .rings import build_ring


def profile(times: list[tuple[float, float]], length_s: float = 1.0, gate_s: float = 0.9, kind: int = 7) -> Profile:
    ops = tuple(Op(kind + k, 8, start, end) for k, (start, end) in enumerate(times))
    return spans.summarize_traces([Trace(0.0, length_s, gate_s, ops)] * 3)


SHORT = profile([(0.1, 0.2), (0.4, 0.6)])
LONG = profile([(0.2, 0.25), (0.5, 0.6)])


def terms(profiles: tuple[Profile, ...] = (SHORT, LONG), C: int = 1000, m: int = 2, B: float = 2000.0) -> Terms:
    return Terms(profiles, C, m, R=400, p=4, B=B, alpha=0.0, mu=1.0)


def test_a_program_uses_what_all_ranks_have_idle() -> None:
    made = build_program(terms(B=1e9), 1)
    assert {place.after for place in made.places} == {0}  # 0.1 s is enough for all
    narrow = build_program(terms(), 1)
    by_place: dict[Place, int] = {}
    for place, chunk in zip(narrow.places, narrow.chunks, strict=True):
        by_place[place] = by_place.get(place, 0) + chunk.size
    # 0.1 s before the first collective, 0.2 s between the two, 0.3 s before the gate: at 2000 bytes a second
    assert by_place[Place(0, False, 0)] == pytest.approx(200, abs=2)
    assert by_place[Place(0, False, 1)] == pytest.approx(400, abs=2)
    assert by_place[Place(0, False, 2)] == pytest.approx(400, abs=5)
    assert sum(by_place.values()) == 1000


def test_what_does_not_fit_goes_at_the_gate_of_the_last_iteration() -> None:
    made = build_program(terms(C=3000), 1)
    assert made.late_s > 0 and made.places[-1] == Place(0, True, 0)
    spread = build_program(terms(C=3000), 2)
    assert spread.late_s < made.late_s
    assert spread.places[-1].iteration == 1 and any(place.past_gate for place in spread.places[:-1])


@given(
    C=st.integers(0, 5000), m=st.integers(1, 4), s=st.integers(1, 3), B=st.floats(100, 1e6), alpha=st.floats(0, 0.05)
)
def test_programs_are_complete_and_in_order(C: int, m: int, s: int, B: float, alpha: float) -> None:
    made = build_program(Terms((SHORT, LONG), C, m, 400, 4, B, alpha, 0.9), s)
    assert list(made.places) == sorted(made.places)
    assert made == build_program(Terms((SHORT, LONG), C, m, 400, 4, B, alpha, 0.9), s)
    for replica in range(m - 1):
        mine = [c for c in made.chunks if c.replica == replica]
        assert [c.offset for c in mine] == [sum(c.size for c in mine[:i]) for i in range(len(mine))]
        assert sum(c.size for c in mine) == C
    assert all(0 < c.size <= 100 for c in made.chunks)
    assert made.count_due(Place(s - 1, True, 0)) == len(made.chunks)
    assert [c.number for c in made.chunks] == list(range(len(made.chunks)))


def test_ranks_that_differ_are_refused() -> None:
    other = profile([(0.1, 0.2), (0.4, 0.6)], kind=9)
    assert check_alike((SHORT, LONG)) == ""
    assert "same sequence" in check_alike((SHORT, other))
    early = profile([(0.1, 0.2), (0.4, 0.6)], gate_s=0.3)
    assert "same sequence" in check_alike((SHORT, early))  # the optimizer comes between other collectives
    assert check_alike(()) != ""
    with pytest.raises(ValueError, match="same sequence"):
        build_program(terms((SHORT, other)), 1)


def test_while_profiling_everything_goes_at_the_gate() -> None:
    made = build_profiling_program(250, 3, 100)
    assert [(c.replica, c.offset, c.size) for c in made.chunks[:3]] == [(0, 0, 100), (0, 100, 100), (0, 200, 50)]
    assert set(made.places) == {Place(0, True, 0)} and len(made.chunks) == 6


# ---- the own copy --------------------------------------------------------------------------------------


def test_the_own_copy_is_planned_where_the_network_is_busy() -> None:
    assert [b.after for b in list_busy_times(SHORT)] == [0, 1]
    assert [b.length_s for b in list_busy_times(SHORT)] == pytest.approx([0.1, 0.2])
    placed = plan_copy(SHORT, 1000, 100, 1000.0, 1.0)
    sizes = {after: sum(w.size for w in placed if w.after == after) for after in (0, 1, -1)}
    assert sizes[0] == pytest.approx(100, abs=1) and sizes[1] == pytest.approx(200, abs=1)
    assert sum(sizes.values()) == 1000
    assert [w.offset for w in placed] == [sum(w.size for w in placed[:i]) for i in range(len(placed))]
    assert plan_copy(SHORT, 1000, 100, 1e9, 1.0)[-1].after == 0
    with pytest.raises(ValueError, match="more than 0"):
        plan_copy(SHORT, 1000, 100, 0.0, 1.0)


@pytest.mark.parametrize("seed", range(10))
def test_the_own_copy_runs_with_its_collectives_and_holds_the_optimizer(seed: int) -> None:
    world = World(1, seed)
    device = world.devices[0]
    own = OwnCopy(device, device.create_stream())
    source = torch.arange(60, dtype=torch.uint8)
    turned = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()
    area = torch.zeros(120, dtype=torch.uint8)
    seen: list[tuple[str, bool]] = []

    def look(name: str, upto: int) -> None:
        seen.append((name, bool((area[:upto] == source[:upto]).all()) and bool(area[1])))

    work = (Piecework(0, 0, 20), Piecework(1, 20, 20), Piecework(-1, 40, 80))
    tensors = Tensors([Piece(0, source), Piece(64, turned)])
    slot = own.begin_copy(tensors, area, work)
    device.training.put("first", lambda: look("first", 20))
    own.on_launching(0)
    own.on_launching(1)
    own.enqueue_rest()
    device.training.put("optimizer", lambda: look("optimizer", 60))

    def change() -> None:
        source.zero_()

    device.training.put("optimizer", change)
    got = torch.zeros(40, dtype=torch.uint8)
    slot.put(device.create_stream(), got, 20)
    staged = torch.zeros(8, dtype=torch.uint8)
    tensors.put(device.create_stream(), staged, 68)
    own.on_launching(0)  # nothing is left
    world.run()
    assert seen == [("first", False), ("optimizer", True)]
    assert area[:60].tolist() == list(range(60)) and got.tolist() == list(range(20, 60))
    assert torch.equal(area[64:112].view(torch.float32), turned.reshape(-1))
    assert staged.tolist() == area[68:76].tolist()


def test_pieces_must_not_overlap() -> None:
    with pytest.raises(ValueError, match="begins before"):
        Tensors([Piece(0, torch.zeros(8)), Piece(16, torch.zeros(8))])


# ---- refusals ------------------------------------------------------------------------------------------


def test_environments_that_would_hang_are_named() -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in platform.check_environment({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert "CUDA_LAUNCH_BLOCKING" in platform.check_environment({"CUDA_LAUNCH_BLOCKING": "1"})
    assert platform.check_environment({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_LAUNCH_BLOCKING": "0"}) == ""


def test_a_missing_nccl_and_a_library_that_is_none_are_named(tmp_path: Path) -> None:
    none = tmp_path / "libnccl.so.2"
    none.write_bytes(b"no library")
    for paths in ([], [str(none)], ["libc.so.6"]):
        found, reason = platform.load_library(paths)
        assert found is None and "NCCL" in reason


def test_trainings_that_cannot_be_followed_are_named() -> None:
    assert "point to point" in joint_planner.check_operations(["allreduce_", "send", "recv_"])
    assert joint_planner.check_operations(["allreduce_", "_allgather_base_"]) == ""
    assert "CUDA graph" in joint_planner.check_operations(["allreduce_"], captured=True)


# ---- the log of launches -------------------------------------------------------------------------------


def test_logs_that_differ_are_noticed() -> None:
    def word(*launches: int) -> tuple[int, int]:
        log = LaunchLog()
        for launched in launches:
            log.add(EnqueuedOperation(1, 0, False, launched, 0, 0, 0, 8))
        return log.summarize()

    def verdict(*words: tuple[int, int]) -> str:
        return describe_difference([max(column) for column in zip(*map(pack, words), strict=True)])

    assert verdict(word(1, 2), word(1, 2), word(1, 2)) == ""
    assert verdict(word(), word()) == ""
    assert "between 1 and 2" in verdict(word(1, 2), word(1))
    assert "same places" in verdict(word(1, 2), word(1, 3))
    assert "same places" in verdict(word(1, 2), word(2, 1))


# ---- CUDA graphs ---------------------------------------------------------------------------------------


def test_nothing_is_enqueued_or_counted_while_a_graph_is_captured() -> None:
    world = World(1, 0)
    device = world.devices[0]
    links = build_ring(1, 1, [8])
    progress = Progress(world.communicators[0], links.sizes, Heard(), print, clock=world.clock)
    exchange = Exchange(device, world.communicators[0], 0, links, 2, 8, progress)
    exchange.set_program(Program((Place(0, False, 1),), (Chunk(0, 0, 0, 8),), 1, 8, 0.0, 0))
    exchange.step(Save(1, None, None, lambda rank: None))
    device.captured = True  # from here on the fake refuses everything
    exchange.on_launching()
    exchange.on_launched("g", FakeEvent(world.clock, done=True))
    exchange.prepare_for_gate()
    exchange.step(Save(2, None, None, lambda rank: None))
    device.captured = False
    assert exchange.log.count == 0
    device.grouped = True
    exchange.on_launched("g", FakeEvent(world.clock, done=True))
    assert exchange.log.count == 0  # it would be launched when the bracket closes
    device.grouped = False
    exchange.on_launched("g", FakeEvent(world.clock, done=True))
    assert exchange.log.count == 1 and exchange.log.newest[0].launched == 2


# ---- progress ------------------------------------------------------------------------------------------


class Stage:
    """Two operations of one version, each with 8 bytes from rank 1."""

    def __init__(self) -> None:
        self.world = World(1, 0)
        self.heard = Heard()
        self.communicator = self.world.communicators[0]
        self.progress = Progress(self.communicator, (0, 16), self.heard, self.heard.said.append, clock=self.clock)
        self.operations = [
            Operation(5, 8, left, self.mark(), self.mark(), [Arrival(1, 8, self.mark())]) for left in (1, 0)
        ]
        for operation in self.operations:
            operation.ready.reach()  # type: ignore[attr-defined]
            self.progress.record_operation(operation)

    def clock(self) -> float:
        return self.world.now

    def mark(self) -> FakeEvent:
        return FakeEvent(self.clock)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            self.world.now += 0.1
            self.progress.poll_operations()


def test_an_operation_that_waits_for_its_turn_is_left_alone() -> None:
    stage = Stage()
    stage.operations[1].waited = stage.mark()  # the training has not come to it
    stage.wait(60.0)
    assert stage.progress.problem == "" and stage.progress.busy
    stage.operations[1].waited.reach()
    stage.wait(1.0)
    assert stage.progress.problem == ""
    stage.operations[0].done.reach()  # type: ignore[attr-defined]
    stage.wait(1.4)  # something has moved: patience begins anew
    assert stage.progress.problem == ""
    stage.wait(0.5)
    assert "1.5 s" in stage.progress.problem and stage.communicator.aborted
    assert len(stage.heard.said) == 1 and stage.heard.failures == []


def test_slots_are_free_when_the_device_is_past_the_last_copy() -> None:
    stage = Stage()
    stage.progress.fail("the ranks differ")
    stage.wait(1.0)
    assert stage.communicator.aborted and stage.heard.failures == []
    for operation in stage.operations:
        operation.done.reach()  # type: ignore[attr-defined]
        operation.arrivals[0].copied.reach()  # type: ignore[union-attr]
    stage.wait(0.2)
    assert stage.heard.failures == [(5, True)] and stage.heard.landings == [] and not stage.progress.busy


def test_slots_that_the_device_may_still_write_are_given_up() -> None:
    stage = Stage()
    stage.progress.fail("the ranks differ")
    stage.wait(20.0)
    assert stage.heard.failures == [(5, False)] and not stage.progress.busy


def test_what_ended_in_an_error_has_not_landed() -> None:
    stage = Stage()
    stage.communicator.aborted = True  # NCCL says so, the kernels have ended
    for operation in stage.operations:
        operation.done.reach()  # type: ignore[attr-defined]
        operation.arrivals[0].copied.reach()  # type: ignore[union-attr]
    stage.wait(0.3)
    assert stage.heard.landings == [] and stage.heard.sendings == [] and stage.heard.failures == [(5, True)]


def test_the_thread_ends_with_the_training() -> None:
    stage = Stage()
    stage.progress.start()
    for operation in stage.operations:
        operation.done.reach()  # type: ignore[attr-defined]
        operation.arrivals[0].copied.reach()  # type: ignore[union-attr]
    assert stage.progress.stop(30.0)
    assert stage.heard.landings == [(5, 1)] and stage.heard.sendings == [5]


def test_links_of_shards_of_different_sizes() -> None:
    links = Links(((1, 2), (2, 0), (0, 1)), (10, 3, 0))
    assert links.list_sources(0, 0) == [2] and links.list_sources(0, 1) == [1]
    assert [links.count_bytes(rank, Chunk(0, 0, 2, 4)) for rank in range(3)] == [4, 1, 0]
