"""What an agent's successor knows of seals: lines of a file, each of one set and one recovery round."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gemini_hpc.agent.replicas.seal_notes import NAME, SealNotes, Within
from gemini_hpc.core.slots import Stamp

HERE = Within(restart=1, round=3, epoch=66)


def test_a_successor_finds_the_newest_of_each_set_in_its_round_alone(tmp_path: Path) -> None:
    notes = SealNotes(str(tmp_path))
    for version in range(1, 200):
        assert notes.note("default", HERE, Stamp(66, version))
    assert notes.note("critic", HERE, Stamp(65, 7))
    assert notes.note("old", HERE._replace(round=2), Stamp(65, 9))
    found = SealNotes(str(tmp_path))
    assert found.read(HERE) == {"default": Stamp(66, 199), "critic": Stamp(65, 7)}
    assert found.read(HERE._replace(restart=2)) == {} == found.read(HERE._replace(epoch=67))
    assert (tmp_path / NAME).stat().st_size < 1000, "one line a set"


def test_a_successor_writes_into_its_predecessors_lines(tmp_path: Path) -> None:
    first = SealNotes(str(tmp_path))
    for name in ("a", "b"):
        first.note(name, HERE, Stamp(66, 1))
    second = SealNotes(str(tmp_path))
    for name, version in (("c", 1), ("b", 2), ("a", 3)):
        second.note(name, HERE, Stamp(66, version))
    third = SealNotes(str(tmp_path))
    assert third.read(HERE) == {"a": Stamp(66, 3), "b": Stamp(66, 2), "c": Stamp(66, 1)}
    assert (tmp_path / NAME).read_bytes().count(b"\n") == 3
    third.remove()
    assert not list(tmp_path.iterdir())


NO_LINES = [b"", b"\xff\xfe", b'["default"', b"[" * 5000, b'["../x",1,3,66,[66,9]]', b"{}", b"7"]


@pytest.mark.parametrize("line", NO_LINES)
def test_what_is_no_line_is_passed_over(tmp_path: Path, line: bytes) -> None:
    """The directory is the job's owner's."""
    (tmp_path / NAME).write_bytes(b'["default",1,3,66,[66,5]]\n' + line + b"\n")
    notes = SealNotes(str(tmp_path))
    assert notes.read(HERE) == {"default": Stamp(66, 5)}
    assert notes.note("more", HERE, Stamp(66, 6))


@pytest.mark.parametrize("way", ["link", "directory", "fifo"])
def test_what_lies_in_the_way_is_not_followed(tmp_path: Path, way: str) -> None:
    (target := tmp_path / "target").write_text("untouched")
    match way:
        case "link":
            (tmp_path / NAME).symlink_to(target)
        case "directory":
            (tmp_path / NAME).mkdir()
        case "fifo":
            os.mkfifo(tmp_path / NAME)
    notes = SealNotes(str(tmp_path))
    assert not notes.note("default", HERE, Stamp(66, 1)) and notes.read(HERE) == {}
    assert target.read_text() == "untouched"
    notes.remove()
