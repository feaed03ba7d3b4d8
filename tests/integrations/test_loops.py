"""Accelerate and Fabric, whose users write the loop, on two ranks: killed, they go on as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest

from .recovery import OWN, Recovery, Start

pytestmark = pytest.mark.slow

STEPS = 24
STACKS = ["accelerate", "fabric"]


@pytest.mark.parametrize("stack", STACKS)
def test_a_node_is_lost(recovery: Recovery, stack: str) -> None:
    """With its agent and its memory: what it had comes from the other one."""
    recovery.comes_back(13, lose=["n2"], stack=stack, steps=STEPS)


def test_without_an_agent(start: Start, tmp_path: Path) -> None:
    stack = "accelerate"
    plain = start(None, stack=stack, steps=STEPS, without=True, directory=str(tmp_path)).wait()
    run = start(None, stack=stack, steps=STEPS, directory=str(tmp_path))
    for a, b in zip(plain, run.wait(), strict=True):
        assert a["losses"] == b["losses"]
        assert {k: a[k] for k in a.keys() - OWN} == {k: b[k] for k in b.keys() - OWN}
    said = [line for err in run.stderr for line in err.splitlines() if "gemini-hpc" in line]
    assert len(said) == 1 and "not protected: no agent here" in said[0], said


@pytest.mark.parametrize(
    ("stack", "package", "module"),
    [
        ("accelerate", "accelerate", "accelerate.optimizer"),
        ("fabric", "lightning", "lightning.fabric"),
    ],
)
def test_a_missing_package_is_named(start: Start, stack: str, package: str, module: str) -> None:
    run = start(None, world=1, missing=[module], stack=stack, steps=STEPS)
    with pytest.raises(AssertionError, match="ended with 1"):
        run.wait()
    assert f"needs {package}: pip install {package}" in run.stderr[0]
