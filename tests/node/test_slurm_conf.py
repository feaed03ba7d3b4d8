"""Root's programs read slurm.conf as Slurm does: slurmd must find the same spool as they."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gemini_hpc.node import slurm_conf as conf

HOST = os.uname().nodename.split(".")[0]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("SlurmdSpoolDir=/a/%n", "/a/n1"),
        ("SLURMDSPOOLDIR = /a/%n", "/a/n1"),
        ("SlurmdSpoolDir= /a/%h TmpFS=/t", f"/a/{HOST}"),
        ('SlurmdSpoolDir="/a b/%n"', "/a b/n1"),
        ('Epilog="/e SlurmdSpoolDir=/wrong" SlurmdSpoolDir="/a"', "/a"),
        ("SlurmdSpoolDir=", "/var/spool/slurmd"),
        ("Include more.conf", "/included"),
        ('iNCLUDE\t "more.conf"', "/included"),
        ("ClusterName=more\nInclude %c.conf", "/included"),
    ],
)
def test_the_spool_is_slurmds(tmp_path: Path, line: str, wanted: str) -> None:
    (tmp_path / "more.conf").write_text("SlurmdSpoolDir=/included\n")
    (tmp_path / "slurm.conf").write_text(f"# SlurmdSpoolDir=/wrong\n{line}\n")
    assert conf.find_spool(conf.read_values(str(tmp_path / "slurm.conf")), "n1") == wanted


def test_a_host_may_be_several_nodes() -> None:
    lines = ["NodeName=DEFAULT CPUs=4", f"NodeName=n[1-2] NodeHostname={HOST} Port=[17001-17002]"]
    lines += [f"NodeName=m[1-2] NodeHostname=other,{HOST}", "NodeName=x NodeHostname=[", "NodeName=y"]
    assert set(conf.find_nodes("\n".join(lines))) == {HOST, os.uname().nodename, "n1", "n2", "m2"}
