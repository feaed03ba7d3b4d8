"""What goes wrong on the persistent tier."""

from __future__ import annotations


class TierFailed(Exception):
    """An order was not carried out; one sentence."""
