"""The lines of `inspect` about the traffic: ranks merged into ranges, the worst named, trouble said."""

from __future__ import annotations

from typing import Any

import msgspec

from gemini_hpc.cli.inspect import render
from gemini_hpc.core.slots import Stamp
from gemini_hpc.query.inspect_document import build_inspect_document
from gemini_hpc.report.traffic_text import format_size, format_traffic
from gemini_hpc.wire.inspect_schema import HeldSlot, InspectPart, TrainingState
from gemini_hpc.wire.sanitize import sanitize
from gemini_hpc.wire.traffic import TrafficState

STEADY = TrafficState(
    t=1000.0,
    scheme="gemini",
    transport="gloo",
    stage="steady",
    iteration_s=3.1,
    idle_s=1.21,
    spans=17,
    collectives=40,
    deviation=0.041,
    bytes_per_s=119e6,
    alpha_s=4e-4,
    chunks=12,
    largest_chunk_bytes=8 << 20,
    total_bytes=60_100_000,
    fitting_bytes=60_100_000,
    overhead=0.003,
    waited_s=0.0,
    chunks_per_span=(4, 0, 2, 2, 2, 2),
)


def part(host: str, rank: int, state: TrafficState | None, **more: Any) -> InspectPart:
    traffic = () if state is None else ((rank, state),)
    held = HeldSlot("default", rank, 2, rank, 0, "complete", Stamp(1, 5), 100, 90, 1.0, 2.0)
    fields: dict[str, Any] = {"restart": 0, "epoch": 1, "round": 1, "hosts": ("n1", "n2")}
    return InspectPart(
        host=host,
        job=7,
        uid=1,
        replicas=2,
        state="live",
        noderanks={"n1": 0, "n2": 1},
        address=host,
        interface="",
        port=1,
        memory_bytes=1,
        memory_cap_bytes=2,
        trainings=(TrainingState("default", 2, Stamp(1, 5), "protected", (rank,), traffic=traffic),),
        held=(held,),
        events=(),
        suspects=(),
        dead=(),
        **(fields | more),
    )


def rows(*states: TrafficState) -> list[dict[str, Any]]:
    parts = [part(f"n{rank + 1}", rank, state) for rank, state in enumerate(states)]
    found = build_inspect_document(7, parts, [], {"nodes": "n1,n2"}, (), "agents", 1000.0)["trainings"][0]["traffic"]
    return list(found)


def but(**changes: Any) -> TrafficState:
    return msgspec.structs.replace(STEADY, **changes)


def test_one_rank() -> None:
    assert format_traffic(rows(STEADY)) == [
        "network: iteration 3.10 s, 17 idle spans of 1.21 s together (deviation 4.1 %), 119 MB/s, 0.4 ms",
        "traffic: gemini over gloo: 12 chunks in 5 spans, all of 60.1 MB fits; each version is saved, a failure "
        "repeats at most 1 step; overhead 0.3 %, wait 0.0 ms",
    ]


def test_ranks_are_merged_and_the_worst_is_named() -> None:
    other = but(iteration_s=3.3, overhead=0.02, bytes_per_s=90e6, deviation=0.2, chunks=20, waited_s=0.04)
    network, traffic = format_traffic(rows(STEADY, other))
    assert "iteration 3.10 s to 3.30 s, 17 idle spans of 1.21 s" in network
    assert "deviation 20.0 %" in network and "90.0 MB/s" in network
    assert "12 to 20 chunks in 5 spans" in traffic and traffic.endswith("overhead 2.0 % (rank 1), wait 40.0 ms")


def test_an_overhead_above_the_ceiling_says_what_comes_of_it() -> None:
    above = but(overhead=0.308, ceiling=0.01, judged_in=212)
    when = "fewer saves are considered within 212 iterations, or when the training waits for its copies"
    assert f"overhead 30.8 %, above the ceiling of 1 %: {when}, wait" in format_traffic(rows(above))[1]
    assert "1 %: fewer versions will be saved, wait" in format_traffic(rows(but(overhead=0.308, ceiling=0.01)))[1]
    assert "ceiling" not in format_traffic(rows(but(overhead=0.009, ceiling=0.01, judged_in=212)))[1]


def test_rarer_versions_have_a_reason_and_what_helps() -> None:
    reason = "a version is sealed 0.87 s after step() in iterations of 0.11 s; what helps: fewer bytes a rank"
    rare = but(j=9, s=9, repeated=17, transport="none", chunks=0, sealed_s=0.87, reason=reason)
    text = format_traffic(rows(rare, but(j=9, s=9, repeated=17, transport="none", chunks=0, sealed_s=0.2)))
    assert "traffic: gemini over none: nothing is sent (one replica); every 9th version is saved" in text[1]
    assert "; sealed 870 ms after step()" in text[1]
    assert f"fewer versions: {reason}" in text


def test_an_mpi_program() -> None:
    reason = "step() takes 0.01 s to capture the state in iterations of 0.1 s; what helps: fewer bytes a rank"
    fields: dict[str, Any] = {"scheme": "background", "stage": "steady", "sealed_s": 0.02}
    fields |= {"j": 10, "s": 11, "repeated": 20}
    found = format_traffic(rows(TrafficState(1.0, transport="mpi", reason=reason, **fields)))
    assert found == [
        "traffic: background over mpi: not fitted into idle spans; every 10th version is saved, over 11 iterations: "
        "a failure repeats at most 20 steps; sealed 20.0 ms after step()",
        f"fewer versions: {reason}",
    ]
    alone = format_traffic(rows(TrafficState(1.0, transport="none", **fields)))
    assert alone[0].startswith("traffic: background over none: nothing is sent (one replica); every 10th version")


def test_a_slow_link_and_a_lower_frequency_are_said() -> None:
    slow = but(j=2, s=2, repeated=3, spilled_bytes=5_000_000, fitting_bytes=55_100_000, late_s=0.042)
    _, traffic, trouble = format_traffic(rows(STEADY, slow))
    assert "55.1 MB of 60.1 MB fit" in traffic
    assert trouble == (
        "slow link: 5.0 MB of each saved version of rank 1 find no idle span, the training waits 42.0 ms for them"
    )
    _, traffic, _ = format_traffic(rows(slow))
    assert "every 2nd version is saved, over 2 iterations: a failure repeats at most 3 steps" in traffic
    _, traffic = format_traffic(rows(but(j=11, s=1, repeated=11)))
    assert "every 11th version is saved: a failure repeats at most 11 steps" in traffic


def test_before_there_is_a_plan() -> None:
    fresh = TrafficState(1.0, "gemini", "gloo", "profile")
    assert format_traffic(rows(fresh)) == [
        "traffic: gemini over gloo: the training is being profiled; each version is saved, a failure repeats at most "
        "1 step"
    ]
    assert format_traffic([]) == []


def test_other_schemes() -> None:
    for scheme, words in (("none", "no version is saved"), ("blocking", "not fitted into idle spans")):
        assert words in format_traffic(rows(but(scheme=scheme)))[1], scheme


def test_problems_are_said_once_each() -> None:
    found = format_traffic(rows(but(problem="no route"), but(problem="no route")))
    assert found[2:] == ["problem: rank 0: no route"]
    many = [row | {"rank": n, "problem": f"p{n}"} for n, row in enumerate(rows(STEADY) * 9)]
    assert format_traffic(many)[-1] == "problem: and 6 others"


def test_versions_that_the_training_went_on_without_are_said() -> None:
    assert not [line for line in format_traffic(rows(STEADY)) if line.startswith("late")]
    found = format_traffic(rows(but(unsealed=1), but(unsealed=3)))
    assert found[2:] == ["late: 3 versions of rank 1 not sealed when the training went on after its longest wait"]


def test_sizes() -> None:
    assert [format_size(n) for n in (0, 999, 1000, 119e6, 60.1e6, 999.99e6, 1e15)] == [
        *("0 B", "999 B", "1.0 kB", "119 MB", "60.1 MB", "1.0 GB", "1000.0 TB"),
    ]


# ---- in the picture ------------------------------------------------------------------------------------


def test_the_document_has_a_row_for_each_rank_that_has_told() -> None:
    parts = [part("n1", 0, STEADY), part("n2", 1, None)]
    document = build_inspect_document(7, parts, [], {"nodes": "n1,n2"}, (), "agents", 1000.0)
    (row,) = document["trainings"][0]["traffic"]
    assert (row["rank"], row["host"], row["scheme"], row["chunks_per_span"]) == (
        0,
        "n1",
        "gemini",
        [4, 0, 2, 2, 2, 2],
    )
    assert "  network: iteration 3.10 s" in render(document)
    untold = build_inspect_document(7, parts[1:], [], {"nodes": "n1,n2"}, (), "agents", 1000.0)
    assert untold["trainings"][0]["traffic"] == [] and "network" not in render(untold)


def test_a_rank_that_has_moved_counts_where_it_was_last() -> None:
    old, new = part("n1", 0, but(j=5), restart=0), part("n2", 0, but(j=1), restart=1, epoch=3)
    for parts in ([old, new], [new, old]):
        (row,) = build_inspect_document(7, parts, [], {"nodes": "n1,n2"}, (), "agents", 1000.0)["trainings"][0][
            "traffic"
        ]
        assert (row["host"], row["j"]) == ("n2", 1)


def test_a_rank_that_cannot_be_is_not_shown() -> None:
    assert [row["rank"] for row in rows(STEADY)] == [0]
    document = build_inspect_document(7, [part("n1", 0, STEADY), part("n2", 9, STEADY)], [], {}, (), "agents", 1000.0)
    assert [row["rank"] for row in document["trainings"][0]["traffic"]] == [0]


def test_words_of_others_stay_on_their_line() -> None:
    evil = "x\x1b[2J\nnetwork: forged\u202e"
    hostile = but(scheme=evil[:32], transport=evil[:32], stage=evil[:32], problem=evil)
    document = build_inspect_document(7, [part("n1", 0, hostile)], [], {"nodes": "n1"}, (), "agents", 1000.0)
    text = render(sanitize(document))
    assert all(line.isprintable() for line in text.split("\n"))
    assert not [line for line in text.split("\n") if line.strip().startswith("network: forged")]
