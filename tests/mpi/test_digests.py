"""The digest of a rank's own shard, which its agent makes."""

from __future__ import annotations

import os

from gemini_hpc.client.mapped_slots import MappedSlot
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format import commit_record
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.mpi.checkpointer import _make_digest_reader

STAMP, BYTES = Stamp(2, 7), 8192


def slot() -> MappedSlot:
    fd = os.memfd_create("test")
    os.ftruncate(fd, BYTES + commit_record.ROOM_BYTES)
    return MappedSlot(fd, BYTES)


def commit(into: MappedSlot, stamp: Stamp, told: str) -> None:
    os.pwrite(into.fd, commit_record.pack(Committed(stamp, BYTES, told)), BYTES)


def test_the_agents_digest_is_taken_once_it_is_there() -> None:
    own = slot()
    read = _make_digest_reader(own, STAMP, own.view(), float("inf"))
    assert not read()
    commit(own, Stamp(2, 6), "a" * 32)
    assert not read(), "that is of the version before"
    commit(own, STAMP, "b" * 32)
    assert read() == "b" * 32
    os.close(own.fd)


def test_without_an_agent_the_rank_makes_it() -> None:
    own = slot()
    os.close(own.fd)
    own.fd = -1
    assert _make_digest_reader(own, STAMP, own.view(), 0.0)() == digest_bytes(own.view())
