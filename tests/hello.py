"""The greeting of a training rank, with the protocol versions that this end speaks."""

from __future__ import annotations

from typing import Any

from gemini_hpc.wire import local, version


def build_hello(**fields: Any) -> local.Hello:
    """A rank's `Hello` with these fields."""
    return local.Hello(version.OLDEST, version.CURRENT, **fields)
