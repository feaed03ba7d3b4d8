"""SITE 21: `inspect` is for owner, root, SlurmUser, and the users and groups of gemini.toml; with a controller and
without. `games` is named there, `daemon` by its group. (slurmdbd's operators: tests/control/test_access.py.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .conftest import Site, one_line

ALLOWED = ("alice", None, "slurm", "games", "daemon")
OTHERS = ("bob", "nobody", "man")


@pytest.fixture(params=["controller", "agents"])
def asked(site: Site, request: pytest.FixtureRequest) -> Iterator[str]:
    """Who answers."""
    if request.param == "agents":
        site.cluster.controller_stop()
    yield request.param
    if request.param == "agents":
        site.cluster.controller_start()


def test_site_21_who_may_inspect(site: Site, asked: str) -> None:
    job = str(site.job.id)
    for user in ALLOWED:
        done = site.gemini("inspect", job, user=user)
        assert done.returncode == 0 and f"(asked: {asked})" in done.stdout, (user, done)
    for user in OTHERS:
        theirs = one_line(site.gemini("inspect", job, user=user), "unknown, or not yours", status=1)
        none = one_line(site.gemini("inspect", "987654", user=user), status=1)
        assert none.replace("987654", job) == theirs


def test_site_21_agents_decide_for_themselves(site: Site) -> None:
    """Whatever the asking program believes: MUNGE tells the agent who asks."""
    query = {"query": {"purpose": "query"}}
    for user in ALLOWED:
        assert site.attack("call", user, calls=query) == {"query": "ok"}, user
    for user in OTHERS:
        assert site.attack("call", user, calls=query) == {"query": "HandshakeError: refused: not yours"}, user


def test_site_21_operators_may_look_and_nothing_else(site: Site) -> None:
    calls = {p: {"purpose": p} for p in ("link", "pull", "inventory", "summons", "control")}
    for user in ("games", "daemon"):
        answers = site.attack("call", user, calls=calls)
        assert set(answers.values()) == {"HandshakeError: refused: not yours"}, answers
