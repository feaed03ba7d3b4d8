"""When a chunk may go, by a training that is played back on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.modellink import ModelLink
from gemini_hpc.train.schedule import pacer as pacer_module
from gemini_hpc.train.schedule.chunk_schedule import Timetable, Window
from gemini_hpc.train.schedule.pacer import PROBE_BYTES, Pacer
from gemini_hpc.wire import grant_page
from gemini_hpc.wire.grant_page import Grant

B, ALPHA, SIZE = 1e5, 0.001, 100  # a chunk takes 2 ms
FIRST, SECOND = Window(0, 2, False, 0.0, 0.010), Window(0, 3, False, 0.0, 0.010)


class Played:
    """Collective k is on the network from `ops[k][0]` to `ops[k][1]`. Each question takes `asking_s`."""

    def __init__(self, ops: list[tuple[float, float]], asking_s: float = 0.0) -> None:
        self.now, self._ops, self._asking_s = 0.0, ops, asking_s
        self.waits: list[int] = []

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False

    def _ask(self) -> float:
        now, self.now = self.now, self.now + self._asking_s
        return now

    @property
    def launched(self) -> int:
        now = self._ask()
        return sum(start <= now for start, _ in self._ops)

    def count_in_flight(self) -> int:
        now = self._ask()
        return sum(start <= now < end for start, end in self._ops)

    def find_place(self) -> None:
        return None

    def find_quiet_start(self) -> float:
        return max((end for _, end in self._ops if end <= self.now), default=0.0)

    def wait_span(self, after: int, timeout_s: float) -> bool:
        self.waits.append(after)
        until = self.now + timeout_s
        while self.launched < after or self.count_in_flight():
            self.now += 0.001
            if self.now > until:
                return False
        return True

    def wait_launch(self, after: int, timeout_s: float) -> bool:
        until = self.now + timeout_s
        while self.launched <= after:
            self.now = min(until, self.now + 0.0001)
            if self.now >= until:
                return False
        return True

    def wake(self) -> None:
        self.waits.append(-1)


Make = Callable[..., Pacer]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    def pacer(played: Played, *chunks: tuple[int, int]) -> Pacer:
        made = Pacer(SIZE, 4, clock=played.clock)
        monkeypatch.setattr(made._hurry, "wait", played.wait)
        made.traffic = played
        made.timetable = Timetable((FIRST, SECOND), (chunks,), 1, 10.0, B, ALPHA)
        made.begin_iteration(7)
        made.begin_version(7)
        return made

    return pacer


def test_a_chunk_waits_for_its_span(make: Make) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    make(played, (0, SIZE)).wait_for_turn(0, 0, SIZE, lambda: 0)
    assert 0.05 <= played.now < 0.055
    assert set(played.waits) == {-1, 2}, "woken for a new iteration, and waiting for two collectives"


def test_what_does_not_fit_any_more_goes_in_the_next_span(make: Make) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    played.now = 0.0585  # 1.5 ms of the first span are left
    pacer = make(played, (0, SIZE))
    pacer.wait_for_turn(0, 0, SIZE, lambda: 0)
    assert 0.10 <= played.now < 0.105
    assert pacer.spilled_bytes == 0


def test_what_is_not_yet_acknowledged_counts(make: Make) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    played.now = 0.051
    make(played, (0, SIZE)).wait_for_turn(0, 0, SIZE, lambda: 10 * SIZE)
    assert played.now >= 0.07, "10 chunks on their way leave no room in 9 ms"


def test_what_has_been_acknowledged_makes_room_again_in_the_same_span(make: Make) -> None:
    """Acknowledgements that come late make the backlog look too long: the next one counts, not the next span."""
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    played.now = 0.051
    backlog = 10 * SIZE
    pacer = make(played, (0, SIZE))

    def wait_span(after: int, timeout_s: float) -> bool:
        nonlocal backlog
        played.waits.append(after)
        played.now, backlog = 0.053, 0
        pacer.record_ack(0, 10 * SIZE, 0.05)
        return False

    played.wait_span = wait_span  # type: ignore[method-assign]
    pacer.wait_for_turn(0, 0, SIZE, lambda: backlog)
    assert played.now == 0.053
    assert played.waits[-2:] == [3, -1], "it waits for the next span, and is woken for the acknowledgement"
    pacer.record_ack(0, SIZE, 0.053)
    assert played.waits[-1] == -1 and len(played.waits) == 3, "only who waits for room is woken"


def test_an_acknowledgement_between_look_and_wait_is_not_missed(make: Make) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    played.now = 0.051
    backlogs = iter([10 * SIZE, 0, 0])
    make(played, (0, SIZE)).wait_for_turn(0, 0, SIZE, lambda: next(backlogs))
    assert played.now == 0.051


@pytest.mark.parametrize("at", [0.0511, 0.0515, 0.0521, 0.0525])
def test_a_collective_that_begins_between_two_questions_is_seen(make: Make, at: float) -> None:
    """Each question takes 1 ms, in which the next collective is launched: the span behind it has not begun."""
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.053, 0.10)], asking_s=0.001)
    played.now = at
    make(played, (1, SIZE)).wait_for_turn(0, 0, SIZE, lambda: 0)
    assert played.now >= 0.10


class Link(ModelLink):
    """Carries SIZE bytes in a millisecond, in steps of 10. Remembers the grants, and when they were withdrawn."""

    def __init__(self, played: Played) -> None:
        super().__init__(played.clock, B, 0.0, 10)
        self.grants: list[Grant] = []
        self.ended: list[float] = []

    def grant(self, grant: Grant) -> None:
        self.grants.append(grant)
        super().grant(grant)

    def withdraw(self) -> None:
        self.ended.append(self._clock())
        super().withdraw()


@pytest.fixture
def deliver(make: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Pacer, Link]]:
    def deliver(played: Played, total: int, *chunks: tuple[int, int]) -> tuple[Pacer, Link]:
        monkeypatch.setattr(pacer_module, "LEAST_BYTES", 20)
        monkeypatch.setattr(grant_page, "LEAST_BYTES", 10)
        pacer, link = make(played, *chunks), Link(played)
        link.begin(total)
        pacer.deliver(0, total, link)
        return pacer, link

    return deliver


Deliver = Callable[..., tuple[Pacer, Link]]


def beside(link: Link, played: Played) -> bool:
    """Return whether a byte was sent, or on its way, beside a collective."""
    return any(sent < end and arrives > start for sent, arrives, _ in link.chunks for start, end in played._ops)


def test_a_window_is_granted_as_a_whole(deliver: Deliver) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    pacer, link = deliver(played, 8 * SIZE, (0, 5 * SIZE), (1, 3 * SIZE))
    assert [grant.until for grant in link.grants] == [5 * SIZE, 8 * SIZE], "and no byte before its window"
    assert [grant.before for grant in link.grants] == [pytest.approx(0.059), pytest.approx(0.109)]
    assert not beside(link, played) and pacer.spilled_bytes == 0


def test_what_does_not_fit_in_a_window_is_granted_in_the_next_one(deliver: Deliver) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    played.now = 0.0585  # 0.5 ms of the first window are left, beside the startup time
    pacer, link = deliver(played, 3 * SIZE, (0, 3 * SIZE))
    assert link.grants[0].until == pytest.approx(SIZE / 2, abs=1) and len(link.grants) == 2
    assert link.grants[1].until == 3 * SIZE and played.now >= 0.10
    assert not beside(link, played) and pacer.spilled_bytes == 0


def test_a_collective_ends_a_grant(deliver: Deliver) -> None:
    """It comes long before the window was to end; two steps, of 0.1 ms each, may be on their way."""
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.053, 0.10)])
    pacer, link = deliver(played, 8 * SIZE, (0, 8 * SIZE))
    assert link.grants[0].until == 8 * SIZE and 0.053 <= link.ended[0] < 0.0533
    assert max(arrives for sent, arrives, _ in link.chunks if sent < 0.1) < 0.0536
    assert played.now >= 0.10 and pacer.spilled_bytes == 0
    played.now = link.all_arrives_at()
    pacer.record_delivery(0)
    assert len(pacer.journal) == 2 and sum(sent.size for sent in pacer.journal) == 8 * SIZE


def test_a_slower_link_than_the_plan_counts_on_is_stopped_in_time(make: Make, deliver: Deliver) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    link = Link(played)
    link.rate = B / 3
    pacer = make(played, (0, 8 * SIZE))
    link.begin(8 * SIZE)
    pacer.deliver(0, 8 * SIZE, link)
    assert len(link.grants) > 1
    assert max(arrives for sent, arrives, _ in link.chunks if sent < 0.07) <= 0.0601


def test_what_is_due_needs_no_grant(make: Make) -> None:
    played = Played([(0.0, 1.0)])
    pacer, link = make(played, (0, SIZE)), Link(played)
    link.begin(SIZE)
    pacer.hurry()
    pacer.deliver(0, SIZE, link)
    assert not link.grants and (played.now, pacer.spilled_bytes) == (0.0, SIZE)


def test_a_window_in_which_the_training_begins_to_wait_ends_with_everything(make: Make) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    pacer, link = make(played, (0, 5 * SIZE), (1, 5 * SIZE)), Link(played)
    waits = played.wait_launch

    def wait_launch(after: int, timeout_s: float) -> bool:
        pacer.hurry()
        return waits(after, timeout_s / 2)

    played.wait_launch = wait_launch  # type: ignore[method-assign]
    link.begin(10 * SIZE)
    pacer.deliver(0, 10 * SIZE, link)
    assert len(link.grants) == 1 == len(link.ended) and pacer.spilled_bytes >= 5 * SIZE


def test_without_a_plan_the_link_is_probed_first(make: Make) -> None:
    played = Played([(0.0, 0.01)])
    pacer, link = make(played), Link(played)
    pacer.timetable, pacer.chunk_bytes = None, 1 << 20
    pacer.begin_version(8)
    link.begin(4 << 20)
    pacer.deliver(0, 4 << 20, link)
    assert [grant.until for grant in link.grants] == [PROBE_BYTES], "the rest may go at once"
    assert pacer.spilled_bytes == 0


def test_without_pipelining_a_chunk_is_granted_when_the_one_before_has_arrived(make: Make) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    pacer, link = make(played, (0, 3 * SIZE)), Link(played)
    pacer.p = 1
    link.begin(3 * SIZE)
    pacer.deliver(0, 3 * SIZE, link)
    assert [grant.until for grant in link.grants] == [SIZE, 2 * SIZE, 3 * SIZE]
    assert link.arrived >= 2 * SIZE


def test_the_own_copy_waits_for_a_span_that_holds_it(make: Make) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    pacer = make(played, (0, SIZE))
    pacer.wait_for_lull(7, 0.008, lambda: False)
    assert 0.05 <= played.now < 0.055
    for seconds, version, wanted in ((0.011, 7, False), (0.008, 6, False), (0.008, 7, True)):
        played.now = 0.0
        pacer.wait_for_lull(version, seconds, lambda wanted=wanted: wanted)
        assert played.now == 0.0, "too long for any span, another iteration's, or waited for"


def test_the_own_copy_waits_until_its_window_begins(make: Make) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    pacer = make(played, (0, SIZE))
    pacer.timetable = Timetable((FIRST._replace(delay_s=0.004), SECOND), ((),), 1, 10.0, B, ALPHA)
    pacer.wait_for_lull(7, 0.008, lambda: False)
    assert 0.054 <= played.now < 0.055


def test_the_own_copy_does_not_take_the_time_that_chunks_need(make: Make) -> None:
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    pacer = make(played, (0, 10 * SIZE), (1, 9 * SIZE))  # 19 of 20 ms
    pacer.timetable = Timetable((FIRST._replace(length_s=0.005), SECOND), pacer.timetable.chunks, 1, 10.0, B, ALPHA)
    pacer.wait_for_lull(7, 0.008, lambda: False)
    assert played.now == 0.0


def test_what_is_due_goes_at_once_and_is_counted(make: Make) -> None:
    played = Played([(0.0, 1.0)])
    pacer = make(played, (0, SIZE))
    pacer.hurry()
    pacer.wait_for_turn(0, 0, SIZE, lambda: 0)
    assert (played.now, pacer.spilled_bytes) == (0.0, SIZE)


def test_a_training_that_pauses_does_not_hold_it_back_for_ever(make: Make) -> None:
    played = Played([(0.0, 0.01)])
    pacer = make(played, (0, SIZE))
    pacer.wait_for_turn(0, 0, SIZE, lambda: 0)
    assert 10.0 <= played.now < 10.1, "after the usual time of an iteration and one more"


def test_what_has_no_place_in_the_plan_goes_where_there_is_room_nevertheless(make: Make) -> None:
    """The plan was made for a slower link: the rest need not wait until it is due."""
    played = Played([(0.0, 0.01), (0.02, 0.05), (0.07, 0.10)])
    pacer = make(played, (0, SIZE), (2, SIZE))
    pacer.wait_for_turn(0, 0, SIZE, lambda: 0)
    pacer.wait_for_turn(0, SIZE, SIZE, lambda: SIZE)
    assert played.now < 0.07
    pacer.wait_for_turn(0, 2 * SIZE, SIZE, lambda: 9 * SIZE if played.now < 0.07 else 0)  # behind all that is planned
    assert 0.10 <= played.now < 0.11
    assert pacer.spilled_bytes == 0


def test_nor_does_a_second_replica_whose_chunks_have_none() -> None:
    table = Timetable((FIRST, SECOND), (((0, SIZE), (1, SIZE)), ((2, SIZE),)), 1, 10.0, B, ALPHA)
    assert [table.find_planned_window(0, at) for at in (0, SIZE, 2 * SIZE)] == [0, 1, 1]
    assert [table.find_planned_window(1, at) for at in (0, SIZE)] == [1, 1]
    assert table.find_planned_window(2, 0) == 2, "nothing is planned for a third one"


def _profiled(make: Make, played: Played, *steps: float) -> Pacer:
    """One that sends nothing before the optimizer asks, after steps at these times."""
    pacer = make(played)
    pacer.timetable, pacer.deferred = None, True
    for version, at in enumerate(steps, 8):
        played.now = at
        pacer.begin_iteration(version)
    pacer.begin_version(8 + len(steps))
    return pacer


@pytest.mark.parametrize(
    "steps, after_s",
    [([], 5.0), ([0.4, 0.8], 1.0), ([2.0, 4.0], 4.0), ([1.0, 2.0, 302.0, 303.0, 304.0], 2.0)],
    ids=["first", "short", "long", "a pause before"],
)
def test_a_training_that_pauses_while_it_is_profiled_has_its_version_sent(
    make: Make, steps: list[float], after_s: float
) -> None:
    """After the last collective nothing is seen of it for longer than two iterations take."""
    last = steps[-1] if steps else 0.0
    played = Played([(last - 0.1, last), (last + 0.1, last + 0.3)])
    pacer = _profiled(make, played, *steps)
    pacer.wait_for_turn(0, PROBE_BYTES, SIZE, lambda: 0)
    assert last + 0.3 + after_s < played.now < last + 0.3 + after_s + 0.1
    assert pacer.used_pause and not pacer.spilled_bytes
    pacer.begin_iteration(20)
    assert not pacer.used_pause, "the next iteration is as good for the profile as any"


def test_traffic_ends_such_a_pause(make: Make) -> None:
    played = Played([(1.0, 3.0), (3.5, 3.6)])
    pacer = _profiled(make, played, 0.4, 0.8)
    pacer.wait_for_turn(0, PROBE_BYTES, SIZE, lambda: 0)
    assert 4.6 < played.now < 4.7
