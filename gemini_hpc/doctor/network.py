"""Checks of ports, addresses and the connection to the controller, with a test greeting to it."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from gemini_hpc.agent.peers.listen_address import find_interface_address
from gemini_hpc.agent.replicas.memory import Budget
from gemini_hpc.agent.transfer.rdma import RdmaError, find_port
from gemini_hpc.config import Settings
from gemini_hpc.doctor.facts import CONTROLLER, HostFacts, list_sockets, read_text
from gemini_hpc.doctor.finding import (
    Outcome,
    Unavailable,
    combine_outcomes,
    join_some,
    report_ok,
    report_warning,
    report_wrong,
)
from gemini_hpc.query.ask import QueryError, build_client
from gemini_hpc.settings import RDMA_OFF
from gemini_hpc.wire import credentials, endpoint, hostname
from gemini_hpc.wire.frames import FrameError, pack_bare, read_bare
from gemini_hpc.wire.handshake import MAX_HELLO_BYTES, Envelope, HandshakeError

MASTER_PORTS = (24000, 31999)
_EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
_RESERVED = "/proc/sys/net/ipv4/ip_local_reserved_ports"
_FIRST_USER = 1000
_MAX_LINES = 200_000


@dataclass(frozen=True, slots=True)
class Range:
    """A range of our TCP ports, both ends included."""

    name: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.name} ({self.first}-{self.last})" if self.last > self.first else f"{self.name} ({self.first})"

    def intersects(self, first: int, last: int) -> bool:
        """Return whether the two ranges have a port in common."""
        return self.first <= last and first <= self.last


def list_our_ranges(s: Settings) -> list[Range]:
    """Return our port ranges, as in the administrators' guide."""
    return [
        Range("agents", s.agent_port_base, s.agent_port_base + s.agent_port_count - 1),
        Range("MASTER_PORT", *MASTER_PORTS),
        Range("the controller", s.controller_port, s.controller_port),
    ]


def check_slurm_ports(facts: HostFacts) -> Outcome:
    """Check that Slurm's own ports are not among ours."""
    s, conf = facts.settings, facts.conf
    outcomes = []
    for key in ("SlurmctldPort", "SlurmdPort", "SrunPortRange", "AccountingStoragePort"):
        span = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", conf[key])
        if not span or not int(span[1]):
            continue
        first, last = int(span[1]), int(span[2] or span[1])
        outcomes += [
            report_wrong(
                f"{key}={conf[key]} overlaps the ports of {own_range}",
                "ranges apart",
                "agent_port_base, agent_port_count, controller_port in gemini.toml, or Slurm's range",
            )
            for own_range in list_our_ranges(s)
            if own_range.intersects(first, last)
        ]
    port = conf["SlurmdPort"]
    if port.isdigit() and int(port) not in (0, s.slurmd_port):
        found = f"slurmd_port is {s.slurmd_port}, Slurm's SlurmdPort {port}"
        outcomes.append(report_warning(found, "the same", f"slurmd_port = {port} in gemini.toml"))
    return combine_outcomes(outcomes) if outcomes else report_ok("Slurm's ports and gemini-hpc's do not overlap")


def _read_numbers(path: str) -> str:
    try:
        return read_text(path)
    except OSError as exc:
        raise Unavailable(f"{path}: {exc.strerror}") from None


def is_reserved(ports: Range, reserved: str) -> bool:
    """Return whether the kernel reserves all of these ports (ip_local_reserved_ports, such as `1,17000-21095`)."""
    left = set(range(ports.first, ports.last + 1))
    for first, last in re.findall(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", reserved):
        left -= set(range(int(first), int(last or first) + 1))
    return not left


def check_ephemeral(facts: HostFacts) -> Outcome:
    """Check that our ports are not among those that the kernel assigns to outgoing connections.

    Such a port may be taken when we need it.
    """
    span = re.fullmatch(r"\s*([0-9]{1,5})\s+([0-9]{1,5})\s*", text := _read_numbers(_EPHEMERAL))
    if span is None:
        raise Unavailable(f"{_EPHEMERAL} does not hold two numbers: {text[:40]!r}")
    first, last = int(span[1]), int(span[2])
    reserved = _read_numbers(_RESERVED)
    hit = [
        own_range
        for own_range in list_our_ranges(facts.settings)
        if own_range.intersects(first, last) and not is_reserved(own_range, reserved)
    ]
    if hit:
        return report_warning(
            f"the kernel hands out ports {first}-{last}, among them those of {join_some(map(str, hit), ', ')}",
            "gemini-hpc's ports outside net.ipv4.ip_local_port_range",
            "net.ipv4.ip_local_reserved_ports = " + ",".join(f"{m.first}-{m.last}" for m in hit) + " with sysctl",
        )
    return report_ok(f"the kernel hands out {first}-{last}, none of gemini-hpc's ports")


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A listening TCP socket."""

    port: int
    uid: int
    inode: int


def parse_listeners(text: str) -> list[ListeningSocket]:
    """Return the listening sockets in the text of /proc/net/tcp or tcp6."""
    found = []
    for line in text.splitlines()[1:_MAX_LINES]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == "0A":
            with suppress(ValueError):
                found.append(ListeningSocket(int(fields[1].rpartition(":")[2], 16), int(fields[7]), int(fields[9])))
    return found


def _is_stranger(facts: HostFacts, listener: ListeningSocket) -> bool:
    # A user cannot see which process the listener is.
    return facts.root or listener.uid != facts.slurm_uid


def check_in_use(facts: HostFacts) -> Outcome:
    """Check for another program's service on one of our ports."""
    everybody: list[ListeningSocket] = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(path, encoding="ascii", errors="replace") as f:
            everybody += parse_listeners(f.read(32 << 20))
    agents, master, controller = list_our_ranges(facts.settings)
    own_sockets: set[int] = set()
    for process in facts.processes:
        if process.agent_of is not None or process.controller:
            own_sockets |= list_sockets(process.pid)
    holders = {inode: p for p in facts.processes for inode in list_sockets(p.pid)} if facts.root else {}
    hits, unknown = [], False
    for listener in everybody:
        if listener.inode in own_sockets:
            continue
        if agents.intersects(listener.port, listener.port):
            # Another user's listener may well be an agent: only root can see that.
            unknown = unknown or not facts.root
            if facts.root or listener.uid < _FIRST_USER:
                hits.append((listener, agents))
        elif master.intersects(listener.port, listener.port) and listener.uid < _FIRST_USER:
            hits.append((listener, master))
        elif listener.port == controller.first and CONTROLLER in facts.roles and _is_stranger(facts, listener):
            hits.append((listener, controller))
    if hits:
        conflicts = []
        for listener, which in hits:
            holder = holders.get(listener.inode)
            listener_name = f"{holder.name} (pid {holder.pid})" if holder else f"uid {listener.uid}"
            conflicts.append(f"{listener_name} listens on {listener.port}, a port of {which}")
        return report_warning(
            join_some(conflicts),
            "no other program on gemini-hpc's ports",
            "move that program, or change the ports in gemini.toml",
        )
    if unknown:
        raise Unavailable("other users listen on ports of agents: only root can see whether they are agents")
    return report_ok("no other program listens on gemini-hpc's ports")


def check_addresses(facts: HostFacts) -> Outcome:
    """Check that agents listen at the address that their peers dial."""
    s, node = facts.settings, facts.own_node
    name = node.name if node else facts.hostname
    if s.interface:
        if not find_interface_address(s.interface)[0]:
            return report_wrong(
                f"interface {s.interface!r} has no IPv4 address on this node: agents listen on all of them",
                "an interface with an address",
                "correct interface in gemini.toml",
            )
        if s.peer_address == "{host}":
            return report_warning(
                f"interface is {s.interface!r}, but peers dial the plain host name",
                "a peer_address that resolves to that interface",
                'set peer_address, such as "{host}-ib0"',
            )
    dialled = s.format_address(name)
    try:
        found = {
            str(entry[4][0]) for entry in socket.getaddrinfo(hostname.resolve_hostname(dialled), None, socket.AF_INET)
        }
    except OSError as exc:
        text = f"peers dial {dialled!r}, which has no IPv4 address: {exc.strerror or exc}"
        return report_wrong(
            text, "a name that resolves to this host", "peer_address in gemini.toml, or the name service"
        )
    for address in found:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((address, 0))  # only an address of this host can be bound
            if not address.startswith("127."):
                return report_ok(f"peers dial {dialled} ({address})")
    text = f"peers dial {dialled!r}, which is {join_some(sorted(found), ', ')}: peers cannot reach this host there"
    return report_wrong(
        text, "an address of this host that its peers reach", "peer_address in gemini.toml, or the name service"
    )


def check_controller(facts: HostFacts) -> Outcome:
    """Check that the controller answers, since agents report to it and `inspect` asks it."""
    s = facts.settings
    if not s.controller_host:
        raise Unavailable("no controller_host in the settings: Slurm's own detection only (see slurm.detection)")
    try:
        greet(s, facts.slurm_uid)
    except GreetingError as exc:
        return report_wrong(
            f"no greeting from the controller: {exc}",
            f"the controller at {s.controller_host}:{s.controller_port}, as {s.slurm_user}",
            "start it (gemini-hpc controller), open the port in the firewall, or correct the settings on one side",
        )
    return report_ok(f"{s.controller_host}:{s.controller_port} answers as {s.slurm_user}")


def judge_rdma(setting: str | tuple[str, ...], port: str, reason: str, locked: int | None, cap: int) -> Outcome:
    """Judge the device for RDMA.

    Args:
        setting: The setting `rdma`.
        port: The port that agents would use; "" if none.
        reason: Reason why there is none.
        locked: Bytes that slurmd, and so an agent, may lock; None: no limit, or slurmd does not run.
        cap: Bytes of replicas that one agent may take.
    """
    if setting == RDMA_OFF:
        return report_ok("rdma is off: agents push over TCP")
    if not port:
        fix = "pip install '.[rdma]' and libibverbs1 on the nodes, or another device; or rdma off in gemini.toml"
        return report_warning(f"agents push over TCP: {reason}", "a port for RDMA, as the setting asks", fix)
    if locked is not None and locked < cap:
        found = f"{port} is active, but slurmd's limit of locked memory is {locked >> 20:,} MiB"
        fix = "systemctl edit slurmd.service: [Service] LimitMEMLOCK=infinity"
        return report_warning(f"{found}: larger slots go over TCP", f"at least the cap of {cap >> 20:,} MiB", fix)
    return report_ok(f"{port} is active; agents try each peer before they use it")


def check_rdma(facts: HostFacts) -> Outcome:
    """Check that agents find the device that the setting asks for, and may lock their memory."""
    setting, port, reason, locked = facts.settings.rdma, "", "", None
    if setting != RDMA_OFF:
        try:
            port = find_port(setting).title
        except RdmaError as exc:
            reason = str(exc)
        for process in (p for p in facts.processes if p.name == "slurmd"):
            found = re.search(
                r"^Max locked memory\s+(\d+)", _read_numbers(f"/proc/{process.pid}/limits"), re.MULTILINE
            )
            locked = int(found[1]) if found else None
    return judge_rdma(setting, port, reason, locked, Budget(facts.settings).cap_bytes)


TIMEOUT_S = 3.0  # a host that is up answers within a round trip; several are dialled


class GreetingError(Exception):
    """The error that no greeting came back; its text tells how far the exchange went."""


def greet(settings: Settings, slurm_uid: int) -> int:
    """Return the Unix time at which the controller made its answer, by its clock. Raises `GreetingError`."""
    hosts = settings.list_controller_hosts()
    if not hosts:
        raise GreetingError("no controller_host in the settings")
    for host in hosts[:-1]:
        with suppress(GreetingError):
            return _greet(settings, host, slurm_uid)
    return _greet(settings, hosts[-1], slurm_uid)


def _greet(settings: Settings, host: str, slurm_uid: int) -> int:
    port = settings.controller_port
    where = f"{host}:{port}"
    try:
        client = build_client(settings, 0, host, slurm_uid)
        with socket.create_connection((hostname.resolve_hostname(host), port), timeout=TIMEOUT_S) as sock:
            sock.sendall(pack_bare(client.build_greeting(endpoint.read_remote(sock))))
            envelope = msgspec.msgpack.decode(read_bare(sock, MAX_HELLO_BYTES), type=Envelope)
        if envelope.refusal:
            raise GreetingError(f"{where} refuses this host: {envelope.refusal[:200]}")
        opened = credentials.decode(envelope.credential)
    except FrameError:
        raise GreetingError(
            f"{where} closes the connection; possible causes: a different key there, clocks more than "
            f"{credentials.TTL_S} s apart, a different slurm_user, or another program on this port"
        ) from None
    except OSError as exc:
        raise GreetingError(f"{where}: {exc.strerror or exc}") from None
    except UnicodeError:
        raise GreetingError(f"{where}: not a host name") from None
    except HandshakeError as exc:
        raise GreetingError(str(exc)) from None
    except (credentials.CredentialError, QueryError) as exc:
        raise GreetingError(f"{where}: {exc}") from None
    except msgspec.MsgspecError:
        raise GreetingError(f"{where} does not speak gemini-hpc's protocol") from None
    if opened.uid not in (slurm_uid, 0):
        raise GreetingError(f"uid {opened.uid} answers at {where}, expected {settings.slurm_user} (uid {slurm_uid})")
    return opened.made_s
