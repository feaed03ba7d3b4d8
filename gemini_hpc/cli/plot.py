"""The option `--plot FILE` of `plan` and `simulate`, which draws their results.

matplotlib is imported only if the option is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gemini_hpc.cli.frame import UsageError

if TYPE_CHECKING:
    from gemini_hpc.forecast.protection import Protection, RequestedProtection
    from gemini_hpc.forecast.simulation import RunOutcome

FORMS = ("png", "svg")
_TIMES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # factors of the failure rate


def _parse_file_name(text: str) -> str:
    if not text.endswith(tuple(f".{form}" for form in FORMS)) or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: wanted the name of a .png or .svg file")
    return text


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Add the option to a parser."""
    parser.add_argument(
        "--plot",
        type=_parse_file_name,
        metavar="FILE",
        help="also draw the result into FILE, .png or .svg; needs matplotlib",
    )


def _write_picture(path: str, draw: Callable[[str], bytes]) -> None:
    from gemini_hpc.report.drawing import MissingError

    try:
        content = draw(path.rpartition(".")[2])
        with open(path, "wb") as out:
            out.write(content)
    except MissingError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def draw_outcomes(path: str, title: str, found: dict[str, RunOutcome]) -> None:
    """Draw a bar per scheme that shows the shares of its time. Raises `UsageError`."""
    from gemini_hpc.report.drawing import draw_stacked_bars

    all_of = list(found.values())
    parts = {
        "training": [o.useful_s / o.total_s for o in all_of],
        "stalled": [o.stalled_s / o.total_s for o in all_of],
        "repeated": [o.repeated_s / o.total_s for o in all_of],
        "down": [o.down_s / o.total_s for o in all_of],
    }
    _write_picture(path, lambda form: draw_stacked_bars(title, list(found), parts, form))


def draw_plans(path: str, wish: RequestedProtection, found: list[Protection]) -> None:
    """Draw which losses are survived, and the effective training time over the failure rate.

    Raises `UsageError`.
    """
    from gemini_hpc.forecast.protection import predict_protection
    from gemini_hpc.report.drawing import Curves, draw_curves

    lost = sorted(found[0].survival)
    survived = Curves(
        "survived",
        "nodes lost at once",
        lost,
        {one.name: [one.survival[k] for k in lost] for one in found},
    )
    rates = [times * (wish.per_day or 0.001) for times in _TIMES]
    trains: dict[str, list[float]] = {}
    for one in found:
        at = [
            predict_protection(replace(wish, per_day=rate), one.replicas, parity=one.parity).effective
            for rate in rates
        ]
        for place, way in enumerate(("by requeue", "with a spare")):
            trains[f"{one.name}, {way}"] = [both[place] for both in at]
    time = Curves("time that trains", "failures of a node a day", rates, trains, logarithmic=True)
    _write_picture(path, lambda form: draw_curves([survived, time], form))
