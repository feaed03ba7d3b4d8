"""Whether a training is protected: the verdict of all its ranks, and what one may learn before they have it."""

from __future__ import annotations

import threading


class Verdict:
    """Of one rank. While it is `awaited` the ranks still have to agree, in a collective of each step, and this rank
    goes there as all others do, whatever has become of its own part; afterwards each falls out by itself."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # for whoever must not be overtaken by the end of protection
        self.protected = False
        self.awaited = False
        self.ready = False  # this rank could begin
        self.refused = False  # this rank will not take part

    def hope(self) -> None:
        """The agents have taken this rank in."""
        self.protected = self.awaited = True

    def withdraw(self) -> None:
        """There is nothing to agree on any more, nor any protection, until the next `hope`."""
        self.protected = self.awaited = False

    def lose(self) -> bool:
        """Protection is to end. False where that is known."""
        with self.lock:
            if not self.protected or self.refused:
                return False
            if self.awaited:
                self.refused = True
            else:
                self.protected = False
            return True

    def prepared(self) -> None:
        """This rank could begin, unless it has refused meanwhile."""
        with self.lock:
            self.ready = self.ready or not self.refused

    def settle(self) -> bool:
        """All ranks could begin; whether this one still can: what went wrong since then ends protection here only."""
        with self.lock:
            self.awaited = False
            self.protected, self.ready = not self.refused, True
            self.refused = False
            return self.protected

    def fall_back(self) -> None:
        """The ranks could not even talk about it: each for itself from now on."""
        with self.lock:
            self.awaited, self.protected = False, not self.refused

    @property
    def word(self) -> int:
        """What this rank tells the others: 1: it could begin, 0: not yet, -1: it will not."""
        return -1 if self.refused else int(self.ready)

    def reject(self) -> bool:
        """A rank has refused, so nobody is protected; whether this one did."""
        with self.lock:
            self.awaited = self.protected = False
            mine, self.refused = self.refused, True
            return mine
