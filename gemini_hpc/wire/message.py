"""What all messages between machines have in common."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all messages between machines; the key `kind` names the type."""
