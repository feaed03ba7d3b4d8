"""RDMA between two agents: the home's agent writes a version's bytes straight into the holder's slot.

The calls are those of `ibverbs` from PyPI. This module was built against a fake of it (`tests/sim/fake_verbs.py`)
and has never run on a device. So it is off by default, and TCP serves wherever it does not.

A writer on another node is the danger: its bytes may come late (docs/dev/protocol.md, R1). Therefore:

- Each version has a queue pair of its own, named only on the authenticated connection of its push. Nothing listens.
- Each slot has a protection domain of its own. Whatever key, address or length a peer uses, it reaches that slot.
- The holder ends the queue pair before it hashes the slot, and before anybody else gets it (`Window.close`).

The home tries a holder with random bytes before it relies on RDMA there. The simulation has devices whose bytes come
late, torn and in any order; two of its controls leave out the flush, or all of this.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import mmap
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from gemini_hpc import clock
from gemini_hpc.agent.peers.event_log import Log
from gemini_hpc.agent.peers.tasks import Spawn
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.transfer.threads import run_beside
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.settings import RDMA_OFF
from gemini_hpc.wire import peer
from gemini_hpc.wire.link import BlockingLink, LinkClosed

TRIAL_BYTES = 4 << 20
TRIAL_S = 2.0  # limit of a trial, in which a working device needs some milliseconds
REST_S = 600.0  # pause after a failure: a link that flaps would lose a version each time
_DRAIN_S = 1.0  # limit for the flush of a queue pair, which takes microseconds
_STUCK_S = 3.0  # a device gives a write up earlier, and the push would be given up later
_LOOK_S = 0.05  # interval of checks while no write completes
_WRITE_BYTES = 1 << 20
_DEPTH = 64  # writes under way
_MOST_PSN = (1 << 24) - 1
_HOPS = 64
_ETHERNET = 2  # IBV_LINK_LAYER_ETHERNET
_MOST_REASONS = 1000
_SYSFS = "/sys/class/infiniband"


class RdmaError(Exception):
    """A failure of a device or of the verbs. TCP serves instead."""


@contextmanager
def _convert_errors(action: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError) as exc:
        raise RdmaError(f"{action}: {exc}"[:300]) from None


def _wait_readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _end_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, eq=False)
class RdmaPort:
    """An active port of an open device."""

    verbs: Any
    name: str
    number: int
    context: Any
    gid_index: int
    gid: bytes
    lid: int
    mtu: int

    @property
    def title(self) -> str:
        """Return device and port, as in the setting."""
        return f"{self.name}:{self.number}"

    def describe_pair(self, queue_pair: Any, psn: int) -> peer.QueuePair:
        """Return what the other end needs to connect to a queue pair."""
        return peer.QueuePair(queue_pair.qp_num, psn, self.lid, self.gid, self.mtu)

    def connect(self, queue_pair: Any, other: peer.QueuePair, access: int) -> None:
        """Let a new queue pair receive from that one, and from nobody else."""
        info = self.verbs.QPInfo(other.number, other.psn, other.lid, other.gid, 1, other.mtu)
        queue_pair.to_init(self.number, access)
        queue_pair.to_rtr(info, self.gid_index, mtu=min(self.mtu, other.mtu), hop_limit=_HOPS)


def find_port(setting: str | Sequence[str]) -> RdmaPort:
    """Open the first active port of the devices in the setting, or of any.

    Raises:
        RdmaError: There is none.
    """
    try:
        verbs: Any = importlib.import_module("ibverbs")
    except ImportError as exc:
        raise RdmaError(f"ibverbs cannot be imported: {exc}"[:300]) from None
    found: list[str] = []
    with _convert_errors("the devices"):
        devices = {device.name: device for device in verbs.get_device_list()}
    for wanted in list(devices) if isinstance(setting, str) else setting:
        name, _, number = wanted.partition(":")
        if name not in devices:
            found.append(f"there is no {name}")
            continue
        try:
            with _convert_errors(name):
                if port := _find_port_of(verbs, devices[name], int(number or 0), found):
                    return port
        except RdmaError as exc:
            found.append(str(exc))
    raise RdmaError("; ".join(found)[:300] or "there is no device")


def _find_port_of(verbs: Any, device: Any, number: int, found: list[str]) -> RdmaPort | None:
    """Open a device and return its first active port. Without one, add the reasons to `found`.

    Args:
        verbs: The module `ibverbs`.
        device: The device.
        number: Number of the only port that may be taken; 0: any.
        found: Reasons why no port can be taken.
    """
    name, context = device.name, device.open()
    for one in (number,) if number else range(1, context.query_device().phys_port_cnt + 1):
        attributes = context.query_port(one)
        if attributes.state != verbs.PortState.ACTIVE:
            found.append(f"{name}:{one} is not active")
        elif (index := _find_gid_index(context, name, one, attributes)) is None:
            found.append(f"{name}:{one} has no address for RoCE v2")
        else:
            gid = context.query_gid(one, index).raw
            mtu = int(attributes.active_mtu)
            return RdmaPort(verbs, name, one, context, index, gid, attributes.lid, mtu)
    context.close()
    return None


def _find_gid_index(context: Any, name: str, port: int, attributes: Any) -> int | None:
    """Return the index of the port's address: the first one of InfiniBand, of Ethernet an IPv4 one for RoCE v2."""
    if attributes.link_layer != _ETHERNET:
        return 0
    best: int | None = None
    for index in range(min(attributes.gid_tbl_len, 256)):
        with suppress(OSError):
            with open(f"{_SYSFS}/{name}/ports/{port}/gid_attrs/types/{index}", encoding="ascii") as f:
                kind = f.read(64).strip()
            raw = context.query_gid(port, index).raw
            if kind == "RoCE v2" and any(raw):
                if raw[:12] == bytes(10) + b"\xff\xff":
                    return index
                best = index if best is None else best
    return best


class Registered:
    """Memory that the device may reach, in a protection domain without any other memory."""

    def __init__(self, port: RdmaPort, view: memoryview) -> None:
        """Register the memory (blocking, its pages are locked).

        Raises:
            RdmaError: The device refuses it, or the limit of locked memory does.
        """
        self.port, self.view, self.length = port, view, len(view)
        self._buffer: Any = ctypes.c_char.from_buffer(view)  # keeps the memory mapped
        self.address = ctypes.addressof(self._buffer)
        access, self._lock = port.verbs.AccessFlags, threading.Lock()
        try:
            with _convert_errors(f"{self.length} bytes cannot be registered (`ulimit -l` of slurmd?)"):
                self.domain = port.context.alloc_pd()
                self.region = self.domain.reg_mr(self.address, self.length, access.LOCAL_WRITE | access.REMOTE_WRITE)
        except RdmaError:
            self._release()
            raise

    def close(self) -> None:
        """Take the memory away from the device, which ends all writes into it.

        Raises:
            RdmaError: The device does not let go. The memory stays mapped.
        """
        with self._lock:
            if self._buffer is not None:
                with _convert_errors("the end of a registration"):
                    self.region.close()
                self._release()

    def forget(self) -> None:
        """Take the memory away from the device if it lets go."""
        with suppress(RdmaError):
            self.close()

    def _release(self) -> None:
        self._buffer = None
        self.view.release()


class _Completions:
    """A completion queue, and the wait for it."""

    def __init__(self, port: RdmaPort) -> None:
        self._channel = port.context.create_comp_channel()
        self.queue = port.context.create_cq(2 * _DEPTH, self._channel)

    def wait_next(self, timeout_s: float) -> list[Any]:
        """Return completions, [] if none comes in time."""
        if found := self.queue.poll(_DEPTH):
            return list(found)
        self.queue.req_notify()
        if found := self.queue.poll(_DEPTH):  # it came before the request
            return list(found)
        if _wait_readable(self._channel.fd, timeout_s):
            self._channel.get_cq_event()
            self.queue.ack_events(1)
        return list(self.queue.poll(_DEPTH))

    def close(self) -> None:
        with suppress(OSError, ValueError, RuntimeError):
            self.queue.close()
            self._channel.close()


class Window:
    """A peer's permission to write into memory here: one queue pair, for one version."""

    def __init__(self, memory: Registered, writer: peer.QueuePair) -> None:
        """Let the peer's queue pair write.

        Raises:
            RdmaError: The device refuses.
        """
        port = memory.port
        self._memory, self._is_open, psn = memory, True, _choose_psn()
        with _convert_errors("no queue pair"):
            self._completions = _Completions(port)
            attributes = port.verbs.QPInitAttr(self._completions.queue, self._completions.queue, max_send_wr=1)
            self._pair = memory.domain.create_qp(attributes)
        try:
            with _convert_errors("the queue pair"):
                port.connect(self._pair, writer, port.verbs.AccessFlags.REMOTE_WRITE)
                own = port.describe_pair(self._pair, psn)
        except RdmaError:
            self.close()
            raise
        self.place = peer.WriteWindow(own, memory.address, memory.region.rkey)

    def close(self) -> None:
        """End the permission. On return no byte of the peer arrives any more, and all that arrived can be read.

        An agent whose device does not obey ends itself: the kernel then takes the device's permissions away before
        the agent's successor is started.
        """
        if not self._is_open:
            return
        self._is_open = False
        if not any(self._ends(way) for way in (self._flush, self._pair.close, self._memory.close)):
            _end_process()
        with suppress(OSError, ValueError, RuntimeError):
            self._pair.close()
        self._completions.close()

    @staticmethod
    def _ends(attempt: Callable[[], None]) -> bool:
        try:
            attempt()
        except (RdmaError, OSError, ValueError, TypeError, RuntimeError):
            return False
        return True

    def _flush(self) -> None:
        """Put the queue pair into ERROR, and wait until the device has flushed it.

        Its answer to a receive that is posted then comes behind all bytes that it has written.

        Raises:
            RdmaError: It does not answer.
        """
        verbs = self._memory.port.verbs
        with _convert_errors("the end of a queue pair"):
            self._pair.modify(verbs.QPAttrMask.STATE, qp_state=verbs.QPState.ERR)
            self._pair.post_recv(verbs.RecvWR(1, []))
            deadline = clock.monotonic() + _DRAIN_S
            while clock.monotonic() < deadline:
                for done in self._completions.wait_next(_LOOK_S):
                    if done.wr_id == 1 and done.status == verbs.WCStatus.WR_FLUSH_ERR:
                        return
        raise RdmaError("the queue pair is not flushed")


class Writer:
    """The other end of a window: it writes a slot's bytes to the same places of the holder's slot."""

    def __init__(self, source: Registered) -> None:
        """Make a queue pair through which nobody can write here.

        Raises:
            RdmaError: The device refuses.
        """
        self._source, self._port, self._psn = source, source.port, _choose_psn()
        self._place: peer.WriteWindow | None = None
        self._under_way = 0
        self._lock, self._is_over = threading.Lock(), False
        with _convert_errors("no queue pair"):
            self._completions = _Completions(self._port)
            queue = self._completions.queue
            attributes = self._port.verbs.QPInitAttr(queue, queue, max_send_wr=_DEPTH, max_recv_wr=1)
            self._pair = source.domain.create_qp(attributes)
        self.pair = self._port.describe_pair(self._pair, self._psn)

    def connect(self, place: peer.WriteWindow) -> None:
        """Connect to the holder's window.

        Raises:
            RdmaError: The device refuses.
        """
        with self._lock, _convert_errors("no connection"):
            if self._is_over:
                raise RdmaError("the version is over")
            self._port.connect(self._pair, place.pair, 0)
            self._pair.to_rts(self._psn)
            self._place = place

    @property
    def is_connected(self) -> bool:
        """Return whether the holder has opened a window."""
        return self._place is not None

    def write(self, offset: int, length: int, check_alive: Callable[[], None]) -> None:
        """Write bytes, and wait until they have arrived.

        Args:
            offset: First byte in the slot.
            length: Number of bytes.
            check_alive: Called now and then. It raises if the bytes are not wanted any more.

        Raises:
            RdmaError: Bytes have not arrived.
        """
        verbs, place, at, end = self._port.verbs, self._place, offset, offset + length
        progress = clock.monotonic()
        assert place is not None and 0 <= offset <= end <= self._source.length
        while at < end or self._under_way:
            with _convert_errors("a write"):
                while at < end and self._under_way < _DEPTH:
                    count = min(_WRITE_BYTES, end - at)
                    request = verbs.SendWR(
                        wr_id=at,
                        sg_list=[self._source.region.sge(count, at)],
                        opcode=verbs.WROpcode.RDMA_WRITE,
                        send_flags=verbs.SendFlags.SIGNALED,
                        remote_addr=place.address + at,
                        rkey=place.key,
                    )
                    self._pair.post_send(request)
                    at, self._under_way = at + count, self._under_way + 1
                for done in self._completions.wait_next(_LOOK_S):
                    if not done.is_success:
                        raise RdmaError(f"a write of this node: {done.status_str}")
                    self._under_way, progress = self._under_way - 1, clock.monotonic()
            if clock.monotonic() > progress + _STUCK_S:
                raise RdmaError(f"no write has ended for {_STUCK_S:g} s")
            check_alive()

    def close(self) -> None:
        """End the queue pair. Bytes under way may still arrive at the holder."""
        with self._lock, suppress(OSError, ValueError, RuntimeError):
            self._is_over = True
            self._pair.close()
        self._completions.close()


def _choose_psn() -> int:
    return int.from_bytes(os.urandom(3), "little") & _MOST_PSN


@contextmanager
def _register_scratch(port: RdmaPort, data: bytes) -> Iterator[Registered]:
    """Yield memory with these bytes, for a trial."""
    memory = mmap.mmap(-1, len(data))  # unmapped with its last user, which may be a device that does not let go
    memory[:] = data
    made = Registered(port, memoryview(memory))
    try:
        yield made
    finally:
        made.close()


class Rdma:
    """The device of an agent, and what is known of the peers. Any thread may use it.

    Attributes:
        state: The port in use, or why TCP serves, for `inspect`. Empty: RDMA is off.
    """

    def __init__(self, setting: str | Sequence[str], log: Log) -> None:
        self._setting, self._log = setting, log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port: RdmaPort | None = None
        self.state = ""
        self._reported: set[str] = set()
        self._resting: dict[str, float] = {}  # by host: until when it is not tried
        self._slots: WeakKeyDictionary[Memfd, Registered | None] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def start(self, spawn: Spawn) -> None:
        """Open the device in the background, unless RDMA is off."""
        if self._setting != RDMA_OFF:
            spawn(self._open())

    async def _open(self) -> None:
        """Open the device. Tell the port, or why there is none."""
        self._loop = asyncio.get_running_loop()
        try:
            self._port = await run_beside("gemini-rdma", lambda: find_port(self._setting))
            self.state = self._port.title
            self._log("rdma", detail=f"{self.state} is active; each peer is tried before a version goes that way")
        except RdmaError as exc:
            self._report_reason(str(exc), f"TCP: {exc}")

    @property
    def is_ready(self) -> bool:
        """Return whether there is a device."""
        return self._port is not None

    def _report_reason(self, reason: str, state: str = "") -> None:
        """Report why TCP serves. Each reason is reported once."""
        self.state = state or f"{self._port.title if self._port else 'none'}; TCP: {reason}"
        with self._lock:
            if reason in self._reported or len(self._reported) >= _MOST_REASONS:
                return
            self._reported.add(reason)
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: the agent ends
            self._loop.call_soon_threadsafe(partial(self._log, "rdma", detail=f"TCP instead of RDMA: {reason}"))

    def _forget_reason(self, host: str) -> None:
        """Report no more that a peer is left to TCP: its trial has succeeded."""
        if self._port is not None and self.state.startswith(f"{self._port.title}; TCP: {host}: "):
            self.state = self._port.title

    def rest(self, host: str, reason: str) -> None:
        """Leave a peer to TCP for some minutes."""
        self._resting[host] = clock.monotonic() + REST_S
        self._report_reason(f"{host}: {reason}")

    def find_registration(self, memory: Memfd) -> Registered | None:
        """Return the registration of a slot, None if it cannot be made or is not there yet.

        The first call starts a thread that makes it.
        """
        if self._port is None or memory.fd < 0:
            return None
        with self._lock:
            if memory in self._slots:
                return self._slots[memory]
            self._slots[memory] = None
        try:
            view = memory.view()
        except ValueError:  # it has been given back meanwhile
            return None
        threading.Thread(target=lambda: self._register(memory, view), name="gemini-register", daemon=True).start()
        return None

    def _register(self, memory: Memfd, view: memoryview) -> None:
        assert self._port is not None
        try:
            made = Registered(self._port, view)
        except RdmaError as exc:
            self._report_reason(str(exc))
            return
        with self._lock:
            self._slots[memory] = made
        memory.call_before_close(made.forget)

    def open_window(self, memory: Memfd, writer: peer.QueuePair) -> Window | None:
        """Let a peer's queue pair write into a slot, for one version. Return None if TCP has to serve."""
        made = self.find_registration(memory)
        with self._report_errors():
            return Window(made, writer) if made is not None else None
        return None

    def open_writer(self, memory: Memfd) -> Writer | None:
        """Return a writer of a slot's bytes, for one version. None: TCP has to serve."""
        made = self.find_registration(memory)
        with self._report_errors():
            return Writer(made) if made is not None else None
        return None

    @contextmanager
    def _report_errors(self) -> Iterator[None]:
        try:
            yield
        except RdmaError as exc:
            self._report_reason(str(exc))

    # ---- the trial of a peer, before any version is entrusted to it ------------------------------------

    def try_holder(self, link: BlockingLink, host: str) -> bool:
        """Write random bytes to a holder, into memory for them alone. Return whether they arrive.

        Raises:
            LinkClosed: The connection fails.
            OSError: The connection fails.
        """
        if self._port is None or self._resting.get(host, 0.0) > clock.monotonic():
            return False
        data, end_at = os.urandom(TRIAL_BYTES), clock.monotonic() + TRIAL_S
        reason = ""

        def check_time() -> None:
            if clock.monotonic() > end_at:
                raise RdmaError(f"the bytes of a trial have not arrived within {TRIAL_S:g} s")

        try:
            with _register_scratch(self._port, data) as source, closing(Writer(source)) as writer:
                link.send(peer.PushTrial(writer.pair))
                answer = link.receive(peer.PushAnswer)
                if not isinstance(answer.window, peer.WriteWindow):
                    raise RdmaError(answer.reason or "it gives no window")
                try:
                    writer.connect(answer.window)
                    writer.write(0, TRIAL_BYTES, check_time)
                except RdmaError as exc:
                    reason = str(exc)
                link.send(peer.PushTried(digest_bytes(data)))
                verdict = link.receive(peer.PushAnswer).reason
                reason = reason or verdict
        except RdmaError as exc:
            reason = str(exc)
        except (LinkClosed, OSError) as exc:
            self.rest(host, f"the connection of a trial has failed: {exc}")
            raise
        if reason:
            self.rest(host, reason)
        else:
            self._forget_reason(host)
        return not reason

    def serve_trial(self, link: BlockingLink, trial: peer.PushTrial, host: str) -> bool:
        """Serve a home that tries this node. Return whether its bytes have arrived.

        Raises:
            LinkClosed: The connection fails, or violates the protocol.
            OSError: The connection fails.
        """
        if self._port is None:  # it did not offer any
            link.send(peer.PushAnswer("there is no device"))
            return False
        try:
            with _register_scratch(self._port, bytes(TRIAL_BYTES)) as target:
                with closing(Window(target, trial.pair)) as window:
                    link.send(peer.PushAnswer(window=window.place))
                    tried = link.receive(peer.PushTried)
                reason = "" if digest_bytes(target.view) == tried.digest else "the bytes of a trial have not arrived"
        except RdmaError as exc:
            reason = str(exc)
        if reason:
            self._report_reason(f"{host}: {reason}")
        else:
            self._forget_reason(host)
        link.send(peer.PushAnswer(reason))
        return not reason
