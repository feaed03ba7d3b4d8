"""Which fenced nodes are given back (requirement administrators-resume), against a scripted Slurm and a real
journal."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc import clock
from gemini_hpc.config import Settings
from gemini_hpc.controller import give_back, probe
from gemini_hpc.controller.fencing import REASON, Port
from gemini_hpc.controller.gate import Gate
from gemini_hpc.controller.give_back import GiveBack
from gemini_hpc.controller.journal import Journal
from gemini_hpc.slurm.facts import Node
from gemini_hpc.slurm.text import parse_node

from .fake_slurm import FakeSlurm


class ScriptedSlurm(FakeSlurm):
    """`keeps`: as Slurm from 24.11 on, whose nodes keep their reason after a RESUME."""

    def __init__(self, reason: str, boot: str, *, keeps: bool = False) -> None:
        line = f"NodeName=n1 NodeAddr=n1 CPUTot=4 State=DOWN+DRAIN BootTime={boot} Reason={reason} [slurm@now]"
        self.node, self.resumed, self.keeps = parse_node(line), 0, keeps

    async def read_nodes(self, names: Any = ()) -> dict[str, Node]:
        return {"n1": self.node}

    async def resume_node(self, name: str) -> None:
        self.resumed += 1
        if self.keeps:
            self.node = dataclasses.replace(self.node, state="IDLE", flags=frozenset())


NEW, OLD = "2036-01-01T00:00:00", "2016-01-01T00:00:00"


def watch(settings: Settings, slurm: FakeSlurm, journal: Journal) -> GiveBack:
    home = SimpleNamespace(settings=settings, slurm=slurm, journal=journal, gate=Gate(Settings()))
    return GiveBack(home)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "boot", "port", "wait_s", "times"),
    [
        (REASON, NEW, Port.ANSWERS, 0.05, 2),
        (REASON, OLD, Port.ANSWERS, 0.05, 0),
        ("broken fan", NEW, Port.ANSWERS, 0.05, 0),
        (REASON, NEW, Port.HANGS, 0.05, 0),
        (REASON, NEW, Port.SILENT, 0.05, 0),
        (REASON, NEW, Port.ANSWERS, 60.0, 0),
    ],
)
def test_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, boot: str, port: Port, wait_s: float, times: int
) -> None:
    async def reached(targets: dict[str, tuple[str, int]]) -> dict[str, Port]:
        return dict.fromkeys(targets, port)

    monkeypatch.setattr(probe, "probe_ports", reached)
    slurm, journal = ScriptedSlurm(reason, boot), Journal(str(tmp_path / "journal"))
    journal.write_line("1.0", "down", "before", node="n1")
    look = watch(Settings(auto_resume_s=wait_s), slurm, journal).check_fenced

    async def many() -> None:
        for _ in range(12):
            await look()
            await asyncio.sleep(0.03)

    asyncio.run(many())
    assert slurm.resumed == times, "twice a day at most"
    journal.close()
    again = Journal(str(tmp_path / "journal"))
    assert again.count_given_back("n1", clock.DAY_S) == times and again.read_fence_times()["n1"] <= time.time()
    again.close()


def test_nodes_that_the_journal_does_not_know(tmp_path: Path) -> None:
    slurm, journal = ScriptedSlurm(REASON, NEW), Journal(str(tmp_path / "journal"))
    asyncio.run(watch(Settings(auto_resume_s=0.01), slurm, journal).check_fenced())
    assert not slurm.resumed
    journal.close()


def test_off_by_default(tmp_path: Path) -> None:
    assert Settings().auto_resume_s == 0
    slurm, journal = ScriptedSlurm(REASON, NEW), Journal(str(tmp_path / "journal"))
    asyncio.run(asyncio.wait_for(watch(Settings(), slurm, journal).run(), 5))
    journal.close()


@pytest.mark.parametrize("state", ["IDLE", "ALLOCATED", "MIXED"])
def test_a_reason_that_outlives_a_resume_is_not_taken_for_a_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """From 24.11 on; the second give-back of the day must not be spent on a node that is in service."""

    async def reached(targets: dict[str, tuple[str, int]]) -> dict[str, Port]:
        return dict.fromkeys(targets, Port.ANSWERS)

    monkeypatch.setattr(probe, "probe_ports", reached)
    slurm, journal = ScriptedSlurm(REASON, NEW, keeps=True), Journal(str(tmp_path / "journal"))
    journal.write_line("1.0", "down", "before", node="n1")
    look = watch(Settings(auto_resume_s=0.05), slurm, journal).check_fenced

    async def many() -> None:
        for _ in range(12):
            await look()
            await asyncio.sleep(0.03)
            if slurm.resumed:
                slurm.node = dataclasses.replace(slurm.node, state=state)

    asyncio.run(many())
    assert slurm.resumed == 1 and journal.count_given_back("n1", clock.DAY_S) == 1
    journal.close()


def test_what_others_have_drained_keeps_their_reason() -> None:
    cases: list[tuple[str, str, str]] = [
        ("IDLE+DRAIN", "broken fan [root@2026-11-26T06:00:00]", "broken fan"),
        ("IDLE+DRAIN", f"{REASON}, job 7 restart 0 [slurm@2026-11-26T06:00:00]", ""),
        ("IDLE+DRAIN", "", "drained by hand"),
        ("DOWN*", "Not responding [slurm@2026-11-26T06:00:00]", ""),
        ("IDLE", "broken fan [root@2026-11-26T06:00:00]", ""),
    ]
    for case in cases:
        state, reason, kept = case
        reasons = f" Reason={reason}" if reason else ""
        node = parse_node(f"NodeName=n1 NodeAddr=n1 CPUTot=4 State={state}{reasons}")
        assert give_back.find_drain_reason(node) == kept, case
