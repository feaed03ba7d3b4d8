"""The test commands run their stages one after the other; a stage that fails fails the command, and no later one."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests import stages


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record what is run, in place of running it; the second call fails, the third finds no tests."""
    found: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        found.append(command)
        return subprocess.CompletedProcess(command, {2: 1, 3: stages.NO_TESTS}.get(len(found), 0))

    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_directories_and_options_in_any_order(calls: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert stages.main(["all", "--seed", "7", "--record", "suite", "core/test_slots.py"]) == 1
    marks = [command[command.index("-m", 3) + 1] for command in calls]
    assert marks == [
        "not cluster and not alone and not long",
        "cluster and not alone and not long",
        "alone and not long",
    ]
    for command in calls:
        assert command[-2:] == ["tests/suite", "tests/core/test_slots.py"]
        assert {"--hypothesis-seed=7", "--record"} <= set(command)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[-3:]] == ["passed", "FAILED", "no"]


def test_every_promise_is_in_one_stage_of_make_test(calls: list[list[str]]) -> None:
    stages.main(["test"])
    quick, *promised = calls
    assert "--quick" in quick and [command[command.index("-m", 3) + 1] for command in promised] == [
        "witness and not cluster",
        "witness and cluster",
    ]
    assert all("--hypothesis-profile=steady" in command for command in calls)


@pytest.mark.parametrize(
    "words", [["all", "nowhere"], ["all", "--part", "9/6"], ["all", "--part", "1/6", "--record"], ["some"]]
)
def test_words_that_name_no_tests(words: list[str], calls: list[list[str]]) -> None:
    with pytest.raises(SystemExit, match="2"):
        stages.main(words)
    assert not calls
