"""The watch over the training's collectives: ranks on gloo, forked (what they do is in watched.py)."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.dispatch_hooks import Signature
from gemini_hpc.train.schedule.launch_count import GroupWeights

from .launch import Run

pytestmark = pytest.mark.slow

ITERATIONS = 4
GROUP = SimpleNamespace(
    find_backend=lambda device: "gloo", on_network=True, size=2, weights=GroupWeights([], 0, None)
)

Found = list[dict[str, Any]]


def ranks(world: int, *programs: str) -> Found:
    return Run(None, world, {"programs": programs}).wait(120.0)


# One launch for all that leaves its processes as they were: most of a launch is Python and gloo coming up.
PROGRAMS = (
    *("ddp", "sharded", "tensor_parallel", "pipeline", "operations", "hooked", "broken", "spans", "garbage"),
    *("forking", "compiled", "mistakes"),
)


@pytest.fixture(scope="module")
def two() -> Found:
    return ranks(2, *PROGRAMS)


@pytest.fixture(scope="module")
def four() -> Found:
    return ranks(4, "sharded")


def kinds(trace: list[Any]) -> list[int]:
    return [kind for kind, _, _, _ in trace[3]]


@pytest.mark.parametrize(
    ("program", "world", "per_iteration"),
    [
        ("ddp", 2, [4800, 2400, 800]),
        # gathered forward and again backward, scattered backward; the norm that clips is 8 bytes over the shards
        ("sharded", 2, [512, 2048, 2048, 512, 2048, 512, 8]),
        ("sharded", 4, [512, 2048, 2048, 512, 2048, 1024, 512, 256, 8]),
        ("tensor_parallel", 2, [256, 256]),
        ("pipeline", 2, [4000] * 6),
    ],
)
def test_training_is_seen_whole_and_bitwise_as_it_was(
    program: str, world: int, per_iteration: list[int], two: Found, four: Found
) -> None:
    for everything in two if world == 2 else four:
        found = everything[program]
        plain, watched = found["digests"]
        assert plain == watched
        assert found["problem"] == ""
        assert found["quiet"]
        traces = found["traces"]
        assert len(traces) == ITERATIONS
        assert found["counts"] == [len(trace[3]) for trace in traces]
        # the first ones may have more: buckets rebuilt, shapes told
        for trace in traces[2:]:
            assert [size_bytes for _, size_bytes, _, _ in trace[3]] == per_iteration
            assert kinds(trace) == kinds(traces[-1])
        for _, length_s, gate_s, ops in traces:
            assert 0 < gate_s <= length_s
            assert all(0 <= start_s <= end_s <= length_s for _, _, start_s, end_s in ops)
            assert max(end_s for _, _, _, end_s in ops) > 0


def test_collectives_within_a_node_are_counted_but_take_no_time(four: Found) -> None:
    """HSDP: all-gathers and reduce-scatters stay on the node, all-reduces do not."""
    for found in four:
        for _, _, _, ops in found["sharded"]["traces"]:
            busy = [size_bytes for _, size_bytes, start_s, end_s in ops if end_s > start_s]
            assert busy == [1024, 256]


def test_a_pipelines_bubbles_are_idle(two: Found) -> None:
    """Each stage works for 50 ms at a time; 4000 bytes take 10 ms at the bandwidth that was given."""
    for found in two:
        for _, length_s, _, ops in found["pipeline"]["traces"][1:]:
            assert length_s > 0.3
            assert sum(end_s - start_s for _, _, start_s, end_s in ops) < length_s / 2
            assert sum(end_s - start_s > 0.009 for _, _, start_s, end_s in ops) >= 3
            assert len({kind for kind, _, _, _ in ops}) == 2


def test_every_way_to_call_a_collective_is_seen_and_gives_the_same(two: Found) -> None:
    several = {"all_gather_object": 2, "batch_isend_irecv": 2, "behind the dispatcher": 0}
    for found in (everything["operations"] for everything in two):
        assert found["problem"] == ""
        assert len(found["found"]) == 19
        for name, seen in found["found"].items():
            assert seen["same"], name
            assert seen["launched"] == len(seen["ops"]) == several.get(name, 1), name


def test_bytes_and_kinds_of_operations(two: Found) -> None:
    one, other = ({name: seen["ops"] for name, seen in found["operations"]["found"].items()} for found in two)
    assert one["all_reduce"][0][1] == 16
    assert one["all_gather"][0][1] == one["all_gather_into_tensor"][0][1] == 32
    assert one["gather"][0][1] == 32 and other["gather"][0][1] == 16
    assert one["barrier"][0][1] == one["monitored_barrier"][0][1] == 0
    kind = {name: ops[0][0] for name, ops in one.items() if ops}
    assert kind["all_reduce"] == other["all_reduce"][0][0] == kind["all_reduce async"] == kind["functional"]
    # another operation, other ranks, other bytes
    assert len({kind["all_reduce"], kind["barrier"], kind["all_reduce alone"], kind["coalesced"]}) == 4


def test_errors_of_collectives_reach_the_user_as_they_are(two: Found) -> None:
    for rank, found in enumerate(everything["mistakes"] for everything in two):
        plain, asleep, recording = found["found"]
        assert plain == asleep == recording
        assert all(plain[:4])
        assert bool(plain[4]) == (rank == 0)
        assert found["problem"] == ""


def test_hooks_numbers_and_a_second_watch(two: Found) -> None:
    for found in (everything["hooked"] for everything in two):
        assert found["launched"] == 150
        assert found["numbers"] == list(range(152))
        assert found["problem"] == "ValueError: a hook of ours fails"
        assert found["second"] == ""
        # the second one took nothing from the first, and after stop() nothing is seen
        assert found["later"] == [151, 152, 152]
        assert found["kernels"] == [True, False]
        assert found["threads"] == []


def test_whatever_fails_in_the_watch_the_training_goes_on(two: Found) -> None:
    for found in (everything["broken"] for everything in two):
        assert found["problems"] == [["LookupError: no such thing", 1, False]] * 3
        assert found["sums"] == [4.0] * 3


def test_spans_of_a_program_that_sleeps(two: Found) -> None:
    one, other = (everything["spans"] for everything in two)
    for found in (one, other):
        assert found["problem"] == ""
        _, length_s, gate_s, ops = found["trace"]
        first, late, _, last = ops
        assert late[2] - first[3] >= 0.19
        assert last[3] <= gate_s <= length_s - 0.09
    # rank 0 waits for rank 1, and its collective is busy so long
    late = one["trace"][3][1]
    assert 0.25 < late[3] - late[2] < 0.5
    assert other["trace"][3][1][3] - other["trace"][3][1][2] < 0.2
    # a receive waits for 0.4 s, of which it needs the network for 0.1; a send likewise
    for found in (one, other):
        _, size_bytes, start_s, end_s = found["trace"][3][2]
        assert size_bytes == 4_000_000
        assert 0.099 < end_s - start_s < 0.2
    assert one["trace"][3][2][2] - late[3] > 0.4
    assert one["posted"] == 0
    assert (one["counted"], other["counted"]) == ([0, 1], [0, 1])
    assert other["sending"] == 1
    for found in (one, other):
        assert found["numbers"] == [0, 4, 6, 7, 8]
        assert found["reached"] == [False, True, False, True]
        assert found["woken_s"] < 5.0, "who is woken does not wait on"
    assert one["waits"] == [True, False, True, 0]


def test_tensors_of_finished_operations_are_free(two: Found) -> None:
    for found in (everything["garbage"] for everything in two):
        assert found["found"] and all(found["found"].values()), found["found"]
        assert found["problem"] == ""


def test_a_process_that_exits_with_operations_in_flight_ends_as_ever() -> None:
    one, _ = ranks(2, "leaving")
    assert one["leaving"]["in_flight"] == 1


def test_a_fork_leaves_the_watch_alone(two: Found) -> None:
    for found in (everything["forking"] for everything in two):
        assert found["code"] == 0
        assert len(found["ops"]) == 1
        assert found["problem"] == ""


def test_a_compiled_program_is_seen(two: Found) -> None:
    for found in (everything["compiled"] for everything in two):
        assert found["counts"] == [1, 1, 1]
        assert found["sums"] == [15.0] * 3
        assert found["problem"] == ""


def test_what_is_counted_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that looks in the moment when an operation is launched must not take the next span for this one."""
    watch = CollectiveMonitor(lambda ranks: True)
    seen: list[tuple[int, int]] = []

    class Entering:
        """A flight to which the operation is being told."""

        def record_launch(self, *what: Any) -> None:
            seen.append((watch.launched, watch.count_in_flight()))

        def count_waiting(self) -> int:
            return 0

        def count_operations(self) -> int:
            return 0

    monkeypatch.setattr(watch, "_flight", Entering())
    monkeypatch.setattr(watch, "_find_group", lambda boxed: GROUP)
    watch._on_launched(Signature("allreduce_", 0, (), None), (None,), None, 0.0)
    assert seen == [(1, 1)]
    assert (watch.launched, watch.count_in_flight(), watch.problem) == (1, 0, "")


def test_who_waits_for_a_span_hears_of_the_launch_and_not_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """While times are taken, a launch may go on until the operation is over; then the next ones follow at once."""
    watch = CollectiveMonitor(lambda ranks: True)
    told: list[bool] = []
    flight = SimpleNamespace(
        record_launch=lambda *what: told.append(watch._reached.is_set()), count_waiting=lambda: 0
    )
    monkeypatch.setattr(watch, "_flight", flight)
    monkeypatch.setattr(watch, "_find_group", lambda boxed: GROUP)
    watch._wanted = 2
    for _ in range(2):
        watch._on_launched(Signature("allreduce_", 0, (), None), (None,), None, 0.0)
    assert told == [False, True]
    assert watch.problem == ""


@pytest.mark.parametrize(("launched", "usual"), [(2, True), (3, False)])
def test_looks_for_a_span_go_by_what_was_launched_last(
    launched: int, usual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two operations were waited for: they usually take long. If there are three by now, that says nothing."""
    watch = CollectiveMonitor(lambda ranks: True)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    flight = SimpleNamespace(
        count_operations=lambda: 0,
        is_newest_busy=lambda: len(waits) < 3,
        count_waiting=lambda: 0,
        due_s=0.0,
        ended_s=0.0,
    )
    monkeypatch.setattr(watch, "_flight", flight)
    monkeypatch.setattr(watch._reached, "wait", wait)
    watch._took_s[2] = 1000.0
    watch._launched, watch._launched_at = launched, time.monotonic()
    assert watch.wait_span(2, 60.0)
    assert all((seconds > 10.0) == usual for seconds in waits) and len(waits) == 3
    assert watch._took_s[launched] == 0.0, "what these took is known from now on"
