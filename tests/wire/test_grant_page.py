"""The grant page: what a rank grants, and what an agent tells, word by word."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gemini_hpc.wire import grant_page
from gemini_hpc.wire.grant_page import LEAST_BYTES, Grant, GrantReader, GrantWriter, Spell

MB = 1 << 20


@pytest.fixture
def ends() -> Iterator[tuple[GrantWriter, GrantReader]]:
    fd = grant_page.make()
    writer, reader = GrantWriter(fd), GrantReader(fd)
    os.close(fd)
    yield writer, reader
    writer.close()
    reader.close()


@pytest.mark.parametrize(
    ("grant", "sent", "in_flight", "room"),
    [
        (Grant(4 * MB, 11.0, 2.0 * MB), 0, 0, 2 * MB),  # what arrives in the second that is left
        (Grant(4 * MB, 11.0, 2.0 * MB), MB, MB, MB),
        (Grant(4 * MB, 11.0, 2.0 * MB), 3 * MB, 2 * MB, 0),
        (Grant(4 * MB, 20.0, 2.0 * MB), 3 * MB, 0, MB),  # no more than the grant
        (Grant(4 * MB, 20.0, 2.0 * MB), 4 * MB, 0, 0),
        (Grant(4 * MB, 20.0, 2.0 * MB), 5 * MB, 0, 0),  # it has gone backwards
        (Grant(4 * MB, 10.0, 2.0 * MB), 0, 0, 0),  # over
        (Grant(4 * MB, 0.0, 2.0 * MB), 0, 0, 0),  # withdrawn
        (Grant(4 * MB, 11.0, 0.0), 0, 0, 0),
        (Grant(4 * MB, 11.0, LEAST_BYTES - 1.0), 0, 0, 0),  # too little to be worth it
        (Grant(100, 11.0, 1.0 * MB), 0, 0, 100),  # except for the last ones
        (Grant(100, 10.0001, 100_000.0), 0, 0, 0),
    ],
)
def test_room(grant: Grant, sent: int, in_flight: int, room: int) -> None:
    assert grant.compute_room(sent, in_flight, 10.0) == room


def test_a_grant_reaches_the_agent_and_ends(ends: tuple[GrantWriter, GrantReader]) -> None:
    writer, reader = ends
    assert reader.grant(MB) == Grant(0, 0.0, 0.0)
    assert not writer.write(Grant(5 * MB, 12.5, 1e9))
    assert reader.grant(MB) == Grant(MB, 12.5, 1e9), "of a version with a single MiB"
    writer.withdraw()
    assert reader.grant(MB).compute_room(0, 0, 1.0) == 0


def test_an_agent_that_sleeps_is_woken(ends: tuple[GrantWriter, GrantReader]) -> None:
    writer, reader = ends
    reader.publish_asleep(True)
    assert writer.write(Grant(1, 1.0, 1.0))
    reader.publish_asleep(False)
    assert not writer.write(Grant(1, 1.0, 1.0))


def test_a_rank_learns_what_has_gone_and_when(ends: tuple[GrantWriter, GrantReader]) -> None:
    writer, reader = ends
    assert (writer.sent, writer.arrived, writer.moved_at, writer.read_spells()) == (0, 0, 0.0, [])
    reader.publish_progress(7, 5)
    assert (writer.sent, writer.arrived) == (7, 5) and writer.moved_at > 0
    reader.add(Spell(3, 1.5, 2.5))
    reader.add(Spell(4, 3.5, 4.5))
    assert writer.read_spells() == [(3, 1.5, 2.5), (4, 3.5, 4.5)] and not writer.read_spells()
    for number in range(500):
        reader.add(Spell(number, number, number + 1.0))
    found = writer.read_spells()
    assert found[-1] == pytest.approx((499, 499.0, 500.0)) and 100 < len(found) < 128, "the newest ones"


def test_what_is_no_grant_page() -> None:
    for size, flags in ((4096, os.MFD_CLOEXEC), (100, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)):
        fd = os.memfd_create("page", flags)
        os.ftruncate(fd, size)
        with pytest.raises(ValueError, match="no"):
            GrantWriter(fd)
        os.close(fd)
    read, write = os.pipe()
    with pytest.raises(ValueError, match="no"):
        GrantWriter(read)
    os.close(read)
    os.close(write)
