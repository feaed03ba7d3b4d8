"""A report as one self-contained HTML page: no scripts, no links, the pictures embedded.

All text of agents is escaped, because it belongs to the job's owner and an operator may open the page.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gemini_hpc.durations import format_time
from gemini_hpc.query.inspect_document import build_traffic_fields
from gemini_hpc.report.report_data import Shown, describe_saves
from gemini_hpc.report.traffic_text import format_traffic
from gemini_hpc.wire.sanitize import sanitize

_STYLE = """
body { font: 15px/1.45 sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; }
img { max-width: 100%; height: auto; }
pre { background: #f4f4f4; padding: .6em .8em; white-space: pre-wrap; }
table { border-collapse: collapse; font-size: 13px; }
td, th { border-bottom: 1px solid #ddd; padding: .15em .9em .15em 0; text-align: left; vertical-align: top; }
""".strip()


@dataclass(frozen=True)
class Pictures:
    """The pictures of one training, as PNG; None if there is nothing to draw."""

    shown: Shown
    timeline: bytes | None
    overhead: bytes | None
    steps: bytes | None = None


def render_page(job: int, t: float, trainings: Sequence[Pictures]) -> str:
    """Return the HTML page."""
    body = "\n".join(_render_section(pictures, t) for pictures in trainings)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>gemini-hpc: job {job}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        f"<h1>Job {job}: saved steps and their cost</h1>\n<p>{format_time(t)}</p>\n{body}\n</body>\n</html>\n"
    )


def _render_section(pictures: Pictures, t: float) -> str:
    one = pictures.shown
    row = sanitize({"rank": one.rank, "host": one.host, **build_traffic_fields(one.state)})
    text = "\n".join(_escape_value(line) for line in format_traffic([row]))
    parts = [
        f"<h2>Training {_escape_value(one.training)}</h2>",
        f"<p>{_escape_value(describe_saves(one, t))}</p>",
        _render_image(pictures.steps, "saved steps over time", "No saved step is known."),
        f"<h3>What the copies cost, on rank {one.rank} on {_escape_value(one.host)}</h3>",
        f"<pre>{text}</pre>",
        "<h3>One iteration</h3>",
        _render_image(pictures.timeline, "one iteration", "No iteration has been recorded."),
        "<h3>Overhead over time</h3>",
        _render_image(pictures.overhead, "overhead over time", "No overhead has been measured."),
        "<details><summary>All numbers</summary>",
        _render_table(row.items()),
        "</details>",
    ]
    return "\n".join(parts)


def _render_image(png: bytes | None, alt: str, nothing: str) -> str:
    if png is None:
        return f"<p>{nothing}</p>"
    return f'<p><img alt="{alt}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></p>'


def _render_table(rows: Iterable[tuple[str, Any]]) -> str:
    shown = [f"<tr><th>{_escape_value(key)}</th><td>{_escape_value(value)}</td></tr>" for key, value in rows]
    return "\n".join(["<table>", *shown, "</table>"])


def _escape_value(value: object) -> str:
    return html.escape(sanitize("" if value is None else str(value)))
