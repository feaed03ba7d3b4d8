"""Real agents of one job on the loopback interface, each in a process of its own: no Slurm, and credentials that
anybody can open. Stands where `FakeJob` does, and its nodes where `Node` do."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zygote import Child

from gemini_hpc.client.agent_connection import AgentLost, ask_once
from gemini_hpc.wire import inspect_schema, local
from gemini_hpc.wire.handshake import Caller, HandshakeClient
from gemini_hpc.wire.link import BlockingLink

JOB, CLUSTER = 81, "cluster"
FORKED = Path(__file__).parents[1] / "agent" / "forked.py"


@dataclass
class RealNode:
    """One agent."""

    name: str
    directory: Path
    base: int
    tiered: bool = False
    heartbeat_s: float = 0.1
    stripes: int = 0
    flips: int = 0  # the place of a byte that changes when it first comes with a push
    fill_wait_s: float = 0.0
    process: Child | None = None
    path: str = field(init=False)

    def __post_init__(self) -> None:
        self.directory.mkdir()
        self.path = str(self.directory / "agent.sock")
        self.start()

    def start(self, *, again: bool = False) -> None:
        settings = {
            "peer_address": "127.0.0.1",
            "agent_port_base": self.base,
            "agent_port_count": 16,
            "attach_timeout_s": 15.0,
            "heartbeat_s": self.heartbeat_s,
        }
        agent = {"job": JOB, "node": self.name, "directory": str(self.directory), "again": again}
        log = self.directory / "log"
        self.process = Child(
            FORKED,
            out=log,
            err=log,
            settings=settings,
            agent=agent,
            open=True,
            tiered=self.tiered,
            stripes=self.stripes,
            flips=self.flips,
            fill_wait_s=self.fill_wait_s,
        )
        self.ask(local.VerdictRequest())

    def die(self) -> None:
        """As the kernel does to an agent that takes too much."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def stop(self, seconds: float) -> None:
        """Hold the agent still for a while."""
        assert self.process is not None
        self.process.signal(signal.SIGSTOP)
        threading.Timer(seconds, self.process.signal, (signal.SIGCONT,)).start()

    def ask(self, message: local.Message, timeout_s: float = 30.0) -> local.Reply:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return ask_once(self.path, message, timeout_s)
            except AgentLost:
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.02)

    def ended(self) -> bool:
        """The agent has freed everything and gone."""
        return self.process is None or self.process.poll() is not None

    def log(self) -> str:
        return (self.directory / "log").read_text()

    @property
    def port(self) -> int:
        text = (self.directory / "map").read_text()
        return int(next(line for line in text.splitlines() if line.startswith("agent_port=")).split("=")[1])


class RealJob:
    """Agents of a job of `nodes` nodes with m replicas; `nodes` are those of the present incarnation, in the order of
    their node ranks. tier, interval_s, hang: of the submission; parity: blocks of it in a row of a group of m.
    heartbeat_s: 0.1 finds the dead soon, and takes an agent for dead that a busy machine holds up.
    stripes: connections of a pair of agents; 0: as this machine's cores make it."""

    def __init__(
        self,
        directory: Path,
        nodes: int,
        m: int,
        *,
        tier: Path | None = None,
        interval_s: int = 3600,
        hang: int | None = None,
        parity: int = 0,
        heartbeat_s: float = 0.1,
        stripes: int = 0,
        flips: int = 0,
        fill_wait_s: float = 0.0,
    ) -> None:
        directory.mkdir()
        self._stripes, self._flips, self._fill_wait_s = stripes, flips, fill_wait_s
        self._parity, self._heartbeat_s = parity, heartbeat_s
        self.tier, self._interval_s, self._hang = tier, interval_s, hang
        self.m, self.restart = m, 0
        self._directory = directory
        self._base = 21000 + os.getpid() % 600 * 16
        self.all: dict[str, RealNode] = {}
        self.nodes: list[RealNode] = []
        self.attach([f"n{k}" for k in range(1, nodes + 1)])

    def attach(self, names: list[str]) -> None:
        """All prologs of an incarnation."""
        for name in names:
            if name not in self.all:
                self.all[name] = RealNode(
                    name,
                    self._directory / name,
                    self._base,
                    self.tier is not None,
                    self._heartbeat_s,
                    self._stripes,
                    self._flips,
                    self._fill_wait_s,
                )
        replies: dict[str, local.Reply] = {}

        def prolog(name: str) -> None:
            tier, interval_s = (str(self.tier), self._interval_s) if self.tier is not None else ("", 0)
            replies[name] = self.all[name].ask(
                local.Attach(
                    JOB,
                    self.restart,
                    ",".join(names),
                    name,
                    self.m,
                    tier,
                    interval_s,
                    hang=self._hang,
                    parity=self._parity,
                )
            )

        threads = [threading.Thread(target=prolog, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert replies == dict.fromkeys(names, local.Ready("mapped")), (replies, *(self.all[n].log() for n in names))
        ranks = {name: self.inspect(self.all[name]).noderanks[name] for name in names}
        self.nodes = [self.all[name] for name in sorted(names, key=lambda n: ranks[n])]

    def end(self, exit_code: str) -> None:
        """The job has ended, on all its nodes."""
        for node in self.nodes:
            node.ask(local.Epilog(JOB, self.restart, exit_code))

    def requeue(self, names: list[str], exit_code: str = "") -> None:
        """The next incarnation, on these nodes; agents of nodes that it has left go."""
        for node in self.nodes:
            if node.process is not None:
                node.ask(local.Epilog(JOB, self.restart, exit_code))
        for name in set(self.all) - set(names):
            self.all[name].die()
        self.restart += 1
        self.attach(names)

    def inspect(self, node: RealNode) -> inspect_schema.InspectPart:
        link = self.call(node, "query", restart=self.restart)
        try:
            link.send(inspect_schema.InspectAsk())
            return link.receive(inspect_schema.InspectPart)
        finally:
            link.close()

    def call(self, node: RealNode, purpose: str, **changes: int | str) -> BlockingLink:
        """A connection to the agent's TCP port. Credentials are open in this process too: see `open_munge`."""
        greeting: dict[str, Any] = {"job": JOB, "target": node.name} | changes
        changed = {name: greeting.pop(name) for name in Caller._fields if name in greeting}
        caller = Caller(CLUSTER, "n9", "i", self.restart)._replace(**changed)
        client = HandshakeClient(caller, purpose=purpose, server_uid=os.geteuid(), **greeting)
        return BlockingLink.connect("127.0.0.1", node.port, client)

    def held(self, node: RealNode, rank: int) -> set[tuple[int, int]]:
        """Stamps of the complete copies of a shard."""
        slots = self.inspect(node).held
        return {s.stamp for s in slots if s.rank == rank and s.state == "complete" and s.stamp is not None}

    def close(self) -> None:
        for node in self.all.values():
            node.die()
