from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.core.hostlist import compress, expand

names = st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True)
numbered = st.builds(
    lambda prefix, number, width: f"{prefix}{number:0{width}d}",
    st.sampled_from(["n", "gpu", "rack1-n", "a.b"]),
    st.integers(0, 120),
    st.integers(0, 4),
)


def test_expand() -> None:
    for text, hosts in (
        ("", []),
        ("login", ["login"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        (
            "n[1-2],gpu[001-002]x[1-2],login",
            ["n1", "n2", "gpu001x1", "gpu001x2", "gpu002x1", "gpu002x2", "login"],
        ),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[3,1-2]", ["n3", "n1", "n2"]),
        ("n[1,1]", ["n1", "n1"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
    ):
        assert expand(text) == hosts, text


def test_what_is_no_hostlist_is_refused_at_once() -> None:
    for text in (
        *("n[1-3", "n1]", "n[[1]]", "n[]", "n[2-1]", "n[1-]", "n[a-b]", "a,,b", ","),
        *("n 1", "n;reboot", "$(id)", "n[1]\nx", "ü", "n[1-9]" * 9),
        *("n[0-999999999999999999]", "n[1-9999999999999999999]", "n[1-300]x[1-300]"),
    ):
        assert re.search(r"hostlist|number|name", refusal(ValueError, expand, text)), text


def test_the_limit_counts_over_all_names() -> None:
    assert len(expand("n[1-10],m[1-10]", limit=20)) == 20
    with pytest.raises(ValueError, match="more than 19 hosts"):
        expand("n[1-10],m[1-10]", limit=19)


@given(st.lists(st.one_of(names, numbered), max_size=40))
def test_round_trip_keeps_order_and_repetitions(hosts: list[str]) -> None:
    assert expand(compress(hosts)) == hosts


def test_neighbours_share_a_bracket() -> None:
    assert compress([f"n{i}" for i in range(1, 1001)]) == "n[1-1000]"
    assert compress(["n08", "n09", "n10", "n3", "n4", "m"]) == "n[08-10,3-4],m"


@given(st.text(max_size=30))
def test_any_text_gives_hosts_or_value_error(text: str) -> None:
    try:
        hosts = expand(text, limit=1000)
    except ValueError:
        return
    assert expand(compress(hosts), limit=1000) == hosts


def test_slurm_reads_the_same(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n")
    mixed = compress(["n08", "n09", "n10", "n3", "n4", "m", "x1y2", "x1y3", "n007", "n1-ib", "n2-ib"])
    texts = ["n[1-3,7],gpu[001-002]x[1-2],login", "n[098-101],n[01,2],n[9-010]", "n[1-2][3-4]", "n[0-00]", mixed]
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", ",".join(texts)],
        env={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert shown.stdout.split() == expand(",".join(texts))
