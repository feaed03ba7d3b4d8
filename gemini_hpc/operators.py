"""Permission to see every job: root, SlurmUser, and the `operators` in gemini.toml, besides each job's owner."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from gemini_hpc import clock

LOOKUP_S = 3.0  # slurmdbd answers within milliseconds; callers wait for it
KEPT_S = 30.0  # a coordinator that was removed keeps the right for this long
FAILED_S = 5.0  # a slurmdbd that is down is not asked at each call
_MAX_LOOKUPS = 4
_MAX_KEPT = 4096

More = Callable[[str], Awaitable[bool]]


def is_listed(uid: int, operators: Iterable[str]) -> bool:
    """Return whether `operators` names this user, according to the name service of this host.

    An entry is a user's name or uid, or `@` and a group's name or number. The call takes as long as the name
    service does. Raises nothing: a user who is not found is not named.
    """
    users = [entry for entry in operators if not entry.startswith("@")]
    if str(uid) in users:
        return True
    try:
        user = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        return False
    if user.pw_name in users:
        return True
    wanted = {gid for entry in operators if entry.startswith("@") for gid in _find_gids(entry[1:])}
    return bool(wanted) and not wanted.isdisjoint(os.getgrouplist(user.pw_name, user.pw_gid))


def _find_gids(name: str) -> tuple[int, ...]:
    if name.isdecimal():
        return (int(name),)
    try:
        return (grp.getgrnam(name).gr_gid,)
    except KeyError:
        return ()


class Operators:
    """A cache of permissions, valid for `KEPT_S`.

    A lookup that takes longer than `LOOKUP_S` counts as a refusal for `FAILED_S`. `always` need no lookup.
    `more` is called with the name of a user who is not in the list. Its failures (TimeoutError, OSError and
    its own) count as refusals, too.
    """

    def __init__(self, operators: Iterable[str], always: Iterable[int], more: More | None = None) -> None:
        self._operators, self._always, self._more = tuple(operators), frozenset(always), more
        self._known: dict[int, tuple[float, bool]] = {}
        self._asking: dict[int, asyncio.Task[bool]] = {}
        self._threads = 0

    async def allows(self, uid: int) -> bool:
        """Return whether this user may see every job."""
        if uid in self._always:
            return True
        if not self._operators and self._more is None:
            return False
        until, answer = self._known.get(uid, (0.0, False))
        if clock.monotonic() < until:
            return answer
        if uid not in self._asking:
            task = self._asking[uid] = asyncio.ensure_future(self._ask(uid))
            task.add_done_callback(lambda _: self._asking.pop(uid, None))
        return await asyncio.shield(self._asking[uid])

    async def _ask(self, uid: int) -> bool:
        answer, kept_s = False, FAILED_S
        with suppress(Exception):
            async with asyncio.timeout(LOOKUP_S):
                answer = await self._is_listed(uid)
                kept_s = KEPT_S
        if len(self._known) >= _MAX_KEPT:
            self._known.clear()
        self._known[uid] = (clock.monotonic() + kept_s, answer)
        return answer

    async def _is_listed(self, uid: int) -> bool:
        named, user = await self._run_in_thread(lambda: (is_listed(uid, self._operators), _find_name(uid)))
        if named or self._more is None or not user:
            return named
        return await self._more(user)

    async def _run_in_thread(self, lookup: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
        """Run a lookup in its own daemon thread, because a name service can hang for minutes.

        The end of the process does not wait for that thread.
        """
        if self._threads >= _MAX_LOOKUPS:
            raise TimeoutError
        loop = asyncio.get_running_loop()
        result: asyncio.Future[tuple[bool, str]] = loop.create_future()

        def finish(value: tuple[bool, str] | None) -> None:
            self._threads -= 1
            if not result.done():
                if value is None:
                    result.set_exception(LookupError())
                else:
                    result.set_result(value)

        def run() -> None:
            value = None
            with suppress(Exception):
                value = lookup()
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(finish, value)

        self._threads += 1
        threading.Thread(target=run, daemon=True, name="gemini-names").start()
        return await result


def _find_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return ""
