"""A training that makes no step is shown so, and one that pauses as usual is not."""

from __future__ import annotations

import msgspec

from gemini_hpc.agent.replicas.pace import VersionGaps
from gemini_hpc.cli.inspect import render
from gemini_hpc.core.slots import Stamp
from gemini_hpc.query.inspect_document import Document, build_inspect_document
from gemini_hpc.query.stall import Stall, detect_stall
from gemini_hpc.wire.inspect_schema import InspectPart, PaceState, TrainingState

NOW = 1000.0
SLURM = {"state": "RUNNING", "nodes": "n1,n2", "restarts": "0"}


class Clock:
    def __init__(self) -> None:
        self.t = 50.0

    def __call__(self) -> float:
        return self.t


def test_the_pace_of_a_launch() -> None:
    clock = Clock()
    pace = VersionGaps(clock)
    assert pace.build_state() is None
    for version, gap_s in ((1, 0.0), (2, 1.0), (2, 0.5), (3, 0.5), (4, 9.0), (5, 1.0)):
        clock.t += gap_s
        pace.record_version(version)
        if version == 1:
            assert pace.build_state() is None, "one step says nothing of how long one takes"
    clock.t += 3.0
    assert pace.build_state() == PaceState(3.0, 1.0, 9.0), "a version counts once, whichever rank comes first"
    pace.reset()
    assert pace.build_state() is None and pace.version == 0


def test_what_is_a_stall() -> None:
    cases: list[tuple[list[PaceState], int, float | None, Stall | None]] = [
        ([PaceState(240, 0.8, 2)], 1, None, Stall(240, 0.8)),
        ([PaceState(119, 0.8, 2)], 1, None, None),  # shorter than the site calls a stall
        ([PaceState(240, 13, 15)], 1, None, None),  # 20 iterations are 260 s
        ([PaceState(240, 90, 95)], 50, None, None),  # one version in 50 is saved: less than three saves
        ([PaceState(240, 60, 62)], 50, None, Stall(240, 1.2)),
        ([PaceState(240, 0.8, 125)], 1, None, None),  # an evaluation of two minutes has been there before
        ([PaceState(260, 0.8, 125)], 1, None, Stall(260, 0.8)),
        ([PaceState(240, 0.8, 2), PaceState(5, 0.8, 2)], 1, None, None),  # one rank goes on
        ([PaceState(240, 0.8, 2)], 1, 30.0, None),  # it was suspended until a moment ago
        ([PaceState(240, 0.8, 2)], 1, 0.0, None),
        ([], 1, None, None),
    ]
    for case in cases:
        paces, every, running_s, wanted = case
        assert detect_stall(paces, every, running_s, 120.0) == wanted, case


def shown(
    pace: PaceState | None, state: str = "protected", slurm: dict[str, str] | None = None, hung: str = ""
) -> Document:
    part = InspectPart(
        host="n1",
        job=7,
        uid=5001,
        restart=0,
        replicas=1,
        epoch=1,
        round=1,
        state="live",
        hosts=("n1", "n2"),
        noderanks={"n1": 0, "n2": 1},
        address="",
        interface="",
        port=1,
        memory_bytes=1,
        memory_cap_bytes=2,
        trainings=(TrainingState("default", 0, Stamp(1, 5), state, (0,), pace=pace, hung=hung),),
        held=(),
        events=(),
        suspects=(),
        dead=(),
    )
    parts = [part, msgspec.structs.replace(part, host="n2")]
    return build_inspect_document(7, parts, [], SLURM | (slurm or {}), (), "controller", NOW)


def test_a_stalled_training_in_the_picture() -> None:
    d = shown(PaceState(250.0, 0.8, 2.0))
    assert d["state"] == d["trainings"][0]["state"] == "stalled"
    assert d["trainings"][0]["stalled"] == {"for_s": 250.0, "usual_s": 0.8, "hung": None}
    assert "training default: stalled: no step for 4 min (usually 0.8 s)" in render(d)


def test_a_hang_is_a_stall_however_short() -> None:
    d = shown(PaceState(12.0, 0.8, 2.0), hung="n2: rank 1: no progress for 9 s")
    assert d["trainings"][0]["stalled"] == {"for_s": 12.0, "usual_s": 0.8, "hung": "n2: rank 1: no progress for 9 s"}
    assert "  hangs: n2: rank 1: no progress for 9 s\n" in render(d)
    assert shown(PaceState(12.0, 0.8, 2.0), "recovering", hung="n2")["trainings"][0]["stalled"] is None


def test_what_is_not_called_stalled() -> None:
    cases: list[tuple[PaceState | None, str, dict[str, str]]] = [
        (PaceState(250.0, 0.8, 2.0), "protected", {"state": "SUSPENDED"}),
        (PaceState(250.0, 0.8, 2.0), "protected", {"running_s": "3"}),
        (PaceState(250.0, 0.8, 2.0, stalled_s=300.0), "protected", {}),
        (PaceState(250.0, 0.8, 2.0), "finished", {}),
        (PaceState(250.0, 0.8, 2.0), "degraded", {}),
        (None, "protected", {}),
    ]
    for case in cases:
        pace, state, slurm = case
        d = shown(pace, state, slurm)
        assert d["trainings"][0]["state"] == state and d["trainings"][0]["stalled"] is None, case
