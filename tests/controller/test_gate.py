"""No act of the controller passes the gate where the site's mode withholds it; and what is withheld is scored."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import gemini_hpc
from gemini_hpc.config import ConfigError, Settings, parse_settings
from gemini_hpc.controller import withheld
from gemini_hpc.controller.gate import Gate, GatedSlurm, WithheldError
from gemini_hpc.controller.probe import ProbeResult
from gemini_hpc.controller.withheld import CONFIRMED, DRAIN, FENCE, OPEN, REFUTED, REQUEUE, Withheld, WithheldAct
from gemini_hpc.slurm import Slurm
from gemini_hpc.slurm.api import SlurmApi, SlurmReading
from gemini_hpc.slurm.facts import Job, Node
from gemini_hpc.slurm.text import parse_node

from .fake_slurm import FakeSlurm
from .test_last_judgement import SILENT, Controller, TwoJobs
from .test_takeover import JOB, HalfDone, take_over

OBSERVE = Settings(mode="observe")
CANARY = Settings(mode="canary", canary_partitions=("debug",))
IN, OUT = (dataclasses.replace(JOB, partition=name) for name in ("debug", "gpu"))


def public(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")}


ACTS = sorted(public(SlurmApi))


class Recorder(FakeSlurm):
    """Return the acts that reach Slurm. All nodes are in partition `of`, and so is the job."""

    def __init__(self, of: str) -> None:
        self.of, self.done = of, list[str]()

    async def read_job(self, raw_id: int) -> Job:
        return dataclasses.replace(JOB, partition=self.of)

    async def read_nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        return {n: parse_node(f"NodeName={n} NodeAddr={n} CPUTot=4 State=IDLE Partitions={self.of}") for n in names}


def _recording(name: str) -> Any:
    async def act(self: Recorder, *args: Any, **more: Any) -> None:
        self.done.append(name)

    return act


for _name in ACTS:
    setattr(Recorder, _name, _recording(_name))


def attempt(settings: Settings, of: str, act: str) -> list[str]:
    """Do one act with arguments of its kind; return what has reached Slurm."""
    slurm = Recorder(of)
    job = dataclasses.replace(JOB, partition=of)
    first = {"node": "n1", "reservation": f"gemini_{JOB.raw_id}_0123456789ab"}
    kind = next((word for word in first if word in act.split("_") and act != "detach_reservation"), "")
    given: list[Any] = [first[kind] if kind else job]
    wanted = [p for p in inspect.signature(getattr(SlurmApi, act)).parameters.values() if p.default is p.empty][2:]
    given += [["n1"] if p.name == "nodes" else 1 if p.name == "user_id" else "x" for p in wanted]
    try:
        asyncio.run(getattr(GatedSlurm(slurm, Gate(settings)), act)(*given))
    except WithheldError as exc:
        assert "mode =" in str(exc)
    return slurm.done


@pytest.mark.parametrize("act", ACTS)
def test_every_act(act: str) -> None:
    """Check that nothing reaches Slurm in observe mode, and only a canary's partitions in canary mode."""
    assert attempt(OBSERVE, "debug", act) == []
    assert attempt(CANARY, "gpu", act) == []
    assert attempt(CANARY, "debug", act) == [act]
    assert attempt(Settings(), "gpu", act) == [act]


def test_nobody_goes_round_the_gate() -> None:
    """Every public call of the real client is a known question or an act; the controller has no other Slurm."""
    questions = public(SlurmReading) | {
        "find_raw_id",
        "read_queue",
        "read_history",
        "read_configuration",
        "read_release",
        "choose_way",
        "close",
    }
    assert public(Slurm) - questions == set(ACTS)
    assert public(GatedSlurm) == public(SlurmReading) | set(ACTS)
    made = {}
    for path in Path(gemini_hpc.__file__).parent.joinpath("controller").glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        made[path.name] = {ast.unparse(call) for call in calls if ast.unparse(call.func) in ("Slurm", "GatedSlurm")}
    bare = {name: found for name, found in made.items() if found}
    # The service hands its client to `Controller`, which puts the gate before it.
    assert sorted(bare) == ["epilog_fallback.py", "server.py", "service.py"], bare
    assert any(call.startswith("GatedSlurm(Slurm(") for call in bare["epilog_fallback.py"])
    assert bare["server.py"] == {"GatedSlurm(slurm, Gate(settings))"}


def test_settings() -> None:
    assert Settings().mode == "act"
    assert parse_settings('mode = "canary"\ncanary_partitions = ["debug"]').canary_partitions == ("debug",)
    for text in ('mode = "on"', 'mode = "canary"', 'canary_partitions = ["debug"]'):
        with pytest.raises(ConfigError):
            parse_settings(text)


def test_a_waiting_job_of_several_partitions() -> None:
    """A recovery that has begun in the canary goes on when the job waits with its whole request again."""
    both = dataclasses.replace(JOB, partition="gpu,debug")
    assert not Gate(CANARY).explain_job_refusal(both) and Gate(OBSERVE).explain_job_refusal(both)
    assert "gpu is not in canary_partitions" in Gate(CANARY).explain_job_refusal(OUT) and not Gate(
        CANARY
    ).explain_job_refusal(IN)
    assert Gate(CANARY).explain_job_refusal(None)


# ---- the whole controller, observing -------------------------------------------------------------------


class Watched(TwoJobs):
    """`TwoJobs`, where any act is written down."""

    async def requeue_job(self, job: Job) -> None:
        self.done.append("requeue")
        await super().requeue_job(job)


@pytest.mark.slow
def test_a_dead_node_is_recorded_once_and_left(tmp_path: Path, found: dict[str, ProbeResult]) -> None:
    """It is judged as ever, twice here; nothing is held, set DOWN or pinned. Slurm then confirms it."""
    slurm, found["n2"] = Watched(), SILENT

    async def work() -> None:
        controller = Controller(slurm, tmp_path, mode="observe")  # type: ignore[arg-type]
        for _ in range(2):
            controller.report(JOB, "n2")
            await controller.until(lambda: not controller.home.is_active(JOB.raw_id))
            await asyncio.sleep(1.1)  # the pause after a recovery
        record = controller.home.withheld
        assert [(a.act, a.node, a.job, a.verdict) for a in record.acts] == [(FENCE, "n2", JOB.raw_id, OPEN)]
        assert controller.events(JOB).count('"withheld"') == 1
        assert controller.journal.count_fenced(600.0) == 1, "the budget is spent as it would be"
        assert not controller.journal.read_open()
        slurm.all["n2"] = dataclasses.replace(slurm.all["n2"], state="DOWN")
        await record.judge_open(slurm)
        assert '"judged"' in controller.events(JOB)
        controller.end()

    asyncio.run(work())
    assert slurm.done == [] and not slurm.held
    (act,) = Withheld(str(tmp_path), lambda *said: None).acts
    assert (act.verdict, act.evidence) == (CONFIRMED, "Slurm has n2 DOWN"), "it survives the controller"


@pytest.mark.slow
def test_a_recovery_that_an_earlier_mode_began(tmp_path: Path, found: dict[str, ProbeResult]) -> None:
    """n2 was drained by a controller that acted. The one that observes leaves it, tells, and is open for reports."""
    slurm, found["n2"] = HalfDone(), SILENT
    assert take_over(slurm, tmp_path, mode="observe") == []  # type: ignore[arg-type]
    journal = (tmp_path / "journal").read_text()
    assert '"close"' in journal and "a recovery cannot finish, as the mode forbids it" in journal


# ---- Slurm's verdict -----------------------------------------------------------------------------------

T = 1_000_000.0
LATE = T + withheld.WINDOW_S + 1


def up(state: str = "MIXED", boot: float = T - 1000) -> Node:
    node = parse_node(f"NodeName=n1 NodeAddr=n1 CPUTot=4 State={state}")
    return dataclasses.replace(node, boot_time=boot)


def job(state: str, restarts: int = 0) -> Job:
    return dataclasses.replace(JOB, state=state, restarts=restarts)


@pytest.mark.parametrize(
    ("act", "node", "of_job", "now", "verdict"),
    [
        (FENCE, up("DOWN"), job("RUNNING"), T + 1, CONFIRMED),
        (FENCE, up(boot=T + 50), job("RUNNING"), T + 60, CONFIRMED),
        (FENCE, up(), job("NODE_FAIL"), T + 60, CONFIRMED),
        (FENCE, up(), job("FAILED"), T + 60, CONFIRMED),
        (FENCE, up(), job("FAILED", 1), T + 60, OPEN),
        (FENCE, up(), job("RUNNING"), T + 60, OPEN),
        (FENCE, up(), job("RUNNING"), LATE, REFUTED),
        (FENCE, up(), job("COMPLETED"), T + 60, REFUTED),
        (FENCE, up(), job("CANCELLED"), T + 60, OPEN),
        (FENCE, up(), None, LATE, REFUTED),
        (FENCE, up("MIXED*+NOT_RESPONDING"), job("RUNNING"), LATE, CONFIRMED),
        (FENCE, None, None, LATE, CONFIRMED),
        (REQUEUE, up(), job("PENDING", 1), T + 60, CONFIRMED),
        (REQUEUE, up(), job("RUNNING"), LATE, REFUTED),
        (DRAIN, up("MIXED+DRAIN"), None, T + 60, CONFIRMED),
        (DRAIN, up(), job("FAILED"), LATE, OPEN),
        (DRAIN, up(), None, T + withheld.DRAIN_WINDOW_S, REFUTED),
    ],
)
def test_verdicts(act: str, node: Node | None, of_job: Job | None, now: float, verdict: str) -> None:
    record = WithheldAct(T, act, JOB.raw_id, 0, "n1", "silent")
    found, evidence = withheld.judge_withheld(record, node, of_job, now)
    assert found == verdict and bool(evidence) == (verdict != OPEN)


def test_a_red_node_is_recorded_once_for_all_its_jobs(tmp_path: Path) -> None:
    record = Withheld(str(tmp_path), lambda *said: None)
    assert record.record_act(DRAIN, 1, 0, "n1", "red", "x") and not record.record_act(DRAIN, 2, 0, "n1", "red", "x")
    assert record.record_act(DRAIN, 2, 0, "n2", "red", "x")
    assert withheld.count_verdicts(record.acts) == {CONFIRMED: 0, REFUTED: 0, OPEN: 2}


def test_a_damaged_record_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / withheld.FILE).write_bytes(b"{")
    with pytest.raises(msgspec.MsgspecError):
        withheld.read_acts(str(tmp_path / withheld.FILE))
    assert Withheld(str(tmp_path), lambda *said: None).acts == []
