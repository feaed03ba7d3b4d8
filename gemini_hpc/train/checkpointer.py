"""The one object that a training script talks to."""

from __future__ import annotations

import atexit
import gc
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gemini_hpc.core import placement
from gemini_hpc.core.manifest import Layout
from gemini_hpc.train import collective, directory, hold, ownership, restore, rng
from gemini_hpc.train.capture import Capture, Job
from gemini_hpc.train.client import AgentClient, AgentLost, AgentRefused, Exchange, ask_once
from gemini_hpc.train.encode import UnknownTypeError
from gemini_hpc.train.loader import StatefulLoader
from gemini_hpc.train.ownership import Entry
from gemini_hpc.train.receiver import Receiver
from gemini_hpc.train.replicator import Identity, Replicator, register, small_capacity
from gemini_hpc.train.seal import SealGate
from gemini_hpc.train.shared import Content, Shard, map_copy
from gemini_hpc.train.transport.base import Transport
from gemini_hpc.train.tree import Leaf, Stateful, StateTree, UnsupportedStateError
from gemini_hpc.wire import local

IMPORTED_AT = time.time()

SOCKET_ENV = "GEMINI_SOCKET"  # set by the SPANK plugin where the job has an agent
TIER_ENV = "SLURM_GEMINI_TIER"  # the user's --gemini-tier
STEP_ENV = "GEMINI_STEP"  # names this launch of the training where Slurm's step id does not
FETCH_TIMEOUT_S = 600.0  # a pull of a large shard from a peer over a slow network
CLOSE_TIMEOUT_S = 10.0
RESUME_ATTEMPTS = 3
_ARMING, _ARMED, _REFUSED = 0, 1, -1


class _Notice(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others at construction."""

    node_rank: int = -1
    replicas: int = 0
    nodes: int = 0
    epoch: int = 0
    chosen: tuple[int, int, int] = (0, 0, 0)
    problem: str = ""


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others in the first `step()`: its tensors, then the size of its slot."""

    ready: bool = True
    problem: str = ""
    entries: list[Entry] = []
    total_bytes: int = 0


@dataclass
class _Times:
    """Seconds that the training has spent in here."""

    steps: int = 0
    step_s: float = 0.0
    hook_s: float = 0.0
    worst_step_s: float = 0.0
    worst_hook_s: float = 0.0


def _as_list(value: Any, what: str) -> list[Any]:
    if isinstance(value, Sequence):
        if not value:
            raise ValueError(f"{what} is an empty list")
        return list(value)
    return [value]


class Checkpointer:
    """Keeps the state of a training in its own nodes' memory after every optimizer step.

    Make one on every rank after the model is wrapped (DDP, FSDP2) and the optimizer exists, call `resume()` before
    the loop, `step()` as the last statement of the loop body, `close()` at the end. Making one is collective; so is
    the first `step()`. Without an agent (no `--gemini-replicas`, not under Slurm) it says so once and does nothing.

    model: pass the wrapped model. optimizer: one or a list. scheduler (one or a list), scaler, loader, and the values
    of `extra`: anything with state_dict and load_state_dict; a module in `extra` (an EMA, say) is captured as the
    model is. name: set when a job runs several trainings. max_repeated: completed steps that one failure may cost:
    1 waits for the seal before the next optimizer step, 2 only before the next save. audit=N: every Nth version,
    compare digests to find tensors that change behind our back. ownership: "split" deals replicated state out
    between ranks, "full" keeps a whole copy on each. hold_s: how long a rank with a communication error waits for
    the agents' verdict.

    Raises TypeError or ValueError for arguments and state that cannot work. Its own failures never reach the
    training: protection ends, with one line on stderr.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        *,
        name: str = "default",
        extra: Mapping[str, Any] | None = None,
        max_repeated: int = 1,
        seal_timeout_s: float = 5.0,
        audit: int = 0,
        chunk_bytes: int = 8 << 20,
        ownership: ownership.Ownership = "split",
        hold_s: float = 15.0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, a torch.nn.Module is wanted")
        optimizers = _as_list(optimizer, "optimizer")
        for item in optimizers:
            if not isinstance(item, torch.optim.Optimizer):
                raise TypeError(f"optimizer is a {type(item).__name__}, a torch.optim.Optimizer is wanted")
        if max_repeated not in (1, 2):
            raise ValueError(f"max_repeated is {max_repeated}: 1 or 2 is wanted")
        if ownership not in ("split", "full"):
            raise ValueError(f"ownership is {ownership!r}: 'split' or 'full' is wanted")
        if audit < 0 or chunk_bytes < 4096 or seal_timeout_s <= 0 or hold_s < 0 or not name:
            raise ValueError("audit >= 0, chunk_bytes >= 4096, seal_timeout_s > 0, hold_s >= 0 and a name are wanted")
        stateful: dict[str, Stateful] = {}
        modules: dict[str, nn.Module] = {}
        given: list[tuple[str, Any]] = [("scaler", scaler), ("loader", loader)]
        if scheduler is not None:
            given += [(f"scheduler.{i}", s) for i, s in enumerate(_as_list(scheduler, "scheduler"))]
        for key, value in (extra or {}).items():
            if isinstance(value, nn.Module):
                modules[key] = value
            else:
                given.append((f"extra.{key}", value))
        for key, value in given:
            if value is None:
                continue
            if not isinstance(value, Stateful):
                raise TypeError(f"{key} is a {type(value).__name__}, which has no state_dict and load_state_dict")
            stateful[key] = value
        self._given = [model, *optimizers, *stateful.values(), *modules.values()]
        self._scaler, self._loader = scaler, loader
        self._name, self._max_repeated, self._seal_timeout_s = name, max_repeated, seal_timeout_s
        self._audit, self._chunk_bytes, self._ownership, self._hold_s = audit, chunk_bytes, ownership, hold_s

        self._epoch = 0
        self._version = 0
        self._resumed_at = 0
        self._first_done = True
        self._resume_called = False
        self._closed = False
        self._stepped = False
        self._last_scale: float | None = None
        self._warned_unstepped = False
        self._unsaved: dict[str, int] = {}
        self._protected = False
        self._state = "unprotected"
        self._times = _Times()
        self._findings: list[str] = []
        self._job: Job | None = None
        self._gate_open = True
        self._resumed_from: tuple[int, int] | None = None
        self._capture: Capture | None = None
        self._replicator: Replicator | None = None
        self._receivers: list[Receiver] = []
        self._transport: Transport | None = None
        self._client: AgentClient | None = None
        self._armed = _ARMING
        self._all_armed = False
        self._kept_capacity = 0
        self._own_copy = Content()
        self._foreign: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()

        distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if distributed else 0
        self._world = dist.get_world_size() if distributed else 1
        self._path = os.environ.get(SOCKET_ENV, "")
        self._tree = StateTree(model, optimizers, stateful, modules)
        if self._path:
            self._tree.encode_small({}, [], self._world)  # what cannot be captured is an error now, not at step 1
        self._join()
        me = weakref.ref(self)
        self._hook = register_optimizer_step_pre_hook(lambda opt, args, kwargs: _pre_hook(me, opt))
        self._previous_excepthook = sys.excepthook
        if self._client is not None:
            sys.excepthook = self._excepthook
            atexit.register(_at_exit, me)

    # ---- joining ---------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        print(f"gemini-hpc: {text}", file=sys.stderr, flush=True)

    def _join(self) -> None:
        """Find the agent, agree with the other ranks, make the transport. Collective."""
        notice = self._greet()
        notices = [notice]
        if self._world > 1:
            raw = collective.gather_bytes(msgspec.msgpack.encode(notice))
            notices = [msgspec.msgpack.decode(part, type=_Notice) for part in raw]
        problem = next((n.problem for n in notices if n.problem), "")
        if not problem and any((n.replicas, n.epoch, n.chosen) != self._facts(notice) for n in notices):
            problem = "the ranks' agents do not agree about the job"
        homes = [n.node_rank for n in notices]
        nodes = sorted(set(homes))
        m = notice.replicas
        if not problem and m > len(nodes):
            problem = f"{m} replicas asked for, the training runs on {len(nodes)} node{'s' * (len(nodes) > 1)}"
        if problem:
            if self._rank == 0:
                kept = max(n.chosen[1] for n in notices)
                more = f"; version {kept} is in memory, but cannot be used: starting from step 0" if kept else ""
                self._say(f"this training is not protected: {problem}{more}")
            if self._client is not None and self._client.page is not None:
                self._client.event("unprotected", 0, problem)
            return
        assert self._client is not None
        if self._rank == 0 and os.environ.get(TIER_ENV):
            self._say(
                f"--gemini-tier={os.environ[TIER_ENV]}: this version has no persistent tier, nothing is saved there"
            )
        self._epoch, self._node_rank = notice.epoch, notice.node_rank
        self._homes = homes
        self._me = Identity(self._name, self._rank, self._world, notice.node_rank, notice.epoch)
        self._gate = SealGate(
            lambda: self._client.page if self._client else None,
            lambda: self._client is None or self._client.lost,
            self._epoch,
            self._seal_timeout_s,
            self._on_degraded,
            self._on_restored,
        )
        self._outgoing, self._incoming = self._neighbours(homes, nodes, m)
        if self._world > 1 and m > 1 and self._transport is None:
            from gemini_hpc.train.transport.gloo import GlooTransport

            self._transport = GlooTransport()
        self._protected = True
        self._state = "arming"

    @staticmethod
    def _facts(notice: _Notice) -> tuple[int, int, tuple[int, int, int]]:
        return notice.replicas, notice.epoch, notice.chosen

    def _greet(self) -> _Notice:
        if not self._path:
            return _Notice(problem=f"no agent here ({SOCKET_ENV} is not set)")
        if self._world == 1 and int(os.environ.get("WORLD_SIZE", "1") or "1") > 1:
            return _Notice(problem="WORLD_SIZE says several ranks: call torch.distributed.init_process_group first")
        step = os.environ.get(STEP_ENV) or "{}.{}".format(
            os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_STEP_ID", "0")
        )
        hello = local.Hello(
            proto=local.PROTOCOL,
            set=self._name,
            rank=self._rank,
            world=self._world,
            local_rank=int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) or "0"),
            step=step,
            pid=os.getpid(),
        )
        self._waiting_said = False
        try:
            self._client = AgentClient(self._path, self._rejoin, self._agent_gone)
            welcome = self._client.hello(hello, self._waiting)
        except (AgentLost, AgentRefused) as error:
            self._client = None
            return _Notice(problem=str(error))
        self._welcome = welcome
        self._client.event("imports_done", 0, t=IMPORTED_AT)
        return _Notice(
            node_rank=welcome.node_rank,
            replicas=welcome.replicas,
            nodes=welcome.nodes,
            epoch=welcome.epoch,
            chosen=(welcome.chosen_epoch, welcome.chosen_version, welcome.chosen_world),
        )

    def _waiting(self, waited_s: float) -> None:
        if waited_s > 5 and not self._waiting_said and self._rank == 0:
            self._waiting_said = True
            self._say("waiting for the agents of all nodes to agree on what to resume from")

    def _neighbours(self, homes: list[int], nodes: list[int], m: int) -> tuple[list[int], list[int]]:
        """Ranks that this rank sends its shard to, and ranks whose shards it receives."""
        on_node: dict[int, list[int]] = {node: [] for node in nodes}
        for rank, home in enumerate(homes):
            on_node[home].append(rank)

        def targets(rank: int) -> list[int]:
            home = homes[rank]
            index = on_node[home].index(rank)
            others = placement.holders(nodes.index(home), len(nodes), m)[1:]
            return [on_node[nodes[h]][index % len(on_node[nodes[h]])] for h in others]

        return targets(self._rank), [r for r in range(self._world) if self._rank in targets(r) and r != self._rank]

    # ---- the agent's death -----------------------------------------------------------------------------

    def _agent_gone(self) -> None:
        if self._protected:
            self._gate.degrade("the agent is gone")

    def _rejoin(self, welcome: local.Welcome, exchange: Exchange) -> bool:
        """From the client's thread, after a new agent has welcomed us: hand the memory back."""
        if (welcome.epoch, welcome.restart) != (self._epoch, self._welcome.restart):
            self._lose(
                f"the agent came back for epoch {welcome.epoch}, restart {welcome.restart}; this training is of "
                f"epoch {self._epoch}, restart {self._welcome.restart}"
            )
            return False
        for keeper in [self._replicator, *self._receivers]:
            if keeper is not None and keeper.shard is not None and not self._hand_back(keeper.shard, exchange):
                # the agent has memory of its own for this shard (it had not died, only the connection had)
                keeper.shard = self._same_or_new(keeper.shard, exchange)
        exchange(local.Event(name="rejoined", version=self._version, t=time.time(), detail=f"rank {self._rank}"))
        return True

    def _hand_back(self, shard: Shard, exchange: Exchange) -> bool:
        """True if the agent took both slots."""
        for index, slot in enumerate(shard.slots):
            content = slot.content
            reply, _ = exchange(
                local.HandBack(
                    set=self._name,
                    rank=shard.rank,
                    world=shard.world,
                    home=shard.home,
                    bytes=shard.total_bytes,
                    slot=index,
                    epoch=content.epoch,
                    version=content.version,
                    used=content.used,
                    digest=content.digest,
                ),
                [slot.fd],
            )
            if isinstance(reply, local.Error):
                return False
        return True

    def _same_or_new(self, shard: Shard, exchange: Exchange) -> Shard:
        """The shard as the agent has it. Raises AgentRefused."""
        reply, fds = exchange(
            local.Register(
                set=self._name, rank=shard.rank, world=shard.world, home=shard.home, bytes=shard.total_bytes
            )
        )
        if not isinstance(reply, local.Slots) or reply.bytes != shard.total_bytes:
            raise AgentRefused(f"the agent has no memory for the shard of rank {shard.rank}: {reply}")
        now = Shard(shard.rank, shard.world, shard.home, shard.total_bytes, fds)
        if [os.fstat(s.fd).st_ino for s in now.slots] == [os.fstat(s.fd).st_ino for s in shard.slots]:
            now.close()
            return shard
        now.populate()
        shard.close()
        return now

    def _on_degraded(self, reason: str) -> None:
        self._state = "degraded"
        self._say(f"rank {self._rank}: protection is degraded: {reason}; training goes on")
        if self._client is not None and not self._client.lost:
            self._client.event("degraded", self._version, reason)

    def _on_restored(self, version: int) -> None:
        self._state = "protected"
        self._say(f"rank {self._rank}: protected again, version {version} is sealed")

    def _lose(self, reason: str) -> None:
        """Protection ends for good; training goes on. From any thread."""
        if not self._protected:
            return
        self._protected = False
        self._state = "unprotected"
        self._findings.append(reason)
        self._say(f"rank {self._rank}: this training is no longer protected: {reason}")
        if self._client is not None and not self._client.lost:
            self._client.event("unprotected", self._version, reason)
        if self._job is not None:
            self._job.left.set()

    def _note(self, name: str, version: int, reason: str) -> None:
        """From the background threads: something happened to a version."""
        key = f"{name}: {reason}"
        if key not in self._findings:
            if len(self._findings) < 100:
                self._findings.append(key)
            if name in ("degraded", "void") or not self._unsaved.get(name):
                self._say(f"rank {self._rank}: version {version} {name}: {reason}")
        self._unsaved[name] = self._unsaved.get(name, 0) + 1
        if self._client is not None:
            self._client.event(name, version, f"rank {self._rank}: {reason}")

    # ---- resuming --------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Bring the training back to the newest sealed version; returns its number, or 0 for a fresh start.

        Collective. Call it once, before the loop, when everything that was passed in is ready. Raises ValueError if
        the saved state is not this training's (other parameters, optimizers, buffers).
        """
        if self._resume_called:
            raise RuntimeError("resume() was called before: it restores once, before the loop")
        self._resume_called = True
        if not self._protected:
            return 0
        began = time.time()
        shards = self._choose_and_fetch()
        if not shards:
            return 0
        welcome = self._welcome
        fetched = time.time()
        own = next((s for s in shards if s.manifest.rank == self._rank), shards[self._rank % len(shards)])
        small = restore.load(self._tree, own, shards, self._rank, welcome.chosen_world == self._world)
        self._version = self._resumed_at = welcome.chosen_version
        self._resumed_from, self._gate_open = (welcome.chosen_epoch, welcome.chosen_version), False
        self._first_done = False
        if own.manifest.rank == self._rank:
            self._kept_capacity = own.header.layout.small_capacity
            states = small["rng"]
            rng.restore(states)
            if isinstance(self._loader, StatefulLoader):
                self._loader.before_next_batch(lambda: rng.restore(states))
        done = time.time()
        if self._rank == 0:
            self._say(f"resumed at version {self._version} from memory ({done - began:.2f} s)")
        assert self._client is not None
        detail = {"rank": self._rank, "began": began, "fetched": fetched, "loaded": done, "shards": len(shards)}
        self._client.event("resumed", self._version, json.dumps(detail), t=done)
        return self._version

    def _choose_and_fetch(self) -> list[restore.Saved]:
        """The shards of the version to resume from; none for a fresh start. Collective.

        Where a rank cannot get what it needs (a copy turned out damaged, its holder died), all ranks say hello
        again: the agents verify what they hold and choose anew.
        """
        for _ in range(RESUME_ATTEMPTS):
            welcome = self._welcome
            if self._rank == 0:
                for line in welcome.lost:
                    self._say(f"memory could not serve: {line}")
            if not welcome.chosen_version:
                return []
            shards: list[restore.Saved] = []
            try:
                shards = self._fetch_shards(welcome)
            except (AgentLost, AgentRefused, ValueError, OSError) as error:
                self._say(f"version {welcome.chosen_version} cannot be loaded: rank {self._rank}: {error}")
            if all(self._gather(len(shards) > 0)):
                return shards
            if self._client is not None:
                self._client.close()
            self._gather(True)  # nobody says hello before everyone has hung up
            self._protected = False
            self._join()
            if not self._protected:
                return []
        if self._rank == 0:
            self._say(f"starting from step 0: version {self._welcome.chosen_version} was not readable everywhere")
        return []

    def _gather(self, value: bool) -> list[int]:
        """A word of every rank."""
        return collective.gather_word(int(value)) if self._world > 1 else [int(value)]

    def _fetch(self, rank: int) -> restore.Saved:
        assert self._client is not None
        reply, fds = self._client.request(local.Fetch(set=self._name, rank=rank), timeout_s=FETCH_TIMEOUT_S)
        if not isinstance(reply, local.Copy) or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise AgentRefused(f"the agent answered Fetch of shard {rank} with {reply}")
        if rank == self._rank:
            self._own_copy = Content(reply.epoch, reply.version, reply.used, reply.digest)
        saved = restore.Saved.read(map_copy(fds[0], reply.used), reply.bytes)
        if (saved.header.stamp.version, saved.header.rank) != (reply.version, rank):
            raise ValueError(f"shard {rank} holds version {saved.header.stamp} of rank {saved.header.rank}")
        return saved

    def _fetch_shards(self, welcome: local.Welcome) -> list[restore.Saved]:
        shards = []
        if welcome.chosen_world == self._world:
            shards.append(self._fetch(self._rank))
            if restore.enough_alone(shards[0], self._tree):
                return shards
        have = {s.header.rank for s in shards}
        shards += [self._fetch(rank) for rank in range(welcome.chosen_world) if rank not in have]
        return sorted(shards, key=lambda s: s.header.rank)

    # ---- each iteration --------------------------------------------------------------------------------

    def step(self) -> None:
        """The state of this iteration is complete. Call it last in the loop body, once per optimizer step.

        Raises only at its first call, for state that cannot be captured.
        """
        if self._closed:
            raise RuntimeError("step() after close()")
        began = time.perf_counter()
        self._version += 1
        first = self._capture is None
        if self._protected:
            try:
                self._capture_version()
            except (UnknownTypeError, UnsupportedStateError) as error:
                if first:
                    raise
                self._lose(str(error))
            except Exception as error:  # our own failure must not stop the training
                self._lose(f"{type(error).__name__}: {error}")
        self._stepped = False
        if not self._first_done:
            self._first_done = True
            if self._client is not None:
                self._client.event("first_iteration", self._version, f"rank {self._rank}")
        spent = time.perf_counter() - began
        self._times.steps += 1
        self._times.step_s += spent
        if self._times.steps > 3:
            self._times.worst_step_s = max(self._times.worst_step_s, spent)

    def _complete(self) -> bool:
        """Whether the state at this `step()` is all there is: gradients that wait for an optimizer step are not
        captured."""
        scale = self._scaler.get_scale() if hasattr(self._scaler, "get_scale") else None
        before, self._last_scale = self._last_scale, scale
        if self._stepped or scale != before:
            return True  # a lower scale: the scaler skipped the optimizer, in an iteration like any other
        grads = any(
            p.grad is not None for o in self._tree.optimizers for group in o.param_groups for p in group["params"]
        )
        if grads and not self._warned_unstepped:
            self._warned_unstepped = True
            self._say(
                f"rank {self._rank}: step() at version {self._version} without an optimizer step since the last "
                "one: accumulated gradients are not captured, so this version is not saved. Call step() once per "
                "optimizer step"
            )
        return not grads

    def _capture_version(self) -> None:
        complete = self._complete()
        leaves, odd = self._tree.leaves()
        # what is collective comes first, and on every rank, whatever this rank's own state is
        if self._capture is None and not self._plan(leaves, odd, ready=complete and self._stepped):
            return
        if not self._all_armed and not self._arm():
            return
        if not complete:
            self._unsaved["unstepped"] = self._unsaved.get("unstepped", 0) + 1
            return
        assert self._capture is not None and self._replicator is not None
        late = self._capture.bind(leaves)
        if late and "late" not in self._unsaved:
            self._unsaved["late"] = len(late)
            self._say(
                f"rank {self._rank}: {len(late)} tensors appeared after the first step (such as {late[0].key}); "
                "they are copied at step()"
            )
        if self._replicator.busy and (self._gate.degraded or (self._job is not None and not self._job.left.is_set())):
            self._note("skipped", self._version, "the version before is still on its way")
            return
        small = self._tree.encode_small(odd, late, self._world)
        audit = bool(self._audit) and self._version % self._audit == 0
        self._job = self._capture.snapshot(self._version, small, audit)
        self._replicator.submit(self._job)
        self._gate_open = False

    def _control_group(self) -> dist.ProcessGroup | None:
        from gemini_hpc.train.transport.gloo import GlooTransport

        return self._transport.group if isinstance(self._transport, GlooTransport) else None

    def _plan(self, leaves: list[Leaf], odd: dict[tuple[int, str, str], Any], *, ready: bool) -> bool:
        """Collective, in each `step()` until every rank is ready (optimizer state exists after a real step only): who
        owns what, and the layout. A rank that fails says so, or the others would wait for it."""
        ready = ready or bool(self._resumed_at)
        rows: list[directory.Row] = []
        entries: list[Entry] = []
        failure: Exception | None = None
        try:
            for leaf in leaves:
                row, entry = self._tree.describe(leaf, self._world)
                rows.append(row)
                entries.append(entry)
        except Exception as error:
            failure = error
        offer = _Offer(
            ready=ready,
            problem="" if failure is None else f"rank {self._rank}: {failure}",
            entries=[e for e, r in zip(entries, rows, strict=True) if r.shared] if ready else [],
        )
        offers = self._all(offer)
        if failure is not None:
            raise failure
        problem = next((o.problem for o in offers if o.problem), "")
        if problem:
            raise RuntimeError(problem)
        if not all(o.ready for o in offers):
            return False
        gathered = [o.entries for o in offers]
        alone = ownership.unequal(gathered)
        dealt = ownership.deal([[e for e in part if e.key not in alone] for part in gathered], self._ownership)
        shared = [i for i, row in enumerate(rows) if row.shared and row.key not in alone]
        blocks = [msgspec.structs.replace(b, entry=shared[b.entry]) for b in dealt[self._rank]]
        for i in sorted(set(range(len(rows))) - set(shared)):  # a local part that stands for itself
            size = entries[i].size
            rows[i] = msgspec.structs.replace(rows[i], shared=False, shape=size)
            entries[i] = msgspec.structs.replace(entries[i], offset=(0,) * len(size))
            blocks.append(ownership.Block(i, entries[i].offset, size))
        blocks = [b for b in blocks if math.prod(b.size)]
        pieces = directory.place(tuple(rows), [(b.entry, b.offset, b.size) for b in blocks])
        manifest = directory.Manifest(self._rank, self._world, tuple(rows), pieces, self._tree.aliases)
        packed = directory.pack(manifest)
        small_bytes = len(self._tree.encode_small(odd, [], self._world))
        layout = Layout.plan(len(packed), manifest.tensor_bytes(), small_capacity(small_bytes, self._kept_capacity))
        totals = [o.total_bytes for o in self._all(_Offer(total_bytes=layout.total))]
        self._capture = Capture(manifest, leaves, entries, blocks)
        for recorder in self._tree.ddps:
            recorder.stop()
        self._start(packed, layout, totals)
        return True

    def _all(self, offer: _Offer) -> list[_Offer]:
        """Collective: what every rank offers."""
        if self._world == 1:
            return [offer]
        parts = collective.gather_bytes(msgspec.msgpack.encode(offer), self._control_group())
        return [msgspec.msgpack.decode(part, type=_Offer) for part in parts]

    def _start(self, packed: bytes, layout: Layout, totals: list[int]) -> None:
        import threading

        assert self._client is not None and self._capture is not None
        transport = self._transport
        self._replicator = Replicator(
            self._me,
            self._client,
            self._capture,
            packed,
            layout,
            {rank: transport.outbox(rank) for rank in self._outgoing} if transport else {},
            self._gate,
            chunk_bytes=self._chunk_bytes,
            max_repeated=self._max_repeated,
            say=self._note,
            broken=self._lose,
        )
        if transport:
            self._receivers = [
                Receiver(
                    self._me,
                    self._client,
                    transport.inbox(rank),
                    rank,
                    self._homes[rank],
                    self._gate,
                    chunk_bytes=self._chunk_bytes,
                    seal_timeout_s=self._seal_timeout_s,
                    say=self._note,
                )
                for rank in self._incoming
            ]
        threading.Thread(target=self._reserve, args=(layout.total, totals), name="gemini-arming", daemon=True).start()

    def _reserve(self, own_bytes: int, totals: list[int]) -> None:
        """In the background: reserve and map the memory of all shards that this rank fills."""
        assert self._client is not None and self._replicator is not None
        try:
            shards = [register(self._client, self._me, self._rank, self._node_rank, own_bytes)]
            for receiver in self._receivers:
                rank = receiver.rank
                shards.append(register(self._client, self._me, rank, self._homes[rank], totals[rank]))
            for shard in shards:
                shard.populate()
            self._recognise(shards[0])
        except (AgentLost, AgentRefused, ValueError, OSError) as error:
            for receiver in self._receivers:
                receiver.start(None)
            self._lose(str(error))
            self._armed = _REFUSED
            return
        self._replicator.start(shards[0])
        for receiver, shard in zip(self._receivers, shards[1:], strict=True):
            receiver.start(shard)
        self._armed = _ARMED

    def _recognise(self, shard: Shard) -> None:
        """After a resume the memory found again may hold the version resumed from: know it, for a hand-back."""
        known = self._own_copy
        for slot in shard.slots:
            if known.digest and slot.bytes.numel() >= known.used:
                from gemini_hpc.core.manifest import HEADER_BYTES, parse_header

                try:
                    header = parse_header(slot.bytes[:HEADER_BYTES].numpy().tobytes(), slot.bytes.numel())
                except ValueError:
                    continue
                if (header.stamp.epoch, header.stamp.version) == (known.epoch, known.version):
                    slot.content = Content(known.epoch, known.version, known.used, known.digest)

    def _arm(self) -> bool:
        """Collective, in each `step()` until memory is reserved everywhere, so that all ranks begin with the same
        version (a version that some ranks skip can never be sealed)."""
        states = [self._armed]
        if self._world > 1:
            states = collective.gather_word(self._armed, self._control_group())
        if any(state == _REFUSED for state in states):
            refused = [r for r, state in enumerate(states) if state == _REFUSED]
            if self._armed != _REFUSED:
                self._protected, self._state = False, "unprotected"
                self._findings.append(f"rank {refused[0]} could not reserve its memory")
            return False
        self._all_armed = all(state == _ARMED for state in states)
        if self._all_armed:
            self._state = "protected"
        return self._all_armed

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The global optimizer pre-hook; only the first one after `step()` matters."""
        if not self._is_ours(optimizer):
            return
        self._stepped = True
        if self._gate_open or not self._protected:
            return
        self._gate_open = True
        began = time.perf_counter()
        job = self._job
        if job is None and self._resumed_from is not None:
            # The version that was chosen may not have been sealed: until it is, it must not be the past (R2).
            self._gate.wait_for(self._resumed_from, lambda: not self._protected)
        elif job is not None:
            self._wait_left(job)
            assert self._capture is not None
            for key in self._capture.audit(job):
                self._note("changed", job.version, f"{key} changed between step() and the optimizer's step")
            if self._max_repeated == 1 and self._protected:
                self._gate.wait(job.version, lambda: not job.saved or not self._protected)
        spent = time.perf_counter() - began
        self._times.hook_s += spent
        if self._times.steps > 3:
            self._times.worst_hook_s = max(self._times.worst_hook_s, spent)

    def _wait_left(self, job: Job) -> None:
        """Until the copying thread has what it needs; a copy that has not begun in time never will."""
        if job.left.wait(0.0 if self._gate.degraded and not job.started else self._seal_timeout_s):
            return
        if self._gate.degraded and not job.started:
            job.left.wait(0.25)  # a healthy replicator begins within that, also on a busy node
        if not job.left.is_set() and not job.cancel():
            job.left.wait()  # a copy in memory is under way: it ends

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Registered, or at work on registered parameters (a wrapper, an optimizer in backward)."""
        known = self._foreign.get(optimizer)
        if known is None:
            mine = {id(p.tensor) for p in self._tree.params}
            known = any(o is optimizer for o in self._tree.optimizers) or any(
                id(p) in mine for group in optimizer.param_groups for p in group["params"]
            )
            self._foreign[optimizer] = known
        return known

    def fence(self) -> None:
        """Call it before changing parameters by anything but an optimizer step (an EMA swap, clipping of weights, a
        load_state_dict): returns when the capture of the last version no longer reads them."""
        if self._protected and self._job is not None:
            self._wait_left(self._job)

    # ---- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """The training has succeeded: finish the last version, tell the agent that the memory is no longer needed.
        Bounded; may be called twice."""
        self._end(success=True)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._hold(error)
            self._end(success=False)

    def _end(self, *, success: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        for recorder in self._tree.ddps:
            recorder.stop()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_excepthook
        self._shut_down(CLOSE_TIMEOUT_S if success and self._protected else 0.0)
        if self._client is not None:
            if success:
                try:
                    self._client.request(local.Finished(set=self._name, rank=self._rank))
                except (AgentLost, AgentRefused) as error:
                    self._say(f"rank {self._rank}: the agent was not told of the end: {error}")
            self._client.close()

    def _shut_down(self, patience_s: float) -> None:
        """Stop the threads: first in peace (the other ranks say goodbye too), then by cutting the links."""
        deadline = time.monotonic() + patience_s
        quiet = patience_s > 0
        if self._replicator is not None:
            quiet = self._replicator.stop(patience_s) and quiet
        for receiver in self._receivers:
            quiet = receiver.join(max(0.0, deadline - time.monotonic())) and quiet
        if not quiet and self._transport is not None:
            self._transport.interrupt()
            if self._replicator is not None:
                self._replicator.stop(1.0)
            for receiver in self._receivers:
                receiver.join(1.0)

    def _verdict(self) -> local.Verdict | None:
        try:
            reply = ask_once(self._path, local.VerdictRequest(), 2.0)
        except AgentLost:
            return None
        return reply if isinstance(reply, local.Verdict) else None

    def _hold(self, error: BaseException | None) -> None:
        if self._client is None or self._closed or not hold.is_communication_error(error):
            return
        if getattr(error, "__gemini_held__", False):
            return
        self._say(
            f"rank {self._rank}: communication failed ({type(error).__name__}); asking the agents whether a node is "
            f"dead (up to {self._hold_s:g} s)"
        )
        hold.hold(self._verdict, self._hold_s, lambda text: self._say(f"rank {self._rank}: {text}"))
        if error is not None:
            error.__gemini_held__ = True  # type: ignore[attr-defined]

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self._hold(error)
        finally:
            self._previous_excepthook(kind, error, trace)

    def _exiting(self) -> None:
        """At interpreter exit without `close()`: hold if a node is dead (the script may have swallowed the error),
        and end the threads, or Python would abort over them."""
        if self._closed:
            return
        verdict = self._verdict() if self._protected else None
        if verdict is not None and verdict.dead:
            self._say(f"rank {self._rank}: node {', '.join(verdict.dead)} is dead; waiting for Slurm")
            hold.hold(self._verdict, self._hold_s, lambda text: None)
        self._end(success=False)

    # ---- telling ---------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of completed `step()` calls, those before a resume included."""
        return self._version

    def report(self) -> dict[str, Any]:
        """What is captured, how it went, and what was found in the process but not given. For people and tests;
        scans all live objects, so not for every iteration."""
        tree, capture, replicator = self._tree, self._capture, self._replicator
        page = self._client.page if self._client is not None else None
        return {
            "state": self._state,
            "version": self._version,
            "sealed": list(page.sealed) if page is not None else None,
            "resumed_at": self._resumed_at,
            "rank": self._rank,
            "world": self._world,
            "captured": {
                "parameters": len(tree.params),
                "buffers": sorted(tree.buffers),
                "optimizers": len(tree.optimizers),
                "stateful": sorted(tree.stateful),
                "tied": dict(tree.aliases),
                "own_tensors": len(capture.keys) if capture else 0,
                "own_tensor_bytes": capture.manifest.tensor_bytes() if capture else 0,
                "eager": dict(capture.eager_since) if capture else {},
                "not_in_model": list(tree.outside),
            },
            "versions": asdict(replicator.counters) if replicator else {},
            "unsaved": dict(self._unsaved),
            "received": {r.rank: r.landed for r in self._receivers},
            "times": {**asdict(self._times), "seal_wait_s": self._gate.waited_s if replicator else 0.0},
            "findings": list(self._findings),
            "not_given": self._not_given(),
        }

    def _not_given(self) -> list[str]:
        """Live objects with training state that were not passed in."""
        given = {id(o) for o in self._given}
        kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
        mine = {id(o) for o in self._tree.optimizers}
        found = []
        for o in gc.get_objects():
            if not issubclass(type(o), kinds) or id(o) in given:
                continue
            if isinstance(o, torch.optim.lr_scheduler.LRScheduler) and id(o.optimizer) not in mine:
                continue
            found.append(f"{type(o).__module__}.{type(o).__qualname__}")
        return sorted(found)


def _pre_hook(me: weakref.ref[Checkpointer], optimizer: torch.optim.Optimizer) -> None:
    checkpointer = me()
    if checkpointer is not None:
        checkpointer._before_optimizer(optimizer)


def _at_exit(me: weakref.ref[Checkpointer]) -> None:
    checkpointer = me()
    if checkpointer is not None:
        checkpointer._exiting()
