"""Requirement not-a-failure at the local socket: a user's environment may have another gemini-hpc than the node."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from gemini_hpc.wire import local, version

from .conftest import STEP


@pytest.mark.parametrize(("least", "most"), [(4, 4), (4, 5), (3, 7)])
def test_trainer_and_agent_agree(make_agent: Callable[..., Any], least: int, most: int) -> None:
    agent = make_agent()
    reply = agent.caller().ask(local.Hello(least, most, "default", 0, 1, 0, STEP, os.getpid()))
    assert isinstance(reply, local.Welcome) and reply.proto == version.CURRENT


@pytest.mark.parametrize(("least", "most"), [(5, 6), (1, 3), (5, 4), (0, 0)])
def test_trainer_without_a_common_version_is_told_so(make_agent: Callable[..., Any], least: int, most: int) -> None:
    agent = make_agent()
    caller = agent.caller()
    reply = caller.ask(local.Hello(least, most, "default", 0, 1, 0, STEP, os.getpid()))
    assert isinstance(reply, local.Error)
    assert f"wanted {version.CURRENT}:" in reply.error and "\n" not in reply.error
    assert isinstance(caller.hello(), local.Welcome), "the agent lives on"
