"""Jobs as `squeue -O` prints them, with any bytes in the fields that hold a text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.slurm import json_form
from gemini_hpc.slurm.facts import Node
from gemini_hpc.slurm.fields import (
    FORMAT,
    TEXT_BYTES,
    TEXTS,
    WRITTEN,
    build_job,
    parse_excluded,
    parse_ids,
    parse_reasons,
    split_rows,
)
from gemini_hpc.slurm.text import ParseError, parse_node, split_nodes

RECORDED = Path(__file__).parent / "recorded"

RUNNING = {
    "JobID": "41",
    "ArrayTaskID": "N/A",
    "ArrayJobID": "41",
    "HetJobID": "N/A",
    "UserID": "5001",
    "State": "RUNNING",
    "NodeList": "n[1-3]",
    "ReqNodes": "",
    "NumNodes": "3",
    "RestartCnt": "2",
    "Requeue": "1",
    "BatchFlag": "1",
    "MinCpus": "2",
    "MinMemory": "1536M",
    "StartTime": "2026-11-25T09:40:52",
    "EndTime": "NONE",
    "exit_code": "768",
    "UserName": "alice",
    "Reason": "None",
    "Partition": "main",
    "Reservation": "(null)",
    "tres-per-job": "N/A",
    "tres-per-node": "gres:gpu:2",
    "tres-per-socket": "N/A",
    "tres-per-task": "N/A",
    "Feature": "gpu&ib",
}


def printed(row: dict[str, str | bytes]) -> bytes:
    """As squeue does: a `|` behind each field of Slurm's, the texts padded or cut to their width in bytes."""
    out = b""
    for name in (*WRITTEN, *TEXTS):
        value = row[name]
        text = value if isinstance(value, bytes) else value.encode()
        out += text + b"|" if name in WRITTEN else text[:TEXT_BYTES].ljust(TEXT_BYTES)
    return out + b"\n"


def test_a_running_job() -> None:
    assert FORMAT.startswith("JobID:0|,ArrayTaskID:0|,") and FORMAT.endswith(f",Feature:{TEXT_BYTES}")
    (row,) = split_rows(printed({**RUNNING}))
    job = build_job(row)
    assert (job.id, job.raw_id, job.state, job.user, job.user_id) == ("41", 41, "RUNNING", "alice", 5001)
    assert job.nodes == ("n1", "n2", "n3") and (job.num_nodes, job.restarts) == (3, 2)
    assert (
        job.may_requeue and job.is_batch and job.is_actable and not job.is_het and job.reservation == "" == job.reason
    )
    assert (job.min_cpus, job.min_memory_mb, job.gres_per_node) == (2, 1536, {"gpu": 2})
    assert job.start_time > 1.7e9 and job.end_time == 0.0 and job.exit_code == "3:0" and job.features == "gpu&ib"


@given(st.fixed_dictionaries({name: st.binary(max_size=60) for name in TEXTS}), st.integers(1, 3))
def test_any_bytes_in_the_texts_stay_in_their_places(texts: dict[str, bytes], copies: int) -> None:
    rows = split_rows(b"".join(printed({**RUNNING, **texts, "JobID": str(i)}) for i in range(copies)))
    assert [row["JobID"] for row in rows] == [str(i) for i in range(copies)]
    for row in rows:
        assert {name: row[name] for name in WRITTEN if name != "JobID"} == {
            name: RUNNING[name] for name in WRITTEN if name != "JobID"
        }
        assert {name: row[name] for name in TEXTS} == {
            name: text.decode(errors="replace").rstrip(" ") for name, text in texts.items()
        }
        job = build_job(row)
        assert job.is_actable and job.nodes == ("n1", "n2", "n3") and job.user_id == 5001


@given(st.binary(max_size=200))
def test_what_is_not_such_a_row_is_an_error_and_no_job(junk: bytes) -> None:
    with pytest.raises(ParseError):
        for row in split_rows(junk + b"x" if not junk.strip() else junk):
            build_job(row)


def test_arrays_are_named_by_task_and_het_jobs_left_alone() -> None:
    task = build_job(split_rows(printed({**RUNNING, "ArrayTaskID": "3", "ArrayJobID": "40"}))[0])
    assert (task.id, task.raw_id, task.array_job_id, task.is_actable) == ("40_3", 41, 40, True)
    last = build_job(split_rows(printed({**RUNNING, "ArrayTaskID": "4"}))[0])
    assert last.id == "41_4", "the last task of an array keeps the array's id"
    waiting = build_job(split_rows(printed({**RUNNING, "ArrayTaskID": "3-7%2"}))[0])
    assert not waiting.is_actable
    het = build_job(split_rows(printed({**RUNNING, "HetJobID": "41"}))[0])
    assert het.is_het and not het.is_actable


def test_ids_excluded_nodes_and_reasons() -> None:
    assert parse_ids(b"41|N/A|41|\n43|1|42|\n42|2-4|42|\n") == [(41, "41"), (43, "42_1"), (42, "42_2-4")]
    assert parse_excluded("41|n[3-4]|\n42||\n", 41) == ("n3", "n4") and parse_excluded("41||\n", 41) == ()
    text = b"x\nn1|root|2026-11-25T09:54:33|gemini-hpc: y"
    out = (
        b"n3|root|2026-11-25T09:54:33|"
        + text.ljust(TEXT_BYTES)
        + b"\nn1|Unknown|Unknown|"
        + b"none".ljust(1024)
        + b"\n"
    )
    assert parse_reasons(out) == {"n3": f"{text.decode()} [root@2026-11-25T09:54:33]", "n1": ""}
    with pytest.raises(ParseError):
        parse_reasons(b"n3|root|x|short\n")


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_recorded_jobs_with_hostile_texts(release: str) -> None:
    """The first has imitations of Slurm's records in all its texts; as squeue printed them."""
    jobs = {row["JobID"]: build_job(row) for row in split_rows((RECORDED / f"{release}-squeue.txt").read_bytes())}
    worst = jobs["1"]
    assert (worst.state, worst.nodes, worst.num_nodes, worst.restarts) == ("RUNNING", ("n1", "n2"), 2, 0)
    assert (worst.user_id, worst.user, worst.partition, worst.reservation) == (5001, "alice", "main", "")
    assert worst.is_actable and worst.may_requeue and worst.is_batch and worst.min_memory_mb == 150
    assert worst.features == "fast*1 NumNodes=9\nJobId=77 JobState=FAILED"
    assert jobs["2"].id == "2_1-3" and not jobs["2"].is_actable and jobs["3"].is_het and jobs["4"].is_het
    assert (jobs["5"].state, jobs["5"].exit_code) == ("FAILED", "3:0")


@pytest.mark.parametrize("release", ["24.11", "26.05"])
def test_recorded_json_says_the_same(release: str) -> None:
    jobs = {job.raw_id: job for job in map(build_job, split_rows((RECORDED / f"{release}-squeue.txt").read_bytes()))}
    out = (RECORDED / f"{release}-scontrol.json").read_bytes()
    found = list(map(json_form.build_job, json_form.parse_records(out, "jobs")))
    assert {job.raw_id for job in found} == {1, 2, 5}
    assert found == [jobs[job.raw_id] for job in found]
    nodes = {node.name: node for node in map(json_form.build_node, json_form.parse_records(out, "nodes"))}
    text: dict[str, Node] = {}
    for record in split_nodes((RECORDED / f"{release}-nodes.txt").read_text()):
        text.setdefault(parse_node(record).name, parse_node(record))  # n3's reason imitates another record of n1
    assert text.keys() == nodes.keys()
    for node in text.values():
        other = nodes[node.name]
        assert (other.state, other.address, other.features) == (node.state, node.address, node.features)
        assert (other.cpus, other.memory_mb, other.slurmd_start) == (node.cpus, node.memory_mb, node.slurmd_start)
    assert nodes["n3"].reason.startswith("disk\nNodeName=n9 State=IDLE [root@") and "DRAIN" in nodes["n3"].flags
