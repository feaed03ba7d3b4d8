"""Runs inside the cluster as some user and does what nobody should: `attacker.py VERB JSON`; prints a JSON object."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import controller, handshake, inspect_schema, munge, peer, protocol
from gemini_hpc.wire.frames import LENGTH_BYTES, FrameError, Sealer, pack_bare, read_bare, read_exact
from gemini_hpc.wire.handshake import Caller, Envelope, HandshakeClient, HandshakeError
from gemini_hpc.wire.link import BlockingLink, LinkClosed, connect
from gemini_hpc.wire.message import Message

Args = dict[str, Any]
LIMIT_S = 12.0
libc = ctypes.CDLL(None, use_errno=True)


def envelope(credential: bytes) -> bytes:
    return pack_bare(msgspec.msgpack.encode(Envelope(credential=credential)))


# ---- noise ---------------------------------------------------------------------------------------------

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _until_closed(streams: Streams) -> float:
    began = time.monotonic()
    with suppress(OSError):
        async with asyncio.timeout(LIMIT_S):
            while await streams[0].read(1000):
                pass
    return time.monotonic() - began


def _sends(data: bytes, end: bool = False) -> Callable[[Streams], Awaitable[float]]:
    async def attack(streams: Streams) -> float:
        streams[1].write(data)
        if end:
            streams[1].write_eof()
        return await _until_closed(streams)

    return attack


async def _slow(streams: Streams) -> float:
    async def drip() -> None:
        for byte in struct.pack(">I", 4000) + bytes(4000):
            streams[1].write(bytes([byte]))
            await asyncio.sleep(0.1)

    task = asyncio.ensure_future(drip())
    took = await _until_closed(streams)
    task.cancel()
    return took


NOISE: dict[str, Callable[[Streams], Awaitable[float]]] = {
    "garbage": _sends(random.Random(1).randbytes(5000)),
    "http": _sends(b"GET / HTTP/1.0\r\n\r\n"),
    "truncated": _sends(struct.pack(">I", 100) + bytes(10), end=True),
    "huge length": _sends(b"\xff" * 4 + bytes(100)),
    "just too long": _sends(struct.pack(">I", handshake.MAX_HELLO_BYTES + 1)),
    "empty frame": _sends(pack_bare(b"")),
    "nested": _sends(pack_bare(b"\x81\xa1x" + b"\x91" * 16000)),
    "huge array": _sends(pack_bare(b"\x81\xaacredential\xdd\xff\xff\xff\xff")),
    "not utf-8": _sends(pack_bare(b"\x81\xa7refusal\xa2\xff\xfe")),
    "wrong type": _sends(pack_bare(msgspec.msgpack.encode({"credential": 7}))),
    "no credential": _sends(envelope(b"")),
    "bad credential": _sends(envelope(b"MUNGE:AwQFAAAA:")),
    "megabytes": _sends(bytes(8 << 20)),
    "closed at once": _sends(b"", end=True),
    "silent": _until_closed,
    "slow": _slow,
}


def noise(a: Args) -> Args:
    """Seconds until the server closed, for each kind; with `idle` connections held open beside."""

    async def one(attack: Callable[[Streams], Awaitable[float]]) -> float:
        streams = await asyncio.open_connection(a["host"], a["port"])
        took = await attack(streams)
        streams[1].close()
        return took

    async def run() -> Args:
        idle = await asyncio.gather(*(asyncio.open_connection(a["host"], a["port"]) for _ in range(a["idle"])))
        took = await asyncio.gather(*(one(attack) for attack in NOISE.values()))
        for _, writer in idle:
            writer.close()
        return dict(zip(NOISE, took, strict=True))

    return asyncio.run(run())


# ---- credentials ---------------------------------------------------------------------------------------


def _client(a: Args, **changes: Any) -> HandshakeClient:
    fields = {k: a[k] for k in ("cluster", "job", "restart", "source", "target", "purpose", "server_uid")} | changes
    told = {"instance": "attacker"} | {k: fields.pop(k) for k in Caller._fields if k in fields}
    return HandshakeClient(Caller(**told), **fields)


def call(a: Args) -> Args:
    """What becomes of each handshake: "ok", or why not."""
    answers = {}
    for name, changes in a["calls"].items():
        try:
            BlockingLink.connect(a["host"], a["port"], _client(a, **changes)).close()
            answers[name] = "ok"
        except (OSError, HandshakeError) as exc:
            answers[name] = f"{type(exc).__name__}: {exc}"
    return answers


def greeting(a: Args) -> Args:
    """A good greeting, not sent; for another to steal."""
    return {"hex": _client(a).build_greeting().hex()}


def _send_greeting(a: Args, data: bytes) -> str:
    with socket.create_connection((a["host"], a["port"]), timeout=LIMIT_S) as sock:
        sock.sendall(pack_bare(data))
        try:
            answer = msgspec.msgpack.decode(read_bare(sock, 1 << 16), type=Envelope)
        except FrameError:
            return "closed"
        if answer.refusal:
            return f"refused: {answer.refusal}"
        try:
            munge.decode(answer.credential)
        except munge.MungeError as exc:
            sock.sendall(Sealer(bytes(32)).seal(protocol.encode(inspect_schema.InspectAsk())))
            try:
                read_exact(sock, 1)
            except FrameError:
                return f"{exc}; then closed"
            return "served"
        return "opened"


def steal(a: Args) -> Args:
    """Send somebody's greeting twice."""
    data = bytes.fromhex(a["hex"])
    return {"first": _send_greeting(a, data), "second": _send_greeting(a, data)}


def forged(a: Args) -> Args:
    """Good credentials with the wrong things inside."""
    hello = msgspec.to_builtins(_client(a)._hello, builtin_types=(bytes,))
    answers = {}
    bad: dict[str, Any] = {
        "protocol": hello | {"least": 99, "most": 99},
        "nonce": hello | {"nonce": b"short"},
        "share": hello | {"share": b""},
        "job": hello | {"job": -1},
        "restart": hello | {"restart": 1 << 40},
        "types": hello | {"purpose": ["link"]},
        "empty": {},
        "not a map": [1, 2],
    }
    for name, content in bad.items():
        credential = munge.encode(msgspec.msgpack.encode(content), for_uid=a["server_uid"])
        answers[name] = _send_greeting(a, msgspec.msgpack.encode(Envelope(credential=credential)))
    return answers


# ---- sessions ------------------------------------------------------------------------------------------


class Session:
    """An authenticated connection on which the frames themselves can be played with."""

    def __init__(self, a: Args) -> None:
        client = _client(a)
        self.sock = socket.create_connection((a["host"], a["port"]), timeout=LIMIT_S)
        self.sock.sendall(pack_bare(client.build_greeting()))
        session = client.finish(read_bare(self.sock, 1 << 16))
        self.out, self.inward = Sealer(session.send_key), Sealer(session.receive_key)
        kind = a["ask"]
        self.ask = protocol.encode(
            inspect_schema.InspectAsk() if kind == "inspect" else inspect_schema.JobAsk(a["job"])
        )

    def outcome(self, data: bytes) -> str:
        """What the server does with these bytes: an answer, or the end."""
        began = time.monotonic()
        try:
            self.sock.sendall(data)
            return "answered" if self.read() else "nothing"
        except (OSError, FrameError) as exc:
            slow = "" if time.monotonic() - began < 8 else " slowly"
            return f"closed{slow}" if not isinstance(exc, TimeoutError) else "hangs"
        finally:
            self.sock.close()

    def read(self) -> bytes:
        (length,) = struct.unpack(">I", read_exact(self.sock, LENGTH_BYTES))
        self.last = read_exact(self.sock, length)
        return self.inward.open(self.last)


def sessions(a: Args) -> Args:
    """Frames of an authenticated session that are not as they should be."""

    def tampered(s: Session) -> bytes:
        frame = bytearray(s.out.seal(s.ask))
        frame[-1] ^= 1
        return bytes(frame)

    def without_mac(s: Session) -> bytes:
        return pack_bare(s.ask)

    def reordered(s: Session) -> bytes:
        s.out.seal(s.ask)
        return s.out.seal(s.ask)

    def wrong_way(s: Session) -> bytes:
        return s.inward.seal(s.ask)

    def of_another_session(_: Session) -> bytes:
        other = Session(a)
        frame = other.out.seal(other.ask)
        other.sock.close()
        return frame

    def noise_inside(s: Session) -> bytes:
        return s.out.seal(b"\xc1" * 50)

    def nested(s: Session) -> bytes:
        return s.out.seal(b"\x82\xa4kind\xa4ping\xa1x" + b"\x91" * 200_000)

    def not_utf8(s: Session) -> bytes:
        return s.out.seal(b"\x82\xa4kind\xa6round?\xa4step\xa2\xff\xfe")

    def huge_number(s: Session) -> bytes:
        return s.out.seal(msgspec.msgpack.encode({"kind": "job?", "job": 1 << 60}))

    def huge_length(_: Session) -> bytes:
        return b"\xff" * 4 + bytes(1000)

    def good(s: Session) -> bytes:
        return s.out.seal(s.ask)

    kinds = [tampered, without_mac, reordered, wrong_way, of_another_session, noise_inside, nested, not_utf8]
    kinds += [huge_number, huge_length, good]
    answers = {f.__name__: (s := Session(a)).outcome(f(s)) for f in kinds}
    if a["ask"] == "job":  # several questions on one connection
        s = Session(a)
        frame = s.out.seal(s.ask)
        s.sock.sendall(frame)
        s.read()
        answers["repeated"] = s.outcome(frame)
        s = Session(a)
        s.sock.sendall(s.out.seal(s.ask))
        s.read()
        answers["reflected"] = s.outcome(struct.pack(">I", len(s.last)) + s.last)
    return answers


def link(a: Args) -> Args:
    """Messages of a peer that make no sense, from the owner's own uid, on a link; the real peer dials again."""
    answers = {}
    for name, message in {
        "plan without this node": peer.PlanDown(1, "", 1, {}, "", {}, (), ()),
        "probe of a stranger": peer.ProbeAsk("../../etc/passwd"),
        "obituary of itself": peer.Liveness(a["target"], False, a["restart"]),
        "a set like a path": peer.DecisionDown(
            round=1, training="../x", sealed=Stamp(1, 1 << 30), abandoned=(), degraded=False
        ),
        "a controller's word": controller.Release(a["job"], "free everything"),
        "a question": inspect_schema.JobAsk(a["job"]),
        "an answer": inspect_schema.JobAnswer(),
    }.items():
        connection = BlockingLink.connect(a["host"], a["port"], _client(a))
        try:
            connection.send(message)
            connection.sock.settimeout(0.3)
            answers[name] = type(connection.receive(Message)).__name__
        except (OSError, LinkClosed) as exc:
            answers[name] = type(exc).__name__
        finally:
            connection.close()
    return answers


def local_socket(a: Args) -> Args:
    """A stranger at the local socket."""
    answers = []
    for _ in range(a["times"]):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(LIMIT_S)
            try:
                sock.connect(a["path"])
                sock.send(b'{"op":"verdict?"}')
                answers.append(sock.recv(1000).decode() or "closed")
            except OSError as exc:
                answers.append(exc.strerror or str(exc))
    return {"answers": sorted(set(answers))}


def spam(a: Args) -> Args:
    """Handshakes that are refused, for a while, as fast as they go."""
    count, end = 0, time.monotonic() + a["seconds"]
    while time.monotonic() < end:
        with suppress(OSError, HandshakeError):
            BlockingLink.connect(a["host"], a["port"], _client(a)).close()
        count += 1
    return {"count": count, "uid": os.getuid()}


# ---- as an agent, at the controller ----------------------------------------------------------------------


def _registration(a: Args, **changes: Any) -> controller.Registration:
    fields = {"job": a["job"], "restart": a["restart"], "host": a["source"], "hosts": (a["source"],), "replicas": 2}
    fields |= {"port": 17000, "instance": "attacker", "state": "attached"} | changes
    return controller.Registration(**fields)


def agents(a: Args) -> Args:
    """What becomes of each would-be agent: "kept", "closed", or what the controller said."""
    answers = {}
    for name, changes in a["agents"].items():
        said = changes.pop("said", {})
        connection = BlockingLink.connect(a["host"], a["port"], _client(a, **changes))
        try:
            connection.send(_registration(a | changes, **said))
            for report in a.get("reports", ()):
                connection.send(
                    controller.Report(a["job"], a["restart"], report, tuple(a.get("witnesses", ())), time.time())
                )
            connection.sock.settimeout(a.get("wait_s", 2.5))
            answers[name] = type(connection.receive(Message)).__name__
        except TimeoutError:
            answers[name] = "kept"
        except (OSError, LinkClosed) as exc:
            answers[name] = "kept" if "timed out" in str(exc) else "closed"
        finally:
            connection.close()
    return answers


def flood(a: Args) -> Args:
    """For `seconds`, on `lines` connections at once, whatever an agent may say, as fast as it goes; reconnects."""
    event = inspect_schema.EventRecord(time.time(), "x" * 300, "n9", 0, 0, "flood " + "y" * 4000)

    async def one(number: int, end: float) -> int:
        count = 0
        while time.monotonic() < end:
            job = a["job"] + (number % a.get("jobs", 1))
            try:
                line = await connect(a["host"], a["port"], _client(a, job=job, purpose=a["purpose"]), 5.0)
            except (OSError, HandshakeError):
                await asyncio.sleep(0.05)
                continue
            try:
                if a["purpose"] == "control":
                    line.send(_registration(a, job=job))
                while time.monotonic() < end and not line.closed:
                    if a["purpose"] == "query":
                        line.send(inspect_schema.JobAsk(a["job"] + count % a.get("jobs", 1)))
                        await line.receive()
                    else:
                        line.send(controller.EventsUp(job, (event,) * 50))
                        line.send(controller.HoldersAsk(job))
                        line.send(_registration(a, job=job, restart=count % 1000))
                        line.send(controller.Report(job, count % 50, a["accuse"], (), time.time()))
                        await asyncio.sleep(0)
                    count += 1
            except (OSError, LinkClosed, FrameError):
                pass
            finally:
                line.abort()
        return count

    async def run() -> list[int]:
        end = time.monotonic() + a["seconds"]
        return await asyncio.gather(*(one(n, end) for n in range(a["lines"])))

    return {"messages": sum(asyncio.run(run()))}


def bombs(a: Args) -> Args:
    """Frames of 15 MiB that are begun and not ended, on many authenticated connections."""

    async def one() -> str:
        line = await connect(a["host"], a["port"], _client(a), 5.0)
        writer = line._writer
        try:
            writer.write(struct.pack(">I", 15 << 20))
            for _ in range(14):
                writer.write(bytes(1 << 20))
                await writer.drain()
            await asyncio.sleep(2.0)
            return "closed" if writer.transport.is_closing() or line._reader.at_eof() else "taken"
        except OSError:
            return "closed"
        finally:
            line.abort()

    async def run() -> list[str]:
        return await asyncio.gather(*(one() for _ in range(a["lines"])))

    return {"outcomes": sorted(set(asyncio.run(run())))}


def squat(a: Args) -> Args:
    """Listens on ports, takes whoever calls, and never says a word."""

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(a["seconds"])
        writer.close()

    async def run() -> None:
        for port in a["ports"]:
            await asyncio.start_server(silent, "0.0.0.0", port)
        print("listening", flush=True)
        await asyncio.sleep(a["seconds"])

    asyncio.run(run())
    return {}


def relay(a: Args) -> Args:
    """Listens on ports and passes everything on to the job's own one; tells of each call, and of each that has
    carried more than a handshake."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carried: list[int]) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                carried[0] += len(data)
                if carried[0] > a["handshake_bytes"] >= carried[0] - len(data):
                    print("session", flush=True)
                writer.write(data)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        print("called", flush=True)
        try:
            inward, outward = await asyncio.open_connection("127.0.0.1", a["to"])
        except OSError:
            writer.close()
            return
        carried = [0]
        await asyncio.gather(pump(reader, outward, carried), pump(inward, writer, carried))

    async def run() -> None:
        for port in a["ports"]:
            await asyncio.start_server(between, "0.0.0.0", port)
        print("listening", flush=True)
        await asyncio.sleep(a["seconds"])

    asyncio.run(run())
    return {}


def peek(a: Args) -> Args:
    """Another process's memory and descriptors, by every way that /proc and the kernel offer."""
    pid, got = a["pid"], []
    ways = [f"/proc/{pid}/{name}" for name in ("mem", "maps", "environ", "auxv", "stack", "syscall")]
    for name in ("fd", "map_files"):
        with suppress(OSError):
            ways += [f"/proc/{pid}/{name}/{entry}" for entry in os.listdir(f"/proc/{pid}/{name}")]
    ways += [f"/proc/{pid}/fd/{number}" for number in range(64)]
    for way in ways:
        with suppress(OSError), open(way, "rb") as f:
            if f.read(16):
                got.append(way)
    process = os.pidfd_open(pid)
    for number in range(64):
        if libc.syscall(438, process, number, 0) >= 0:  # pidfd_getfd
            got.append(f"pidfd_getfd {number}")
    if libc.ptrace(16, pid, 0, 0) == 0:  # PTRACE_ATTACH
        got.append("ptrace")
    with suppress(OSError):
        os.kill(pid, 0)
        got.append("signal")
    return {"got": got}


if __name__ == "__main__":
    verbs = [noise, call, greeting, steal, forged, sessions, link, local_socket, spam]
    verbs += [agents, flood, bombs, squat, relay, peek]
    verb = {v.__name__: v for v in verbs}[sys.argv[1]]
    print(json.dumps(verb(json.loads(sys.argv[2]))))
