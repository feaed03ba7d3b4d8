"""What Slurm prints: recorded from 22.05.8, and the shapes of 24.11 as its sources print them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.control.slurm.facts import LIVE
from gemini_hpc.control.slurm.text import (
    ParseError,
    parse_config,
    parse_job,
    parse_node,
    parse_partition,
    parse_ping,
    parse_reservation,
    parse_row,
    state_of,
)

RECORDED = Path(__file__).parent / "recorded"


def lines(name: str) -> list[str]:
    return [line for line in (RECORDED / name).read_text().splitlines() if line.strip()]


def test_running_job_whose_name_imitates_optional_fields() -> None:
    job = parse_job(lines("22.05-job-running.txt")[0])
    assert (job.id, job.raw_id, job.state, job.user, job.user_id) == ("1", 1, "RUNNING", "alice", 5001)
    assert job.nodes == ("n1", "n2", "n3") and job.batch_host == "n1" and job.num_nodes == 3
    assert job.requeue and job.batch and job.actable and not job.het and job.restarts == 0
    assert job.reservation == "" and job.array_job_id is None, "text of the owner was taken for Slurm's"


def test_states_of_a_requeue() -> None:
    assert parse_job(lines("22.05-job-reserved.txt")[0]).reservation == "gemini_1_ab"
    completing = parse_job(lines("22.05-job-completing.txt")[0])
    assert (completing.state, completing.restarts) == ("COMPLETING", 1)
    pending = parse_job(lines("22.05-job-pending.txt")[0])
    assert (pending.state, pending.nodes, pending.req_nodes) == ("PENDING", (), ("n1", "n2"))
    assert pending.start_time > 1.7e9 and not pending.over


def test_a_name_that_imitates_the_owner_is_refused() -> None:
    with pytest.raises(ParseError, match="UserId"):
        parse_job(lines("22.05-imitating.txt")[0])


@given(
    st.sampled_from(("UserId=root(0)", "JobState=FAILED", "NodeList=n9", "ReqNodeList=n9", "Restarts=7", "Requeue=1"))
)
def test_no_text_of_the_owner_changes_a_deciding_field(fake: str) -> None:
    line = lines("22.05-job-completing.txt")[0]
    honest = parse_job(line)
    for key in ("JobName=", "Network=", "WorkDir=", "Comment="):
        forged = line.replace(key, f"{key}a {fake} ", 1)
        with pytest.raises(ParseError):
            parse_job(forged)
    optional = "Reservation=x HetJobId=3 ArrayJobId=3 ArrayTaskId=1 BatchHost=n9"
    forged = line.replace("WorkDir=", f"WorkDir=a {optional} ", 1)
    assert parse_job(forged) == honest


def test_array_tasks_are_updated_by_task_and_never_as_a_whole() -> None:
    jobs = {job.raw_id: job for job in map(parse_job, lines("22.05-array.txt"))}
    assert sorted(job.id for job in jobs.values()) == ["2_1", "2_2", "2_3"]
    assert jobs[2].id == "2_3" and jobs[2].actable, "the last task keeps the array's id"
    several = lines("22.05-array.txt")[0].replace("ArrayTaskId=3", "ArrayTaskId=3-7%2")
    assert not parse_job(several).actable


def test_heterogeneous_jobs_are_never_acted_on() -> None:
    assert all(job.het and not job.actable for job in map(parse_job, lines("22.05-het.txt")))


def test_nodes() -> None:
    nodes = {node.name: node for node in map(parse_node, lines("22.05-nodes.txt"))}
    assert nodes["n3"].idle and nodes["n3"].address == "10.77.0.13" and nodes["n3"].cpus == 4
    assert nodes["n1"].up and not nodes["n1"].idle, "reserved by somebody"
    assert nodes["n5"].down and not nodes["n5"].up and nodes["n5"].reason.startswith("gemini-hpc:")
    assert nodes["n1"].slurmd_start > nodes["n1"].boot_time > 1.7e9


def test_later_releases() -> None:
    job_line, node_line = lines("24.11-shapes.txt")
    job = parse_job(job_line)
    assert (job.restarts, job.num_nodes, job.min_cpus, job.min_memory_mb) == (2, 3, 2, 1536)
    assert (job.reservation, job.features, job.req_nodes) == ("weekly", "gpu&ib", ("n1", "n2"))
    node = parse_node(node_line)
    assert node.down and "NOT_RESPONDING" in node.flags and node.port == 16818
    assert node.partitions == ("main", "long") and node.features == {"gpu", "ib"} and node.slurmd_start == 0.0


@pytest.mark.parametrize(
    ("text", "state"),
    [("RUNNING", "RUNNING"), ("PENDING,COMPLETING", "COMPLETING"), ("RUNNING,CONFIGURING", "CONFIGURING")],
)
def test_compound_states(text: str, state: str) -> None:
    assert state_of(text) == state


@pytest.mark.parametrize(
    ("text", "up", "down"),
    [
        ("IDLE", True, False),
        ("IDLE*", False, False),
        ("MIXED+PLANNED", True, False),
        ("DOWN*", False, True),
        ("DOWN*+DRAIN", False, True),
        ("ALLOCATED+DRAIN", False, False),
        ("IDLE+POWERED_DOWN", False, False),
        ("ALLOCATED+COMPLETING", True, False),
    ],
)
def test_node_states(text: str, up: bool, down: bool) -> None:
    node = parse_node(f"NodeName=n1 State={text} ThreadsPerCore=1")
    assert (node.up, node.down) == (up, down)


def test_rows_and_reservations() -> None:
    rows = [parse_row(line) for line in lines("22.05-rows.txt")]
    assert [r.raw_id for r in rows] == [1, 4, 5, 2, 3]
    assert rows[0].nodes == ("n1", "n2", "n3")
    assert rows[0].end_time == datetime(2026, 11, 23, 21, 9, 50, tzinfo=UTC).timestamp()
    pending = parse_row("1|5001|PENDING||N/A")
    assert pending.nodes == () and pending.end_time == 0.0
    for bad in ("1|alice|PENDING||N/A", "1|5001|PENDING|"):
        with pytest.raises(ParseError):
            parse_row(bad)
    reservation = parse_reservation(lines("22.05-reservation.txt")[0])
    assert reservation.nodes == ("n1", "n2", "n4") and reservation.users == ("5001",)


def test_every_state_of_slurm_is_live_or_over() -> None:
    assert LIVE.isdisjoint({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"})


def test_site_11_gres_of_jobs_and_nodes() -> None:
    line = lines("22.05-job-running.txt")[0]
    assert parse_job(line).gres_per_node == {}
    for text in ("TresPerNode=gres:gpu:a100:2", "TresPerNode=gres/gpu:a100:2", "TresPerNode=gres/gpu:a100=2"):
        assert parse_job(f"{line} {text}").gres_per_node == {"gpu": 2, "gpu:a100": 2}
    assert parse_job(f"{line} TresPerJob=gres:gpu:16 TresPerTask=cpu:4").gres_per_node == {"gpu": 1}
    node = "NodeName=n1 State=IDLE Gres="
    assert parse_node(node + "gpu:a100:4(S:0-1),nvme:1,bw:2K").gres == {
        "gpu": 4,
        "gpu:a100": 4,
        "nvme": 1,
        "bw": 2048,
    }
    assert parse_node(node + "(null)").gres == {} and parse_node(node + "gpu").gres == {"gpu": 1}


def test_site_05_configuration_and_ping() -> None:
    text = """Configuration data as of 2026-11-21T16:00:00
BOOT_TIME               = 2026-11-21T15:59:00
SlurmctldHost[0]        = ctl(10.77.0.1)
SlurmctldHost[1]        = n6
StateSaveLocation       = /var/spool/slurm/state

Slurmctld(primary) at ctl is UP
Slurmctld(backup) at n6 is DOWN
"""
    config = parse_config(text)
    assert config.slurmctld_hosts == (("ctl", "10.77.0.1"), ("n6", "n6"))
    assert config.state_save == "/var/spool/slurm/state" and config.boot_time > 1.7e9
    assert parse_ping(text) == [("ctl", True), ("n6", False)]
    with pytest.raises(ParseError):
        parse_config("nothing")


def test_partitions() -> None:
    line = "PartitionName=long AllowGroups=ALL Default=NO Nodes=n[1-5] OverSubscribe=NO State=DRAIN TotalCPUs=20"
    assert parse_partition(line) == ("long", "DRAIN")
    for bad in ("", "No partitions in the system", "PartitionName=long"):
        with pytest.raises(ParseError):
            parse_partition(bad)
