"""Real agents that push over several connections: versions arrive, and connections that are not in order end all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import xxhash
from waiting import until

from gemini_hpc.core.digest import PIECE_BYTES, Pieces, digest_bytes
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message

from .test_push_bad_input import CLOSED, Push, Site, opened, payload

__all__ = ["opened"]
pytestmark = pytest.mark.slow

STRIPES = 3
SIZE = 6 * PIECE_BYTES
USED = SIZE - 50_001
MID = 2 * PIECE_BYTES + 5


@pytest.fixture(scope="module")
def only_site(opened: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("stripes") / "job", SIZE, USED, STRIPES)
    yield site
    site.close()


@pytest.fixture
def site(only_site: Site) -> Iterator[Site]:
    """Whatever becomes of a push, what was complete stays, and the home's next versions are sealed."""
    only_site.seal()
    newest = ("complete", (only_site.ranks[0].epoch, only_site.version))
    assert newest in only_site.slots()
    yield only_site

    def settled() -> bool:
        return newest in only_site.slots() and all(state != "filling" for state, _ in only_site.slots())

    until(settled, what=f"settled as before: {newest}, {only_site.slots()}")
    only_site.seal()
    for rank in only_site.ranks:
        rank.close_channel()
    for node in only_site.job.nodes:
        log = node.log()
        assert "Traceback" not in log and "event=error" not in log and "never retrieved" not in log, log


@pytest.fixture
def three(site: Site) -> Iterator[list[Push]]:
    """The connections of a push whose next version has been taken."""
    lead = site.push()
    assert lead.reason == "" and lead.stripes == STRIPES
    all_three = [lead, site.stripe(lead, 1), site.stripe(lead, 2)]
    assert [one.reason for one in all_three] == ["", "", ""]
    assert lead.offer(site.version + 1, USED, SIZE) == ""
    yield all_three
    for one in all_three:
        one.close()


def test_bytes_come_over_all_of_them_in_any_order(site: Site, three: list[Push]) -> None:
    data = payload(0, site.version + 1, USED)
    assert three[2].chunk(MID, data[MID:-9]) == USED - 9 - MID
    assert three[0].chunk(USED - 9, data[-9:]) == 9
    assert three[1].chunk(0, data[:100]) == 100 and three[1].chunk(100, data[100:MID]) == MID
    three[0].done(digest_bytes(data))
    site.version += 1
    assert ("complete", (site.ranks[0].epoch, site.version)) in site.slots()
    assert three[0].offer(site.version + 1, USED, SIZE) == "", "and they serve for the next"
    assert three[1].chunk(7, b"x") == 1, "of which they count anew"


@pytest.mark.parametrize(
    ("number", "changes", "said"),
    [
        (3, {}, "too many connections"),
        (7, {}, "too many connections"),
        (1, {"name": "0" * 16}, "not known here"),
        (1, {"rank": 2}, "not known here"),
        (1, {"source": "n3"}, "to another agent"),
        (1, {"instance": "another"}, "to another agent"),
    ],
)
def test_connections_that_are_refused(site: Site, number: int, changes: dict[str, str], said: str) -> None:
    lead = site.push()
    refused = site.stripe(lead, number, **changes)  # type: ignore[arg-type]
    assert said in refused.reason and refused.ended()
    assert lead.offer(site.version + 1, USED, SIZE) == "", "the push itself goes on"
    lead.close()


@pytest.mark.parametrize("number", [0, 8, 1 << 20, -1])
def test_numbers_that_cannot_be(site: Site, number: int) -> None:
    lead = site.push()
    with pytest.raises(CLOSED):
        site.stripe(lead, number)
    assert lead.offer(site.version + 1, USED, SIZE) == ""
    lead.close()


def test_a_number_is_taken_once(site: Site, three: list[Push]) -> None:
    again = site.stripe(three[0], 2)
    assert "exists already" in again.reason
    assert three[2].chunk(0, b"x" * 10) == 10, "the first one goes on"


def test_none_joins_a_push_that_has_ended(site: Site, three: list[Push]) -> None:
    three[0].close()
    assert three[1].ended() and three[2].ended()
    assert "not known here" in site.stripe(three[0], 1).reason


def test_another_leading_connection_ends_them(site: Site, three: list[Push]) -> None:
    second = site.push()
    assert second.reason == "" and all(one.ended() for one in three)
    assert "not known here" in site.stripe(three[0], 1).reason
    assert site.stripe(second, 1).reason == ""
    second.close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_lost_connection_loses_the_version(site: Site, three: list[Push], number: int) -> None:
    assert three[1].chunk(0, b"x" * 10) == 10
    three[number].close()
    assert all(one.ended() for one in three if one is not three[number])


@pytest.mark.parametrize(
    ("at", "length"), [(0, 10), (50, 10), (99, 2), (0, USED + 1), (USED, 1), (1 << 49, 1), (500, 0)]
)
def test_bytes_that_another_connection_brings(site: Site, three: list[Push], at: int, length: int) -> None:
    """Bytes 0 to 100 have come; too many, none, and those behind the end are refused as well."""
    assert three[0].chunk(0, b"x" * 100) == 100
    three[1].link.send(peer.PushChunk(at, length))
    assert all(one.ended() for one in three)


def test_bytes_that_are_on_their_way_elsewhere(site: Site, three: list[Push]) -> None:
    three[1].link.send(peer.PushChunk(1000, 1000))
    three[1].link.sock.sendall(b"x")
    time.sleep(0.2)
    three[2].link.send(peer.PushChunk(1500, 10))
    assert all(one.ended() for one in three)


@pytest.mark.parametrize(
    "message", [peer.PushDone("0" * 32), peer.PushHead(9, 1, 2), peer.Ping(), peer.PushAck(3), peer.PushVerified()]
)
def test_another_word_on_a_further_connection(site: Site, three: list[Push], message: Message) -> None:
    three[1].link.send(message)
    assert all(one.ended() for one in three)


def test_bytes_of_no_version(site: Site) -> None:
    lead = site.push()
    stripe = site.stripe(lead, 1)
    stripe.link.send(peer.PushChunk(0, 10))
    assert stripe.ended() and lead.ended()
    lead.close()


def test_a_digest_while_bytes_are_missing(site: Site, three: list[Push]) -> None:
    three[1].link.send(peer.PushChunk(0, USED))
    three[1].link.sock.sendall(b"x" * 1000)
    three[0].link.send(peer.PushDone("0" * 32))
    assert all(one.ended() for one in three)


def test_a_chunk_that_never_ends(site: Site, three: list[Push]) -> None:
    """Though the other connections go on."""
    three[2].link.send(peer.PushChunk(USED - 100, 100))
    three[2].link.sock.sendall(b"x" * 99)
    began, at = time.monotonic(), 0
    with suppress(*CLOSED):
        while time.monotonic() - began < 12:
            three[at % 2].chunk(at, b"x")
            at += 1
            time.sleep(0.1)
    assert time.monotonic() - began < 12 and all(one.ended() for one in three)


def test_connections_without_a_word_leave_nothing(site: Site) -> None:
    for _ in range(10):
        lead = site.push()
        for number in (1, 2):
            site.stripe(lead, number).close()
        lead.close()


# ---- bad pieces come again -----------------------------------------------------------------------------


def listed(data: bytes) -> bytes:
    """The digests of the pieces."""
    pieces = Pieces(len(data))
    for number, start, end in pieces.enumerate_bounds(0, pieces.count):
        pieces.put(number, xxhash.xxh3_128_digest(data[start:end]))
    return pieces.found


def flipped(data: bytes, *places: int) -> bytes:
    found = bytearray(data)
    for at in places:
        found[at] ^= 1
    return bytes(found)


def test_only_bad_pieces_are_asked_for(site: Site, three: list[Push]) -> None:
    data = payload(0, site.version + 1, USED)
    three[0].chunk(0, flipped(data, 3, PIECE_BYTES - 1, USED - 1))
    three[0].link.send(peer.PushDone(digest_bytes(data), pieces=listed(data)))
    last = USED // PIECE_BYTES
    assert three[0].link.receive(peer.PushAgain) == peer.PushAgain((0, last))
    three[1].chunk(last * PIECE_BYTES, data[last * PIECE_BYTES :])
    three[0].chunk(0, data[:100])
    three[2].chunk(100, data[100:PIECE_BYTES])
    three[0].done(digest_bytes(data), listed(data))
    site.version += 1
    assert ("complete", (site.ranks[0].epoch, site.version)) in site.slots()


@pytest.mark.parametrize(
    "how", ["bad again", "other pieces", "another digest", "no list", "a list of something else", "too early"]
)
def test_a_version_is_mended_once(site: Site, three: list[Push], how: str) -> None:
    data = payload(0, site.version + 1, USED)
    lead = three[0]
    lead.chunk(0, flipped(data, MID))
    known = {"no list": b"", "a list of something else": listed(flipped(data, 9))}.get(how, listed(data))
    lead.link.send(peer.PushDone(digest_bytes(data), pieces=known))
    if "list" not in how:
        assert lead.link.receive(peer.PushAgain).pieces == (2,)
        start, end = 2 * PIECE_BYTES, 3 * PIECE_BYTES
        if how == "other pieces":
            three[1].link.send(peer.PushChunk(end, 10))
        elif how == "too early":
            lead.chunk(start, data[start : end - 1])
            lead.link.send(peer.PushDone(digest_bytes(data), pieces=known))
        else:
            lead.chunk(start, flipped(data, MID if how == "bad again" else 0)[start:end])
            said = digest_bytes(data if how == "bad again" else data[1:])
            lead.link.send(peer.PushDone(said, pieces=known))
    assert all(one.ended() for one in three)
    assert f"event=mended host=n2 version={site.version + 1} " not in site.holder.log()
