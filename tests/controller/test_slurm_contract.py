"""One contract over all ways of asking Slurm, on a real cluster: equal facts, the same errors, changes that hold.

pyslurm is a fake of its shape (`fake_pyslurm`), unless GEMINI_TEST_PYSLURM names a Python that has the real one for
this machine's Slurm. Where Slurm's commands have no --json, that way must lead to the commands, and say so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from waiting import until

from gemini_hpc.devcluster import Cluster
from gemini_hpc.slurm import Slurm, SlurmError, UnknownJob, client, ways
from gemini_hpc.slurm.pyslurm_reader import WORKER, PyslurmReader

from . import hostile, inside
from .conftest import PYTHON

T = TypeVar("T")
WAYS = (ways.COMMANDS, ways.JSON, ways.PYSLURM)
LONG = "#!/bin/sh\nsleep 600\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.bring_up(f"way{os.getpid()}", nodes=3, site=False, controller=False) as made:
        feature = hostile.FEATURE
        made.run(
            ["scontrol", "update", "nodename=n[1-3]", f"AvailableFeatures={feature}", f"ActiveFeatures={feature}"]
        )
        yield made


def started(path: str, worker: str) -> str:
    """Code that runs the worker, pyslurm being found in `path`."""
    first = f"sys.path.insert(0, {path!r}); " if path else ""
    return f"import sys; {first}import runpy; runpy.run_path({worker!r}, run_name='__main__')"


class Asking:
    """Clients of each way; every question has an event loop and a client of its own, as commands of users have."""

    def __init__(self, told: list[ways.Way]) -> None:
        self.told = told

    def ask(self, way: str, question: Callable[[Slurm], Awaitable[T]]) -> T:
        async def run() -> T:
            slurm = Slurm(api=way, on_way=self.told.append)
            try:
                return await question(slurm)
            finally:
                await slurm.close()

        return asyncio.run(run())


@pytest.fixture(scope="module")
def asking(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    place = cluster.directory / "pyslurm"
    place.mkdir()
    shutil.copy(Path(__file__).with_name("fake_pyslurm.py"), place / "pyslurm.py")
    worker = shutil.copy(WORKER, place / "worker.py")
    real = os.environ.get("GEMINI_TEST_PYSLURM", "")
    code = started("" if real else str(place), str(worker))
    argv, env = cluster.build_command([real or PYTHON, "-I", "-c", code], env={"TZ": "UTC", "LC_ALL": "C"})
    with pytest.MonkeyPatch.context() as patch:
        inside.slurm(cluster, tmp_path_factory.mktemp("tools"), patch)
        release = cluster.run(["scontrol", "--version"]).stdout.split()[-1]
        patch.setattr(ways, "find_pyslurm", lambda: release)
        patch.setattr(
            client,
            "_make_pyslurm_reader",
            lambda timeout_s, heard: PyslurmReader(env, timeout_s, heard, tuple(argv)),
        )
        yield Asking([])


@pytest.mark.cluster
def test_equal_facts(cluster: Cluster, asking: Asking) -> None:
    plain = cluster.submit_job(["-N2", "--mem-per-cpu=150", "--mincpus=2", "-x", "n3", "-t", "9"], script=LONG)
    array = cluster.submit_job(["--array=1-4%2", "--no-requeue", "--mem-per-cpu=20"], script=LONG)
    het = cluster.submit_job(["-N1", ":", "-N1"], script=LONG)
    failed = cluster.submit_job(["-N1", "--mem-per-cpu=20"], script="#!/bin/sh\nexit 3\n")
    worst = hostile.submit(cluster, hostile.WORST, "-N1", "-w", "n2", "--hold", "--requeue")
    try:
        wait = asking.ask(ways.COMMANDS, lambda slurm: _settled(slurm, plain, failed))
        assert wait
        ids = sorted({int(i) for i in cluster.run(["squeue", "-h", "-t", "all", "-o", "%A"]).stdout.split()})
        assert {plain, array, het, failed, worst} <= set(ids)

        async def facts(slurm: Slurm) -> object:
            # squeue names no end for parts of heterogeneous jobs, which are never acted on.
            found = [await slurm.read_job(i) for i in ids]
            jobs = [dataclasses.replace(job, end_time=0.0) if job.is_het else job for job in found]
            excluded = [await slurm.read_excluded(i) for i in ids]
            # 22.05's scontrol does not print the port that slurm.conf has for all.
            nodes = {k: dataclasses.replace(v, port=0) for k, v in (await slurm.read_nodes()).items()}
            return jobs, excluded, nodes, set(await slurm.read_nodes(["n2"])), await slurm.find_raw_id(f"{array}_1")

        for way in WAYS:

            def read(way: str = way) -> tuple[object, object] | None:
                before, found = asking.ask(ways.COMMANDS, facts), asking.ask(way, facts)
                return (found, before) if asking.ask(ways.COMMANDS, facts) == before else None

            found, expected = until(read, 60, what="nothing happens meanwhile")
            assert found == expected, way
            with pytest.raises(UnknownJob):
                asking.ask(way, lambda slurm: slurm.read_job(999999))
    finally:
        cluster.run(["scancel", "-u", "alice"])


async def _settled(slurm: Slurm, running: int, failed: int) -> bool:
    async with asyncio.timeout(30):
        while (await slurm.read_job(running)).state != "RUNNING" or (await slurm.read_job(failed)).state != "FAILED":
            await asyncio.sleep(0.1)
    return True


@pytest.mark.cluster
@pytest.mark.parametrize("way", WAYS)
def test_the_way_that_is_used_is_told(way: str, cluster: Cluster, asking: Asking) -> None:
    asking.told.clear()
    asking.ask(way, lambda slurm: slurm.read_nodes())
    has_json = cluster.run(["scontrol", "--json", "show", "node"]).returncode == 0
    used = asking.told[-1]
    if way == ways.JSON and not has_json:
        assert (used.name, used.is_fallback) == (
            ways.COMMANDS,
            True,
        ) and "json is no longer used: scontrol --json" in used.why
    else:
        assert (used.name, used.is_fallback) == (way, False)


@pytest.mark.cluster
@pytest.mark.parametrize("way", WAYS)
def test_changes_take_effect(way: str, cluster: Cluster, asking: Asking) -> None:
    job = cluster.submit_job(["-N1", "-w", "n1", "--requeue"], script=LONG)
    try:
        until(lambda: asking.ask(ways.COMMANDS, lambda slurm: slurm.read_job(job)).state == "RUNNING", 20)

        async def requeue(slurm: Slurm) -> None:
            await slurm.requeue_job(await slurm.read_job(job))

        asking.ask(way, requeue)
        after = asking.ask(way, lambda slurm: slurm.read_job(job))
        assert after.restarts == 1 and after.state in ("PENDING", "COMPLETING", "CONFIGURING", "RUNNING")
    finally:
        cluster.run(["scancel", str(job)])
    node = asking.ask(way, lambda slurm: slurm.set_node_down("n3", 'gemini-hpc: "a test"\nState=IDLE'))
    assert node.is_down and "DRAIN" in node.flags and node.reason.startswith("gemini-hpc: 'a test' State=IDLE [root@")
    assert asking.ask(ways.COMMANDS, lambda slurm: slurm.read_nodes(["n3"]))["n3"].is_down
    asking.ask(way, lambda slurm: slurm.resume_node("n3"))
    until(lambda: asking.ask(way, lambda slurm: slurm.read_nodes(["n3"]))["n3"].is_idle, 20)
    with pytest.raises(SlurmError):
        asking.ask(way, lambda slurm: slurm.set_node_down("n99", "gemini-hpc: not there"))


@pytest.mark.cluster
def test_no_array_is_requeued_by_its_last_task(cluster: Cluster, asking: Asking) -> None:
    """By raw id, which is all that pyslurm has, the last task stands for all."""
    array = cluster.submit_job(["--array=1-2", "--requeue"], script=LONG)
    try:

        async def requeue(slurm: Slurm) -> list[int]:
            async with asyncio.timeout(30):
                while {(await slurm.read_job(i)).state for i in (array, await slurm.find_raw_id(f"{array}_1"))} != {
                    "RUNNING"
                }:
                    await asyncio.sleep(0.1)
            await slurm.requeue_job(await slurm.read_job(array))
            return [(await slurm.read_job(i)).restarts for i in (array, await slurm.find_raw_id(f"{array}_1"))]

        assert asking.ask(ways.PYSLURM, requeue) == [1, 0]
    finally:
        cluster.run(["scancel", str(array)])


# ---- a pyslurm that behaves badly, without a cluster ------------------------------------------------------


@pytest.fixture
def bad(tmp_path: Path) -> tuple[str, ...]:
    shutil.copy(Path(__file__).with_name("fake_pyslurm.py"), tmp_path / "pyslurm.py")
    return ("/usr/bin/python3", "-I", "-c", started(str(tmp_path), WORKER))


@pytest.mark.parametrize("mode", ["exit at import", "hang at import", "hang", "die", "raise", "not utf-8", "print"])
def test_a_surprise_ends_pyslurm_and_the_commands_answer(
    mode: str, bad: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mode").write_text(mode)
    tools = tmp_path / "tools"
    tools.mkdir()
    record = "NodeName=n1 NodeAddr=n1 NodeHostName=n1 State=IDLE Partitions=main CPUTot=1 RealMemory=1 BootTime=x"
    record += " SlurmdStartTime=x AvailableFeatures= ActiveFeatures="
    (tools / "scontrol").write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo slurm 22.05.8 && exit\necho "{record}"\n'
    )
    (tools / "scontrol").chmod(0o755)
    monkeypatch.setattr(client, "_DIRECTORIES", (str(tools),))
    monkeypatch.setattr(ways, "find_pyslurm", lambda: "22.5.3")
    readers: list[PyslurmReader] = []

    def reader(timeout_s: float, heard: Callable[[str, float], None] | None) -> PyslurmReader:
        environment = {"PATH": f"{tools}:/usr/bin:/bin"}
        readers.append(PyslurmReader(environment, 1.5, heard, bad))
        return readers[-1]

    monkeypatch.setattr(client, "_make_pyslurm_reader", reader)
    monkeypatch.setattr("gemini_hpc.slurm.pyslurm_reader.START_TIMEOUT_S", 1.0)
    told: list[ways.Way] = []

    async def ask() -> None:
        slurm = Slurm(api="auto", on_way=told.append)
        for _ in range(2):
            assert set(await slurm.read_nodes()) == {"n1"}
        pid = readers[0]._process.pid if readers[0]._process else 0
        await slurm.close()
        assert not pid or not Path(f"/proc/{pid}").exists()

    asyncio.run(ask())
    assert len(readers) == 1
    if mode in ("not utf-8", "print"):  # one answer that cannot be read; output that is none
        assert [way.name for way in told] == [ways.PYSLURM]
    else:
        assert [way.name for way in told] == [ways.PYSLURM, ways.COMMANDS] and told[-1].is_fallback
        assert "pyslurm is no longer used: pyslurm" in told[-1].why


@pytest.mark.parametrize("fault", ["exec sleep 60", "echo no >&2; exit 1"])
def test_a_call_that_fails_is_told_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The log of a slow Slurm shows which of its commands give no answer."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{fault}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setattr(client, "_DIRECTORIES", (str(tmp_path),))
    calls: list[tuple[str, float]] = []

    async def ask() -> None:
        slurm = Slurm(timeout_s=0.5, on_call=lambda words, took_s: calls.append((words, took_s)))
        with pytest.raises(SlurmError):
            await slurm.read_queue()
        await slurm.close()
        await asyncio.sleep(0.3)  # the loop collects the killed command

    asyncio.run(ask())
    ((words, took_s),) = calls
    assert words.startswith("squeue -h") and (took_s >= 0.5) == fault.startswith("exec")


def test_it_is_never_imported_by_this_package() -> None:
    code = "import sys, gemini_hpc.controller.service, gemini_hpc.slurm.client; print('pyslurm' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_which_way_is_chosen() -> None:
    cases: list[tuple[str, str, str, str]] = [
        ("auto", "slurm-wlm 22.05.8", "22.5.3", ways.PYSLURM),
        ("auto", "slurm 25.11.5", "25.11.2", ways.PYSLURM),
        ("pyslurm", "slurm 24.11.5", "24.11.0", ways.PYSLURM),
        ("auto", "slurm 24.11.5", "", ways.COMMANDS),
        ("auto", "slurm-wlm 22.05.8", "25.11.2", ways.COMMANDS),
        ("pyslurm", "slurm-wlm 22.05.8", "25.11.2", ways.COMMANDS),
        ("pyslurm", "", "25.11.2", ways.COMMANDS),
        ("json", "slurm 24.11.5", "24.11.0", ways.JSON),
        ("commands", "slurm 24.11.5", "24.11.0", ways.COMMANDS),
    ]
    for case in cases:
        setting, slurm, pyslurm, name = case
        way = ways.choose_way(setting, slurm, pyslurm)
        assert way.name == name and way.why and not way.is_fallback, case
