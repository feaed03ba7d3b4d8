"""A node of the cluster: its agents, their supervisors, and the directory of each job in the node's memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from gemini_hpc.agent.daemon import Agent
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.config import Settings
from gemini_hpc.wire import local

from .kernel import Process
from .system import OWNER, Connection, World


class SimAgent(Agent):
    """The production one; it tells its story."""

    process: Process
    world: World

    def _print(self, t: float, name: str, version: int, detail: str) -> None:
        self.world.tell(f"{self.identity.node} {self.membership.restart} {name} v{version} {detail}")


class Seat:
    """One job's place on a node: an agent and who starts it again."""

    def __init__(self, node: Node, job: int) -> None:
        self.node, self.job = node, job
        self.directory = f"{node.root}/{job}"
        os.makedirs(self.directory, exist_ok=True)
        self.agent: SimAgent | None = None
        self.process: Process | None = None
        self.deaths = 0
        self.ended = False  # the agent has released everything

    def start(self, *, again: bool = False) -> None:
        """A new agent."""
        world, node = self.node.world, self.node
        uid = world.owners.get(self.job, OWNER)
        process = self.process = Process(world.loop, f"agent-{self.job}", node.name)
        process.user_id = uid
        node.processes.append(process)
        process.on_kill.append(self._died)

        def make() -> SimAgent:
            agent = SimAgent(AgentIdentity(node.settings, self.job, uid, node.name, self.directory, again))
            agent.process, agent.world = process, world
            return agent

        self.agent = process.context.run(make)
        world.tell(f"{node.name} agent of job {self.job} {'again' if again else 'starts'}")
        process.spawn(self.agent.run()).add_done_callback(lambda task: self._returned(process, task))

    def _returned(self, process: Process, task: Any) -> None:
        if self.process is process and process.alive:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()
            self.ended = True
            self.node.world.tell(f"{self.node.name} agent of job {self.job} has released everything")
            process.on_kill.remove(self._died)
            process.kill()
            self.node.seats.pop(self.job, None)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _died(self) -> None:
        """Killed: its memory is where ranks have it; the supervisor starts another."""
        assert self.agent is not None
        self.node.on_death(self.agent)
        free(self.agent)
        self.node.lost_at = self.node.world.loop.now
        world = self.node.world
        world.tell(f"{self.node.name} agent of job {self.job} dies")
        self.agent, self.deaths = None, self.deaths + 1
        boot = self.node.boots
        if self.deaths <= self.node.settings.agent_restarts:
            world.network.at(world.loop.now + 0.05 * self.deaths, self._again, boot)

    def _again(self, boot: int) -> None:
        if self.node.host.up and self.node.boots == boot and self.agent is None and not self.ended:
            self.start(again=True)


def free(agent: Agent) -> None:
    """What the system does with the descriptors of a process that has ended."""
    memories: list[Memfd] = [m for shard in agent.store for m in shard.memory]
    for training in agent.trainings:
        memories += [*training.load_copies.values(), training._memory]
    memories += agent.saver.node._copies.values()
    for memory in memories:
        if memory.fd >= 0:
            os.close(memory.fd)
            memory.fd = -1


class Node:
    """One."""

    def __init__(self, world: World, name: str, settings: Settings) -> None:
        self.world, self.name, self.settings = world, name, settings
        self.host = world.network.add(name)
        self.root = tempfile.mkdtemp(prefix=f"gemini-sim-{name}-")
        world.paths[self.root] = f"/run/{name}"
        self.seats: dict[int, Seat] = {}
        self.processes: list[Process] = []
        self.boots = 0
        self.on_death: Callable[[Agent], None] = lambda agent: None
        self.lost_at = -1.0  # when it last had memory that it may not have any more

    def seat(self, job: int) -> Seat:
        """The job's place here, made at first use."""
        if job not in self.seats:
            self.seats[job] = Seat(self, job)
        return self.seats[job]

    def prolog(self, attach: local.Attach) -> str:
        """As root's prolog, in a thread: an agent is there, and has been told; what it says."""
        seat = self.seat(attach.job)
        if seat.agent is None:
            seat.deaths = 0
            seat.start()
        deadline = self.world.loop.now + self.settings.attach_timeout_s
        while self.world.loop.now < deadline:
            try:
                reply, _ = Connection(f"{seat.directory}/agent.sock").ask(
                    attach, timeout_s=deadline - self.world.loop.now
                )
                if isinstance(reply, local.Ready):
                    return " ".join((reply.state, *reply.absent))
                return f"refused: {reply}"
            except ConnectionError:
                self.world.clock.sleep(0.05)
            except TimeoutError:
                break
        return "no answer"

    def epilog(self, job: int, restart: int, exit_code: str = "") -> str:
        """As root's epilog, in a thread."""
        seat = self.seats.get(job)
        if seat is None or seat.agent is None:
            return "no agent"
        try:
            reply, _ = Connection(f"{seat.directory}/agent.sock").ask(
                local.Epilog(job, restart, exit_code), timeout_s=10.0
            )
        except (ConnectionError, TimeoutError) as error:
            return str(error)
        return reply.state if isinstance(reply, local.Ok) else str(reply)

    def power_off(self) -> None:
        """The node loses power, and with it all that it has in memory."""
        self.world.tell(f"{self.name} loses power")
        self.world.network.power_off(self.host)
        self.boots += 1
        self.lost_at = self.world.loop.now
        for process in self.processes:
            process.kill()
        self.processes.clear()
        self.seats.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    def power_on(self) -> None:
        """It boots, empty."""
        self.world.tell(f"{self.name} has booted")
        os.makedirs(self.root, exist_ok=True)
        self.world.network.power_on(self.host)

    def clear(self) -> None:
        """The simulation is over."""
        shutil.rmtree(self.root, ignore_errors=True)

    def kill_agent(self, job: int, within: int) -> None:
        """The agent dies after so many of its next turns."""
        seat = self.seats.get(job)
        if seat is not None and seat.process is not None and seat.agent is not None:
            seat.process.dies_in = within
