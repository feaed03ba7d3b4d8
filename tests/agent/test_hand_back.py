"""Memory that trainers hand back, slot by slot, to the agent that was started after theirs had died."""

from __future__ import annotations

import os

from hello import build_hello
from waiting import until

from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.wire import local
from gemini_hpc.wire.control_page import ControlPage

from .conftest import SIZE, STEP, AgentProcess, Caller
from .test_local_bad_input import memfd

DIGEST = digest_bytes(bytes(10))


def joined(agent: AgentProcess, rank: int, *, rejoin: bool) -> tuple[Caller, ControlPage]:
    """A rank of two that has said hello."""
    caller = agent.caller()
    welcome, fds = caller.ask_fds(
        build_hello(
            training="default", rank=rank, world=2, local_rank=rank, step=STEP, pid=os.getpid(), rejoin=rejoin
        )
    )
    assert isinstance(welcome, local.Welcome), (welcome, agent.log())
    page = ControlPage(fds[0], writable=False)
    os.close(fds[0])
    return caller, page


def back(caller: Caller, rank: int, slot: int, version: int) -> None:
    """A slot with this version, 0: with none."""
    fd = memfd()
    used, digest = (10, DIGEST) if version else (0, "")
    message = local.HandBack("default", rank, 2, 0, SIZE, slot, 1, version, used, digest)
    assert caller.ask(message, [fd]) == local.Ok()
    os.close(fd)


def test_half_a_pair_says_nothing_of_what_it_lacks(agent: AgentProcess) -> None:
    """Version 1 is everywhere, and was sealed. The slot with version 2 comes back first: an agent that votes now says
    that it has gone past 1 without having it, and 1 is abandoned for good."""
    for rank in (0, 1):
        joined(agent, rank, rejoin=False)[0].close()
    agent.kill()
    agent.start(again=True)
    (first, page), (second, _) = (joined(agent, rank, rejoin=True) for rank in (0, 1))
    back(second, 1, 0, 1)
    back(second, 1, 1, 0)
    back(first, 0, 0, 2)
    assert first.ask(local.VerdictRequest()) is not None  # what it has begun by then, it has ended
    assert page.abandoned == (0, 0), "a version that is in the other slot"
    back(first, 0, 1, 1)
    until(lambda: page.sealed == (1, 1), 10.0, what="version 1 is sealed")
    assert page.abandoned == (0, 0)


def test_a_version_that_comes_back_damaged_is_given_up(agent: AgentProcess) -> None:
    """Version 2 is complete, and not sealed; nobody writes it again. Its other holders wait for a word on it."""
    for rank in (0, 1):
        joined(agent, rank, rejoin=False)[0].close()
    agent.kill()
    agent.start(again=True)
    (first, page), (second, _) = (joined(agent, rank, rejoin=True) for rank in (0, 1))
    for slot in (0, 1):
        back(second, 1, slot, slot + 1)
    back(first, 0, 0, 1)
    fd = memfd()
    assert first.ask(local.HandBack("default", 0, 2, 0, SIZE, 1, 1, 2, 10, "0" * 32), [fd]) == local.Ok()
    os.close(fd)
    until(lambda: page.abandoned == (1, 2), 10.0, what="version 2 is abandoned")
    assert page.sealed == (1, 1)
