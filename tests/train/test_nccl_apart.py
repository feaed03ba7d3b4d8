"""NCCL stays apart: what does not ask for it imports nothing of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import gemini_hpc as gemini

from .fake_agent import FakeJob
from .launch import train

MakeJob = Callable[[int, int], FakeJob]

PROGRAM = """
import sys
import gemini_hpc
gemini_hpc.Checkpointer, gemini_hpc.Traffic(transport="nccl")
print(*(name for name in sys.modules if name.startswith("gemini_hpc.train.nccl")), sep="\\n", end="")
print("gemini_hpc.train.engine" in sys.modules, end="")
"""


def test_an_import_brings_nothing_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True"


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [{}, {"transport": "host"}])
def test_a_training_imports_nothing_of_it(make_job: MakeJob, kwargs: dict[str, Any]) -> None:
    job = make_job(2, 2)
    for result in train(job, 2, kind="ddp", steps=12, armed=True, kwargs={**kwargs, "seal_timeout_s": 20.0}):
        assert result["report"]["state"] == "protected" and result["report"]["traffic"]["transport"] == "host"
        assert not result["nccl"]
    assert job.sealed is not None


@pytest.mark.parametrize("transport", ["gloo", "mpi", "nccl2", ""])
def test_a_transport_that_does_not_exist_names_those_that_do(transport: Any) -> None:
    with pytest.raises(ValueError, match=r"wanted one of auto, host, nccl"):
        gemini.Traffic(transport=transport)
