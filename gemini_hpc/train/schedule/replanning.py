"""Planning anew in mid-training: where a large tensor has appeared, or one is no longer the same on all ranks.

Any rank may want it. All hear so in the same round of words; then they exchange what each of them has, in rounds that
nobody waits for, and take the new plan with the same version. A version is therefore of one plan on all ranks. A rank
that misses one of these rounds saves nothing any more: it cannot know which plan the others follow, and without it no
version is sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from gemini_hpc.train.state.divergence import Divergence

_FIRST_PAUSE, _MOST_PAUSE = 8, 1024  # versions
_NAMES = 3  # of tensors, in a line
NOT_WANTED, WANTED, CLOSELY = 0, 1, 2


class Replanning:
    """What a rank says about it in rounds of words, and does when they are over. Called by the training's thread.

    offer(closely): what this rank has, as bytes, with fingerprints of a few elements or of whole tensors; adopt: the
    new plan, from what all have offered; lose: protection ends; tensors: what may have to be compared, by key, now.
    """

    def __init__(
        self,
        divergence: Divergence,
        *,
        offer: Callable[[bool], bytes],
        adopt: Callable[[Sequence[bytes]], None],
        lose: Callable[[str], None],
        tensors: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self._divergence = divergence
        self._offer, self._adopt, self._lose, self._tensors = offer, adopt, lose, tensors
        self._wanted = NOT_WANTED
        self._next, self._pause = 0, _FIRST_PAUSE
        self.under_way = False
        self.differed = False  # replicated tensors did, which is why
        self.closely = False  # a copy did, wherever that was
        self.reason = ""  # of the last one

    def want(self, version: int, *, at_once: bool = False) -> None:
        """This rank has something that the plan does not know. Not heeded right after the last time, unless at_once:
        no version can be saved before."""
        if at_once or version >= self._next:
            self._wanted = max(self._wanted, WANTED)

    def look_closely(self) -> None:
        """Every byte of what is replicated has to be compared."""
        self._wanted = CLOSELY

    @property
    def wanted(self) -> bool:
        """Whether this rank wants it."""
        return self._wanted != NOT_WANTED

    def words(self) -> list[int]:
        """For a round."""
        return [self._wanted, *self._divergence.words(self._tensors())]

    @property
    def count(self) -> int:
        """How many words these are; the same on all ranks."""
        return 1 + self._divergence.count

    def hear(self, words: Sequence[int]) -> bool:
        """What a round came to: whether all ranks plan anew."""
        differs = self.differed = Divergence.differs(words[1:])
        self.closely = words[0] >= CLOSELY
        if not differs and not self.closely:
            self.reason = "tensors have appeared or changed"
        self.under_way = bool(words[0]) or differs
        return self.under_way

    def offer(self) -> bytes:
        """For the round of offers."""
        return self._offer(self.closely)

    def take(self, offers: Sequence[bytes], version: int) -> None:
        """All offers are here."""
        self._wanted, self.under_way = NOT_WANTED, False
        self._next, self._pause = version + self._pause, min(_MOST_PAUSE, 4 * self._pause)
        self._adopt(offers)

    def found(self, apart: Collection[str], *, named: bool) -> None:
        """What the offers have shown, where ranks differed: keys that are each rank's own from now on. named: they do
        differ now; else it is not known which of them did."""
        if not self.differed and not self.closely:
            return
        if apart:
            names = sorted(apart)
            more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
            what = f"{', '.join(names[:_NAMES])}{more}" if named else "a replicated tensor"
            self.reason = f"no longer the same on all ranks, so each rank saves its own: {what}"
        else:
            self.reason = "a copy differed from its home's, but all replicated tensors are the same on all ranks now"

    def follow(self, divergence: Divergence) -> None:
        """Compare what is shared in the new plan."""
        self._divergence = divergence

    def broken(self, reason: str) -> None:
        """There are no rounds any more."""
        if self.under_way:
            self._lose(f"the ranks could not agree on a new plan: {reason}")
