"""The controller as a service (requirement one-controller).

It stands by until this host's slurmctld is in charge, acts, and steps down.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress

import msgspec

from gemini_hpc import clock, logs
from gemini_hpc.config import Settings
from gemini_hpc.controller import startup
from gemini_hpc.controller.primary import LockTakenError, Primary
from gemini_hpc.controller.server import Controller
from gemini_hpc.controller.startup import ServiceError
from gemini_hpc.files import replace_file
from gemini_hpc.slurm import Slurm, SlurmError, find_tool
from gemini_hpc.slurm.ways import FILE, ApiRecord, Way

log = logging.getLogger("gemini_hpc.controller")


def _record_way(settings: Settings, way: Way) -> None:
    """Record the way to Slurm in the log and, for `doctor`, on disk."""
    log.log(logging.WARNING if way.is_fallback else logging.INFO, "event=slurm-api used=%s why=%s", way.name, way.why)
    record = ApiRecord(settings.slurm_api, way.name, way.why, way.is_fallback, clock.time())
    path = os.path.join(settings.state_dir, FILE)
    try:
        os.makedirs(settings.state_dir, mode=0o700, exist_ok=True)
        replace_file(path, msgspec.json.encode(record))
    except OSError as exc:
        log.warning("event=slurm-api-not-kept path=%s %s", path, exc.strerror)


async def _serve(settings: Settings) -> None:
    slurm = Slurm(
        on_call=lambda what, took: log.debug("slurm=%r ms=%.0f", what, took * 1000),
        api=settings.slurm_api,
        on_way=lambda way: _record_way(settings, way),
    )
    try:
        with suppress(SlurmError):  # on failure the first query to Slurm chooses the way
            await slurm.choose_way()
        await _act(settings, slurm)
    finally:
        await slurm.close()


async def _act(settings: Settings, slurm: Slurm) -> None:
    first = True
    while True:
        primary = Primary(slurm)
        config = await primary.wait_in_charge()
        try:
            controller = Controller(settings, slurm, primary, config.state_save)
        except LockTakenError as exc:
            if first and len(config.slurmctld_hosts) < 2:
                raise ServiceError(f"{exc}; stop it first") from None
            # The controller that stood here before may still be stepping down, or its host's lease must end first.
            log.warning("event=standby reason=%s", exc)
            await asyncio.sleep(1.0)
            continue
        first = False
        await controller.serve()


async def _main(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    serving = asyncio.ensure_future(_serve(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    with suppress(asyncio.CancelledError):
        await serving


def main(settings: Settings, verbose: bool = False) -> int:
    """Run in the foreground until SIGTERM. Return 0, or 1 after one line on stderr."""
    logs.write_to(sys.stderr, verbose=verbose)
    try:
        startup.become_slurm_user(settings)
        startup.raise_limits()
        find_tool("scontrol")
        asyncio.run(_main(settings))
    except (ServiceError, SlurmError, OSError) as exc:
        print(f"gemini-hpc controller: {exc}", file=sys.stderr)
        return 1
    return 0
