"""Which directory is the job's tier, and how often it is saved there."""

from __future__ import annotations

import pwd

from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.config import Settings
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
    def interval_s(self) -> float:
        """From the beginning of one save to that of the next."""
        attach = self._attach
        submitted = attach.tier_interval if attach is not None else 0
        return float(submitted or self.chosen.interval_s or self._settings.tier_interval_s)

    def heeds(self, tier: Tier) -> bool:
        """Whether a program's choice counts and is not known yet; the first one of a job stays."""
        attach = self._attach
        return bool(tier.directory) and not self.chosen.directory and not (attach is not None and attach.tier)
