"""What the controller, and an epilog that holds survivors, ask the system for; and the life of a controller."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gemini_hpc import settings as site_settings
from gemini_hpc.config import Settings
from gemini_hpc.controller import epilog_fallback, primary, service
from gemini_hpc.controller.startup import ServiceError
from gemini_hpc.wire.link import Link

from .kernel import Process, current
from .network import Host
from .slurm import SimSlurm
from .slurmctld import Slurmctld
from .system import SLURM, World, flock, world

CONTROLLER = "controller"


def _nowhere(*_: Any, **__: Any) -> Any:
    raise OSError("another host's address")


def install(made: World, seed: int) -> None:
    """For the rest of this process, after `system.install`."""
    random.seed(seed)  # probes and samples of nodes
    secrets.token_hex = lambda n=None: made.rng.randbytes(n or 8).hex()  # type: ignore[assignment]
    os.getpid = lambda: 4242
    os.fdatasync = lambda fd: None
    made.uids[CONTROLLER] = SLURM
    site_settings._find_uid = lambda name, otherwise: SLURM
    names: Any = SimpleNamespace(
        gethostname=lambda: current().host, getaddrinfo=_nowhere, socket=socket.socket, SOCK_DGRAM=socket.SOCK_DGRAM
    )
    here: Any = primary
    here.socket, here.fcntl = names, SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4)
    numbers = itertools.count()
    # A set of links, which a controller that steps down closes, has one order then, whatever their addresses are.
    links: Any = Link
    links.__hash__ = lambda link: link.__dict__.setdefault("_number", next(numbers))
    epilog_fallback._log = lambda text: world().tell(f"hold on {current().host}: {text}")


class Log(logging.Handler):
    """The controller's log is part of the story; its tracebacks are faults of production code."""

    def __init__(self, made: World, fault: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._world, self._fault = made, fault
        logger = logging.getLogger("gemini_hpc.controller")
        logger.handlers, logger.propagate = [self], False
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        self._world.tell(f"controller@{current().host}: {text}")
        if record.exc_info and current().alive:
            self._fault(text)


class ControlHost:
    """One host that runs a controller; its supervisor starts it again. `restarts`: whether it does."""

    def __init__(
        self, made: World, host: Host, settings: Settings, ctld: Slurmctld, place: str, fault: Callable[[str], None]
    ) -> None:
        self.world, self.host, self.ctld = made, host, ctld
        self.settings = dataclasses.replace(settings, state_dir=f"{place}/state")
        self.state_save = f"{place}/save"
        self._fault = fault
        self.restarts = True
        self.process: Process | None = None
        self.lives = 0
        os.makedirs(self.state_save, exist_ok=True)
        self.start()

    def start(self) -> None:
        """A new one, unless one is there."""
        if self.process is not None and self.process.alive:
            return
        self.lives += 1
        process = self.process = Process(self.world.loop, CONTROLLER, self.host.name)
        process.on_kill.append(self._again)
        slurm: Any = SimSlurm(self.ctld, process, self.state_save)
        self.world.tell(f"{self.host.name} controller starts")
        process.spawn(service._act(self.settings, slurm)).add_done_callback(
            lambda task: self._returned(process, task)
        )

    def _returned(self, process: Process, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ServiceError):
            self._fault(f"the controller ends: {error!r}")
        process.kill()

    def _again(self) -> None:
        self.world.tell(f"{self.host.name} controller ends")
        if self.restarts:
            self.world.network.at(self.world.loop.now + self.world.rng.uniform(0.3, 6.0), self._supervise)

    def _supervise(self) -> None:
        if self.restarts and self.host.up:
            self.start()

    def kill(self, within: int) -> None:
        """It dies after so many of its next turns."""
        if self.process is not None and self.process.alive:
            self.process.dies_in = within
