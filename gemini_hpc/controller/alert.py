"""The alerts that the controller does not act on a failure: log, journal (`doctor` reads it), the site's program."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress

from gemini_hpc import clock
from gemini_hpc.config import Settings, find_program_problem
from gemini_hpc.controller.journal import NODES, Journal

log = logging.getLogger("gemini_hpc.controller")

PROGRAM_S = 10.0  # the program is killed after this, because alerts are sent one at a time
SAME_S = 60.0  # the program is called at most this often for one kind
MOST_KNOWN = 1000


class Alerts:
    """The sender of alerts.

    `send_alert` returns at once. The program runs as the controller's user, one at a time. It gets only its
    arguments.
    """

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self._settings, self._journal = settings, journal
        self._alerted: dict[tuple[str, int, str], float] = {}
        self._called: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    def send_alert(self, kind: str, job: int, host: str, text: str) -> None:
        """Send an alert, once in a budget's window for each kind, job and host.

        `text` must not contain any text from a user.
        """
        now, key = clock.monotonic(), (kind, job, host)
        window_s = max(SAME_S, self._settings.fence_budget_window_s)
        if now - self._alerted.get(key, -window_s) < window_s:
            return
        if len(self._alerted) >= MOST_KNOWN:
            self._alerted.clear()
        self._alerted[key] = now
        log.error("event=alert kind=%s job=%d host=%s detail=%s", kind, job, host or "-", text)
        try:
            self._journal.write_line(NODES, "alert", "after", kind=kind, job=job, node=host, why=text[:300])
        except (OSError, ValueError) as exc:  # a full disk must not suppress the alert
            log.error("event=alert-not-kept kind=%s job=%d detail=%s", kind, job, exc)
        if self._settings.alert_program and now - self._called.get(kind, -SAME_S) >= SAME_S:
            self._called[kind] = now
            task = asyncio.ensure_future(self._call(kind, str(job), host or "-", text[:300]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _call(self, *args: str) -> None:
        path = self._settings.alert_program
        async with self._lock:
            try:
                if why := find_program_problem(path):
                    raise OSError(why)
                process = await asyncio.create_subprocess_exec(
                    path,
                    *args,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as exc:
                log.error("event=alert-failed program=%s detail=%s", path, exc)
                return
            try:
                async with asyncio.timeout(PROGRAM_S):
                    status = await process.wait()
                log.info("event=alert-told program=%s status=%d", path, status)
            except TimeoutError:
                log.error("event=alert-failed program=%s detail=the program took more than %g s", path, PROGRAM_S)
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Cancel the calls of the program that still run."""
        for task in list(self._tasks):
            task.cancel()
