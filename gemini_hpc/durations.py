"""Ages, time spans and moments as text for people."""

from __future__ import annotations

import time

_UNITS = (("years", 31557600.0), ("days", 86400.0), ("h", 3600.0), ("min", 60.0))


def format_age(s: float | None) -> str:
    """Return an age or another time span, rounded, from 0.1 s to >10k years; "-" if it is not known."""
    if s is None:
        return "-"
    for unit, length_s in _UNITS:
        if s >= 2 * length_s:
            return f"{s / length_s:,.0f} {unit}" if s < 10_000 * length_s else f">10k {unit}"
    return f"{max(0.0, round(s, int(s < 10))):g} s"


def format_seconds(s: float) -> str:
    """Return a measured time with three significant digits."""
    if s >= 1:
        return f"{s:.2f} s" if s < 100 else f"{s:.0f} s"
    return f"{1000 * s:.1f} ms" if s < 0.1 else f"{1000 * s:.0f} ms"


def format_time(t: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return the local time of a moment; `form` is as for `time.strftime`."""
    return time.strftime(form, time.localtime(t))
