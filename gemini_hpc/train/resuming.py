"""Bringing the training back: all ranks agree on a version that each can load, or leave it for another launch."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any, NoReturn

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.mapped_slots import Content
from gemini_hpc.train import rejecting, start
from gemini_hpc.train.arming import Arming
from gemini_hpc.train.device.memory import map_copy
from gemini_hpc.train.schedule.choices import Choices
from gemini_hpc.train.state import restore, rng
from gemini_hpc.train.state.loader import StatefulLoader
from gemini_hpc.train.state.modules import UnsupportedStateError
from gemini_hpc.train.state.tree import StateTree
from gemini_hpc.wire import local

FETCH_TIMEOUT_S = 600.0  # a pull of a large shard from a peer over a slow network
RESUME_ATTEMPTS = 3


class Resuming(Arming):
    """The layer of the checkpointer that resumes."""

    def __init__(self, tree: StateTree, loader: Any, choices: Choices, unsupported: str) -> None:
        super().__init__(tree, choices, unsupported)
        self._loader = loader
        self._resume_called = False
        self._resumed_from: tuple[int, int] | None = None
        self._generators: Any = None  # as they were in the version that was restored
        self._gate_open = True
        self._first_done = True

    # ---- resuming --------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Bring the training back to the newest sealed version; returns its number, or 0 for a fresh start. Where
        there is none, what `start` names is loaded.

        Collective. Call it once, before the loop, when everything that was passed in is ready. Raises ValueError if
        the saved state is not this training's (other parameters, optimizers, buffers).
        """
        if self._resume_called:
            raise RuntimeError("resume() was called before: it restores once, before the loop")
        self._resume_called = True
        if not self._protected:
            return self._begin_anew()
        if self._rank == 0 and self._welcome.notice:
            self._say(self._welcome.notice)
        return self._load() or self._begin_anew()

    def _load(self) -> int:
        """The version that the agents have chosen; 0: none, and the training may begin anew. Collective."""
        began = clock.time()
        shards = self._choose_and_fetch()
        if not shards:
            if self._welcome.rejected and not self._welcome.fresh:
                self._give_up("; ".join(self._welcome.rejected))
            return 0
        welcome = self._welcome
        fetched = clock.time()
        own = next((s for s in shards if s.manifest.rank == self._rank), shards[self._rank % len(shards)])
        small = restore.load(self._tree, own, shards, self._rank, welcome.chosen_world == self._world)
        self._version = self._resumed_at = welcome.chosen_version
        self._resumed_from, self._gate_open = (welcome.chosen_epoch, welcome.chosen_version), False
        self._first_done = False
        if own.manifest.rank == self._rank:
            self._kept_capacity = own.header.layout.small_capacity
            self._generators = states = small["rng"]
            rng.restore(states)
            if isinstance(self._loader, StatefulLoader):
                self._loader.before_next_batch(lambda: rng.restore(states))
        done = clock.time()
        if self._rank == 0:
            place = "the tier" if welcome.stored else "memory"
            self._say(f"resumed at version {self._version} from {place} ({done - began:.2f} s)")
            self._tell_data()
        assert self._client is not None
        detail = {"rank": self._rank, "began": began, "fetched": fetched, "loaded": done, "shards": len(shards)}
        self._client.event("resumed", self._version, json.dumps(detail), t=done)
        return self._version

    def reject(self, reason: str, *, fresh: bool = False) -> int:
        """The state that `resume()` has loaded is bad, for this reason (the loss is NaN, say): take an older one,
        from memory or from the tier. Neither that version nor what came of it is chosen again in this job.

        Before the first `step()` the older version is loaded here and now, and its number is returned: begin the loop
        anew from there, with a new iterator of the loader. After it this launch ends with exit status 75, and
        the next one loads the older version. Where none is left, or after three rejections, the job ends with
        a message; with fresh=True a new launch begins anew instead.

        Collective: who calls it alone gets a RuntimeError after a minute. Raises RuntimeError before `resume()`.
        """
        if not self._resume_called:
            raise RuntimeError("reject() before resume(): nothing has been loaded")
        rejecting.meet(self._rank, self._world, f"reject-{self._name}-{self._epoch}", rejecting.MEET_S)
        fresh = all(self._gather(fresh))
        self._reject(" ".join(str(reason).split())[: rejecting.MOST_TEXT] or "no reason given", fresh=fresh)
        if self._version != self._resumed_at or self._capture is not None:
            self._try_again(f"version {self._resumed_at} is rejected ({reason})")
        if self._rank == 0:
            self._say(f"version {self._resumed_at} is rejected: {reason}")
        self._join_anew()
        if not self._protected:
            self._try_again("an older version cannot be loaded without the agents")
        for param in self._tree.params:
            param.tensor.grad = None
        self._version = self._resumed_at = 0
        self._resumed_from, self._generators = None, None
        version = self._load()
        if not version:  # what is here now is no beginning
            self._try_again("no version is left, and the training may begin anew")
        return version

    def _reject(self, reason: str, *, fresh: bool) -> None:
        """Have the agents write it down, on one node at least. Collective."""
        version = self._resumed_at
        recorded, why = False, "nothing was loaded from memory or the tier"
        if self._resumed_from is not None and self._client is not None:
            message = local.Reject(self._name, self._rank, version, reason, fresh)
            recorded, why = rejecting.record(self._client, message)
        if any(self._gather(recorded)):
            return
        if fresh and self._resumed_from is None:
            self._try_again(f"what is here is rejected ({reason}), and the training may begin anew")
        self._give_up(f"{reason}; {why or 'no agent could be told'}")

    def _give_up(self, why: str) -> NoReturn:
        """On every rank alike: nothing is left to go on from, and nobody has said that one may begin anew."""
        if self._rank == 0:
            self._say(
                f"no version is left to go on from: {why}; to begin anew, submit a new job (where reject() says "
                "fresh=True, the next launch does)"
            )
        if self._client is not None:
            self._client.close()
        raise SystemExit(1)

    def restore_generators(self) -> None:
        """Set the generators of Python, NumPy, torch and CUDA once more as they were in the restored version. For a
        script in which something draws numbers after `resume()`, a loader of its own for instance: call this right
        before the first iteration. `StatefulLoader` does so by itself. Without a restored version nothing happens."""
        if self._generators is not None:
            rng.restore(self._generators)

    def _tell_data(self) -> None:
        if self._loader is None and self._version:
            steps = "1 step" if self._version == 1 else f"{self._version} steps"
            self._say(f"no loader was passed: the script has to skip {steps} of data by itself")

    def _begin_anew(self) -> int:
        """Load what `start` names; the version that it was. Collective. Raises ValueError, on all ranks alike."""
        path = self._choices.start
        if not path:
            return 0
        began, why = clock.time(), self._unsupported
        if not why:
            try:
                found = start.load(self._tree, path, self._name, self._rank, self._world)
            except (ValueError, OSError, ImportError, UnsupportedStateError) as error:
                why = str(error)
        if not all(self._gather(not why)):
            raise ValueError(f"cannot start from {path}: {why or 'another rank could not'}")
        self._version = found.version
        self._generators = states = found.states
        if states is not None:
            rng.restore(states)
            if isinstance(self._loader, StatefulLoader):
                self._loader.before_next_batch(lambda: rng.restore(states))
        if self._rank == 0:
            self._say(f"starts from {path}: {found.what} ({clock.time() - began:.2f} s)")
            self._tell_data()
        return self._version

    def _choose_and_fetch(self) -> list[restore.Saved]:
        """The shards of the version to resume from; none for a fresh start. Collective.

        Where a rank cannot get what it needs (a copy turned out damaged, its holder died), all ranks say hello
        again: the agents verify what they hold and choose anew.
        """
        for attempt in itertools.count(1):
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
            if attempt == RESUME_ATTEMPTS:
                break
            self._join_anew()
            if not self._protected:
                self._try_again(f"version {welcome.chosen_version} cannot be loaded without the agents")
        return self._try_again(f"version {self._welcome.chosen_version} is not readable everywhere")

    def _join_anew(self) -> None:
        """Say hello once more: the agents choose anew. Collective."""
        if self._client is not None:
            self._client.close()
        self._gather(True)  # nobody says hello before everyone has hung up
        self._protected = self._undecided = False
        self._join()

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
