"""Requirement who-may-inspect: whom `operators` and slurmdbd let look at every job; in doubt, nobody."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gemini_hpc import operators
from gemini_hpc.controller.access import Accounting
from gemini_hpc.operators import Operators, is_listed
from gemini_hpc.slurm import SlurmError, SlurmRefused
from gemini_hpc.slurm.text import parse_admin_level, parse_config

from .fake_slurm import FakeSlurm

GAMES, DAEMON = pwd.getpwnam("games"), pwd.getpwnam("daemon")
GROUP = grp.getgrgid(GAMES.pw_gid).gr_name
FOREIGN = "no-such-user-here"


def test_names_and_groups() -> None:
    cases: list[tuple[tuple[str, ...], bool]] = [
        ((), False),
        (("games",), True),
        ((str(GAMES.pw_uid),), True),
        ((f"@{GROUP}",), True),
        ((f"@{GAMES.pw_gid}",), True),
        (("daemon", FOREIGN, f"@{FOREIGN}"), False),
        (("@daemon",), False),
        (("",), False),
        (("@",), False),
        (("@games\n",), False),
        (("GAMES",), False),
        (("@-1", "-1"), False),
    ]
    for case in cases:
        entries, yes = case
        assert is_listed(GAMES.pw_uid, entries) is yes, case


def test_supplementary_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, 4242] if name == "games" else [gid])
    assert is_listed(GAMES.pw_uid, ("@4242",)) and not is_listed(DAEMON.pw_uid, ("@4242",))


def test_unknown_uids() -> None:
    assert not is_listed(61999, ("root", "@root")) and is_listed(61999, ("61999",))
    assert not is_listed(2**32 - 1, ("root",)) and not is_listed(2**70, ("@root",))


def ask(who: Operators, *uids: int) -> list[bool]:
    async def run() -> list[bool]:
        return list(await asyncio.gather(*(who.allows(uid) for uid in uids)))

    return asyncio.run(run())


def test_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pytest.fail("a lookup that nobody needs"))
    assert ask(Operators(("games",), (0, 64030)), 0, 64030) == [True, True]
    assert ask(Operators((), (0,)), 5001) == [False]


def test_answers_are_kept_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def slow(uid: int, entries: object) -> bool:
        asked.append(uid)
        time.sleep(0.05)
        return uid == 7

    monkeypatch.setattr(operators, "is_listed", slow)
    who = Operators(("x",), ())

    async def run() -> list[bool]:
        first = await asyncio.gather(*(who.allows(7) for _ in range(50)), who.allows(8))
        return [*first, await who.allows(7), await who.allows(8)]

    answers = asyncio.run(run())
    assert answers == [True] * 50 + [False, True, False] and sorted(asked) == [7, 8]


def test_name_service_that_hangs_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "LOOKUP_S", 0.2)
    monkeypatch.setattr(operators, "FAILED_S", 60.0)

    def late(uid: int, entries: object) -> bool:
        time.sleep(3)
        return True

    monkeypatch.setattr(operators, "is_listed", late)
    who, began = Operators(("games",), ()), time.monotonic()
    assert ask(who, *range(100, 120)) == [False] * 20
    assert ask(who, *range(100, 120)) == [False] * 20
    assert time.monotonic() - began < 2
    assert who._threads <= 4


def test_lookup_that_fails_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Exception] = [KeyError("x"), OSError("x"), MemoryError()]
    for error in cases:

        def fail(*_: object, error: Exception = error) -> bool:
            raise error

        monkeypatch.setattr(operators, "is_listed", fail)
        assert ask(Operators(("games",), ()), GAMES.pw_uid) == [False], error


# ---- slurmdbd --------------------------------------------------------------------------------------------

CONFIG = """Configuration data as of 2026-11-21T16:00:00
AccountingStorageBackupHost = (null)
AccountingStorageType   = accounting_storage/{kind}
AuthInfo                = cred_expire=120
SlurmctldHost[0]        = ctl
StateSaveLocation       = /var/spool/slurmctld
Prolog                  = /x AccountingStorageType = accounting_storage/slurmdbd

Slurmctld(primary) at ctl is UP
"""


class Database(FakeSlurm):
    """slurmdbd as `Slurm` tells of it."""

    def __init__(self, kind: str, rows: str | Exception) -> None:
        self.kind, self.printed, self.asked = kind, rows, 0

    async def has_accounting(self) -> bool:
        return parse_config(CONFIG.format(kind=self.kind)).values["AccountingStorageType"].endswith("slurmdbd")

    async def read_admin_level(self, user: str) -> str:
        self.asked += 1
        if isinstance(self.printed, Exception):
            raise self.printed
        return parse_admin_level(self.printed, user)


def test_operators_of_slurmdbd() -> None:
    cases: list[tuple[str, str | Exception, bool]] = [
        ("slurmdbd", "games|Operator\n", True),
        ("slurmdbd", "games|Administrator\n", True),
        ("slurmdbd", "games|None\n", False),
        ("slurmdbd", "games|Not Set\n", False),
        ("slurmdbd", "games|\n", False),
        ("slurmdbd", "", False),
        ("slurmdbd", "daemon|Operator\n", False),
        ("slurmdbd", "games|Operator|x\n", False),
        ("slurmdbd", "games|None\ngames|Operator\n", False),
        ("slurmdbd", "xgames|Operator\ngames|None\n", False),
        ("slurmdbd", SlurmRefused("sacctmgr: error: Unable to connect to the database"), False),
        ("none", "games|Operator\n", False),
    ]
    for case in cases:
        kind, rows, yes = case
        database = Database(kind, rows)
        who = Operators((), (0,), Accounting(database).is_operator)
        assert ask(who, GAMES.pw_uid) == [yes], case
        assert database.asked == (kind == "slurmdbd"), case


def test_answers_that_sacctmgr_has_given() -> None:
    text = (Path(__file__).parent / "recorded" / "22.05-admin-levels.txt").read_text()
    found = {user: parse_admin_level(text, user) for user in ("alice", "bob", "games", "nosuch", "ali", "")}
    assert found == {"alice": "None", "bob": "Operator", "games": "Administrator", "nosuch": "", "ali": "", "": ""}


def test_names_that_are_no_arguments(tattling_slurm: Callable[[], str]) -> None:
    from gemini_hpc.slurm import Slurm

    for user in ("a,b", "a b", "--help", "a'", "", "x" * 65, "a\nb", "name=root"):
        with pytest.raises(SlurmError):
            pytest.fail(f"{user!r}: {asyncio.run(Slurm().read_admin_level(user))}")
        assert tattling_slurm() == "", user


@pytest.fixture
def tattling_slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    from gemini_hpc import slurm

    called: list[str] = []

    async def run(self: object, tool: str, *args: str) -> str:
        called.append(" ".join((tool, *args)))
        return ""

    monkeypatch.setattr(slurm.Slurm, "_run_tool", run)
    return lambda: "\n".join(called)
