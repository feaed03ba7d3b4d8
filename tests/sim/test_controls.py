"""What is broken on purpose is found, each control by the seed that `seeds.json` has of it."""

from __future__ import annotations

import pytest

from .program import run_program
from .seeds import CONTROLS, KINDS, noted


@pytest.mark.slow
@pytest.mark.witness("the simulation finds each fault that is put into the protocol on purpose")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_broken_on_purpose_is_found(kind: str) -> None:
    """Each control of the kind is named that is not, with the command that finds another seed."""
    run_program("tests.sim.seeds", kind, "--check", "--jobs", 1)


def test_each_control_has_a_seed_and_each_seed_a_control() -> None:
    assert noted().keys() == CONTROLS.keys()
