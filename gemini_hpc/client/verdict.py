"""The ranks' verdict on whether a training is protected, and each rank's state before the verdict."""

from __future__ import annotations

import threading


class StartVerdict:
    """A rank's view of the verdict.

    While the verdict is `awaited`, the ranks still have to agree in a collective of each step. This rank takes part
    even if its own protection has failed. Afterwards each rank loses protection by itself.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held by code that the end of protection must not overtake
        self.protected = False
        self.awaited = False
        self.ready = False  # this rank is able to begin
        self.refused = False  # this rank will not take part

    def record_acceptance(self) -> None:
        """Record that the agents accept this rank."""
        self.protected = self.awaited = True

    def withdraw(self) -> None:
        """End protection and the wait for a verdict until the next `record_acceptance`."""
        self.protected = self.awaited = False

    def end_protection(self) -> bool:
        """End protection; return False if it had ended already."""
        with self.lock:
            if not self.protected or self.refused:
                return False
            if self.awaited:
                self.refused = True
            else:
                self.protected = False
            return True

    def record_prepared(self) -> None:
        """Record that this rank is able to begin, unless it has refused meanwhile."""
        with self.lock:
            self.ready = self.ready or not self.refused

    def record_ready(self) -> bool:
        """Record that all ranks are able to begin; return whether this one still is.

        A failure of this rank since its last vote ends protection on this rank only.
        """
        with self.lock:
            self.awaited = False
            self.protected, self.ready = not self.refused, True
            self.refused = False
            return self.protected

    def fall_back(self) -> None:
        """Decide for this rank alone, because the ranks could not even exchange their votes."""
        with self.lock:
            self.awaited, self.protected = False, not self.refused

    @property
    def vote(self) -> int:
        """Return this rank's vote: 1: able to begin, 0: not yet, -1: refused."""
        return -1 if self.refused else int(self.ready)

    def reject(self) -> bool:
        """Record that a rank has refused, so no rank is protected; return whether this rank did."""
        with self.lock:
            self.awaited = self.protected = False
            had_refused, self.refused = self.refused, True
            return had_refused
