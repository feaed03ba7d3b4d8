"""RANK and its companions as `gemini_hpc.set_ranks` sets them, under every kind of start."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import gemini_hpc
from gemini_hpc.client.ranks import MPIRUN_ENV, NAMES, RANKS_OF_ENV, derive_ranks
from gemini_hpc.wire import ports

STEP = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "18",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
FOUND = dict(zip(NAMES, ("3", "5", "1", "2", "n1", "29778"), strict=True))
ALONE = dict(zip(NAMES, ("0", "1", "0", "1", "127.0.0.1", "0"), strict=True))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that nobody has told anything."""
    for name in os.environ:
        if name in (*NAMES, *MPIRUN_ENV) or name.startswith(("SLURM_", "GEMINI_", "PMI")):
            monkeypatch.delenv(name)
    return monkeypatch


def after(start: pytest.MonkeyPatch, env: dict[str, str]) -> dict[str, str]:
    """Return what is set in the end of that which matters."""
    for name, value in env.items():
        start.setenv(name, value)
    for name in (*NAMES, RANKS_OF_ENV):  # so that it is taken back
        if name not in env:
            start.setenv(name, "")
            del os.environ[name]
    gemini_hpc.set_ranks()
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_a_step_of_srun(start: pytest.MonkeyPatch) -> None:
    assert after(start, STEP) == FOUND
    assert os.environ[RANKS_OF_ENV] == "123.0.18"


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}, ("4", "0", "1")),
        ({"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}, ("0", "0", "2")),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,3,1", "SLURM_LOCALID": "2"}, ("3", "2", "3")),
    ],
)
def test_local_figures_are_of_the_tasks_own_node(changed: dict[str, str], wanted: tuple[str, ...]) -> None:
    found = derive_ranks(STEP | changed)
    assert (found["RANK"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == wanted


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_JOB_ID": "123", "SLURM_NTASKS": "5", "SLURM_PROCID": "0"},  # in a batch script
        STEP | {"SLURM_STEP_ID": "4294967290"},  # in the shell of salloc
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"} | {"SLURM_NODEID": "2"},
    ],
)
def test_a_process_alone_is_a_world_of_one(start: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    assert after(start, env) == ALONE


@pytest.mark.parametrize("name", NAMES[2:])
def test_what_is_set_stays(start: pytest.MonkeyPatch, name: str) -> None:
    assert after(start, STEP | {name: "theirs"}) == FOUND | {name: "theirs"}


def test_what_is_set_as_slurm_says_is_completed(start: pytest.MonkeyPatch) -> None:
    """A script that goes by SLURM_PROCID, with a master of its own."""
    theirs = {"RANK": "3", "MASTER_ADDR": "n2", "MASTER_PORT": "29123"}
    assert after(start, STEP | theirs) == FOUND | theirs
    assert RANKS_OF_ENV not in os.environ


@pytest.mark.parametrize("env", [{}, STEP])
@pytest.mark.parametrize(
    "theirs", [{"RANK": "7"}, {"WORLD_SIZE": "9"}, {"RANK": "7", "WORLD_SIZE": "9"}, {"RANK": ""}]
)
def test_ranks_that_are_not_slurms_are_not_completed(
    start: pytest.MonkeyPatch, env: dict[str, str], theirs: dict[str, str]
) -> None:
    assert after(start, env | theirs) == theirs


def test_what_a_launcher_has_set_stays(start: pytest.MonkeyPatch) -> None:
    """torchrun, the plugin or `gemini_hpc.launch`."""
    theirs = dict(zip(NAMES, ("3", "5", "0", "1", "n3", "24001"), strict=True))
    assert after(start, STEP | theirs) == theirs


@pytest.mark.parametrize("name", MPIRUN_ENV)
@pytest.mark.parametrize("env", [{}, STEP])
def test_ranks_of_mpirun_are_left_alone(start: pytest.MonkeyPatch, env: dict[str, str], name: str) -> None:
    """Slurm counts mpirun's daemons."""
    assert after(start, env | {name: "4"}) == {}


@pytest.mark.parametrize("name", ["PMI_SIZE", "PMIX_RANK"])
def test_pmi_is_slurms_in_a_step_and_somebody_elses_outside(start: pytest.MonkeyPatch, name: str) -> None:
    assert derive_ranks({name: "4"}) == {}
    assert after(start, STEP | {name: "4"}) == FOUND


def test_a_nested_step_does_not_keep_its_parents_ranks(start: pytest.MonkeyPatch) -> None:
    inherited = {**FOUND, "RANK": "0", RANKS_OF_ENV: "123.0.17"}
    assert after(start, STEP | inherited) == FOUND


def test_twice_is_once(start: pytest.MonkeyPatch) -> None:
    first = after(start, STEP)
    gemini_hpc.set_ranks()
    assert {name: os.environ[name] for name in NAMES} == first


def test_the_ranks_of_another_attempt_meet_elsewhere() -> None:
    assert (
        derive_ranks(STEP | {"GEMINI_ATTEMPT": "1"})["MASTER_PORT"]
        == str(ports.compute_attempt_port(29778, 1))
        != "29778"
    )


def test_with_an_arbitrary_distribution_nobody_knows_the_host_of_task_0() -> None:
    found = derive_ranks(STEP | {"SLURM_DISTRIBUTION": "arbitrary"})
    assert found == {name: value for name, value in FOUND.items() if name != "MASTER_ADDR"}


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_PROCID": "5"},
        {"SLURM_PROCID": "-1"},
        {"SLURM_PROCID": "٣"},
        {"SLURM_PROCID": ""},
        {"SLURM_STEP_NUM_TASKS": "x"},
        {"SLURM_STEP_NUM_TASKS": "9" * 40},
        {"SLURM_NODEID": "3"},
        {"SLURM_NODEID": ""},
        {"SLURM_LOCALID": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": ""},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x"},
        {"SLURM_STEP_TASKS_PER_NODE": "9" * 40},
        {"SLURM_HET_SIZE": "2"},
    ],
)
def test_figures_that_do_not_fit_together_set_nothing(changed: dict[str, str]) -> None:
    assert derive_ranks(STEP | changed) == {}


@pytest.mark.parametrize("hosts", ["", "n[1-", "n[1-99999999999]", "$(id)"])
def test_a_list_of_hosts_that_is_none_gives_no_master(hosts: str) -> None:
    assert "MASTER_ADDR" not in derive_ranks(STEP | {"SLURM_STEP_NODELIST": hosts})


def test_the_plugin_computes_the_same_ports() -> None:
    """Whoever of a step's tasks has a map and who has none: the port is one."""
    header = (Path(__file__).parents[2] / "slurm" / "ports.h").read_text()
    base, blocks, spread = (int(re.search(rf"{n} = ([0-9]+)", header)[1]) for n in ("BASE", "BLOCKS", "SPREAD"))  # type: ignore[index]
    assert "((uint64_t)job * 7 + restart) % PORTS_BLOCKS * PORTS_SPREAD" in header
    for job, restart, step in ((1, 0, 0), (123, 0, 18), (4294967295, 4294967295, 4294967280)):
        port = ports.compute_step_port(ports.compute_master_port(job, restart), step)
        assert port == base + (job * 7 + restart) % blocks * spread + step % spread
        assert 24000 <= port < 32000


def test_jobs_in_a_row_and_steps_in_a_row_have_ports_of_their_own() -> None:
    found = {
        ports.compute_step_port(ports.compute_master_port(job, 0), step)
        for job in range(9000, 9500)
        for step in range(16)
    }
    assert len(found) == 500 * 16
