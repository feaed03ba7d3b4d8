"""Layouts on Lustre: a stand-in for `lfs` records its calls, the file system pretends. Real Lustre was not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import lustre, orders, retention, version, worker

from .places import version_directory
from .test_worker import Node

PLAIN = "(Default) {d}\nstripe_count:  1 stripe_size:   1048576 pattern:       0 stripe_offset: -1\n"
WIDE = "{d}\nstripe_count:  4 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n"
ALL = "{d}\nstripe_count:  -1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n"
POOL = "{d}\nstripe_count:  1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1 pool:          flash\n"
PROGRESSIVE = """{d}
  lcm_layout_gen:    0
  lcm_mirror_count:  1
  lcm_entry_count:   2
    lcme_id:             N/A
    lcme_extent.e_start: 0
    lcme_extent.e_end:   67108864
      stripe_count:  1       stripe_size:   1048576       pattern:       raid0       stripe_offset: -1
"""
GIB = 1 << 30


@pytest.fixture
def on_lustre(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory of which statfs(2) says that it lies on Lustre."""
    directory = tmp_path / "tier"
    directory.mkdir()
    monkeypatch.setattr(lustre, "MAGIC", _magic(directory))
    return directory


def _magic(path: Path) -> int:
    """Of whatever file system the test runs on."""
    import ctypes

    answer = ctypes.create_string_buffer(1024)
    assert ctypes.CDLL(None).statfs(bytes(path), answer) == 0
    return ctypes.c_long.from_buffer(answer).value


class Lfs:
    """The stand-in: says what it is told to, writes down how it was called."""

    def __init__(self, where: Path, says: str, status: int = 0) -> None:
        self.calls_file, self.path = where / "lfs.calls", where / "lfs"
        text = says.replace("{d}", "/x")
        self.path.write_text(f"#!/bin/sh\necho \"$@\" >> {self.calls_file}\ncat <<'END'\n{text}END\nexit {status}\n")
        self.path.chmod(0o755)

    def calls(self) -> list[list[str]]:
        if not self.calls_file.exists():
            return []
        return [line.split() for line in self.calls_file.read_text().splitlines()]


def test_a_plain_default_gets_a_layout(on_lustre: Path, tmp_path: Path) -> None:
    lfs = Lfs(tmp_path, PLAIN)
    assert lustre.lay_out(str(on_lustre), 40 * GIB, str(lfs.path))
    d = str(on_lustre)
    assert lfs.calls() == [["getstripe", "-d", d], ["setstripe", "-c", "5", "-S", "4M", d]]


@pytest.mark.parametrize("says", [WIDE, ALL, POOL, PROGRESSIVE], ids=["wide", "all", "pool", "progressive"])
def test_a_chosen_layout_stays(on_lustre: Path, tmp_path: Path, says: str) -> None:
    lfs = Lfs(tmp_path, says)
    assert not lustre.lay_out(str(on_lustre), 40 * GIB, str(lfs.path))
    assert [call[0] for call in lfs.calls()] == ["getstripe"]


def test_elsewhere_lfs_is_not_even_called(tmp_path: Path) -> None:
    lfs = Lfs(tmp_path, PLAIN)
    assert not lustre.lay_out(str(tmp_path), GIB, str(lfs.path))
    assert lfs.calls() == []


def test_an_lfs_that_is_missing_or_fails_changes_nothing(on_lustre: Path, tmp_path: Path) -> None:
    assert not lustre.lay_out(str(on_lustre), GIB, str(tmp_path / "no-lfs"))
    assert not lustre.lay_out(str(on_lustre), GIB, str(Lfs(tmp_path, PLAIN, status=1).path))
    assert not lustre.lay_out(str(tmp_path / "gone"), GIB, str(Lfs(tmp_path, PLAIN).path))


def test_stripes_by_size() -> None:
    for size_bytes, count in ((0, 1), (1, 1), (8 * GIB, 1), (8 * GIB + 1, 2), (100 * GIB, 13), (1 << 50, 16)):
        assert lustre.choose_stripe_count(size_bytes) == count, size_bytes


def test_the_layout_is_set_before_anybody_can_write(tmp_path: Path) -> None:
    """The directory has its name only when it has its layout."""
    seen = []

    def lay_out(path: str) -> None:
        seen.append((Path(path).name, sorted(p.name for p in Path(path).parent.iterdir() if p.name[0] != ".")))

    made = version_directory(tmp_path, 7, "default", Stamp(1, 2), lay_out)
    again = version_directory(tmp_path, 7, "default", Stamp(1, 2), lay_out)
    assert made == again and Path(made).is_dir() and Path(made).name == version.format_name(Stamp(1, 2))
    assert len(seen) == 1 and seen[0][0].startswith(".") and seen[0][1] == []
    assert [p.name for p in Path(made).parent.iterdir()] == [Path(made).name]


def test_a_version_that_is_written_has_a_layout_for_its_node_s_bytes(
    on_lustre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, lfs = Node(on_lustre), Lfs(tmp_path, PLAIN)
    sources = tuple(node.source(rank) for rank in range(2))
    monkeypatch.setattr(lustre, "_BYTES_PER_STRIPE", sources[0].used)
    for number in range(2):  # two nodes: the second finds what the first has made
        order = orders.Write(node.tier, 5, "default", node.stamp, number, sources, lfs=str(lfs.path))
        assert isinstance(worker.DOES[orders.Write](order), orders.Written)
    node.close()
    [ask, lay_out] = lfs.calls()
    made = Path(ask.pop())
    assert ask == ["getstripe", "-d"] and lay_out == ["setstripe", "-c", "2", "-S", "4M", str(made)]
    assert made.parent == on_lustre / "gemini-5/default" and not made.exists()
    assert made.name.startswith(f".{version.format_name(Stamp(*node.stamp))}."), (
        "it had no name when it got its layout"
    )


def test_two_nodes_make_it_at_once(tmp_path: Path) -> None:
    """Whoever comes second finds the other's, also with a file in it."""

    def other(path: str) -> None:
        directory = Path(path).parent / version.format_name(Stamp(1, 2))
        directory.mkdir()
        (directory / "node-0000.h5").write_text("x")

    made = version_directory(tmp_path, 7, "default", Stamp(1, 2), other)
    assert [p.name for p in Path(made).iterdir()] == ["node-0000.h5"]
    assert [p.name for p in Path(made).parent.iterdir()] == [Path(made).name]


def test_a_directory_that_was_never_named_is_removed_by_the_next_run(tmp_path: Path) -> None:
    (tmp_path / ".e0000001-v0000000000002.abc123.tmp").mkdir()
    (tmp_path / ".mine").mkdir()
    retention.clean(str(tmp_path), 2)
    assert [p.name for p in tmp_path.iterdir()] == [".mine"]
