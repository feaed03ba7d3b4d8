"""One rank's place among the ranks and agents of its training: joining, agreeing, losing and finding its agent."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NoReturn

import msgspec
import torch.distributed as dist

from gemini_hpc.core import placement
from gemini_hpc.train import collective
from gemini_hpc.train.capture import Job
from gemini_hpc.train.client import AgentClient, AgentLost, AgentRefused, Exchange
from gemini_hpc.train.replicator import Identity
from gemini_hpc.train.seal import SealGate
from gemini_hpc.train.shared import Content, Keeper, Shard
from gemini_hpc.train.transport.base import Transport
from gemini_hpc.train.transport.choice import Kind
from gemini_hpc.wire import local

IMPORTED_AT = time.time()
SOCKET_ENV = "GEMINI_SOCKET"  # set by the SPANK plugin where the job has an agent
TIER_ENV = "SLURM_GEMINI_TIER"  # the user's --gemini-tier
STEP_ENV = "GEMINI_STEP"  # names this launch of the training where Slurm's step id does not
TRY_AGAIN_EXIT = 75  # EX_TEMPFAIL: `gemini-hpc run` starts the step again
ARMING, ARMED, REFUSED = 0, 1, -1


class _Notice(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others at construction."""

    node_rank: int = -1
    replicas: int = 0
    nodes: int = 0
    epoch: int = 0
    chosen: tuple[int, int, int] = (0, 0, 0)
    problem: str = ""
    protocol: int = 1


class Membership:
    """The lowest layer of the checkpointer: who takes part, whether the training is protected, and saying so."""

    def __init__(self, name: str, seal_timeout_s: float, kind: Kind) -> None:
        self._name, self._seal_timeout_s, self._kind = name, seal_timeout_s, kind
        distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if distributed else 0
        self._world = dist.get_world_size() if distributed else 1
        self._path = os.environ.get(SOCKET_ENV, "")
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
        if not problem and (lacking := placement.stranger(nodes, notice.nodes, m)):
            problem = (
                f"it has ranks on {len(nodes)} of the job's {notice.nodes} nodes: the copies of node rank "
                f"{lacking[0]} belong on node rank {lacking[1]}, where it has none; start it on all nodes of the job"
            )
        if problem:
            if self._client is not None and self._client.page is not None:
                self._client.event("unprotected", 0, problem)
            kept = max((n.chosen for n in notices), default=(0, 0, 0))
            if kept[1]:
                self._try_again(f"version {kept[1]} is in memory, but cannot be used: {problem}")
            if self._rank == 0:
                self._say(f"this training is not protected: {problem}")
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
        self._targets = self._holders(homes, m)
        self._outgoing = self._targets[self._rank]
        self._incoming = [r for r, t in enumerate(self._targets) if self._rank in t and r != self._rank]
        if self._world > 1 and m > 1 and self._transport is None:
            from gemini_hpc.train.transport import choice

            protocols = [n.protocol for n in notices]
            self._transport, odd = choice.make(self._kind, self._client, self._name, self._rank, homes, protocols)
            if odd:
                self._findings.append(odd)
                if self._rank == 0:
                    self._say(odd)
        self._protected = self._undecided = True
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
        hello = local.hello(
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
            protocol=welcome.proto,
        )

    def _waiting(self, waited_s: float) -> None:
        if waited_s > 5 and not self._waiting_said and self._rank == 0:
            self._waiting_said = True
            self._say("waiting for the agents of all nodes to agree on what to resume from")

    def _holders(self, homes: list[int], m: int) -> list[list[int]]:
        """For each rank those that it sends its shard to."""
        on_node: dict[int, list[int]] = {node: [] for node in homes}
        for rank, home in enumerate(homes):
            on_node[home].append(rank)

        def targets(rank: int) -> list[int]:
            home = homes[rank]
            index = on_node[home].index(rank)
            others = placement.holders(home, self._welcome.nodes, m)[1:]
            return [on_node[h][index % len(on_node[h])] for h in others]

        return [targets(rank) for rank in range(self._world)]

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
        for keeper in self._keepers():
            if keeper.shard is None:
                continue
            keeper.release(self._gate.sealed)
            for former in keeper.former:  # first, or the agent would take them for smaller replacements
                self._hand_back(former, exchange)
            if not self._hand_back(keeper.shard, exchange):
                # the agent has memory of its own for this shard (it had not died, only the connection had)
                keeper.shard = self._same_or_new(keeper.shard, exchange)
        exchange(local.Event(name="rejoined", version=self._version, t=time.time(), detail=f"rank {self._rank}"))
        return True

    def _hand_back(self, shard: Shard, exchange: Exchange) -> bool:
        """True if the agent took both slots."""
        for index, slot in enumerate(shard.slots):
            content = slot.known()
            welcome = self._welcome
            chosen = (welcome.chosen_epoch, welcome.chosen_version)
            if content.epoch != self._epoch and (content.epoch, content.version) != chosen:
                content = Content()  # of an earlier launch, and what its round has not chosen it has voided (R4)
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
                    pushed=shard.pushed,
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
                set=self._name,
                rank=shard.rank,
                world=shard.world,
                home=shard.home,
                bytes=shard.total_bytes,
                pushed=shard.pushed,
            )
        )
        if not isinstance(reply, local.Slots) or reply.bytes != shard.total_bytes:
            raise AgentRefused(f"the agent has no memory for the shard of rank {shard.rank}: {reply}")
        now = Shard(shard.rank, shard.world, shard.home, shard.total_bytes, fds, pushed=shard.pushed)
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
        return collective.gather_word(int(value)) if self._world > 1 else [int(value)]

    def _control_group(self) -> dist.ProcessGroup | None:
        return self._transport.group if self._transport is not None else None
