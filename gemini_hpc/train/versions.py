"""Capturing a version at `step()`: checking that the state is complete and due, and submitting it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemini_hpc import clock
from gemini_hpc.client.session import RankSession
from gemini_hpc.core.moments import UNKNOWN, Moment
from gemini_hpc.train.engine import RunningEngine, SaveEngine
from gemini_hpc.train.meeting import Meetings
from gemini_hpc.train.optimizer_gate import OptimizerGate
from gemini_hpc.train.schedule.interval_controller import IntervalController
from gemini_hpc.train.state.capture import CaptureJob
from gemini_hpc.train.state.encode import UnknownTypeError
from gemini_hpc.train.state.modules import UnsupportedStateError
from gemini_hpc.train.state.source import StateChangedError
from gemini_hpc.train.state.stillness import Stillness
from gemini_hpc.train.state.tensors import get_local
from gemini_hpc.train.state.tree import Leaf, StateDictError, StateTree, defers_nothing
from gemini_hpc.train.uncaptured import Uncaptured

_TOGETHER = 4  # iterations: while nothing is sealed and versions are skipped, save one version in so many


class Versions:
    """A rank's capture of versions.

    Attributes:
        resumed: The training was resumed, so its optimizers have state before their first step.
        unseen: The weights have changed since the previous `step()` without an optimizer step.
    """

    def __init__(
        self,
        session: RankSession,
        engine: SaveEngine,
        gate: OptimizerGate,
        tree: StateTree,
        meetings: Meetings,
        uncaptured: Uncaptured,
        scaler: Any,
        audit: int,
    ) -> None:
        self._session, self._engine, self._gate, self._tree = session, engine, gate, tree
        self._meetings, self._uncaptured, self._scaler, self._audit = meetings, uncaptured, scaler, audit
        self.resumed = False
        self._crowded = False
        self._save_is_due = False  # a version due for saving was incomplete: the next complete one takes its place
        self._last_scale: float | None = None
        self.unseen = False  # the weights have changed unnoticed since the previous `step()`
        self._reported_unseen = self._reported_unstepped = False
        self._unstepped = 0  # the previous version, if it has gradients and no optimizer step
        self._stillness = Stillness()

    def capture_step(self) -> None:
        """Capture the version at `step()`, and end protection if the state cannot be captured. Never raises."""
        session = self._session
        if session.protected:
            try:
                self._capture_step()
            except (UnknownTypeError, UnsupportedStateError, StateChangedError) as error:
                session.end_protection(str(error))
            except Exception as error:  # our own failure must not stop the training
                session.end_protection(f"{type(error).__name__}: {error}")
        self._ship(None)

    def _is_complete(self) -> bool:
        """Return whether the captured state is complete at this `step()`.

        Gradients that wait for an optimizer step are not captured.
        """
        scale = self._scaler.get_scale() if hasattr(self._scaler, "get_scale") else None
        before, self._last_scale = self._last_scale, scale
        gate = self._gate
        self.unseen = False
        if gate.stepped or (scale != before and not gate.strange):
            self._report_unstepped()
            self._stillness.forget()
            return True  # after a lower scale: the scaler skipped the optimizer, in an iteration like any other
        if self._stillness.detect_change(get_local(param.tensor) for param in self._tree.params):
            self._unstepped = 0
            self.unseen = not gate.adopt_strange_graph()
            if self.unseen:
                self._report_unseen()
            else:
                self._stillness.forget()
            return not self.unseen
        self._report_unstepped()
        grads = any(
            p.grad is not None for o in self._tree.optimizers for group in o.param_groups for p in group["params"]
        )
        self._unstepped = self._session.version if grads else 0
        return not (grads or gate.strange)

    def _report_unstepped(self) -> None:
        """Report, once, that the previous version was not saved.

        Only now is it certain that no write changed its weights.
        """
        version, self._unstepped = self._unstepped, 0
        if version and not self._reported_unstepped:
            self._reported_unstepped = True
            self._report_unsaved(
                version,
                " without an optimizer step since the last one: accumulated gradients are not captured, so this "
                "version is not saved. Call step() once per optimizer step",
            )

    def _report_unseen(self) -> None:
        """Report, once, that weights change without an optimizer step."""
        if self._reported_unseen:
            return
        self._reported_unseen = True
        if self._gate.strange:
            text = (
                "weights change, and no optimizer has made a step since the last step(): CUDA graphs were replayed "
                "that had been captured before Checkpointer(...). Such versions are not saved, because the next "
                "replay may change them while they are copied; a failure repeats all steps since the newest sealed "
                "one. Make the Checkpointer before the graphs are captured, or call optimizer.step() outside of them"
            )
        else:
            text = (
                "weights change, and no optimizer has made a step since the last step() (a fused backward pass, as "
                "LOMO's, writes of the script's own, or a CUDA graph that torch.cuda.CUDAGraph does not replay). "
                "Such versions are not saved, because the next change may come while they are copied; a failure "
                "repeats all steps since the newest sealed one. Let the step() of a torch.optim.Optimizer write the "
                "weights"
            )
        self._session.record_event("degraded", text)
        self._report_unsaved(self._session.version, f": {text}")

    def _report_unsaved(self, version: int, why: str) -> None:
        """Report why a version is not saved, together with the other ranks if they are about to plan.

        Args:
            version: Number of the version.
            why: Reason, appended to the version's number.
        """
        session = self._session
        text = f"step() at version {version}{why}"
        if session.verdict.awaited and self._engine.planning.capture is None:
            self._uncaptured.postpone_sentence(text)
        else:
            session.record_finding(text)
            session.say(f"rank {session.rank}: {text}")

    def _capture_step(self) -> None:
        session, engine = self._session, self._engine
        complete, leaves, odd = False, list[Leaf](), dict[tuple[int, str, str], Any]()
        failure: Exception | None = None
        try:
            complete = self._is_complete()
            if session.verdict.awaited:
                leaves, odd = self._tree.find_leaves()
        except Exception as error:
            failure = error
        running = engine.running
        moment = running.controller.read_moment() if running is not None else Moment(UNKNOWN)
        # collectives come first, and on every rank, whatever this rank's own state is
        if session.verdict.awaited:
            try:
                ready = self.resumed or (complete and self._gate.stepped)
                with self._meetings.watch("step()"):
                    running = self._begin_protection(leaves, odd, failure, ready=ready)
            except Exception:
                session.verdict.fall_back()  # a plan fails on all ranks or on none; no other collective follows
                raise
        if running is None:
            return
        running.controller.step(session.version, engine.under_way)
        if failure is not None:
            raise failure
        engine.planning.replan_alone()
        saves = running.controller.saves(session.version)
        if not complete:
            session.count_unsaved("unstepped")
            self._save_is_due = self._save_is_due or (saves and running.driver is None)
            return
        save_is_due, self._save_is_due = self._save_is_due, False
        if saves or save_is_due:
            self._capture(running, moment)

    def _begin_protection(
        self, leaves: list[Leaf], odd: dict[tuple[int, str, str], Any], failure: Exception | None, *, ready: bool
    ) -> RunningEngine | None:
        """Plan, start, and check that all ranks could start. Collective, until the ranks have one verdict.

        Return the running engine if the training is protected now, else None.
        """
        session, engine = self._session, self._engine
        if engine.planning.capture is None:
            first = engine.planning.plan_first(leaves, odd, failure, ready=ready, uncaptured=self._uncaptured)
            if first is None:
                return None
            try:
                engine.start(first, self._gate.freeze_optimizers)
            except Exception as error:  # the other ranks go on to `arm`
                session.end_protection(f"{type(error).__name__}: {error}")
        elif failure is not None:
            session.end_protection(f"{type(failure).__name__}: {failure}")
        return engine.running if engine.arm() else None

    def _capture(self, running: RunningEngine, moment: Moment) -> None:
        session, planning = self._session, self._engine.planning
        capture, controller = running.plan.capture, running.controller
        began, mark = clock.monotonic(), capture.mark()
        leaves, odd = self._tree.find_leaves()
        late, misfits = capture.bind(leaves)
        if misfits:
            self._skip_mismatched(controller, misfits)
            return
        planning.record_fit()
        if late and "late" not in session.unsaved:
            session.unsaved["late"] = len(late)
            session.say(
                f"rank {session.rank}: {len(late)} tensors appeared after the first step (such as {late[0].key}); "
                "they are copied at step()"
            )
        if running.driver is not None:
            running.driver.flush_copy()
        if self._skip_if_early(controller):
            return
        defers = capture.defers if running.driver is None else defers_nothing
        try:
            small = self._tree.pack_small(odd, late, session.world, capture.lifted.has_place, defers)
        except StateDictError as error:
            planning.skip_without_state(error)
            self._gate.uncaptured_version = session.version
            return
        gone = capture.lifted.bind(small.lifted)
        if small.unplanned or late or gone:
            planning.unlifted |= capture.lifted.find_missing(small.lifted)
            large = [tensor for name, tensor in small.unplanned.items() if name not in planning.unlifted]
            large += [leaf.tensor for leaf in late if leaf.key not in planning.unplanned]
            planning.request_plan(
                large, [f"{name} is gone from the training state" for name in gone], agrees=controller.agrees
            )
        if gone:
            session.record_incident(
                "skipped", session.version, f"{gone[0]} has changed since the state was divided among the ranks"
            )
            self._gate.uncaptured_version = session.version
            return
        audit = bool(self._audit) and capture.compared % self._audit == 0
        job = self._gate.job = capture.begin_job(session.version, small.data, audit, small.gaps)
        job.moment = moment
        self._gate.late = self._crowded = False
        controller.record_capture(began, mark, job)
        self._ship(job)
        running.replicator.submit(job)
        if controller.scheme == "blocking":
            self._gate.wait_for_seal(running, job)

    def _skip_if_early(self, controller: IntervalController) -> bool:
        """Return whether this version is skipped because the previous one is still being sent."""
        session, engine, late, job = self._session, self._engine, self._gate.late, self._gate.job
        left = job is None or job.left.is_set()
        crowded = engine.under_way and (session.gate.degraded or not left or late)
        waits = self._crowded and not controller.saves_one_in(_TOGETHER, session.version)
        if not (crowded or (session.gate.degraded and waits)):
            return False
        # all ranks must come to skip the same versions, or none is ever sealed again
        self._crowded = True
        quiet_s = controller.compute_quiet_s(session.seal_timeout_s)
        if late and clock.monotonic() - engine.pacer.progress_at > quiet_s:
            session.gate.degrade(f"version {job.version if job else 0} makes no more progress")
        session.record_incident("skipped", session.version, "the version before this one is still on its way")
        return True

    def _skip_mismatched(self, controller: IntervalController, misfits: Mapping[str, str]) -> None:
        """Skip versions while tensors differ from the plan, until the state is divided again.

        Args:
            controller: The controller of the versions.
            misfits: Reasons by tensor name.

        Raises:
            StateChangedError: There is no way to another plan.
        """
        session, planning = self._session, self._engine.planning
        why = next(iter(misfits.values()))
        planning.request_plan((), (why,), agrees=controller.agrees)
        if planning.record_mismatches(misfits):
            session.say(f"rank {session.rank}: version {session.version} skipped: {why}; making a new plan")
        session.count_unsaved("skipped")
        session.report_version("skipped", session.version, why)
        self._gate.uncaptured_version = session.version

    def _ship(self, job: CaptureJob | None) -> None:
        """Send this rank's part of the version over NCCL, at each `step()` since the ranks save.

        Only the first call in a `step()` counts.
        """
        session, running = self._session, self._engine.running
        driver = running.driver if running is not None else None
        if running is None or driver is None or session.verdict.awaited or not session.protected:
            return
        try:
            saves = running.controller.saves
            saved, following = saves(session.version), saves(session.version + 1)
            driver.step(session.version, job, saved=saved, following=following)
        except Exception as error:  # our own failure must not stop the training
            driver.fail(f"{type(error).__name__}: {error}")
