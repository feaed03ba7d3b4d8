"""A real agent process, alone on its node: one attached job of one node, no Slurm, no MUNGE."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hello import build_hello
from train.agents import FORKED
from waiting import until
from zygote import Child

from gemini_hpc.wire import local, version
from gemini_hpc.wire.control_page import ControlPage

JOB, STEP, SIZE = 77, "77.0", 1 << 16
Answer = tuple[local.Message | None, list[int]]


@contextmanager
def case(name: object) -> Iterator[None]:
    """Name what a test fails at, one of many of which it sends one agent all."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {name}")
        raise


class Caller:
    """A connection to the agent's socket that sends whatever it likes."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(15)
        self.sock.connect(str(path))

    def raw(self, data: bytes, fds: list[int] | None = None) -> local.Message | None:
        """The reply to these bytes; None where the agent closed the connection."""
        with suppress(BrokenPipeError, ConnectionResetError):
            if fds:
                socket.send_fds(self.sock, [data], fds)
            else:
                self.sock.send(data)
            reply, got, _, _ = socket.recv_fds(self.sock, local.MAX_PACKET_BYTES, 8)
            for fd in got:
                os.close(fd)
            return local.reply_decoder.decode(reply) if reply else None
        return None

    def ask(self, message: local.Message, fds: list[int] | None = None) -> local.Message | None:
        return self.raw(local.encode(message), fds)

    def ask_fds(self, message: local.Message) -> Answer:
        self.sock.send(local.encode(message))
        reply, fds, _, _ = socket.recv_fds(self.sock, local.MAX_PACKET_BYTES, 8)
        return (local.reply_decoder.decode(reply) if reply else None), list(fds)

    def hello(self, rank: int = 0, world: int = 1, name: str = "default", **more: Any) -> local.Message | None:
        return self.ask(
            local.Hello(
                version.OLDEST, version.CURRENT, name, rank, world, 0, more.pop("step", STEP), os.getpid(), **more
            )
        )

    def close(self) -> None:
        self.sock.close()


class Trainer:
    """A training rank that does everything right; `step` saves one version and waits for its seal."""

    def __init__(self, agent: AgentProcess, name: str = "default", size: int = SIZE) -> None:
        self.name, self.size, self.version = name, size, 0
        self.caller = Caller(agent.socket)
        welcome, fds = self.caller.ask_fds(
            build_hello(training=name, rank=0, world=1, local_rank=0, step=STEP, pid=os.getpid())
        )
        assert isinstance(welcome, local.Welcome), welcome
        self.epoch, self.page = welcome.epoch, ControlPage(fds[0], writable=False)
        os.close(fds[0])
        slots, self.fds = self.caller.ask_fds(local.Register(name, 0, 1, 0, size))
        assert isinstance(slots, local.Slots), slots
        self.maps = [mmap.mmap(fd, size) for fd in self.fds]

    def step(self, timeout_s: float = 10.0) -> None:
        self.version += 1
        begun = self.caller.ask(local.BeginVersion(self.name, 0, self.version))
        assert isinstance(begun, local.Begun), begun
        payload = str(self.version).encode().ljust(1000)
        self.maps[begun.slot][: len(payload)] = payload
        landed = local.Landed(self.name, 0, self.version, begun.slot, len(payload))
        assert self.caller.ask(landed) == local.Ok()
        sealed = (self.epoch, self.version)
        until(lambda: self.page.sealed >= sealed, timeout_s, 0.002, what=f"version {self.version} is sealed")

    def close(self) -> None:
        self.caller.close()
        del self.page
        for m in self.maps:
            m.close()
        for fd in self.fds:
            os.close(fd)


class AgentProcess:
    """The agent proper, without its supervisor."""

    def __init__(self, fraction: float = 0.5, nodelist: str = "n1", speaks: tuple[int, int] | None = None) -> None:
        self._fraction = fraction
        self._speaks = speaks
        self.directory = Path(tempfile.mkdtemp(prefix="gemini-agent-"))
        self.socket = self.directory / "agent.sock"
        self.log_path = self.directory / "log"
        self._peer_server: list[Any] = []
        self.start(nodelist=nodelist)

    def start(self, *, again: bool = False, nodelist: str = "n1") -> None:
        base = 20000 + os.getpid() % 1000 * 16
        settings = {"agent_port_base": base, "memory_fraction": self._fraction, "attach_timeout_s": 5.0}
        agent = {"job": JOB, "node": "n1", "directory": str(self.directory), "again": again}
        self.process = Child(
            FORKED,
            out=self.log_path,
            err=self.log_path,
            settings=settings,
            agent=agent,
            open=False,
            tiered=False,
            speaks=self._speaks,
        )
        attach = local.Attach(JOB, 0, nodelist, "n1", 1)
        deadline = time.monotonic() + 20
        while True:
            try:
                caller = Caller(self.socket)
                break
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, self.log()
                time.sleep(0.02)
        if not again:
            assert caller.ask(attach) == local.Ready("mapped"), self.log()
        caller.close()

    @property
    def port(self) -> int:
        text = (self.directory / "map").read_text()
        return int(next(line for line in text.splitlines() if line.startswith("agent_port=")).split("=")[1])

    def caller(self) -> Caller:
        self._peer_server.append(Caller(self.socket))
        return self._peer_server[-1]

    def trainer(self, name: str = "default", size: int = SIZE) -> Trainer:
        self._peer_server.append(Trainer(self, name, size))
        return self._peer_server[-1]

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * mmap.PAGESIZE

    def log(self) -> str:
        return self.log_path.read_text()

    def quiet(self, fds: int, timeout_s: float = 5.0) -> None:
        """Wait until the agent has no more descriptors than it had."""
        until(lambda: self.fds() <= fds, timeout_s, what=f"no more than the {fds} descriptors of before")

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(5) is not None

    def close(self) -> None:
        for caller in self._peer_server:
            caller.close()
        self.kill()
        for path in self.directory.iterdir():
            path.unlink()
        self.directory.rmdir()


@pytest.fixture
def make_agent() -> Iterator[Callable[..., AgentProcess]]:
    made: list[AgentProcess] = []

    def make(**options: Any) -> AgentProcess:
        made.append(AgentProcess(**options))
        return made[-1]

    yield make
    for agent in made:
        running, log = agent.process.poll() is None, agent.log()
        agent.close()
        assert running, f"the agent died:\n{log}"
        assert "Traceback" not in log, log


@pytest.fixture
def agent(make_agent: Callable[..., AgentProcess]) -> AgentProcess:
    return make_agent()
