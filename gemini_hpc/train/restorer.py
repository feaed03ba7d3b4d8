"""Restoring a training: all ranks agree on a version that each can load, or leave it to another launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.chosen_version import fetch_on_all
from gemini_hpc.client.mapped_slots import Content
from gemini_hpc.client.session import RankSession
from gemini_hpc.train import meeting, start
from gemini_hpc.train.meeting import Meetings
from gemini_hpc.train.state import restore, rng
from gemini_hpc.train.state.loader import StatefulLoader, read_loader_units
from gemini_hpc.train.state.modules import UnsupportedStateError
from gemini_hpc.train.state.tree import StateTree
from gemini_hpc.wire import local

REJECT_S = 30.0  # the agent of this node only records it
_MOST_TEXT = 300


@dataclass(frozen=True)
class Resumed:
    """The version that was loaded.

    Attributes:
        stamp: Its (epoch, version), or None if no version was loaded.
        small_capacity: Bytes of its small state.
        own_copy: The copy of this rank's own shard.
    """

    stamp: tuple[int, int] | None = None
    small_capacity: int = 0
    own_copy: Content = field(default_factory=Content)


class Restorer:
    """A rank's part in restoring the training."""

    def __init__(
        self,
        session: RankSession,
        tree: StateTree,
        loader: Any,
        *,
        path: str,
        unsupported: str,
        join_again: Callable[[], None],
        meetings: Meetings,
        report_later: Callable[[str], None],
    ) -> None:
        """Create the restorer of one rank.

        Args:
            session: The rank's session with its agent.
            tree: The state to restore.
            loader: The training's data loader, or None.
            path: Source to start from if this job has no version.
            unsupported: Reason why this rank's state cannot be captured, or "".
            join_again: Sends `Hello` to the agents again.
            meetings: Meetings of the ranks.
            report_later: Takes a sentence for the first `step()`, reported once for all ranks that have it.
        """
        self._session, self._tree, self._loader = session, tree, loader
        self._path, self._unsupported, self._join_again = path, unsupported, join_again
        self._meetings, self._report_later = meetings, report_later
        self.called = False
        self.found = Resumed()
        self.resumed_at = 0
        self._generators: Any = None  # states of the generators in the restored version
        self._own_copy = Content()

    def resume(self) -> int:
        """Load a version and return its number, or 0 for a fresh start. Collective.

        Raises:
            RuntimeError: `resume()` was called before, or some ranks do not call it in time.
            ValueError: The saved state does not fit this training.
        """
        if self.called:
            raise RuntimeError("resume() was already called: call it only once, before the loop")
        self.called = True
        session = self._session
        if session.protected or self._path:
            self._meetings.meet("resume()")
        if not session.protected:
            return self._start_over()
        if session.welcome.notice:
            session.say_once(session.welcome.notice)
        return self._load() or self._start_over()

    def report_missing_resume(self) -> None:
        """Report, at the first `step()` of a training that begins at 0, that `resume()` was left out."""
        if self.called:
            return
        self._session.end_unresumed_protection()
        if self._path:
            self._session.say_once(f"resume() was not called before the first step(): {self._path} was not loaded")

    def _load(self) -> int:
        """Load the version that the agents have chosen and return its number. Collective.

        Return 0 if there is none and the training may begin anew.
        """
        began, session = clock.time(), self._session
        shards = fetch_on_all(session, self._fetch_shards, self._join_again)
        welcome = session.welcome
        if not shards:
            if welcome.rejected and not welcome.fresh:
                self._give_up("; ".join(welcome.rejected))
            session.exit_if_done()
            session.report_others()
            return 0
        fetched = clock.time()
        own = next((s for s in shards if s.manifest.rank == session.rank), shards[session.rank % len(shards)])
        small = restore.load(self._tree, own, shards, session.rank, welcome.chosen_world == session.world)
        session.version = self.resumed_at = welcome.chosen_version
        is_own = own.manifest.rank == session.rank
        self.found = Resumed(
            (welcome.chosen_epoch, welcome.chosen_version),
            own.header.layout.small_capacity if is_own else 0,
            self._own_copy,
        )
        if is_own:
            self._set_generators(small["rng"])
        session.report_resumed(began, fetched, len(shards))
        session.report_closed()
        self._report_data_to_skip()
        self._report_counts(restore.read_saved_units(small, welcome.chosen_world))
        self._report_not_restored()
        return session.version

    # ---- rejecting -------------------------------------------------------------------------------------

    def reject(self, reason: str, *, fresh: bool, trained: bool) -> int:
        """Reject the loaded version: see `Checkpointer.reject`.

        Args:
            reason: Reason for the records and the user.
            fresh: Let a new launch start over if no version is left.
            trained: `step()` has been called since the load.
        """
        if not self.called:
            raise RuntimeError("reject() before resume(): nothing has been loaded")
        session = self._session
        self._meetings.meet("reject()", meeting.SOON_S)
        fresh = session.is_true_on_all(fresh)
        self._record_rejection(" ".join(str(reason).split())[:_MOST_TEXT] or "no reason given", fresh=fresh)
        if trained:
            session.try_again(f"version {self.resumed_at} is rejected ({reason})")
        session.say_once(f"version {self.resumed_at} is rejected: {reason}")
        self._join_again()
        if not session.protected:
            session.try_again("an older version cannot be loaded without the agents")
        for param in self._tree.params:
            param.tensor.grad = None
        session.version = self.resumed_at = 0
        self.found, self._generators, self._own_copy = Resumed(), None, Content()
        version = self._load()
        if not version:  # the state that is here now is no fresh start
            session.try_again("no version is left, and the training may start over")
        return version

    def _record_rejection(self, reason: str, *, fresh: bool) -> None:
        """Record the rejection at the agents, on at least one node. Collective."""
        session = self._session
        recorded, why = False, "nothing was loaded from memory or the tier"
        if self.found.stamp is not None and session.client is not None:
            message = local.Reject(session.name, session.rank, self.resumed_at, reason, fresh)
            try:
                session.client.request(message, timeout_s=REJECT_S)
                recorded = True
            except AgentRefused as error:
                why = str(error)
            except AgentLost:
                why = ""
        if b"1" in session.gather_data(b"1" if recorded else b"0"):
            return
        if fresh and self.found.stamp is None:
            session.try_again(f"the state here is rejected ({reason}), and the training may start over")
        self._give_up(f"{reason}; {why or 'no agent could record it'}")

    def _give_up(self, why: str) -> NoReturn:
        """End the job on every rank alike: no version is left, and no call has allowed a fresh start."""
        session = self._session
        session.say_once(
            f"no version is left to resume from: {why}; to start over, submit a new job (after reject(fresh=True) "
            "the next launch starts over)"
        )
        if session.client is not None:
            session.client.close()
        raise SystemExit(1)

    # ---- generators and data ---------------------------------------------------------------------------

    def restore_generators(self) -> None:
        """Set the generators to the states of the loaded version again."""
        if self._generators is not None:
            rng.restore(self._generators)

    def _set_generators(self, states: Any) -> None:
        self._generators = states
        rng.restore(states)
        if isinstance(self._loader, StatefulLoader):
            self._loader.run_before_next_batch(lambda: rng.restore(states))

    def _report_data_to_skip(self) -> None:
        version = self._session.version
        if self._loader is None and version:
            steps = "1 step" if version == 1 else f"{version} steps"
            self._session.say_once(f"no loader was passed: the script itself has to skip {steps} of data")

    def _report_counts(self, then: Mapping[str, int]) -> None:
        """Report in which units another loader's position may count, if they differ now."""
        if self._loader is None or isinstance(self._loader, StatefulLoader):
            return
        now = {**read_loader_units(self._loader), "ranks": self._session.world}
        same = {name for name in then if now.get(name, then[name]) == then[name]}
        if differ := [f"{name} {then[name]}, now {now[name]}" for name in then if name not in same]:
            self._session.say_once(
                f"the loader was captured with {'; '.join(differ)}: if its position counts no samples, some are read "
                "twice or left out. gemini_hpc.StatefulLoader counts them"
            )

    def _report_not_restored(self) -> None:
        """Report which parts of the loaded version were not restored."""
        for line in self._tree.unrestored:
            if self._session.protected:
                self._report_later(line)
            else:
                self._session.say(f"rank {self._session.rank}: {line}")

    # ---- from elsewhere --------------------------------------------------------------------------------

    def _start_over(self) -> int:
        """Load the source named by `start` and return its version. Collective.

        Raises:
            ValueError: The source cannot be loaded. All ranks raise alike.
        """
        if not self._path:
            return 0
        session = self._session
        began, why = clock.time(), self._unsupported
        if not why:
            try:
                found = start.load(self._tree, self._path, session.title, session.rank, session.world)
            except (ValueError, OSError, ImportError, UnsupportedStateError) as error:
                why = str(error)
        if not session.is_true_on_all(not why):
            raise ValueError(f"cannot start from {self._path}: {why or 'another rank could not'}")
        session.version = found.version
        if found.states is not None:
            self._set_generators(found.states)
        session.say_once(f"starts from {self._path}: {found.description} ({clock.time() - began:.2f} s)")
        self._report_data_to_skip()
        self._report_counts(found.counts)
        self._report_not_restored()
        return session.version

    # ---- from the agents -------------------------------------------------------------------------------

    def _fetch(self, rank: int) -> restore.SavedShard:
        saved, reply = restore.fetch_shard(self._session, rank)
        if rank == self._session.rank:
            self._own_copy = Content(reply.epoch, reply.version, reply.used, reply.digest)
        return saved

    def _fetch_shards(self, welcome: local.Welcome) -> list[restore.SavedShard]:
        shards = []
        if welcome.chosen_world == self._session.world:
            shards.append(self._fetch(self._session.rank))
            if restore.is_self_sufficient(shards[0], self._tree):
                return shards
        have = {s.header.rank for s in shards}
        shards += [self._fetch(rank) for rank in range(welcome.chosen_world) if rank not in have]
        return sorted(shards, key=lambda s: s.header.rank)
