"""TCP probes from the controller's own seat.

An accepted connection proves a living kernel and nothing more: the kernel of a frozen node still accepts. So each
probe closes its own half at once and waits for the other side to do the same, which only a process that runs can do.
That needs no word of Slurm's protocol, and leaves no more in slurmd's log than a bare connect.

Where slurmd and agent give no sign, ports on which nobody listens are tried: a living kernel refuses there. Any user
can fill the queue of a port that somebody listens on, so that its kernel drops new connections; nobody but root can
listen on a port below 1024, and nobody can fill all of the agents'.
"""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

from gemini_hpc import clock
from gemini_hpc.config import Settings
from gemini_hpc.controller import tasks
from gemini_hpc.controller.fencing import Port
from gemini_hpc.wire.hostname import dialled_beside

RESOLVE_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 0.4
ANSWER_TIMEOUT_S = 1.5
AT_ONCE_S = 0.1
INTERVAL_S, MAX_INTERVAL_S = 0.15, 1.5
CLOSED_PORT = 1  # tcpmux, which no cluster serves
MAX_ADDRESSES = 3
LIFE = (Port.ANSWERS, Port.REFUSES, Port.HANGS)  # the strongest sign first
_PARALLEL = 128


async def _resolve(address: str, port: int) -> list[str]:
    """Numeric addresses of a host, in a time of its own: a slow resolver says nothing about the host. [] where it has
    none, or none in time."""
    with suppress(ValueError):
        return [str(ip_address(address))]
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            name = await dialled_beside(address)
            found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the former includes TimeoutError
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))[:MAX_ADDRESSES]


async def probe(address: str, port: int, timeout_s: float = CONNECT_TIMEOUT_S) -> Port:
    """One connect, and what the process behind it makes of a connection that ends at once. `UNKNOWN` where this host
    could not ask: a name without an address, no file descriptor, no port or no route of its own."""
    return await _probe(await _resolve(address, port), port, timeout_s)


async def _probe(addresses: Iterable[str], port: int, timeout_s: float = CONNECT_TIMEOUT_S) -> Port:
    """The same at the addresses of one host, each in its turn until one gives a sign of life."""
    found: list[Port] = []
    for address in addresses:
        one = await _connect(address, port, timeout_s)
        if one in LIFE:
            return one
        if one is not None:
            found.append(one)
    return _most_alive(found) if found else Port.UNKNOWN


async def _connect(address: str, port: int, timeout_s: float) -> Port | None:
    """One connect to a numeric address. None: this host has no route to such addresses (it may have no IPv6)."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address, port)
    except (ConnectionRefusedError, ConnectionResetError):
        return Port.REFUSES
    except TimeoutError:  # ETIMEDOUT as well
        return Port.SILENT
    except OSError as exc:
        if exc.errno == errno.ENETUNREACH:
            return None
        return Port.SILENT if exc.errno == errno.EHOSTUNREACH else Port.UNKNOWN
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


@dataclass(frozen=True, slots=True)
class Target:
    """Where one node is probed. `closed`: ports from which one is taken at random, on which nobody should listen."""

    address: str
    slurmd_port: int
    agent_ports: tuple[int, ...]
    closed: range

    @classmethod
    def of(cls, settings: Settings, address: str, slurmd_port: int, agent_ports: Iterable[int]) -> Target:
        """A node of this site."""
        closed = range(settings.agent_port_base, settings.agent_port_base + settings.agent_port_count)
        return cls(address, slurmd_port or settings.slurmd_port, tuple(agent_ports), closed)


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a node found; `kernel` is asked only where nothing else gave a sign of life. `after_s`: how
    long its name was being resolved before."""

    slurmd: Port
    agent: Port
    kernel: Port
    after_s: float = 0.0


def _most_alive(found: Iterable[Port]) -> Port:
    """The strongest sign of life; without one, silence only where nobody failed to ask."""
    ports = set(found)
    return next((p for p in (*LIFE, Port.UNKNOWN) if p in ports), Port.SILENT)


async def look(target: Target) -> Look:
    """slurmd's port and the agent's, and where none gives a sign of life at once the kernel at ports on which nobody
    listens."""
    listening, began = (target.slurmd_port, *target.agent_ports), clock.monotonic()
    where = await _resolve(target.address, target.slurmd_port)
    after_s = clock.monotonic() - began
    tried = [asyncio.ensure_future(_probe(where, port)) for port in listening]
    closed: list[asyncio.Future[Port]] = []
    try:
        done, _ = await asyncio.wait(tried, timeout=AT_ONCE_S)
        if _most_alive(one.result() for one in done) not in LIFE:
            ports = (CLOSED_PORT, random.choice(target.closed))
            closed = [asyncio.ensure_future(_probe(where, port)) for port in ports]
        slurmd, *agents = await asyncio.gather(*tried)
        agent = _most_alive(agents)
        return Look(slurmd, agent, _most_alive((slurmd, agent, *await asyncio.gather(*closed))), after_s)
    finally:
        for one in (*tried, *closed):
            one.cancel()


async def looks(targets: Mapping[str, Target]) -> dict[str, Look]:
    """One look at each host, in parallel."""
    gate = asyncio.Semaphore(_PARALLEL)

    async def one(target: Target) -> Look:
        async with gate:
            return await look(target)

    results = await asyncio.gather(*(one(target) for target in targets.values()))
    return dict(zip(targets, results, strict=True))


PORTS = ("slurmd", "agent", "kernel")


class Seen:
    """What the looks at one node have found so far.

    A sign of life of a port is a veto until `FORGET_S`, or `confirm_s` if less, later; silence is counted from the
    start of the first look after the last sign of life, and after the last that this host could not ask. Where nobody
    looks any more there is no silence.
    """

    FORGET_S = 2.0
    STALE_S = 4.0

    def __init__(self, confirm_s: float = FORGET_S) -> None:
        # No sign of life may outlast the silence that is asked for.
        self._forget_s = min(self.FORGET_S, confirm_s)
        self._life: dict[str, tuple[float, Port]] = {}
        self._silent_since: dict[str, float | None] = dict.fromkeys(PORTS)
        self._unknown: set[str] = set()
        self._no_agent_since: float | None = None
        self._no_slurmd_since: float | None = None
        self._looked_at = 0.0
        self.rounds = 0

    def add(self, found: Look, began: float) -> None:
        """Count one look that began at `began` (monotonic)."""
        began += found.after_s  # nobody was asked before
        for what, port in zip(PORTS, (found.slurmd, found.agent, found.kernel), strict=True):
            self.note(what, port, began)
        if found.agent in (Port.ANSWERS, Port.UNKNOWN):
            self._no_agent_since = None
        elif self._no_agent_since is None:
            self._no_agent_since = began
        if found.slurmd is Port.ANSWERS:
            self._no_slurmd_since = None
        elif self._no_slurmd_since is None:
            self._no_slurmd_since = began
        self._looked_at = clock.monotonic()
        self.rounds += 1

    def note(self, what: str, port: Port, began: float) -> None:
        """Count what one port did in a probe that began at `began` (monotonic)."""
        self._unknown.discard(what)
        if port is Port.SILENT:
            if self._silent_since[what] is None:
                self._silent_since[what] = began
            return
        self._silent_since[what] = None
        if port is Port.UNKNOWN:
            self._unknown.add(what)
            return
        # A process that answered has done so by now; a kernel that accepted did so when the probe began.
        self._life[what] = (began if port is Port.HANGS else clock.monotonic(), port)

    def found(self, what: str) -> Port:
        """What `slurmd`, `agent` or `kernel` does."""
        last, now = self._life.get(what), clock.monotonic()
        unbroken = self._silent_since[what] is None and now - self._looked_at < self.STALE_S
        if what in self._unknown and (last is None or now - last[0] >= self._forget_s):
            return Port.UNKNOWN
        if last is not None and (unbroken or now - last[0] < self._forget_s):
            return last[1]
        return Port.SILENT

    def _since(self, *since: float | None) -> float:
        now = clock.monotonic()
        if self.rounds == 0 or None in since or now - self._looked_at > self.STALE_S:
            return 0.0
        return now - max(s for s in since if s is not None)

    @property
    def silent_s(self) -> float:
        """How long all ports have been silent."""
        return self._since(*self._silent_since.values())

    @property
    def agent_silent_s(self) -> float:
        """How long no agent has answered, refused or not."""
        return self._since(self._no_agent_since)

    @property
    def slurmd_silent_s(self) -> float:
        """How long no slurmd has answered, refused or not."""
        return self._since(self._no_slurmd_since)


class Series(Seen):
    """Repeated looks at one node, until stopped. `died` hears of the task's own faults."""

    def __init__(self, target: Target, died: tasks.Died) -> None:
        super().__init__()
        self.target = target
        self._pause_s = INTERVAL_S
        self._task = tasks.start(f"probes of {target.address}", self._run, died)

    async def _run(self) -> None:
        while True:
            began = clock.monotonic()
            found = await look(self.target)
            self.add(found, began)
            # Each bare connection leaves two lines in slurmd's log: a node that lives is asked less and less.
            alive = found.slurmd is not Port.SILENT
            self._pause_s = min(MAX_INTERVAL_S, 2 * self._pause_s) if alive else INTERVAL_S
            await asyncio.sleep(max(0.0, self._pause_s - (clock.monotonic() - began)))

    def stop(self) -> None:
        """No more probes."""
        self._task.cancel()
