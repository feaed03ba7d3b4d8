"""The one object that a training script talks to."""

from __future__ import annotations

import atexit
import gc
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.tier import names
from gemini_hpc.train import arguments, failure_hold, keeping
from gemini_hpc.train.membership import REFUSED
from gemini_hpc.train.resuming import Resuming
from gemini_hpc.train.schedule.choices import Choices, check_scheme
from gemini_hpc.train.schedule.pacer import Scheme
from gemini_hpc.train.state import ownership
from gemini_hpc.train.state.capture import Job
from gemini_hpc.train.state.encode import UnknownTypeError
from gemini_hpc.train.state.modules import UnsupportedStateError
from gemini_hpc.train.state.optimizers import shares_state
from gemini_hpc.train.state.tree import Leaf, StateTree, nothing_deferred
from gemini_hpc.train.transport.choice import Kind
from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier

CLOSE_TIMEOUT_S = 10.0
_NOT_GIVEN = 3  # optimizers of which that is said
_TOGETHER = 4  # while nothing is sealed and versions are skipped, one in so many is saved


@dataclass
class _Times:
    """Seconds that the training has spent in here."""

    steps: int = 0
    step_s: float = 0.0
    hook_s: float = 0.0
    worst_step_s: float = 0.0
    worst_hook_s: float = 0.0


class Checkpointer(Resuming):
    """Keeps the state of a training in its own nodes' memory after every optimizer step.

    Make one on every rank after the model is wrapped (DDP, FSDP2) and the optimizer exists, call `resume()` before
    the loop, `step()` as the last statement of the loop body, `close()` at the end. Making one is collective; so is
    the first `step()`. Without an agent (no `--gemini-replicas`, not under Slurm) it says so once and does nothing.

    model: pass the wrapped model. optimizer: one or a list. scheduler (one or a list), scaler, loader, and the values
    of `extra`: anything with state_dict and load_state_dict; a module in `extra` (an EMA, say) is captured as the
    model is. name: set when a job runs several trainings. max_repeated: completed steps that one failure may cost:
    1 waits for the seal before the next optimizer step, 2 only before the next save. seal_timeout_s: longest wait of
    the training while nothing of a version arrives anywhere. audit=N: every Nth version,
    compare digests to find tensors that change behind our back. ownership: "split" deals replicated state out
    between ranks, "full" keeps a whole copy on each. hold_s: how long a rank with a communication error waits for
    the agents' verdict, and how long one waits for Slurm before a step that would be one more to repeat, where a node
    is dead.

    The copies travel in the idle spans of the training's own traffic (`scheme="gemini"`; the others are there for
    comparison), in chunks of at most chunk_bytes (0: as large as is good for the link), `buffers` of them at a time.
    mu: the share of each idle span that is planned with (Algorithm 2). overhead: where the spans are too
    small, only every j-th version is saved, so that training is slowed by no more than this share; every=j forces j.
    transport: what carries them, "gloo" (from rank to rank), "host" (from agent to agent, out of the slots, with no
    thread of this process on the network), "mpi" (from rank to rank of an MPI job, which has imported mpi4py.MPI) or
    "nccl" (from GPU to GPU; never run on one so far); "auto" is host, or gloo where an agent is too old. Where one
    cannot be had all ranks use "auto" (of "nccl": gloo), and one line on stderr says why.

    start: what `resume()` takes where this job has nothing yet: a directory of the persistent tier (of another job,
    on any number of ranks), a checkpoint of torch.distributed.checkpoint, or a file of torch.save.

    tier, tier_interval_s: as --gemini-tier and --gemini-tier-interval, which go before them: the directory (absolute,
    seen by all nodes) where the agents save a version every so many seconds (0: the site's interval).

    Raises TypeError or ValueError for arguments that cannot work. With state that cannot be captured (sparse or
    quantized tensors, modules that are still lazy, FSDP1), and after failures of its own, the training runs
    unprotected, with one line on stderr.
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
        extra: Mapping[str, Any] | None = None,
        max_repeated: int = 1,
        seal_timeout_s: float = 1.5,
        audit: int = 0,
        ownership: ownership.Ownership = "split",
        hold_s: float = 15.0,
        scheme: Scheme = "gemini",
        chunk_bytes: int = 0,
        buffers: int = 4,
        overhead: float = 0.01,
        every: int = 0,
        transport: Kind = "auto",
        start: str = "",
        tier: str = "",
        tier_interval_s: float = 0,
        mu: float = 0.95,
    ) -> None:
        optimizers, stateful, modules = arguments.sort_out(model, optimizer, scheduler, scaler, loader, extra)
        choices = Choices(
            name=name,
            max_repeated=max_repeated,
            seal_timeout_s=seal_timeout_s,
            audit=audit,
            ownership=ownership,
            hold_s=hold_s,
            chunk_bytes=chunk_bytes,
            buffers=buffers,
            scheme=scheme,
            every=every,
            overhead=overhead,
            transport=transport,
            start=start,
            tier=Tier.of(tier, tier_interval_s),
            mu=mu,
        )
        unsupported = ""
        try:
            tree = StateTree(model, optimizers, stateful, modules)
        except UnsupportedStateError as error:
            tree, unsupported = StateTree(nn.Module(), [], {}, {}), str(error)
        super().__init__(tree, loader, choices, unsupported)
        self._given = [model, *optimizers, *stateful.values(), *modules.values()]
        self._scaler = scaler
        self._closed = False
        # Whether optimizers write nothing before the closure that they are given has run: a whole iteration, where
        # Lightning calls them. The wait for the seal is behind it then.
        self.gate_in_closure = False
        self._late = self._crowded = self._told_late = False
        self._changing: set[str] = set()  # names that do not fit the plan now
        self._stepped = False
        self._owed = False  # a version that was to be saved was none: the next one that is takes its place
        self._not_given_told = 0
        self._last_scale: float | None = None
        self._warned_unstepped = False
        self._times = _Times()
        self._found_anew = 0  # as it was when these were looked at
        self._foreign: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        if self._path:
            try:
                self._tree.pack_small({}, [], self._world)  # what cannot be captured is told now, not at step 1
            except UnknownTypeError as error:
                self._unsupported = str(error)
            except Exception as error:  # of the user's own state_dict(), for instance: it may work at step 1
                self._findings.append(f"the state could not be read yet: {type(error).__name__}: {error}")
        self._join()
        me = weakref.ref(self)
        self._hook = register_optimizer_step_pre_hook(lambda opt, args, kwargs: _pre_hook(me, opt, args, kwargs))
        self._holding: failure_hold.Hold | None = None
        if self._client is not None:
            self._holding = failure_hold.Hold(
                self._path, hold_s, lambda text: self._say(f"rank {self._rank}: {text}")
            )
            atexit.register(_at_exit, me)

    # ---- each iteration --------------------------------------------------------------------------------

    def step(self) -> None:
        """The state of this iteration is complete. Call it last in the loop body, once per optimizer step.

        Where state appears that cannot be captured, protection ends, with one line that names it.
        """
        if self._closed:
            raise RuntimeError("step() after close()")
        began = time.perf_counter()
        self._version += 1
        self._gate_open = False
        if self._protected:
            try:
                self._capture_version()
            except (UnknownTypeError, UnsupportedStateError) as error:
                self._lose(str(error))
            except Exception as error:  # our own failure must not stop the training
                self._lose(f"{type(error).__name__}: {error}")
        self._ship(None)
        self._stepped = False
        if not self._first_done:
            self._first_done = True
            if self._client is not None:
                self._client.event("first_iteration", self._version, f"rank {self._rank}")
        spent = time.perf_counter() - began
        self._times.steps += 1
        self._times.step_s += spent
        if self._times.steps > 3:
            self._times.worst_step_s = max(self._times.worst_step_s, spent)

    def _complete(self) -> bool:
        """Whether the state at this `step()` is all there is: gradients that wait for an optimizer step are not
        captured."""
        scale = self._scaler.get_scale() if hasattr(self._scaler, "get_scale") else None
        before, self._last_scale = self._last_scale, scale
        replayed = self._driver is not None and self._driver.replayed(self._stepped)
        if self._stepped or replayed or scale != before:
            return True  # a lower scale: the scaler skipped the optimizer, in an iteration like any other
        grads = any(
            p.grad is not None for o in self._tree.optimizers for group in o.param_groups for p in group["params"]
        )
        if grads and not self._warned_unstepped:
            self._warned_unstepped = True
            self._say(
                f"rank {self._rank}: step() at version {self._version} without an optimizer step since the last "
                "one: accumulated gradients are not captured, so this version is not saved. Call step() once per "
                "optimizer step"
            )
        return not grads

    def _capture_version(self) -> None:
        complete, leaves, odd = False, list[Leaf](), dict[tuple[int, str, str], Any]()
        failure: Exception | None = None
        try:
            complete = self._complete()
            leaves, odd = self._tree.leaves()
        except Exception as error:
            failure = error
        # what is collective comes first, and on every rank, whatever this rank's own state is
        if self._undecided:
            try:
                if self._capture is None:
                    if not self._plan(leaves, odd, failure, ready=complete and self._stepped):
                        return
                elif failure is not None:
                    self._lose(f"{type(failure).__name__}: {failure}")
                if not self._arm():
                    return
            except Exception:
                with self._fate:  # `_plan` fails on all ranks or on none; after a failed collective there is no other
                    self._undecided, self._protected = False, self._armed != REFUSED
                raise
        if self._rhythm is not None:
            self._rhythm.step(self._version, self._under_way)
        if failure is not None:
            raise failure
        self._plan_alone()
        assert self._capture is not None and self._replicator is not None and self._rhythm is not None
        saves = self._rhythm.saves(self._version)
        if not complete:
            self._unsaved["unstepped"] = self._unsaved.get("unstepped", 0) + 1
            self._owed = self._owed or (saves and self._driver is None)
            return
        owed, self._owed = self._owed, False
        if not saves and not owed:
            return
        capture = self._capture
        late, misfits = capture.bind(leaves)
        if misfits:
            self._misfit(misfits)
            return
        self._changing.clear()
        if late and "late" not in self._unsaved:
            self._unsaved["late"] = len(late)
            self._say(
                f"rank {self._rank}: {len(late)} tensors appeared after the first step (such as {late[0].key}); "
                "they are copied at step()"
            )
        if self._driver is not None:
            self._driver.settle()
        crowded = self._under_way and (self._gate.degraded or not self._job_left or self._late)
        if crowded or (self._crowded and self._gate.degraded and self._version % _TOGETHER):
            # ranks that skip must come to skip the same versions, or none is ever sealed again
            self._crowded = True
            if self._late and clock.monotonic() - self._pacer.progress_at > self._seal_timeout_s:
                self._gate.degrade(f"nothing of version {self._job.version if self._job else 0} arrives any more")
            self._note("skipped", self._version, "the version before is still on its way")
            return
        defers = capture.defers if self._driver is None else nothing_deferred
        small = self._tree.pack_small(odd, late, self._world, capture.lifted.takes, defers)
        gone = capture.lifted.bind(small.lifted)
        if small.unplanned or late or gone:
            self._unlifted |= capture.lifted.missed(small.lifted)
            large = [tensor for name, tensor in small.unplanned.items() if name not in self._unlifted]
            large += [leaf.tensor for leaf in late if leaf.key not in self._unplanned]
            self._plan_for(large, [f"{name} is gone from the training state" for name in gone])
        if gone:
            self._note("skipped", self._version, f"{gone[0]} is not what it was when the state was dealt out")
            return
        audit = bool(self._choices.audit) and self._version % self._choices.audit == 0
        self._job = capture.snapshot(self._version, small.data, audit, small.gaps)
        self._late = self._crowded = False
        self._ship(self._job)
        self._replicator.submit(self._job)
        if self._driver is not None and self._driver.unseen:
            self._wait_left(self._job)
        if self._rhythm.scheme == "blocking":
            self._await(self._job)

    def _misfit(self, misfits: Mapping[str, str]) -> None:
        """Tensors, by name, are not what was planned: no version is saved until the state is dealt out anew. One that
        is so for a second time goes with the small state from then on. Raises StateChangedError where there is no way
        to another plan."""
        why = next(iter(misfits.values()))
        self._plan_for((), (why,))
        if self._changing != misfits.keys():
            self._changing = set(misfits)
            self._unplanned |= self._misfits & misfits.keys()
            self._misfits |= misfits.keys()
            self._say(f"rank {self._rank}: version {self._version} skipped: {why}; planning anew")
        self._unsaved["skipped"] = self._unsaved.get("skipped", 0) + 1
        if self._client is not None:
            self._client.event("skipped", self._version, f"rank {self._rank}: {why}")

    def _ship(self, job: Job | None) -> None:
        """At each step() since the ranks have begun to save, where copies go over NCCL: what this rank has of this
        version. Only the first call of a step() counts."""
        if self._driver is None or self._rhythm is None or self._undecided or not self._protected:
            return
        try:
            saves = self._rhythm.saves
            self._driver.step(self._version, job, saved=saves(self._version), following=saves(self._version + 1))
        except Exception as error:  # our own failure must not stop the training
            self._driver.fail(f"{type(error).__name__}: {error}")

    @property
    def _under_way(self) -> bool:
        """An earlier version is still on its way."""
        return self._replicator is not None and self._replicator.busy

    @property
    def _job_left(self) -> bool:
        return self._job is None or self._job.left.is_set()

    def _await(self, job: Job) -> None:
        """The training needs this version sealed (R2) before it goes on. Bounded: see `SealGate.wait`."""
        job.hurried = True
        self._pacer.wait_for()
        if not self._protected or self._late:
            return
        if self._choices.max_repeated > 1:  # nobody waits here: see Replicator._save
            if job.hopeless and not self._gate.degraded:
                self._gate.missed(job.version)
            return
        rhythm = self._rhythm
        assert rhythm is not None
        self._late = not self._gate.wait(
            job.version,
            lambda: job.hopeless or not self._protected,
            lambda: self._pacer.progress_at,
            rhythm.patience_s,
            lambda: self._pacer.arrived_at,
        )
        if not self._late or not self._protected or self._gate.degraded:
            return
        self._gate.missed(job.version)
        if not job.hopeless and not self._gate.degraded:
            rhythm.unsealed += 1
            self._tell_late(job.version)

    def _tell_late(self, version: int) -> None:
        """The training goes on without the seal that it waited for, and all else seems well (R2)."""
        why = "not sealed when the training had to go on: a failure before the next seal repeats one step more"
        if not self._told_late:
            self._told_late = True
            self._say(f"rank {self._rank}: version {version} is {why}; later ones like it are in the event log only")
        if self._client is not None:
            self._client.event("late", version, f"rank {self._rank}: {why}")

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The global optimizer pre-hook; only the first one after `step()` matters."""
        if not self._is_ours(optimizer):
            return
        self._stepped = True
        if self._gate_open or not self._protected:
            return
        self._gate_open = True
        began = time.perf_counter()
        job, rhythm = self._job, self._rhythm
        if rhythm is not None:
            rhythm.gate()
        if job is None and self._resumed_from is not None:
            # The version that was chosen may not have been sealed: until it is, it must not be the past (R2).
            self._gate.wait_for(self._resumed_from, lambda: not self._protected)
        elif job is not None and rhythm is not None:
            self._wait_left(job)
            assert self._capture is not None
            if job.version == self._version:
                for key in self._capture.audit(job):
                    self._note("changed", job.version, f"{key} changed between step() and the optimizer's step")
            if rhythm.due(job.version):
                self._await(job)
        if rhythm is not None and rhythm.scheme != "none" and self._protected:
            self._brake.hold(self._indispensable(max(rhythm.repeats, self._choices.max_repeated)))
        spent = time.perf_counter() - began
        if rhythm is not None:
            rhythm.waited(spent)
        self._times.hook_s += spent
        if self._times.steps > 3:
            self._times.worst_hook_s = max(self._times.worst_hook_s, spent)

    def _indispensable(self, repeats: int) -> tuple[int, int]:
        """The (epoch, version) without which a failure after the next step repeats more than `repeats` steps."""
        version = self._version + 1 - repeats
        resumed = self._resumed_from
        return resumed if resumed is not None and version <= resumed[1] else (self._epoch, version)

    def _wait_left(self, job: Job) -> None:
        """Until the copying thread has what it needs; a copy that has not begun in time never will."""
        if job.left.is_set():
            return
        job.wanted = True
        self._pacer.wake()
        if job.left.wait(0.0 if self._gate.degraded and not job.started else self._seal_timeout_s):
            return
        if self._gate.degraded and not job.started:
            job.left.wait(0.25)  # a healthy replicator begins within that, also on a busy node
        if not job.left.is_set() and not job.cancel():
            job.left.wait()  # a copy in memory is under way: it ends

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Registered, or at work on registered parameters (a wrapper, an optimizer in backward)."""
        if self._found_anew != self._tree.found_anew:
            self._found_anew = self._tree.found_anew
            self._foreign.clear()
        known = self._foreign.get(optimizer)
        if known is None:
            mine = {id(p.tensor) for p in self._tree.params}
            given = shares_state(optimizer, self._tree.optimizers) or any(o is optimizer for o in self._given)
            known = given or any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
            self._foreign[optimizer] = known
            if not given:
                self._tell_not_given(optimizer)
        return known

    def _tell_not_given(self, optimizer: torch.optim.Optimizer) -> None:
        self._not_given_told += 1
        if self._path and self._not_given_told <= _NOT_GIVEN:
            self._say(
                f"rank {self._rank}: a {type(optimizer).__name__} steps that was not passed: its state is not "
                "captured. Pass all optimizers of the training: Checkpointer(model, [first, second])"
            )

    def fence(self) -> None:
        """Call it before changing parameters by anything but an optimizer step (an EMA swap, clipping of weights, a
        load_state_dict): returns when the capture of the last version no longer reads them."""
        if self._protected and self._job is not None:
            if self._driver is not None:
                self._driver.fence()
            self._wait_left(self._job)

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
        if self._client is None or not self._protected or not self._version:
            why = "this training is not protected" if self._version else "no step has been completed"
            if self._rank == 0:
                self._say(f"version {self._version} is not kept as {name}: {why}")
            return False
        return keeping.keep(self._client, local.KeepVersion(self._name, self._rank, self._version, name), self._say)

    # ---- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """The training has succeeded: finish the last version, tell the agent that the memory is no longer needed.
        Bounded; may be called twice."""
        self._end(success=True)

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

    def _end(self, *, success: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        if self._rhythm is not None:
            self._rhythm.close()
        for recorder in self._tree.ddps:
            recorder.stop()
        if self._holding is not None:
            self._holding.end()
        in_peace = success and self._protected and self._armed != REFUSED
        ended = self._shut_down(CLOSE_TIMEOUT_S if in_peace else 0.0)
        if self._client is not None:
            self._client.flush()
            if success:
                finished = local.Finished(set=self._name, rank=self._rank)
                try:
                    self._client.request(finished, timeout_s=CLOSE_TIMEOUT_S)
                except (AgentLost, AgentRefused) as error:
                    self._say(f"rank {self._rank}: the agent was not told of the end: {error}")
            self._client.close()
        if success and ended:
            for keeper in self._keepers():
                keeper.close()

    def _exiting(self) -> None:
        """At interpreter exit without `close()`: hold if a node is dead, and end the threads, or Python would abort
        over them."""
        if self._closed:
            return
        if self._protected and self._holding is not None:
            self._holding.exit()
        self._end(success=False)

    @property
    def scheme(self) -> Scheme:
        """How the copies travel. Set it on all ranks between the same two steps: it counts from the next step()."""
        return self._choices.scheme if self._rhythm is None else self._rhythm.scheme

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        check_scheme(scheme)
        self._choices = replace(self._choices, scheme=scheme)
        if self._rhythm is not None:
            self._rhythm.scheme = scheme

    # ---- telling ---------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of completed `step()` calls, those before a resume included."""
        return self._version

    def report(self) -> dict[str, Any]:
        """What is captured, how it went, and what was found in the process but not given. For people and tests;
        scans all live objects, so not for every iteration."""
        tree, capture, replicator = self._tree, self._capture, self._replicator
        page = self._client.page if self._client is not None else None
        seal_wait_s = self._gate.waited_s + self._brake.waited_s if replicator else 0.0
        return {
            "state": self._state,
            "version": self._version,
            "sealed": list(page.sealed) if page is not None else None,
            "resumed_at": self._resumed_at,
            "rank": self._rank,
            "world": self._world,
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
            "unsaved": dict(self._unsaved),
            "traffic": self._rhythm.report() if self._rhythm is not None else {},
            "received": {r.rank: r.landed for r in self._receivers},
            "times": {**asdict(self._times), "seal_wait_s": seal_wait_s},
            "findings": list(self._findings),
            "not_given": self._not_given(),
        }

    def _not_given(self) -> list[str]:
        """Live objects with training state that were not passed in."""
        given = {id(o) for o in self._given}
        kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
        mine = {id(o) for o in self._tree.optimizers}
        found = []
        for o in gc.get_objects():
            if not issubclass(type(o), kinds) or id(o) in given:
                continue
            if isinstance(o, torch.optim.lr_scheduler.LRScheduler) and id(o.optimizer) not in mine:
                continue
            found.append(f"{type(o).__module__}.{type(o).__qualname__}")
        return sorted(found)


def _pre_hook(
    me: weakref.ref[Checkpointer], optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What the optimizer is called with instead, where that changes."""
    checkpointer = me()
    if checkpointer is None:
        return None
    closure = kwargs.get("closure")
    if closure is None or not checkpointer.gate_in_closure:
        checkpointer._before_optimizer(optimizer)
        return None

    def and_wait() -> Any:
        loss = closure()
        checkpointer._before_optimizer(optimizer)
        return loss

    return args, {**kwargs, "closure": and_wait}


def _at_exit(me: weakref.ref[Checkpointer]) -> None:
    checkpointer = me()
    if checkpointer is not None:
        checkpointer._exiting()
