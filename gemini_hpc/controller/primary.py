"""The check whether this host's controller may act (requirement one-controller).

Its slurmctld must be in charge and must have been up for a while. If slurmctld has backups, a controller runs
beside each of them, and all but one stand by. The lock lies in StateSaveLocation, which slurmctld's own hosts
share. So two controllers never act at the same time, whatever they believe.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from gemini_hpc import clock
from gemini_hpc.slurm import SlurmError
from gemini_hpc.slurm.api import SlurmApi
from gemini_hpc.slurm.facts import SlurmConfig

log = logging.getLogger("gemini_hpc.controller")

LOCK = "gemini-hpc.lock"
LOOK_S = 2.0  # pause between two checks of slurmctld's hosts
ALONE_LOOK_S = 30.0  # a slurmctld without a backup is in charge or absent


@dataclass(frozen=True, slots=True)
class PrimaryHost:
    """The answer of slurmctld's hosts at one moment.

    Attributes:
        is_here: Whether the slurmctld in charge runs on this host.
        host: Host of the slurmctld in charge; "" if none answers.
        is_alone: Whether slurmctld has no backup.
    """

    is_here: bool
    host: str
    is_alone: bool


class Primary:
    """The watch over slurmctld's hosts; the service has one for its lifetime."""

    def __init__(self, slurm: SlurmApi) -> None:
        self._slurm = slurm
        self._config: SlurmConfig | None = None
        self._config_at = 0.0
        self._charge_since: float | None = None

    async def read_config(self, max_age_s: float = 0.0) -> SlurmConfig:
        """Return Slurm's configuration, at most `max_age_s` seconds old.

        Raises:
            SlurmError: Slurm did not answer.
        """
        if self._config is None or clock.monotonic() - self._config_at > max_age_s:
            self._config = await self._slurm.read_config()
            self._config_at = clock.monotonic()
        return self._config

    async def find_primary(self) -> PrimaryHost:
        """Return which host is in charge.

        Raises:
            SlurmError: No slurmctld answers.
        """
        config = await self.read_config()
        hosts = config.slurmctld_hosts
        if len(hosts) < 2:
            name, address = hosts[0] if hosts else ("", "")
            return PrimaryHost(is_here(name, address), name, True)
        up = {name for name, answers in await self._slurm.ping_slurmctlds() if answers}
        for name, address in hosts:
            if name in up:
                is_local = is_here(name, address)
                if not is_local:
                    self._charge_since = None
                elif self._charge_since is None:
                    self._charge_since = clock.monotonic()
                return PrimaryHost(is_local, name, False)
        return PrimaryHost(False, "", False)

    async def wait_in_charge(self) -> SlurmConfig:
        """Wait until the slurmctld in charge is on this host. Log the reason for waiting once."""
        logged = ""
        while True:
            try:
                standing = await self.find_primary()
                if standing.is_here:
                    return await self.read_config(LOOK_S)
                why = f"the slurmctld in charge is on {standing.host or 'no host that answers'}"
            except SlurmError as exc:
                why = str(exc)
            if why != logged:
                logged = why
                log.info("event=standby reason=%s", why)
            await asyncio.sleep(LOOK_S)

    async def wait_lost(self) -> str:
        """Wait until another slurmctld takes charge and return its host's name. Silence changes nothing."""
        pause_s = LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            with suppress(SlurmError):
                standing = await self.find_primary()
                pause_s = ALONE_LOOK_S if standing.is_alone else LOOK_S
                if standing.host and not standing.is_here:
                    return standing.host

    async def measure_up_s(self) -> float:
        """Return for how many seconds slurmctld has been up and has answered this controller."""
        with suppress(SlurmError):
            config = await self.read_config(LOOK_S)
            quiet = [clock.time() - config.boot_time, clock.monotonic() - self._slurm.unreachable_at]
            if self._charge_since is not None:
                quiet.append(clock.monotonic() - self._charge_since)
            return max(0.0, min(quiet))
        return 0.0


def has_own_name(name: str) -> bool:
    """Return whether the name, without its domain, is this host's."""
    return name.partition(".")[0] == socket.gethostname().partition(".")[0]


def find_own_address(name: str) -> str:
    """Return the first address of the name that belongs to this host; "" if none does.

    Raises:
        OSError: The name cannot be resolved.
    """
    for family, kind, proto, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind, proto) as probe:
            probe.bind(address)
            return str(address[0])
    return ""


def is_here(name: str, address: str) -> bool:
    """Return whether the name or the address belongs to this host. A loopback address is any host's."""
    if has_own_name(name):
        return True
    for where in filter(None, (address, name)):
        with suppress(OSError):
            if found := find_own_address(where):
                return not found.startswith("127.")
    return False


class LockTakenError(Exception):
    """An error for a lock that another controller holds; the message names it."""


def acquire_lock(path: str) -> IO[str]:
    """Lock `path` for the lifetime of the returned handle.

    Raises:
        LockTakenError: Another controller holds the lock.
        OSError: The file could not be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    handle = os.fdopen(fd, "r+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = handle.read(200).strip() or "somebody"
        handle.close()
        raise LockTakenError(f"another controller ({holder}) holds {path}: only one may act") from None
    handle.seek(0)
    handle.truncate()
    handle.write(f"{socket.gethostname()} pid {os.getpid()}\n")
    handle.flush()
    return handle
