"""Traces of failures: what they say, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.forecast import trace
from gemini_hpc.forecast.simulation import NodeFailure
from gemini_hpc.forecast.trace import TraceError, parse


def test_failures_come_in_the_order_of_time() -> None:
    found = parse(["# all of them", "", "20 4-5,0 hardware", "  7.5 3 software # late"], 6)
    assert found == [
        NodeFailure(7.5, 3, False),
        NodeFailure(20.0, 4, True),
        NodeFailure(20.0, 5, True),
        NodeFailure(20.0, 0, True),
    ]


def test_what_is_no_failure_is_refused_with_its_line() -> None:
    for line, why in (
        ("1 2", "wanted seconds, nodes and a kind, found 2 words"),
        ("-1 2 hardware", "wanted seconds"),
        ("nan 2 hardware", "wanted seconds"),
        ("1e9 2 hardware", "wanted seconds"),
        ("999999999999 2 hardware", "wanted seconds"),
        ("1 6 hardware", "wanted node ranks from 0 to 5"),
        ("1 3-2 hardware", "wanted node ranks"),
        ("1 2, hardware", "wanted node ranks"),
        ("1 \u0663 hardware", "wanted node ranks"),
        ("1 2 both", "wanted hardware or software, found 'both'"),
        ("1 " + 500 * "9" + " hardware", "wanted node ranks"),
    ):
        said = refusal(TraceError, parse, ["1 2 hardware", line], 6)
        assert "line 2: " in said and why in said and len(said) < 120, line


def test_an_empty_trace_is_a_mistake() -> None:
    with pytest.raises(TraceError, match="no failures"):
        parse(["# nothing", ""], 6)


def test_a_trace_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_FAILURES", 10)
    with pytest.raises(TraceError, match="line 2: more than"):
        parse(["1 0-9 hardware", "1 0-9 hardware"], 10)


@given(st.lists(st.text()), st.integers(1, 9))
def test_any_text_is_read_or_refused(lines: list[str], nodes: int) -> None:
    try:
        found = parse(lines, nodes)
    except TraceError:
        return
    assert all(0 <= failure.node < nodes for failure in found)
