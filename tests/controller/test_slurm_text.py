"""What Slurm prints: recorded from 22.05.8, and the shapes of 24.11 as its sources print them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from gemini_hpc.slurm.facts import LIVE
from gemini_hpc.slurm.text import (
    ParseError,
    hides_reason,
    parse_config,
    parse_gres_needed,
    parse_node,
    parse_partition,
    parse_ping,
    parse_reservation,
    parse_row,
    parse_state,
    split_nodes,
)

RECORDED = Path(__file__).parent / "recorded"


def lines(name: str) -> list[str]:
    return [line for line in (RECORDED / name).read_text().splitlines() if line.strip()]


def test_nodes() -> None:
    nodes = {node.name: node for node in map(parse_node, lines("22.05-nodes.txt"))}
    assert nodes["n3"].is_idle and nodes["n3"].address == "10.77.0.13" and nodes["n3"].cpus == 4
    assert nodes["n1"].is_up and not nodes["n1"].is_idle, "reserved by somebody"
    assert nodes["n5"].is_down and not nodes["n5"].is_up and nodes["n5"].reason.startswith("gemini-hpc:")
    assert nodes["n1"].slurmd_start > nodes["n1"].boot_time > 1.7e9


def test_texts_of_operators_in_records_of_nodes() -> None:
    """A comment with `Reason=` and a line break, as 22.05.8 prints it (the reason first) and in the other order."""
    written = "NodeName=n3 Gres=(null) NodeAddr=n3 RealMemory=2000 State=IDLE+DRAIN Partitions=main "
    forged = "MemSpecLimit=9 Reason=gemini-hpc: lost\nState=DOWN"
    for texts, reason, hidden in (
        (f"Reason=disk [root@2026-11-25T09:54:33] Comment={forged}", "disk [root@2026-11-25T09:54:33]", False),
        (
            "Reason=gemini-hpc: State=x [root@2026-11-25T09:54:33]",
            "gemini-hpc: State=x [root@2026-11-25T09:54:33]",
            False,
        ),
        (f"Comment={forged} Reason=disk [root@2026-11-25T09:54:33]", "", True),
        (f"Extra={forged}", "", True),
        ("Comment=x", "", False),
    ):
        record, other = split_nodes(f"{written}{texts}\nNodeName=n4 State=IDLE\n")
        node = parse_node(record)
        assert (node.name, node.state, node.reason, node.spec_memory_mb) == ("n3", "IDLE", reason, 0)
        assert hides_reason(record) is hidden and parse_node(other).name == "n4"


def test_later_releases() -> None:
    node = parse_node(lines("24.11-shapes.txt")[1])
    assert node.is_down and "NOT_RESPONDING" in node.flags and node.port == 16818
    assert node.partitions == ("main", "long") and node.features == {"gpu", "ib"} and node.slurmd_start == 0.0


def test_compound_states() -> None:
    cases: list[tuple[str, str]] = [
        ("RUNNING", "RUNNING"),
        ("PENDING,COMPLETING", "COMPLETING"),
        ("RUNNING,CONFIGURING", "CONFIGURING"),
    ]
    for case in cases:
        text, state = case
        assert parse_state(text) == state, case


def test_node_states() -> None:
    cases: list[tuple[str, bool, bool]] = [
        ("IDLE", True, False),
        ("IDLE*", False, False),
        ("MIXED+PLANNED", True, False),
        ("DOWN*", False, True),
        ("DOWN*+DRAIN", False, True),
        ("ALLOCATED+DRAIN", False, False),
        ("IDLE+POWERED_DOWN", False, False),
        ("ALLOCATED+COMPLETING", True, False),
    ]
    for case in cases:
        text, up, down = case
        node = parse_node(f"NodeName=n1 State={text} ThreadsPerCore=1")
        assert (node.is_up, node.is_down) == (up, down), case


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


def test_gres_of_jobs_and_nodes() -> None:
    assert parse_gres_needed("N/A", "(null)") == {}
    for text in ("gres:gpu:a100:2", "gres/gpu:a100:2", "gres/gpu:a100=2"):
        assert parse_gres_needed(text) == {"gpu": 2, "gpu:a100": 2}
    assert parse_gres_needed("", "gres:gpu:16", "cpu:4") == {"gpu": 1}
    node = "NodeName=n1 State=IDLE Gres="
    assert parse_node(node + "gpu:a100:4(S:0-1),nvme:1,bw:2K").gres == {
        "gpu": 4,
        "gpu:a100": 4,
        "nvme": 1,
        "bw": 2048,
    }
    assert parse_node(node + "(null)").gres == {} and parse_node(node + "gpu").gres == {"gpu": 1}


def test_configuration_and_ping() -> None:
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
