"""What an agent tells the controller of a death, again and again, for as long as that is news."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent import controller_link
from gemini_hpc.agent.controller_link import ControllerLink
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.retention import _JUST_S, Retention
from gemini_hpc.core.views import View
from gemini_hpc.wire.controller import Registration, Report
from gemini_hpc.wire.local import Attach

from .contexts import made_context


@pytest.mark.parametrize(("matters", "hosts"), [(True, ["n2"]), (False, [])])
def test_a_new_controller_hears_of_a_death_that_matters(matters: bool, hosts: list[str]) -> None:
    membership, sent = Membership(), list[Any]()
    view, attach = View(("n1", "n2")), SimpleNamespace(lost=())
    mesh = SimpleNamespace(dead={"n2"})
    incarnation: Any = SimpleNamespace(restart=0, mesh=mesh, view=view, attach=attach, live=True)
    membership.incarnation = incarnation
    listener: Any = SimpleNamespace(should_report_deaths=lambda now: matters, finished=None)
    mine = ControllerLink(made_context(membership), listener)
    mine._link, mine._reported = SimpleNamespace(send=sent.append), -controller_link._REPEAT_S - 1.0  # type: ignore[assignment]
    mine.beat(0.0)
    assert [m.host for m in sent if isinstance(m, Report)] == hosts


def test_a_new_controller_hears_since_when_the_node_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose script has ended since is sent back only if the node was lost about then."""
    membership, sent, now = Membership(), list[Any](), 1000.0
    monkeypatch.setattr(controller_link.clock, "time", lambda: now)
    mesh = SimpleNamespace(dead={"n2"})
    view, attach = View(("n1", "n2")), Attach(7, 0, "n[1-2]", "n1", 2)
    incarnation: Any = SimpleNamespace(restart=0, mesh=mesh, view=view, attach=attach, live=True, hosts=view.hosts)
    membership.incarnation = incarnation
    listener: Any = SimpleNamespace(should_report_deaths=lambda now: True, finished=None, rescuing=False)
    mine = ControllerLink(made_context(membership), listener)
    mine.beat(0.0)  # no controller is there
    now = 1090.0
    mine._link, mine._reported = SimpleNamespace(send=sent.append), -controller_link._REPEAT_S - 1.0  # type: ignore[assignment]
    mine.beat(0.0)
    mesh.dead = set()  # it is back
    mine.beat(1.0)
    mesh.dead = {"n2"}
    mine.beat(controller_link._REPEAT_S + 1.0)
    assert [m.t for m in sent if isinstance(m, Report)] == [1000.0, 1090.0]


def test_the_controller_hears_whether_the_training_has_finished() -> None:
    membership, sent = Membership(), list[Any]()
    view, attach, mesh = View(("n1", "n2")), Attach(7, 0, "n[1-2]", "n1", 2), SimpleNamespace(dead=set())
    incarnation: Any = SimpleNamespace(restart=0, mesh=mesh, view=view, attach=attach, live=True, hosts=view.hosts)
    membership.incarnation = incarnation
    listener: Any = SimpleNamespace(should_report_deaths=lambda now: False, finished=None, rescuing=False)
    mine = ControllerLink(made_context(membership), listener)
    mine._link = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    for finished in (None, False, False, True, True, False):
        listener.finished = finished
        mine.beat(0.0)
    assert [m.finished for m in sent if isinstance(m, Registration)] == [False, True, False]


@pytest.mark.parametrize(
    ("ago_s", "waits", "told"),
    [
        (5.0, False, True),  # the script has ended, perhaps before a controller could act
        (5.0, True, False),  # the job is pending: somebody has acted
        (_JUST_S + 1.0, False, False),
    ],
)
def test_a_job_has_just_ended(ago_s: float, waits: bool, told: bool) -> None:
    parts: Any = SimpleNamespace(choice=None, saver=None, salvage=None)
    mine = Retention(made_context(Membership()), parts, parts, parts, 0.0)
    mine.note_end(1000.0)
    if waits:
        mine.note_pending()
    assert mine.has_just_ended(1000.0 + ago_s) is told
