"""A real cluster with the real controller, and fake agents on its nodes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from leaks import Found, assert_nothing_new
from leaks.cluster import Bystander, present
from waiting import until

from gemini_hpc.controller import probe
from gemini_hpc.controller.fencing import Port
from gemini_hpc.controller.probe import ProbeResult, Target
from gemini_hpc.devcluster import Cluster

PYTHON = "/opt/gemini-hpc/venv/bin/python"
# A step on every node: a survivor without one keeps the job COMPLETING until Slurm's message to the dead times out.
SLEEPER = "#!/bin/sh\necho started on $(hostname) restart ${SLURM_RESTART_COUNT:-0}\nsrun sleep 600\n"
# Who finds a node dead is the controller: with the profile's 10 s Slurm itself does so on a busy machine.
PATIENT = "SlurmdTimeout=300"


class Site:
    """A cluster with a controller; fake agents are started on nodes of a job."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.processes: list[Any] = []
        self.servers: list[Any] = []  # what is needed until the cluster goes down
        self.logs: dict[str, Path] = {}
        self.bystander = Bystander(cluster)
        shutil.copy(Path(__file__).parent / "fake_agent.py", cluster.locate_home("alice") / "fake_agent.py")
        os.chmod(cluster.locate_home("alice") / "fake_agent.py", 0o755)

    def submit(self, *args: str, user: str = "alice", script: str = SLEEPER) -> int:
        return self.cluster.submit_job(args, user=user, script=script)

    def running(self, job: int, restart: int = 0, timeout_s: float = 60.0) -> dict[str, str]:
        def there() -> dict[str, str] | None:
            facts = self.cluster.read_job(job)
            return facts if facts["JobState"] == "RUNNING" and facts["Restarts"] == str(restart) else None

        found: dict[str, str] = until(there, timeout_s)
        return found

    def nodes(self, job: int | str) -> list[str]:
        out = self.cluster.run(["squeue", "-h", "-r", "-j", str(job), "-o", "%N"]).stdout.strip()
        return self.cluster.run(["scontrol", "show", "hostnames", out]).stdout.split() if out else []

    def agents(self, job: int, restart: int, hosts: Sequence[str], mode: str = "", user: str = "alice") -> None:
        for host in hosts:
            self.agent(job, restart, host, hosts, mode, user)
        for host in hosts:
            until(partial(self._registered, job, restart, host))

    def _registered(self, job: int, restart: int, host: str) -> bool:
        return "registered" in self.words(job, restart, host)

    def agent(self, job: int, restart: int, host: str, hosts: Sequence[str], mode: str, user: str = "alice") -> None:
        script = self.cluster.locate_home(user) / "fake_agent.py"
        if not script.exists():  # one that is copied again is empty for agents that start meanwhile
            shutil.copy(self.cluster.locate_home("alice") / "fake_agent.py", script)
        log = self.cluster.directory / f"fake-{job}-{restart}-{host}.log"
        self.logs[f"{job}.{restart}.{host}"] = log
        argv = [PYTHON, "-I", str(script), str(job), str(restart), host, ",".join(hosts), *([mode] if mode else [])]
        with log.open("w") as out:
            self.processes.append(self.cluster.start_command(argv, user=user, node=host, stdout=out, stderr=out))

    def end_agents(self) -> None:
        for process in self.processes:
            with suppress(OSError):
                process.kill()

    def words(self, job: int, restart: int, host: str) -> str:
        return self.logs[f"{job}.{restart}.{host}"].read_text()

    def events(self, job: int) -> list[dict[str, Any]]:
        path = self.cluster.directory / "controller" / "jobs" / f"{job}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def event(self, job: int, name: str) -> dict[str, Any] | None:
        return next((e for e in self.events(job) if e["name"] == name), None)

    def reservations(self) -> list[str]:
        out = self.cluster.run(["scontrol", "show", "reservation", "-o"]).stdout
        return [line.split()[0].split("=")[1] for line in out.splitlines() if line.startswith("ReservationName=")]

    def inspect(self, job: int, *args: str, user: str = "alice", node: str | None = None) -> Any:
        argv = [PYTHON, "-I", "-m", "gemini_hpc.cli.main", "inspect", str(job), *args]
        return self.cluster.run(argv, user=user, node=node)

    def jobs(self, *args: str, user: str = "alice") -> Any:
        return self.cluster.run([PYTHON, "-I", "-m", "gemini_hpc.cli.main", "jobs", *args], user=user)

    def log(self) -> str:
        path = self.cluster.log_directory / "controller.log"
        return path.read_text() if path.exists() else ""  # a cluster without controller

    def end(self) -> None:
        """End all jobs; what must be left of them then is nothing but the nodes that the test cut."""
        cluster = self.cluster
        off = [node for node in cluster.node_names if not cluster.is_on(node)]
        if off:  # else Slurm waits for them to say that the job has ended there
            cluster.run(["scontrol", "update", f"nodename={','.join(off)}", "state=down", "reason=test"])
        for user in ("alice", "bob"):
            cluster.run(["scancel", f"--user={user}"])
        _kill(self.processes)
        if cluster.find_controller_pid() is None:
            cluster.start_controller()
        for node, state in cluster.read_node_states().items():
            if node not in off and ("drain" in state or "down" in state):
                cluster.resume(node)
        # The agent of a node that was cut counts as connected for long, and so the controller keeps its notes.
        exempt = {("node", node) for node in off}

        def left() -> Found:
            found = present(cluster).items()
            return {k: v for k, v in found if k[:2] not in exempt and not (off and v.startswith("controller: "))}

        changed = self.bystander.end()
        assert_nothing_new({}, left, 40)  # the watcher looks twice, each 10 s at most after the other
        assert not changed, f"somebody else's job {self.bystander.id} has been changed: {changed}"

    def close(self) -> None:
        _kill([*self.processes, *self.servers])


def _kill(processes: list[Any]) -> None:
    for process in processes:
        with suppress(OSError):
            process.kill()
        process.wait()


@pytest.fixture
def make_site(request: pytest.FixtureRequest) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(**options: Any) -> Site:
        name = f"ctl{os.getpid()}-{len(made)}"
        options["slurm_conf"] = [PATIENT, *options.get("slurm_conf", ())]
        site = Site(Cluster.bring_up(name, **{"nodes": 5, "site": False, **options}))
        made.append(site)
        return site

    yield make
    for site in made:
        report = getattr(request.node, "report_call", None)
        failed = report is not None and report.failed
        if failed:
            print(site.log())
        if keep := os.environ.get("GEMINI_TEST_LOGS"):
            shutil.copytree(site.cluster.log_directory, Path(keep) / request.node.name, dirs_exist_ok=True)
        try:
            if not failed:
                site.end()
        finally:
            site.close()
            site.cluster.tear_down()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    if call.when == "call":
        item.report_call = outcome.get_result()  # type: ignore[attr-defined]


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, ProbeResult]:
    """What the controller's probes see, by address; of nodes that are not in it, that they answer."""
    found: dict[str, ProbeResult] = {}
    alive = ProbeResult(Port.ANSWERS, Port.ANSWERS, Port.ANSWERS)

    async def look(target: Target) -> ProbeResult:
        await asyncio.sleep(0.01)
        return found.get(target.address, alive)

    async def looks(targets: dict[str, Target]) -> dict[str, ProbeResult]:
        return {n: await look(t) for n, t in targets.items()}

    async def reached(targets: dict[str, tuple[str, int]]) -> dict[str, Port]:
        return {n: found.get(n, alive).slurmd for n in targets}

    monkeypatch.setattr(probe, "probe_node", look)
    monkeypatch.setattr(probe, "probe_nodes", looks)
    monkeypatch.setattr(probe, "probe_ports", reached)
    return found
