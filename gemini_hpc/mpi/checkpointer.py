"""The checkpointer, the one object that an MPI program uses."""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gemini_hpc import clock, lines
from gemini_hpc.client import joining
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.chosen_version import fetch_on_all
from gemini_hpc.client.mapped_slots import Content, MappedShard, MappedSlot, ShardOwner
from gemini_hpc.client.seal_wait import Wait
from gemini_hpc.client.session import RankSession
from gemini_hpc.client.slot_requests import SlotRequests
from gemini_hpc.client.summary_sender import SummarySender
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.numbers import check_count, check_overhead, check_timeout, parse_number
from gemini_hpc.core.seal_latency import VersionTimes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format.slot_header import pack_header
from gemini_hpc.mpi import archive
from gemini_hpc.mpi.arrays import Arrays, Saved
from gemini_hpc.mpi.calls import Calls, describe_difference
from gemini_hpc.mpi.collectives import MpiRanks
from gemini_hpc.mpi.exchange import Exchange, Patience
from gemini_hpc.mpi.interval import SaveInterval
from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier

_CHUNK_BYTES = 1 << 20


class Checkpointer:
    """A checkpointer that keeps copies of an MPI program's arrays in its nodes' memory after every `step()`.

    Create it on all ranks of `comm` (an mpi4py communicator). Call `resume()` before the loop, `step()` at the end of
    each iteration, and `close()` at the end; all are collective. Without an agent (no `--gemini-replicas`, or not
    under Slurm) the checkpointer reports this once and does nothing.

    Args:
        comm: An mpi4py communicator.
        arrays: Names with NumPy arrays or other objects with writable memory. Write into them (`T[:] = new`), or pass
            newly bound ones to `step`. A `Part` tells where a rank's array lies in a global one. Other numbers of
            ranks can then load it, and the tier shows the array as a whole.
        name: Name of this program if a job runs several.
        every: Save each j-th step only; 0: as often as `overhead` allows. It is the same on all ranks.
        overhead: Largest share of the program's time that versions may cost, between 0 and 1. Where a version costs
            more, fewer are saved; one line tells how few.
        seal_timeout_s: Longest wait, in seconds, for copies that make no progress.
        chunk_bytes: Size of one message in bytes.
        tier: Directory in which the agents save a version from time to time, or a `gemini_hpc.Tier`.

    Failures of the checkpointer never reach the program: protection ends, with one line on stderr.

    Raises:
        TypeError, ValueError: An argument is invalid, or differs between the ranks.
    """

    def __init__(
        self,
        comm: Any,
        arrays: Mapping[str, Any],
        *,
        name: str = "default",
        every: int = 0,
        overhead: float = 0.01,
        seal_timeout_s: float = 1.5,
        chunk_bytes: int = _CHUNK_BYTES,
        tier: str | Tier = "",
    ) -> None:
        check_count("every", every, 0)
        check_overhead(overhead)
        check_timeout("seal_timeout_s", seal_timeout_s)
        check_count("chunk_bytes", chunk_bytes, 4096)
        joining.check_name(name)
        self._comm = comm.Dup()
        self._words = MpiRanks(self._comm)
        self._rank, self._world = self._words.rank, self._words.world
        self._arrays = Arrays(arrays, self._rank, self._world)
        given = [int(raw) for raw in self._words.gather_data(str(every).encode())]
        if len(set(given)) > 1:
            raise ValueError(f"wanted the same every on all ranks, found {sorted(set(given))}")
        self._chunk_bytes = chunk_bytes
        self._interval = SaveInterval(every, overhead, self._rank, self._say, lambda: self._session.gate.seal)
        self._waited_s = self._cost_s = 0.0  # of the newest version
        self._last = 0  # the newest version
        self._resumed = self._closed = False
        self._kept: dict[int, ShardOwner[MappedShard[MappedSlot]]] = {}  # by rank, this rank first
        self._slots: dict[int, SlotRequests] = {}  # of the same ranks
        self._exchange: Exchange | None = None
        self._summaries: SummarySender | None = None
        self._begun: dict[int, int] = {}  # slots being filled, by rank
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._said: set[str] = set()
        self._lost = ""  # why this rank's part has ended, until all ranks know it
        self._session = session = RankSession(
            self._words,
            name,
            Tier.from_argument(tier),
            seal_timeout_s=seal_timeout_s,
            local_rank=parse_number(os.environ.get("SLURM_LOCALID", "")),
        )
        session.write_line, session.handing = self._say, self._lock
        self._calls = Calls(self._words, session)
        session.keepers = lambda: list(self._kept.values())
        session.on_lost.append(self._end_part)
        session.join()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            lines.write_line(text)

    def _end_part(self, reason: str) -> None:
        """Record why this rank's part has ended; all ranks learn it in the next step.

        Any thread may call this.
        """
        self._lost = self._lost or f"rank {self._rank}: {reason}"[:500]

    # ---- resuming --------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Restore the arrays to the newest sealed version; return its number, or 0 for a fresh start.

        Raises:
            ValueError: The saved arrays do not fit this program.
            RuntimeError: Other ranks are in another call, or `resume` was called before.
        """
        session = self._session
        if self._resumed or session.version:
            raise RuntimeError("call resume() only once, before the loop")
        self._resumed = True
        if not session.protected:
            return 0
        if difference := describe_difference(self._calls.meet("resume()", counts=False)):
            raise RuntimeError(f"resume() is collective: {difference}")
        if session.welcome.notice:
            session.say_once(session.welcome.notice)
        began = clock.time()
        shards = fetch_on_all(session, self._fetch, session.join_again)
        if not shards:
            session.exit_if_done()
            session.report_others()
            return 0
        welcome = session.welcome
        fetched = clock.time()
        self._load(shards, welcome.chosen_world == self._world)
        session.version = self._last = welcome.chosen_version
        session.report_resumed(began, fetched, len(shards))
        session.report_closed()
        return session.version

    def _load(self, shards: list[Saved], same: bool) -> None:
        problem = ""
        try:
            self._arrays.load(shards, same)
        except ValueError as error:
            problem = str(error)
        found = self._words.find_first_text(problem)
        if found:
            raise ValueError(f"the saved state does not fit this program: {found}")

    def _fetch(self, welcome: local.Welcome) -> list[Saved]:
        """Return the shards that this rank needs, its own first.

        Raises:
            AgentLost: The agent does not answer.
            AgentRefused: The agent has no copy.
            OSError: A copy cannot be mapped.
            ValueError: A copy is malformed.
        """
        shards = []
        if welcome.chosen_world == self._world:
            shards = [self._fetch_one(self._rank)]
            if shards[0].manifest == self._arrays.manifest:
                return shards
        have = {saved.manifest.rank for saved in shards}
        return shards + [self._fetch_one(rank) for rank in range(welcome.chosen_world) if rank not in have]

    def _fetch_one(self, rank: int) -> Saved:
        reply, fd = self._session.fetch(rank)
        try:
            memory = memoryview(mmap.mmap(fd, reply.used, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)
        saved = Saved.read(memory, reply.bytes)
        if saved.manifest.rank != rank:
            raise ValueError(f"shard {rank} holds that of rank {saved.manifest.rank}")
        return saved

    # ---- each iteration --------------------------------------------------------------------------------

    def step(self, **rebound: Any) -> None:
        """Save the completed arrays of this iteration.

        Args:
            rebound: Arrays that replace earlier ones of the same name (for example after a swap).
        """
        if self._closed:
            raise RuntimeError("step() after close()")
        for name, value in rebound.items():
            self._arrays.rebind(name, value)
        interval, j = self._interval, self._interval.j
        interval.enter_step()
        try:
            self._step()
            if self._summaries is not None:
                sends = bool(self._session.outgoing)
                self._summaries.send_summary(lambda: interval.build_state(sends=sends), now=interval.j != j)
        finally:
            interval.leave_step()

    def _step(self) -> None:
        session, interval = self._session, self._interval
        if not (session.version or self._resumed) and session.protected:
            if self._calls.report_difference(self._calls.meet("step()")):
                return
            session.end_unresumed_protection()
        session.count_step()
        session.report_first_iteration()
        session.report_first_seal()
        if not session.protected or not interval.saves(session.version):
            return
        # registering is collective, so the ranks must agree on the call first
        if not self._kept and self._calls.report_difference(self._calls.meet("step()")):
            return
        began, apart_s, wait = clock.monotonic(), 0.0, Wait(session.gate.is_stuck)
        begun: dict[int, int] = {}
        with self._catch_failures():
            if self._finish_previous(wait, interval.patience_s):
                settled = clock.monotonic()
                kept = bool(self._kept) or self._register()
                apart_s = clock.monotonic() - settled  # memory is taken once in a launch, not for each version
                begun = self._begin_slots() if kept else {}
        # Compare all ranks first: if one rank acted alone, the others would wait for it forever.
        came = clock.monotonic()
        calls = self._calls.meet("step()", ready=bool(begun), lost=self._lost, need=interval.compute_need())
        met = clock.monotonic()
        interval.record_meeting(met - came)
        interval.adopt_needs([call.need for call in calls], session.version)
        lost = next((call.lost for call in calls if call.lost), "")
        if lost and not session.verdict.reject():  # else this rank has reported it already
            session.say_once(f"this program is no longer protected: {lost}")
        if self._calls.report_difference(calls) or lost or not all(call.ready for call in calls):
            self._abort(begun)
            begun = {}
        if begun:
            with self._catch_failures():
                self._save(begun)
        spent_s = (came - began - apart_s - wait.failing_s) + (clock.monotonic() - met)
        interval.record_loss(spent_s)
        self._record_cost(spent_s, began if begun else None)

    def _record_cost(self, spent_s: float, began: float | None) -> None:
        """Add the seconds of a `step()` to the cost of the version that it has begun, or of the one before.

        Args:
            spent_s: Seconds of this `step()`, waits for the version before included while nothing was missing.
            began: Time of its beginning, where it has begun a version.
        """
        waited_s, self._waited_s = self._waited_s, 0.0
        if self._session.gate.degraded:  # something is broken, which rarer versions do not mend
            self._cost_s = 0.0
            return
        # A wait is the same at every j where nothing travels beside the program.
        own_s = spent_s - waited_s if self._interval.beside else spent_s
        self._cost_s += own_s
        if began is not None:
            self._interval.record_cost(self._cost_s)
            self._cost_s = 0.0
            if self._interval.beside:
                self._interval.latency.begin_version(VersionTimes(self._last, taken_at=began))

    @contextmanager
    def _catch_failures(self) -> Iterator[None]:
        """Keep failures of the checkpointer from the program; the ranks learn of them in the next call."""
        try:
            yield
        except Exception as error:
            self._session.end_protection(f"{type(error).__name__}: {error}")

    def _register(self) -> bool:
        """Reserve memory for this rank's shard and those kept for others, at the first step (collective)."""
        session = self._session
        sizes = [int(raw) for raw in self._words.gather_data(str(self._arrays.layout.total).encode())]
        made: dict[int, ShardOwner[MappedShard[MappedSlot]]] = {}
        problem = ""
        try:
            for rank in [self._rank, *session.incoming]:
                keeper: ShardOwner[MappedShard[MappedSlot]] = ShardOwner()
                keeper.shard = self._register_shard(rank, sizes[rank])
                made[rank] = keeper
        except (AgentLost, AgentRefused, OSError, ValueError) as error:
            problem = f"rank {self._rank}: {error}"
        found = self._words.find_first_text(problem)
        if found:
            for keeper in made.values():
                keeper.close()
            self._lost = found
            return False
        self._kept = made
        assert session.client is not None
        self._summaries = SummarySender(session.client, session.name, self._rank)
        self._used = [int(raw) for raw in self._words.gather_data(str(self._arrays.layout.small_offset).encode())]
        self._start_thread()
        return True

    def _register_shard(self, rank: int, total_bytes: int) -> MappedShard[MappedSlot]:
        session = self._session
        self._slots[rank] = SlotRequests(session, rank)
        _, fds = self._slots[rank].register(total_bytes)
        shard = MappedShard(rank, self._world, session.homes[rank], total_bytes, fds, MappedSlot)
        shard.populate()
        return shard

    def _get_shard(self, rank: int) -> MappedShard[MappedSlot]:
        shard = self._kept[rank].shard
        assert shard is not None
        return shard

    def _begin_slots(self) -> dict[int, int]:
        """Return slots for this version of all shards kept here, or none if any slot is refused."""
        if self._lost:
            return {}
        begun: dict[int, int] = {}
        for rank in self._kept:
            try:
                begun[rank] = self._slots[rank].begin(self._session.version)
            except (AgentLost, AgentRefused):
                self._abort(begun)
                return {}
        return begun

    def _abort(self, begun: Mapping[int, int]) -> None:
        for rank, index in begun.items():
            self._slots[rank].abort(self._session.version, index)

    def _save(self, begun: dict[int, int]) -> None:
        """Store the arrays and start the exchange, once all ranks have slots for this version."""
        arrays, layout = self._arrays, self._arrays.layout
        index = begun[self._rank]
        slot = self._get_shard(self._rank).slots[index]
        slot.content = Content()
        view = slot.view()
        if not slot.has_manifest:
            slot.put(layout.manifest_offset, arrays.packed)
            slot.has_manifest = True
        arrays.store(view[layout.tensor_offset : layout.tensor_offset + layout.tensor_bytes])
        stamp = Stamp(self._session.epoch, self._session.version)
        slot.put(0, pack_header(layout, 0, stamp, self._rank, self._world))
        own = view[: layout.small_offset]
        arrivals = {}
        for rank in self._session.incoming:
            kept = self._get_shard(rank).slots[begun[rank]]
            kept.content = Content()
            arrivals[rank] = kept.view()[: self._used[rank]]
        with self._wake:
            self._begun, self._last = begun, self._session.version
            # half of the time that the other ranks wait for the digest
            patience_s = self._session.seal_timeout_s / 2 if self._report_landed(self._rank, index, "") else 0.0
            reads = _make_digest_reader(slot, stamp, own, clock.monotonic() + patience_s)
            self._exchange = Exchange(
                self._comm, own, reads, self._session.outgoing, arrivals, self._chunk_bytes, self._report_arrival
            )
            self._wake.notify_all()

    def _report_arrival(self, rank: int, digest: str) -> None:
        """Report another rank's shard that is complete in its slot. The agent reads it before it counts the copy."""
        self._report_landed(rank, self._begun[rank], digest)

    def _report_landed(self, rank: int, index: int, digest: str) -> bool:
        """Return whether the agent takes this version, with this digest; "": the agent makes it."""
        used = self._used[rank]
        self._get_shard(rank).slots[index].content = Content(self._session.epoch, self._last, used, digest)
        try:
            self._slots[rank].report_landed(self._last, index, used, digest)
        except (AgentLost, AgentRefused):
            return False
        return True

    def _finish_previous(self, wait: Wait, patience_s: float | None = None) -> bool:
        """Finish the previous version's exchange, then wait for its seal for a limited time.

        Args:
            wait: The wait, which begins with this call.
            patience_s: Longest wait in seconds; None: as long as data moves, and the timeout of a seal.

        Returns:
            False if the exchange makes no progress in time.
        """
        gate = self._session.gate
        most_s = math.inf if patience_s is None else patience_s
        if self._exchange is None:
            self._time_seal()
            return True
        try:
            over = self._finish_exchange(self._exchange, most_s)
            left_s = max(0.0, most_s - wait.count_own_s())
            sealed = over and gate.wait(self._last, lambda: False, patience_s=left_s, part_of=wait)
            if not sealed and patience_s is not None and not gate.degraded:
                gate.record_miss(self._last)
            return over
        finally:
            self._waited_s = wait.count_own_s()
            self._time_seal()

    def _time_seal(self) -> None:
        """Record how long the previous version took to its seal, or takes so far."""
        gate = self._session.gate
        pointless = gate.degraded or gate.is_stuck() or gate.is_abandoned(self._last)
        self._interval.latency.poll(None if pointless else clock.monotonic())

    def _finish_exchange(self, exchange: Exchange, most_s: float) -> bool:
        """Return whether the exchange of the previous version is over within `most_s` seconds.

        The limit also holds while a node or an agent is missing: each `step()` would wait for a rank that is gone.
        """
        patience, began = Patience(), clock.monotonic()
        moved_at = began
        while not exchange.over:
            with self._lock:
                moved = exchange.advance()
            now = clock.monotonic()
            moved_at = now if moved else moved_at
            late = now - began > most_s and not exchange.over
            if late or now - moved_at > self._session.seal_timeout_s:
                return False
            patience(moved)
        with self._lock:
            self._exchange = None
        return True

    def _start_thread(self) -> None:
        """Start a thread that moves data while the program computes, if MPI permits threads."""
        from mpi4py import MPI

        if MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
            self._interval.beside = True
            threading.Thread(target=self._move_data, name="gemini-mpi", daemon=True).start()

    def _move_data(self) -> None:
        patience, moved = Patience(), False
        while not self._closed and not self._lost:
            with self._wake, self._catch_failures():
                self._wake.wait_for(lambda: self._closed or not (self._exchange is None or self._exchange.over))
                moved = self._exchange is not None and not self._closed and self._exchange.advance()
            patience(moved)

    # ---- the archive -----------------------------------------------------------------------------------

    def archive(self, path: str | os.PathLike[str], *, info: Any = None) -> None:
        """Write the current arrays into one HDF5 file that all ranks fill together (collective).

        An archive is for permanent storage, besides the copies in memory and the tier's versions. The program waits
        for it. No agent is needed. A `Part` becomes dataset `/tensors/NAME` of the global shape. A rank's own array
        becomes `/ranks/RANK/NAME`. The file gets its name once all of it is on disk, and replaces an earlier file of
        that name.

        Args:
            path: Path of the file.
            info: Hints for MPI-IO (an MPI.Info; `striping_factor` on Lustre).

        Raises:
            RuntimeError: On all ranks, if h5py is not built with MPI, or the ranks are in different calls.
            ValueError: On all ranks, if the ranks' parts of an array differ in shape or type.
            OSError: On all ranks, if writing fails; an earlier file is still in place.
        """
        if not self._calls.apart and (difference := describe_difference(self._calls.meet("archive()", counts=False))):
            raise RuntimeError(f"archive() is collective: {difference}")
        archive.write(
            self._comm, self._words, os.fspath(path), self._arrays, self._session.name, self._session.version, info
        )

    # ---- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the program with success, so its copies are no longer needed (collective)."""
        if self._closed:
            return
        if self._session.protected:
            with suppress(Exception):
                self._finish_previous(Wait(self._session.gate.is_stuck))
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if not self._calls.apart:
            self._calls.report_difference(self._calls.meet("close()"))
        self._session.finish(success=True)
        for keeper in self._kept.values():
            keeper.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


def _make_digest_reader(slot: MappedSlot, stamp: Stamp, own: memoryview, until: float) -> Callable[[], str]:
    """Return a function that returns the digest which the agent has made of a version, "" before that.

    An agent that is gone makes none. This rank makes it from the moment `until` on, so that the exchange ends.
    """

    def read() -> str:
        found = slot.read_content()
        if (found.epoch, found.version) == stamp:
            return found.digest
        return digest_bytes(own) if clock.monotonic() >= until else ""

    return read
