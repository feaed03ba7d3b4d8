"""The TCP probes from the controller's own host.

An accepted connection proves only a living kernel: the kernel of a frozen node still accepts. So each probe closes
its own half at once and waits for the peer to do the same, which requires a running process. The probe needs no
message of Slurm's protocol. It leaves no more in slurmd's log than a bare connect.

If slurmd and agent give no sign of life, ports without a listener are tried: a living kernel refuses there. Any
user can fill the queue of a port with a listener, so that its kernel drops new connections. But only root can
listen on a port below 1024, and no user can fill all of the agents' ports.
"""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeVar

from gemini_hpc import clock
from gemini_hpc.config import Settings
from gemini_hpc.controller import tasks
from gemini_hpc.controller.fencing import Port
from gemini_hpc.wire.hostname import resolve_in_thread

T = TypeVar("T")
R = TypeVar("R")
RESOLVE_TIMEOUT_S = 2.0  # of its own: a slow resolver proves nothing about the host
CONNECT_TIMEOUT_S = 0.4  # a port that has not accepted or refused by then is silent
ANSWER_TIMEOUT_S = 1.5  # a process that has not closed an accepted connection by then hangs
AT_ONCE_S = 0.1  # without a sign of life by then, the kernel is probed, too
INTERVAL_S, MAX_INTERVAL_S = 0.15, 1.5  # pause between two probes of a node; it grows for a node that lives
CLOSED_PORT = 1  # tcpmux, which no cluster serves
MAX_ADDRESSES = 3
LIFE = (Port.ANSWERS, Port.REFUSES, Port.HANGS)  # the strongest sign first
_PARALLEL = 128


async def _resolve(address: str, port: int) -> list[str]:
    """Return the numeric addresses of a host; none if it has none or the resolver is late.

    The resolver has a time limit of its own, because a slow resolver proves nothing about the host.
    """
    with suppress(ValueError):
        return [str(ip_address(address))]
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            name = await resolve_in_thread(address)
            found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # OSError includes TimeoutError
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))[:MAX_ADDRESSES]


async def probe_port(address: str, port: int, timeout_s: float = CONNECT_TIMEOUT_S) -> Port:
    """Connect once, end the connection at once, and return how the process behind the port reacts.

    `UNKNOWN` means that this host could not probe. It lacks an address for the name, a file descriptor, a local
    port or a route.
    """
    return await _probe(await _resolve(address, port), port, timeout_s)


async def _probe(addresses: Iterable[str], port: int, timeout_s: float = CONNECT_TIMEOUT_S) -> Port:
    """Probe the addresses of one host in turn until one gives a sign of life."""
    found: list[Port] = []
    for address in addresses:
        one = await _connect(address, port, timeout_s)
        if one in LIFE:
            return one
        if one is not None:
            found.append(one)
    return _choose_most_alive(found) if found else Port.UNKNOWN


async def _connect(address: str, port: int, timeout_s: float) -> Port | None:
    """Connect once to a numeric address.

    None means that this host has no route to such addresses (it may have no IPv6).
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address, port)
    except (ConnectionRefusedError, ConnectionResetError):
        return Port.REFUSES
    except TimeoutError:  # ETIMEDOUT, too
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
    except OSError:  # a reset, by the process or by a kernel that has lost it
        return Port.ANSWERS
    finally:
        writer.transport.abort()


async def _probe_each(targets: Mapping[str, T], probe: Callable[[T], Awaitable[R]]) -> dict[str, R]:
    gate = asyncio.Semaphore(_PARALLEL)

    async def probe_one(target: T) -> R:
        async with gate:
            return await probe(target)

    results = await asyncio.gather(*(probe_one(target) for target in targets.values()))
    return dict(zip(targets, results, strict=True))


async def probe_ports(targets: Mapping[str, tuple[str, int]]) -> dict[str, Port]:
    """Probe each host once, in parallel. Return the behavior of its port by name."""
    return await _probe_each(targets, lambda target: probe_port(*target))


@dataclass(frozen=True, slots=True)
class Target:
    """The addresses for probing one node.

    `closed` are ports without a listener, as far as known. One of them is chosen at random.
    """

    address: str
    slurmd_port: int
    agent_ports: tuple[int, ...]
    closed: range

    @classmethod
    def build(cls, settings: Settings, address: str, slurmd_port: int, agent_ports: Iterable[int]) -> Target:
        """Return the target for a node of this site."""
        closed = range(settings.agent_port_base, settings.agent_port_base + settings.agent_port_count)
        return cls(address, slurmd_port or settings.slurmd_port, tuple(agent_ports), closed)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of probing a node once.

    Attributes:
        slurmd: Behavior of slurmd's port.
        agent: Behavior of the agent's ports.
        kernel: Behavior of ports without a listener. They are probed only if no other port gave a sign of life.
        after_s: Seconds that resolving the name took before the probe.
    """

    slurmd: Port
    agent: Port
    kernel: Port
    after_s: float = 0.0


def _choose_most_alive(found: Iterable[Port]) -> Port:
    """Return the strongest sign of life. Without one, return silence only if every probe could be made."""
    ports = set(found)
    return next((p for p in (*LIFE, Port.UNKNOWN) if p in ports), Port.SILENT)


async def probe_node(target: Target) -> ProbeResult:
    """Probe slurmd's port and the agent's ports.

    If none gives a sign of life at once, probe ports without a listener for the kernel, too.
    """
    listening, began = (target.slurmd_port, *target.agent_ports), clock.monotonic()
    where = await _resolve(target.address, target.slurmd_port)
    after_s = clock.monotonic() - began
    tried = [asyncio.ensure_future(_probe(where, port)) for port in listening]
    closed: list[asyncio.Future[Port]] = []
    try:
        done, _ = await asyncio.wait(tried, timeout=AT_ONCE_S)
        if _choose_most_alive(one.result() for one in done) not in LIFE:
            ports = (CLOSED_PORT, random.choice(target.closed))
            closed = [asyncio.ensure_future(_probe(where, port)) for port in ports]
        slurmd, *agents = await asyncio.gather(*tried)
        agent = _choose_most_alive(agents)
        return ProbeResult(
            slurmd, agent, _choose_most_alive((slurmd, agent, *await asyncio.gather(*closed))), after_s
        )
    finally:
        for one in (*tried, *closed):
            one.cancel()


async def probe_nodes(targets: Mapping[str, Target]) -> dict[str, ProbeResult]:
    """Probe each host once, in parallel."""
    return await _probe_each(targets, probe_node)


PORTS = ("slurmd", "agent", "kernel")


class ProbeHistory:
    """The results so far of probing one node.

    A sign of life of a port vetoes for `FORGET_S`, or for `confirm_s` if that is less. Silence counts from the
    start of the first probe after the last sign of life. It also starts no earlier than after the last probe that
    this host could not make. Without recent probes there is no silence.
    """

    FORGET_S = 2.0  # a sign of life counts for this long
    STALE_S = 4.0  # without a probe for this long, silence does not count

    def __init__(self, confirm_s: float = FORGET_S) -> None:
        # No sign of life may outlast the required silence.
        self._forget_s = min(self.FORGET_S, confirm_s)
        self._life: dict[str, tuple[float, Port]] = {}
        self._silent_since: dict[str, float | None] = dict.fromkeys(PORTS)
        self._unknown: set[str] = set()
        self._unanswered_since: dict[str, float | None] = {"slurmd": None, "agent": None}
        self._looked_at = 0.0
        self.rounds = 0

    def add_result(self, found: ProbeResult, began: float) -> None:
        """Count a result whose probe began at `began` (monotonic)."""
        began += found.after_s  # the probe itself began after the name was resolved
        for what, port in zip(PORTS, (found.slurmd, found.agent, found.kernel), strict=True):
            self.note_port(what, port, began)
        answers = {"slurmd": found.slurmd is Port.ANSWERS, "agent": found.agent in (Port.ANSWERS, Port.UNKNOWN)}
        for what, does in answers.items():
            since = self._unanswered_since[what]
            self._unanswered_since[what] = None if does else began if since is None else since
        self._looked_at = clock.monotonic()
        self.rounds += 1

    def note_port(self, name: str, port: Port, began: float) -> None:
        """Count the behavior of one port in a probe that began at `began` (monotonic)."""
        self._unknown.discard(name)
        if port is Port.SILENT:
            if self._silent_since[name] is None:
                self._silent_since[name] = began
            return
        self._silent_since[name] = None
        if port is Port.UNKNOWN:
            self._unknown.add(name)
            return
        # A process that answered was alive just now; a kernel that accepted was alive when the probe began.
        self._life[name] = (began if port is Port.HANGS else clock.monotonic(), port)

    def judge_port(self, name: str) -> Port:
        """Return the behavior of `slurmd`, `agent` or `kernel`."""
        last, now = self._life.get(name), clock.monotonic()
        unbroken = self._silent_since[name] is None and now - self._looked_at < self.STALE_S
        if name in self._unknown and (last is None or now - last[0] >= self._forget_s):
            return Port.UNKNOWN
        if last is not None and (unbroken or now - last[0] < self._forget_s):
            return last[1]
        return Port.SILENT

    def _measure_silence_s(self, *since: float | None) -> float:
        now = clock.monotonic()
        if self.rounds == 0 or None in since or now - self._looked_at > self.STALE_S:
            return 0.0
        return now - max(s for s in since if s is not None)

    @property
    def silent_s(self) -> float:
        """Return for how many seconds all ports have been silent."""
        return self._measure_silence_s(*self._silent_since.values())

    @property
    def agent_silent_s(self) -> float:
        """Return for how many seconds no agent has answered, whether its port refused or not."""
        return self._measure_silence_s(self._unanswered_since["agent"])

    @property
    def slurmd_silent_s(self) -> float:
        """Return for how many seconds no slurmd has answered, whether its port refused or not."""
        return self._measure_silence_s(self._unanswered_since["slurmd"])


class RepeatedProbe(ProbeHistory):
    """The repeated probes of one node, until stopped. `died` is called if the task itself fails."""

    def __init__(self, target: Target, died: tasks.Died) -> None:
        super().__init__()
        self.target = target
        self._pause_s = INTERVAL_S
        self._task = tasks.start(f"probes of {target.address}", self._run, died)

    async def _run(self) -> None:
        while True:
            began = clock.monotonic()
            found = await probe_node(self.target)
            self.add_result(found, began)
            # Each bare connection leaves two lines in slurmd's log, so a living node is probed less and less often.
            alive = found.slurmd is not Port.SILENT
            self._pause_s = min(MAX_INTERVAL_S, 2 * self._pause_s) if alive else INTERVAL_S
            await asyncio.sleep(max(0.0, self._pause_s - (clock.monotonic() - began)))

    def stop(self) -> None:
        """Stop probing."""
        self._task.cancel()
