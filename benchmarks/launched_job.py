"""A job of the example's training for measurements of what follows a failure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.bench import PYTHON, USER, MeasureError, Options, directory, wait_for
from gemini_hpc.devcluster.cluster import Cluster

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
ITERATION_S = 0.2
BEFORE = 60  # iterations: by then a launcher has imported what its rank has


class Job:
    """A training of examples/train_gpt.py on so many nodes, that ends when it is told to. run: before python, module:
    after it."""

    def __init__(
        self,
        on: Cluster,
        nodes: int,
        *,
        run: str,
        module: str = "",
        options: tuple[str, ...] = (),
        replicas: int = 2,
    ) -> None:
        self._cluster = on
        where = directory(on)
        shutil.copy(_EXAMPLE, where / _EXAMPLE.name)
        self._log, self._out = where / "log", where / "out"
        script = where / "job.sh"
        words = f"{where / _EXAMPLE.name} --steps 100000 --workers 0 --iteration-s {ITERATION_S} --log {self._log}"
        script.write_text(f"#!/bin/bash\nexec {run} {PYTHON} {module} {words}\n")
        script.chmod(0o755)
        asked = [
            f"-N{nodes}",
            "--ntasks-per-node=1",
            f"--gemini-replicas={replicas}",
            f"--output={self._out}",
            *options,
        ]
        self.id = on.submit_job([*asked, str(script)], user=USER)

    def hosts(self) -> list[str]:
        """Its nodes now."""
        names = self._cluster.read_job(self.id)["NodeList"]
        return self._cluster.run(["scontrol", "show", "hostnames", names]).stdout.split()

    def goes_on(self, since: float, within_s: float = 60.0) -> dict[str, float]:
        """Wait for an iteration that has ended again after this moment (Unix time); seconds from there to the first
        event of each name. Raises MeasureError where it began at step 0."""
        first: dict[str, float] = {}

        def again() -> bool:
            later = sorted((e for e in self._events() if e["t"] > since), key=lambda e: -e["t"])
            first.update({e["name"]: e["t"] - since for e in later})
            return "first_iteration" in first

        wait_for(f"job {self.id} goes on\n{self._output()}", again, within_s, 0.5)
        resumed = [e["version"] for e in self._events() if e["name"] == "resumed" and e["t"] > since]
        if not resumed or min(resumed) == 0:
            raise MeasureError(f"job {self.id} did not resume: {resumed}\n{self._output()}")
        return first

    def end(self) -> None:
        """Cancel it."""
        self._cluster.run(["scancel", str(self.id)])
        wait_for("the queue is empty", lambda: not self._cluster.run(["squeue", "-h"]).stdout.strip(), 60, 0.2)

    def warm(self, options: Options) -> None:
        """Wait for the iterations before a failure."""
        steps = options.pick(BEFORE, 10)

        def there() -> bool:
            return self._log.exists() and self._log.read_text().count("\n") >= steps

        wait_for(f"job {self.id} makes {steps} iterations", there, 300, 0.2)

    def _events(self) -> list[dict[str, Any]]:
        done = self._cluster.run(["gemini-hpc", "inspect", str(self.id), "--json"], user=USER)
        if done.returncode:
            raise MeasureError(f"inspect: {done.stderr}")
        events: list[dict[str, Any]] = json.loads(done.stdout)["events"]
        return events

    def _output(self) -> str:
        return self._out.read_text()[-2000:] if self._out.exists() else ""
