"""The one object that an MPI program talks to."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from gemini_hpc import clock, lines
from gemini_hpc.client import joining
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.mapped_slots import Content, Keeper, Shard, Slot
from gemini_hpc.client.session import Session
from gemini_hpc.core.digest import digest
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format.slot_header import pack_header
from gemini_hpc.mpi import archive
from gemini_hpc.mpi.arrays import Arrays, Saved
from gemini_hpc.mpi.calls import Calls, describe_difference
from gemini_hpc.mpi.collectives import MpiRanks
from gemini_hpc.mpi.exchange import Exchange, Patience
from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier

REGISTER_TIMEOUT_S = 120.0
_CHUNK_BYTES = 1 << 20
_ROUNDS = 3  # in which the ranks try to load what the agents have chosen


class Checkpointer:
    """Keeps the arrays of an MPI program in its own nodes' memory, several copies of them, after every `step()`.

    Make one on all ranks of `comm` (an mpi4py communicator), call `resume()` before the loop, `step()` at the end of
    each iteration, `close()` at the end; all of them are collective. Without an agent (no `--gemini-replicas`, not
    under Slurm) it says so once and does nothing.

    Args:
        arrays: names, and NumPy arrays or anything else whose memory can be written; write into them (`T[:] = new`),
            or tell `step` of those that were bound anew. A `Part` says where in a global array a rank's own lies:
            then other numbers of ranks can load it, and the tier shows it whole.
        name: of this program, where a job runs several.
        every: save each j-th step only.
        seal_timeout_s: longest wait, in seconds, for copies that do not get anywhere.
        chunk_bytes: of one message.
        tier: the directory where the agents save a version now and then, or a `gemini_hpc.Tier`.

    Its own failures never reach the program: protection ends, with one line on stderr.

    Raises:
        TypeError, ValueError: for arguments that cannot work, or differ between the ranks.
    """

    def __init__(
        self,
        comm: Any,
        arrays: Mapping[str, Any],
        *,
        name: str = "default",
        every: int = 1,
        seal_timeout_s: float = 1.5,
        chunk_bytes: int = _CHUNK_BYTES,
        tier: str | Tier = "",
    ) -> None:
        if every < 1 or seal_timeout_s <= 0 or chunk_bytes < 4096 or not name:
            raise ValueError("wanted every >= 1, seal_timeout_s > 0, chunk_bytes >= 4096 and a name")
        self._comm = comm.Dup()
        self._words = MpiRanks(self._comm)
        self._rank, self._world = self._words.rank, self._words.world
        self._arrays = Arrays(arrays, self._rank, self._world)
        given = [int(raw) for raw in self._words.all(str(every).encode())]
        if len(set(given)) > 1:
            raise ValueError(f"wanted the same every on all ranks, found {sorted(set(given))}")
        self._every, self._chunk_bytes = every, chunk_bytes
        self._last = 0
        self._resumed = self._closed = False
        self._kept: dict[int, Keeper[Shard[Slot]]] = {}  # by rank, its own first
        self._exchange: Exchange | None = None
        self._begun: dict[int, int] = {}  # slots being filled, by rank
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._said: set[str] = set()
        self._lost = ""  # why this rank's part has ended, until all ranks have heard of it
        self._session = session = Session(
            self._words,
            name,
            Tier.of(tier),
            seal_timeout_s=seal_timeout_s,
            what="program",
            local_rank=int(os.environ.get("SLURM_LOCALID", "0") or "0"),
            say=self._say,
            leave=self._leave,
            handing=self._lock,
        )
        self._calls = Calls(self._words, session)
        session.keepers = lambda: list(self._kept.values())
        session.on_lost.append(self._refuse)
        session.join()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            lines.tell(text)

    def _leave(self, status: int) -> NoReturn:
        lines.settle()
        self._comm.Barrier()
        os._exit(status)

    def _refuse(self, reason: str) -> None:
        """From any thread: this rank's part has ended. All hear of it in the next step."""
        self._lost = self._lost or f"rank {self._rank}: {reason}"[:500]

    # ---- resuming --------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Bring the arrays back to the newest sealed version; its number, or 0 for a fresh start. Raises ValueError
        where the saved arrays are not this program's, RuntimeError where other ranks are in another call."""
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
        for _ in range(_ROUNDS):
            welcome = session.welcome
            for line in welcome.lost:
                session.say_once(f"memory could not serve: {line}")
            if not welcome.chosen_version:
                session.leave_what_is_done()
                session.tell_others()
                return 0
            began = clock.monotonic()
            shards: list[Saved] = []
            try:
                shards = self._fetch(welcome)
            except (AgentLost, AgentRefused, OSError, ValueError) as error:
                session.say(f"version {welcome.chosen_version} cannot be loaded: rank {self._rank}: {error}")
            if session.agreed(bool(shards)):
                break
            session.join_anew()
            if not session.protected:
                session.try_again("the saved state cannot be loaded without the agents")
        else:
            session.try_again(f"version {welcome.chosen_version} is not readable everywhere")
        self._load(shards, welcome.chosen_world == self._world)
        session.version = self._last = welcome.chosen_version
        place = joining.place(welcome)
        session.say_once(f"resumed at version {session.version} from {place} ({clock.monotonic() - began:.2f} s)")
        session.tell_closed()
        return session.version

    def _load(self, shards: list[Saved], same: bool) -> None:
        problem = ""
        try:
            self._arrays.load(shards, same)
        except ValueError as error:
            problem = str(error)
        found = self._words.first(problem)
        if found:
            raise ValueError(f"the saved state does not fit this program: {found}")

    def _fetch(self, welcome: local.Welcome) -> list[Saved]:
        """The shards that this rank needs, its own first. Raises AgentLost, AgentRefused, OSError, ValueError."""
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
        """The arrays of this iteration are complete. rebound: arrays that have taken the place of those given before,
        by name (as where two are swapped)."""
        if self._closed:
            raise RuntimeError("step() after close()")
        for name, value in rebound.items():
            self._arrays.rebind(name, value)
        session = self._session
        if not (session.version or self._resumed) and session.protected:
            if self._calls.differ(self._calls.meet("step()")):
                return
            session.begun_without_resume()
        session.version += 1
        if not session.protected or session.version % self._every:
            return
        # what comes first is collective by itself
        if not self._kept and self._calls.differ(self._calls.meet("step()")):
            return
        begun: dict[int, int] = {}
        with self._guarded():
            if self._settle() and (self._kept or self._register()):
                begun = self._begin()
        # One word of all ranks: what one of them does alone would be waited for by the others, for ever.
        calls = self._calls.meet("step()", ready=bool(begun), lost=self._lost)
        lost = next((call.lost for call in calls if call.lost), "")
        if lost and not session.verdict.reject():  # else this rank has said so itself
            session.say_once(f"this program is no longer protected: {lost}")
        if self._calls.differ(calls) or lost or not all(call.ready for call in calls):
            self._abort(begun)
            return
        with self._guarded():
            self._save(begun)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Our own failure must not reach the program: the ranks hear of it at their next word."""
        try:
            yield
        except Exception as error:
            self._session.lose(f"{type(error).__name__}: {error}")

    def _register(self) -> bool:
        """Collective, at the first step: the memory of this rank's shard, and of those that it keeps for others."""
        sizes = [int(raw) for raw in self._words.all(str(self._arrays.layout.total).encode())]
        made: dict[int, Keeper[Shard[Slot]]] = {}
        problem = ""
        try:
            for rank in [self._rank, *self._session.incoming]:
                keeper: Keeper[Shard[Slot]] = Keeper()
                keeper.shard = self._ask_for(rank, sizes[rank])
                made[rank] = keeper
        except (AgentLost, AgentRefused, OSError, ValueError) as error:
            problem = f"rank {self._rank}: {error}"
        found = self._words.first(problem)
        if found:
            for keeper in made.values():
                keeper.close()
            self._lost = found
            return False
        self._kept = made
        self._used = [int(raw) for raw in self._words.all(str(self._arrays.layout.small_offset).encode())]
        self._start_thread()
        return True

    def _ask_for(self, rank: int, total_bytes: int) -> Shard[Slot]:
        session, home = self._session, self._session.homes[rank]
        assert session.client is not None
        message = local.Register(set=session.name, rank=rank, world=self._world, home=home, bytes=total_bytes)
        reply, fds = session.client.request(message, timeout_s=REGISTER_TIMEOUT_S)
        if not isinstance(reply, local.Slots) or reply.bytes != total_bytes:
            raise AgentRefused(f"the agent answered a registration of {total_bytes} bytes with {reply}")
        shard = Shard(rank, self._world, home, total_bytes, fds, Slot)
        shard.populate()
        return shard

    def _shard(self, rank: int) -> Shard[Slot]:
        shard = self._kept[rank].shard
        assert shard is not None
        return shard

    def _begin(self) -> dict[int, int]:
        """Slots for this version of all shards that are kept here; nothing where one cannot be had."""
        session = self._session
        assert session.client is not None
        if self._lost:
            return {}
        begun: dict[int, int] = {}
        for rank in self._kept:
            try:
                message = local.Begin(set=session.name, rank=rank, version=session.version)
                reply, _ = session.client.request(message)
            except (AgentLost, AgentRefused):
                reply = local.Error("")
            if not isinstance(reply, local.Begun):
                self._abort(begun)
                return {}
            begun[rank] = reply.slot
        return begun

    def _abort(self, begun: Mapping[int, int]) -> None:
        session = self._session
        assert session.client is not None
        for rank, index in begun.items():
            with suppress(AgentLost, AgentRefused):
                message = local.Abort(set=session.name, rank=rank, version=session.version, slot=index)
                session.client.request(message)

    def _save(self, begun: dict[int, int]) -> None:
        """All ranks have slots for this version."""
        arrays, layout = self._arrays, self._arrays.layout
        index = begun[self._rank]
        slot = self._shard(self._rank).slots[index]
        slot.content = Content()
        view = slot.view()
        if not slot.has_manifest:
            slot.put(layout.manifest_offset, arrays.packed)
            slot.has_manifest = True
        arrays.store(view[layout.tensor_offset : layout.tensor_offset + layout.tensor_bytes])
        stamp = Stamp(self._session.epoch, self._session.version)
        slot.put(0, pack_header(layout, 0, stamp, self._rank, self._world))
        own = view[: layout.small_offset]
        checked = digest(own) if self._session.outgoing else ""  # else the agent makes it
        arrivals = {}
        for rank in self._session.incoming:
            kept = self._shard(rank).slots[begun[rank]]
            kept.content = Content()
            arrivals[rank] = kept.view()[: self._used[rank]]
        with self._wake:
            self._begun, self._last = begun, self._session.version
            self._landed(self._rank, index, checked)
            self._exchange = Exchange(
                self._comm, own, checked, self._session.outgoing, arrivals, self._chunk_bytes, self._arrived
            )
            self._wake.notify_all()

    def _arrived(self, rank: int, told: str) -> None:
        """Another rank's shard is whole in its slot."""
        index = self._begun[rank]
        found = digest(self._shard(rank).slots[index].view()[: self._used[rank]])
        if found != told:
            self._say(f"rank {self._rank}: version {self._last}: the copy of rank {rank} arrived damaged")
            self._abort({rank: index})
            return
        self._landed(rank, index, found)

    def _landed(self, rank: int, index: int, checked: str) -> None:
        session, used = self._session, self._used[rank]
        assert session.client is not None
        slot = self._shard(rank).slots[index]
        slot.content = Content(session.epoch, self._last, used, checked)
        message = local.Landed(set=session.name, rank=rank, version=self._last, slot=index, used=used, digest=checked)
        with suppress(AgentLost, AgentRefused):
            session.client.request(message)

    def _settle(self) -> bool:
        """The version before has gone and come: then wait, for a while, for its seal. False while it has not."""
        if self._exchange is None:
            return True
        patience, moved_at = Patience(), clock.monotonic()
        while not self._exchange.over:
            with self._lock:
                moved = self._exchange.progress()
            now = clock.monotonic()
            moved_at = now if moved else moved_at
            if now - moved_at > self._session.seal_timeout_s:
                return False
            patience(moved)
        with self._lock:
            self._exchange = None
        self._session.gate.wait(self._last, lambda: False)
        return True

    def _start_thread(self) -> None:
        """Move data while the program computes, where MPI may be called by several threads."""
        from mpi4py import MPI

        if MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
            threading.Thread(target=self._move, name="gemini-mpi", daemon=True).start()

    def _move(self) -> None:
        patience, moved = Patience(), False
        while not self._closed and not self._lost:
            with self._wake, self._guarded():
                self._wake.wait_for(lambda: self._closed or not (self._exchange is None or self._exchange.over))
                moved = self._exchange is not None and not self._closed and self._exchange.progress()
            patience(moved)

    # ---- the archive -----------------------------------------------------------------------------------

    def archive(self, path: str | os.PathLike[str], *, info: Any = None) -> None:
        """Write the arrays as they are now into one HDF5 file, which all ranks fill together: what one keeps, beside
        the copies in memory and the tier's versions. Collective; the program waits for it.

        A `Part` is dataset `/tensors/NAME`, of the global shape; what is a rank's own is `/ranks/RANK/NAME`. Also
        without an agent. The file has its name when all of it is on disk, and takes the place of one that was there.
        info: hints of MPI-IO (an MPI.Info; `striping_factor` on Lustre).

        Raises, alike on all ranks: RuntimeError where h5py is not built with MPI; ValueError where the ranks' parts
        of an array are not of one shape and type; OSError, with what was there before still in place.
        """
        if not self._calls.apart and (difference := describe_difference(self._calls.meet("archive()", counts=False))):
            raise RuntimeError(f"archive() is collective: {difference}")
        archive.write(
            self._comm, self._words, os.fspath(path), self._arrays, self._session.name, self._session.version, info
        )

    # ---- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """The program has succeeded: its copies are no longer needed. Collective."""
        if self._closed:
            return
        if self._session.protected:
            with suppress(Exception):
                self._settle()
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if not self._calls.apart:
            self._calls.differ(self._calls.meet("close()"))
        self._session.finish(success=True)
        for keeper in self._kept.values():
            keeper.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
