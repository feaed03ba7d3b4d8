"""Pushes that are not what they should be: refused, the connection closed, and what is complete stays as it is."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hello import build_hello
from train.agents import RealJob, RealNode
from waiting import until

from gemini_hpc.agent.replicas import replica_fills
from gemini_hpc.agent.replicas.replica_fill import Fill
from gemini_hpc.agent.replicas.store import Shard
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Slot, Stamp
from gemini_hpc.wire import local, munge, peer
from gemini_hpc.wire.control_page import ControlPage
from gemini_hpc.wire.grant_page import Grant, GrantWriter
from gemini_hpc.wire.handshake import HandshakeError
from gemini_hpc.wire.link import BlockingLink, LinkClosed
from gemini_hpc.wire.message import Message

from .conftest import STEP, Caller

pytestmark = pytest.mark.slow

SIZE, USED = 1 << 16, 50_000
SETTLE_S = 10.0
CLOSED = (LinkClosed, OSError)


class Rank:
    """Training rank k on node k of 3: fills its own slots, and keeps the memory of the shard of the rank before."""

    def __init__(self, job: RealJob, rank: int, size: int, used: int) -> None:
        self.node, self.rank, self.used = job.nodes[rank], rank, used
        self.caller = Caller(Path(self.node.path))
        welcome, fds = self.caller.ask_fds(
            build_hello(training="default", rank=rank, world=3, local_rank=0, step=STEP, pid=os.getpid())
        )
        assert isinstance(welcome, local.Welcome), welcome
        self.epoch, self.page = welcome.epoch, ControlPage(fds[0], writable=False)
        slots, own = self.caller.ask_fds(local.Register("default", rank, 3, rank, size))
        before = (rank - 1) % 3
        kept, others = self.caller.ask_fds(local.Register("default", before, 3, before, size, pushed=True))
        assert isinstance(slots, local.Slots) and isinstance(kept, local.Slots), (slots, kept)
        self.maps, self.kept = ([mmap.mmap(fd, size) for fd in fds] for fds in (own, others))
        for fd in (*fds, *own, *others):
            os.close(fd)
        self.channel: socket.socket | None = None
        self.grants: GrantWriter | None = None

    def open(self, holder: int | None = None, rank: int | None = None) -> local.Message | None:
        wanted = (self.rank + 1) % 3 if holder is None else holder
        reply, fds = self.caller.ask_fds(local.OpenPush("default", self.rank if rank is None else rank, wanted))
        if fds:
            self.close_channel()
            self.channel, self.grants = socket.socket(fileno=fds[0]), GrantWriter(fds[1])
            self.channel.settimeout(15)
            os.close(fds[1])
        return reply

    def grant(self, until: int, seconds: float = 10.0, rate: float = 1e9) -> None:
        """Let the agent send so many bytes of the version in all."""
        assert self.channel is not None and self.grants is not None
        if self.grants.write(Grant(until, time.monotonic() + seconds, rate)):
            self.channel.send(local.encode(local.PushGo()))

    def say(self, message: local.Message) -> local.Message | None:
        """None: the channel has ended."""
        if self.channel is None:
            assert self.open() == local.Ok()
        assert self.channel is not None
        with suppress(OSError):
            self.channel.send(local.encode(message))
            data = self.channel.recv(local.MAX_PACKET_BYTES)
            return local.reply_decoder.decode(data) if data else None
        return None

    def begin(self, version: int) -> int:
        begun = self.caller.ask(local.BeginVersion("default", self.rank, version))
        assert isinstance(begun, local.Begun), begun
        self.maps[begun.slot][: self.used] = payload(self.rank, version, self.used)
        return begun.slot

    def save(self, version: int) -> None:
        slot = self.begin(version)
        assert self.say(local.PushOffer(version, self.used)) == local.Ok()
        self.grant(self.used - 1000)
        assert self.say(local.PushDone()) == local.Ok()
        landed = local.Landed("default", self.rank, version, slot, self.used)
        assert self.caller.ask(landed) == local.Ok()

    def abort(self, version: int, slot: int) -> None:
        self.caller.ask(local.Abort("default", self.rank, version, slot))

    def close_channel(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self.grants is not None:
            self.grants.close()
            self.grants = None

    def close(self) -> None:
        self.close_channel()
        self.caller.close()
        del self.page
        for m in (*self.maps, *self.kept):
            m.close()


def payload(rank: int, version: int, used: int = USED) -> bytes:
    return random.Random(f"{rank} {version}").randbytes(used)


class Site:
    """Three agents and three ranks; version 3 is sealed."""

    def __init__(
        self, directory: Path, size: int = SIZE, used: int = USED, stripes: int = 0, flips: int = 0, **job: Any
    ) -> None:
        self.job = RealJob(directory, 3, 2, heartbeat_s=2.0, stripes=stripes, flips=flips, **job)
        self.ranks = [Rank(self.job, k, size, used) for k in range(3)]
        self.version = 0
        self.round = self.ranks[0].page.round
        for _ in range(3):
            self.seal()

    def seal(self) -> None:
        self.version += 1
        for rank in self.ranks:
            rank.save(self.version)
        until(lambda: all(r.page.sealed == (r.epoch, self.version) for r in self.ranks), what="the seal")

    @property
    def holder(self) -> RealNode:
        return self.job.nodes[1]

    def push(self, *, source: str = "n1", **changes: int | str) -> Push:
        ask = peer.PushAsk("default", 0, self.ranks[0].epoch, self.round)
        for name, value in changes.items():
            ask = peer.PushAsk(**({f: getattr(ask, f) for f in ask.__struct_fields__} | {name: value}))
        return Push(self.job.call(self.holder, "push", source=source), ask)

    def stripe(self, push: Push, number: int, *, name: str = "", rank: int = 0, **caller: str) -> Push:
        """A further connection of that push."""
        ask = peer.PushStripe("default", rank, name or push.name, number)
        return Push(self.job.call(self.holder, "push", **({"source": "n1"} | caller)), ask)

    def slots(self) -> list[tuple[str, tuple[int, int] | None]]:
        """Of shard 0 at its holder."""
        return sorted((s.state, s.stamp) for s in self.job.inspect(self.holder).held if s.rank == 0)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.job.close()


class Push:
    """A home's side of a push, that says whatever it likes."""

    def __init__(self, link: BlockingLink, ask: Message) -> None:
        self.link = link
        link.sock.settimeout(SETTLE_S)
        link.send(ask)
        answer = link.receive(peer.PushAnswer)
        self.reason, self.name, self.stripes = answer.reason, answer.push, answer.stripes

    def offer(self, version: int, used: int = USED, size: int = SIZE) -> str:
        return self.answer(peer.PushHead(version, used, size)).reason

    def answer(self, head: peer.PushHead) -> peer.PushAnswer:
        self.link.send(head)
        return self.link.receive(peer.PushAnswer)

    def chunk(self, at: int, data: bytes) -> int:
        self.link.send(peer.PushChunk(at, len(data)))
        self.link.sock.sendall(data)
        return self.link.receive(peer.PushAck).arrived

    def done(self, text: str, pieces: bytes = b"") -> None:
        self.link.send(peer.PushDone(text, pieces=pieces))
        self.link.receive(peer.PushVerified)

    def ended(self) -> bool:
        with suppress(OSError):
            return not self.link.sock.recv(1)
        return True

    def close(self) -> None:
        self.link.close()


@pytest.fixture(scope="module")
def opened() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(munge, "encode", lambda payload, *, for_uid: payload)
    patch.setattr(munge, "decode", lambda credential: (credential, os.geteuid(), 0))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def only_site(opened: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("push") / "job")
    yield site
    site.close()


@pytest.fixture
def site(only_site: Site) -> Iterator[Site]:
    """Whatever a test does, the last complete copy stays, and the training that it did it to goes on."""
    only_site.seal()  # both slots are complete, also where a test has had larger ones made
    newest = ("complete", (only_site.ranks[0].epoch, only_site.version))
    assert newest in only_site.slots()
    yield only_site

    def settled() -> bool:
        slots = only_site.slots()
        return newest in slots and slots[0][0] != "filling" and slots[1][0] != "filling"

    until(settled, what=f"settled as before: {newest}, {only_site.slots()}")
    only_site.seal()
    for rank in only_site.ranks:
        rank.close_channel()
    for node in only_site.job.nodes:
        log = node.log()
        assert "Traceback" not in log and "event=error" not in log and "never retrieved" not in log, log


def test_a_good_one(site: Site) -> None:
    """What the others do wrong is all that is wrong with them."""
    push = site.push()
    assert push.reason == ""
    assert push.offer(site.version + 1) == ""
    assert push.chunk(0, b"x" * 1000) == 1000 and push.chunk(1000, b"x" * (USED - 1000)) == USED
    assert site.slots()[-1] == ("filling", (site.ranks[0].epoch, site.version + 1))
    push.close()  # without a digest: void


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 7}, "not registered"),
        ({"rank": 1}, "a process of this node fills"),
        ({"rank": 2}, "not registered"),
        ({"training": "another"}, "no training of the job runs"),
        ({"epoch": 0}, "epoch 1, round"),
        ({"epoch": 2}, "epoch 1, round"),
        ({"round": 0}, "epoch 1, round"),
        ({"source": "n3"}, "node rank 0 is the home"),
    ],
)
def test_who_may_not_push(site: Site, changes: dict[str, int | str], said: str) -> None:
    push = site.push(**changes)
    assert said in push.reason and push.ended()
    push.close()


def test_refusals_are_logged(site: Site) -> None:
    def said() -> bool:  # one complaint a second is kept
        site.push(rank=1).close()
        return (
            "push of shard 1 from n1 refused: a process of this node fills the shard of rank 1" in site.holder.log()
        )

    until(said, what="a complaint")


@pytest.mark.parametrize(
    "changes", [{"source": "n9"}, {"source": "n2"}, {"restart": 1}, {"job": 5}, {"target": "n1"}, {"cluster": "x"}]
)
def test_who_is_not_even_heard(site: Site, changes: dict[str, int | str]) -> None:
    with pytest.raises(HandshakeError, match=r"not from a node|at restart 0|this is job"):
        site.job.call(site.holder, "push", **({"source": "n1"} | changes))


@pytest.mark.parametrize(
    "first", [peer.Ping(), peer.PushHead(2, USED, SIZE), peer.PullAsk("default", 0, Stamp(1, 1), False, 0, 1)]
)
def test_first_word_is_another(site: Site, first: Message) -> None:
    with pytest.raises(CLOSED):
        Push(site.job.call(site.holder, "push", source="n1"), first)


@pytest.mark.parametrize(
    ("version", "used", "size"),
    [(0, USED, SIZE), (99, 0, SIZE), (99, SIZE + 1, SIZE), (99, (1 << 50) - 1, SIZE), (99, 0, 0)],
)
def test_versions_that_cannot_be(site: Site, version: int, used: int, size: int) -> None:
    push = site.push()
    with pytest.raises(CLOSED):
        push.offer(version, used, size)
    push.close()


def test_versions_that_are_not_taken(site: Site) -> None:
    push = site.push()
    assert "already complete" in push.offer(site.version)
    assert "is older than" in push.offer(site.version - 2)
    assert "not enough memory" in push.offer(site.version + 1, size=1 << 49), "nor ever will be"
    assert push.offer(site.version + 1) == "", "the link still serves"
    push.close()


@pytest.mark.parametrize(("at", "length"), [(0, 0), (0, USED + 1), (0, 1 << 40), ((1 << 50) - 1, 10), (USED, 1)])
def test_chunks_that_cannot_be(site: Site, at: int, length: int) -> None:
    push = site.push()
    assert push.offer(site.version + 1) == ""
    push.link.send(peer.PushChunk(at, length))
    with suppress(OSError):
        push.link.sock.sendall(b"x" * min(length, USED))
    assert push.ended(), "it was acknowledged"
    push.close()


@pytest.mark.parametrize("at", [0, 490])
def test_chunks_of_bytes_that_have_come(site: Site, at: int) -> None:
    push = site.push()
    assert push.offer(site.version + 1) == "" and push.chunk(0, b"x" * 500) == 500
    push.link.send(peer.PushChunk(at, 20))
    with suppress(OSError):
        push.link.sock.sendall(b"x" * 20)
    assert push.ended(), "it was acknowledged"
    push.close()


@pytest.mark.parametrize("digest_text", ["", "x" * 32, "A" * 32, "0" * 31, "0" * 33, "é" * 32])
def test_digests_that_are_none(site: Site, digest_text: str) -> None:
    push = site.push()
    assert push.offer(site.version + 1) == "" and push.chunk(0, b"x" * USED) == USED
    with pytest.raises(CLOSED):
        push.done(digest_text)
    push.close()


def test_a_digest_of_something_else(site: Site) -> None:
    push = site.push()
    assert push.offer(site.version + 1) == "" and push.chunk(0, b"x" * USED) == USED
    with pytest.raises(CLOSED):  # its home is not to count what is not here
        push.done(digest_bytes(b"y" * USED))
    until(
        lambda: "the copy's digest differs after the transfer" in site.holder.log(),
        what="the damaged copy is refused",
    )
    push.close()


@pytest.mark.parametrize("message", [peer.PushDone("0" * 32), peer.PushHead(5, 1, 2), peer.Ping(), peer.PushAck(3)])
def test_another_word_in_the_middle(site: Site, message: Message) -> None:
    push = site.push()
    assert push.offer(site.version + 1) == "" and push.chunk(0, b"x" * 10) == 10
    push.link.send(message)
    assert push.ended()
    push.close()


@pytest.mark.parametrize(
    "noise", [b"\0" * 64, struct.pack(">I", 20) + b"m" * 20, b"\xff" * 8, b"GET / HTTP/1.0\r\n\r\n"]
)
def test_noise_in_the_middle(site: Site, noise: bytes) -> None:
    push = site.push()
    assert push.offer(site.version + 1) == ""
    push.link.sock.sendall(noise)
    with suppress(OSError):
        push.link.sock.shutdown(socket.SHUT_WR)
    assert push.ended()
    push.close()


def test_silence_in_the_middle_of_a_chunk(site: Site) -> None:
    push = site.push()
    assert push.offer(site.version + 1) == ""
    push.link.send(peer.PushChunk(0, USED))
    push.link.sock.sendall(b"x" * 100)
    began = time.monotonic()
    push.link.sock.settimeout(15)
    assert push.ended() and time.monotonic() - began < 12
    push.close()


def test_a_second_connection_ends_the_first(site: Site) -> None:
    """And no byte of the first lands in what the second writes."""
    first = site.push()
    assert first.offer(site.version + 1) == "" and first.chunk(0, b"x" * 10) == 10
    second = site.push()
    assert second.reason == "" and first.ended()
    assert second.offer(site.version + 2) == "" and second.chunk(0, b"y" * 10) == 10
    with pytest.raises(CLOSED):
        first.chunk(10, b"x" * 10)
        first.chunk(20, b"x" * 10)
    first.close()
    second.close()
    site.version += 2


def test_the_home_comes_back_at_once(only_site: Site) -> None:
    """Another took its connection while nothing was under way: it makes a new one, no version is lost."""
    for _ in range(20):
        push = only_site.push()
        assert push.reason == ""
        only_site.seal()
        assert push.ended()
        push.close()
    for rank in only_site.ranks:
        rank.close_channel()


def test_many_connections_leave_nothing(site: Site) -> None:
    process = site.holder.process
    assert process is not None
    fds, tasks = Path(f"/proc/{process.pid}/fd"), Path(f"/proc/{process.pid}/task")
    before = len(list(fds.iterdir())), len(list(tasks.iterdir()))
    for _ in range(20):
        push = site.push()
        push.link.send(peer.PushHead(site.version + 1, USED, SIZE))
        push.close()
    until(
        lambda: len(list(fds.iterdir())) <= before[0] and len(list(tasks.iterdir())) <= before[1],
        what="descriptors and threads as before",
    )


# ---- on the local socket: what a process may have pushed ------------------------------------------------


def test_a_pushed_shard_has_no_writer_here(site: Site) -> None:
    reply = site.ranks[1].caller.ask(local.BeginVersion("default", 0, site.version + 1))
    assert isinstance(reply, local.Error) and "the agent of its home node fills" in reply.error


@pytest.mark.parametrize(("holder", "rank"), [(0, 0), (2, 0), (9, 0), (1, 2), (1, 5)])
def test_channels_that_are_not_opened(site: Site, holder: int, rank: int) -> None:
    assert isinstance(site.ranks[0].open(holder, rank), local.Error)


def test_channels_of_others(site: Site) -> None:
    stranger = Caller(Path(site.ranks[0].node.path))
    assert isinstance(stranger.ask(local.OpenPush("default", 0, 1)), local.Error)
    stranger.close()


def test_offers_of_what_is_not_there(site: Site) -> None:
    rank = site.ranks[0]
    for offer in (
        local.PushOffer(site.version + 1, USED),  # not begun
        local.PushOffer(site.version, USED),  # complete: nobody may change it, and it has been pushed
        local.PushOffer(0, 0),
    ):
        assert isinstance(rank.say(offer), local.Refused)
    slot = rank.begin(site.version + 1)
    for used in (0, SIZE + 1):
        assert isinstance(rank.say(local.PushOffer(site.version + 1, used)), local.Refused)
    rank.abort(site.version + 1, slot)
    site.version += 1


def test_a_copy_away_from_home_needs_the_digest_of_its_home(site: Site) -> None:
    """Also where a process here, and no agent, brings it (R5)."""
    rank, new = site.ranks[1], site.version + 1
    assert isinstance(rank.caller.ask(local.Register("default", 0, 3, 0, SIZE)), local.Slots)
    begun = rank.caller.ask(local.BeginVersion("default", 0, new))
    assert isinstance(begun, local.Begun)
    for text in ("", "0" * 31):
        landed = rank.caller.ask(local.Landed("default", 0, new, begun.slot, USED, text))
        assert isinstance(landed, local.Error) and "a copy needs its digest" in landed.error
    assert not complete(site, new)
    rank.caller.ask(local.Abort("default", 0, new, begun.slot))
    assert isinstance(rank.caller.ask(local.Register("default", 0, 3, 0, SIZE, pushed=True)), local.Slots)
    site.version = new


def test_a_slot_has_one_length(site: Site) -> None:
    """Each offer has its agent read the slot: what is offered once is not offered as something else."""
    rank = site.ranks[0]
    slot = rank.begin(site.version + 1)
    assert rank.say(local.PushOffer(site.version + 1, USED)) == local.Ok()
    rank.close_channel()
    assert isinstance(rank.say(local.PushOffer(site.version + 1, USED - 1)), local.Refused)
    landed = rank.caller.ask(local.Landed("default", 0, site.version + 1, slot, USED - 1))
    assert isinstance(landed, local.Error) and "bytes used, after" in landed.error
    rank.abort(site.version + 1, slot)
    rank.close_channel()
    site.version += 1


def words(rank: Rank, until: int, rate: int, before_ns: int) -> None:
    """Write a grant as no rank does, and call the agent."""
    assert rank.grants is not None and rank.channel is not None
    for at, word in zip((0, 8, 16), (until, before_ns, rate), strict=True):
        rank.grants._put(at, word)
    rank.channel.send(local.encode(local.PushGo()))


@pytest.mark.parametrize("most", [USED + 1, 1 << 49, (1 << 64) - 1])
def test_a_grant_of_more_bytes_than_there_are(site: Site, most: int) -> None:
    """All of the version goes, and nothing beyond it."""
    rank, new = site.ranks[0], site.version + 1
    slot = rank.begin(new)
    assert rank.say(local.PushOffer(new, USED)) == local.Ok()
    words(rank, most, (1 << 64) - 1, (1 << 64) - 1)
    assert rank.grants is not None
    until(lambda: rank.grants.arrived == USED, what="all bytes")  # type: ignore[union-attr]
    assert rank.say(local.PushDone()) == local.Ok() and rank.grants.sent == USED
    finish(site, slot)


@pytest.mark.parametrize(
    ("rate", "before_ns"),
    [(0, (1 << 64) - 1), (1 << 40, 0), (1 << 40, 1), (1, None)],
    ids=["0", "no", "past", "slow"],
)
def test_a_grant_that_allows_nothing(site: Site, rate: int, before_ns: int | None) -> None:
    """Nothing is sent outside a grant; and the version goes when all of it may."""
    rank, new = site.ranks[0], site.version + 1
    slot = rank.begin(new)
    assert rank.say(local.PushOffer(new, USED)) == local.Ok()
    words(rank, USED, rate, before_ns if before_ns is not None else int((time.monotonic() + 1) * 1e9))
    time.sleep(0.15)
    assert rank.grants is not None and rank.grants.sent == 0
    assert rank.say(local.PushDone()) == local.Ok()
    finish(site, slot)


def test_grants_that_go_backwards_and_change_while_they_are_read(site: Site) -> None:
    """Another thread scribbles over all of the page, the agent's words too, for as long as the version goes."""
    rank, new = site.ranks[0], site.version + 1
    slot = rank.begin(new)
    assert rank.say(local.PushOffer(new, USED)) == local.Ok()
    rank.grant(20_000)
    assert rank.grants is not None
    until(lambda: rank.grants.arrived == 20_000, what="the first bytes")  # type: ignore[union-attr]
    rank.grant(10)
    time.sleep(0.1)
    assert rank.grants.sent == rank.grants.arrived == 20_000
    over, seed = threading.Event(), random.Random(7)

    def scribble() -> None:
        page = rank.grants
        while not over.is_set() and page is not None:
            page._map[:256] = seed.randbytes(256)
            page._map[2048:] = seed.randbytes(2048)

    scribbling = threading.Thread(target=scribble)
    scribbling.start()
    try:
        for _ in range(50):
            assert rank.channel is not None
            rank.channel.send(local.encode(local.PushGo()))
        assert rank.say(local.PushDone()) == local.Ok()
    finally:
        over.set()
        scribbling.join()
    finish(site, slot)


def test_a_grant_before_the_holder_has_answered(site: Site) -> None:
    """Imitate one that an earlier version has left."""
    rank, new = site.ranks[0], site.version + 1
    slot = rank.begin(new)
    assert rank.open() == local.Ok()
    words(rank, USED, 1 << 40, (1 << 64) - 1)
    assert rank.say(local.PushOffer(new, USED)) == local.Ok()
    assert rank.say(local.PushDone()) == local.Ok()
    finish(site, slot)


def test_no_process_changes_the_size_of_a_grant_page(site: Site) -> None:
    """A read of the agent's would end it."""
    reply, fds = site.ranks[0].caller.ask_fds(local.OpenPush("default", 0, 1))
    assert reply == local.Ok()
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fds[1], size)
    for fd in fds:
        os.close(fd)
    site.ranks[0].close_channel()


def finish(site: Site, slot: int) -> None:
    """The version of rank 0 has gone; the others' follow, until it is sealed."""
    new = site.version + 1
    site.ranks[0].caller.ask(local.Landed("default", 0, new, slot, USED))
    for other in site.ranks[1:]:
        other.save(new)
    site.version = new
    until(lambda: all(r.page.sealed == (r.epoch, new) for r in site.ranks), what="the seal")


@pytest.mark.parametrize("noise", [b"{}", b"\xff", b'{"op":"hello"}', b'{"op":"chunk","length":-1}', b"x" * 5000])
def test_noise_on_a_channel(site: Site, noise: bytes) -> None:
    rank = site.ranks[0]
    assert rank.open() == local.Ok() and rank.channel is not None
    rank.channel.send(noise)
    assert isinstance(local.reply_decoder.decode(rank.channel.recv(65536)), local.Error)
    rank.close_channel()


def test_an_end_of_what_the_holder_has_not_taken(site: Site) -> None:
    rank = site.ranks[0]
    assert rank.open() == local.Ok()
    assert isinstance(rank.say(local.PushDone()), local.Error)
    rank.close_channel()


# ---- what is there already -----------------------------------------------------------------------------


def complete(site: Site, version: int) -> bool:
    return ("complete", (site.ranks[0].epoch, version)) in site.slots()


def test_what_was_kept_since_the_version_in_that_slot_does_not_come(site: Site) -> None:
    new, base = site.version + 1, site.version - 1
    push = site.push()
    answer = push.answer(peer.PushHead(new, USED, SIZE, base, ((0, 1000), (1500, 2000))))
    assert answer == peer.PushAnswer(present=((0, 1000), (1500, 2000))), site.slots()
    assert push.chunk(1000, b"x" * 500) == 500 and push.chunk(2000, b"x" * (USED - 2000)) == USED - 1500
    old = payload(0, base)
    push.done(digest_bytes(old[:1000] + b"x" * 500 + old[1500:2000] + b"x" * (USED - 2000)))
    assert complete(site, new)
    push.close()
    site.version = new  # the next seal is of a later one


@pytest.mark.parametrize("back", [0, 2], ids=["the other slot's", "of long ago"])
def test_another_base_is_of_no_use(site: Site, back: int) -> None:
    push = site.push()
    head = peer.PushHead(site.version + 1, USED, SIZE, site.version - back, ((0, 1000),))
    assert push.answer(head) == peer.PushAnswer()
    push.close()


@pytest.mark.parametrize(
    "kept", [((0, USED + 1),), ((5, 5),), ((0, 9), (4, 12)), tuple((2 * n, 2 * n + 1) for n in range(65))]
)
def test_ranges_that_are_none_end_the_push(site: Site, kept: tuple[tuple[int, int], ...]) -> None:
    push = site.push()
    push.link.send(peer.PushHead(site.version + 1, USED, SIZE, site.version - 1, kept))
    assert push.ended()
    push.close()
    rank = site.ranks[0]
    slot = rank.begin(site.version + 1)
    assert isinstance(rank.say(local.PushOffer(site.version + 1, USED, site.version - 1, kept)), local.Refused)
    rank.close_channel()
    rank.abort(site.version + 1, slot)


@pytest.mark.parametrize(("at", "size"), [(0, 10), (1000, 10), (990, 20), (1200, 10)])
def test_a_chunk_where_something_is_ends_the_push(site: Site, at: int, size: int) -> None:
    """Kept are bytes 0 to 1000 and 1005 to 1500: the first to come is byte 1000, and 5 are missing there."""
    push = site.push()
    push.answer(peer.PushHead(site.version + 1, USED, SIZE, site.version - 1, ((0, 1000), (1005, 1500))))
    push.link.send(peer.PushChunk(at, size))
    assert push.ended()
    push.close()


def test_a_rank_fills_what_it_has_as_well(site: Site) -> None:
    rank, new = site.ranks[1], site.version + 1
    begun = rank.caller.ask(local.Fill("default", 0, new))
    assert isinstance(begun, local.Begun)
    rank.kept[begun.slot][500:2500] = payload(0, new)[500:2500]
    assert rank.caller.ask(local.Filled("default", 0, new, ((500, 2500),))) == local.Ok()
    home = site.ranks[0]
    slot = home.begin(new)
    assert home.say(local.PushOffer(new, USED)) == local.PresentRanges(((500, 2500),))
    assert home.say(local.PushDone()) == local.Ok()
    home.caller.ask(local.Landed("default", 0, new, slot, USED))
    for other in site.ranks[1:]:
        other.save(new)
    site.version = new
    until(lambda: all(r.page.sealed == (r.epoch, new) for r in site.ranks), what="the seal")


def test_what_was_filled_wrongly_is_no_copy_and_no_more_is_filled(site: Site) -> None:
    rank, new = site.ranks[1], site.version + 1
    begun = rank.caller.ask(local.Fill("default", 0, new))
    assert isinstance(begun, local.Begun)
    rank.kept[begun.slot][:USED] = payload(0, new - 1)
    rank.caller.ask(local.Filled("default", 0, new, ((0, 2500),)))
    push = site.push()
    assert push.answer(peer.PushHead(new, USED, SIZE)).present == ((0, 2500),)
    push.chunk(2500, payload(0, new)[2500:])
    push.done(digest_bytes(payload(0, new)))
    assert not complete(site, new)
    refused = rank.caller.ask(local.Fill("default", 0, new + 1))
    assert refused == local.Error("what is replicated here is not what rank 0 has")
    assert isinstance(rank.caller.ask(local.Register("default", 0, 3, 0, SIZE, pushed=True)), local.Slots)
    begun = rank.caller.ask(local.Fill("default", 0, new + 1))
    assert isinstance(begun, local.Begun), "another plan, another try"
    rank.caller.ask(local.Filled("default", 0, new + 1))
    assert push.offer(new + 1) == ""
    push.close()
    site.version = new + 1


def test_a_version_that_was_filled_wrongly_is_abandoned(site: Site) -> None:
    """Every rank learns at once that the version is never sealed; the next one arrives whole."""
    home, rank, new = site.ranks[0], site.ranks[1], site.version + 1
    begun = rank.caller.ask(local.Fill("default", 0, new))
    assert isinstance(begun, local.Begun)
    rank.kept[begun.slot][:USED] = payload(0, new - 1)
    rank.caller.ask(local.Filled("default", 0, new, ((0, 2500),)))
    slot = home.begin(new)
    assert home.say(local.PushOffer(new, USED)) == local.PresentRanges(((0, 2500),))
    assert home.say(local.PushDone()) == local.Ok()
    home.caller.ask(local.Landed("default", 0, new, slot, USED))
    for other in site.ranks[1:]:
        other.save(new)
    until(lambda: all(r.page.abandoned == (r.epoch, new) for r in site.ranks), what="the version's end")
    site.version = new
    site.seal()
    assert isinstance(rank.caller.ask(local.Register("default", 0, 3, 0, SIZE, pushed=True)), local.Slots)


def test_a_rank_that_fills_no_more_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_fills, "WAIT_S", 60.0)
    shard = Mock(unlike=f"{local.UNLIKE} rank 0 has")
    shard.fill.version = 7
    assert asyncio.run(asyncio.wait_for(replica_fills.wait_for_fill(shard, 8), 5.0)) is None


def test_what_a_rank_has_filled_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has closed its checkpointer, or was killed, before the shard's home sends the rest of that version."""
    monkeypatch.setattr(replica_fills, "WAIT_S", 60.0)
    client, other = cast(Any, object()), cast(Any, object())
    memory = [cast(Any, None)] * 2
    shard = Shard("default", 0, 2, 1, SIZE, memory)
    shard.pair.begin_version(Stamp(1, 7), None, frozenset(), voted=frozenset())
    shard.fill = Fill(client, 7, Stamp(1, 7), 0, Slot(), ((0, 10),))
    assert replica_fills.on_disconnect(other, [shard]) == [] and not shard.fill.is_last
    shard.fill.over.set()
    assert replica_fills.on_disconnect(client, [shard]) == []
    assert asyncio.run(replica_fills.wait_for_fill(shard, 7)) is shard.fill, (
        "else the version is refused: it is begun here"
    )
    assert asyncio.run(asyncio.wait_for(replica_fills.wait_for_fill(shard, 8), 5.0)) is None


def test_a_rank_that_dies_while_it_fills_leaves_the_slot_to_the_push() -> None:
    client = cast(Any, Mock(is_alive=lambda: False))
    shard = Shard("default", 0, 2, 1, SIZE, [cast(Any, None)] * 2)
    shard.pair.begin_version(Stamp(1, 7), None, frozenset(), voted=frozenset())
    shard.pair.slots[0].busy = True
    shard.fill = Fill(client, 7, Stamp(1, 7), 0, Slot())
    assert replica_fills.on_disconnect(client, [shard]) == [shard]
    asyncio.run(replica_fills.wait_for_end(client, [shard]))
    fill = asyncio.run(replica_fills.wait_for_fill(shard, 7))
    assert isinstance(fill, Fill) and not fill.present and not shard.pair.slots[0].busy


def test_a_rank_that_is_still_filling_is_waited_for_and_not_written_over(site: Site) -> None:
    rank, new = site.ranks[1], site.version + 1
    assert isinstance(rank.caller.ask(local.Fill("default", 0, new)), local.Begun)
    push = site.push()
    assert "still filling" in push.offer(new)
    assert "still being" in push.offer(new + 1), "nor is the slot given to a later version"
    assert rank.caller.ask(local.Filled("default", 0, new)) == local.Ok()
    assert push.offer(new + 1) == ""
    push.close()
    site.version = new + 1


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (local.Fill("default", 1, 99), "not pushed here"),
        (local.Fill("default", 2, 99), "not registered"),
        (local.Filled("default", 0, 99), "not being filled"),
        (local.Filled("default", 0, 99, ((5, 3),)), "bytes 5 to 3"),
        (local.Filled("default", 0, 99, ((0, SIZE + 1),)), "bytes 0 to"),
        (local.Fill("another", 0, 99), "this process has not joined"),
    ],
)
def test_who_may_not_fill(site: Site, message: local.Request, said: str) -> None:
    refused = site.ranks[1].caller.ask(message)
    assert isinstance(refused, local.Error) and said in refused.error, refused


def test_a_version_of_the_past_is_not_filled(site: Site) -> None:
    assert isinstance(site.ranks[1].caller.ask(local.Fill("default", 0, site.version - 1)), local.Refused)
    assert isinstance(site.ranks[1].caller.ask(local.Fill("default", 0, site.version)), local.Refused)


# ---- RDMA, which is off here ---------------------------------------------------------------------------


PAIR = peer.QueuePair(1, 2, 3, b"\0" * 16, 5)


def test_a_trial_that_was_not_offered(site: Site) -> None:
    push = site.push()
    push.link.send(peer.PushTrial(PAIR))
    assert "no device" in push.link.receive(peer.PushAnswer).reason
    answer = push.answer(peer.PushHead(site.version + 1, USED, SIZE, pair=PAIR))
    assert answer.reason == "" and not isinstance(answer.window, peer.WriteWindow), "TCP serves"
    push.link.close()


def test_the_end_of_no_trial(site: Site) -> None:
    push = site.push()
    push.link.send(peer.PushTried("0" * 32))
    assert push.ended()
