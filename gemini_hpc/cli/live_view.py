"""A text on the terminal that is renewed every few seconds, until the user interrupts it.

With `rich` installed (the extra `report`) the words for states have colours and the screen does not flicker. Without
it, the screen is cleared before each text. Where stdout is no terminal, one text follows the other.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress

from gemini_hpc import clock

_CLEAR = "\x1b[2J\x1b[H"
# styles of whole words, as regular expressions
_STYLES = {
    r"\b(protected|sealed|live|RUNNING|COMPLETED)\b": "green",
    r"\b(arming|waiting|recovering|filling|PENDING|CONFIGURING|COMPLETING)\b": "yellow",
    r"\b(unprotected|partly protected|degraded|stalled|no agent|dead|FAILED|NODE_FAIL|OUT_OF_MEMORY)\b": "bold red",
    r"^(may be lost|to do|note)(?=:)": "bold",
}


def show_live(text: Callable[[], str], every_s: float, *, plain: bool = False) -> None:
    """Show what `text` returns every `every_s` seconds. Return when the user presses Ctrl-C.

    Args:
        text: Return the text to show; its exceptions end the view.
        every_s: Pause between two texts, in seconds.
        plain: Whether to print one text after the other also on a terminal.
    """
    with suppress(KeyboardInterrupt):
        if plain or not sys.stdout.isatty():
            _print_each(text, every_s, before="")
        elif importlib.util.find_spec("rich") is None:
            _print_each(text, every_s, before=_CLEAR)
        else:
            _draw_each(text, every_s)


def _print_each(text: Callable[[], str], every_s: float, before: str) -> None:
    while True:
        print(f"{before}{text()}", flush=True)
        clock.sleep(every_s)


def _draw_each(text: Callable[[], str], every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def build_text() -> Text:
        words = Text(text(), no_wrap=True, overflow="ellipsis")
        for pattern, style in _STYLES.items():
            words.highlight_regex(f"(?m){pattern}", style)
        return words

    with Live(build_text(), console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            clock.sleep(every_s)
            live.update(build_text(), refresh=True)
