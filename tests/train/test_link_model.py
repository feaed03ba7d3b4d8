"""What a link can do, from the chunks that went over it."""

from __future__ import annotations

import pytest

from gemini_hpc.train.schedule.link_model import LinkMeter
from gemini_hpc.train.schedule.pacer import Pacer

MB = 1 << 20


def send(meter: LinkMeter, megabytes: int, rate: float, *, beside: bool = False) -> None:
    meter.record_send(10.0, shared=beside)
    meter.record_ack(megabytes * MB, 10.0 + megabytes * MB / rate)


def test_what_went_beside_the_training_does_not_count_however_much_it_was() -> None:
    meter = LinkMeter()
    for _ in range(3):
        send(meter, 2, 1e8)
    for _ in range(20):
        send(meter, 64, 4e7, beside=True)
    assert pytest.approx(1e8) == meter.B


def test_but_while_nothing_else_was_seen() -> None:
    meter = LinkMeter()
    for _ in range(3):
        send(meter, 2, 4e7, beside=True)
    assert meter.known and pytest.approx(4e7) == meter.B
    send(meter, 2, 1e8)
    send(meter, 2, 1e8)
    assert pytest.approx(1e8) == meter.B


def test_a_period_is_beside_the_training_if_one_of_its_chunks_is() -> None:
    meter = LinkMeter()
    for _ in range(2):
        send(meter, 2, 1e8)
        meter.record_send(20.0)
        meter.record_send(20.1, shared=True)
        meter.record_ack(MB, 20.5)
        meter.record_ack(MB, 21.0)
    assert pytest.approx(1e8) == meter.B


def test_one_large_slow_period_is_one_among_many() -> None:
    meter = LinkMeter()
    for _ in range(3):
        send(meter, 1, 1e8)
    send(meter, 40, 2e7)
    assert pytest.approx(1e8) == meter.B
    for _ in range(60):
        send(meter, 1, 1e8)
    assert pytest.approx(1e8) == meter.B


def test_short_periods_do_not_count_beside_usual_ones() -> None:
    meter = LinkMeter()
    for _ in range(20):
        send(meter, 8, 1e8)
    for _ in range(18):
        send(meter, 1, 1e9)
    assert pytest.approx(1e8) == meter.B


class Busy:
    """A training that always has a collective on the network."""

    launched = 1

    def count_in_flight(self) -> int:
        return 1

    def find_quiet_start(self) -> float:
        return 0.0

    def wait_span(self, after: int, timeout_s: float) -> bool:
        return False

    def wake(self) -> None: ...


@pytest.mark.parametrize("how", ["unscheduled", "hurried"])
def test_the_pacer_knows_what_goes_beside_the_training(how: str) -> None:
    pacer = Pacer(MB, 4)
    for _ in range(2):
        send(pacer.meter, 2, 1e8)
    if how == "unscheduled":
        pacer.unscheduled = True
    else:
        pacer.traffic = Busy()
    for _ in range(4):
        pacer.record_send(10.0)
        pacer.meter.record_ack(64 * MB, 20.0)
    assert pytest.approx(1e8) == pacer.meter.B
