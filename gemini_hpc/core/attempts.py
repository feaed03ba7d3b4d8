"""The attempts of one job step, as its launchers and their agents know them (`gemini_hpc.launch`).

All ranks of a step are to be in the same attempt. An attempt gives way to a later one, and the end of them stays:
what is known only grows, and two who know different things know the same after each has heard the other (a join). So
it may be passed on in any order, twice, or late.

Each attempt has one end: that of the rank that failed first, by the strongest sign (`core.culprits`). It may become
known after the next attempt has begun, for a rank that fails of another one may be heard first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from gemini_hpc.core.culprits import Cause
from gemini_hpc.core.numbers import Count, Time

Text = Annotated[str, msgspec.Meta(max_length=300)]
Status = Annotated[int, msgspec.Meta(ge=0, le=255)]


@dataclass(frozen=True, slots=True)
class End:
    """The end of an attempt by one rank or node.

    text: for people, "" where nothing is known; status: the rank's, as a shell has it; host: its node.
    key: the same for two ends that have one cause in the program, such as an exception at one place and step; ""
    where nothing is said of that. memory: it was more than the rank may have. t: when (Unix time), by its own clock.
    """

    text: Text = ""
    cause: Cause = Cause.CONSEQUENCE
    rank: Count = 0
    status: Status = 0
    host: Text = ""
    key: Text = ""
    memory: bool = False
    t: Time = 0.0

    @property
    def weight(self) -> tuple[bool, Cause, bool, float, int, int, str, str, str]:
        """The order of ends of one attempt: the strongest sign, of equals the earliest."""
        least = self.status, self.text, self.host, self.key
        return bool(self.text), self.cause, self.memory, -self.t, -self.rank, *least

    def join(self, other: End) -> End:
        """Return the one that counts."""
        return max(self, other, key=lambda end: end.weight)

    def repeats(self, before: End) -> bool:
        """Return whether the program has ended so in the attempt before, too."""
        return bool(self.key) and self.key == before.key


NOTHING = End()


@dataclass(frozen=True, slots=True)
class Known:
    """attempt: in which all ranks are to be; first: how the one before ended, before: the one before that. over: why
    no other one follows, last: how this one ended then; given_up: nobody is to start the step again, for the same
    would happen. done: a rank has ended with success, and would be missing in another attempt."""

    attempt: int = 0
    first: End = NOTHING
    before: End = NOTHING
    over: str = ""
    last: End = NOTHING
    given_up: bool = False
    done: bool = False

    @property
    def reason(self) -> str:
        """Return why the attempt before ended."""
        return self.first.text

    @property
    def why_over(self) -> str:
        """Return why no attempt follows, with the rank of which that came; "" while one may."""
        text = self.ending.text
        return f"{text}; {self.over}" if self.over and text else self.over

    @property
    def ending(self) -> End:
        """Return how the last attempt ended that has ended: another one may have begun before its end was judged."""
        return self.last if self.last.text else self.first

    def join(self, other: Known) -> Known:
        """Return what both know."""
        late, early = (self, other) if self.attempt >= other.attempt else (other, self)
        shift = late.attempt - early.attempt  # each knows of three attempts
        ends = [NOTHING] * min(shift, 3) + [early.last, early.first, early.before]
        last, first, before = (a.join(b) for a, b in zip((late.last, late.first, late.before), ends, strict=False))
        given_up, over = max((self.given_up, self.over), (other.given_up, other.over))
        return Known(late.attempt, first, before, over, last, given_up, self.done or other.done)

    def failed(self, attempt: int, end: End) -> Known:
        """Return this where a rank has ended without success in an attempt: the next one begins, if it has not."""
        if attempt < self.attempt or self.over:
            return self.showed(attempt, end)
        if self.done:
            return replace(self.showed(attempt, end), over="another rank has already ended with success")
        return self.join(Known(attempt + 1, end))

    def showed(self, attempt: int, end: End) -> Known:
        """Return this where a rank has ended so, whoever fails of it."""
        if attempt == self.attempt:
            return replace(self, last=self.last.join(end))
        return self.join(Known(attempt + 1, end)) if attempt == self.attempt - 1 else self
