"""The plan of which rank keeps which state, made by all ranks in the first `step()`.

The ranks plan again when the state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from gemini_hpc.client.session import RankSession
from gemini_hpc.train.schedule.replanning import Replanning
from gemini_hpc.train.schedule.traffic import Traffic
from gemini_hpc.train.state import collectives, ownership
from gemini_hpc.train.state.capture import Capture
from gemini_hpc.train.state.divergence import Divergence
from gemini_hpc.train.state.layout import Draft, Plan, lay_out
from gemini_hpc.train.state.lifted import LEAST_BYTES
from gemini_hpc.train.state.ownership import TensorEntry
from gemini_hpc.train.state.source import StateChangedError
from gemini_hpc.train.state.tensors import get_local
from gemini_hpc.train.state.tree import Leaf, StateDictError, StateTree
from gemini_hpc.train.uncaptured import Uncaptured


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """A rank's tensors for the other ranks and, in the first `step()`, the size of its slot.

    Attributes:
        ready: The rank has all its tensors now.
        sentences: Sentences for the user, as for `Session.say_shared`.
    """

    ready: bool = True
    problem: str = ""
    entries: list[TensorEntry] = []
    total_bytes: int = 0
    sentences: list[str] = []


class _OfferError(Exception):
    """The failure of a rank to take part in a new plan."""


@dataclass(frozen=True)
class FirstPlan:
    """The result of the first planning.

    Attributes:
        plan: This rank's plan.
        gathered: The tensors of every rank.
        totals: Bytes of every rank's slot.
        tensors: This rank's parts of the tensors.
    """

    plan: Plan
    gathered: list[list[TensorEntry]]
    totals: list[int]
    tensors: list[torch.Tensor]


class Planning:
    """A rank's part in planning."""

    def __init__(
        self,
        session: RankSession,
        tree: StateTree,
        traffic: Traffic,
        ownership_mode: ownership.Ownership,
        find_group: Callable[[], dist.ProcessGroup | None],
    ) -> None:
        """Create the planning of one rank.

        Args:
            session: The rank's session with its agent.
            tree: The state to divide.
            traffic: Settings of how the copies travel.
            ownership_mode: Division of replicated state among the ranks.
            find_group: Returns the group of the ranks' control messages, once it exists.
        """
        self._session, self._tree, self._transport, self._ownership_mode = (
            session,
            tree,
            traffic.transport,
            ownership_mode,
        )
        self._find_group = find_group
        self.capture: Capture | None = None
        self.kept_capacity = 0  # capacity for the small state in the version that was resumed from
        self.replanning: Replanning | None = None
        self.unlifted: set[str] = set()  # large tensors of the small state that do not keep their shape
        self.unplanned: set[str] = set()  # other tensors whose shape changed twice: now part of the small state
        self._misfits: set[str] = set()  # tensors whose shape changed once
        self._changing: set[str] = set()  # names that do not fit the plan now
        self._layout_bytes = 0  # bytes of a slot, as planned
        self._apart: frozenset[str] = frozenset()  # state that ranks have under one name, with different content
        self._draft: Draft | None = None  # the draft offered for a new plan
        self._reported: set[str] = set()

    # ---- the first plan --------------------------------------------------------------------------------

    def plan_first(
        self,
        leaves: list[Leaf],
        odd: dict[tuple[int, str, str], Any],
        failure: Exception | None,
        *,
        ready: bool,
        uncaptured: Uncaptured,
    ) -> FirstPlan | None:
        """Plan the owners and the layout with all ranks, and return the plan, or None if a rank is not ready.

        Collective, in each `step()` until every rank is ready: optimizer state exists only after a real step.

        Args:
            leaves: This rank's tensors.
            odd: Optimizer state that is no tensor, by (optimizer, parameter, name).
            failure: An earlier failure on this rank.
            ready: This rank's state is complete.
            uncaptured: Findings to report together.

        Raises:
            Exception: This rank has failed.
            RuntimeError: Another rank has failed. All ranks raise, because they would wait for the failed rank
                otherwise.
        """
        draft = Draft([], [], [], 0)
        if failure is None:
            try:
                draft = Draft.from_tree(
                    self._tree, leaves, odd, self._session.world, lifting=self._transport != "nccl"
                )
            except StateDictError as error:
                self.skip_without_state(error)
                ready = False
            except Exception as error:
                failure = error
        sentences = uncaptured.pop_sentences()
        offers = self._exchange_offers(
            _Offer(ready=ready, entries=draft.shared if ready else [], sentences=sentences), failure
        )
        self._session.say_shared([o.sentences for o in offers])
        if not all(o.ready for o in offers):
            return None
        gathered = [o.entries for o in offers]
        total_bytes = 0
        try:
            plan = self._lay_out(draft, gathered)
            total_bytes = plan.layout.total
        except Exception as error:
            failure = error
        offers = self._exchange_offers(
            _Offer(total_bytes=total_bytes, sentences=uncaptured.find_when_planned()), failure
        )
        self._session.say_shared([o.sentences for o in offers])
        totals = [o.total_bytes for o in offers]
        self.capture, self._layout_bytes, self._apart = plan.capture, total_bytes, plan.alone
        for recorder in self._tree.ddps:
            recorder.stop()
        return FirstPlan(plan, gathered, totals, [get_local(leaf.tensor) for leaf in leaves])

    def _lay_out(
        self,
        draft: Draft,
        gathered: list[list[TensorEntry]],
        *,
        least_bytes: int = 0,
        apart: frozenset[str] = frozenset(),
    ) -> Plan:
        return lay_out(
            draft,
            gathered,
            self._session.rank,
            self._ownership_mode,
            self._tree.aliases,
            self.kept_capacity,
            least_bytes=least_bytes,
            apart=apart,
        )

    def _exchange_offers(self, offer: _Offer, failure: Exception | None) -> list[_Offer]:
        """Exchange offers with all ranks and return every rank's offer. Collective.

        Raises:
            Exception: The failure of this rank.
            RuntimeError: Another rank has a failure.
        """
        session = self._session
        if failure is not None:
            offer = _Offer(problem=f"rank {session.rank}: {failure}")
        offers = [offer]
        if session.world > 1:
            parts = collectives.gather_bytes(msgspec.msgpack.encode(offer), self._find_group())
            offers = [msgspec.msgpack.decode(part, type=_Offer) for part in parts]
        if failure is not None:
            raise failure
        problem = next((o.problem for o in offers if o.problem), "")
        if problem:
            raise RuntimeError(problem)
        return offers

    # ---- planning anew ---------------------------------------------------------------------------------

    def allow_replanning(
        self, gathered: list[list[TensorEntry]], alone: frozenset[str], follow: Callable[[Plan], None]
    ) -> None:
        """Allow that another plan follows the current one from now on.

        Args:
            gathered: The tensors of every rank.
            alone: Keys of tensors that are each rank's own.
            follow: Called with each later plan.
        """
        self.replanning = Replanning(
            Divergence(gathered, alone, self._session.rank),
            build_offer=self._offer_plan,
            adopt_offers=partial(self._adopt_plan, follow),
            end_protection=self._session.end_protection,
            list_tensors=self._collect_tensors,
        )

    def request_plan(self, tensors: Iterable[torch.Tensor], misfits: Sequence[str] = (), *, agrees: bool) -> None:
        """Request another plan for tensors that have no place in the present one.

        Args:
            tensors: Tensors without a place in the plan.
            misfits: Faults of other tensors, with which no version can be captured.
            agrees: The ranks can agree on another plan.

        Raises:
            StateChangedError: There are misfits and no way to another plan.
        """
        large = [t for t in tensors if t.numel() * t.element_size() >= LEAST_BYTES]
        able = self._session.world == 1 or agrees
        if misfits and not (able and self.replanning is not None):
            raise StateChangedError(f"{misfits[0]}, and the ranks cannot plan anew here")
        if self.replanning is not None and (large or misfits):
            self.replanning.request_plan(self._session.version, at_once=bool(misfits))

    def record_mismatches(self, names: Iterable[str]) -> bool:
        """Record the tensors that do not fit the plan and return whether this is news.

        A tensor that misfits for the second time belongs to the small state from then on.
        """
        found = set(names)
        if self._changing == found:
            return False
        self._changing = found
        self.unplanned |= self._misfits & found
        self._misfits |= found
        return True

    def skip_without_state(self, error: StateDictError) -> None:
        """Skip a version that lacks the state of an object. Report each object's mistake once."""
        session, why = self._session, str(error)
        if why not in self._reported:
            self._reported.add(why)
            session.record_finding(why)
            session.say(
                f"rank {session.rank}: version {session.version} is not saved: {why}; protection goes on with the "
                "next version"
            )
        session.count_unsaved("skipped")
        session.report_version("skipped", session.version, why)

    def record_fit(self) -> None:
        """Record that all tensors are as planned."""
        self._changing.clear()

    def replan_alone(self) -> None:
        """Plan again at once if the training has a single rank, which needs no agreement."""
        if self._session.world == 1 and self.replanning is not None and self.replanning.wanted:
            self.replanning.on_round([1])
            self.replanning.adopt_offers([self.replanning.build_offer()], self._session.version)

    def _collect_tensors(self) -> dict[str, torch.Tensor]:
        leaves, _ = self._tree.find_leaves()
        return {leaf.key: get_local(leaf.tensor) for leaf in leaves}

    def _offer_plan(self, closely: bool) -> bytes:
        self._draft = None
        try:
            leaves, odd = self._tree.find_leaves()
            self._draft = Draft.from_tree(
                self._tree,
                [leaf for leaf in leaves if leaf.key not in self.unplanned],
                odd,
                self._session.world,
                lifting=True,
                unlifted=self.unlifted,
                closely=closely,
            )
            offer = _Offer(entries=self._draft.shared)
        except StateDictError as error:
            self.skip_without_state(error)
            offer = _Offer(ready=False)
        except Exception as error:  # all ranks receive the problem
            offer = _Offer(problem=f"rank {self._session.rank}: {error}")
        return msgspec.msgpack.encode(offer)

    def _adopt_plan(self, follow: Callable[[Plan], None], offered: Sequence[bytes]) -> None:
        """Adopt the new plan from the next version on. Never raises."""
        try:
            self._adopt_offers(follow, offered)
        except Exception as error:
            known = isinstance(error, _OfferError)
            self._session.end_protection(str(error) if known else f"{type(error).__name__}: {error}")

    def _adopt_offers(self, follow: Callable[[Plan], None], offered: Sequence[bytes]) -> None:
        session, replanning = self._session, self.replanning
        assert replanning is not None and self._layout_bytes
        draft, self._draft = self._draft, None
        offers = [msgspec.msgpack.decode(part, type=_Offer) for part in offered]
        if not all(offer.ready for offer in offers):  # an object has not returned its state
            replanning.request_plan(session.version, at_once=True)
            return
        problem = next((offer.problem for offer in offers if offer.problem), "")
        if problem or draft is None:
            raise _OfferError(problem or "this rank has made no offer for a new plan")
        gathered = [offer.entries for offer in offers]
        plan = self._lay_out(draft, gathered, least_bytes=self._layout_bytes, apart=self._apart)
        named = plan.alone != self._apart
        if replanning.differed and not named:  # the place of the difference no longer shows: local steps have met
            apart = self._apart | ownership.find_fingerprinted(gathered)
            plan = self._lay_out(draft, gathered, least_bytes=self._layout_bytes, apart=apart)
        replanning.record_reason(plan.alone - self._apart, named=named)
        plan = replace(plan, since=session.version - 1)
        if self.capture is not None:
            plan.capture.learn_from(self.capture)
        self._apart = plan.alone
        self.capture, self._layout_bytes = plan.capture, plan.layout.total
        follow(plan)
        replanning.set_divergence(Divergence(gathered, plan.alone, session.rank))
        session.record_finding(f"version {session.version}: new plan: {replanning.reason}")
        session.say_once(f"new plan from version {session.version} on: {replanning.reason}")
        session.record_event("planned", f"rank {session.rank}: {replanning.reason}")
