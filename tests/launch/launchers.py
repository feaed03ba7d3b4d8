"""Launchers of one step beside real agents: started, watched, ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.agents import RealJob
from train.launch import ROOT, Process, environments
from waiting import until

TOY = Path(__file__).with_name("toy.py")
Line = dict[str, Any]
Fault = tuple[int, int, int, str | int]


class Command:
    """A launcher that begins with Python itself, as users start it; otherwise as `Process`."""

    def __init__(
        self, env: dict[str, str], arguments: Sequence[str], output: Path, group: Path | None = None
    ) -> None:
        """group: a cgroup to begin in."""
        usual = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_"))}
        usual |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._output = output
        argv = [sys.executable, "-m", "gemini_hpc.launch", *arguments]
        if group is not None:
            argv = ["sh", "-c", f'echo 0 >{group}/cgroup.procs; exec "$@"', "sh", *argv]
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                argv, env={**usual, **env}, cwd=output.parent, stdout=subprocess.DEVNULL, stderr=file
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def read(self) -> tuple[str, str]:
        return "", self._output.read_text()


class Launchers:
    """One for each rank of a step; ranks are dealt to the job's nodes in blocks. Without a job there is no agent."""

    def __init__(
        self,
        job: RealJob | None,
        directory: Path,
        world: int,
        *,
        words: Sequence[str] = (),
        script: Path = TOY,
        fresh: bool = False,
        groups: Mapping[int, Path] | None = None,
        faults: Sequence[Fault] = (),
        **options: Any,
    ) -> None:
        """words: options of the launcher; fresh: not forked from a process that has torch already; groups: cgroups of
        ranks; faults: rank, attempt, step and what happens."""
        directory.mkdir()
        self.job, self.world, self._directory = job, world, directory
        told = [dict(zip(("rank", "attempt", "step", "how"), fault, strict=True)) for fault in faults]
        given = {"log": str(directory), "steps": 20, "pause_s": 0.05, "faults": told, **options}
        arguments = [*words, str(script), json.dumps(given)]
        self.processes: list[Process | Command] = []
        for rank, env in enumerate(environments(world)):
            if job is not None:
                node = job.nodes[rank * len(job.nodes) // world]
                env |= {"GEMINI_SOCKET": node.path, "GEMINI_STEP": "7.0"}
            self.processes.append(
                Command(env, arguments, directory / f"output{rank}", (groups or {}).get(rank))
                if fresh
                else Process(env, module="gemini_hpc.launch", arguments=arguments)
            )

    def wait(self, timeout_s: float = 120.0) -> list[int]:
        """Exit statuses by rank."""
        deadline = time.monotonic() + timeout_s
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]
        assert None not in codes, f"launchers do not end: {codes}\n{self.story()}"
        return [code for code in codes if code is not None]

    def close(self) -> None:
        """End what is left; a rank ends with its launcher."""
        for process in self.processes:
            process.signal(signal.SIGKILL)
            process.wait(10)
        for left in Path(tempfile.gettempdir()).glob("pymp-*"):  # what Python leaves of killed workers
            shutil.rmtree(left, ignore_errors=True)

    def output(self, rank: int) -> str:
        """What the launcher and its ranks have said to the user."""
        return self.processes[rank].read()[1]

    def lines(self, what: str, **wanted: Any) -> list[Line]:
        """What the ranks have noted, rank by rank."""
        found: list[Line] = []
        for rank in range(self.world):
            path = self._directory / f"rank{rank}"
            text = path.read_text() if path.exists() else ""
            found += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in found if line["what"] == what and wanted.items() <= line.items()]

    def reach(self, step: int, attempt: int = 0) -> None:
        """Wait until every rank has made this step."""

        def there() -> bool:
            assert all(p.poll() is None for p in self.processes), self.story()
            return len(self.lines("step", step=step, attempt=attempt)) == self.world

        until(there, 40, 0.01, what=f"step {step} of attempt {attempt}")

    def pid(self, rank: int, attempt: int = 0) -> int:
        """Of the rank's process."""
        found: int = self.lines("resumed", rank=rank, attempt=attempt)[0]["pid"]
        return found

    def signal(self, number: signal.Signals, later_s: float = 0.0) -> None:
        """To all processes of the step, as Slurm does it; later_s: to the launcher after its rank."""
        for rank, process in enumerate(self.processes):
            os.kill(self.pid(rank), number)
            time.sleep(later_s)
            process.signal(number)

    def repeated(self, attempt: int) -> int:
        """Completed iterations that an attempt did again; all its ranks began at one."""
        starts = {line["rank"]: line["step"] for line in self.lines("resumed", attempt=attempt)}
        assert len(starts) == self.world and len(set(starts.values())) == 1, f"{starts}\n{self.story()}"
        before = [line["step"] for line in self.lines("step") if line["attempt"] < attempt]
        return max(before, default=0) - starts[0]

    def attempts(self) -> int:
        """How often the ranks were started."""
        return max(line["attempt"] for line in self.lines("resumed")) + 1

    def digests(self) -> list[str]:
        """Of the final weights, by rank."""
        return [line["digest"] for line in self.lines("done")]

    def story(self) -> str:
        """For a test that has failed."""
        logs = [node.log()[-2000:] for node in self.job.all.values()] if self.job is not None else []
        return "\n".join([*(f"--- {rank}\n{self.output(rank)[-3000:]}" for rank in range(self.world)), *logs])


def alive(pid: int) -> bool:
    """Whether this process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
