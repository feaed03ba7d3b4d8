"""Runs `lite.py` as a real job on a real cluster and tells what became of it."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leaks.cluster import held
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.node import reaper

LITE = Path(__file__).with_name("lite.py")
Line = dict[str, Any]
AGENTS = "/sys/fs/cgroup/memory/gemini-hpc"
# Takes memory in the cgroup of an agent, with a limit that the agent has almost reached, until the kernel has ended a
# process there. A child takes it: if the kernel comes again before the memory of the agent is free, it ends the child
# (950) and not the supervisor (850), as it would end a child of the supervisor first.
STARVE = """
import os, sys, time
top = sys.argv[1]
def read(name):
    with open(f"{top}/{name}") as file:
        return file.read()
def write(path, text):
    with open(path, "w") as file:
        file.write(text)
def killed():
    return read("memory.oom_control").split()[-1]
before, limit = killed(), read("memory.limit_in_bytes")
write(f"{top}/memory.limit_in_bytes", str(int(read("memory.usage_in_bytes")) + (4 << 20)))
child = os.fork()
if not child:
    write(f"{top}/cgroup.procs", "0")
    write("/proc/self/oom_score_adj", "950")
    taken = [bytearray(b"x" * (1 << 20)) for _ in range(256)]
    os._exit(0)
deadline = time.monotonic() + 10.0
try:
    while killed() == before:
        assert time.monotonic() < deadline, "the kernel has ended nobody"
        time.sleep(0.001)
finally:
    write(f"{top}/memory.limit_in_bytes", limit)
    os.kill(child, 9)
    os.waitpid(child, 0)
"""
# Steps that a training still makes when it has been told to come to its end.
MORE = 12


@dataclass
class LiteJob:
    """One job of alice's that runs `lite.py`, one rank a node; `steps` 0: until `finish` is called."""

    cluster: Cluster
    nodes: int = 3
    replicas: int = 2
    steps: int = 0
    pause_s: float = 0.1
    size: int = 1 << 16
    prefix: str = ""
    run: str = "srun"
    python: str = "python"
    options: tuple[str, ...] = ()
    id: int = 0
    directory: Path = field(default_factory=Path)

    def submit(self) -> LiteJob:
        home = self.cluster.locate_home("alice")
        self.directory = home / f"lite-{time.time_ns()}"
        self.directory.mkdir()
        shutil.chown(self.directory, 5001)
        shutil.copy(LITE, self.directory / "lite.py")
        (self.directory / "lite.py").chmod(0o644)
        script = self.directory / "job.sh"
        script.write_text(
            "#!/bin/bash\n"
            f"{self.prefix}{self.run} {self.python} {self.directory}/lite.py "
            f"{self.log} {self.steps} {self.pause_s} {self.size}\n"
            'echo "step ended with $?"\n'
        )
        script.chmod(0o755)
        self.id = self.cluster.submit_job(
            [
                "--requeue",
                "--open-mode=append",
                f"--output={self.directory}/out",
                f"-N{self.nodes}",
                "--ntasks-per-node=1",
                f"--gemini-replicas={self.replicas}",
                *self.options,
                str(script),
            ]
        )
        return self

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def lines(self, what: str = "", restart: int | None = None) -> list[Line]:
        if not self.log.exists():
            return []
        text = self.log.read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [
            line
            for line in lines
            if (not what or line["what"] == what) and (restart is None or line["restart"] == restart)
        ]

    def output(self) -> str:
        path = self.directory / "out"
        return path.read_text() if path.exists() else ""

    def slurm(self) -> dict[str, str]:
        return self.cluster.read_job(self.id)

    @property
    def state(self) -> str:
        return self.slurm().get("JobState", "gone")

    def hosts(self) -> list[str]:
        """The job's hosts now, in Slurm's order."""
        text = self.slurm().get("NodeList", "")
        return self.cluster.run(["scontrol", "show", "hostnames", text]).stdout.split()

    def agent_log(self, node: str) -> str:
        return self.cluster.exec(node, ["cat", f"/run/gemini-hpc/{self.id}/agent.log"]).stdout

    def events(self) -> list[Line]:
        """The job's event log, as its owner sees it."""
        done = self.cluster.run(["gemini-hpc", "inspect", str(self.id), "--json"], user="alice")
        assert done.returncode == 0, done.stderr
        events: list[Line] = json.loads(done.stdout)["events"]
        return events

    def agent_pid(self, node: str) -> int:
        """pid, in the node, of the agent proper (the supervisor's child); 0 where there is none."""
        pids = self.cluster.exec(node, ["pgrep", "-f", f"gemini_hpc.agent --job {self.id} "]).stdout.split()
        return max(map(int, pids), default=0)

    def starve_agent(self, node: str) -> None:
        """Have the kernel end the agent on a node for want of memory, and wait for the next one."""
        before = self.agent_pid(node)
        done = self.cluster.exec(node, ["/usr/bin/python3", "-c", STARVE, f"{AGENTS}/{self.id}"])
        assert done.returncode == 0, f"{done.stderr}\n{self.story()}"
        try:
            until(lambda: self.agent_pid(node) > before, 20, what=f"another agent on {node}")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.agent_log(node)}\n{self.story()}") from None

    def refused(self) -> dict[str, str]:
        """Nodes that Slurm gives to nobody, with their states."""
        states = self.cluster.read_node_states()
        return {node: state for node, state in states.items() if "drain" in state or "down" in state}

    # ---- milestones ------------------------------------------------------------------------------------

    def reach(self, version: int, what: str = "sealed", timeout_s: float = 40.0, restart: int | None = None) -> None:
        """Wait until every rank has got to a version."""

        def there() -> bool:
            ranks = {line["rank"] for line in self.lines(what, restart) if line["version"] >= version}
            return len(ranks) == self.nodes

        try:
            until(there, timeout_s, what=f"every rank {what} {version}")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.story()}") from None

    def finish(self, timeout_s: float = 90.0) -> None:
        """Have it come to its end, wait until every rank is done and the job has completed, and check what a recovery
        must hold to."""
        end = self.directory / f"{self.log.name}.new"
        end.write_text(str(self.completed(time.time()) + MORE))
        end.rename(f"{self.log}.end")

        def over() -> bool:
            state = self.state
            if state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"):
                raise AssertionError(f"job {state}\n{self.story()}")
            return state == "COMPLETED"

        try:
            until(over, timeout_s, 0.1, what=f"job {self.id} completes")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.story()}") from None
        assert not self.lines("MIXED"), self.story()
        done = list(self.lines("done"))
        assert {line["rank"] for line in done} == set(range(self.nodes)), self.story()

    def resumed(self, restart: int) -> int:
        """The version that all ranks resumed from in an incarnation (the last launch in it)."""
        versions: dict[int, int] = {line["rank"]: line["version"] for line in self.lines("resumed", restart)}
        assert len(versions) == self.nodes and len(set(versions.values())) == 1, f"{versions}\n{self.story()}"
        return versions[0]

    def completed(self, before_t: float) -> int:
        """The newest optimizer step that any rank had completed before a moment."""
        return max((line["version"] for line in self.lines("step") if line["t"] < before_t), default=0)

    def repeated(self, restart: int) -> int:
        """How many completed steps the recovery into this incarnation had to repeat."""
        start = min(line["t"] for line in self.lines("resumed", restart))
        return self.completed(start) - self.resumed(restart)

    def story(self) -> str:
        """Everything that helps to understand a failed test."""
        lines = [f"{line['t']:.3f} {line}" for line in self.lines() if line["what"] not in ("sealed", "step")]
        parts = ["", *lines[-30:], self.output()[-2000:], str(self.slurm())]
        for node in self.cluster.node_names:
            if self.cluster.is_on(node):
                parts.append(f"--- {node}\n{self.agent_log(node)[-2500:]}")
        controller = self.cluster.log_directory / "controller.log"
        if controller.exists():
            parts.append(f"--- controller\n{controller.read_text()[-4000:]}")
        return "\n".join(parts)


def leaks(cluster: Cluster) -> list[str]:
    """What jobs hold in a cluster: memory, agents, reservations."""
    return sorted(held(cluster).values())


def given_back(cluster: Cluster, timeout_s: float = 20.0) -> None:
    """Waits until jobs hold nothing any more; AssertionError, which names what they still hold.

    Root's reaper may stay on a node until it has removed the logs that agents leave there for a moment.
    """

    def rest() -> list[str]:
        return [one for one in leaks(cluster) if "gemini_hpc.node.reaper" not in one and "/gemini-hpc/0" not in one]

    # The reaper watches no process of a job whose end came while it slept. A check may ask an agent three times.
    check_s = sum(reaper.AGAIN_S) + 3 * reaper.ANSWER_S
    reaper_s = reaper.LOOK_MOST_S + check_s + reaper.SWEEPS * reaper.LOG_S / 4
    try:
        until(lambda: not rest(), timeout_s, 0.1)
        until(lambda: not leaks(cluster), reaper_s, 0.1)
    except AssertionError as exc:
        raise AssertionError(f"{exc}: not given back: {leaks(cluster)}") from None
