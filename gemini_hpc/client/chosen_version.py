"""Loading the version that the agents have chosen, on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.session import RankSession
from gemini_hpc.wire import local

ATTEMPTS = 3

S = TypeVar("S")


def fetch_on_all(
    session: RankSession, fetch: Callable[[local.Welcome], list[S]], join_again: Callable[[], None]
) -> list[S]:
    """Return the shards of the version to resume from, or none for a fresh start. Collective.

    If a rank cannot get its data (a copy is damaged, its holder died), all ranks send `Hello` again. The agents then
    verify the copies that they hold and choose again. A launch in which that does not help ends.

    Args:
        session: This rank's session with its agent.
        fetch: Returns the shards that this rank needs, at least one. Its argument is the agents' choice.
        join_again: Sends `Hello` to the agents again.
    """
    for attempt in range(1, ATTEMPTS + 1):
        welcome = session.welcome
        for line in welcome.lost:
            session.say_once(f"not loaded from memory: {line}")
        if not welcome.chosen_version:
            return []
        shards: list[S] = []
        try:
            shards = fetch(welcome)
        except (AgentLost, AgentRefused, ValueError, OSError) as error:
            session.say(f"version {welcome.chosen_version} cannot be loaded: rank {session.rank}: {error}")
        if session.is_true_on_all(bool(shards)):
            return shards
        if attempt < ATTEMPTS:
            join_again()
            if not session.protected:
                session.try_again(f"version {welcome.chosen_version} cannot be loaded without the agents")
    return session.try_again(f"version {session.welcome.chosen_version} cannot be read on every rank")
