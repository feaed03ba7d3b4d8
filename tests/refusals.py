"""What is refused, for loops over many cases: a text to look into, where `pytest.raises` would not name the case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refusal(error: type[Exception], function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return what `function` says when it refuses these arguments; "" where it takes them."""
    try:
        function(*arguments, **options)
    except error as exc:
        return str(exc) or repr(exc)
    return ""
