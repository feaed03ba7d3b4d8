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

    async def read_job(self, raw_id: int) -> Job:
        _unforeseen("read_job")

    async def read_excluded(self, raw_id: int) -> tuple[str, ...]:
        _unforeseen("read_excluded")

    async def read_rows(self, raw_ids: Sequence[int]) -> dict[int, WatchedJob]:
        _unforeseen("read_rows")

    async def read_nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        _unforeseen("read_nodes")

    async def read_partitions(self) -> dict[str, str]:
        _unforeseen("read_partitions")

    async def read_reservations(self) -> list[Reservation]:
        _unforeseen("read_reservations")

    async def read_owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        _unforeseen("read_owners")

    async def read_attached(self, reservation: str) -> list[WatchedJob]:
        _unforeseen("read_attached")

    async def sort_by_end(self, names: Iterable[str]) -> list[str]:
        _unforeseen("sort_by_end")

    async def read_config(self) -> SlurmConfig:
        _unforeseen("read_config")

    async def has_accounting(self) -> bool:
        _unforeseen("has_accounting")

    async def read_admin_level(self, user: str) -> str:
        _unforeseen("read_admin_level")

    async def ping_slurmctlds(self) -> list[tuple[str, bool]]:
        _unforeseen("ping_slurmctlds")

    async def set_node_down(self, name: str, reason: str) -> Node:
        _unforeseen("set_node_down")

    async def drain_node(self, name: str, reason: str) -> None:
        _unforeseen("drain_node")

    async def resume_node(self, name: str) -> None:
        _unforeseen("resume_node")

    async def create_reservation(self, name: str, nodes: Sequence[str], user_id: int, minutes: int = 10) -> None:
        _unforeseen("create_reservation")

    async def change_reservation(self, name: str, nodes: Sequence[str]) -> None:
        _unforeseen("change_reservation")

    async def delete_reservation(self, name: str) -> bool:
        _unforeseen("delete_reservation")

    async def pin_job(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        _unforeseen("pin_job")

    async def set_start_time(self, job: Job, start: str) -> None:
        _unforeseen("set_start_time")

    async def nudge_scheduler(self, job: Job) -> None:
        _unforeseen("nudge_scheduler")

    async def detach_reservation(self, job: Job, previous: str = "") -> None:
        _unforeseen("detach_reservation")

    async def hold_job(self, job: Job, why: str) -> None:
        _unforeseen("hold_job")

    async def note_end(self, job: Job, line: str, prefix: str) -> None:
        _unforeseen("note_end")

    async def requeue_job(self, job: Job) -> None:
        _unforeseen("requeue_job")
