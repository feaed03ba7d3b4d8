"""Pushes between `FakeJob`'s agents: a shard's versions, from its home's slots into a holder's."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from gemini_hpc.core.slots import Refused, Stamp
from gemini_hpc.format import commit_record
from gemini_hpc.wire import local

if TYPE_CHECKING:
    from .fake_agent import Held, Node


class Push:
    """One channel: the shard of a rank, from one node to another. It ends with either of the two agents."""

    def __init__(self, home: Node, holder: Node, request: local.OpenPush) -> None:
        self._home, self._holder, self._set, self._rank = home, holder, request.set, request.rank
        self._sock, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._servers = home.server, holder.server
        self._from: Held | None = None
        self._into: Held | None = None
        self._slots = 0, 0
        self._version = self._used = self._at = 0
        home.connections.append(self._sock)
        holder.connections.append(self._sock)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError), self._sock:
            while data := self._sock.recv(local.MAX_PACKET_BYTES):
                request = local.push_decoder.decode(data)
                with self._home.job.lock:
                    if (self._home.server, self._holder.server) != self._servers or None in self._servers:
                        return
                    reply = self._answer(request)
                    done = isinstance(request, local.PushDone)
                    self._home.job.unverified += done
                self._sock.sendall(local.encode(reply))
                if isinstance(request, local.PushDone):
                    with self._home.job.lock:
                        self._verify()
                        self._home.job.unverified -= 1

    def _answer(self, request: local.Message) -> local.Message:
        if isinstance(request, local.PushOffer):
            return self._offer(request)
        if isinstance(request, local.PushChunk):
            assert self._from is not None and self._into is not None
            here, there = self._slots
            data = os.pread(self._from.fds[here], request.length, self._at)
            os.pwrite(self._into.fds[there], data, self._at)
            self._at += len(data)
        else:
            assert self._at == self._used, "not all has come"
        return local.Ok()

    def _offer(self, offer: local.PushOffer) -> local.Message:
        job, stamp = self._home.job, Stamp(self._home.job.epoch, offer.version)
        begin = local.Begin(set=self._set, rank=self._rank, version=offer.version)
        if reason := job.refuse_begin(self._holder.rank, begin) if job.refuse_begin else "":
            return local.Refused(reason)
        home, holder = self._home.held.get(self._rank), self._holder.held.get(self._rank)
        index = home.pair.find(stamp) if home is not None else None
        if home is None or holder is None or index is None:
            return local.Refused("not registered")
        if holder.bytes != home.bytes:
            assert self._holder.page is not None
            holder = self._holder.make(self._set, self._rank, home.world, home.home, home.bytes)
            self._holder.page.set_grown(self._holder.page.grown + 1)
        try:
            voted = holder.pair.complete_stamps()
            self._slots = index, holder.pair.begin_version(stamp, job.sealed, job.abandoned(), voted=voted)
        except Refused as refused:
            return local.Refused(refused.reason)
        os.pwrite(holder.fds[self._slots[1]], commit_record.BLANK, holder.bytes)
        self._from, self._into, self._version = home, holder, offer.version
        self._used, self._at = offer.used, 0
        return local.Ok()

    def _verify(self) -> None:
        (here, index), version, used = self._slots, self._version, self._used
        if self._holder.held.get(self._rank) is not self._into or self._into is None or self._from is None:
            return
        digest = self._from.digest(here, used)
        self._holder.verify(
            local.Landed(set=self._set, rank=self._rank, version=version, slot=index, used=used, digest=digest)
        )
