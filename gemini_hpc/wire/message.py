"""The base class of all messages between machines."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag_field="kind"):
    """The base of all messages between machines; the key `kind` names the type."""
