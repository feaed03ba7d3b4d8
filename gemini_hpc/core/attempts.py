"""The attempts of one job step, as its launchers and their agents know them (`gemini_hpc.launch`).

All ranks of a step must be in the same attempt. A later attempt replaces an earlier one, but the ends are kept.
Knowledge only grows, and two parties that exchange theirs know the same afterwards (a join). Messages about it may
therefore arrive in any order, twice, or late.

Each attempt has one end: the end of the rank that failed first, by the strongest sign (`core.culprits`). The end may
become known after the next attempt has begun, because a rank that failed as a consequence may be reported first.

The launcher of a failed rank reports the end of attempt k and learns how attempt k - 1 ended. With the same key at
both ends no attempt follows, and `gemini-hpc run` starts no other step. Otherwise attempt k + 1 begins, unless a rank
has succeeded. If k is past, only its end may change, so ranks that fail of one cause begin one attempt. A rank that
failed as a consequence waits a moment (`launch.launcher.TOLD_S`), so that the cause is reported first.

The ranks' hello names the launch `STEP+k`. The agents therefore begin a recovery round for each attempt.
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
    """The end of an attempt, caused by one rank or node.

    Attributes:
        text: Description for people; "" if the end is unknown.
        cause: Sign that the rank's end shows.
        rank: Rank that ended.
        status: Exit status of the rank, as a shell reports it.
        host: Node of the rank.
        key: Equal for two ends with one cause in the program, such as an exception at one place and step; "" if
            unknown.
        memory: True if the rank used more memory than its limit.
        t: Time of the end (Unix time in seconds), by the clock of its node.
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
        """Return the sort key of ends of one attempt: the strongest sign wins, then the earliest time."""
        least = self.status, self.text, self.host, self.key
        return bool(self.text), self.cause, self.memory, -self.t, -self.rank, *least

    def join(self, other: End) -> End:
        """Return the end that counts, of the two."""
        return max(self, other, key=lambda end: end.weight)

    def repeats(self, before: End) -> bool:
        """Return whether the program ended the same way in the attempt before."""
        return bool(self.key) and self.key == before.key


NOTHING = End()


@dataclass(frozen=True, slots=True)
class Known:
    """The knowledge of one launcher or agent about the attempts of a step.

    Attributes:
        attempt: Attempt in which all ranks must be.
        first: End of the attempt before this one.
        before: End of the attempt before `first`.
        over: Reason why no further attempt follows; "" while one may follow.
        last: End of this attempt, if it has ended.
        given_up: True if the step must not be started again, because the same end would follow.
        done: True if a rank has ended with success. It would be missing in another attempt.
    """

    attempt: int = 0
    first: End = NOTHING
    before: End = NOTHING
    over: str = ""
    last: End = NOTHING
    given_up: bool = False
    done: bool = False

    @property
    def reason(self) -> str:
        """Return why the previous attempt ended."""
        return self.first.text

    @property
    def why_over(self) -> str:
        """Return why no attempt follows, with the rank that caused this; "" while an attempt may follow."""
        text = self.ending.text
        return f"{text}; {self.over}" if self.over and text else self.over

    @property
    def ending(self) -> End:
        """Return the end of the latest attempt that has ended.

        Another attempt may have begun before the end of this attempt was judged.
        """
        return self.last if self.last.text else self.first

    def join(self, other: Known) -> Known:
        """Return the combined knowledge of both."""
        late, early = (self, other) if self.attempt >= other.attempt else (other, self)
        shift = late.attempt - early.attempt  # each side knows three attempts
        ends = [NOTHING] * min(shift, 3) + [early.last, early.first, early.before]
        last, first, before = (a.join(b) for a, b in zip((late.last, late.first, late.before), ends, strict=False))
        given_up, over = max((self.given_up, self.over), (other.given_up, other.over))
        return Known(late.attempt, first, before, over, last, given_up, self.done or other.done)

    def add_failure(self, attempt: int, end: End) -> Known:
        """Return this knowledge after a rank ended without success in `attempt`.

        The next attempt begins, unless it has begun already, the step is over, or another rank has ended with
        success.
        """
        if attempt < self.attempt or self.over:
            return self.add_end(attempt, end)
        if self.done:
            return replace(self.add_end(attempt, end), over="another rank has already ended with success")
        return self.join(Known(attempt + 1, end))

    def add_end(self, attempt: int, end: End) -> Known:
        """Return this knowledge with one more end of `attempt`, whichever rank caused the failure.

        The end changes no attempt. It is joined with the known ends of this attempt or of the attempt before.
        """
        if attempt == self.attempt:
            return replace(self, last=self.last.join(end))
        return self.join(Known(attempt + 1, end)) if attempt == self.attempt - 1 else self
