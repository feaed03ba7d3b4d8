"""Failures of tasks that nobody hears of: asyncio only logs them, when the task is forgotten."""

from __future__ import annotations

import logging

_MARK = "exception was never retrieved"


class Unheard(logging.Handler):
    """Keeps what asyncio says of tasks and futures whose exception nobody has taken."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if _MARK in (text := record.getMessage()):
            self.texts.append(text)

    def begin(self) -> None:
        logging.getLogger("asyncio").addHandler(self)

    def end(self) -> None:
        logging.getLogger("asyncio").removeHandler(self)

    def take(self) -> list[str]:
        """What has come since the last call."""
        texts, self.texts = self.texts, []
        return texts
