"""Which errors hold a rank, and for how long (on a clock of our own)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gemini_hpc.core.communication_error import is_communication_error
from gemini_hpc.train.failure_hold import Hold, wait_for_verdict
from gemini_hpc.wire.local import Verdict

ALIVE = Verdict(alive=("a", "b"))
SUSPECT = Verdict(suspect=("b",), alive=("a",))
DEAD = Verdict(dead=("b",), alive=("a",))


@pytest.mark.parametrize(
    ("error", "held"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection reset"), False),
        (KeyboardInterrupt(), False),
        (None, False),
    ],
)
def test_what_counts(error: BaseException | None, held: bool) -> None:
    assert is_communication_error(error) is held


def test_causes_count() -> None:
    try:
        try:
            raise RuntimeError("Broken pipe")
        except RuntimeError as inner:
            raise KeyError("wrapped") from inner
    except KeyError as outer:
        assert is_communication_error(outer)


def run(script: Callable[[float], Verdict | None], hold_s: float = 15.0) -> tuple[str, float, list[str]]:
    now = [0.0]
    lines: list[str] = []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    why = wait_for_verdict(lambda: script(now[0]), hold_s, lines.append, clock=lambda: now[0], sleep=sleep)
    return why, now[0], lines


def test_alive_lets_go_after_detection_had_its_time() -> None:
    why, t, lines = run(lambda t: ALIVE)
    assert (why, lines) == ("alive", []) and 3.0 <= t < 3.5


def test_dead_holds_from_the_verdict_on() -> None:
    why, t, lines = run(lambda t: ALIVE if t < 1 else SUSPECT if t < 4 else DEAD)
    assert why == "expired" and 18.5 < t < 20.0
    assert len(lines) == 1 and "node b is dead" in lines[0]


def test_a_false_suspicion_lets_go() -> None:
    why, t, _ = run(lambda t: SUSPECT if t < 5 else ALIVE)
    assert why == "alive" and 8.0 <= t < 8.6


def test_a_silent_agent_is_bounded() -> None:
    why, t, _ = run(lambda t: None)
    assert why == "expired" and 15.0 <= t < 15.5


def test_no_holding_at_all() -> None:
    assert run(lambda t: DEAD, hold_s=0.0)[:2] == ("expired", 0.0)


def test_an_exception_of_its_own_is_told_once() -> None:
    """By `Checkpointer.__exit__`, and by the hook behind it."""
    told: list[BaseException] = []
    held = Hold("", 0.0, lambda text: None, told.append)
    try:
        mistake, lost = ValueError("a mistake"), RuntimeError("Connection closed by peer")
        for error in (mistake, mistake, lost, KeyboardInterrupt()):
            held.on_error(error)
        assert told == [mistake]
    finally:
        held.end()
    held.on_error(KeyError("later"))
    assert told == [mistake]
