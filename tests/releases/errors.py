"""The one error of this tool: a sentence for its user."""

from __future__ import annotations


class ReleaseError(Exception):
    """What was wanted, what was found, what to do."""
