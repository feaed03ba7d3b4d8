"""A Slurm for tests: the whole interface of the real client. A question that a test has not foreseen fails it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NoReturn

from gemini_hpc.slurm.api import SlurmApi
from gemini_hpc.slurm.facts import Job, Node, Reservation, SlurmConfig, WatchedJob


class UnforeseenError(Exception):
    """A question to Slurm that this test has no answer to. No `SlurmError`: nobody may take it for a refusal."""


def _unforeseen(what: str) -> NoReturn:
    raise UnforeseenError(f"{what}: this double of Slurm has no answer")


class FakeSlurm(SlurmApi):
    """Override what a test asks for."""

    unreachable_at = -math.inf

    async def job(self, raw_id: int) -> Job:
        _unforeseen("job")

    async def excluded(self, raw_id: int) -> tuple[str, ...]:
        _unforeseen("excluded")

    async def raw_id(self, task: str) -> int:
        _unforeseen("raw_id")

    async def rows(self, raw_ids: Sequence[int]) -> dict[int, WatchedJob]:
        _unforeseen("rows")

    async def nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        _unforeseen("nodes")

    async def partitions(self) -> dict[str, str]:
        _unforeseen("partitions")

    async def reservations(self) -> list[Reservation]:
        _unforeseen("reservations")

    async def owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        _unforeseen("owners")

    async def attached(self, reservation: str) -> list[WatchedJob]:
        _unforeseen("attached")

    async def free_soonest(self, names: Iterable[str]) -> list[str]:
        _unforeseen("free_soonest")

    async def config(self) -> SlurmConfig:
        _unforeseen("config")

    async def accounting(self) -> bool:
        _unforeseen("accounting")

    async def admin_level(self, user: str) -> str:
        _unforeseen("admin_level")

    async def slurmctlds(self) -> list[tuple[str, bool]]:
        _unforeseen("slurmctlds")

    async def node_down(self, name: str, reason: str) -> Node:
        _unforeseen("node_down")

    async def node_drain(self, name: str, reason: str) -> None:
        _unforeseen("node_drain")

    async def node_resume(self, name: str) -> None:
        _unforeseen("node_resume")

    async def create_reservation(self, name: str, nodes: Sequence[str], user_id: int, minutes: int = 10) -> None:
        _unforeseen("create_reservation")

    async def change_reservation(self, name: str, nodes: Sequence[str]) -> None:
        _unforeseen("change_reservation")

    async def delete_reservation(self, name: str) -> bool:
        _unforeseen("delete_reservation")

    async def pin(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        _unforeseen("pin")

    async def set_start_time(self, job: Job, start: str) -> None:
        _unforeseen("set_start_time")

    async def nudge(self, job: Job) -> None:
        _unforeseen("nudge")

    async def detach_reservation(self, job: Job, previous: str = "") -> None:
        _unforeseen("detach_reservation")

    async def hold_job(self, job: Job, why: str) -> None:
        _unforeseen("hold_job")

    async def note_end(self, job: Job, line: str, prefix: str) -> None:
        _unforeseen("note_end")

    async def requeue(self, job: Job) -> None:
        _unforeseen("requeue")
