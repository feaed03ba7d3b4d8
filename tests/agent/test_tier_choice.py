"""Which directory counts: the submission's, the program's, the site's."""

from __future__ import annotations

import pwd
from typing import Any, cast

import pytest

from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.tier.choice import TierChoice, resolve_site_tier
from gemini_hpc.config import Settings
from gemini_hpc.core.numbers import TierInterval
from gemini_hpc.core.views import View
from gemini_hpc.wire.local import Attach
from gemini_hpc.wire.stored import Tier


def choice(submitted: str = "", interval_s: TierInterval = 0, *, site: str = "") -> TierChoice:
    membership, unused = Membership(), cast(Any, None)
    attach = Attach(7, 0, "n1", "n1", 1, submitted, interval_s)
    membership.incarnation = Incarnation(attach, View(("n1",)), unused, unused, unused)
    return TierChoice(Settings(tier=site, tier_interval_s=600.0), 0, membership)


def test_the_submission_goes_before_the_program_and_that_before_the_site() -> None:
    made = choice(site="/site")
    assert (made.directory, made.interval_s) == ("/site", 600.0)
    made.chosen = Tier("/program", 60)
    assert (made.directory, made.interval_s) == ("/program", 60.0)
    made = choice("/submitted", 30, site="/site")
    made.chosen = Tier("/program", 60)
    assert (made.directory, made.interval_s) == ("/submitted", 30.0)


def test_an_automatic_interval_follows_from_what_memory_does_not_serve() -> None:
    made = choice("/submitted", 30)
    assert made.unserved_per_day is None and made.explain_interval(5.0) == "by --gemini-tier-interval"
    made = choice("/submitted", "auto")
    assert made.interval_s == 600.0, "the site's, until a save has been measured"
    assert made.explain_interval(None) == "auto: the site's tier_interval_s until a save has been measured"
    assert made.unserved_per_day == pytest.approx(Settings().node_losses_per_day), "one node, one copy"
    assert made.explain_interval(5.0) == (
        "auto: a save takes 5 s, memory cannot repair 0.0075 failures a day "
        "(1 nodes, 1 replicas, 0.0075 losses of a node a day)"
    )
    made = choice(site="/site")
    assert made.explain_interval(5.0) == "by the site's tier_interval_s"
    made.chosen = Tier("/program", "auto")
    assert made.unserved_per_day is not None
    made.chosen = Tier("/program", 60)
    assert made.explain_interval(None) == "by the program's Tier"


def test_the_first_choice_of_a_job_stays() -> None:
    made = choice(site="/site")
    assert made.accepts(Tier("/program")) and not made.accepts(Tier())
    made.chosen = Tier("/program")
    assert not made.accepts(Tier("/other"))
    assert not choice("/submitted").accepts(Tier("/program"))


def test_the_sites_directory_is_the_users() -> None:
    assert resolve_site_tier("/lustre/{user}/ckpt", 0) == f"/lustre/{pwd.getpwuid(0).pw_name}/ckpt"
    assert resolve_site_tier("/lustre/{user}", 3999999999) == "", "nobody knows that uid"
    assert resolve_site_tier("/lustre/all", 3999999999) == "/lustre/all" and resolve_site_tier("", 0) == ""


@pytest.mark.parametrize(
    "directory, interval_s, words",
    [
        ("here", 0, "absolute path"),
        ("/a\n", 0, "printable"),
        ("/it's", 0, "quotes"),
        ("/" + 5000 * "x", 0, "absolute path"),
        ("/a", 0.5, "interval_s is 0.5"),
        ("/a", 1e9, "interval_s is 1000000000.0"),
        ("/a", float("nan"), "interval_s is nan"),
        ("", 60, "no directory"),
        ("", "auto", "no directory"),
        ("/a", "hourly", "interval_s is 'hourly'"),
    ],
)
def test_what_cannot_be_is_told(directory: str, interval_s: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tier.from_argument(Tier(directory, interval_s))
    assert Tier.from_argument(Tier("/a b/c", 1.4)) == Tier("/a b/c", 1) and Tier.from_argument("/a") == Tier("/a")
    assert Tier.from_argument(Tier("/a", "auto")) == Tier("/a", "auto")
