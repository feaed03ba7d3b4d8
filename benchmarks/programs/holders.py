"""Copies of every rank's shard on two other nodes: one after the other, both at once, or down a chain.

    srun python holders.py --out PREFIX --bytes N --ways sequence,chain --rounds 10 --alone

Every rank has a shard of N bytes that the next two ranks are to hold (m = 3). Over links of gloo, in
chunks with an acknowledgement for each, as many under way at a time as its sender has:

sequence    all chunks to the next rank; when they are there, all to the one after it (GEMINI's Algorithm 2, lines
            21 to 23)
flowing     the same, but those to the second begin when the last one to the first is on its way
both        each chunk to the next rank, then to the one after it
chain       each chunk to the next rank, which passes it on when it is there; own chunks and those that are passed on
            leave a node by one sender, in turns
own_first   the same, but a rank passes on what it has got when its own chunks are away

All ranks save at once; with --alone each round also has rank 0 save alone. A round takes each way once, from another
one on each time. Each rank writes JSON lines to PREFIX.RANK: when each copy was there, in seconds from the start that
the ranks have agreed on (the nodes of a development cluster have one clock).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import threading
import time
from collections import deque

import torch
import torch.distributed as dist

import gemini_hpc as gemini
from gemini_hpc.train.nccl.gloo_links import GlooLinks, Message

CHUNK_BYTES, AHEAD = 1 << 20, 4
START_S = 0.05
_ACK_TAG = 1000


class Link:
    """Chunks to or from one rank, of one shard."""

    def __init__(self, links: GlooLinks, rank: int, shard: int) -> None:
        self._links, self._rank, self._tag = links, rank, shard
        self._flying: deque[tuple[Message, Message]] = deque()

    def send(self, chunk: torch.Tensor) -> None:
        """Returns when fewer than AHEAD are under way."""
        ack = self._links.begin_transfer(False, self._rank, torch.empty(1, dtype=torch.uint8), _ACK_TAG + self._tag)
        self._flying.append((self._links.begin_transfer(True, self._rank, chunk, self._tag), ack))
        while len(self._flying) >= AHEAD:
            self._land()

    def _land(self) -> None:
        for message in self._flying.popleft():
            message.wait()

    def finish(self) -> None:
        """Returns when all are there."""
        while self._flying:
            self._land()

    def receive(self, chunks: list[torch.Tensor], passed: queue.SimpleQueue[int] | None) -> None:
        """Returns when all are there; tells `passed` of each one."""
        coming: deque[Message] = deque()
        acks: list[Message] = []
        posted = 0
        for k in range(len(chunks)):
            while posted < min(k + AHEAD, len(chunks)):
                coming.append(self._links.begin_transfer(False, self._rank, chunks[posted], self._tag))
                posted += 1
            coming.popleft().wait()
            done = torch.ones(1, dtype=torch.uint8)
            acks.append(self._links.begin_transfer(True, self._rank, done, _ACK_TAG + self._tag))
            if passed is not None:
                passed.put(k)
        for ack in acks:
            ack.wait()


class Bench:
    """One rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._out = open(f"{args.out}.{self.rank}", "w", buffering=1)  # noqa: SIM115
        self._links = GlooLinks()
        self._own = self._chunks(torch.full((args.bytes,), self.rank, dtype=torch.uint8))
        self._held = {back: self._chunks(torch.zeros(args.bytes, dtype=torch.uint8)) for back in (1, 2)}

    @staticmethod
    def _chunks(shard: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(shard, CHUNK_BYTES))

    def _peer(self, step: int) -> int:
        return (self.rank + step) % self.world

    def one(self, number: int, way: str, saves: set[int]) -> None:
        """One version of the shards of the ranks in `saves`."""
        start = torch.tensor([time.monotonic() + START_S], dtype=torch.float64)
        for chunks in self._held.values():
            for chunk in chunks:
                chunk.zero_()
        dist.broadcast(start, 0)
        dist.barrier()
        began = float(start.item())
        while (left := began - time.monotonic()) > 0:
            time.sleep(left)
        there: dict[int, float] = {}
        chained = way in ("chain", "own_first")
        passed: queue.SimpleQueue[int] = queue.SimpleQueue()

        def receive(back: int) -> None:
            source = self._peer(-1) if chained else self._peer(-back)
            on = passed if chained and back == 1 else None
            Link(self._links, source, self._peer(-back)).receive(self._held[back], on)
            there[back] = time.monotonic() - began

        threads = [
            threading.Thread(target=receive, args=(back,)) for back in self._held if self._peer(-back) in saves
        ]
        for thread in threads:
            thread.start()
        mine = list(self._own) if self.rank in saves else []
        if chained:
            self._chain(mine, passed, self._peer(-1) in saves, way == "own_first")
        else:
            self._star(mine, way)
        for thread in threads:
            thread.join()
        for back, chunks in self._held.items():
            if back in there and not all(bool((chunk == self._peer(-back)).all()) for chunk in chunks):
                raise SystemExit(f"the copy of rank {self._peer(-back)} is not its shard")
        for back, seconds in there.items():
            self.say("copy", round=number, way=way, saving=len(saves), shard=self._peer(-back), seconds=seconds)

    def _star(self, mine: list[torch.Tensor], way: str) -> None:
        links = [Link(self._links, self._peer(step), self.rank) for step in (1, 2)]
        if way == "both":
            for chunk in mine:
                for link in links:
                    link.send(chunk)
        else:
            for link in links:
                for chunk in mine:
                    link.send(chunk)
                if way == "sequence":
                    link.finish()
        for link in links:
            link.finish()

    def _chain(self, mine: list[torch.Tensor], passed: queue.SimpleQueue[int], passes: bool, own_first: bool) -> None:
        to = self._peer(1)
        own, other = Link(self._links, to, self.rank), Link(self._links, to, self._peer(-1))
        left, waiting = deque(mine), len(self._held[1]) if passes else 0
        while left or waiting:
            if left:
                own.send(left.popleft())
            if waiting and not (own_first and left) and (not left or not passed.empty()):
                other.send(self._held[1][passed.get()])
                waiting -= 1
        own.finish()
        other.finish()

    def say(self, what: str, **more: object) -> None:
        """A line of the log."""
        self._out.write(json.dumps({"what": what, "rank": self.rank, **more}) + "\n")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, help="prefix of the log files")
    p.add_argument("--bytes", type=int, required=True, help="of one shard")
    p.add_argument("--ways", required=True, help="in the order of the first round")
    p.add_argument("--rounds", type=int, required=True)
    p.add_argument("--alone", action="store_true", help="also with one rank that saves")
    args = p.parse_args()
    torch.set_num_threads(1)
    gemini.set_ranks()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    dist.init_process_group("gloo")
    bench = Bench(args)
    ways = args.ways.split(",")
    for number in range(-1, args.rounds):  # the first round does not count
        turn = number % len(ways)
        for way in [*ways[turn:], *ways[:turn]]:
            for saves in [set(range(bench.world)), *([{0}] if args.alone else [])]:
                bench.one(number, way, saves)
    bench.say("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
