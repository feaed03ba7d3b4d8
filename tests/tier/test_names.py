"""Names of versions that stay for good: given, found, never lost to retention, whatever stands in the file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from gemini_hpc.cli.main import main
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import names, orders, retention, version
from gemini_hpc.tier.find import find
from gemini_hpc.wire.stored import Rejection

from .test_version import save
from .test_worker import WITHOUT_RIGHTS, Node, carry_out, here, look


def keep(node: Node, **wanted: int) -> orders.Finished:
    answer = node.save(keep_last=1, names=wanted)
    assert isinstance(answer, orders.Finished), answer
    return answer


def node(tier: Path, number: int, epoch: int = 1) -> Node:
    return Node(tier, Stamp(epoch, number))


def test_what_has_a_name_stays_and_is_found(tmp_path: Path) -> None:
    assert keep(node(tmp_path, 3), best=3, other=2).names == {"best": (3, (1, 3)), "other": (2, (1, 3))}
    assert keep(node(tmp_path, 4)).removed == ()
    assert keep(node(tmp_path, 5)).removed == ((1, 4),)
    job = tmp_path / "gemini-5"
    assert [m.stamp for m in look(tmp_path).manifests] == [(1, 5)], "recoveries take the newest"
    for path in (f"{tmp_path}@best", f"{job}@other", f"{job}/default@best"):
        assert find(path)[1].stamp == (1, 3)
    assert find(str(job))[1].stamp == (1, 5)
    with pytest.raises(ValueError, match="no version has the name worst; the names there: best, other"):
        find(f"{job}@worst")


def test_a_directory_with_such_a_name_is_that_directory(tmp_path: Path) -> None:
    (tmp_path / "mine@best").mkdir()
    save(tmp_path / "mine@best", Stamp(1, 7))
    assert find(f"{tmp_path}/mine@best")[1].stamp == (1, 7)


def test_a_name_is_given_once(tmp_path: Path) -> None:
    keep(node(tmp_path, 3), best=3)
    assert keep(node(tmp_path, 6), best=6, more=6).names == {"best": (3, (1, 3)), "more": (6, (1, 6))}
    assert keep(node(tmp_path, 3, epoch=2), best=3).names == {"best": (3, (1, 3))}, "the same wish, after a restart"
    assert not (tmp_path / "gemini-5/default" / version.format_name(Stamp(2, 3)) / version.KEPT).exists()


def test_a_whole_version_gets_a_name_later(tmp_path: Path) -> None:
    keep(node(tmp_path, 3), first=3)
    order = orders.Name(str(tmp_path), 5, "default", Stamp(1, 3), {"second": 2, "first": 3})
    assert here(order).names == {"second": (2, (1, 3)), "first": (3, (1, 3))}
    where = tmp_path / "gemini-5/default" / version.format_name(Stamp(1, 3))
    assert names.read_version_names(str(where)) == {"first": 3, "second": 2}
    failed = here(orders.Name(str(tmp_path), 5, "default", Stamp(1, 4), {"x": 4}))
    assert isinstance(failed, orders.Failed) and "no longer there" in failed.reason
    assert not (where.parent / version.format_name(Stamp(1, 4))).exists()


def test_whatever_stands_in_the_file_the_version_stays(tmp_path: Path) -> None:
    long = '{"a":1}' + " " * (2 << 20)
    for text in ("", "{", "[]", '{"../x": 1}', '{"a/b": 1}', '{"a": -1}', '{"a": "b"}', "\0", long, None):
        tier = Path(tempfile.mkdtemp(dir=tmp_path))
        save(tier, Stamp(1, 5))
        save(tier, Stamp(1, 6))
        where = tier / "gemini-9/default" / version.format_name(Stamp(1, 5))
        (where / version.KEPT).mkdir() if text is None else (where / version.KEPT).write_text(text)
        assert names.read_version_names(str(where)) == {}, (text or "a directory")[:40]
        assert retention.clean(str(where.parent), 1) == [] and where.exists(), (text or "a directory")[:40]


def test_a_link_in_its_place_names_nothing(tmp_path: Path) -> None:
    save(tmp_path, Stamp(1, 5))
    where = tmp_path / "gemini-9/default" / version.format_name(Stamp(1, 5))
    (tmp_path / "elsewhere").write_text('{"a": 1}')
    (where / version.KEPT).symlink_to(tmp_path / "elsewhere")
    assert names.read_version_names(str(where)) == {}
    names.keep_version(str(where), {"b": 5})
    assert names.read_version_names(str(where)) == {"b": 5}
    assert (tmp_path / "elsewhere").read_text() == '{"a": 1}'


def test_they_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(node(tmp_path, 3), best=3)
    keep(node(tmp_path, 8))
    for what in (["5", "--tier", str(tmp_path)], [f"{tmp_path}/gemini-5"], [f"{tmp_path}/gemini-5/default"]):
        assert main(["versions", *what]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [(row[1], row[-1]) for row in rows[1:]] == [("8", rows[1][-1]), ("3", "best")]
    assert main(["versions", "5", "--tier", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(v["version"], v["names"], v["kept"]) for v in told["versions"]] == [
        ([1, 8], [], False),
        ([1, 3], ["best"], True),
    ]
    (tmp_path / "file").touch()
    for path, said in (
        (f"{tmp_path}/nowhere", f"{tmp_path}/nowhere: no such directory"),
        (f"{tmp_path}/file", f"{tmp_path}/file: not a directory"),
        ("", "'': no such directory"),
    ):
        assert main(["versions", path]) == 1
        assert said in capsys.readouterr().err


def rejection(low: tuple[int, int], high: tuple[int, int]) -> Rejection:
    return Rejection("default", Stamp(*low), Stamp(*high), "the loss is NaN")


def test_rejected_versions_are_not_offered_and_say_so_themselves(tmp_path: Path) -> None:
    for epoch, number in ((1, 3), (1, 5), (2, 6), (3, 4)):
        keep(node(tmp_path, number, epoch=epoch), **{f"v{number}": number})
    set_path = str(tmp_path / "gemini-5/default")
    order = orders.Look(str(tmp_path), 5, "", rejected=(rejection((1, 5), (2, 99)), rejection((3, 4), (3, 4))))
    assert [m.stamp for m in here(order).manifests] == [(1, 3)]
    assert [m.stamp for m in look(tmp_path).manifests] == [(1, 3)], "also to who does not know of it"
    assert [version.is_rejected(set_path, s) for s in version.list_stamps(set_path)] == [True, True, True, False]
    passed: list[str] = []
    assert find(set_path, passed_over=passed.append)[1].stamp == (1, 3) and len(passed) == 3
    assert find(set_path, number=6)[1].stamp == (2, 6) and find(f"{set_path}@v4")[1].stamp == (3, 4)
    assert (Path(set_path) / version.format_name(Stamp(1, 5)) / version.REJECTED).read_text() == "the loss is NaN\n"


def test_rejected_versions_stay_and_are_not_counted(tmp_path: Path) -> None:
    for number in (3, 4, 5):
        save(tmp_path, Stamp(1, number))
    directory = tmp_path / "gemini-9/default"
    (directory / version.format_name(Stamp(1, 5)) / version.REJECTED).write_text("")
    assert retention.clean(str(directory), 1) == [Stamp(1, 3)]
    assert version.list_stamps(str(directory)) == [Stamp(1, 5), Stamp(1, 4)]


@pytest.mark.slow
def test_a_tier_where_one_may_not_write_is_looked_at_all_the_same(tmp_path: Path) -> None:
    keep(node(tmp_path, 3), old=3)
    keep(node(tmp_path, 5))
    where = tmp_path / "gemini-5/default" / version.format_name(Stamp(1, 5))
    where.chmod(0o500)
    order = orders.Look(str(tmp_path), 5, "", rejected=(rejection((1, 5), (2, 99)),))
    assert carry_out(order, before=WITHOUT_RIGHTS).manifests[0].stamp == (1, 3)
    where.chmod(0o700)
    assert not (where / version.REJECTED).exists()
