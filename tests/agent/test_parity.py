"""Real agents that keep parity of each other's shards: what they take, what they refuse, and what they make again."""

from __future__ import annotations

import mmap
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hello import build_hello
from train.agents import RealJob
from waiting import until

from gemini_hpc.core import parity
from gemini_hpc.core.digest import combine_pieces, digest_bytes
from gemini_hpc.core.ranges import list_gaps
from gemini_hpc.wire import local, munge, peer
from gemini_hpc.wire.control_page import ControlPage
from gemini_hpc.wire.link import LinkClosed

from .conftest import STEP, Caller, case
from .test_push_bad_input import Push

SIZE = 1 << 17
USED = {0: 50_000, 1: 90_001, 2: 4097, 3: 131_072, 4: 70_000}
STRIPE = (0, 1, 2)
CLOSED = (LinkClosed, OSError)


def payload(rank: int, version: int) -> bytes:
    return random.Random(f"{rank} {version}").randbytes(USED[rank])


class Rank:
    """Training rank k on the node with node rank k + shift, in the same order."""

    def __init__(self, job: RealJob, rank: int, step: str, shift: int = 0) -> None:
        self.world = len(job.nodes)
        self.rank, self.home, self.shift = rank, (rank + shift) % self.world, shift
        self.node = job.nodes[self.home]
        self.caller = Caller(Path(self.node.path))
        greeting = build_hello(
            training="default", rank=rank, world=self.world, local_rank=0, step=step, pid=os.getpid()
        )
        welcome, fds = self.caller.ask_fds(greeting)
        assert isinstance(welcome, local.Welcome), welcome
        self.welcome, self.page = welcome, ControlPage(fds[0], writable=False)
        os.close(fds[0])
        self.maps: list[mmap.mmap] = []
        self.fds: list[int] = []
        self.step = step
        self.channels: dict[int, socket.socket] = {}

    def register(self) -> None:
        slots, own = self.caller.ask_fds(local.Register("default", self.rank, self.world, self.home, SIZE))
        assert isinstance(slots, local.Slots), slots
        self.maps, self.fds = [mmap.mmap(fd, SIZE) for fd in own], own
        kept, none = self.caller.ask_fds(self.wish())
        assert isinstance(kept, local.Slots) and not none, kept

    def wish(self, passed: int = 0) -> local.Register:
        n, blocks = self.world, self.welcome.parity
        of = tuple((other, (other + self.shift) % n) for other in range(n) if other != self.rank)
        size = blocks * parity.compute_block_bytes(SIZE, n, blocks)
        return local.Register("default", self.rank, n, self.home, size, members=of, passed=passed)

    def begin(self, version: int) -> int:
        begun = self.caller.ask(local.BeginVersion("default", self.rank, version))
        assert isinstance(begun, local.Begun), begun
        self.maps[begun.slot][: USED[self.rank]] = payload(self.rank, version)
        return begun.slot

    def say(self, holder: int, message: local.Message) -> local.Message | None:
        if holder not in self.channels:
            reply, fds = self.caller.ask_fds(local.OpenPush("default", self.rank, holder))
            assert reply == local.Ok(), reply
            self.channels[holder] = socket.socket(fileno=fds[0])
            os.close(fds[1])
            self.channels[holder].settimeout(15)
        with suppress(OSError):
            self.channels[holder].send(local.encode(message))
            data = self.channels[holder].recv(local.MAX_PACKET_BYTES)
            return local.reply_decoder.decode(data) if data else None
        return None

    def send(self, holder: int, version: int) -> int:
        """Return how many bytes have gone, once the holder is done with the version before."""
        used, taken = USED[self.rank], None
        deadline = time.monotonic() + 10
        while not isinstance(taken, local.PresentRanges):
            assert time.monotonic() < deadline, taken
            taken = self.say(holder, local.PushOffer(version, used))
            if not isinstance(taken, local.PresentRanges):  # the agent has ended this way to the holder
                self.channels.pop(holder).close()
        sent = sum(end - start for start, end in list_gaps(taken.present, used))
        assert self.say(holder, local.PushDone()) == local.Ok()
        return sent

    def land(self, version: int, slot: int) -> None:
        landed = local.Landed("default", self.rank, version, slot, USED[self.rank])
        assert self.caller.ask(landed) == local.Ok()

    def save(self, version: int) -> None:
        slot = self.begin(version)
        sent = sum(self.send(holder, version) for holder in range(self.world) if holder != self.home)
        assert sent == self.welcome.parity * USED[self.rank]
        self.land(version, slot)

    def fetch(self, rank: int) -> bytes:
        reply, fds = self.caller.ask_fds(local.Fetch("default", rank))
        assert isinstance(reply, local.Copy), reply
        data = os.pread(fds[0], reply.used, 0)
        os.close(fds[0])
        return data

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.caller.close()
        del self.page
        for m in self.maps:
            m.close()
        for fd in self.fds:
            os.close(fd)

    def rejoin(self, complete: dict[int, int], passed: int) -> None:
        """With the agent that was started after its own had died. complete: version by slot."""
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()
        self.caller.close()
        self.caller = Caller(Path(self.node.path))
        greeting = build_hello(
            training="default",
            rank=self.rank,
            world=self.world,
            local_rank=0,
            step=self.step,
            pid=os.getpid(),
            rejoin=True,
        )
        welcome, fds = self.caller.ask_fds(greeting)
        assert isinstance(welcome, local.Welcome), welcome
        del self.page
        self.page = ControlPage(fds[0], writable=False)
        os.close(fds[0])
        for slot, fd in enumerate(self.fds):
            version = complete.get(slot, 0)
            used, of = (USED[self.rank], digest_bytes(payload(self.rank, version))) if version else (0, "")
            back = local.HandBack(
                "default", self.rank, self.world, self.home, SIZE, slot, welcome.epoch, version, used, of
            )
            assert self.caller.ask(back, [fd]) == local.Ok()
        assert isinstance(self.caller.ask(self.wish(passed)), local.Slots)


class Site:
    """One group of so many agents, each with a rank; blocks: of parity in a row."""

    def __init__(self, directory: Path, nodes: int = 3, blocks: int = 1) -> None:
        self.job = RealJob(directory, nodes, nodes, parity=blocks, heartbeat_s=2.0)
        self.version, self.launches = 0, 0
        self.ranks: list[Rank] = []
        self.launch()

    def launch(self, shift: int = 0) -> None:
        for rank in self.ranks:
            rank.close()
        step = STEP if not self.launches else f"77.{self.launches}"
        self.launches += 1
        self.ranks = [Rank(self.job, k, step, shift) for k in range(len(self.job.nodes))]

    def seal(self) -> None:
        self.version += 1
        for rank in self.ranks:
            rank.save(self.version)
        self.is_sealed(self.version)

    def is_sealed(self, version: int) -> None:
        until(lambda: all(r.page.sealed[1] == version for r in self.ranks), what=f"version {version} is sealed")

    def parity(self, rank: int) -> set[tuple[str, int]]:
        """State and version of the slots beside a rank's shard."""
        held = self.job.inspect(self.job.nodes[rank]).held
        return {(s.state, s.stamp[1] if s.stamp else 0) for s in held if s.members and s.rank == rank}

    def push(self, rank: int, holder: int, **changes: int) -> Push:
        """As the agent of a rank's home, to another node's."""
        asked = {"epoch": self.ranks[0].welcome.epoch, "round": self.ranks[0].page.round} | changes
        link = self.job.call(self.job.nodes[holder], "push", source=self.job.nodes[rank].name)
        return Push(link, peer.PushAsk("default", rank, asked["epoch"], asked["round"]))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for node in self.job.nodes:
            log = node.log()
            assert "Traceback" not in log and "event=error" not in log and "never retrieved" not in log, log
        self.job.close()


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(munge, "encode", lambda payload, *, for_uid: payload)
    monkeypatch.setattr(munge, "decode", lambda credential: (credential, os.geteuid(), 0))


@pytest.fixture
def site(opened: None, tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "job")
    for rank in site.ranks:
        rank.register()
    yield site
    site.close()


@pytest.fixture
def five(opened: None, tmp_path: Path) -> Iterator[Site]:
    """rs:3+2."""
    site = Site(tmp_path / "job", 5, 2)
    for rank in site.ranks:
        rank.register()
    yield site
    site.close()


RS = pytest.mark.witness("rs:K+M: any M nodes of a group may be lost at once")
XOR = pytest.mark.witness("xor:N: one node of a group may be lost")


@pytest.mark.parametrize("lost", [pytest.param(("n1", "n2"), marks=RS), ("n2", "n4"), ("n5", "n1")])
def test_with_two_blocks_two_nodes_may_be_lost_at_once(five: Site, lost: tuple[str, str]) -> None:
    for _ in range(3):
        five.seal()
    left = [node.name for node in five.job.nodes if node.name not in lost]
    five.job.requeue([*left, "n6", "n7"])
    five.launch()
    for rank in five.ranks:
        assert (rank.welcome.chosen_version, rank.welcome.lost) == (3, ())
        assert rank.fetch(rank.rank) == payload(rank.rank, 3)
    until(lambda: all(("complete", 3) in five.parity(k) for k in range(5)), what="the parity is there as well")
    # What was made again is what it is made of: two of those that were left go next.
    names = [node.name for node in five.job.nodes]
    five.job.requeue([*(name for name in names if name not in left[:2]), "n8", "n9"])
    five.launch()
    for rank in five.ranks:
        assert (rank.welcome.chosen_version, rank.welcome.lost) == (3, ())
        for other in range(5):
            assert rank.fetch(other) == payload(other, 3), (rank.rank, other)
        rank.register()
    five.version = 3
    for _ in range(2):
        five.seal()


def test_with_two_blocks_three_nodes_are_too_many(five: Site) -> None:
    five.seal()
    five.job.requeue(["n1", "n4", "n6", "n7", "n8"])
    five.launch()
    lost = five.ranks[0].welcome.lost
    assert five.ranks[0].welcome.chosen_version == 0 and len(lost) == 3


@pytest.mark.parametrize("lost", ["n1", pytest.param("n2", marks=XOR), "n3"])
def test_what_a_lost_node_had_is_made_again(site: Site, lost: str) -> None:
    for _ in range(3):
        site.seal()
    site.job.requeue([name for name in ("n1", "n2", "n3", "n4") if name != lost])
    site.launch()
    gone = next(k for k in STRIPE if site.job.nodes[k].name == "n4")
    for rank in site.ranks:
        assert (rank.welcome.chosen_version, rank.welcome.lost) == (3, ())
        for other in STRIPE:
            assert rank.fetch(other) == payload(other, 3), (rank.rank, other)
    until(lambda: ("complete", 3) in site.parity(gone), what="its parity is there as well")
    assert {("complete", 3)} <= site.parity((gone + 1) % 3)
    for rank in site.ranks:
        rank.register()
    site.version = 3
    for _ in range(2):
        site.seal()


def test_a_second_node_may_go_as_soon_as_the_first_has_come_back(site: Site) -> None:
    for _ in range(2):
        site.seal()
    site.job.requeue(["n1", "n2", "n4"])
    site.launch()
    until(lambda: all(("complete", 2) in site.parity(k) for k in STRIPE), what="all of the parity")
    until(lambda: all(site.job.held(node, k) for k, node in enumerate(site.job.nodes)), what="and of the shards")
    site.job.requeue(["n2", "n4", "n5"])
    site.launch()
    for rank in site.ranks:
        assert rank.welcome.chosen_version == 2 and [rank.fetch(k) for k in STRIPE] == [payload(k, 2) for k in STRIPE]


def test_ranks_that_are_on_other_nodes_than_before(site: Site) -> None:
    """What each agent still has of the parity beside another rank's shard is not taken for the new one."""
    site.seal()
    site.launch(shift=1)
    for rank in site.ranks:
        assert rank.welcome.chosen_version == 1 and rank.fetch(rank.rank) == payload(rank.rank, 1)
        rank.register()
    site.seal()
    site.seal()


def test_two_nodes_are_too_many_and_each_shard_is_named(site: Site) -> None:
    site.seal()
    site.job.requeue(["n1", "n4", "n5"])
    site.launch()
    lost = site.ranks[0].welcome.lost
    assert site.ranks[0].welcome.chosen_version == 0 and len(lost) == 2
    assert all("no complete copy of shard" in text and "gone: n2, n3" in text for text in lost), lost


def test_nothing_is_sealed_before_all_are_in_it(site: Site) -> None:
    site.seal()
    site.version = 2
    slots = [rank.begin(2) for rank in site.ranks]
    for rank in site.ranks[:2]:
        for holder in STRIPE:
            if holder != rank.rank:
                rank.send(holder, 2)
        rank.land(2, slots[rank.rank])
    assert ("filling", 2) in site.parity(0) and ("filling", 2) in site.parity(1)
    assert all(rank.page.sealed[1] == 1 for rank in site.ranks)
    for holder in (0, 1):
        site.ranks[2].send(holder, 2)
    site.ranks[2].land(2, slots[2])
    site.is_sealed(2)


def test_who_goes_on_does_not_spoil_what_others_still_bring(site: Site) -> None:
    """Rank 0 has begun version 3 where version 2 of rank 2 is late: version 2 comes to its end first."""
    site.seal()
    push = site.push(0, 1)
    assert push.offer(2, USED[0], SIZE) == ""
    one = site.push(2, 1)
    assert one.offer(2, USED[2], SIZE) == ""
    push.close()
    until(lambda: ("filling", 2) in site.parity(1), what="it is torn, and still being written to")
    late = site.push(0, 1)
    assert "is still" in (said := late.offer(3, USED[0], SIZE)) or said == ""
    late.close()
    one.close()


WRONG = ["early", "another digest", "no digest", "a chunk too long", "a chunk of what is not wanted", "twice"]


def test_a_part_that_is_not_what_it_should_be(site: Site) -> None:
    """Its version is void, what was sealed stays, and the next version is sealed."""
    site.seal()
    for how in WRONG:
        with case(how):
            spoil(site, how)
            site.seal()


def spoil(site: Site, how: str) -> None:
    """Push a spoiled part of the next version, whose number is then used up."""
    site.version += 1
    start, end = parity.Stripe(STRIPE).find_part(0, 1, USED[0])
    push = site.push(0, 1)
    answer = push.answer(peer.PushHead(site.version, USED[0], SIZE))
    assert answer.part and list(list_gaps(answer.present, USED[0])) == [(start, end)]
    data = payload(0, site.version)[start:end]
    if how == "a chunk too long":
        push.link.send(peer.PushChunk(start, end - start + 1))
        assert push.ended()
    elif how == "a chunk of what is not wanted":
        push.link.send(peer.PushChunk(end if start == 0 else 0, 10))
        assert push.ended()
    elif how == "early":
        assert push.chunk(start, data[:100]) == 100
    else:
        assert push.chunk(start, data) == end - start
        said = {"another digest": digest_bytes(b"x"), "no digest": "", "twice": digest_bytes(data)}[how]
        push.link.send(peer.PushDone(digest_bytes(payload(0, site.version)), said))
        if how == "no digest":
            assert push.ended()
        else:
            push.link.receive(peer.PushVerified)
    if how == "twice":
        assert "was received before" in push.offer(site.version, USED[0], SIZE)
    push.close()
    until(lambda: ("complete", site.version - 1) in site.parity(1), what="what was sealed is there")
    if how != "twice":
        until(lambda: not any(v == site.version for _, v in site.parity(1)), what="the version is void")


def test_lengths(site: Site) -> None:
    for used in (0, SIZE + 1):
        push = site.push(0, 1)
        with case(used), pytest.raises(CLOSED):
            push.offer(1, used, SIZE)
        push.close()
    push = site.push(0, 1)
    assert push.offer(1, USED[0], SIZE) == ""
    push.close()


def test_more_than_the_parity_has_room_for(site: Site) -> None:
    """It grows, and what was sealed stays until something newer is."""
    site.seal()
    push = site.push(0, 1)
    assert "the parity has grown" in push.offer(2, 1 << 20, 1 << 20)
    assert push.offer(3, 1 << 20, 1 << 20) == ""
    assert ("complete", 1) in site.parity(1) and ("filling", 3) in site.parity(1)
    push.close()
    kept = site.ranks[1].caller.ask(site.ranks[1].wish())
    assert isinstance(kept, local.Slots) and kept.bytes == parity.compute_block_bytes(1 << 20, 3), (
        "registered anew, no smaller"
    )
    too_large = site.push(0, 1)
    assert "not enough memory" in too_large.offer(4, 1 << 49, 1 << 49)
    too_large.close()
    site.version = 4
    site.seal()
    until(lambda: ("complete", 1) not in site.parity(1), what="the smaller one is freed")


def test_only_the_home_may_push(site: Site) -> None:
    link = site.job.call(site.job.nodes[1], "push", source="n3")
    push = Push(link, peer.PushAsk("default", 0, site.ranks[0].welcome.epoch, site.ranks[0].page.round))
    assert push.reason == "node rank 0 is the home of the shard of rank 0" and push.ended()
    push.close()


def test_stripes_that_cannot_be(site: Site) -> None:
    for of, why in [
        (((1, 1),), "no stripe"),
        (((1, 1), (2, 1)), "no stripe"),
        (((1, 1), (1, 2)), "no stripe"),
        (((0, 1), (2, 2)), "impossible parity"),
        (((1, 1), (7, 2)), "impossible parity"),
        (((1, 0), (2, 2)), "no stripe"),
    ]:
        with case(of):
            reply = site.ranks[0].caller.ask(local.Register("default", 0, 3, 0, 8192, members=of))
            assert isinstance(reply, local.Error) and why in reply.error


def test_a_rank_has_no_copies_of_others(site: Site) -> None:
    reply = site.ranks[0].caller.ask(local.Register("default", 1, 3, 1, SIZE, pushed=True))
    assert isinstance(reply, local.Error) and "keeps no copies" in reply.error


@pytest.mark.parametrize(
    "passed", [3, pytest.param(0, marks=pytest.mark.slow)], ids=["its rank says so", "it finds out"]
)
def test_an_agent_that_comes_back_has_no_parity_and_says_so(site: Site, passed: int) -> None:
    """Version 2 is complete at its home everywhere, but for one node's parity, which has died with its agent. Nobody
    sends it again: unless all hear of that, they wait for its seal for good."""
    site.seal()
    slots = [rank.begin(2) for rank in site.ranks]
    for rank in site.ranks:
        for holder in STRIPE:
            if holder != rank.rank:
                rank.send(holder, 2)
    for rank in site.ranks[1:]:
        rank.land(2, slots[rank.rank])
    first = site.ranks[0]
    first.node.die()
    first.node.start(again=True)
    first.rejoin({slots[0]: 2, 1 - slots[0]: 1}, passed=passed)
    if not passed:
        for version in (3, 4):  # so that the agent knows how long an iteration takes
            first.caller.ask(local.Event("skipped", version, time.time()))
    until(lambda: all(r.page.abandoned[1] == 2 for r in site.ranks), 20.0, what="all know that it will not be sealed")
    assert all(rank.page.sealed[1] == 1 for rank in site.ranks)
    site.version = passed or 4
    site.seal()


def test_ranges_that_cannot_be_pulled(site: Site) -> None:
    site.seal()
    stamp = (site.ranks[0].welcome.epoch, 1)
    for start, end in ((5, 5), (0, USED[0] + 1), (USED[0], 7)):
        link = site.job.call(site.job.nodes[0], "pull", source="n2")
        link.send(peer.PullAsk("default", 0, stamp, False, start, end))  # type: ignore[arg-type]
        head = link.receive(peer.PullHead)
        assert head.copy is None and "bytes" in head.reason
        link.close()
    link = site.job.call(site.job.nodes[0], "pull", source="n2")
    for _ in range(2):  # one connection serves any number of questions
        link.send(peer.PullAsk("default", 0, stamp, False, 10, 20, digests=True))  # type: ignore[arg-type]
        head = link.receive(peer.PullHead)
        link.sock.settimeout(10)
        wanted = payload(0, 1)[10:20]
        assert (
            combine_pieces(head.pieces, 10) == digest_bytes(wanted)
            and link.sock.recv(10, socket.MSG_WAITALL) == wanted
        )
    link.close()
