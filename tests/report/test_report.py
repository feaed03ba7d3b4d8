"""`gemini-hpc report`: pictures and a page from what ranks recorded, whatever they claim."""

from __future__ import annotations

import html
import json
import os
import re
import struct
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gemini_hpc.cli import report
from gemini_hpc.cli.frame import UserError
from gemini_hpc.cli.main import main
from gemini_hpc.client import stats_messages
from gemini_hpc.core.slots import Stamp
from gemini_hpc.query import ask
from gemini_hpc.query.ask import Recorded
from gemini_hpc.report import drawing
from gemini_hpc.report.html_page import Pictures, render_page
from gemini_hpc.report.report_data import (
    Shown,
    build_document,
    choose_ranks,
    combine_answers,
    describe_saves,
    list_idle_spans,
    list_saved_steps,
)
from gemini_hpc.wire.inspect_schema import EventRecord, InspectPart, Record, RecordAsk, TrainingState
from gemini_hpc.wire.traffic import Point, TimelineState, TrafficState

from .test_charts import colours, rgb
from .test_text import STEADY, but, part

pytestmark = pytest.mark.slow

TIMELINE = stats_messages.build_timeline(
    version=42,
    iteration_s=3.1,
    gate_s=2.9,
    ops=[("all_gather_into_tensor", n * 0.2, n * 0.2 + 0.12, 4_000_000) for n in range(14)],
    chunks=[(n * 0.2 + 0.13, n * 0.2 + 0.19, 5_000_000, 0) for n in range(12)],
    copies=[(0.0, 0.05, 30_000_000), (0.06, 0.1, 30_000_000)],
    waits=[(2.9, 2.95)],
    spans=[(n * 0.2 + 0.12, n * 0.2 + 0.2) for n in range(14)],
)
SERIES = tuple(Point(1.7e9 + 5 * n, 0.02 / (n + 1), 1 + n // 50) for n in range(100))
ONE = Shown("default", 0, "n1", STEADY, TIMELINE, SERIES)
EVIL = "</pre><script>alert(1)</script>\n$\\frac{$\x1b[2J\u202e<img src=http://x.org/y>\ud7ff\U0001f600"


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and png[12:16] == b"IHDR" and png.rstrip().endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Agents in place of those of a job."""

    def of(parts: list[InspectPart], told: dict[tuple[str, int], Record]) -> None:
        def fetch_records(
            _settings: Any, _job: int, choose: ask.Choose
        ) -> tuple[tuple[InspectPart, ...], list[Recorded]]:
            wanted = choose(tuple(parts))
            return tuple(parts), [Recorded(host, q, told.get((q.training, q.rank))) for host, q in wanted]

        monkeypatch.setattr(ask, "fetch_records", fetch_records)

    return of


def run(*words: str) -> int:
    return main(["report", *words, "--config", os.devnull])


# ---- what is shown -------------------------------------------------------------------------------------


def test_the_worst_rank_of_each_set_is_asked_for() -> None:
    parts = [part("n1", 0, but(overhead=None)), part("n2", 1, but(overhead=-0.01))]
    other = TrainingState(
        "other", 2, None, "arming", (0, 1), traffic=((0, but(overhead=0.2)), (1, but(overhead=0.1)))
    )
    parts[0] = msgspec.structs.replace(parts[0], trainings=(*parts[0].trainings, other))
    assert choose_ranks(parts, None, None) == [("n2", RecordAsk("default", 1)), ("n1", RecordAsk("other", 0))]
    assert choose_ranks(parts, "other", 1) == [("n1", RecordAsk("other", 1))]
    assert choose_ranks(parts, None, 5) == [] == choose_ranks(parts, "nothing", None)
    assert choose_ranks([], None, None) == []


def test_a_rank_that_has_moved_is_asked_for_where_it_was_last() -> None:
    old, new = part("n1", 0, STEADY, restart=0), part("n2", 0, STEADY, restart=1, epoch=3)
    assert (
        choose_ranks([new, old], None, None)
        == choose_ranks([old, new], None, None)
        == [("n2", RecordAsk("default", 0))]
    )


def test_a_job_of_very_many_sets_is_cut() -> None:
    many = tuple(TrainingState(f"s{n:04}", 1, None, "arming", (0,), traffic=((0, STEADY),)) for n in range(64))
    assert len(choose_ranks([msgspec.structs.replace(part("n1", 0, None), trainings=many)], None, None)) == 16


def test_an_agent_that_tells_no_record_leaves_the_summary() -> None:
    parts = [part("n1", 0, STEADY)]
    (one,) = combine_answers(parts, [Recorded("n1", RecordAsk("default", 0), None)])
    assert one == Shown("default", 0, "n1", STEADY, None, (), saved=5, saved_at=1.0)


def test_idle_is_what_lies_between_the_collectives() -> None:
    timeline = stats_messages.build_timeline(
        version=1, iteration_s=1.0, gate_s=0.9, ops=[("a", 0.1, 0.5, 1), ("b", 0.2, 0.3, 1), ("c", 0.6, 0.7, 1)]
    )
    assert list_idle_spans(timeline) == [(0.0, 0.1), (0.5, 0.6), (0.7, 1.0)]
    assert list_idle_spans(TimelineState(1, 1.0, 1.0)) == [(0.0, 1.0)]


def test_every_key_of_the_document_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "json.md").read_text().split("\n## report\n")[1]

    def keys(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {key for inner in value.values() for key in keys(inner)}
        return {key for inner in value for key in keys(inner)} if isinstance(value, list) else set()

    found = keys(build_document(7, 1.0, [ONE]))
    found -= set(TrafficState.__struct_fields__) - {"t", "j", "overhead"}  # the section on inspect has them
    missing = {key for key in found if not re.search(rf"`(?:[^`]*\W)?{key}(?:\W[^`]*)?`", text)}
    assert not missing


# ---- drawing -------------------------------------------------------------------------------------------


def test_pictures() -> None:
    width, height = size_of(drawing.draw_timeline(ONE))
    assert width == drawing.WIDTH_IN * drawing.DPI and 200 < height < 800
    assert size_of(drawing.draw_overhead(ONE))[0] == width


def test_the_first_picture_shows_saved_steps_losses_and_resumes() -> None:
    saved = tuple(Point(1000.0 + n, 0.01, 1, 10 * n) for n in range(1, 9))
    lost = EventRecord(1004.5, "detected", "n1", 0, 0, "n2 is silent")
    resumed = [EventRecord(1006.0 + 0.1 * rank, "resumed", "n1", 1, 40) for rank in range(3)]
    parts = [msgspec.structs.replace(part("n1", 0, STEADY), events=(lost, *resumed))]
    state = msgspec.structs.replace(parts[0].trainings[0], sealed=Stamp(1, 80))
    slot = msgspec.structs.replace(parts[0].held[0], stamp=Stamp(1, 80), since=1008.0)
    parts[0] = msgspec.structs.replace(parts[0], trainings=(state,), held=(slot,))
    (one,) = combine_answers(parts, [Recorded("n1", RecordAsk("default", 0), Record("default", 0, None, saved))])
    assert [event.name for event in one.marks] == ["detected", "resumed"]
    assert describe_saves(one, 1010.0) == "The newest save is step 80, 2 s ago. So far: 1 loss, 1 resume."
    assert list_saved_steps(one)[-1] == (1008.0, 80) and (1006.0, 40) in list_saved_steps(one)
    drawn = colours(drawing.draw_steps(one, 1010.0))
    assert {rgb(c) for c in (drawing._TRAINING, drawing._WAIT, drawing._RESUMED)} <= drawn
    (told,) = build_document(7, 1010.0, [one])["trainings"]
    assert (told["saved"], told["saved_age_s"], len(told["marks"])) == (80, 2.0, 2)
    page = render_page(7, 1010.0, [Pictures(one, None, None, drawing.draw_steps(one, 1010.0))])
    assert page.index("The newest save is step 80") < page.index("What the copies cost")


def test_the_history_is_that_of_the_agent_which_has_seen_it() -> None:
    """A rank on a replacement has the largest overhead; what was saved before the loss is with a survivor."""
    old, new = part("n1", 0, but(overhead=0.01)), part("n2", 1, but(overhead=0.2))
    old = msgspec.structs.replace(old, events=(EventRecord(1000.0, "agent", "n1", 0),))
    new = msgspec.structs.replace(new, events=(EventRecord(2000.0, "agent", "n2", 1),))
    first, second = choose_ranks([old, new], None, None)
    assert (first, second) == (("n2", RecordAsk("default", 1)), ("n1", RecordAsk("default", 0)))
    series = {0: (Point(1100.0, 0.01, 1, 90), Point(2100.0, 0.01, 1, 120)), 1: (Point(2100.0, 0.2, 1, 120),)}
    answers = [Recorded(host, q, Record("default", q.rank, None, series[q.rank])) for host, q in (first, second)]
    (one,) = combine_answers([old, new], answers)
    assert (one.rank, one.series) == (1, series[1])
    assert (1100.0, 90) in list_saved_steps(one)
    (silent,) = combine_answers([old, new], [answers[0], Recorded(*second, None)])
    assert (2100.0, 120) in list_saved_steps(silent)
    same = msgspec.structs.replace(new, events=(EventRecord(1003.0, "agent", "n2", 0),))
    assert choose_ranks([old, same], None, None) == [first]


def test_without_a_save_the_page_says_so() -> None:
    assert describe_saves(ONE, 2e9).startswith("No step is saved yet")
    with pytest.raises(ValueError, match="no saved step"):
        drawing.draw_steps(ONE, 2e9)


def test_each_lane_is_drawn() -> None:
    """The picture of a timeline with one lane has the colour of that lane and of no other."""
    lanes = {"ops": drawing._TRAINING, "chunks": drawing._CHUNK, "copies": drawing._COPY, "waits": drawing._WAIT}
    for lane, colour in lanes.items():
        alone = msgspec.structs.replace(TIMELINE, **{name: () for name in lanes if name != lane})
        drawn = colours(drawing.draw_timeline(Shown("default", 0, "n1", STEADY, alone, ())))
        assert {c for c in lanes.values() if rgb(c) in drawn} == {colour}, lane


def test_strange_timelines() -> None:
    cut = stats_messages.build_timeline(
        version=1, iteration_s=1e-9, gate_s=5.0, ops=[("x", 5.0, -5.0, 1)], waits=[(0.0, 0.0)]
    )
    holders = stats_messages.build_timeline(
        version=1, iteration_s=1.0, gate_s=0.5, chunks=[(0.1, 0.2, 1, r) for r in range(200)]
    )
    backwards = msgspec.msgpack.encode([1, 1.0, 0.5, [["$\\frac{$", 0.9, 0.1, 1]]])
    for timeline in (
        TimelineState(0, 0.0, 0.0),
        TimelineState((1 << 40) - 1, 1e5, 1e5),
        cut,
        holders,
        msgspec.msgpack.decode(backwards, type=TimelineState),
    ):
        size_of(drawing.draw_timeline(Shown(EVIL, 0, EVIL, STEADY, timeline, ())))


def test_strange_series() -> None:
    for series in (
        (Point(0.0, 0.0, 0),),
        (Point(0.0, -1.0, 1), Point(1e11, 1e6, 1 << 20)),
        (Point(5.0, 0.1, 1), Point(5.0, 0.2, 2)),
    ):
        size_of(drawing.draw_overhead(Shown(EVIL, 0, "n1", STEADY, None, series)))


# ---- the page ------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else() -> None:
    page = render_page(7, 1.7e9, [Pictures(ONE, drawing.draw_timeline(ONE), drawing.draw_overhead(ONE))])
    found = Elements(page)
    assert "http:" not in page and "https:" not in page and "//" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert not found.tags & {"script", "link", "iframe", "object", "embed", "base", "form", "a"}
    sources = [value for name, value in found.attributes if name == "src"]
    assert len(sources) == 2 and all(s is not None and s.startswith("data:image/png;base64,") for s in sources)
    assert "iteration 3.10 s, 17 idle spans" in found.text and "all of 60.1 MB fits" in found.text


def test_what_agents_say_is_text_in_the_page() -> None:
    hostile = but(scheme="<b>x</b>", transport="'\"><i>", stage="</td>", problem=EVIL)
    one = Shown(EVIL, 0, EVIL, hostile, None, ())
    page = render_page(7, 1.7e9, [Pictures(one, None, None)])
    honest = Elements(render_page(7, 1.7e9, [Pictures(Shown("default", 0, "n1", STEADY, None, ()), None, None)]))
    found = Elements(page)
    assert found.tags == honest.tags and not [v for n, v in found.attributes if n == "src"]
    assert "\x1b" not in page and "\u202e" not in page and "<script" not in page
    assert html.escape("</pre><script>alert(1)</script>") in page
    assert "No iteration has been recorded" in page


# ---- the verb ------------------------------------------------------------------------------------------


def test_files(
    answers: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    answers([part("n1", 0, STEADY)], {("default", 0): Record("default", 0, TIMELINE, SERIES)})
    assert run("7") == 0
    written = [
        "gemini-7.html",
        "gemini-7-default-steps.png",
        "gemini-7-default-timeline.png",
        "gemini-7-default-overhead.png",
    ]
    assert capsys.readouterr().out.splitlines() == written
    assert {p.name for p in tmp_path.iterdir()} == set(written)
    size_of((tmp_path / written[1]).read_bytes())
    assert (tmp_path / written[0]).read_text().startswith("<!DOCTYPE html>")

    (tmp_path / "d").mkdir()
    assert run("7", "-o", "d") == 0 and run("7", "--output", "d/mine", "--rank", "0", "--training", "default") == 0
    assert {p.name for p in (tmp_path / "d").iterdir()} == {
        *written,
        *(w.replace("gemini-7", "mine") for w in written),
    }


def test_a_set_named_like_a_path_stays_in_the_directory(tmp_path: Path) -> None:
    trainings = [Shown(name, 0, "n1", STEADY, TIMELINE, ()) for name in ("../../x", "/etc/passwd", "a\0b", "ok", "")]
    paths = report.write_report(7, 1.7e9, trainings, str(tmp_path))
    assert sorted(paths) == sorted(str(p) for p in tmp_path.iterdir())
    names = [p.rsplit("/", 1)[1] for p in paths]
    assert names == ["gemini-7.html", *(f"gemini-7-{n}-timeline.png" for n in ("set0", "set1", "set2", "ok", "set4"))]


def test_json_needs_no_matplotlib(
    answers: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answers([part("n1", 0, STEADY)], {("default", 0): Record("default", 0, TIMELINE, SERIES)})
    assert run("7", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["job"] == 7
    (one,) = found["trainings"]
    assert (one["training"], one["rank"], one["host"], one["traffic"]["scheme"]) == ("default", 0, "n1", "gemini")
    assert one["timeline"]["ops"][1]["name"] == "all_gather_into_tensor" and len(one["series"]) == 100
    assert run("7") == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "pip install 'matplotlib>=3.7'" in errors and sys.executable in errors


def test_one_line_where_there_is_nothing(
    answers: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def line(*words: str) -> str:
        assert run(*words) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("gemini-hpc report: ")
        return err

    answers([], {})
    assert "no agent answers" in line("7")
    answers([part("n1", 0, None)], {})
    assert "no traffic of any rank is recorded yet" in line("7")
    answers([part("n1", 0, STEADY)], {})
    assert "rank 5" in line("7", "--rank", "5") and "'other'" in line("7", "--training", "other")
    assert "no/where" in line("7", "-o", str(tmp_path / "no" / "where"))
    assert "unknown, or not yours" in line("4294967296")


def test_wrong_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("seven") == 2
    assert "'seven' is not a job id" in capsys.readouterr().err
    for words in (["--rank", "-1"], ["--rank", "1e3"], ["--rank", "12345678"], []):
        with pytest.raises(SystemExit) as ended:
            run(*([] if not words else ["7", *words]))
        assert ended.value.code == 2


def test_errors_are_errors_of_the_user() -> None:
    with pytest.raises(UserError, match=r"/dev/null/x\.html: Not a directory"):
        report.write_report(7, 1.0, [ONE], "/dev/null/x")
