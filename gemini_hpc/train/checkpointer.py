"""The one object that a training script talks to."""

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
from gemini_hpc.client.session import Session
from gemini_hpc.tier import names
from gemini_hpc.train import arguments, failure_hold, keeping, rejecting
from gemini_hpc.train.engine import SaveEngine
from gemini_hpc.train.meeting import Meetings
from gemini_hpc.train.not_given import NotGiven
from gemini_hpc.train.optimizer_gate import OptimizerGate, Times
from gemini_hpc.train.restorer import Restorer
from gemini_hpc.train.schedule.pacer import Scheme
from gemini_hpc.train.schedule.traffic import Traffic, check_scheme
from gemini_hpc.train.state import ownership
from gemini_hpc.train.state.encode import UnknownTypeError
from gemini_hpc.train.state.modules import UnsupportedStateError
from gemini_hpc.train.state.tree import StateTree
from gemini_hpc.train.uncaptured import Uncaptured
from gemini_hpc.train.versions import Versions
from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier

IMPORTED_AT = clock.time()
CLOSE_TIMEOUT_S = 10.0
_LAST_S = 10.0  # for threads of ours that nothing holds up any more


class Checkpointer:
    """Keeps the state of a training in its own nodes' memory after every optimizer step.

    Make one on every rank after the model is wrapped (DDP, FSDP2) and the optimizer exists, call `resume()` before
    the loop, `step()` as the last statement of the loop body, `close()` at the end. Making one is collective; so is
    the first `step()`. Without an agent (no `--gemini-replicas`, not under Slurm) it says so once and does nothing.

    Args:
        model: the wrapped model.
        optimizer: one or a list.
        scheduler: one or a list; like `scaler`, `loader` and the values of `extra` anything with state_dict and
            load_state_dict.
        extra: what else belongs to the state, by name. A module in it (an EMA, say) is captured as the model is.
        name: of this training, where a job runs several at the same time.
        process_group: the ranks that train, where those are not all: each of them makes a Checkpointer, and no other
            does. Ranks count within it. None: the default process group.
        max_repeated: completed steps that one failure may cost. 1: the next optimizer step waits for the seal; 2:
            only the next save does.
        seal_timeout_s: longest wait, in seconds, while nothing of a version arrives anywhere.
        hold_s: seconds that a rank waits (a) after a communication error, for the agents to decide whether a node
            has died, (b) before an optimizer step that could not be recovered, while a node is known to be dead.
        audit: compare digests at every Nth version, to find tensors that change behind our back; 0: never.
        ownership: "split" deals replicated state out between ranks, "full" keeps a whole copy on each.
        start: what `resume()` takes where this job has nothing yet: a directory of the persistent tier (of another
            job, on any number of ranks), a checkpoint of torch.distributed.checkpoint, or a file of torch.save.
        traffic: how the copies travel.
        tier: the directory where the agents save a version now and then, or a `Tier`.

    With state that cannot be captured (trained sparse tensors, torch's quantized ones, modules that are still lazy,
    FSDP1), and after failures of its own, the training runs unprotected, with one line on stderr.

    Raises:
        TypeError, ValueError: for arguments that cannot work.
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
        arguments.check(name, max_repeated, seal_timeout_s, hold_s, audit, ownership, traffic)
        ranks, self._apart = arguments.ranks(process_group), process_group is not None
        unsupported = ""
        try:
            tree = StateTree(model, optimizers, stateful, modules)
        except UnsupportedStateError as error:
            tree, unsupported = StateTree(nn.Module(), [], {}, {}), str(error)
        self._traffic, self._tree, self._unsupported = traffic, tree, unsupported
        given = [model, *optimizers, *stateful.values(), *modules.values()]
        self._not_given = NotGiven(given, tree.optimizers)
        self._times = Times()
        self._closed = False
        self._first_done = True
        self._session = session = Session(
            ranks,
            name,
            Tier.of(tier),
            seal_timeout_s=seal_timeout_s,
            hold_s=hold_s,
            parity=True,
            local_rank=int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) or "0"),
            imported_at=IMPORTED_AT,
        )
        meetings = self._meetings = Meetings(ranks, name, session.say)
        self._engine = SaveEngine(session, tree, traffic, ranks=ranks, ownership=ownership, max_repeated=max_repeated)
        self._gate = OptimizerGate(session, self._engine, tree, self._not_given, max_repeated, self._times)
        self._engine.frozen = self._gate.frozen
        uncaptured = Uncaptured(tree, self._not_given)
        self._versions = Versions(session, self._engine, self._gate, tree, meetings, uncaptured, scaler, audit)
        told: list[str] = []
        if session.path:
            told = uncaptured.find()
            try:
                tree.pack_small({}, [], session.world)  # what cannot be captured is told now, not at step 1
            except UnknownTypeError as error:
                self._unsupported = str(error)
            except Exception as error:  # of the user's own state_dict(), for instance: it may work at step 1
                session.find(f"the state could not be read yet: {type(error).__name__}: {error}")
        meetings.meet("Checkpointer()")
        session.join(self._cannot_join(), told)
        self._engine.connect()
        self._restorer = Restorer(
            session,
            tree,
            loader,
            path=start,
            unsupported=self._unsupported,
            join_anew=self._join_anew,
            meetings=meetings,
            later=uncaptured.tell_later,
        )
        self._holding: failure_hold.Hold | None = None
        if session.client is not None:
            self._holding = failure_hold.Hold(
                session.path,
                hold_s,
                lambda text: session.say(f"rank {session.rank}: {text}"),
                lambda error: session.event("raised", mistake.in_words(error)),
            )
            atexit.register(_at_exit, weakref.ref(self))

    def _cannot_join(self) -> str:
        """Why this rank cannot be protected; "" where it can."""
        if self._unsupported:
            return f"rank {self._session.rank}: {self._unsupported}"
        if self._session.world == 1 and not self._apart and int(os.environ.get("WORLD_SIZE", "1") or "1") > 1:
            return "WORLD_SIZE is above 1: call torch.distributed.init_process_group first"
        return ""

    def _join_anew(self) -> None:
        """Say hello once more: the agents choose anew. Collective."""
        self._session.join_anew(self._cannot_join())
        self._engine.connect()

    # ---- resuming --------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Bring the training back to the newest sealed version; returns its number, or 0 for a fresh start. Where
        there is none, what `start` names is loaded.

        Collective. Call it once, before the loop, when everything that was passed in is ready. Raises ValueError if
        the saved state is not this training's (other parameters, optimizers, buffers).
        """
        version = self._restorer.resume()
        self._restored()
        return version

    def _restored(self) -> None:
        """What was loaded is the beginning now."""
        found = self._restorer.found
        if found.stamp is None:
            return
        self._gate.resumed_from, self._gate.passed = found.stamp, False
        self._engine.own_copy, self._engine.planning.kept_capacity = found.own_copy, found.small_capacity
        self._versions.resumed, self._first_done = True, False

    def reject(self, reason: str, *, fresh: bool = False) -> int:
        """The state that `resume()` has loaded is bad, for this reason (the loss is NaN, say): take an older one,
        from memory or from the tier. Neither that version nor what came of it is chosen again in this job.

        Before the first `step()` the older version is loaded here and now, and its number is returned: begin the loop
        anew from there, with a new iterator of the loader. After it this launch ends with exit status 75, and
        the next one loads the older version. Where none is left, or after three rejections, the job ends with
        a message; with fresh=True a new launch begins anew instead.

        Collective: who calls it alone gets a RuntimeError after a minute. Raises RuntimeError before `resume()`.
        """
        trained = self._session.version != self._restorer.resumed_at or self._engine.planning.capture is not None
        version = self._restorer.reject(reason, fresh=fresh, trained=trained)
        self._restored()
        return version

    def restore_generators(self) -> None:
        """Set the generators of Python, NumPy, torch and CUDA once more as they were in the restored version. For a
        script in which something draws numbers after `resume()`, a loader of its own for instance: call this right
        before the first iteration. `StatefulLoader` does so by itself. Without a restored version nothing happens."""
        self._restorer.restore_generators()

    # ---- each iteration --------------------------------------------------------------------------------

    @_disable_dynamo  # for a loop body that is compiled as a whole
    def step(self) -> None:
        """The state of this iteration is complete. Call it last in the loop body, once per optimizer step.

        Where state appears that cannot be captured, protection ends, with one line that names it.
        """
        if self._closed:
            raise RuntimeError("step() after close()")
        if self._session.forked:
            return
        began, session = time.perf_counter(), self._session
        if not session.version:
            self._restorer.begins()
        session.version += 1
        self._gate.passed = False
        self._versions.take()
        self._gate.taken()
        if not self._first_done:
            self._first_done = True
            if session.client is not None:
                session.client.event("first_iteration", session.version, f"rank {session.rank}")
        self._times.stepped(time.perf_counter() - began)

    @property
    def gate_in_closure(self) -> bool:
        """Whether optimizers write nothing before the closure that they are given has run: a whole iteration, where
        Lightning calls them. The wait for the seal is behind it then."""
        return self._gate.in_closure

    @gate_in_closure.setter
    def gate_in_closure(self, behind: bool) -> None:
        self._gate.in_closure = behind

    def fence(self) -> None:
        """Call it before changing parameters by anything but an optimizer step (an EMA swap, clipping of weights, a
        load_state_dict): returns when the capture of the last version no longer reads them."""
        self._gate.fence()

    def keep(self, name: str) -> bool:
        """Keep the version of the last completed `step()` on the persistent tier for good, under this name (GEMINI
        paper section 2.3.1). Where that version cannot be saved (it was skipped, or the next ones came before it was
        copied) the first one after it is kept instead. Returns whether the agents will see to it, after a moment,
        10 s at most; if not, one line says why. The training does not wait for more.

        Not collective: call it on one rank or on all. The same call again changes nothing. A name is given once: for
        another version it is refused. A later job begins from there with `start="DIR@NAME"`. Raises TypeError and
        ValueError for what cannot be a name: letters, digits, ".", "_" and "-", 64 at most.
        """
        name = names.checked(name)
        session = self._session
        if session.client is None or not session.protected or not session.version:
            why = "this training is not protected" if session.version else "no step has been completed"
            session.say_once(f"version {session.version} is not kept as {name}: {why}")
            return False
        wish = local.KeepVersion(session.name, session.rank, session.version, name)
        return keeping.keep(session.client, wish, session.say)

    # ---- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """The training has succeeded: finish the last version, tell the agent that the memory is no longer needed.
        The job's next training begins at 0. Bounded; may be called twice."""
        self._end(success=True)

    def abandon(self) -> None:
        """Give this checkpointer up, for another one in the same process: the script builds model and optimizer anew,
        after out-of-memory for instance. The copies stay; the next Checkpointer of this name resumes from them.

        Collective, over the store of the process group, so also while collectives are stuck or broken: a rank whose
        others do not call it within a minute gets a RuntimeError. May be called twice. Trainings of other names have
        to be abandoned as well. Let go of model, optimizer and this object afterwards, or their memory stays.
        """
        if self._closed or self._session.forked:
            return
        self._end(success=False, goes_on=True)
        self._meetings.meet("abandon()", rejecting.MEET_S)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            if self._holding is not None:
                self._holding.error(error)
            self._end(success=False)

    def _end(self, *, success: bool, goes_on: bool = False) -> None:
        """goes_on: the process does, with another checkpointer: the last version is finished, and mappings end."""
        if self._closed or self._session.forked:
            return
        self._closed = True
        session, engine = self._session, self._engine
        self._gate.close()
        if engine.controller is not None:
            engine.controller.close()
        for recorder in self._tree.ddps:
            recorder.stop()
        if self._holding is not None:
            self._holding.end()
        in_peace = (success or goes_on) and session.protected and not session.verdict.refused
        engine.shut_down(CLOSE_TIMEOUT_S if in_peace else 0.0)
        session.finish(success=success)
        if engine.wait_ended(_LAST_S) and (success or goes_on):
            for keeper in engine.keepers():
                keeper.close()

    def _exiting(self) -> None:
        """At interpreter exit without `close()`: hold if a node is dead, and end the threads, or Python would abort
        over them."""
        if self._closed or self._session.forked:
            return
        if self._session.protected and self._holding is not None:
            self._holding.exit()
        self._end(success=False)

    @property
    def scheme(self) -> Scheme:
        """How the copies travel. Set it on all ranks between the same two steps: it counts from the next step()."""
        controller = self._engine.controller
        return self._traffic.scheme if controller is None else controller.scheme

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        check_scheme(scheme)
        self._traffic = replace(self._traffic, scheme=scheme)
        if self._engine.controller is not None:
            self._engine.controller.scheme = scheme

    # ---- telling ---------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of completed `step()` calls, those before a resume included."""
        return self._session.version

    def report(self) -> dict[str, Any]:
        """What is captured, how it went, and what was found in the process but not given. For people and tests;
        scans all live objects, so not for every iteration."""
        tree, session, engine = self._tree, self._session, self._engine
        capture, replicator = engine.planning.capture, engine.replicator
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
                "own_tensor_bytes": capture.manifest.tensor_bytes() if capture else 0,
                "eager": dict(capture.eager_since) if capture else {},
                "not_in_model": list(tree.outside),
            },
            "versions": asdict(replicator.counters) if replicator else {},
            "unsaved": dict(session.unsaved),
            "traffic": engine.controller.report() if engine.controller is not None else {},
            "received": {r.rank: r.landed for r in engine.receivers},
            "times": {**asdict(self._times), "seal_wait_s": self._gate.waited_s if replicator else 0.0},
            "findings": list(session.findings),
            "not_given": self._not_given.names(),
        }


def _at_exit(me: weakref.ref[Checkpointer]) -> None:
    checkpointer = me()
    if checkpointer is not None:
        checkpointer._exiting()
