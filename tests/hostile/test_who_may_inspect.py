"""Requirement who-may-inspect: `inspect` is for owner, root, SlurmUser, and the users and groups of gemini.toml; with
a controller and without. `games` is named there, `daemon` by its group. (slurmdbd's operators:
tests/controller/test_access.py.)"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from .conftest import ALICE, Site, one_line

pytestmark = pytest.mark.cluster

ALLOWED = ("alice", None, "slurm", "games", "daemon")
OTHERS = ("bob", "nobody", "man")


@pytest.fixture(params=["controller", "agents"])
def asked(site: Site, request: pytest.FixtureRequest) -> Iterator[str]:
    """Who answers."""
    if request.param == "agents":
        site.cluster.stop_controller()
    yield request.param
    if request.param == "agents":
        site.cluster.start_controller()


def test_who_may_inspect(site: Site, asked: str) -> None:
    job = str(site.job.id)
    for user in ALLOWED:
        done = site.gemini("inspect", job, user=user)
        assert done.returncode == 0 and ("(asked: agents)" in done.stdout) == (asked == "agents"), (user, done)
    for user in OTHERS:
        theirs = one_line(site.gemini("inspect", job, user=user), "unknown, or not yours", status=1)
        none = one_line(site.gemini("inspect", "987654", user=user), status=1)
        assert none.replace("987654", job) == theirs


def test_agents_decide_for_themselves(site: Site) -> None:
    """Whatever the asking program believes: MUNGE tells the agent who asks."""
    query = {"query": {"purpose": "query"}}
    for user in ALLOWED:
        assert site.attack("call", user, calls=query) == {"query": "ok"}, user
    for user in OTHERS:
        assert site.attack("call", user, calls=query) == {
            "query": "HandshakeError: refused: the job belongs to another user"
        }, user


def test_operators_may_look_and_nothing_else(site: Site) -> None:
    calls = {p: {"purpose": p} for p in ("link", "pull", "inventory", "wake", "control")}
    for user in ("games", "daemon"):
        answers = site.attack("call", user, calls=calls)
        assert set(answers.values()) == {"HandshakeError: refused: the job belongs to another user"}, answers


def test_who_may_draw(site: Site) -> None:
    """What ranks have recorded is told by the agents alone, to the same people."""
    job = str(site.job.id)
    for user in ALLOWED:
        done = site.gemini("report", job, "--json", user=user)
        assert done.returncode == 0, (user, done)
        (shown,) = json.loads(done.stdout)["trainings"]
        assert (shown["training"], shown["rank"], shown["host"]) == ("default", 1, site.nodes[1]), (
            "the largest overhead"
        )
        assert shown["timeline"]["ops"][0]["name"] == "all_reduce" and shown["series"][0]["overhead"] == 0.02
    for user in OTHERS:
        theirs = one_line(site.gemini("report", job, user=user), "unknown, or not yours", status=1)
        none = one_line(site.gemini("report", "987654", user=user), status=1)
        assert none.replace("987654", job) == theirs


def test_report_of_a_running_job(site: Site) -> None:
    directory = site.cluster.locate_home("alice") / "drawn"
    directory.mkdir()
    shutil.chown(directory, ALICE)
    try:
        done = site.gemini("report", str(site.job.id), "--rank", "0", "-o", str(directory))
        assert done.returncode == 0 and done.stderr == "", done
        assert sorted(done.stdout.split()) == sorted(str(path) for path in directory.iterdir())
        assert {path.suffix for path in directory.iterdir()} == {".html", ".png"}
    finally:
        shutil.rmtree(directory)
    shown = " ".join(site.gemini("inspect", str(site.job.id)).stdout.split())
    assert " traffic: gemini over gloo: " in shown and "overhead 2.0 % (rank 1)" in shown
