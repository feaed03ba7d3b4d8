"""A rank's session with the other ranks and its agent: joining, losing and regaining the agent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

import msgspec

from gemini_hpc import clock, lines
from gemini_hpc.client import joining
from gemini_hpc.client.agent_connection import AgentClient, AgentLost, AgentRefused, Exchange, RefusedForNow
from gemini_hpc.client.hand_back import hand_back, map_agent_memory
from gemini_hpc.client.joining import ATTEMPT_ENV, SOCKET_ENV, SPARES_ENV, TRY_AGAIN_EXIT, JoinNotice
from gemini_hpc.client.mapped_slots import ShardOwner
from gemini_hpc.client.own_progress import OwnProgress
from gemini_hpc.client.seal_wait import SealGate
from gemini_hpc.client.step_guard import StepGuard
from gemini_hpc.client.verdict import StartVerdict
from gemini_hpc.core.moments import name_ranks
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.wire import local
from gemini_hpc.wire.progress_page import Progress
from gemini_hpc.wire.stored import Tier

FETCH_TIMEOUT_S = 600.0  # for a pull of a large shard from a peer over a slow network
FINISHED_TIMEOUT_S = 10.0  # an agent that has not answered by then hangs, and the training has ended
_WRITING_S = 10.0  # a copy that has not finished by then hangs
_FINDINGS = 100
# In a job with spares the agent hangs up after another node is lost, and the launcher soon ends this process.
_LOST_S = 3.0


class Ranks(Protocol):
    """All ranks of the program, as torch.distributed or MPI provides them.

    Attributes:
        subject: "training" or "program", for sentences.
    """

    rank: int
    world: int
    subject: str

    def gather_data(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, by rank (collective)."""

    def exit_process(self, status: int) -> NoReturn:
        """End this process with a status, as all ranks do (collective)."""


class RankSession:
    """A rank's session, with reports to the user and the event log.

    Attributes that only a protected program has (`gate`, `guard`, `homes`, ...) exist after a `join` that leaves
    `verdict.protected` true.

    Attributes:
        collectives: Returns, on any thread, what the program has launched since its last `step()`.
        handing: Held while memory is handed back.
        keepers: Returns the holders of agent memory, which a new agent gets back while `handing` is held.
        on_lost: Called once with the reason when protection ends for good.
        on_rejoin: Called from the client's thread with an exchange function, after a new agent has its memory back.
        write_line: Prints a line for the user.
    """

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        tier: Tier,
        *,
        seal_timeout_s: float,
        hold_s: float = 0.0,
        local_rank: int = 0,
        imported_at: float | None = None,
        parity: bool = False,
    ) -> None:
        """Create a session; `join` connects it.

        Args:
            ranks: All ranks of the program.
            name: Name of the training.
            tier: The program's choice of a tier.
            seal_timeout_s: Longest wait for a seal, in seconds.
            hold_s: Longest wait for the end of a dead node's job, in seconds.
            local_rank: Number of this rank on its node.
            imported_at: Unix time at which the imports were done; None: not reported.
            parity: This program supports parity in place of copies.
        """
        self.ranks, self.title, self.tier = ranks, name, tier
        self.name = name  # the agents' name, with the training's place among the job's trainings of that title
        self.rank, self.world = ranks.rank, ranks.world
        self.seal_timeout_s, self._hold_s = seal_timeout_s, hold_s
        self._subject, self._local_rank, self._imported_at = ranks.subject, local_rank, imported_at
        self._parity = parity
        self._pid = os.getpid()
        self.path = os.environ.get(SOCKET_ENV, "")
        self.write_line: Callable[[str], None] = lines.write_line
        self.handing: AbstractContextManager[Any] = nullcontext()
        self.keepers: Callable[[], Iterable[ShardOwner[Any]]] = list
        self.on_lost: list[Callable[[str], None]] = []
        self.on_rejoin: list[Callable[[Exchange], None]] = []
        self.verdict = StartVerdict()
        self.state = "unprotected"
        self.version = 0  # completed `step()` calls
        self.unsaved: dict[str, int] = {}
        self.findings: list[str] = []
        self.ending = False
        self.client: AgentClient | None = None
        self.collectives: Callable[[], Progress] = Progress
        self._progress: OwnProgress | None = None
        self.epoch = 0
        self.node_rank = -1
        self.homes: list[int] = []
        self.redundancy = Redundancy(1, 1)
        self.targets: list[list[int]] = []
        self.outgoing: list[int] = []  # ranks whose nodes keep copies of this rank's shard
        self.incoming: list[int] = []  # ranks of whose shards this node keeps copies
        self.welcome: local.Welcome
        self.gate: SealGate
        self.guard: StepGuard
        self._waiting_said = ""
        self._seal_reported = self._goes_on = False

    # ---- reports ---------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Print a line for the user."""
        self.write_line(text)

    def say_once(self, text: str) -> None:
        """Print a line for the user once, on rank 0, for all ranks."""
        if self.rank == 0:
            self.say(text)

    def report_first_seal(self) -> None:
        """Print once, on rank 0, since which step of this launch the program is protected, and by what."""
        if self._seal_reported or self.rank or self.state != "protected":
            return
        epoch, version = self.gate.sealed
        if epoch != self.epoch:
            return
        self._seal_reported = True
        m, lost = self.redundancy.m, self.redundancy.tolerates
        if self.redundancy.parity:
            copies = f"parity over groups of {m} nodes"
        else:
            copies = f"{m} copies of each state in memory" if m > 1 else "one copy in the memory of its own node"
        survives = "a rank may fail, no node may be lost"
        if lost:
            survives = f"any {lost} node{'s' * (lost > 1)} of a group may be lost"
        self.say(f"protected since step {version}: {copies}, {survives}")

    def report_resumed(self, began: float, fetched: float, shards: int) -> None:
        """Report the version that is loaded now, for the user and in the event log.

        Rank 0 prints which nodes have changed and what is resumed from, with the cost of the failure.

        Args:
            began: Unix time at which the load began.
            fetched: Unix time at which this rank had all shards that it needs.
            shards: Number of these shards.
        """
        welcome, done = self.welcome, clock.time()
        for change in welcome.changes:
            self.say_once(change)
        self.say_once(joining.describe_resume(welcome, self.version, done - began, done))
        detail = {"rank": self.rank, "began": began, "fetched": fetched, "loaded": done, "shards": shards}
        if welcome.reached >= self.version:
            detail["repeated"] = welcome.reached - self.version
        assert self.client is not None
        self.client.queue_event("resumed", self.version, json.dumps(detail), t=done)
        self._goes_on = True

    def report_first_iteration(self) -> None:
        """Record in the event log that the first iteration after a resume is over, at the first call after one."""
        if self._goes_on:
            self._goes_on = False
            self.record_event("first_iteration", f"rank {self.rank}")

    def count_step(self) -> None:
        """Count one completed `step()`. The agent sees the count even if this process is killed next."""
        self.version += 1
        if self._progress is not None:
            self._progress.count_step(self.version)

    def report_closed(self) -> None:
        """Report that the training was closed before, and whether the resumed version is its end.

        A script that skips finished work could otherwise resume the end of another training.
        """
        closed = self.welcome.closed
        if closed and self.version <= closed:
            self.say_once(
                f"{self._subject} {self.name} was closed at version {closed} by an earlier start, and resumes at "
                f"version {self.version}. If the script skips what is done, give each {self._subject} a name= of its "
                "own"
            )

    def exit_if_done(self) -> None:
        """End the start of a closed training whose last version is gone, on every rank alike.

        The script must not continue with freshly initialized weights.
        """
        welcome = self.welcome
        if not welcome.closed or welcome.chosen_version:
            return
        self.say_once(
            f"{self._subject} {self.name} was closed at version {welcome.closed}, and that version is gone, as a "
            f"later {self._subject} of the job has been sealed since. "
            + (
                "Ending this step with success: it has nothing left to do"
                if welcome.passed
                else "Ending this step with status 1: it would begin untrained. Give the job a tier; or give each "
                f"{self._subject} a name= of its own, and let the script skip what is done"
            )
        )
        self.version = welcome.closed
        self.finish(success=welcome.passed)
        self.ranks.exit_process(0 if welcome.passed else 1)

    def report_others(self) -> None:
        """Report other trainings to resume from if this training has nothing.

        The name of this training may change with each start.
        """
        welcome = self.welcome
        if welcome.others and not (welcome.chosen_version or welcome.closed or welcome.lost):
            self.say_once(
                f"{self._subject} {self.name} begins anew, but the job has {', '.join(welcome.others)}: to "
                "resume that, pass the same name= at each start, not one made from the time"
            )

    def say_shared(self, sentences_by_rank: Sequence[Sequence[str]]) -> None:
        """Print sentences that several ranks share once, with all rank numbers, on the lowest such rank.

        Each rank records its own sentences for the report.

        Args:
            sentences_by_rank: Sentences of every rank, by rank.
        """
        for sentence in dict.fromkeys(sentences_by_rank[self.rank]):
            self.record_finding(sentence)
            ranks = [rank for rank, sentences in enumerate(sentences_by_rank) if sentence in sentences]
            if ranks[0] == self.rank:
                self.say(f"{name_ranks(ranks)}: {sentence}")

    def record_finding(self, text: str) -> None:
        """Record a finding for the report."""
        self.findings.append(text)

    def record_event(self, name: str, detail: str) -> None:
        """Send an entry to the event log if there is an agent. For what becomes of a version see `report_version`."""
        if self.client is not None and not self.client.lost:
            self.client.queue_event(name, self.version, detail)

    def record_incident(self, name: str, version: int, reason: str) -> None:
        """Record an incident of a version, and print each kind of incident once. Any thread may call this."""
        key = f"{name}: {reason}"
        if key not in self.findings:
            if len(self.findings) < _FINDINGS:
                self.findings.append(key)
            if self.ending:
                pass  # the last links break if the ranks do not leave together
            elif name in ("degraded", "void") or not self.unsaved.get(name):
                self.say(f"rank {self.rank}: version {version} {name}: {reason}")
        self.count_unsaved(name)
        self.report_version(name, version, reason)

    def report_version(self, name: str, version: int, reason: str) -> None:
        """Report what has become of a version to the agent, or to the one that replaces it.

        Args:
            name: Name of the event. After `skipped` or `void` no agent waits for this rank's version.
            version: The version.
            reason: Reason for the event log.
        """
        if self.client is not None:
            self.client.queue_event(name, version, f"rank {self.rank}: {reason}")

    def count_unsaved(self, name: str) -> None:
        """Count one more version that was not saved for this reason."""
        self.unsaved[name] = self.unsaved.get(name, 0) + 1

    # ---- joining ---------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Return whether this process was forked from the rank and is therefore no rank."""
        return os.getpid() != self._pid

    @property
    def protected(self) -> bool:
        """Return whether copies are made, as far as this rank knows."""
        return self.verdict.protected

    def gather_data(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, by rank (collective)."""
        return self.ranks.gather_data(data) if self.world > 1 else [data]

    def is_true_on_all(self, is_true: bool) -> bool:
        """Return whether `is_true` holds on all ranks (collective)."""
        return all(word == b"1" for word in self.gather_data(b"1" if is_true else b"0"))

    def join(self, problem: str = "", sentences: Iterable[str] = ()) -> None:
        """Find the agent and agree with the other ranks (collective).

        Args:
            problem: Reason why this rank cannot be protected.
            sentences: Sentences of this rank, printed as `say_shared` does.
        """
        notice = msgspec.structs.replace(
            self._greet(problem), nth=joining.number_training(self.title), sentences=tuple(sentences)
        )
        notices = [
            msgspec.msgpack.decode(part, type=JoinNotice) for part in self.gather_data(msgspec.msgpack.encode(notice))
        ]
        if problem := joining.describe_unclosed(notices):  # some ranks' answers belong to another training
            self.say_once(f"this {self._subject} is not protected: {problem}")
            return
        problem = joining.find_problem(notices, notice, with_parity=self._parity)
        if problem:
            if self.client is not None and self.client.page is not None:
                self.client.queue_event("unprotected", 0, problem)
            kept = max((n.chosen for n in notices), default=(0, 0, 0))
            if any(n.later for n in notices):
                self.try_again(problem)
            if kept[1]:
                self.try_again(f"version {kept[1]} is in memory, but cannot be used: {problem}")
            self.say_once(f"this {self._subject} is not protected: {problem}")
            return
        client = self.client
        assert client is not None
        self.epoch, self.node_rank = notice.epoch, notice.node_rank
        self.homes = [n.node_rank for n in notices]
        self.gate = SealGate(
            lambda: client.page,
            lambda: client.lost,
            self.epoch,
            self.seal_timeout_s,
            self._on_degraded,
            self._on_restored,
            _LOST_S if os.environ.get(SPARES_ENV, "0") not in ("", "0") else 0.0,
        )
        self.guard = StepGuard(
            lambda: client.page,
            lambda: client.lost,
            self._hold_s,
            lambda text: self.say(f"rank {self.rank}: {text}"),
            self.epoch,
        )
        self.redundancy = notice.redundancy
        self.targets = joining.list_targets(notices, notice)
        self.outgoing = self.targets[self.rank]
        self.incoming = [r for r, t in enumerate(self.targets) if self.rank in t and r != self.rank]
        self.verdict.record_acceptance()
        self.state = "arming"
        self.say_shared([n.sentences for n in notices])

    def join_again(self, problem: str = "") -> None:
        """Send `Hello` once more, so that the agents verify their copies and choose again (collective)."""
        if self.client is not None:
            self.client.close()
        self.gather_data(b"")  # no rank sends `Hello` before all ranks have hung up
        self.verdict.withdraw()
        self.join(problem)

    def _greet(self, problem: str) -> JoinNotice:
        if not self.path:
            return JoinNotice(problem=joining.explain_missing_agent())
        if problem:
            return JoinNotice(problem=problem)
        hello = joining.build_hello(self.title, self.rank, self.world, self._local_rank, self.tier)
        self._waiting_said = ""
        try:
            if self._progress is None:
                self._progress = self._open_own_progress()
            self.client = AgentClient(
                self.path, self._hand_memory_back, self._on_agent_gone, self.say, self._progress
            )
            self.welcome = self.client.join_training(hello, self._report_wait)
        except (AgentLost, AgentRefused) as error:
            self.client = None
            self._close_progress()
            return JoinNotice(problem=str(error), later=isinstance(error, RefusedForNow))
        if self._imported_at is not None:  # a restarted rank had everything imported already
            self.client.queue_event("imports_done", 0, t=None if ATTEMPT_ENV in os.environ else self._imported_at)
        self.name = self.welcome.training or self.title
        return JoinNotice.from_welcome(self.welcome)

    def _open_own_progress(self) -> OwnProgress | None:
        try:
            return OwnProgress(lambda: self.collectives()._replace(version=self.version))
        except OSError as error:
            self.record_finding(f"hangs of this rank are not noticed: {error.strerror or error}")
            return None

    def _close_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def _report_wait(self, waited_s: float, why: str) -> None:
        sentence = joining.describe_wait(waited_s, why)
        if sentence not in ("", self._waiting_said):
            self._waiting_said = sentence
            self.say_once(sentence)

    def try_again(self, why: str) -> NoReturn:
        """End this launch, on every rank alike, because a version exists that this launch cannot load.

        Beginning anew would replace that version by a worse one. The copies stay for the next launch.
        """
        self.say_once(f"{why}; ending with exit status {TRY_AGAIN_EXIT}: the next launch tries again")
        if self.client is not None:
            self.client.close()
        self.ranks.exit_process(TRY_AGAIN_EXIT)

    def end_unresumed_protection(self) -> None:
        """End protection at a first `step()` without `resume()`, on every rank alike, to keep the version."""
        version = self.welcome.chosen_version if self.protected else 0
        if not version:
            return
        self.verdict.withdraw()
        self.state = "unprotected"
        why = f"resume() was not called before the first step(), but there is version {version} to resume from"
        self.findings.append(why)
        self.record_event("unprotected", why)
        self.say_once(
            f"{why}: this {self._subject} began anew and is not protected, and that version stays as it is. Call "
            f"resume() before the loop; to begin anew on purpose, give the {self._subject} another name, or submit a "
            "new job"
        )
        for callback in self.on_lost:
            callback(why)

    # ---- what the agent has ----------------------------------------------------------------------------

    def require_agent(self) -> AgentClient:
        """Return the agent's client.

        Raises:
            AgentLost: Protection has ended.
        """
        if self.client is None or not self.protected:
            raise AgentLost(self.findings[-1] if self.findings else "the agent of this node is gone")
        return self.client

    def fetch(self, rank: int) -> tuple[local.Copy, int]:
        """Return a copy of a shard's chosen version, and a descriptor of its memory.

        The caller closes the descriptor.

        Args:
            rank: Training rank whose shard is fetched.

        Raises:
            AgentLost: There is no agent.
            AgentRefused: The agent has no copy.
        """
        assert self.client is not None
        reply, fds = self.client.request(local.Fetch(training=self.name, rank=rank), timeout_s=FETCH_TIMEOUT_S)
        if not isinstance(reply, local.Copy) or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise AgentRefused(
                f"the agent gives no copy of the shard of rank {rank}: {local.describe_refusal(reply)}"
            )
        return reply, fds[0]

    def finish(self, *, success: bool) -> None:
        """End the connection.

        Args:
            success: The training succeeded, so the copies are no longer needed.
        """
        if self.forked:
            return
        if success:
            joining.record_closed(self.title)
        if self.client is None:
            return
        self.client.flush()
        if success:
            try:
                message = local.Finished(training=self.name, rank=self.rank, version=self.version)
                self.client.request(message, timeout_s=FINISHED_TIMEOUT_S)
            except (AgentLost, AgentRefused) as error:
                what = f"the agent does not know that this {self._subject} has ended, and keeps its copies"
                self.say(f"rank {self.rank}: {what}: {error}")
        self.client.close()
        self._close_progress()

    # ---- the agent's death -----------------------------------------------------------------------------

    def _on_agent_gone(self) -> None:
        if self.protected and not self.gate.patient:
            self.gate.degrade("the agent of this node is gone")

    def _hand_memory_back(self, welcome: local.Welcome, exchange: Exchange) -> bool:
        """Hand the memory back to a new agent that has welcomed this rank (on the client's thread)."""
        first = self.client.first if self.client is not None else None
        if first is None or (welcome.epoch, welcome.restart) != (first.epoch, first.restart):
            self.end_protection(
                f"the agent came back at epoch {welcome.epoch}, restart {welcome.restart}"
                + (f"; this {self._subject} is at epoch {first.epoch}, restart {first.restart}" if first else "")
            )
            return False
        chosen = (first.chosen_epoch, first.chosen_version)
        with self.handing:
            for keeper in self.keepers():
                if keeper.shard is None:
                    continue
                if not keeper.writing.acquire(timeout=_WRITING_S):
                    self.end_protection(f"a copy into replica memory has not finished within {_WRITING_S:g} s")
                    return False
                keeper.grants += 1
                keeper.writing.release()
                keeper.release(self.gate.sealed)
                for former in keeper.former:  # first, or the agent would consider them smaller replacements
                    hand_back(former, self.name, exchange, self.epoch, chosen)
                if not hand_back(keeper.shard, self.name, exchange, self.epoch, chosen):
                    # the agent has its own memory for this shard, because only the connection broke
                    keeper.shard = map_agent_memory(keeper.shard, self.name, exchange, keeper.shard.map_onto)
        for callback in self.on_rejoin:
            callback(exchange)
        exchange(local.Event(name="rejoined", version=self.version, t=clock.time(), detail=f"rank {self.rank}"))
        return True

    def _on_degraded(self, reason: str) -> None:
        self.state = "degraded"
        if self.ending:
            return  # the last links break if the ranks do not leave together
        self.say(f"rank {self.rank}: protection is degraded: {reason}; the {self._subject} goes on")
        self.record_event("degraded", reason)

    def _on_restored(self, version: int) -> None:
        self.state = "protected"
        self.say(f"rank {self.rank}: protected again, version {version} is sealed")

    def end_protection(self, reason: str) -> None:
        """End protection for good while the program goes on. Any thread may call this.

        While the ranks have no common verdict yet, this rank still takes part in the next step's collective. The
        other ranks learn of the loss there.
        """
        if not self.verdict.end_protection():
            return
        self.state = "unprotected"
        self.findings.append(reason)
        self.say(f"rank {self.rank}: this {self._subject} is no longer protected: {reason}")
        self.record_event("unprotected", reason)
        for callback in self.on_lost:
            callback(reason)
