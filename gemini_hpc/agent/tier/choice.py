"""Choice of the job's tier directory and of the interval between saves."""

from __future__ import annotations

import pwd

from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.config import Settings
from gemini_hpc.core import tier_interval
from gemini_hpc.core.numbers import TierInterval
from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier


def resolve_site_tier(pattern: str, uid: int) -> str:
    """Return the site's directory for this user, or "" if there is none."""
    if "{user}" not in pattern:
        return pattern
    try:
        return pattern.replace("{user}", pwd.getpwuid(uid).pw_name)
    except KeyError:
        return ""


class TierChoice:
    """The chosen tier: the submission's choice first, then the program's (`chosen`), then the site's."""

    def __init__(self, settings: Settings, uid: int, membership: Membership) -> None:
        self._settings, self._membership = settings, membership
        self._site = resolve_site_tier(settings.tier, uid)
        self.chosen = Tier()

    @property
    def _attach(self) -> local.Attach | None:
        incarnation = self._membership.incarnation
        return incarnation.attach if incarnation is not None else None

    @property
    def directory(self) -> str:
        """Return the tier's directory, or "" without a tier."""
        attach = self._attach
        return (attach.tier if attach is not None else "") or self.chosen.directory or self._site

    @property
    def users(self) -> bool:
        """Return whether the tier is the site's directory for this user alone, which is created if missing."""
        return self.directory == self._site and "{user}" in self._settings.tier

    @property
    def interval(self) -> TierInterval:
        """Return the interval of the submission or the program, or 0 if neither names one."""
        attach = self._attach
        return (attach.tier_interval if attach is not None else 0) or self.chosen.interval_s

    @property
    def interval_s(self) -> float:
        """Return the seconds from the start of one save to the start of the next.

        For an automatic interval the value holds until a save has been measured.
        """
        interval = self.interval
        named_s = 0 if isinstance(interval, str) else interval
        return float(named_s or self._settings.tier_interval_s)

    @property
    def unserved_per_day(self) -> float | None:
        """Return the failures a day that memory cannot serve, or None if the interval does not depend on them."""
        if not isinstance(self.interval, str):
            return None
        membership, per_day = self._membership, self._settings.node_losses_per_day
        return tier_interval.compute_unserved_per_day(membership.redundancy, per_day, tier_interval.WINDOW_S)

    def explain_interval(self, took_s: float | None) -> str:
        """Return the reason for the interval, for people.

        Args:
            took_s: Duration of the last saves in seconds, or None before the first.
        """
        unserved = self.unserved_per_day
        if unserved is not None and took_s is None:
            return "auto: the site's tier_interval_s until a save has been measured"
        if unserved is not None:
            membership, loss = self._membership, self._settings.node_losses_per_day
            return (
                f"auto: a save takes {took_s:.3g} s, memory cannot repair {unserved:.2g} failures a day "
                f"({membership.nodes} nodes, {membership.replicas} replicas, {loss:g} losses of a node a day)"
            )
        attach = self._attach
        if attach is not None and attach.tier_interval:
            return "by --gemini-tier-interval"
        return "by the program's Tier" if self.chosen.interval_s else "by the site's tier_interval_s"

    def accepts(self, tier: Tier) -> bool:
        """Return whether a program's choice counts and is new. The first choice in a job stays."""
        attach = self._attach
        return bool(tier.directory) and not self.chosen.directory and not (attach is not None and attach.tier)
