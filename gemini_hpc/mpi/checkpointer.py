"""The one object that an MPI program talks to."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from gemini_hpc import clock
from gemini_hpc.client import joining
from gemini_hpc.client.agent_connection import AgentClient, AgentLost, AgentRefused, NotYet
from gemini_hpc.client.agent_connection import Exchange as Ask
from gemini_hpc.client.hand_back import hand_back, same_or_new
from gemini_hpc.client.joining import Notice
from gemini_hpc.client.mapped_slots import Content, Shard, Slot
from gemini_hpc.client.seal_wait import SealGate
from gemini_hpc.core import placement
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format.slot_header import pack_header
from gemini_hpc.mpi import archive
from gemini_hpc.mpi.arrays import Arrays, Saved
from gemini_hpc.mpi.collectives import Words
from gemini_hpc.mpi.exchange import Exchange, Patience, digest
from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier

REGISTER_TIMEOUT_S, FETCH_TIMEOUT_S = 120.0, 600.0
_CHUNK_BYTES = 1 << 20
_ROUNDS = 3  # in which the ranks try to load what the agents have chosen


class Checkpointer:
    """Keeps the arrays of an MPI program in its own nodes' memory, several copies of them, after every `step()`.

    Make one on all ranks of `comm` (an mpi4py communicator), call `resume()` before the loop, `step()` at the end of
    each iteration, `close()` at the end; all of them are collective. Without an agent (no `--gemini-replicas`, not
    under Slurm) it says so once and does nothing.

    arrays: names, and NumPy arrays or anything else whose memory can be written; write into them (`T[:] = new`), or
    tell `step` of those that were bound anew. A `Part` says where in a global array a rank's own lies: then other
    numbers of ranks can load it, and the tier shows it whole. name: set when a job runs several programs. every: only
    each so manieth step is saved. seal_timeout_s: longest wait for copies that do not get anywhere. tier,
    tier_interval_s: as --gemini-tier and --gemini-tier-interval, which go before them.

    Raises TypeError or ValueError for arguments that cannot work. Its own failures never reach the program:
    protection ends, with one line on stderr.
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
        tier: str = "",
        tier_interval_s: float = 0,
    ) -> None:
        if every < 1 or seal_timeout_s <= 0 or chunk_bytes < 4096 or not name:
            raise ValueError("every >= 1, seal_timeout_s > 0, chunk_bytes >= 4096 and a name are wanted")
        self._tier = Tier.of(tier, tier_interval_s)
        self._comm = comm.Dup()
        self._rank, self._world = self._comm.Get_rank(), self._comm.Get_size()
        self._words = Words(self._comm)
        self._arrays = Arrays(arrays, self._rank, self._world)
        self._name, self._every, self._seal_timeout_s, self._chunk_bytes = name, every, seal_timeout_s, chunk_bytes
        self._version = self._last = 0
        self._protected = self._resumed = self._closed = False
        self._client: AgentClient | None = None
        self._shards: dict[int, Shard[Slot]] = {}
        self._filled: set[tuple[int, int]] = set()
        self._exchange: Exchange | None = None
        self._begun: dict[int, int] = {}  # slots being filled, by rank
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._said: set[str] = set()
        self._lost = ""  # why this rank's part has ended, until all ranks have heard of it
        self._join()

    # ---- joining ---------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            print(f"gemini-hpc: {text}", file=sys.stderr, flush=True)

    def _greet(self) -> Notice:
        path = os.environ.get(joining.SOCKET_ENV, "")
        if not path:
            return Notice(problem=joining.no_agent())
        local_rank = int(os.environ.get("SLURM_LOCALID", "0") or "0")
        hello = joining.hello(self._name, self._rank, self._world, local_rank, self._tier)
        try:
            self._client = AgentClient(path, self._rejoin, self._agent_gone, self._say)
            self._welcome = self._client.hello(hello, self._waiting)
        except (AgentLost, AgentRefused) as error:
            self._client = None
            return Notice(problem=str(error), later=isinstance(error, NotYet))
        return Notice.of(self._welcome)

    def _waiting(self, waited_s: float, why: str) -> None:
        said = joining.waiting(waited_s, why)
        if said and self._rank == 0:
            self._say(said)

    def _join(self) -> None:
        notice = self._greet()
        notices = [
            msgspec.msgpack.decode(raw, type=Notice) for raw in self._words.all(msgspec.msgpack.encode(notice))
        ]
        problem = joining.problem(notices, notice)
        if problem:
            kept = max(n.chosen for n in notices)
            if any(n.later for n in notices):
                self._try_again(problem)
            if kept[1]:
                self._try_again(f"version {kept[1]} is in memory, but cannot be used: {problem}")
            if self._rank == 0:
                self._say(f"this program is not protected: {problem}")
            return
        assert self._client is not None
        self._epoch, self._homes = notice.epoch, [n.node_rank for n in notices]
        client = self._client
        self._gate = SealGate(
            lambda: client.page,
            lambda: client.lost,
            self._epoch,
            self._seal_timeout_s,
            lambda reason: self._say(f"rank {self._rank}: protection is degraded: {reason}; the program goes on"),
            lambda version: self._say(f"rank {self._rank}: protected again, version {version} is sealed"),
        )
        targets = placement.targets(self._homes, notice.nodes, notice.replicas)
        self._targets = targets[self._rank]
        self._sources = [r for r, t in enumerate(targets) if self._rank in t and r != self._rank]
        self._protected = True

    def _try_again(self, why: str) -> None:
        """There is a version, and this launch cannot have it: beginning anew would replace it by something worse."""
        if self._rank == 0:
            self._say(f"{why}; ending with {joining.TRY_AGAIN_EXIT} so that a new launch can load it")
        if self._client is not None:
            self._client.close()
        sys.stderr.flush()
        self._comm.Barrier()
        os._exit(joining.TRY_AGAIN_EXIT)

    # ---- resuming --------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Bring the arrays back to the newest sealed version; its number, or 0 for a fresh start. Raises ValueError
        where the saved arrays are not this program's."""
        if self._resumed or self._version:
            raise RuntimeError("resume() restores once, before the loop")
        self._resumed = True
        if not self._protected:
            return 0
        if self._rank == 0 and self._welcome.notice:
            self._say(self._welcome.notice)
        for _ in range(_ROUNDS):
            welcome = self._welcome
            if self._rank == 0:
                for line in welcome.lost:
                    self._say(f"memory could not serve: {line}")
            if not welcome.chosen_version:
                return 0
            began = clock.monotonic()
            shards: list[Saved] = []
            try:
                shards = self._fetch(welcome)
            except (AgentLost, AgentRefused, OSError, ValueError) as error:
                self._say(f"version {welcome.chosen_version} cannot be loaded: rank {self._rank}: {error}")
            if self._words.agreed(bool(shards)):
                break
            self._again()
        else:
            self._try_again(f"version {welcome.chosen_version} is not readable everywhere")
        self._load(shards, welcome.chosen_world == self._world)
        self._version = self._last = welcome.chosen_version
        if self._rank == 0:
            place = "the tier" if welcome.stored else "memory"
            took_s = clock.monotonic() - began
            self._say(f"resumed at version {self._version} from {place} ({took_s:.2f} s)")
        return self._version

    def _load(self, shards: list[Saved], same: bool) -> None:
        problem = ""
        try:
            self._arrays.load(shards, same)
        except ValueError as error:
            problem = str(error)
        found = self._words.first(problem)
        if found:
            raise ValueError(f"the saved state does not fit this program: {found}")

    def _again(self) -> None:
        """All ranks greet the agents anew: they verify what they hold, and choose again."""
        if self._client is not None:
            self._client.close()
        self._comm.Barrier()
        self._protected = False
        self._join()
        if not self._protected:
            self._try_again("what is saved cannot be loaded without the agents")

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
        assert self._client is not None
        reply, fds = self._client.request(local.Fetch(set=self._name, rank=rank), timeout_s=FETCH_TIMEOUT_S)
        try:
            if not isinstance(reply, local.Copy) or len(fds) != 1:
                raise AgentRefused(f"the agent answered Fetch of shard {rank} with {reply}")
            memory = memoryview(mmap.mmap(fds[0], reply.used, access=mmap.ACCESS_READ))
        finally:
            for fd in fds:
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
        self._version += 1
        if not self._protected or self._version % self._every:
            return
        begun: dict[int, int] = {}
        with self._guarded():
            if self._settle() and (self._shards or self._register()):
                begun = self._begin()
        # One word of all ranks: what one of them does alone would be waited for by the others, for ever.
        words = self._words.all(self._lost.encode() if self._lost else b"\x01" if begun else b"")
        lost = next((word.decode() for word in words if word not in (b"", b"\x01")), "")
        if lost:
            self._protected = False
            if self._rank == 0:
                self._say(f"this program is no longer protected: {lost}")
        if lost or b"" in words:
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
            self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, reason: str) -> None:
        """From any thread."""
        self._lost = self._lost or f"rank {self._rank}: {reason}"[:500]
        if self._client is not None and not self._client.lost:
            self._client.event("unprotected", self._version, reason)

    def _register(self) -> bool:
        """Collective, at the first step: the memory of this rank's shard, and of those that it keeps for others."""
        assert self._client is not None
        sizes = [int(raw) for raw in self._words.all(str(self._arrays.layout.total).encode())]
        made: dict[int, Shard[Slot]] = {}
        problem = ""
        try:
            for rank in [self._rank, *self._sources]:
                made[rank] = self._ask_for(rank, sizes[rank])
        except (AgentLost, AgentRefused, OSError, ValueError) as error:
            problem = f"rank {self._rank}: {error}"
        found = self._words.first(problem)
        if found:
            for shard in made.values():
                shard.close()
            self._lost = found
            return False
        self._shards = made
        self._used = [int(raw) for raw in self._words.all(str(self._arrays.layout.small_offset).encode())]
        self._start_thread()
        return True

    def _ask_for(self, rank: int, total_bytes: int) -> Shard[Slot]:
        assert self._client is not None
        message = local.Register(
            set=self._name, rank=rank, world=self._world, home=self._homes[rank], bytes=total_bytes
        )
        reply, fds = self._client.request(message, timeout_s=REGISTER_TIMEOUT_S)
        if not isinstance(reply, local.Slots) or reply.bytes != total_bytes:
            raise AgentRefused(f"the agent answered a registration of {total_bytes} bytes with {reply}")
        shard = Shard(rank, self._world, self._homes[rank], total_bytes, fds, Slot)
        shard.populate()
        return shard

    def _begin(self) -> dict[int, int]:
        """Slots for this version of all shards that are kept here; nothing where one cannot be had."""
        assert self._client is not None
        if self._lost:
            return {}
        begun: dict[int, int] = {}
        for rank in self._shards:
            try:
                message = local.Begin(set=self._name, rank=rank, version=self._version)
                reply, _ = self._client.request(message)
            except (AgentLost, AgentRefused):
                reply = local.Error("")
            if not isinstance(reply, local.Begun):
                self._abort(begun)
                return {}
            begun[rank] = reply.slot
        return begun

    def _abort(self, begun: Mapping[int, int]) -> None:
        assert self._client is not None
        for rank, index in begun.items():
            with suppress(AgentLost, AgentRefused):
                message = local.Abort(set=self._name, rank=rank, version=self._version, slot=index)
                self._client.request(message)

    def _save(self, begun: dict[int, int]) -> None:
        """All ranks have slots for this version."""
        arrays, layout = self._arrays, self._arrays.layout
        index = begun[self._rank]
        slot = self._shards[self._rank].slots[index]
        slot.content = Content()
        view = slot.view()
        if not slot.has_manifest:
            slot.put(layout.manifest_offset, arrays.packed)
            slot.has_manifest = True
        arrays.store(view[layout.tensor_offset : layout.tensor_offset + layout.tensor_bytes])
        stamp = Stamp(self._epoch, self._version)
        slot.put(0, pack_header(layout, 0, stamp, self._rank, self._world))
        own = view[: layout.small_offset]
        checked = digest(own)
        arrivals = {}
        for rank in self._sources:
            kept = self._shards[rank].slots[begun[rank]]
            kept.content = Content()
            arrivals[rank] = kept.view()[: self._used[rank]]
        with self._wake:
            self._begun, self._last = begun, self._version
            self._landed(self._rank, index, checked)
            self._exchange = Exchange(
                self._comm, own, checked, self._targets, arrivals, self._chunk_bytes, self._arrived
            )
            self._wake.notify_all()

    def _arrived(self, rank: int, told: str) -> None:
        """Another rank's shard is whole in its slot."""
        index = self._begun[rank]
        found = digest(self._shards[rank].slots[index].view()[: self._used[rank]])
        if found != told:
            self._say(f"rank {self._rank}: version {self._last}: the copy of rank {rank} came damaged")
            self._abort({rank: index})
            return
        self._landed(rank, index, found)

    def _landed(self, rank: int, index: int, checked: str) -> None:
        assert self._client is not None
        used = self._used[rank]
        slot = self._shards[rank].slots[index]
        slot.content = Content(self._epoch, self._last, used, checked)
        message = local.Landed(set=self._name, rank=rank, version=self._last, slot=index, used=used, digest=checked)
        with suppress(AgentLost, AgentRefused):
            self._client.request(message)

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
            if now - moved_at > self._seal_timeout_s:
                return False
            patience(moved)
        with self._lock:
            self._exchange = None
        self._gate.wait(self._last, lambda: False)
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

    # ---- the agent's death -----------------------------------------------------------------------------

    def _agent_gone(self) -> None:
        if self._protected:
            self._gate.degrade("the agent is gone")

    def _rejoin(self, welcome: local.Welcome, exchange: Ask) -> bool:
        """From the client's thread, after a new agent has welcomed us: hand the memory back."""
        if (welcome.epoch, welcome.restart) != (self._epoch, self._welcome.restart):
            self._lose("the agent came back for another run of the job")
            return False
        chosen = (self._welcome.chosen_epoch, self._welcome.chosen_version)
        with self._lock:
            for rank, shard in self._shards.items():
                if not hand_back(shard, self._name, exchange, self._epoch, chosen):
                    self._shards[rank] = same_or_new(shard, self._name, exchange, self._remap(shard))
        return True

    @staticmethod
    def _remap(shard: Shard[Slot]) -> Any:
        return lambda fds: Shard(shard.rank, shard.world, shard.home, shard.total_bytes, fds, Slot)

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
        archive.write(self._comm, self._words, os.fspath(path), self._arrays, self._name, self._version, info)

    # ---- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """The program has succeeded: its copies are no longer needed. Collective."""
        if self._closed:
            return
        if self._protected:
            with suppress(Exception):
                self._settle()
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._comm.Barrier()
        if self._client is not None:
            with suppress(AgentLost, AgentRefused):
                self._client.request(local.Finished(set=self._name, rank=self._rank))
            self._client.close()
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
