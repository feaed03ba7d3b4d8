"""The Checkpointer, the one object that a training script uses."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from gemini_hpc import clock
from gemini_hpc.client import mistake
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.session import RankSession
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.tier import names
from gemini_hpc.train import arguments, failure_hold, meeting
from gemini_hpc.train.engine import SaveEngine
from gemini_hpc.train.meeting import Meetings
from gemini_hpc.train.optimizer_gate import OptimizerGate, Times
from gemini_hpc.train.restorer import Restorer
from gemini_hpc.train.schedule.traffic import Scheme, Traffic, check_scheme
from gemini_hpc.train.state import ownership
from gemini_hpc.train.state.encode import UnknownTypeError
from gemini_hpc.train.state.modules import UnsupportedStateError
from gemini_hpc.train.state.tree import StateTree
from gemini_hpc.train.uncaptured import Uncaptured
from gemini_hpc.train.unpassed_objects import UnpassedObjects
from gemini_hpc.train.versions import Versions
from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier

IMPORTED_AT = clock.time()
CLOSE_TIMEOUT_S = 10.0  # the last version is sealed within this time; an end waits no longer
_KEEP_S = 5.0  # the agent of this node only writes a line
_LAST_S = 10.0  # bound on the wait for our own threads: no link and no agent blocks them any more


class Checkpointer:
    """A checkpointer that keeps a training's state in its own nodes' memory after every optimizer step.

    Create a Checkpointer on every rank, after the model is wrapped (DDP, FSDP2) and the optimizer exists. Call
    `resume()` before the loop, `step()` as the last statement of the loop body, and `close()` at the end. The
    constructor is collective, and so is the first `step()`. Without an agent (no `--gemini-replicas`, or not under
    Slurm) the Checkpointer prints one line and does nothing.

    Args:
        model: The wrapped model.
        optimizer: One optimizer or a list.
        scheduler: One scheduler or a list. Like `scaler`, `loader` and the values of `extra`, any object with
            `state_dict` and `load_state_dict`.
        scaler: A gradient scaler, or any object as for `scheduler`.
        loader: A data loader, or any object as for `scheduler`.
        extra: Further state by name. A module among the values (such as an EMA) is captured like the model.
        name: Name of this training, for jobs that run several at the same time.
        process_group: The ranks that train, if only some do. Each rank of the group makes a Checkpointer, and no
            other rank does. Rank numbers count within the group. None means the default process group.
        max_repeated: Completed steps that one failure may cost. With 1, the next optimizer step waits for the seal.
            With 2, only the next save waits.
        seal_timeout_s: Longest wait in seconds during which no part of a version arrives anywhere.
        hold_s: Seconds that a rank waits after a communication error, until the agents decide whether a node has
            died. A rank also waits so long before an optimizer step that could not be recovered, while a node is
            known to be dead.
        audit: Compare digests at every Nth saved version, to find tensors that change unnoticed. 0 means never.
        ownership: "split" divides replicated state among the ranks, "full" keeps a whole copy on each rank.
        start: Source that `resume()` loads if this job has no version yet. The source is a directory of the
            persistent tier (of another job, on any number of ranks), a checkpoint of torch.distributed.checkpoint, or
            a file of torch.save.
        traffic: Settings of how the copies travel.
        tier: The directory where the agents save a version now and then, or a `Tier`.

    The training runs unprotected, with one line on stderr, if its state cannot be captured. Examples are trained
    sparse tensors, torch's quantized tensors, modules that are still lazy, and FSDP1. The same holds after failures
    of the Checkpointer itself.

    Raises:
        TypeError, ValueError: An argument cannot work.
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
        process_group: dist.ProcessGroup | None = None,
        extra: Mapping[str, Any] | None = None,
        max_repeated: int = 1,
        seal_timeout_s: float = 1.5,
        hold_s: float = 15.0,
        audit: int = 0,
        ownership: ownership.Ownership = "split",
        start: str = "",
        traffic: Traffic = Traffic(),  # noqa: B008 (frozen)
        tier: str | Tier = "",
    ) -> None:
        optimizers, stateful, modules = arguments.sort_out(model, optimizer, scheduler, scaler, loader, extra)
        arguments.check(name, start, max_repeated, seal_timeout_s, hold_s, audit, ownership, traffic)
        ranks, self._apart = arguments.build_ranks(process_group), process_group is not None
        unsupported = ""
        try:
            tree = StateTree(model, optimizers, stateful, modules)
        except UnsupportedStateError as error:
            tree, unsupported = StateTree(nn.Module(), [], {}, {}), str(error)
        self._tree, self._unsupported = tree, unsupported
        given = [model, *optimizers, *stateful.values(), *modules.values()]
        self._unpassed = UnpassedObjects(given, tree.optimizers)
        self._times = Times()
        self._closed = False
        self._session = session = RankSession(
            ranks,
            name,
            Tier.from_argument(tier),
            seal_timeout_s=seal_timeout_s,
            hold_s=hold_s,
            parity=True,
            local_rank=parse_number(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))),
            imported_at=IMPORTED_AT,
        )
        meetings = self._meetings = Meetings(ranks, name, session.say)
        self._engine = SaveEngine(session, tree, traffic, ranks=ranks, ownership=ownership, max_repeated=max_repeated)
        self._gate = OptimizerGate(session, self._engine, tree, self._unpassed, max_repeated, self._times)
        uncaptured = Uncaptured(tree, self._unpassed)
        self._versions = Versions(session, self._engine, self._gate, tree, meetings, uncaptured, scaler, audit)
        findings: list[str] = []
        if session.path:
            findings = uncaptured.find()
            try:
                tree.pack_small({}, [], session.world)  # report state that cannot be captured now, not at step 1
            except UnknownTypeError as error:
                self._unsupported = str(error)
            except Exception as error:  # e.g. the user's own state_dict() fails, but may work at step 1
                session.record_finding(f"the state could not be read yet: {type(error).__name__}: {error}")
        meetings.meet("Checkpointer()")
        session.join(self._explain_unprotected(), findings)
        self._engine.connect()
        self._restorer = Restorer(
            session,
            tree,
            loader,
            path=os.fspath(start) if start else "",
            unsupported=self._unsupported,
            join_again=self._join_again,
            meetings=meetings,
            report_later=uncaptured.postpone_sentence,
        )
        self._holding: failure_hold.Hold | None = None
        if session.client is not None:
            self._holding = failure_hold.Hold(
                session.path,
                hold_s,
                lambda text: session.say(f"rank {session.rank}: {text}"),
                lambda error: session.record_event("raised", mistake.describe_error(error)),
            )
            atexit.register(_on_exit, weakref.ref(self))

    def _explain_unprotected(self) -> str:
        """Return the reason why this rank cannot be protected, or ""."""
        if self._unsupported:
            return f"rank {self._session.rank}: {self._unsupported}"
        if self._session.world == 1 and not self._apart and parse_number(os.environ.get("WORLD_SIZE", "")) > 1:
            return "WORLD_SIZE is above 1: call torch.distributed.init_process_group first"
        return ""

    def _join_again(self) -> None:
        """Send `Hello` again, so that the agents choose a version again. Collective."""
        self._session.join_again(self._explain_unprotected())
        self._engine.connect()

    # ---- resuming --------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Restore the newest sealed version and return its number, or 0 for a fresh start.

        If this job has no sealed version, load the source named by `start`. Collective. Call `resume()` once, before
        the loop, when all objects passed to the Checkpointer are ready.

        Raises:
            ValueError: The saved state belongs to another training (other parameters, optimizers or buffers).
        """
        version = self._restorer.resume()
        self._adopt_loaded_version()
        return version

    def _adopt_loaded_version(self) -> None:
        """Make the loaded version the starting point of the gate, the engine and the versions."""
        found = self._restorer.found
        if found.stamp is None:
            return
        self._gate.resumed_from, self._gate.passed = found.stamp, False
        self._engine.own_copy, self._engine.planning.kept_capacity = found.own_copy, found.small_capacity
        self._versions.resumed = True

    def reject(self, reason: str, *, fresh: bool = False) -> int:
        """Reject the state that `resume()` has loaded and take an older version, from memory or the tier.

        Use it for a bad state (the loss is NaN, for example). The job never chooses that version again, nor any
        version derived from it.

        Before the first `step()`, the older version is loaded at once and its number is returned. Begin the loop
        again from there, with a new iterator of the loader. After the first `step()`, this launch ends with exit
        status 75, and the next launch loads the older version. If no version is left, or after three rejections, the
        job ends with a message. With `fresh=True`, a new launch then starts over.

        Collective: a rank that calls it alone gets a RuntimeError after a minute.

        Args:
            reason: Reason for the rejection, for the records and the user.
            fresh: Let a new launch start over if no version is left.

        Raises:
            RuntimeError: `resume()` has not been called, or other ranks do not call `reject()`.
        """
        trained = self._session.version != self._restorer.resumed_at or self._engine.planning.capture is not None
        version = self._restorer.reject(reason, fresh=fresh, trained=trained)
        self._adopt_loaded_version()
        return version

    def restore_generators(self) -> None:
        """Set the generators of Python, NumPy, torch and CUDA again to the restored version's states.

        Call it right before the first iteration if the script draws random numbers after `resume()` (in a loader of
        its own, for example). `StatefulLoader` restores the generators by itself. Without a restored version the call
        does nothing.
        """
        self._restorer.restore_generators()

    # ---- each iteration --------------------------------------------------------------------------------

    @_disable_dynamo  # the loop body may be compiled as a whole
    def step(self) -> None:
        """Declare the state of this iteration complete. Call it last in the loop body, once per optimizer step.

        If state appears that cannot be captured, protection ends, with one line that names this state.
        """
        if self._closed:
            raise RuntimeError("step() after close()")
        if self._session.forked:
            return
        began, session = time.perf_counter(), self._session
        if not session.version:
            self._restorer.report_missing_resume()
        session.count_step()
        session.report_first_seal()
        self._gate.passed = False
        self._versions.capture_step()
        self._gate.record_step()
        session.report_first_iteration()
        self._times.record_step(time.perf_counter() - began)

    @property
    def gate_in_closure(self) -> bool:
        """Return whether optimizers write only after the closure passed to them has run.

        Lightning passes a whole iteration as the closure. The wait for the seal then follows the closure.
        """
        return self._gate.in_closure

    @gate_in_closure.setter
    def gate_in_closure(self, behind: bool) -> None:
        self._gate.in_closure = behind

    def fence(self) -> None:
        """Wait until the capture of the last version no longer reads the parameters.

        Call it before changing parameters by anything but an optimizer step: an EMA swap, clipping of weights, a
        `load_state_dict`.
        """
        self._gate.fence()

    def keep(self, name: str) -> bool:
        """Keep the version of the last completed `step()` on the persistent tier for good.

        The tier stores the version under this name (GEMINI section 2.3.1). The agents keep the next version instead
        if that one was skipped, or overtaken by later versions before its copy ended. Return whether the agents will
        keep it; if not, one line gives the reason. The answer takes a moment, 10 s at most, and the training waits
        for nothing else.

        Not collective: call it on one rank or on all. Repeating the same call changes nothing. Each name is used
        once: the agents refuse it for another version. A later job starts from this version with `start="DIR@NAME"`.

        Raises:
            TypeError, ValueError: `name` is no valid name: at most 64 letters, digits, ".", "_" and "-".
        """
        name = names.check_name(name)
        session = self._session
        if session.client is None or not session.protected or not session.version:
            why = "this training is not protected" if session.version else "no step has been completed"
            session.say_once(f"version {session.version} is not kept as {name}: {why}")
            return False
        try:
            session.client.request(
                local.KeepVersion(session.name, session.rank, session.version, name), timeout_s=_KEEP_S
            )
        except (AgentLost, AgentRefused) as error:
            session.say(f"rank {session.rank}: version {session.version} is not kept as {name}: {error}")
            return False
        return True

    # ---- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """End a training that has succeeded: finish the last version and release the agent's memory.

        The job's next training begins at 0. The duration is bounded. A second call does nothing.
        """
        self._end(success=True)

    def abandon(self) -> None:
        """Abandon this checkpointer for another one in the same process.

        Use it if the script builds model and optimizer again, after out-of-memory for example. The copies stay, and
        the next Checkpointer of this name resumes from them.

        Collective, over the store of the process group, so it works while collectives are stuck or broken. A rank
        gets a RuntimeError if the others do not call it within a minute. A second call does nothing. Trainings of
        other names must be abandoned as well. Drop all references to model, optimizer and this object afterwards, or
        their memory stays.
        """
        if self._closed or self._session.forked:
            return
        self._end(success=False, goes_on=True)
        self._meetings.meet("abandon()", meeting.SOON_S)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            if self._holding is not None:
                self._holding.on_error(error)
            self._end(success=False)

    def _end(self, *, success: bool, goes_on: bool = False) -> None:
        """End threads and session.

        Args:
            success: The training has succeeded.
            goes_on: The process continues with another checkpointer: finish the last version and release the
                mappings.
        """
        if self._closed or self._session.forked:
            return
        self._closed = True
        session, engine = self._session, self._engine
        self._gate.close()
        for recorder in self._tree.ddps:
            recorder.stop()
        if self._holding is not None:
            self._holding.end()
        orderly = (success or goes_on) and session.protected and not session.verdict.refused
        engine.shut_down(CLOSE_TIMEOUT_S if orderly else 0.0)
        session.finish(success=success)
        if engine.wait_ended(_LAST_S) and (success or goes_on):
            for keeper in session.keepers():
                keeper.close()

    def _end_at_exit(self) -> None:
        """End the checkpointer at interpreter exit without `close()`.

        Hold the process if a node is dead. End the threads, because Python aborts over live ones.
        """
        if self._closed or self._session.forked:
            return
        if self._session.protected and self._holding is not None:
            self._holding.on_exit()
        self._end(success=False)

    @property
    def scheme(self) -> Scheme:
        """Return how the copies travel.

        Set it on all ranks between the same two steps. The setter takes effect at the next `step()`.
        """
        running = self._engine.running
        return self._engine.traffic.scheme if running is None else running.controller.scheme

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        check_scheme(scheme)
        self._engine.traffic = replace(self._engine.traffic, scheme=scheme)
        if self._engine.running is not None:
            self._engine.running.controller.scheme = scheme

    # ---- telling ---------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Return the number of completed `step()` calls, including those before a resume."""
        return self._session.version

    def report(self) -> dict[str, Any]:
        """Return the captured state, the counts and times, and state found in the process but not passed.

        The report is for people and tests. The call scans all live objects: do not call it in every iteration.
        """
        tree, session, engine = self._tree, self._session, self._engine
        capture, running = engine.planning.capture, engine.running
        page = session.client.page if session.client is not None else None
        return {
            "state": "unprotected" if self._versions.unseen else session.state,
            "version": session.version,
            "sealed": list(page.sealed) if page is not None else None,
            "resumed_at": self._restorer.resumed_at,
            "rank": session.rank,
            "world": session.world,
            "captured": {
                "parameters": len(tree.params),
                "buffers": sorted(tree.buffers),
                "optimizers": len(tree.optimizers),
                "stateful": sorted(tree.stateful),
                "tied": dict(tree.aliases),
                "own_tensors": len(capture.keys) if capture else 0,
                "own_tensor_bytes": capture.manifest.count_tensor_bytes() if capture else 0,
                "eager": dict(capture.eager_since) if capture else {},
                "not_in_model": list(tree.outside),
            },
            "versions": asdict(running.replicator.counters) if running else {},
            "unsaved": dict(session.unsaved),
            "traffic": running.controller.report() if running else {},
            "received": {r.rank: r.landed for r in running.receivers} if running else {},
            "times": {**asdict(self._times), "seal_wait_s": self._gate.waited_s if running else 0.0},
            "findings": list(session.findings),
            "not_given": self._unpassed.list_classes(),
        }


def _on_exit(reference: weakref.ref[Checkpointer]) -> None:
    checkpointer = reference()
    if checkpointer is not None:
        checkpointer._end_at_exit()
