"""Ages and times as text."""

from __future__ import annotations

from gemini_hpc.durations import format_age, format_seconds


def test_ages() -> None:
    for s, text in (
        (None, "-"),
        (-3.0, "0 s"),  # the clocks of two hosts differ
        (0.44, "0.4 s"),
        (2.0, "2 s"),
        (30.4, "30 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (7199.0, "120 min"),
        (7200.0, "2 h"),
        (172800.0, "2 days"),
        (1e9, "32 years"),
        (1e15, ">10k years"),
    ):
        assert format_age(s) == text, s


def test_measured_times() -> None:
    assert [format_seconds(s) for s in (0, 0.00042, 0.0999, 0.25, 3.1, 250.4)] == [
        *("0.0 ms", "0.4 ms", "99.9 ms", "250 ms", "3.10 s", "250 s"),
    ]
