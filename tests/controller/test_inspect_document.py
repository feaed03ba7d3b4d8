"""The picture of a job: survival counted from real copies, recoveries from the log, and what is stored on disk."""

from __future__ import annotations

import errno
import os
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_hpc import clock
from gemini_hpc.cli.inspect import render
from gemini_hpc.controller.event_log import MAX_LOG_BYTES, EventLogs, sanitize_event
from gemini_hpc.controller.journal import NODES, Journal
from gemini_hpc.core.domains import Separation, Shared
from gemini_hpc.core.placement import compute_recovery_probability, list_holders
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.survival import compute_survival
from gemini_hpc.query.inspect_document import build_inspect_document
from gemini_hpc.query.past import list_recoveries
from gemini_hpc.wire.inspect_schema import EventRecord, HeldSlot, InspectPart, TierState, TrainingState
from gemini_hpc.wire.sanitize import MAX_DETAIL
from gemini_hpc.wire.sanitize import sanitize as printable

NOW = 1000.0


@settings(max_examples=300)
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(
            st.just([f"n{i}" for i in range(n)]),
            st.lists(st.frozensets(st.sampled_from([f"n{i}" for i in range(n)]), max_size=4), max_size=8),
        )
    )
)
def test_survival_is_what_counting_all_losses_gives(job: tuple[list[str], list[frozenset[str]]]) -> None:
    nodes, shards = job
    found = compute_survival(nodes, shards)
    for k, share in enumerate(found.probability, 1):
        losses = [set(c) for c in combinations(nodes, k)]
        good = sum(all(s - lost for s in shards) for lost in losses)
        assert abs(share - good / len(losses)) < 1e-12
        for lost in losses:
            named = any(set(f) <= lost for f in found.fatal) or found.lost_already
            assert named == (not all(s - lost for s in shards))


def test_survival_of_the_planned_placement_is_the_papers() -> None:
    for n, m in ((4, 2), (5, 2), (8, 2), (9, 3), (16, 2), (200, 2)):
        names = [f"n{i}" for i in range(n)]
        shards = [frozenset(names[h] for h in list_holders(rank, n, m)) for rank in range(n)]
        for k, share in enumerate(compute_survival(names, shards).probability, 1):
            assert abs(share - compute_recovery_probability(n, m, k)) < 1e-9


def part(host: str, held: list[HeldSlot]) -> InspectPart:
    hosts = ("n1", "n2", "n3", "n4")
    return InspectPart(
        host=host,
        job=7,
        uid=5001,
        restart=0,
        replicas=2,
        epoch=1,
        round=1,
        state="protected",
        hosts=hosts,
        noderanks={h: i for i, h in enumerate(hosts)},
        address="10.0.0.1",
        interface="eth0",
        port=1,
        memory_bytes=1,
        memory_cap_bytes=2,
        trainings=(TrainingState("default", 4, Stamp(1, 5), "protected", (hosts.index(host),)),),
        held=tuple(held),
        events=(),
        suspects=(),
        dead=(),
    )


def slot(rank: int, version: int, state: str = "complete", number: int = 0) -> HeldSlot:
    stamp = Stamp(1, version) if version else None
    return HeldSlot("default", rank, 4, rank, number, state, stamp, 100, 90, NOW - 2, NOW - 1)


def pairs(newest: dict[str, int]) -> list[InspectPart]:
    """n1+n2 and n3+n4 hold each other's shards; each node's slots: version 5 and `newest`."""
    parts = []
    for i, host in enumerate(("n1", "n2", "n3", "n4")):
        group = (0, 1) if i < 2 else (2, 3)
        held = [s for r in group for s in (slot(r, 5), slot(r, newest.get(host, 6), "filling", 1))]
        parts.append(part(host, held))
    return parts


SLURM = {"state": "RUNNING", "nodes": "n1,n2,n3,n4", "restarts": "0"}


def test_two_groups() -> None:
    d = build_inspect_document(7, pairs({}), [], SLURM, (), "controller", NOW)
    assert d["state"] == "protected" and [n["group"] for n in d["nodes"]] == [0, 0, 1, 1]
    v = d["trainings"][0]["survival"]
    assert v["fatal"] == [["n1", "n2"], ["n3", "n4"]] and v["counted_version"] == [1, 5]
    assert [row["probability"] for row in v["survives"]] == [1.0, 4 / 6, 0.0]
    assert "never together: n1+n2, n3+n4" in render(d)
    assert d["trainings"][0]["shards"][0]["holders"][0]["state"] == "sealed"


def tiered(told: TierState | None) -> tuple[dict[str, Any], str]:
    """The first set's tier in the document, and its lines of the text; only the root tells."""
    parts = pairs({})
    parts[2] = msgspec.structs.replace(
        parts[2], trainings=(msgspec.structs.replace(parts[2].trainings[0], tier=told),)
    )
    d = build_inspect_document(7, parts, [], SLURM, (), "controller", NOW)
    return d["trainings"][0]["tier"], "\n".join(
        line for line in render(d).splitlines() if "tier" in line or "kept:" in line
    )


def test_the_tier() -> None:
    assert tiered(None)[0] is None and not tiered(None)[1]
    document, text = tiered(TierState("/lustre/t", None, 0.0, None, 0, ""))
    assert document["version"] is None and document["age_s"] is None and text == "  tier /lustre/t: nothing yet"
    document, text = tiered(TierState("/lustre/t", Stamp(1, 4), NOW - 30, Stamp(1, 9), 3 << 20, ""))
    assert document == {
        "directory": "/lustre/t",
        "version": [1, 4],
        "age_s": 30.0,
        "saving": [1, 9],
        "written_bytes": 3 << 20,
        "problem": "",
        "keeping": [],
        "kept": [],
        "interval_s": None,
        "interval_reason": "",
    }
    assert text == "  tier /lustre/t: version 1:4, 30 s old; saving 1:9, 3.0 MiB written"
    why = "auto: a save takes 12 s"
    document, text = tiered(TierState("/lustre/t", Stamp(1, 4), NOW - 30, interval_s=4320.0, interval_reason=why))
    assert (document["interval_s"], document["interval_reason"]) == (4320.0, why)
    assert f"  tier: every 72 min: {why}" in text
    _, text = tiered(TierState("/lustre/t", Stamp(1, 4), NOW - 30, None, 0, "n3: the file system is full"))
    assert "  tier: not saved: n3: the file system is full" in text.splitlines()
    kept = TierState("/lustre/t", Stamp(1, 4), NOW - 30, keeping=("best",), kept=(("epoch-1", Stamp(1, 2)),))
    document, text = tiered(kept)
    assert document["keeping"] == ["best"] and document["kept"] == [{"name": "epoch-1", "version": [1, 2]}]
    assert text.splitlines()[1] == "  kept: epoch-1 (version 1:2), best (being saved)"


def test_a_missing_agent_shows_at_once() -> None:
    d = build_inspect_document(7, pairs({})[:3], [], SLURM, ("n4",), "controller", NOW)
    assert d["state"] == "partly protected" and d["missing"] == ["n4"]
    v = d["trainings"][0]["survival"]
    assert ["n3"] in v["fatal"] and v["survives"][0]["probability"] == 0.75


def test_one_training_of_two_is_protected() -> None:
    """The other one has sealed nothing, or a rank of it has lost its protection."""
    for state, shown in (("arming", 0), ("degraded", 5), ("protected", 5)):
        other = TrainingState("critic", 4, Stamp(1, shown) if shown else None, state, (0,))
        held = [msgspec.structs.replace(slot(rank, shown), training="critic") for rank in range(4) if shown]
        parts = [
            msgspec.structs.replace(p, trainings=(*p.trainings, other), held=(*p.held, *held)) for p in pairs({})
        ]
        d = build_inspect_document(7, parts, [], SLURM, (), "controller", NOW)
        if state == "protected":
            assert d["state"] == "protected" and "trainings)" not in render(d)
            continue
        assert [s["protected"] for s in d["trainings"]] == [False, True]
        assert d["state"] == "partly protected" and "job 7: partly protected (1 of 2 trainings)  " in render(d), state
        waits = build_inspect_document(7, parts, [], {**SLURM, "state": "PENDING"}, (), "controller", NOW)
        assert waits["state"] == ("waiting" if state == "arming" else "degraded")


def test_what_lives_in_ranks_is_told_beside_the_copies() -> None:
    """n1 and n2 hold each other's shards, and could make copies of the others'; n3 and n4 likewise."""
    parts = pairs({})
    assert (
        build_inspect_document(7, parts, [], SLURM, (), "controller", NOW)["trainings"][0]["survival"]["live"] is None
    )
    for number, one in enumerate(parts):
        state = msgspec.structs.replace(one.trainings[0], live=(2, 3) if number < 2 else (0, 1))
        parts[number] = msgspec.structs.replace(one, trainings=(state,))
    d = build_inspect_document(7, parts, [], SLURM, (), "controller", NOW)
    v = d["trainings"][0]["survival"]
    assert v["fatal"] == [["n1", "n2"], ["n3", "n4"]] and v["survives"][1]["probability"] < 1
    assert v["live"]["fatal"] == [] and [row["probability"] for row in v["live"]["survives"]] == [1.0, 1.0, 1.0]
    assert "their tensors count as copies: any 1 node, any 2 nodes" in render(d)


def test_a_copy_that_is_not_complete_does_not_count() -> None:
    parts = pairs({})
    parts[1] = part("n2", [slot(0, 5, "filling"), slot(1, 5)])
    v = build_inspect_document(7, parts, [], SLURM, (), "controller", NOW)["trainings"][0]["survival"]
    assert v["fatal"] == [["n1"], ["n3", "n4"]]


def test_parts_taken_while_versions_change_hands() -> None:
    # n1 has recycled version 4 already (5 complete, 6 filling); n2 still has 4 and 5: both have 5.
    parts = pairs({})
    parts[1] = part("n2", [slot(0, 4), slot(0, 5, number=1), slot(1, 4), slot(1, 5, number=1)])
    v = build_inspect_document(7, parts, [], SLURM, (), "controller", NOW)["trainings"][0]["survival"]
    assert v["counted_version"] == [1, 5] and v["survives"][0]["probability"] == 1.0


def test_nothing_yet_and_nobody() -> None:
    empty = [part(h, []) for h in ("n1", "n2", "n3", "n4")]
    d = build_inspect_document(7, empty, [], SLURM, (), "agents", NOW)
    assert d["state"] == "arming" and d["trainings"][0]["survival"]["lost_already"]
    assert "nothing yet" in render(d)
    nobody = build_inspect_document(7, [], [], SLURM, ("n1",), "controller", NOW)
    assert nobody["state"] == "unprotected"
    assert render(nobody)


def test_recoveries() -> None:
    names = ["registered", "detected", "confirmed", "down", "detected", "running", "pulled"]
    names += ["first_iteration", "saved"]
    log = [EventRecord(100.0 + i, name, "n2" if name == "detected" else "", 0) for i, name in enumerate(names)]
    log += [EventRecord(500.0, "detected", "n3", 1), EventRecord(501.5, "confirmed", "n3", 1)]
    found = build_inspect_document(7, pairs({}), [*log, log[1]], SLURM, (), "controller", NOW)["recoveries"]
    assert [r["restart"] for r in found] == [0, 1]
    assert [e["name"] for e in found[0]["events"]] == names[1:8]
    assert found[0]["total_s"] == 6.0 and found[1]["events"][1]["after_s"] == 1.5


def told(*events: tuple[float, str, str]) -> list[tuple[float, list[str]]]:
    log = [EventRecord(t, name, host, 0) for t, name, host in events]
    found = build_inspect_document(7, pairs({}), log, SLURM, (), "controller", NOW)["recoveries"]
    return [(r["began"], [e["name"] for e in r["events"]]) for r in found]


def test_a_false_alarm_is_no_recovery_and_hides_none() -> None:
    alarm = [(100.0, "detected", "n2"), (103.0, "dismissed", "n2")]
    saved = [(700.0 + 600 * i, "saved", "") for i in range(12)]
    real = [(7300.0, "detected", "n2"), (7301.0, "confirmed", "n2"), (7306.0, "first_iteration", "n1")]
    assert told(*alarm) == [] and told(*alarm, *saved) == []
    wanted = [(7300.0, ["detected", "confirmed", "first_iteration"])]
    assert (
        told(*alarm, *saved, *real)
        == told(*alarm, *real)
        == told(*real, (9000.0, "detected", "n3"), (9001.0, "dismissed", "n3"))
        == wanted
    )
    both = [(1.0, "detected", "n2"), (1.1, "detected", "n3"), (2.0, "dismissed", "n3"), (3.0, "confirmed", "n2")]
    assert told(*both) == [(1.0, [name for _, name, _ in both])]
    assert told((1.0, "detected", "n2")) == [(1.0, ["detected"])], "it is being judged"


def test_an_agents_word_of_a_suspicion_has_its_own_host() -> None:
    """The controller's word, and what it dismisses, have the silent node's."""
    agents = [EventRecord(1.0, "detected", host, 0, 0, "n2 is silent; witnesses n1, n3") for host in ("n1", "n3")]
    controllers = [EventRecord(3.0, "detected", "n2", 0, 0, "reported by n1,n3")]
    cleared = [EventRecord(9.0, "dismissed", "n2", 0, 0, "its agent answers")]
    relaunched = [EventRecord(8.0, name, "n3", 0, 5) for name in ("relaunch", "resumed", "first_iteration")]
    assert list_recoveries([*agents, *controllers, *cleared]) == []
    assert list_recoveries([*agents, *controllers, *relaunched, *cleared]) == []


def test_a_recovery_is_completed_when_the_job_is_back() -> None:
    def completed(*names: str, restart: int = 0) -> list[bool]:
        log = [EventRecord(1.0, "detected", "n1", 0, 0, "n2 is silent; witnesses n1, n3")]
        log += [EventRecord(2.0 + i, name, "", restart) for i, name in enumerate(names)]
        return [r["completed"] for r in list_recoveries(log)]

    assert completed("detected", "confirmed", "down", "requeued") == [False], "it waits for a node"
    assert completed("detected", "confirmed", "down", "requeued", "running") == [True]
    assert completed("confirmed", "goes_on") == completed("without", "first_iteration") == [True], "with a spare"
    assert completed("attached", "first_iteration", restart=1) == [True], "without a controller"
    assert completed("relaunch", "first_iteration") == [False], "its ranks began again, and the node is judged still"


def test_event_log_is_bounded_andprintable(tmp_path: Path) -> None:
    logs = EventLogs(str(tmp_path))
    evil = sanitize_event(EventRecord(1e18, "a\x1b[2Jb" * 50, "victim", -1, 0, "x\n\x1b" * 1000), "n1")
    assert evil.host == "n1" and evil.detail.isprintable() and len(evil.detail) <= MAX_DETAIL and len(evil.name) <= 32
    assert abs(evil.t - time.time()) < 10 and evil.restart == 0
    logs.claim_log(7, 5001)
    for _ in range(60):
        logs.append_events(7, [evil] * 100)
    assert os.path.getsize(tmp_path / "7.jsonl") <= MAX_LOG_BYTES * 1.1
    assert len(logs.read_events(7, 5001)) > 100
    assert logs.read_events(8, 5001) == ()


def test_event_log_of_an_earlier_job_with_the_same_id_is_its_owners_alone(tmp_path: Path) -> None:
    """Slurm counts job ids anew after a cold start."""
    logs = EventLogs(str(tmp_path))
    theirs, mine = EventRecord(time.time(), "resumed", "n1", 0), EventRecord(time.time(), "owner", "n2", 0, 5001)
    logs.claim_log(7, 5001)
    logs.append_events(7, [theirs])
    assert logs.read_events(7, 5001) == (theirs,) and logs.read_events(7, 5002) == ()
    logs.claim_log(7, 5001)
    assert logs.read_events(7, 5001) == (theirs,), "the same owner goes on"
    logs.claim_log(7, 5002)
    logs.append_events(7, [mine])
    assert logs.read_events(7, 5001) == () and logs.read_events(7, 5002) == (mine,), (
        "no event can say whose log it is"
    )


def test_a_full_disk_costs_events_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logs, event = EventLogs(str(tmp_path)), EventRecord(time.time(), "resumed", "n1", 0)
    logs.claim_log(7, 5001)
    logs.append_events(7, [event])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", full)
        logs.append_events(7, [event] * 3)
        logs.append_events(7, [event] * 2)
        logs.claim_log(7, 5002)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "events-not-kept so_far=3" in line and "No space left" in line
    logs.append_events(7, [event])
    assert logs.read_events(7, 5001) == (event,), "what is the second owner's is not added to the first one's log"
    logs.claim_log(7, 5002)
    logs.append_events(7, [event])
    assert logs.read_events(7, 5002) == (event,)


def test_journal_remembers_fencing_and_open_recoveries(tmp_path: Path) -> None:
    path = str(tmp_path / "journal.jsonl")
    journal = Journal(path)
    journal.write_line("7.0", "open", "before", job=7, restart=0, dead=["n2"])
    journal.write_line("7.0", "down", "before", node="n2")
    journal.write_line("8.0", "open", "before", job=8, restart=0)
    journal.write_line("8.0", "close", "after", outcome="running")
    journal.close()
    with open(path, "ab") as f:
        f.write(b'{"t": 1, "key": "9.0", "st')  # a crash in mid-line
    again = Journal(path)
    assert again.count_fenced(600.0) == 1 and again.count_fenced(0.0) == 0
    left = again.read_open()
    assert list(left) == ["7.0"] and [r.step for r in left["7.0"]] == ["open", "down"]
    again.write_line("7.0", "close", "after")
    again.close()
    assert Journal(path).read_open() == {}


def test_agents_that_tell_of_millions_of_ranks_cost_an_operator_nothing() -> None:
    one = TrainingState("default", 4, Stamp(1, 7), "protected", (0,))
    huge = tuple(TrainingState(f"s{n}", 1 << 20, Stamp(1, 7), "protected", (0,)) for n in range(64))
    many = tuple(TrainingState(f"t{n}", 1, None, "arming", (0,)) for n in range(20_000))
    part = msgspec.structs.replace(pairs({})[0], trainings=(one, *huge, *many))
    began = time.monotonic()
    found = build_inspect_document(7, [part], [], SLURM, (), "controller", NOW)
    assert time.monotonic() - began < 10
    assert found["trainings"][0]["name"] == "default" and len(found["trainings"]) == 256
    assert any("trainings are not shown" in note for note in found["notes"])


def test_what_agents_say_is_one_line_of_text_in_inspect() -> None:
    """An operator reads it on a terminal."""
    evil = "x\x1b[2J\nrecovery of restart 9\u202e\r"
    state = TrainingState("default", 4, Stamp(1, 7), evil, (0,), evil)
    part = msgspec.structs.replace(
        pairs({})[0], trainings=(state,), state=evil, address=evil, interface=evil, dead=(evil,)
    )
    log = [EventRecord(NOW, "detected", evil, 0, 0, evil), EventRecord(NOW, evil, "n1", 0, 0, evil)]
    text = render(
        printable(build_inspect_document(7, [part], log, SLURM | {"reason": evil}, (evil,), "controller", NOW))
    )
    assert all(line.isprintable() for line in text.split("\n"))
    assert not [line for line in text.split("\n") if line.startswith("recovery of restart 9")]


@pytest.mark.parametrize(
    ("hosts", "ranks", "lost", "said"),
    [
        (("n1", "n2", "n3"), {"n1": 0, "n2": 1}, (), "spares 1 of 1: n3"),
        (("n1", "n3"), {"n1": 0, "n3": 1}, ("n2",), "spares 0 of 1; the job goes on without n2"),
    ],
)
def test_spares_are_shown(hosts: tuple[str, ...], ranks: dict[str, int], lost: tuple[str, ...], said: str) -> None:
    one = part("n1", [])
    one = msgspec.structs.replace(one, hosts=hosts, noderanks=ranks, spares=1, without=lost)
    document = build_inspect_document(
        7, [one], [], {"state": "RUNNING", "nodes": ",".join(hosts)}, (), "controller", NOW
    )
    assert document["spares"]["wanted"] == 1 and said in render(document).splitlines()
    assert build_inspect_document(7, [part("n1", [])], [], {}, (), "controller", NOW)["spares"] is None


def test_from_which_job_it_goes_on() -> None:
    assert build_inspect_document(7, [part("n1", [])], [], {}, (), "controller", NOW)["after"] is None
    parts = [msgspec.structs.replace(part("n1", []), after=6, taken=(("default", Stamp(3, 9)),))]
    document = build_inspect_document(7, parts, [], {}, (), "controller", NOW)
    assert document["after"] == {"job": 6, "took_over": [{"name": "default", "version": [3, 9]}], "lost": ""}
    assert "goes on from job 6: default version 3:9" in render(document)
    parts = [msgspec.structs.replace(part("n1", []), after=6, not_taken="nobody keeps anything")]
    said = render(build_inspect_document(7, parts, [], {}, (), "controller", NOW))
    assert "goes on from job 6: nobody keeps anything" in said


def test_groups_that_share_a_failure_domain_are_named() -> None:
    assert build_inspect_document(7, [part("n1", [])], [], {}, (), "controller", NOW)["domains"] is None

    def said(found: Separation) -> str:
        document = build_inspect_document(
            7, [msgspec.structs.replace(part("n1", []), domains=found)], [], {}, (), "agents", NOW
        )
        assert document["domains"]["known"] == found.known
        return next(line for line in render(document, 300).splitlines() if line.startswith("failure domains"))

    assert said(Separation(4)) == "failure domains: no group has two nodes of one (known of 4 nodes)"
    shared = Separation(4, (Shared("rack1", ("n3", "n4")), Shared("rack2", ("n5", "n6", "n7"))))
    assert said(shared) == "failure domains: n3 and n4 share rack1; n5, n6 and n7 share rack2 (known of 4 nodes)"
    many = Separation(99, tuple(Shared(f"r{k}", ("a", "b")) for k in range(16)), 5)
    assert "; and 13 more groups (" in said(many)


def test_what_the_journal_counts_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of months in which nobody starts the controller anew."""
    now = [1e9]
    monkeypatch.setattr(clock, "time", lambda: now[0])
    journal = Journal(str(tmp_path / "journal.jsonl"))
    for day in range(100):
        now[0] = 1e9 + day * 86400.0
        for step in ("down", "drain", "resume"):
            journal.write_line(NODES, step, "before", node=f"n{day % 3}")
    assert journal.read_fence_times() == {f"n{day % 3}": 1e9 + day * 86400.0 for day in (97, 98, 99)}
    assert (
        journal.count_fenced(600.0),
        journal.count_drained(2 * 86400.0),
        journal.count_given_back("n0", 600.0),
    ) == (1, 3, 1)
    assert all(len(actions) == 3 for actions in journal._actions.values())
    journal.close()
