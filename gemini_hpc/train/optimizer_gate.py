"""The gate before the first optimizer step after `step()`: the previous version must be sealed first (R2)."""

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

from gemini_hpc.client.seal_wait import Wait
from gemini_hpc.client.session import RankSession
from gemini_hpc.train.device import graphs
from gemini_hpc.train.engine import RunningEngine, SaveEngine
from gemini_hpc.train.state.capture import CaptureJob
from gemini_hpc.train.state.tree import StateTree
from gemini_hpc.train.unpassed_objects import UnpassedObjects

_MOST_UNPASSED_REPORTS = 3  # report at most this many optimizers that were not passed
_WARM_UP = 3  # steps that do not count for the worst times
_SEVERAL = 2  # with several strange graphs, none can be identified
_TO_BEGIN_S = 0.25  # a healthy replicator begins within this time, also on a busy node


@dataclass
class Times:
    """The seconds that the training has spent in the checkpointer."""

    steps: int = 0
    step_s: float = 0.0
    hook_s: float = 0.0
    worst_step_s: float = 0.0
    worst_hook_s: float = 0.0

    def record_step(self, spent_s: float) -> None:
        """Count the seconds of one `step()`."""
        self.steps += 1
        self.step_s += spent_s
        if self.steps > _WARM_UP:
            self.worst_step_s = max(self.worst_step_s, spent_s)

    def record_wait(self, spent_s: float) -> None:
        """Count the seconds of one wait before the optimizer."""
        self.hook_s += spent_s
        if self.steps > _WARM_UP:
            self.worst_hook_s = max(self.worst_hook_s, spent_s)


class OptimizerGate:
    """A rank's gate: a hook in all optimizers of the process, where the training's own optimizers wait.

    The wait takes place once after each `step()`.

    Attributes:
        job: The last version captured.
        late: The training went on without the seal of that version.
        uncaptured_version: The last version that this rank could not capture.
        resumed_from: The (epoch, version) that was loaded.
        in_closure: The optimizers write only after the closure passed to them has run, so the wait follows the
            closure.
    """

    def __init__(
        self,
        session: RankSession,
        engine: SaveEngine,
        tree: StateTree,
        unpassed: UnpassedObjects,
        max_repeated: int,
        times: Times,
    ) -> None:
        self._session, self._engine, self._tree = session, engine, tree
        self._unpassed, self._max_repeated, self._times = unpassed, max_repeated, times
        self.job: CaptureJob | None = None
        self.late = False
        self.uncaptured_version = 0  # the last version that this rank could not capture
        self.resumed_from: tuple[int, int] | None = None
        self.in_closure = False
        self.stepped = False  # an optimizer of the training has stepped since the last `step()`
        self.passed = True  # no wait is due before the next `step()`
        self.strange: list[Any] = []  # graphs replayed since the last `step()` that may contain steps we do not see
        self._writing = False  # an optimizer changes the tensors, or has changed them since the last `step()`
        self._still = threading.Lock()  # its owner may read the tensors
        self._reported_late = False
        self._unpassed_reported = 0
        self._seen_replacements = 0  # the tree's `replacements` when `_foreign` was last filled
        self._foreign: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        session.on_lost.append(self._let_go)
        # A compiled step calls the hook uncompiled: Dynamo would trace its frames and warn about their content.
        hook = torch.compiler.disable(partial(_on_step, weakref.ref(self)))  # type: ignore[no-untyped-call]
        self._hook = register_optimizer_step_pre_hook(hook)
        graphs.watch(self)

    def _let_go(self, reason: str) -> None:
        """Release all waits for a copy that may never end."""
        if self.job is not None:
            self.job.left.set()

    def close(self) -> None:
        """Remove the hook, so that optimizers step freely from now on."""
        self._hook.remove()
        graphs.unwatch(self)

    @property
    def forked(self) -> bool:
        """Return whether this process was forked from the rank. A forked process has no watched training."""
        return self._session.forked

    @property
    def waited_s(self) -> float:
        """Return the seconds waited for seals, and before steps that a death would have repeated."""
        return self._session.gate.waited_s + self._session.guard.waited_s

    # ---- before the optimizer --------------------------------------------------------------------------

    def wait_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait before an optimizer's step. Only the first such call after `step()` has an effect."""
        if graphs.record_capture(optimizer) or not self._is_ours(optimizer):
            return
        self.stepped = True
        if not self.passed and self._session.protected:
            self._wait()
        if not self._writing:
            with self._still:
                self._writing = True

    def fence(self) -> None:
        """Wait until the copy of the last version no longer reads the tensors."""
        running = self._engine.running
        if self._session.protected and self.job is not None and running is not None:
            if running.driver is not None:
                running.driver.fence()
            self.wait_until_left(self.job)

    def on_capture(self) -> None:
        """End all copies before a CUDA graph is captured.

        The capture counts as a change of tensors, although it changes none.
        """
        if not self.forked:
            self.fence()

    def on_replay(self, graph: Any) -> None:
        """Pass the gate for each optimizer step in a CUDA graph that is about to be replayed."""
        if self.forked:
            return
        steps = graphs.find_optimizers(graph)
        if steps is None and len(self.strange) < _SEVERAL and not any(graph is known for known in self.strange):
            self.strange.append(graph)
        for optimizer in steps or ():
            self.wait_before_step(optimizer)

    def adopt_strange_graph(self) -> bool:
        """Return whether a single CUDA graph must have changed the weights.

        Called when weights have changed and no optimizer was seen. If only one unknown graph was replayed, its
        replays count as steps from now on.
        """
        if len(self.strange) != 1:
            return False
        graphs.record_optimizers(self.strange.pop(), self._tree.optimizers)
        self.stepped = True
        return True

    def record_step(self) -> None:
        """Record the call of `step()`: the tensors stay unchanged until the next optimizer step."""
        self.stepped = self._writing = False
        self.strange.clear()

    @contextmanager
    def freeze_optimizers(self) -> Iterator[CaptureJob | None]:
        """Block the optimizers and yield the version that the tensors hold now.

        Yield None while the tensors are being changed, or if that version was not captured. Called from another
        thread.
        """
        with self._still:
            job = self.job
            yield job if job is not None and not self._writing and job.version == self._session.version else None

    def _wait(self) -> None:
        session = self._session
        self.passed = True
        began, wait = time.perf_counter(), Wait(session.gate.is_stuck)
        job, running = self.job, self._engine.running
        if running is not None:
            running.controller.record_gate_reached()
        if job is None and self.resumed_from is not None:
            # The chosen version may not have been sealed: until it is, it must not become the past (R2).
            epoch, version = self.resumed_from
            session.gate.wait(version, lambda: not session.protected, epoch=epoch, part_of=wait)
        elif running is not None and self.uncaptured_version == session.version:
            self._wait_for_others(running.controller.patience_s, wait)
        elif running is not None and job is not None:
            self._wait_for_job(running, job, wait)
        ours_s = wait.count_own_s()  # the guard waits only where a node or an agent is missing
        if running is not None and running.controller.scheme != "none" and session.protected:
            if session.guard.is_leaving():
                self._stand_by(job)
            repeats = max(running.controller.repeats, self._max_repeated)
            session.guard.wait_for_seal(self._find_indispensable(repeats))
        spent = time.perf_counter() - began
        if running is not None:
            running.controller.record_wait(spent, ours_s)
        self._times.record_wait(spent)

    def _wait_for_job(self, running: RunningEngine, job: CaptureJob, wait: Wait) -> None:
        """Wait until the copy no longer reads the tensors, and for the seal if the version is due."""
        session = self._session
        self.wait_until_left(job, wait)
        if job.version == session.version:
            running.controller.record_copy_wait(wait.count_own_s())
            changed = running.plan.capture.audit(job)
            for key in changed if not job.hopeless else ():  # a void version is reported already
                session.record_incident(
                    "changed", job.version, f"{key} changed between step() and the optimizer's step"
                )
        if running.controller.is_due(job.version):
            self.wait_for_seal(running, job, wait)

    def _wait_for_others(self, patience_s: float, wait: Wait) -> None:
        """Wait until the other ranks have given up this version, too.

        A rank ahead of them refuses their copies.
        """
        session, pacer = self._session, self._engine.pacer
        if session.world > 1 and self._max_repeated == 1:
            over = lambda: not session.protected  # noqa: E731
            session.gate.wait(self.uncaptured_version, over, lambda: pacer.progress_at, patience_s, part_of=wait)

    def _stand_by(self, job: CaptureJob | None) -> None:
        """Wait for the end if the job is about to leave a node and this version is kept.

        If all ranks stop at a kept version, no step is repeated.
        """
        session = self._session
        if job is None:
            kept = self.resumed_from is not None and self.resumed_from[1] == session.version
        else:
            kept = job.version == session.version and not job.hopeless
            job.hurried = job.hurried or kept
        if kept:
            self._engine.pacer.record_wait()
            session.guard.stand_by()

    def _find_indispensable(self, repeats: int) -> tuple[int, int]:
        """Return the (epoch, version) without which a failure repeats too many steps.

        Without it, a failure after the next step repeats more than `repeats` steps.
        """
        version = self._session.version + 1 - repeats
        resumed = self.resumed_from
        return resumed if resumed is not None and version <= resumed[1] else (self._session.epoch, version)

    def wait_until_left(self, job: CaptureJob, wait: Wait | None = None) -> None:
        """Wait until the copying thread has its data. A copy that has not begun in time is cancelled."""
        if job.left.is_set():
            return
        job.wanted = True
        self._engine.pacer.wake()
        gate = self._session.gate
        wait = wait or Wait(gate.is_stuck)
        if wait.await_event(job.left, 0.0 if gate.degraded and not job.started else self._session.seal_timeout_s):
            return
        if gate.degraded and not job.started:
            wait.await_event(job.left, _TO_BEGIN_S)
        if not job.left.is_set() and not job.cancel():
            wait.await_event(job.left)  # a copy in memory is in progress: it ends

    def wait_for_seal(self, running: RunningEngine, job: CaptureJob, wait: Wait | None = None) -> None:
        """Wait until this version is sealed, before the training goes on (R2).

        The wait is bounded: see `SealGate.wait`.

        Args:
            running: The running engine.
            job: The version.
            wait: The wait of this optimizer step so far, for the copy. It is part of the bound.
        """
        session, gate, pacer, controller = self._session, self._session.gate, self._engine.pacer, running.controller
        job.hurried = True
        pacer.record_wait()
        if not session.protected or self.late:
            return
        if self._max_repeated > 1:  # the wait is elsewhere: see Replicator._save
            if job.hopeless and not gate.degraded:
                gate.record_miss(job.version)
            return
        controller.begin_seal_wait()
        self.late = not gate.wait(
            job.version,
            lambda: job.hopeless or not session.protected,
            lambda: pacer.progress_at,
            max(0.0, controller.patience_s - (wait.count_own_s() if wait is not None else 0.0)),
            lambda: pacer.arrived_at,
            controller.compute_quiet_s(session.seal_timeout_s),
            part_of=wait,
        )
        if not self.late or not session.protected or gate.degraded:
            return
        gate.record_miss(job.version)
        if not (job.hopeless or gate.degraded or gate.is_abandoned(job.version)):
            controller.unsealed += 1
            self._report_late(job.version)

    def _report_late(self, version: int) -> None:
        """Report that the training goes on without the seal, although all else seems well (R2)."""
        session = self._session
        why = "not sealed when the training had to go on: a failure before the next seal repeats one more step"
        if not self._reported_late:
            self._reported_late = True
            session.say(f"rank {session.rank}: version {version} was {why}; later ones appear only in the event log")
        if session.client is not None:
            session.client.queue_event("late", version, f"rank {session.rank}: {why}")

    # ---- whose optimizers ------------------------------------------------------------------------------

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer is registered or works on registered parameters.

        The latter holds for a wrapper, or an optimizer in the backward pass.
        """
        if self._seen_replacements != self._tree.replacements:
            self._seen_replacements = self._tree.replacements
            self._foreign.clear()
        known = self._foreign.get(optimizer)
        if known is None:
            param_ids = {id(p.tensor) for p in self._tree.params}
            given = self._unpassed.is_passed(optimizer)
            known = given or any(id(p) in param_ids for group in optimizer.param_groups for p in group["params"])
            self._foreign[optimizer] = known
            if not given and not self._unpassed.is_passed_anywhere(optimizer):
                self._report_unpassed(optimizer)
        return known

    def _report_unpassed(self, optimizer: torch.optim.Optimizer) -> None:
        self._unpassed_reported += 1
        session = self._session
        if session.path and self._unpassed_reported <= _MOST_UNPASSED_REPORTS:
            session.say(
                f"rank {session.rank}: a {type(optimizer).__name__} makes steps, but was not passed: its state is "
                "not captured. Pass all optimizers of the training: Checkpointer(model, [first, second])"
            )


def _on_step(
    reference: weakref.ref[OptimizerGate],
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the optimizer's changed arguments, or None to leave them unchanged."""
    gate = reference()
    if gate is None or gate.forked:
        return None
    closure: Callable[[], Any] | None = kwargs.get("closure")
    if closure is None or not gate.in_closure:
        gate.wait_before_step(optimizer)
        return None

    def call_and_wait() -> Any:
        loss = closure()
        gate.wait_before_step(optimizer)
        return loss

    return args, {**kwargs, "closure": call_and_wait}
