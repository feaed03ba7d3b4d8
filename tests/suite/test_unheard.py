"""Whether the check of all tests sees a task that fails unheard."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from tests.unheard import Unheard


async def _fail() -> None:
    raise ValueError("boo")


@pytest.mark.parametrize("taken", [False, True])
def test_a_task_that_fails_unheard_is_seen(taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        task = asyncio.ensure_future(_fail())
        await asyncio.wait([task])
        if taken:
            task.exception()

    monkeypatch.setattr(logging.getLogger("asyncio"), "handlers", [])  # the check of all tests is not to see it
    seen = Unheard()
    seen.begin()
    try:
        asyncio.run(work())
        gc.collect()
    finally:
        seen.end()
    assert ["boo" in text for text in seen.take()] == ([] if taken else [True])
    assert not seen.take()
