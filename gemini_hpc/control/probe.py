"""TCP probes from the controller's own seat (SITE 2).

A refusal proves a living kernel. An accepted connection proves nothing: the kernel of a frozen node still accepts. So
each probe closes its own half at once and waits for the other side to do the same, which only a process that runs
can do. That needs no word of Slurm's protocol, and leaves no more in slurmd's log than a bare connect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from gemini_hpc.control.decide import Port

CONNECT_TIMEOUT_S = 0.4
ANSWER_TIMEOUT_S = 1.5
INTERVAL_S, MAX_INTERVAL_S = 0.15, 1.5
_PARALLEL = 128


async def probe(address: str, port: int, timeout_s: float = CONNECT_TIMEOUT_S) -> Port:
    """One connect, and what the process behind it makes of a connection that ends at once."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address, port)
    except (ConnectionRefusedError, ConnectionResetError):
        return Port.REFUSES
    except (OSError, TimeoutError):
        return Port.SILENT
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            writer.write_eof()
            await reader.read(1)
        return Port.ANSWERS
    except TimeoutError:
        return Port.HANGS
    except OSError:  # a reset: by the process, or by a kernel that has lost it
        return Port.ANSWERS
    finally:
        writer.transport.abort()


async def reached(targets: Mapping[str, tuple[str, int]]) -> dict[str, Port]:
    """One probe of each host, in parallel: name -> what its port did."""
    gate = asyncio.Semaphore(_PARALLEL)

    async def one(address: str, port: int) -> Port:
        async with gate:
            return await probe(address, port)

    results = await asyncio.gather(*(one(*target) for target in targets.values()))
    return dict(zip(targets, results, strict=True))


class Series:
    """Repeated probes of one suspect: slurmd's port and the agent's, until cancelled.

    A port that answers once counts as answering (a veto) until `FORGET_S` later; silence, which a port that hangs
    is too, is counted from the start of the first probe after the last sign of life.
    """

    FORGET_S = 2.0

    def __init__(self, address: str, slurmd_port: int, agent_ports: Iterable[int]) -> None:
        self._address = address
        self._slurmd_port = slurmd_port
        self.agent_ports = tuple(agent_ports)
        self._life: dict[str, tuple[float, Port]] = {}
        self._silent_since: dict[str, float | None] = {"slurmd": None, "agent": None}
        self._no_agent_since: float | None = None
        self._hung_at: float | None = None
        self.rounds = 0
        self._pause_s = INTERVAL_S
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            slurmd, *agents = await asyncio.gather(
                probe(self._address, self._slurmd_port), *(probe(self._address, p) for p in self.agent_ports)
            )
            best = Port.SILENT
            for port in (Port.HANGS, Port.REFUSES, Port.ANSWERS):
                if port in agents:
                    best = port
            self.note("slurmd", slurmd, began)
            self.note("agent", best, began)
            if best is Port.ANSWERS:
                self._no_agent_since = None
            elif self._no_agent_since is None:
                self._no_agent_since = began
            self.rounds += 1
            # Each bare connection leaves two lines in slurmd's log: a node that lives is asked less and less.
            dead = slurmd in (Port.SILENT, Port.HANGS)
            self._pause_s = INTERVAL_S if dead else min(MAX_INTERVAL_S, 2 * self._pause_s)
            await asyncio.sleep(max(0.0, self._pause_s - (time.monotonic() - began)))

    def note(self, what: str, port: Port, began: float) -> None:
        """Count one result of a probe that began at `began` (monotonic)."""
        if port is Port.HANGS:
            self._hung_at = time.monotonic()
        if port in (Port.SILENT, Port.HANGS):
            if self._silent_since[what] is None:
                self._silent_since[what] = began
        else:
            self._silent_since[what] = None
            self._life[what] = (time.monotonic(), port)

    def found(self, what: str) -> Port:
        """What `slurmd` or `agent` does."""
        last = self._life.get(what)
        if last is not None and time.monotonic() - last[0] < self.FORGET_S:
            return last[1]
        return Port.SILENT

    @property
    def silent_s(self) -> float:
        """How long both ports have been silent."""
        since = [self._silent_since[what] for what in ("slurmd", "agent")]
        if self.rounds == 0 or None in since:
            return 0.0
        return time.monotonic() - max(s for s in since if s is not None)

    @property
    def hangs(self) -> bool:
        """Whether a connection was lately accepted that nobody took up: a frozen node, or a very slow one."""
        return self._hung_at is not None and time.monotonic() - self._hung_at < 2 * self.FORGET_S

    @property
    def agent_silent_s(self) -> float:
        """How long no agent has answered, refused or not."""
        if self.rounds == 0 or self._no_agent_since is None:
            return 0.0
        return time.monotonic() - self._no_agent_since

    def stop(self) -> None:
        """No more probes."""
        self._task.cancel()
