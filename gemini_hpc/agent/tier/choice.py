"""Which directory is the job's tier, and how often it is saved there."""

from __future__ import annotations

import pwd

from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.config import Settings
from gemini_hpc.core import tier_interval
from gemini_hpc.core.numbers import TierInterval
from gemini_hpc.wire import local
from gemini_hpc.wire.stored import Tier


def site_tier(pattern: str, uid: int) -> str:
    """The site's directory for this user; "" where there is none."""
    if "{user}" not in pattern:
        return pattern
    try:
        return pattern.replace("{user}", pwd.getpwuid(uid).pw_name)
    except KeyError:
        return ""


class TierChoice:
    """The submission's goes before the program's, and that before the site's. chosen: by the program."""

    def __init__(self, settings: Settings, uid: int, membership: Membership) -> None:
        self._settings, self._membership = settings, membership
        self._site = site_tier(settings.tier, uid)
        self.chosen = Tier()

    @property
    def _attach(self) -> local.Attach | None:
        incarnation = self._membership.incarnation
        return incarnation.attach if incarnation is not None else None

    @property
    def directory(self) -> str:
        """Empty: none."""
        attach = self._attach
        return (attach.tier if attach is not None else "") or self.chosen.directory or self._site

    @property
    def users(self) -> bool:
        """Whether it is the site's for this user alone, which is made where it is not there."""
        return self.directory == self._site and "{user}" in self._settings.tier

    @property
    def interval(self) -> TierInterval:
        """As submitted, or as the program says; 0: neither."""
        attach = self._attach
        return (attach.tier_interval if attach is not None else 0) or self.chosen.interval_s

    @property
    def interval_s(self) -> float:
        """From the beginning of one save to that of the next; an automatic one until a save has been measured."""
        interval = self.interval
        named_s = 0 if isinstance(interval, str) else interval
        return float(named_s or self._settings.tier_interval_s)

    @property
    def unserved_per_day(self) -> float | None:
        """Failures a day that memory cannot serve, where the interval follows from them; None: it does not."""
        if not isinstance(self.interval, str):
            return None
        here, per_day = self._membership, self._settings.node_losses_per_day
        return tier_interval.unserved_per_day(here.redundancy, per_day, tier_interval.WINDOW_S)

    def reason(self, took_s: float | None) -> str:
        """Why the interval is what it is, for people. took_s: the last saves, if there have been any."""
        unserved = self.unserved_per_day
        if unserved is not None and took_s is None:
            return "auto: the site's, until a save has been measured"
        if unserved is not None:
            here, loss = self._membership, self._settings.node_losses_per_day
            return (
                f"auto: a save takes {took_s:.3g} s, memory cannot repair {unserved:.2g} failures a day "
                f"({here.nodes} nodes, {here.replicas} replicas, {loss:g} losses of a node a day)"
            )
        attach = self._attach
        if attach is not None and attach.tier_interval:
            return "as submitted"
        return "as the program says" if self.chosen.interval_s else "as the site says"

    def heeds(self, tier: Tier) -> bool:
        """Whether a program's choice counts and is not known yet; the first one of a job stays."""
        attach = self._attach
        return bool(tier.directory) and not self.chosen.directory and not (attach is not None and attach.tier)
