"""One rank's place among the ranks and agents of its training: joining, agreeing, losing and finding its agent."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

import msgspec
import torch.distributed as dist

from gemini_hpc import clock
from gemini_hpc.client import joining
from gemini_hpc.client.agent_connection import (
    AgentClient,
    AgentLost,
    AgentRefused,
    Exchange,
    NotYet,
)
from gemini_hpc.client.hand_back import hand_back, same_or_new
from gemini_hpc.client.joining import SOCKET_ENV, TRY_AGAIN_EXIT, Notice
from gemini_hpc.client.seal_wait import SealGate
from gemini_hpc.client.step_guard import StepGuard
from gemini_hpc.core import placement
from gemini_hpc.train.device.memory import Keeper
from gemini_hpc.train.replication.registration import Identity
from gemini_hpc.train.state import collectives
from gemini_hpc.train.state.capture import Job
from gemini_hpc.train.transport.base import Transport
from gemini_hpc.train.transport.choice import Kind
from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier

IMPORTED_AT = clock.time()
ARMING, ARMED, REFUSED = 0, 1, -1
_WRITING_S = 10.0


class Membership:
    """The lowest layer of the checkpointer: who takes part, whether the training is protected, and saying so."""

    def __init__(self, name: str, seal_timeout_s: float, hold_s: float, kind: Kind, tier: Tier) -> None:
        self._name, self._kind, self._tier = name, kind, tier
        self._seal_timeout_s, self._hold_s = seal_timeout_s, hold_s
        distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if distributed else 0
        self._world = dist.get_world_size() if distributed else 1
        self._path = os.environ.get(SOCKET_ENV, "")
        self._unsupported = ""  # why this rank's state cannot be captured
        self._epoch = 0
        self._version = 0
        self._protected = False
        self._state = "unprotected"
        self._unsaved: dict[str, int] = {}
        self._findings: list[str] = []
        self._job: Job | None = None
        self._transport: Transport | None = None
        self._client: AgentClient | None = None
        # Until all ranks have one verdict on whether this training is protected, `step()` is collective.
        self._undecided = False
        self._armed = ARMING
        self._fate = threading.Lock()  # guards _undecided, _armed, _protected; _listening, _ending
        self._ending = False

    def _keepers(self) -> list[Keeper]:
        """Those that have memory of the agent's."""
        return []

    def _try_again(self, why: str) -> NoReturn:
        """On every rank alike: there is a version, and this launch cannot have it. Training from step 0 would replace
        it by something worse, so this launch ends; the copies stay for the next one."""
        if self._rank == 0:
            self._say(f"{why}; ending with {TRY_AGAIN_EXIT} so that a new launch can load it")
        if self._client is not None:
            self._client.close()
        raise SystemExit(TRY_AGAIN_EXIT)

    def _say(self, text: str) -> None:
        print(f"gemini-hpc: {text}", file=sys.stderr, flush=True)

    def _join(self) -> None:
        """Find the agent, agree with the other ranks, make the transport. Collective."""
        notice = self._greet()
        notices = [notice]
        if self._world > 1:
            raw = collectives.gather_bytes(msgspec.msgpack.encode(notice))
            notices = [msgspec.msgpack.decode(part, type=Notice) for part in raw]
        problem = joining.problem(notices, notice)
        homes, m = [n.node_rank for n in notices], notice.replicas
        if problem:
            if self._client is not None and self._client.page is not None:
                self._client.event("unprotected", 0, problem)
            kept = max((n.chosen for n in notices), default=(0, 0, 0))
            if any(n.later for n in notices):
                self._try_again(problem)
            if kept[1]:
                self._try_again(f"version {kept[1]} is in memory, but cannot be used: {problem}")
            if self._rank == 0:
                self._say(f"this training is not protected: {problem}")
            return
        assert self._client is not None
        self._epoch, self._node_rank = notice.epoch, notice.node_rank
        self._homes = homes
        self._me = Identity(self._name, self._rank, self._world, notice.node_rank, notice.epoch)
        client = self._client
        self._gate = SealGate(
            lambda: client.page,
            lambda: client.lost,
            self._epoch,
            self._seal_timeout_s,
            self._on_degraded,
            self._on_restored,
        )
        self._brake = StepGuard(
            lambda: client.page,
            lambda: client.lost,
            self._hold_s,
            lambda text: self._say(f"rank {self._rank}: {text}"),
        )
        self._targets = placement.targets(homes, notice.nodes, m)
        self._outgoing = self._targets[self._rank]
        self._incoming = [r for r, t in enumerate(self._targets) if self._rank in t and r != self._rank]
        if self._transport is not None:
            self._transport.joined_anew(client)
        elif self._world > 1 and m > 1:
            from gemini_hpc.train.transport import choice

            protocols = [n.protocol for n in notices]
            self._transport, odd = choice.make(self._kind, self._client, self._name, self._rank, homes, protocols)
            if odd:
                self._findings.append(odd)
                if self._rank == 0:
                    self._say(odd)
        self._protected = self._undecided = True
        self._state = "arming"

    def _greet(self) -> Notice:
        if not self._path:
            return Notice(problem=joining.no_agent())
        if self._unsupported:
            return Notice(problem=f"rank {self._rank}: {self._unsupported}")
        if self._world == 1 and int(os.environ.get("WORLD_SIZE", "1") or "1") > 1:
            return Notice(problem="WORLD_SIZE says several ranks: call torch.distributed.init_process_group first")
        hello = joining.hello(
            self._name,
            self._rank,
            self._world,
            int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) or "0"),
            self._tier,
        )
        self._waiting_said = ""
        try:
            self._client = AgentClient(self._path, self._rejoin, self._agent_gone, self._say)
            welcome = self._client.hello(hello, self._waiting)
        except (AgentLost, AgentRefused) as error:
            self._client = None
            return Notice(problem=str(error), later=isinstance(error, NotYet))
        self._welcome = welcome
        self._client.event("imports_done", 0, t=IMPORTED_AT)
        return Notice.of(welcome)

    def _waiting(self, waited_s: float, why: str) -> None:
        said = joining.waiting(waited_s, why)
        if said not in ("", self._waiting_said) and self._rank == 0:
            self._waiting_said = said
            self._say(said)

    # ---- the agent's death -----------------------------------------------------------------------------

    def _agent_gone(self) -> None:
        if self._protected:
            self._gate.degrade("the agent is gone")

    def _rejoin(self, welcome: local.Welcome, exchange: Exchange) -> bool:
        """From the client's thread, after a new agent has welcomed us: hand the memory back."""
        first = self._client.first if self._client is not None else None
        if first is None or (welcome.epoch, welcome.restart) != (first.epoch, first.restart):
            self._lose(
                f"the agent came back for epoch {welcome.epoch}, restart {welcome.restart}"
                + (f"; this training is of epoch {first.epoch}, restart {first.restart}" if first else "")
            )
            return False
        chosen = (first.chosen_epoch, first.chosen_version)
        for keeper in self._keepers():
            if keeper.shard is None:
                continue
            if not keeper.writing.acquire(timeout=_WRITING_S):
                self._lose("a copy into replica memory does not end")
                return False
            keeper.grants += 1
            keeper.writing.release()
            keeper.release(self._gate.sealed)
            for former in keeper.former:  # first, or the agent would take them for smaller replacements
                hand_back(former, self._name, exchange, self._epoch, chosen)
            if not hand_back(keeper.shard, self._name, exchange, self._epoch, chosen):
                # the agent has memory of its own for this shard (it had not died, only the connection had)
                keeper.shard = same_or_new(keeper.shard, self._name, exchange, keeper.shard.of)
        exchange(local.Event(name="rejoined", version=self._version, t=clock.time(), detail=f"rank {self._rank}"))
        return True

    def _on_degraded(self, reason: str) -> None:
        self._state = "degraded"
        self._say(f"rank {self._rank}: protection is degraded: {reason}; training goes on")
        if self._client is not None and not self._client.lost:
            self._client.event("degraded", self._version, reason)

    def _on_restored(self, version: int) -> None:
        self._state = "protected"
        self._say(f"rank {self._rank}: protected again, version {version} is sealed")

    def _lose(self, reason: str) -> None:
        """Protection ends for good; training goes on. From any thread. While the ranks have no common verdict yet,
        the others hear of it in the next `step()` (see `_arm`), and this rank goes there as they do."""
        with self._fate:
            if not self._protected or self._armed == REFUSED:
                return
            if self._undecided:
                self._armed = REFUSED
            else:
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
            if self._ending:
                pass  # the last links break when the ranks do not leave together
            elif name in ("degraded", "void") or not self._unsaved.get(name):
                self._say(f"rank {self._rank}: version {version} {name}: {reason}")
        self._unsaved[name] = self._unsaved.get(name, 0) + 1
        if self._client is not None:
            self._client.event(name, version, f"rank {self._rank}: {reason}")

    def _gather(self, value: bool) -> list[int]:
        """A word of every rank."""
        return collectives.gather_word(int(value)) if self._world > 1 else [int(value)]

    def _control_group(self) -> dist.ProcessGroup | None:
        return self._transport.group if self._transport is not None else None
