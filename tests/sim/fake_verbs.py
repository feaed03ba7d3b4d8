"""A device for RDMA that is not there: what `gemini_hpc.agent.transfer.rdma` uses of `ibverbs`, with the same names.

Bytes go in packets. Something else says when a packet goes on (`Wire`): it is read at the sender, lands by halves,
and may come late or in any order. A device obeys as libibverbs promises: after the flush of a queue pair in
ERROR, or the end of the pair or of the region, nothing lands. `FakeVerbs.faults` names calls that fail.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

PACKET_BYTES = 1024


class AccessFlags(IntFlag):
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2


class QPState(IntEnum):
    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    ERR = 6


class QPAttrMask(IntFlag):
    STATE = 1


class WROpcode(IntEnum):
    RDMA_WRITE = 0


class SendFlags(IntFlag):
    SIGNALED = 2


class WCStatus(IntEnum):
    SUCCESS = 0
    WR_FLUSH_ERR = 5
    REM_ACCESS_ERR = 10
    RETRY_EXC_ERR = 12


class PortState(IntEnum):
    DOWN = 1
    ACTIVE = 4


class VerbsError(OSError):
    def __init__(self, operation: str, err: int, detail: Any = None) -> None:
        super().__init__(err, f"{operation} failed: {os.strerror(err)}")


@dataclass
class QPInfo:
    qp_num: int
    psn: int
    lid: int
    gid: bytes
    port: int
    mtu: int


class SGE:
    def __init__(self, target: Any, length: int, lkey: int = 0, offset: int = 0) -> None:
        self.owner, self.addr, self.length = target, target.addr + offset, length


class SendWR:
    def __init__(
        self,
        wr_id: int = 0,
        sg_list: list[SGE] | None = None,
        opcode: int = 0,
        send_flags: int = 0,
        remote_addr: int = 0,
        rkey: int = 0,
    ) -> None:
        self.wr_id, self.sg_list, self.opcode, self.send_flags = wr_id, sg_list or [], opcode, send_flags
        self.remote_addr, self.rkey = remote_addr, rkey


class RecvWR:
    def __init__(self, wr_id: int = 0, sg_list: list[SGE] | None = None) -> None:
        self.wr_id = wr_id


class WC:
    def __init__(self, wr_id: int, status: WCStatus) -> None:
        self.wr_id, self.status, self.status_str = wr_id, status, status.name
        self.is_success = status == WCStatus.SUCCESS


class Gid:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw


@dataclass
class PortAttr:
    state: int = PortState.ACTIVE
    active_mtu: int = 5
    gid_tbl_len: int = 1
    lid: int = 7
    link_layer: int = 1


@dataclass
class DeviceAttr:
    phys_port_cnt: int = 1


class QPInitAttr:
    def __init__(
        self,
        send_cq: CQ,
        recv_cq: CQ,
        qp_type: int = 2,
        max_send_wr: int = 128,
        max_recv_wr: int = 128,
    ) -> None:
        assert qp_type == 2 and max_recv_wr >= 1
        self.send_cq, self.recv_cq, self.max_send_wr = send_cq, recv_cq, max_send_wr


class CompChannel:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.cqs: list[CQ] = []
        self.rung: Callable[[], None] = lambda: None

    def ring(self, queue: CQ) -> None:
        if self.fd >= 0:
            self.cqs.append(queue)
            os.eventfd_write(self.fd, 1)
            self.rung()

    def get_cq_event(self) -> CQ:
        assert self.cqs, "it would block for ever"
        found = self.cqs.pop(0)
        os.eventfd_read(self.fd)
        if self.cqs:
            os.eventfd_write(self.fd, len(self.cqs))
        return found

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close


class CQ:
    def __init__(self, cqe: int, channel: CompChannel) -> None:
        self.cqe, self.channel = cqe, channel
        self._done: list[WC] = []
        self._is_armed = False

    def put(self, done: WC) -> None:
        assert len(self._done) < self.cqe, "the queue overflows"
        self._done.append(done)
        if self._is_armed:
            self._is_armed = False
            self.channel.ring(self)

    def poll(self, num_entries: int) -> list[WC]:
        found, self._done = self._done[:num_entries], self._done[num_entries:]
        return found

    def req_notify(self, solicited_only: bool = False) -> None:
        self._is_armed = True

    def ack_events(self, nevents: int = 1) -> None: ...

    def close(self) -> None: ...


class MR:
    def __init__(self, pd: PD, addr: int, length: int, access: int, key: int) -> None:
        self.pd, self.addr, self.length, self.access, self.rkey = pd, addr, length, access, key
        self.closed = False

    def sge(self, length: int | None = None, offset: int = 0) -> SGE:
        assert length is not None and 0 <= offset <= offset + length <= self.length
        return SGE(self, length, 0, offset)

    def close(self) -> None:
        self.pd.context.verbs.check("dereg_mr")
        self.closed = True


class QP:
    def __init__(self, pd: PD, init_attr: QPInitAttr, number: int) -> None:
        self.pd, self.qp_num, self.attr = pd, number, init_attr
        self.state, self.access, self.remote = QPState.RESET, 0, (b"", -1)
        self.closed = self.flushed = False
        self.under_way: dict[int, int] = {}  # packets left, by work request
        self._numbers = itertools.count()
        self.wire = pd.context.verbs.wire
        self.wire.pairs[pd.context.verbs.gid, number] = self

    def to_init(self, port: int, access: int = 0) -> None:
        assert self.state == QPState.RESET and port == 1
        self.state, self.access = QPState.INIT, access

    def to_rtr(self, remote: QPInfo, sgid_index: int, mtu: int | None = None, hop_limit: int = 1) -> None:
        self.pd.context.verbs.check("modify_qp")
        assert self.state == QPState.INIT and hop_limit > 1 and mtu == 5
        self.remote, self.state = (remote.gid, remote.qp_num), QPState.RTR

    def to_rts(self, psn: int) -> None:
        assert self.state == QPState.RTR
        self.state = QPState.RTS

    def modify(self, attr_mask: int, *, qp_state: int) -> None:
        assert attr_mask == QPAttrMask.STATE and qp_state == QPState.ERR
        if self.closed:
            raise VerbsError("ibv_modify_qp", errno.EINVAL)
        self.pd.context.verbs.check("modify_qp_err")
        self.state = QPState.ERR

    def post_recv(self, wrs: RecvWR) -> None:
        if "flush" not in self.pd.context.verbs.faults:
            self.wire.carry(Flush(self, wrs))

    def post_send(self, wrs: SendWR) -> None:
        (sge,) = wrs.sg_list
        if self.state != QPState.RTS or self.closed or len(self.under_way) >= self.attr.max_send_wr:
            raise VerbsError("ibv_post_send", errno.EINVAL)
        assert wrs.opcode == WROpcode.RDMA_WRITE and wrs.send_flags == SendFlags.SIGNALED
        number, starts = next(self._numbers), range(0, sge.length, PACKET_BYTES)
        self.under_way[number] = len(starts)
        for at in starts:
            self.wire.carry(Packet(self, wrs, number, sge, at, min(PACKET_BYTES, sge.length - at)))

    def ended(self, number: int, wr_id: int, status: WCStatus) -> None:
        """A packet of a work request has landed, or never will."""
        if self.closed or number not in self.under_way:
            return
        self.under_way[number] -= 1
        if status != WCStatus.SUCCESS or not self.under_way[number]:
            del self.under_way[number]
            self.attr.send_cq.put(WC(wr_id, status))
        if status != WCStatus.SUCCESS:
            self.state = QPState.ERR

    def close(self) -> None:
        self.pd.context.verbs.check("destroy_qp")
        self.closed = True


class PD:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.regions: dict[int, MR] = {}

    def reg_mr(self, addr: int, length: int, access: int) -> MR:
        self.context.verbs.check("reg_mr")
        key = self.context.verbs.number()
        self.regions[key] = MR(self, addr, length, access, key)
        return self.regions[key]

    def create_qp(self, init_attr: QPInitAttr) -> QP:
        self.context.verbs.check("create_qp")
        made = QP(self, init_attr, self.context.verbs.number())
        self.context.verbs.made(made)
        return made


class Context:
    def __init__(self, verbs: FakeVerbs) -> None:
        self.verbs = verbs
        self.domains: list[PD] = []

    def alloc_pd(self) -> PD:
        self.domains.append(PD(self))
        return self.domains[-1]

    def create_comp_channel(self) -> CompChannel:
        return CompChannel()

    def create_cq(self, cqe: int, channel: Any = None) -> CQ:
        return CQ(cqe, channel)

    def query_device(self) -> DeviceAttr:
        return DeviceAttr()

    def query_port(self, port_num: int) -> PortAttr:
        return PortAttr(state=PortState.DOWN if "port" in self.verbs.faults else PortState.ACTIVE)

    def query_gid(self, port_num: int, index: int) -> Gid:
        return Gid(self.verbs.gid)

    def close(self) -> None: ...


class Device:
    def __init__(self, verbs: FakeVerbs, name: str) -> None:
        self._verbs, self.name = verbs, name

    def open(self) -> Context:
        self._verbs.contexts.append(Context(self._verbs))
        return self._verbs.contexts[-1]


class FakeVerbs:
    """The module, as one process has it."""

    AccessFlags, QPState, QPAttrMask, WROpcode = AccessFlags, QPState, QPAttrMask, WROpcode
    SendFlags, WCStatus, PortState, QPInfo = SendFlags, WCStatus, PortState, QPInfo
    SendWR, RecvWR, QPInitAttr = SendWR, RecvWR, QPInitAttr

    def __init__(self, wire: Wire, host: str, name: str = "fake_0") -> None:
        self.wire, self.host, self.gid = wire, host, host.encode().ljust(16, b".")
        self.contexts: list[Context] = []
        self.faults: set[str] = set()
        self.made: Callable[[QP], None] = lambda pair: None
        self._device = Device(self, name)

    def get_device_list(self) -> list[Device]:
        self.check("get_device_list")
        return [self._device]

    def number(self) -> int:
        return next(self.wire.numbers)

    def check(self, call: str) -> None:
        if call in self.faults:
            raise VerbsError(f"ibv_{call}", errno.EIO)

    def end(self) -> None:
        """The kernel takes everything away from a process that has ended."""
        for pair in self.wire.pairs.values():
            if pair.pd.context.verbs is self:
                pair.closed = True
        for context in self.contexts:
            for domain in context.domains:
                for region in domain.regions.values():
                    region.closed = True


class Packet:
    """Bytes on their way. `go_on`: a step further; returns whether there is another."""

    def __init__(self, pair: QP, request: SendWR, number: int, sge: SGE, at: int, length: int) -> None:
        self.sender, self._request, self._number, self._sge, self._at, self._length = (
            pair,
            request,
            number,
            sge,
            at,
            length,
        )
        self._data: bytes | None = None
        self.is_half = False

    @property
    def target(self) -> QP | None:
        return self.sender.wire.pairs.get(self.sender.remote)

    def go_on(self) -> bool:
        if self._data is None:
            if self.sender.closed or self.sender.state != QPState.RTS or self._sge.owner.closed:
                return False
            self._data = ctypes.string_at(self._sge.addr + self._at, self._length)
            if self.sender.wire.lies:
                self.sender.ended(self._number, self._request.wr_id, WCStatus.SUCCESS)
            return True
        pair, address = self.target, self._request.remote_addr + self._at
        gone = pair is None or pair.closed or pair.flushed
        if pair is None or gone or (pair.state not in (QPState.RTR, QPState.RTS) and not self.is_half):
            self._end(WCStatus.RETRY_EXC_ERR)
            return False
        region = pair.pd.regions.get(self._request.rkey)
        if (
            region is None
            or region.closed
            or not pair.access & region.access & AccessFlags.REMOTE_WRITE
            or pair.remote != (self.sender.pd.context.verbs.gid, self.sender.qp_num)
            or not region.addr <= address <= address + self._length <= region.addr + region.length
        ):
            self._end(WCStatus.REM_ACCESS_ERR)
            return False
        middle = self._length // 2
        start, end = (middle, self._length) if self.is_half else (0, middle)
        self.sender.wire.landing(pair, region)
        ctypes.memmove(address + start, self._data[start:end], end - start)
        self.is_half = not self.is_half
        if not self.is_half:
            self._end(WCStatus.SUCCESS)
        return self.is_half

    def _end(self, status: WCStatus) -> None:
        self.is_half = False
        self.sender.ended(self._number, self._request.wr_id, status)


class Flush:
    """The answer to a receive on a queue pair in ERROR: behind what has begun to land."""

    def __init__(self, pair: QP, request: RecvWR) -> None:
        self._pair, self._request = pair, request

    def go_on(self) -> bool:
        pair = self._pair
        if any(isinstance(p, Packet) and p.is_half and p.target is pair for p in pair.wire.under_way):
            return True
        pair.flushed = True
        pair.attr.recv_cq.put(WC(self._request.wr_id, WCStatus.WR_FLUSH_ERR))
        return False


class Wire:
    """Between devices. landing: told before bytes land in a region; lies: devices say so as soon as bytes leave."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.under_way: list[Packet | Flush] = []
        self.pairs: dict[tuple[bytes, int], QP] = {}
        self.numbers = itertools.count(100)
        self.landing: Callable[[QP, MR], None] = lambda pair, region: None
        self.lies = False

    def carry(self, packet: Packet | Flush) -> None:
        self.under_way.append(packet)

    def go_on(self, packet: Packet | Flush) -> bool:
        more = packet.go_on()
        if not more:
            self.under_way.remove(packet)
        return more

    def step(self) -> bool:
        """Let any packet go on. False: there is none."""
        if self.under_way:
            self.go_on(self.rng.choice(self.under_way))
        return bool(self.under_way)
