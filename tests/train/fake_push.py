"""Pushes between `FakeJob`'s agents: a shard's versions, from its home's slots into a holder's."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from gemini_hpc.core.slots import Refused, Stamp
from gemini_hpc.format import commit_record
from gemini_hpc.wire import grant_page, local
from gemini_hpc.wire.grant_page import GrantReader, Spell

if TYPE_CHECKING:
    from .fake_agent import Held, Node


_STEP_BYTES, _LOOK_S = 1 << 17, 0.002


class Push:
    """One channel: the shard of a rank, from one node to another. It ends with either of the two agents."""

    def __init__(self, home: Node, holder: Node, request: local.OpenPush) -> None:
        self._home, self._holder, self._training_name, self._rank = home, holder, request.training, request.rank
        self._sock, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.page_fd = grant_page.make()
        self._page = GrantReader(self.page_fd)
        self._flying: list[tuple[float, int]] = []  # when so many bytes of the version will have arrived
        self._arrived = self._spell_from = 0
        self._free_at = self._spell_at = 0.0
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
            while data := self._hear():
                request = local.push_decoder.decode(data)
                if isinstance(request, local.PushGo):
                    continue
                if isinstance(request, local.PushDone):
                    while self._at < self._used:
                        self._send(self._used)
                    time.sleep(max(0.0, self._free_at - time.monotonic()))
                    self._land()
                with self._home.job.lock:
                    if (self._home.server, self._holder.server) != self._servers or None in self._servers:
                        return
                    reply = self._offer(request) if isinstance(request, local.PushOffer) else local.Ok()
                    done = isinstance(request, local.PushDone)
                    self._home.job.unverified += done
                try:
                    self._sock.sendall(local.encode(reply))  # the rank may have ended
                finally:
                    with self._home.job.lock:
                        if done:
                            self._verify()
                        self._home.job.unverified -= done

    def _hear(self) -> bytes:
        """The rank's next message. What it grants goes before."""
        while True:
            self._page.publish_asleep(True)
            self._land()
            while self._at < self._used:
                grant = self._page.grant(self._used)
                if not (room := grant.compute_room(self._at, self._at - self._arrived, time.monotonic())):
                    break
                self._send(room)
                self._land()
            self._sock.settimeout(_LOOK_S if self._arrived < self._used else None)
            with suppress(TimeoutError):
                return self._sock.recv(local.MAX_PACKET_BYTES)

    def _send(self, most: int) -> None:
        """Send at the rate of the job's links."""
        assert self._from is not None and self._into is not None
        job, now = self._home.job, time.monotonic()
        here, there = self._slots
        with job.lock:
            if (self._home.server, self._holder.server) != self._servers:
                raise OSError("an agent has gone")
            data = os.pread(self._from.fds[here], min(most, _STEP_BYTES, self._used - self._at), self._at)
            os.pwrite(self._into.fds[there], data, self._at)
        if self._at == self._arrived:
            self._spell_from, self._spell_at = self._at, now
        self._at += len(data)
        self._free_at = max(now, self._free_at) + (len(data) / job.rate if job.rate else 0.0)
        self._flying.append((self._free_at, self._at))
        self._page.publish_progress(self._at, self._arrived)

    def _land(self) -> None:
        now = time.monotonic()
        while self._flying and self._flying[0][0] <= now:
            self._arrived = self._flying.pop(0)[1]
            self._page.publish_progress(self._at, self._arrived)
        if self._arrived == self._at > self._spell_from:
            self._page.add(Spell(self._at - self._spell_from, self._spell_at, now))
            self._spell_from = self._at

    def _offer(self, offer: local.PushOffer) -> local.Message:
        job, stamp = self._home.job, Stamp(self._home.job.epoch, offer.version)
        begin = local.BeginVersion(training=self._training_name, rank=self._rank, version=offer.version)
        if reason := job.refuse_begin(self._holder.rank, begin) if job.refuse_begin else "":
            return local.Refused(reason)
        home, holder = self._home.held.get(self._rank), self._holder.held.get(self._rank)
        index = home.pair.find_slot(stamp) if home is not None else None
        if home is None or holder is None or index is None:
            return local.Refused("not registered")
        if holder.bytes != home.bytes:
            assert self._holder.page is not None
            holder = self._holder.make(self._training_name, self._rank, home.world, home.home, home.bytes)
            self._holder.page.set_grown(self._holder.page.grown + 1)
        try:
            voted = holder.pair.list_complete_stamps()
            self._slots = index, holder.pair.begin_version(stamp, job.sealed, job.abandoned(), voted=voted)
        except Refused as refused:
            return local.Refused(refused.reason)
        os.pwrite(holder.fds[self._slots[1]], commit_record.BLANK, holder.bytes)
        self._from, self._into, self._version = home, holder, offer.version
        self._used, self._at, self._arrived, self._spell_from = offer.used, 0, 0, 0
        self._flying.clear()
        self._page.publish_progress(0, 0)
        return local.Ok()

    def _verify(self) -> None:
        (here, index), version, used = self._slots, self._version, self._used
        if self._holder.held.get(self._rank) is not self._into or self._into is None or self._from is None:
            return
        digest = self._from.digest(here, used)
        self._holder.verify(
            local.Landed(
                training=self._training_name, rank=self._rank, version=version, slot=index, used=used, digest=digest
            )
        )
