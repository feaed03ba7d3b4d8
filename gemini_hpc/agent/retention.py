"""The decision when an agent's memory is freed after its job has ended on its node.

The memory is kept for the job's next incarnation, which may come. With a tier, unsaved versions are saved first,
unless the node needs the memory at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gemini_hpc import clock
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.replicas.memory import Budget
from gemini_hpc.agent.tier.tier_parts import TierParts

_LOOK_S = 0.2  # a save takes seconds: its end is noticed soon enough
_EMPTY_S = 30.0  # a requeue within this time still finds the agent
_JUST_S = 180.0  # Slurm ends a job on all of its nodes within this time: until then a death may still be news
_SPILL_FLOOR = 0.5  # fraction of the floor that suffices while the last version is being written

Action = Literal["stay", "release", "save", "salvage"]


@dataclass(frozen=True)
class MemoryFacts:
    """The facts on which the decision depends.

    Attributes:
        ended_s: Seconds since the job ended here.
        kept_s: Seconds for which the memory is kept.
        unsaved_s: Seconds after which the remaining nodes save unsaved versions by themselves; 0 means never.
        waits: The job is pending.
        succeeded: The job's training has succeeded.
        holds: Memory is in use.
        short: The node's memory is short, for the present activity.
        saving: The versions held are being saved to the tier, or may soon be.
        unsaved: A node is missing, and no agent saves the versions that the remaining nodes could save.
    """

    ended_s: float
    kept_s: float
    unsaved_s: float
    waits: bool = False
    succeeded: bool = False
    holds: bool = True
    short: bool = False
    saving: bool = False
    unsaved: bool = False


def decide(held: MemoryFacts) -> tuple[Action, str]:
    """Return the action for the held memory, and its reason.

    `save` means: free the memory, unless it must be saved first.
    """
    if held.succeeded and not held.saving:  # only versions to be kept have delayed this end
        return "release", "the training succeeded"
    if not held.holds and held.ended_s > _EMPTY_S and not held.saving:
        return "release", "it holds nothing"
    if held.short and held.saving:
        return "release", "the node's free memory has fallen far below the floor"
    if held.short:
        return "save", "the node's free memory has fallen below the floor"
    if held.ended_s > held.kept_s and not held.saving:
        waited = f"the job has been held, or has waited, for {held.kept_s:g} s" if held.waits else ""
        return "save", waited or f"the retention time of {held.kept_s:g} s is over"
    if held.ended_s > held.unsaved_s > 0 and held.unsaved:
        return "salvage", ""
    return "stay", ""


class Retention:
    """An agent's decision about its memory after the job's end."""

    def __init__(
        self,
        context: AgentContext,
        budget: Budget,
        tier: TierParts,
        on_release: Callable[[str], None],
        now: float,
    ) -> None:
        """Create the decision's state at the agent's start.

        Args:
            context: The agent's context.
            budget: Memory in use.
            tier: The agent's part in saves to the tier.
            on_release: Called once, with the reason, when all memory is about to be freed.
            now: The time, in monotonic seconds.
        """
        self._settings, self._membership, self._spawn = context.settings, context.membership, context.spawn
        self._tier, self._saver, self._salvage = tier.choice, tier.saver, tier.salvage
        self._budget, self._on_release = budget, on_release
        self._ended_at = now
        self._waits = False
        self._unwanted_since: float | None = None  # since when the memory should be freed
        self._leaving = False
        self.over = asyncio.Event()

    # ---- what happens to the job -----------------------------------------------------------------------

    def note_attach(self) -> None:
        """Note that an incarnation begins."""
        self._waits = False

    def note_running(self, now: float) -> None:
        """Note that an incarnation is running. Called a few times a second."""
        self._ended_at, self._unwanted_since = now, None

    def note_end(self, now: float) -> None:
        """Note that the job has ended here."""
        self._ended_at = now

    def compute_ended_s(self, now: float) -> float:
        """Return the seconds since the job's end here."""
        return now - self._ended_at

    def note_pending(self) -> None:
        """Note that the job is pending."""
        self._waits = self._membership.detached

    def explain_refusal(self) -> str:
        """Return the reason why no other job may take the memory, or ""."""
        if not self._membership.detached:
            return "the job still runs"
        return "the job waits to run again" if self._waits else ""

    def has_just_ended(self, now: float) -> bool:
        """Return whether the job has ended here a short while ago and is not pending again."""
        return not self._waits and now - self._ended_at < _JUST_S

    # ---- how long --------------------------------------------------------------------------------------

    @property
    def _kept_s(self) -> float:
        """Return for how many seconds the memory stays after the job's end here.

        With a tier the last version is saved there, so a pending job needs no longer time.
        """
        settings = self._settings
        longer = self._waits and not self._tier.directory
        return max(settings.retention_s, settings.held_retention_s) if longer else settings.retention_s

    def compute_kept_until(self) -> float:
        """Return when the memory is freed, unless the job comes back (monotonic seconds)."""
        return self._ended_at + self._kept_s

    def check_memory(self, now: float) -> None:
        """Decide about the memory. Called a few times a second while the job does not run here."""
        # a salvage that is due counts as saving only from its start on
        saving = self._is_saving(now) and not self._salvage.is_due(now, last=True)
        holds = bool(self._budget.taken_bytes)
        action, reason = decide(
            MemoryFacts(
                now - self._ended_at,
                self._kept_s,
                self._settings.tier_salvage_s,
                waits=self._waits,
                succeeded=self._saver.succeeded,
                holds=holds,
                short=holds and self._budget.is_below_floor(_SPILL_FLOOR if saving else 1.0),
                saving=saving,
                unsaved=self._salvage.is_due(now),
            )
        )
        if action == "save":
            self._save(now)
        if action == "release" or (action == "save" and not self._is_saving(now)):
            self.release(reason)
        elif action == "salvage":
            self._salvage.begin_try()

    def _is_saving(self, now: float) -> bool:
        """Return whether the versions held here are being saved since the job ended, or may soon be."""
        since_s = now - max(self._ended_at, self._unwanted_since or 0.0)
        waits = self._saver.last or self._saver.busy or self._salvage.busy
        return waits and since_s < self._settings.tier_flush_s

    def _save(self, now: float) -> None:
        """Begin to save unsaved versions, for the last time: the memory is about to be freed."""
        if self._unwanted_since is None:
            self._unwanted_since = now
        if self._salvage.is_due(now, last=True):
            self._salvage.begin_try(last=True)

    # ---- the end ---------------------------------------------------------------------------------------

    def release(self, reason: str) -> None:
        """Free all memory and end."""
        if not self.over.is_set():
            self._on_release(reason)
            self.over.set()

    def leave(self, now: float, reason: str, *, save: bool) -> None:
        """End, because this incarnation is over.

        Args:
            now: The time, in monotonic seconds.
            reason: Reason for the log.
            save: The job is over, too: save unsaved versions first.
        """
        if self._membership.detached and save:
            self._save(now)
        if not self._stays(now, save):
            self.release(reason)
        elif not self._leaving:
            self._leaving = True
            self._spawn(self._leave_when_saved(reason, save))

    def _stays(self, now: float, save: bool) -> bool:
        """Return whether this agent stays for versions to be saved. Without `save` only running writes count."""
        return self._membership.detached and self._is_saving(now) and (save or self._saver.busy)

    async def _leave_when_saved(self, reason: str, save: bool) -> None:
        while self._stays(clock.monotonic(), save) and not self.over.is_set():
            if save:
                self._save(clock.monotonic())
            await asyncio.sleep(_LOOK_S)
        self._leaving = False
        if self._membership.detached:
            self.release(reason)
