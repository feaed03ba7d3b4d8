"""Agreement on a new plan in mid-training, after a large tensor has appeared or a replicated one has diverged.

Any rank may request a new plan. All ranks learn of the request in the same round of the collectives. They then
exchange their offers in rounds that nobody waits for, and adopt the new plan with the same version. Every version
therefore follows one plan on all ranks.

A rank that misses one of these rounds stops saving: it cannot know which plan the others follow. Without this rank no
version is sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from gemini_hpc.train.state.divergence import Divergence

_FIRST_PAUSE, _MOST_PAUSE = 8, 1024  # versions
_NAMES = 3  # of tensors, named in a message
NOT_WANTED, WANTED, CLOSELY = 0, 1, 2


class Replanning:
    """A rank's part in the rounds that agree on a new plan, used by the training's thread."""

    def __init__(
        self,
        divergence: Divergence,
        *,
        build_offer: Callable[[bool], bytes],
        adopt_offers: Callable[[Sequence[bytes]], None],
        end_protection: Callable[[str], None],
        list_tensors: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """Create the rank's part, with no request pending.

        Args:
            divergence: Comparison of the tensors that are replicated under the current plan.
            build_offer: Returns this rank's offer as bytes. Its argument is whether to fingerprint whole tensors
                instead of a few elements.
            adopt_offers: Adopts the new plan that follows from the offers of all ranks.
            end_protection: Ends the protection, for the given reason.
            list_tensors: Returns the tensors that may have to be compared now, by key.
        """
        self._divergence = divergence
        self._build_offer, self._adopt_offers, self._end_protection, self._list_tensors = (
            build_offer,
            adopt_offers,
            end_protection,
            list_tensors,
        )
        self._wanted = NOT_WANTED
        self._next, self._pause = 0, _FIRST_PAUSE
        self.under_way = False
        self.differed = False  # replicated tensors differed in the last round
        self.closely = False  # a copy differed on some rank: compare whole tensors
        self.reason = ""  # for the last new plan

    def request_plan(self, version: int, *, at_once: bool = False) -> None:
        """Request a new plan, because this rank has state that the plan does not cover.

        The request is ignored for some versions after the last new plan. at_once overrides this, for a rank that can
        save no version before.
        """
        if at_once or version >= self._next:
            self._wanted = max(self._wanted, WANTED)

    def request_comparison(self) -> None:
        """Request a comparison of every byte of the replicated tensors."""
        self._wanted = CLOSELY

    @property
    def wanted(self) -> bool:
        """Return whether this rank requests a new plan."""
        return self._wanted != NOT_WANTED

    def list_words(self) -> list[int]:
        """Return this rank's numbers for a round."""
        return [self._wanted, *self._divergence.compute_words(self._list_tensors())]

    @property
    def count(self) -> int:
        """Return how many numbers `list_words` has; the same on all ranks."""
        return 1 + self._divergence.count

    def on_round(self, words: Sequence[int]) -> bool:
        """Process the result of a round. Return whether all ranks plan anew."""
        differs = self.differed = Divergence.shows_difference(words[1:])
        self.closely = words[0] >= CLOSELY
        if not differs and not self.closely:
            self.reason = "tensors have appeared or changed"
        self.under_way = bool(words[0]) or differs
        return self.under_way

    def build_offer(self) -> bytes:
        """Return this rank's offer for the round of offers."""
        return self._build_offer(self.closely)

    def adopt_offers(self, offers: Sequence[bytes], version: int) -> None:
        """Adopt the plan that follows from all ranks' offers."""
        self._wanted, self.under_way = NOT_WANTED, False
        self._next, self._pause = version + self._pause, min(_MOST_PAUSE, 4 * self._pause)
        self._adopt_offers(offers)

    def record_reason(self, apart: Collection[str], *, named: bool) -> None:
        """Record the reason for the new plan after the offers were compared.

        Nothing is recorded unless tensors or copies had differed.

        Args:
            apart: Keys of tensors that each rank saves for itself from now on.
            named: Whether these tensors differ now; else it is unknown which of them differed.
        """
        if not self.differed and not self.closely:
            return
        if apart:
            names = sorted(apart)
            more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
            what = f"{', '.join(names[:_NAMES])}{more}" if named else "a replicated tensor"
            self.reason = f"no longer the same on all ranks, so each rank saves its own: {what}"
        else:
            self.reason = "a copy differed from its home's, but all replicated tensors are the same on all ranks now"

    def set_divergence(self, divergence: Divergence) -> None:
        """Compare the tensors that are replicated under the new plan."""
        self._divergence = divergence

    def break_off(self, reason: str) -> None:
        """End the protection if a new plan is being agreed on, because there are no more rounds."""
        if self.under_way:
            self._end_protection(f"the ranks could not agree on a new plan: {reason}")
