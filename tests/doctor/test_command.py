"""The command itself: exit status, choice of checks, users, and checks that break or hang. No cluster."""

from __future__ import annotations

import json
import os
import re
import struct
import threading
import time
from pathlib import Path

import pytest

from gemini_hpc.cli.main import main
from gemini_hpc.config import Settings
from gemini_hpc.doctor import examine, memory, network, plugin, slurm
from gemini_hpc.doctor.examine import ANYWHERE, ON_NODE, Check
from gemini_hpc.doctor.facts import Configuration, Here, HostFacts, SlurmRelease
from gemini_hpc.doctor.finding import STATUSES, Outcome, Unavailable, report_ok, report_warning
from gemini_hpc.doctor.leftovers import parse_age_s
from gemini_hpc.doctor.memory import list_unit_files, read_unit_setting
from gemini_hpc.doctor.network import Range, is_reserved, parse_listeners
from gemini_hpc.node.cgroup import find_lowest_limit
from gemini_hpc.node.memory_cgroup import Place
from gemini_hpc.slurm.text import parse_configuration, parse_ping

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
HERE = Here("h", "0123456789ab", 2)


class Told(HostFacts):
    """Facts with a configuration as a later release, or another site, would print it."""

    def __init__(self, **values: str) -> None:
        super().__init__("/nonexistent/gemini.toml", "login")
        self._known["configuration"] = Configuration({"SLURM_VERSION": "22.05.8", **values})
        self._known["settings"] = Settings()


def test_wrong_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--only", "no.such"]) == 2
    assert main(["doctor", "--config", "/nonexistent/gemini.toml"]) == 2
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--host-role", "king"])
    assert ended.value.code == 2
    assert "no.such" in capsys.readouterr().err


def test_one_check_never_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "CHECK_TIMEOUT_S", 0.3)
    released = threading.Event()

    def breaks(_: HostFacts) -> Outcome:
        raise RecursionError("odd output")

    def hangs(_: HostFacts) -> Outcome:
        released.wait(60)
        return report_ok("too late")

    def closed(_: HostFacts) -> Outcome:
        raise PermissionError(13, "Permission denied", "/etc/secret")

    def cannot(_: HostFacts) -> Outcome:
        raise Unavailable("only root can see it")

    looks = {
        "a.breaks": breaks,
        "b.hangs": hangs,
        "c.closed": closed,
        "d.cannot": cannot,
        "e.good": lambda _: report_ok("fine"),
    }
    checks = tuple(Check(name, "believe-slurm", ANYWHERE, look) for name, look in looks.items())
    checks += (Check("f.node", "believe-slurm", ON_NODE, breaks),)
    began = time.monotonic()
    found = {f.check: f for f in examine.examine(Told(), checks=checks)}
    released.set()
    assert time.monotonic() - began < 10
    assert {name: f.status for name, f in found.items()} == {
        "a.breaks": "wrong", "b.hangs": "wrong", "c.closed": "skipped",
        "d.cannot": "skipped", "e.good": "ok", "f.node": "skipped",
    }  # fmt: skip
    assert "odd output" in found["a.breaks"].found and "no answer within" in found["b.hangs"].found


def test_a_fact_that_hangs_is_not_waited_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "CHECK_TIMEOUT_S", 0.3)
    released, facts = threading.Event(), Told()
    look = lambda f: report_ok(str(f._remember("hung", released.wait)))  # noqa: E731
    checks = tuple(Check(f"x.{n}", "believe-slurm", ANYWHERE, look) for n in range(5))
    began = time.monotonic()
    statuses = [f.status for f in examine.examine(facts, checks=checks)]
    released.set()
    assert statuses == ["wrong", *["skipped"] * 4] and time.monotonic() - began < 5


def test_the_text() -> None:
    findings = list(examine.examine(Told(UnkillableStepTimeout="5 sec\x1b[2J"), ["slurm.unkillable", "memory.unit"]))
    d = examine.build_document(findings, HERE, ["login"], "root", "22.05.8", 1, 2.0)
    text = examine.format_document(d)
    assert "WRONG    slurm.unkillable" in text and "wanted: at least 60 s" in text and "fix:" in text
    assert "memory.unit" not in text and "1 are for other hosts" in text and "\x1b" not in text
    assert sum(d["counts"].values()) == len(d["checks"]) == 2


def test_accepted_warnings_are_counted_and_not_shown() -> None:
    """Check that a finding of status wrong is shown, whatever the settings accept."""
    facts = Told(UnkillableStepTimeout="5 sec")
    facts._known["settings"] = Settings(accepted_warnings=("x.warns", "slurm.unkillable"))
    warns = Check("x.warns", "", ANYWHERE, lambda _: report_warning("odd", "even", "none"))
    found = list(examine.examine(facts, ["x.warns", "slurm.unkillable"], (*examine.CHECKS, warns)))
    d = examine.build_document(found, HERE, ["login"], "root", "", 1, 2.0)
    assert d["counts"]["accepted"] == 1 and d["counts"]["wrong"] == 1
    assert (
        "odd" not in examine.format_document(d)
        and "1 accepted" in examine.format_document(d)
        and "slurm.unkillable" in examine.format_document(d)
    )


def test_every_check_is_documented_and_broken_by_a_test() -> None:
    names = {c.name: c.rule for c in examine.CHECKS}
    assert len(names) == len(examine.CHECKS)
    rows = re.findall(
        r"^- `([a-z]+\.[a-z-]+)`(?: \((\[.*?\]\(.*?\)|[^)\[]*)\))?:", (ROOT / "docs/admin.md").read_text(), re.M
    )
    assert {name: re.sub(r"\[(.*)\]\(dev/requirements.md#\1\)", r"\1", rule) for name, rule in rows} == names
    demands = re.findall(r"^### (.*)$", (ROOT / "docs/dev/requirements.md").read_text(), re.M)
    assert {rule for _, rule in rows if not rule.startswith("[")} & set(demands) == set(), "a link is missing"
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in names if f'"{name}"' not in tests] == []


def test_the_document_is_documented() -> None:
    text = (ROOT / "docs/json.md").read_text().split("\n## doctor\n")[1].split("\n## ")[0]
    d = examine.build_document(
        list(examine.examine(Told(), ["slurm.unkillable"])), HERE, ["login"], "root", "", 0, 2.0
    )
    json.dumps(d)
    assert d["schema"] == 1
    assert all(f"`{key}`" in text for key in [*d, *d["checks"][0], *STATUSES] if key != "schema")


# ---- what cannot be had here: later releases of Slurm, cgroup v2, a systemd ----------------------------


def test_later_releases_configuration() -> None:
    text = "Prolog[0]   = /a\nProlog[1]   = /b\nEpilog = (null)\nUnkillableStepTimeout   = 60 sec\n"
    conf = Configuration(
        parse_configuration("Configuration data as of now\n" + text + "\nSlurmctld(primary) at c is UP")
    )
    assert conf.list_values("Prolog") == ["/a", "/b"] and conf.list_values("Epilog") == []
    assert conf.parse_number("UnkillableStepTimeout") == 60 and conf.parse_number("None") is None
    assert SlurmRelease.parse("slurm 25.11.3") == SlurmRelease(25, 11, 3) and str(SlurmRelease(25, 5, 0)) == "25.05.0"
    with pytest.raises(Unavailable):
        SlurmRelease.parse("slurm of my own")
    assert parse_ping("Slurmctld(primary) at a is DOWN\nSlurmctld(backup1) at b is UP\n") == [
        ("a", False),
        ("b", True),
    ]


def test_run_in_job() -> None:
    found = slurm.check_prolog_flags(Told(PrologFlags="Alloc,RunInJob"))
    assert found.status == "wrong" and "RunInJob" in found.fix


def test_expedited_requeue() -> None:
    cases: list[tuple[dict[str, str], str]] = [
        ({"SLURM_VERSION": "25.11.2"}, "has none"),
        ({"SLURM_VERSION": "25.11.3"}, "is off"),
        ({"SLURM_VERSION": "26.05.0", "SlurmctldParameters": "enable_expedited_requeue"}, "is on"),
    ]
    for case in cases:
        values, words = case
        found = slurm.check_expedited_requeue(Told(**values))
        assert found.status == "ok" and words in found.found, case


def test_separate_prolog_timeout() -> None:
    assert slurm.check_prolog_timeout(Told(PrologTimeout="65534", PrologEpilogTimeout="65534")).status == "ok"
    assert slurm.check_prolog_timeout(Told(PrologTimeout="10 sec")).status == "wrong"


def test_slurm_user_root() -> None:
    facts = Told(SlurmUser="root(0)")
    facts._known["settings"] = Settings(slurm_user="root")
    assert slurm.check_user(facts).status == "warning"


def test_memory_that_slurm_does_not_count() -> None:
    assert memory.judge_carve_out(64 * GIB, 30 * GIB, 32 * GIB, True).status == "ok"
    assert memory.judge_carve_out(64 * GIB, 48 * GIB, 32 * GIB, True).status == "warning"
    assert memory.judge_carve_out(64 * GIB, 63 * GIB, 32 * GIB, True).status == "wrong"
    assert memory.judge_carve_out(64 * GIB, 30 * GIB, 32 * GIB, False).status == "warning"


def test_a_device_for_rdma() -> None:
    assert network.judge_rdma("off", "", "", 0, GIB).status == "ok"
    missing = network.judge_rdma("auto", "", "there is no device", None, GIB)
    assert missing.status == "warning" and "TCP: there is no device" in missing.found
    assert network.judge_rdma(("mlx5_0:1",), "mlx5_0:1", "", None, GIB).status == "ok"
    assert network.judge_rdma("auto", "mlx5_0:1", "", GIB, GIB).status == "ok"
    locked = network.judge_rdma("auto", "mlx5_0:1", "", 8 << 20, GIB)
    assert locked.status == "warning" and "8 MiB" in locked.found and "LimitMEMLOCK" in locked.fix


def test_a_host_without_a_device_for_rdma() -> None:
    facts = Told()
    facts._known |= {"settings": Settings(rdma="auto"), "processes": []}
    check = next(c for c in examine.CHECKS if c.name == "network.rdma")
    assert check.look(facts).found.startswith("agents push over TCP: ")
    facts._known["settings"] = Settings()
    assert check.look(facts).status == "ok"


def test_cgroup_v2(tmp_path: Path) -> None:
    here = tmp_path / "system.slice/slurmd.service"
    here.mkdir(parents=True)
    (here / "memory.max").write_text("max\n")
    place = Place(2, str(tmp_path), "/system.slice/slurmd.service", True)
    assert find_lowest_limit(place) is None
    (tmp_path / "system.slice/memory.max").write_text(f"{GIB}\n")
    assert find_lowest_limit(place) == (GIB, str(tmp_path / "system.slice/memory.max"))
    (here / "memory.max").write_text(f"{GIB // 2}\n")
    assert find_lowest_limit(place) == (GIB // 2, str(here / "memory.max"))
    assert memory.judge_slurmd_limit(find_lowest_limit(place), 2 * GIB).status == "wrong"
    assert memory.judge_slurmd_limit(find_lowest_limit(place), GIB // 4).status == "ok"


def kill_mode_of(places: tuple[str, ...]) -> tuple[str, str]:
    return read_unit_setting(list_unit_files("slurmd.service", places), "Service", "KillMode")


def test_the_unit_of_the_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, check = Told(), next(check for check in examine.CHECKS if check.name == "slurm.boot")
    monkeypatch.setattr(memory, "UNIT_DIRECTORIES", (str(tmp_path),))
    monkeypatch.setattr(memory, "SYSTEMD_BOOTED", str(tmp_path))
    monkeypatch.setattr(memory, "list_unit_files", lambda unit: [f"{tmp_path}/{unit}"])
    found = check.look(facts)
    assert found.status == "warning" and found.fix.startswith("systemctl enable gemini-hpc-boot")
    wants = tmp_path / "multi-user.target.wants"
    wants.mkdir()
    (wants / "gemini-hpc-boot.service").symlink_to("/lib/systemd/system/gemini-hpc-boot.service")
    assert check.look(facts).status == "ok"
    (tmp_path / "gemini-hpc-boot.service").symlink_to(os.devnull)
    found = check.look(facts)
    assert found.status == "warning" and found.fix.startswith("systemctl unmask gemini-hpc-boot")
    monkeypatch.setattr(memory, "list_unit_files", lambda unit: [])
    with pytest.raises(Unavailable, match=r"gemini_hpc\.node\.boot runs before slurmd"):
        check.look(facts)


def test_systemd_units(tmp_path: Path) -> None:
    low, high = tmp_path / "lib", tmp_path / "etc"
    (high / "slurmd.service.d").mkdir(parents=True)
    low.mkdir()
    places = (str(low), str(high))
    assert list_unit_files("slurmd.service", places) == []
    (low / "slurmd.service").write_text("[Unit]\nKillMode=mixed\n[Service]\n# KillMode=none\nKillMode = process\n")
    assert memory.judge_kill_mode(*kill_mode_of(places)).status == "ok"
    (high / "slurmd.service.d/a.conf").write_text("[Service]\nKillMode=control-group\n")
    assert memory.judge_kill_mode(*kill_mode_of(places)).status == "wrong"
    (high / "slurmd.service").write_text("[Service]\n")
    (high / "slurmd.service.d/a.conf").unlink()
    found = memory.judge_kill_mode(*kill_mode_of(places))
    assert found.status == "wrong" and "default" in found.found


def test_hidden_directories() -> None:
    text = "AutoBasePath=true\nBasePath=/x Dirs=/var/tmp,/run\n#Dirs=/proc\n"
    assert slurm.find_hidden_directories(text, ("/run/gemini-hpc",)) == ["/run/gemini-hpc"]
    assert slurm.find_hidden_directories(text, ("/proc/x",)) == []
    assert slurm.find_hidden_directories("Dirs=/runner,/dev/shm", ("/run/gemini-hpc",)) == []
    yaml = 'defaults:\n  base_path: "/x"\n  # dirs: "/proc"\n  dirs: "/tmp,/run"\n'
    assert slurm.find_hidden_directories(yaml, ("/run/gemini-hpc", "/proc/x")) == ["/run/gemini-hpc"]


def test_namespaces_that_hide_the_agent(tmp_path: Path) -> None:
    cases: list[tuple[str, str, str, str, str]] = [
        ("JobContainerType", "job_container/tmpfs", "job_container.conf", "BasePath=/x Dirs=/run\n", "wrong"),
        ("JobContainerType", "job_container/tmpfs", "job_container.conf", "BasePath=/x\n", "ok"),
        ("JobContainerType", "(null)", "job_container.conf", "Dirs=/run\n", "ok"),
        ("NamespaceType", "namespace/tmpfs", "namespace.conf", "BasePath=/x Dirs=/tmp,/run/\n", "wrong"),
        ("NamespaceType", "namespace/tmpfs", "job_container.conf", "BasePath=/x Dirs=/\n", "wrong"),
        ("NamespaceType", "namespace/linux", "namespace.yaml", "defaults:\n  dirs: '/tmp,/run'\n", "wrong"),
        ("NamespaceType", "namespace/linux", "namespace.yaml", "defaults:\n  dirs: '/tmp'\n", "ok"),
        (
            "NamespaceType",
            "namespace/linux",
            "namespace.yaml",
            "x:\n  clone_ns_flags:\n  - CLONE_NEWPID\n",
            "warning",
        ),
        ("NamespaceType", "namespace/linux", "other.yaml", "defaults:\n", "skipped"),
    ]
    for case in cases:
        key, plugin, name, text, status = case
        (tmp_path / name).write_text(text)
        facts = Told(SLURM_CONF=str(tmp_path / "slurm.conf"), **{key: plugin})
        (found,) = examine.examine(facts, ["slurm.job-container"])
        assert found.status == status, (case, found)
        (tmp_path / name).unlink()


def test_small_texts() -> None:
    assert parse_age_s("gemini-hpc: x [slurm@2026-01-01T00:00:00]", 1767225600.0 + 90) == 90
    assert parse_age_s("no stamp", 1.0) is None and parse_age_s("[a@2026-99-99T00:00:00]", 1.0) is None
    assert is_reserved(Range("a", 10, 12), "1,10-11,12") and not is_reserved(Range("a", 10, 12), "10-11")
    lines = (
        "head\n 0: 00000000:4278 00000000:0000 0A 0:0 00:0 0 5001 0 77 1\n 1: x:zz y 0A\n 2: a:1 b 01 c d e 1 0 5 1\n"
    )
    assert [(s.port, s.uid, s.inode) for s in parse_listeners(lines)] == [(0x4278, 5001, 77)]


def test_what_is_not_a_plugin(tmp_path: Path) -> None:
    cases: list[bytes] = [
        b"",
        b"\x7fELF",
        b"\x7fELF\x02\x01" + b"\xff" * 200,
        b"\x7fELF\x01\x01" + bytes(100),
        b"#!/bin/sh\n",
    ]
    for data in cases:
        path = tmp_path / "x.so"
        path.write_bytes(data)
        with pytest.raises((plugin.ElfError, struct.error)):
            pytest.fail(f"{data!r}: {plugin.read_release(str(path))}")
