"""One good cluster for all of doctor's tests. Each breaks one thing of it and mends it again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from leaks.cluster import nothing_left
from replacing import replace
from waiting import until

from gemini_hpc.devcluster import Cluster

DOCTOR = ["gemini-hpc", "doctor", "--json"]
# What is not as at a site, on purpose or by the distribution, is told on every host.
EXPLAINED = {"slurm.cred-expire": "warning", "munge.version": "warning"}


@dataclass(frozen=True)
class Report:
    """What doctor said, and its exit status."""

    code: int
    document: dict[str, Any]
    errors: str

    def __getitem__(self, check: str) -> dict[str, Any]:
        (found,) = [c for c in self.document["checks"] if c["check"] == check]
        return dict(found)

    @property
    def bad(self) -> dict[str, str]:
        return {c["check"]: c["status"] for c in self.document["checks"] if c["status"] in ("warning", "wrong")}

    @property
    def news(self) -> dict[str, str]:
        """What a good cluster does not have."""
        return {k: v for k, v in self.bad.items() if EXPLAINED.get(k) != v}


class Patient:
    """The cluster, and ways to break it for a while."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.directory = cluster.directory
        self.slurm_conf = cluster.directory / "etc/slurm/slurm.conf"
        self.plugstack = cluster.directory / "etc/slurm/plugstack.conf"
        self.settings = cluster.directory / "etc/gemini-hpc/gemini.toml"
        self.venv = cluster.directory / "opt/venv"
        self.state = cluster.directory / "controller"

    def doctor(self, *args: str, node: str | None = None, user: str | None = None, **kwargs: Any) -> Report:
        done = self.cluster.run([*DOCTOR, *args], node=node, user=user, timeout_s=100, **kwargs)
        assert done.stdout, done.stderr
        return Report(done.returncode, json.loads(done.stdout), done.stderr)

    def reconfigure(self) -> None:
        done = self.cluster.run(["scontrol", "reconfigure"])
        assert done.returncode == 0, done.stderr

    @contextmanager
    def file(self, path: Path, contents: str | bytes) -> Iterator[None]:
        """Other contents for a file."""
        before = path.read_bytes()
        replace(path, contents)
        try:
            yield
        finally:
            replace(path, before)

    @contextmanager
    def appended(self, path: Path, line: bytes) -> Iterator[None]:
        """One more line in a file that its writer keeps open."""
        size = path.stat().st_size
        with path.open("ab") as file:
            file.write(line)
        try:
            yield
        finally:
            os.truncate(path, size)

    @contextmanager
    def conf(self, *lines: str, without: Sequence[str] = ()) -> Iterator[None]:
        """Other lines in slurm.conf; a key that is there already is replaced."""
        keys = {line.partition("=")[0] for line in lines if not line.startswith(("NodeName", "SlurmctldHost"))}
        keys |= set(without)
        kept = [line for line in self.slurm_conf.read_text().splitlines() if line.partition("=")[0] not in keys]
        try:
            with self.file(self.slurm_conf, "\n".join([*kept, *lines]) + "\n"):
                self.reconfigure()
                yield
        finally:
            self.reconfigure()

    @contextmanager
    def access(self, path: Path, *, owner: int | None = None, mode: int | None = None) -> Iterator[None]:
        """Another owner or mode."""
        before = path.stat()
        os.chown(path, before.st_uid if owner is None else owner, -1)
        if mode is not None:
            path.chmod(mode)
        try:
            yield
        finally:
            os.chown(path, before.st_uid, before.st_gid)
            path.chmod(before.st_mode & 0o7777)

    @contextmanager
    def mounted(self, host: str | None, *words: str) -> Iterator[None]:
        """`mount WORDS` on one host only; the last word is where."""
        done = self.cluster.run(["mount", *words], node=host)
        assert done.returncode == 0, done.stderr
        try:
            yield
        finally:
            assert self.cluster.run(["umount", words[-1]], node=host).returncode == 0

    @contextmanager
    def written(self, name: str, text: str, mode: int = 0o644) -> Iterator[Path]:
        """A file of root's, below the cluster's directory."""
        path = self.directory / name
        path.write_text(text)
        path.chmod(mode)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def with_settings(self, **values: object) -> Iterator[Path]:
        """A copy of gemini.toml with other values, for --config."""
        kept = [line for line in self.settings.read_text().splitlines() if line.partition(" =")[0] not in values]
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        with self.written("other.toml", "\n".join([*kept, *lines]) + "\n") as path:
            yield path

    def submit(self, *args: str, nodes: int = 2, script: str = "#!/bin/sh\nsrun sleep 300\n") -> int:
        return self.cluster.submit_job([f"-N{nodes}", "--gemini-replicas=2", *args], script=script)

    @contextmanager
    def job(self, *args: str, **kwargs: Any) -> Iterator[int]:
        """A protected job, running with its agents; gone at the end."""
        job = self.submit(*args, **kwargs)
        try:
            until(lambda: self.cluster.read_job(job)["JobState"] == "RUNNING")
            until(lambda: self.picture(job)["state"] != "unprotected" and not self.picture(job)["missing"])
            yield job
        finally:
            self.cluster.run(["scancel", str(job)])
            until(lambda: self.cluster.read_job(job)["JobState"] == "CANCELLED")
            until(lambda: not self.cluster.run(["squeue", "-h", "-j", str(job)]).stdout.strip())

    def picture(self, job: int) -> dict[str, Any]:
        done = self.cluster.run(["gemini-hpc", "inspect", str(job), "--json"])
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"state": "unprotected"}
        return found

    def pids(self, node: str, pattern: str) -> list[str]:
        return self.cluster.exec(node, ["pgrep", "-f", pattern]).stdout.split()


@pytest.fixture(scope="session")
def shared() -> Iterator[Patient]:
    # What is broken here is not a node: a busy machine's pause must not have Slurm set one DOWN.
    with Cluster.bring_up(f"doctor{os.getpid()}", nodes=3, slurm_conf=["SlurmdTimeout=300"]) as cluster:
        yield Patient(cluster)


@pytest.fixture(scope="module")
def patient(shared: Patient) -> Iterator[Patient]:
    """Each test mends what it breaks: the next one would find it, as each compares all findings, and so does this."""
    yield shared
    for host in (None, *shared.cluster.node_names):
        after = shared.doctor(node=host)
        assert set(after.news) <= {"leftovers.directories"} and after.code == 0, after.document


@pytest.fixture(autouse=True)
def nothing_left_on_the_patient(request: pytest.FixtureRequest) -> Iterator[None]:
    if "patient" not in request.fixturenames:
        yield
        return
    with nothing_left(request.getfixturevalue("patient").cluster, 20):
        yield
