"""Errors of the persistent tier."""

from __future__ import annotations


class TierFailed(Exception):
    """The failure of an order to the tier; its text is one sentence."""


class TierUnanswered(TierFailed):
    """A failure without a verdict on what lies on the tier: no process was started, or no answer came."""
