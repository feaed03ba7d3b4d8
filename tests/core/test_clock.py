from __future__ import annotations

from gemini_hpc import clock


def test_another_clock() -> None:
    class Stopped:
        def monotonic_ns(self) -> int:
            return 5_000_000_000

        def time(self) -> float:
            return 7.0

        def sleep(self, seconds: float) -> None: ...

    try:
        clock.use(Stopped())
        assert (clock.monotonic(), clock.time()) == (5.0, 7.0)
    finally:
        clock.use(None)
    assert clock.time() > 1.7e9
