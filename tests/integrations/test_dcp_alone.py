"""torch.distributed.checkpoint over an agent's memory in one process: what is told, refused and found again."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from waiting import until

import gemini_hpc as gemini
from gemini_hpc.cli.main import main as export
from gemini_hpc.integrations.dcp import GeminiReader, GeminiWriter, close
from gemini_hpc.train.state import encode
from tests.train.conftest import job, make_job
from tests.train.fake_agent import FakeJob
from tests.train.test_start import drain

pytestmark = pytest.mark.slow

__all__ = ["job", "make_job"]
STATE = {"model": {"w": torch.arange(6.0).view(2, 3), "e": torch.empty(0, 2)}, "list": [1, torch.ones(2)], "n": None}


class Planted:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def encoder_of(planted: bytes) -> Callable[..., bytes]:
    """Return an encoder that has this in the place of every None."""

    def encoded(value: Any, where: str = "state") -> bytes:
        return planted if value is None else real(value, where)

    real = encode.encode
    return encoded


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """A set of this process ends with the test."""
    yield
    close()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
class TestAlone:
    def save(self, **options: Any) -> int:
        writer = GeminiWriter()
        dcp.save(STATE, storage_writer=writer, **options)
        return writer.version

    def test_a_state_is_found_again_without_knowing_its_names(self, job: FakeJob) -> None:
        assert [self.save(), self.save(checkpoint_id="step-2")] == [1, 2]
        assert job.requeue() is not None
        reader = GeminiReader()
        assert (reader.version, reader.checkpoint_id) == (2, "step-2")
        found = _load_state_dict_from_keys(storage_reader=reader)
        assert found.keys() == STATE.keys() and found["model"]["e"].shape == (0, 2)
        assert torch.equal(found["model"]["w"], STATE["model"]["w"])  # type: ignore[index,call-overload]
        assert found["list"][0] == 1 and torch.equal(found["list"][1], torch.ones(2)) and found["n"] is None
        part = _load_state_dict_from_keys("model", storage_reader=reader)
        assert part.keys() == {"model"}

    def test_the_tier_and_its_export_have_it_by_names(self, job: FakeJob, tmp_path: Path) -> None:
        self.save()
        directory, out = drain(job, tmp_path), tmp_path / "out.safetensors"
        status = export(["export", str(directory), "--format", "safetensors", "-o", str(out)])
        assert status == 0
        found = load_file(out)
        assert torch.equal(found["model.w"], STATE["model"]["w"])  # type: ignore[index,call-overload]
        assert torch.equal(found["list.1"], torch.ones(2)) and found["model.e"].shape == (0, 2)
        assert encode.decode(found["list.0"].numpy().tobytes()) == 1

    def test_a_pickle_in_the_place_of_a_value_is_not_run(
        self, job: FakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        planted = io.BytesIO()
        torch.save(Planted(tmp_path / "ran"), planted)
        monkeypatch.setattr("gemini_hpc.integrations.dcp.encode.encode", encoder_of(planted.getvalue()))
        assert self.save() == 1
        monkeypatch.undo()
        assert job.requeue() is not None
        with pytest.raises(CheckpointException, match="encoded state"):
            dcp.load({"n": 5}, storage_reader=GeminiReader())
        assert not (tmp_path / "ran").exists()

    def test_a_value_that_has_no_encoding_is_named_and_not_saved(
        self, job: FakeJob, capfd: pytest.CaptureFixture[str]
    ) -> None:
        writer = GeminiWriter()
        dcp.save({**STATE, "odd": object()}, storage_writer=writer)
        assert writer.version == 0
        assert "odd" in capfd.readouterr().err
        assert self.save() > 0, "the next one can be saved"

    def test_another_id_than_that_of_the_version_is_refused(self, job: FakeJob) -> None:
        self.save(checkpoint_id="step-1")
        assert job.requeue() is not None
        state = {"model": {"w": torch.zeros(2, 3)}}
        with pytest.raises(ValueError, match="wanted 'step-7', but version 1 in memory is 'step-1'"):
            dcp.load(state, checkpoint_id="step-7", storage_reader=GeminiReader())
        dcp.load(state, checkpoint_id=Path("step-1"), storage_reader=GeminiReader())
        assert torch.equal(state["model"]["w"], torch.arange(6.0).view(2, 3))

    def test_what_is_not_there_is_named(self, job: FakeJob) -> None:
        reader = GeminiReader()
        assert reader.version == 0
        with pytest.raises(CheckpointException, match=r"check GeminiReader\.version first"):
            dcp.load({"a": torch.ones(1)}, storage_reader=reader)
        self.save()
        assert job.requeue() is not None
        with pytest.raises(CheckpointException, match="b"):
            dcp.load({"b": torch.ones(1)}, storage_reader=GeminiReader())

    def test_a_checkpointer_does_not_take_it(self, job: FakeJob) -> None:
        self.save()
        close()
        assert job.requeue() is not None
        model = torch.nn.Linear(3, 2)
        ckpt = gemini.Checkpointer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with ckpt, pytest.raises(ValueError, match=r"the version is from torch\.distributed\.checkpoint or "):
            ckpt.resume()

    def test_no_room_means_a_line_a_save(self, job: FakeJob, capfd: pytest.CaptureFixture[str]) -> None:
        job.refuse_register = "no room for 1 MiB"
        assert [self.save(), self.save()] == [0, 0]
        said = capfd.readouterr().err.splitlines()
        assert said == [f"gemini-hpc: version {n} is not saved: rank 0: no room for 1 MiB" for n in (1, 2)]
        job.refuse_register = ""
        assert self.save() == 3
        until(lambda: [event.version for event in job.saw("skipped")] == [1, 2], 20, what="both events")

    def test_a_version_that_no_agent_seals_is_told(self, job: FakeJob, capfd: pytest.CaptureFixture[str]) -> None:
        job.seal_until = 1
        writer = GeminiWriter(seal_timeout_s=0.3)
        for _ in range(2):
            dcp.save(STATE, storage_writer=writer)
        assert writer.version == 0
        line = "version 2 is not saved: all copies are there, but the agents have not sealed the version within 0.3 s"
        assert line in capfd.readouterr().err

    def test_what_a_planner_adds_of_its_own_stays_away(self, job: FakeJob) -> None:
        class Planner(dcp.DefaultSavePlanner):
            def create_local_plan(self) -> Any:
                plan = super().create_local_plan()
                return dcp.SavePlan(plan.items, planner_data={"x": object()})

        assert self.save(planner=Planner()) == 1

    def test_a_writer_stays_in_its_process(self, job: FakeJob) -> None:
        with pytest.raises(TypeError, match=r"AsyncCheckpointerType\.THREAD"):
            pickle.dumps(GeminiWriter())

    def test_arguments_that_cannot_work(self) -> None:
        with pytest.raises(ValueError, match="seal_timeout_s is 0: wanted"):
            GeminiWriter(seal_timeout_s=0)


@pytest.mark.parametrize(("stack", "package"), [("megatron", "megatron"), ("torchtitan", "torchtitan")])
def test_a_package_that_is_missing_is_named(stack: str, package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; import gemini_hpc.integrations.{stack}"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith(f"ImportError: gemini_hpc.integrations.{stack}: pip install '")
