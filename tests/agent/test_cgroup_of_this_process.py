"""What root reads of its own place: users choose the names of mount points, in any bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_hpc.node import cgroup


def test_a_mount_point_that_is_no_text_hides_no_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All agents of the node would count in slurmd's cgroup, and nobody would be told."""
    odd = tmp_path / "mountinfo"
    with open("/proc/self/mountinfo", "rb") as f:
        odd.write_bytes(b"999 1 0:99 / /home/u/\xff\xfe rw - fuse.sshfs u rw\n" + f.read())
    before, read = cgroup.find_place(), cgroup._read_text
    monkeypatch.setattr(cgroup, "_read_text", lambda path: read(str(odd) if path == "/proc/self/mountinfo" else path))
    assert cgroup.find_place() == before
