"""What happens before the first optimizer step after `step()`: the version before has to be sealed (R2)."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gemini_hpc.client.session import Session
from gemini_hpc.train.device import graphs
from gemini_hpc.train.engine import SaveEngine
from gemini_hpc.train.not_given import NotGiven
from gemini_hpc.train.state.capture import Job
from gemini_hpc.train.state.tree import StateTree

_NOT_GIVEN = 3  # optimizers of which that is said
_WARM_UP = 3  # steps that do not count for the worst
_SEVERAL = 2  # graphs that cannot be told apart
_TO_BEGIN_S = 0.25  # a healthy replicator begins within that, also on a busy node


@dataclass
class Times:
    """Seconds that the training has spent in the checkpointer."""

    steps: int = 0
    step_s: float = 0.0
    hook_s: float = 0.0
    worst_step_s: float = 0.0
    worst_hook_s: float = 0.0

    def stepped(self, spent_s: float) -> None:
        """One `step()` is over."""
        self.steps += 1
        self.step_s += spent_s
        if self.steps > _WARM_UP:
            self.worst_step_s = max(self.worst_step_s, spent_s)

    def hooked(self, spent_s: float) -> None:
        """One wait before the optimizer is over."""
        self.hook_s += spent_s
        if self.steps > _WARM_UP:
            self.worst_hook_s = max(self.worst_hook_s, spent_s)


class OptimizerGate:
    """Of one rank. A hook of all optimizers of the process: those of the training wait here, once after each
    `step()`.

    not_given: of the checkpointer. job: the last version that was taken; late: the training went on without its seal;
    forgone: the last version that this rank could not take; resumed_from: the (epoch, version) that was loaded.
    in_closure: the optimizers write nothing before the closure that they are given has run, so the wait is behind
    that.
    """

    def __init__(
        self,
        session: Session,
        engine: SaveEngine,
        tree: StateTree,
        not_given: NotGiven,
        max_repeated: int,
        times: Times,
    ) -> None:
        self._session, self._engine, self._tree = session, engine, tree
        self._not_given, self._max_repeated, self._times = not_given, max_repeated, times
        self.job: Job | None = None
        self.late = False
        self.forgone = 0  # the last version that this rank could not take
        self.resumed_from: tuple[int, int] | None = None
        self.in_closure = False
        self.stepped = False  # an optimizer of the training has stepped since the last `step()`
        self.passed = True  # nobody need wait before the next `step()`
        self.strange: list[Any] = []  # graphs replayed since the last `step()` that may have steps, unseen by us
        self._writing = False  # an optimizer changes the tensors, or has since the last `step()`
        self._still = threading.Lock()  # who has it may read them
        self._told_late = False
        self._not_given_told = 0
        self._found_anew = 0  # as it was when these were looked at
        self._foreign: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        session.on_lost.append(self._let_go)
        # A compiled step calls it as it is: Dynamo would trace its frames, and warn of what it finds in them.
        hook = torch.compiler.disable(partial(_pre_hook, weakref.ref(self)))  # type: ignore[no-untyped-call]
        self._hook = register_optimizer_step_pre_hook(hook)
        graphs.watch(self)

    def _let_go(self, reason: str) -> None:
        """Nobody waits any more for a copy that may never end."""
        if self.job is not None:
            self.job.left.set()

    def close(self) -> None:
        """Optimizers step freely from now on."""
        self._hook.remove()
        graphs.unwatch(self)

    @property
    def forked(self) -> bool:
        """Return whether this process was forked from the rank: its training is not watched."""
        return self._session.forked

    @property
    def waited_s(self) -> float:
        """Seconds that were waited for seals, and before steps that a death would have repeated."""
        return self._session.gate.waited_s + self._session.guard.waited_s

    # ---- before the optimizer --------------------------------------------------------------------------

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each optimizer's step; only the first one after `step()` matters."""
        if graphs.captured(optimizer) or not self._is_ours(optimizer):
            return
        self.stepped = True
        if not self.passed and self._session.protected:
            self._wait()
        if not self._writing:
            with self._still:
                self._writing = True

    def fence(self) -> None:
        """Wait until the copy of the last version no longer reads the tensors."""
        if self._session.protected and self.job is not None:
            if self._engine.driver is not None:
                self._engine.driver.fence()
            self.wait_left(self.job)

    def captures(self) -> None:
        """End all copies before a CUDA graph is captured: a capture counts as a change of tensors, and is none."""
        if not self.forked:
            self.fence()

    def replays(self, graph: Any) -> None:
        """Pass the gate for each optimizer step in a CUDA graph that is about to be replayed."""
        if self.forked:
            return
        steps = graphs.steps_of(graph)
        if steps is None and len(self.strange) < _SEVERAL and not any(graph is known for known in self.strange):
            self.strange.append(graph)
        for optimizer in steps or ():
            self.before(optimizer)

    def knows_the_strange(self) -> bool:
        """Weights have changed, and no optimizer was seen. Return whether one graph alone can have done that: its
        replays are steps from now on."""
        if len(self.strange) != 1:
            return False
        graphs.has_steps_of(self.strange.pop(), self._tree.optimizers)
        self.stepped = True
        return True

    def taken(self) -> None:
        """`step()` has been called: until the next optimizer step the tensors stay as they are."""
        self.stepped = self._writing = False
        self.strange.clear()

    @contextmanager
    def frozen(self) -> Iterator[Job | None]:
        """Keep the optimizers waiting: the version that the tensors are now, None while they are being changed, or
        where that version was not captured. From another thread."""
        with self._still:
            job = self.job
            yield job if job is not None and not self._writing and job.version == self._session.version else None

    def _wait(self) -> None:
        session = self._session
        self.passed = True
        began, failing_s = time.perf_counter(), session.guard.waited_s
        job, controller = self.job, self._engine.controller
        if controller is not None:
            controller.gate()
        if job is None and self.resumed_from is not None:
            # The version that was chosen may not have been sealed: until it is, it must not be the past (R2).
            session.gate.wait_for(self.resumed_from, lambda: not session.protected)
        elif self.forgone == session.version and controller is not None:
            self._wait_for_others(controller.patience_s)
        elif job is not None and controller is not None:
            self.wait_left(job)
            if job.version == session.version:
                controller.held(time.perf_counter() - began)
            capture = self._engine.planning.capture
            assert capture is not None
            if job.version == session.version:
                changed = capture.audit(job)
                for key in changed if not job.hopeless else ():  # a void version is named already
                    session.note("changed", job.version, f"{key} changed between step() and the optimizer's step")
            if controller.due(job.version):
                self.wait_sealed(job)
        if controller is not None and controller.scheme != "none" and session.protected:
            if session.guard.leaving():
                self._stand_by(job)
            session.guard.hold(self._indispensable(max(controller.repeats, self._max_repeated)))
        spent = time.perf_counter() - began
        if controller is not None:
            controller.waited(spent, spent - (session.guard.waited_s - failing_s))
        self._times.hooked(spent)

    def _wait_for_others(self, patience_s: float) -> None:
        """Wait until the other ranks have given this version up, too: a rank ahead of them refuses their copies."""
        session, pacer = self._session, self._engine.pacer
        if session.world > 1 and self._max_repeated == 1:
            over = lambda: not session.protected  # noqa: E731
            session.gate.wait(self.forgone, over, lambda: pacer.progress_at, patience_s)

    def _stand_by(self, job: Job | None) -> None:
        """The job is about to leave a node: nothing is repeated where all ranks stop at a version that is kept."""
        session = self._session
        if job is None:
            kept = self.resumed_from is not None and self.resumed_from[1] == session.version
        else:
            kept = job.version == session.version and not job.hopeless
            job.hurried = job.hurried or kept
        if kept:
            self._engine.pacer.wait_for()
            session.guard.stand_by()

    def _indispensable(self, repeats: int) -> tuple[int, int]:
        """The (epoch, version) without which a failure after the next step repeats more than `repeats` steps."""
        version = self._session.version + 1 - repeats
        resumed = self.resumed_from
        return resumed if resumed is not None and version <= resumed[1] else (self._session.epoch, version)

    def wait_left(self, job: Job) -> None:
        """Until the copying thread has what it needs; a copy that has not begun in time never will."""
        if job.left.is_set():
            return
        job.wanted = True
        self._engine.pacer.wake()
        gate = self._session.gate
        if job.left.wait(0.0 if gate.degraded and not job.started else self._session.seal_timeout_s):
            return
        if gate.degraded and not job.started:
            job.left.wait(_TO_BEGIN_S)
        if not job.left.is_set() and not job.cancel():
            job.left.wait()  # a copy in memory is under way: it ends

    def wait_sealed(self, job: Job) -> None:
        """The training needs this version sealed (R2) before it goes on. Bounded: see `SealGate.wait`."""
        session, gate, pacer = self._session, self._session.gate, self._engine.pacer
        job.hurried = True
        pacer.wait_for()
        if not session.protected or self.late:
            return
        if self._max_repeated > 1:  # nobody waits here: see Replicator._save
            if job.hopeless and not gate.degraded:
                gate.missed(job.version)
            return
        controller = self._engine.controller
        assert controller is not None
        controller.awaits()
        self.late = not gate.wait(
            job.version,
            lambda: job.hopeless or not session.protected,
            lambda: pacer.progress_at,
            controller.patience_s,
            lambda: pacer.arrived_at,
            controller.quiet_s(session.seal_timeout_s),
        )
        if not self.late or not session.protected or gate.degraded:
            return
        gate.missed(job.version)
        if not (job.hopeless or gate.degraded or gate.abandoned(job.version)):
            controller.unsealed += 1
            self._tell_late(job.version)

    def _tell_late(self, version: int) -> None:
        """The training goes on without the seal that it waited for, and all else seems well (R2)."""
        session = self._session
        why = "not sealed when the training had to go on: a failure before the next seal repeats one more step"
        if not self._told_late:
            self._told_late = True
            session.say(f"rank {session.rank}: version {version} was {why}; later ones appear only in the event log")
        if session.client is not None:
            session.client.event("late", version, f"rank {session.rank}: {why}")

    # ---- whose optimizers ------------------------------------------------------------------------------

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Registered, or at work on registered parameters (a wrapper, an optimizer in backward)."""
        if self._found_anew != self._tree.found_anew:
            self._found_anew = self._tree.found_anew
            self._foreign.clear()
        known = self._foreign.get(optimizer)
        if known is None:
            mine = {id(p.tensor) for p in self._tree.params}
            given = self._not_given.has(optimizer)
            known = given or any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
            self._foreign[optimizer] = known
            if not given and not self._not_given.has_anywhere(optimizer):
                self._tell_not_given(optimizer)
        return known

    def _tell_not_given(self, optimizer: torch.optim.Optimizer) -> None:
        self._not_given_told += 1
        session = self._session
        if session.path and self._not_given_told <= _NOT_GIVEN:
            session.say(
                f"rank {session.rank}: a {type(optimizer).__name__} makes steps, but was not passed: its state is "
                "not captured. Pass all optimizers of the training: Checkpointer(model, [first, second])"
            )


def _pre_hook(
    me: weakref.ref[OptimizerGate], optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What the optimizer is called with instead, where that changes."""
    gate = me()
    if gate is None or gate.forked:
        return None
    closure: Callable[[], Any] | None = kwargs.get("closure")
    if closure is None or not gate.in_closure:
        gate.before(optimizer)
        return None

    def and_wait() -> Any:
        loss = closure()
        gate.before(optimizer)
        return loss

    return args, {**kwargs, "closure": and_wait}
