"""Requirement all-or-nothing-map on the real cluster: what a step's tasks find in their environment, and when they
find nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from .conftest import Site

pytestmark = pytest.mark.cluster

TASK_PROLOG = Path(__file__).parents[2] / "slurm/packaging/files/gemini-hpc-node.task_prolog"
NAMES = "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GEMINI_SOCKET"
SHOW = (
    f'bash -c \'echo TASK=$SLURM_PROCID NODE=$SLURM_NODEID $(env | grep -E "^({NAMES})=" | sort | tr "\\n" " ") END\''
)
OF_EACH_STEP = {
    *("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_TASK_PID", "SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT"),
    *("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"),
}
Task = dict[str, str]


def run(site: Site, script: str, *options: str) -> list[Task]:
    """The environments that the steps of one job's script show."""
    out = site.cluster.locate_home("alice") / f"ranks-{len(list(site.cluster.locate_home('alice').iterdir()))}"
    fixed = ["-N3", "--ntasks-per-node=2", "--requeue", f"--output={out}", "--gemini-replicas=2", *options]
    job = site.cluster.submit_job(fixed, script=f"#!/bin/bash\n{script}\necho over\n")
    until(lambda: out.exists() and "over" in out.read_text(), 40, 0.1, what="the script's end")
    tasks = [
        dict(word.split("=", 1) for word in text.split()) for text in re.findall(r"(TASK=.*) END", out.read_text())
    ]
    assert tasks, out.read_text()
    until(lambda: site.cluster.read_job(job).get("JobState") == "COMPLETED", 20, 0.1, what="the end")
    return tasks


def names(line: str) -> str:
    """Return the name in a line of an environment."""
    return line.partition("=")[0]


def unranked(task: Task) -> bool:
    return not {name for name in NAMES.split("|") if name in task} - {"GEMINI_SOCKET"}


def test_a_step_that_spans_the_map_has_it_whole(site: Site) -> None:
    tasks = run(site, f"srun -n3 --ntasks-per-node=1 {SHOW}")
    assert sorted(t["RANK"] for t in tasks) == ["0", "1", "2"]
    assert {t["WORLD_SIZE"] for t in tasks} == {"3"} and {t["LOCAL_RANK"] for t in tasks} == {"0"}
    assert len({(t["MASTER_ADDR"], t["MASTER_PORT"]) for t in tasks}) == 1
    assert all(len(t) == 2 + len(NAMES.split("|")) for t in tasks), tasks


def test_more_tasks_than_one_a_node(site: Site) -> None:
    even = run(site, f"srun -n6 --ntasks-per-node=2 {SHOW}; ")
    assert sorted(int(t["RANK"]) for t in even) == list(range(6))
    assert all(int(t["RANK"]) // 2 == int(t["NODE"]) and int(t["RANK"]) % 2 == int(t["LOCAL_RANK"]) for t in even)
    uneven = run(site, f"srun -n5 -m block --ntasks-per-node=2 {SHOW}")
    assert sorted(int(t["RANK"]) for t in uneven) == list(range(5))
    assert {t["WORLD_SIZE"] for t in uneven} == {"5"}


def test_a_step_on_some_nodes_has_nothing(site: Site) -> None:
    tasks = run(site, f"srun -N1 -n1 {SHOW}\nsrun -N2 -n2 {SHOW}")
    assert len(tasks) == 3 and all(unranked(t) for t in tasks), tasks


@pytest.mark.parametrize(
    "own", ["RANK=5 WORLD_SIZE=9", "MASTER_ADDR=elsewhere", "LOCAL_RANK=0", "MASTER_PORT=29500 MASTER_ADDR=n9"]
)
def test_what_the_user_has_set_stays_as_it_is(site: Site, own: str) -> None:
    """torchrun, or a script with a rendezvous of its own: nothing of ours beside it."""
    wanted = dict(word.split("=") for word in own.split())
    for task in run(site, f"{own} srun -n3 --ntasks-per-node=1 {SHOW}"):
        assert {k: v for k, v in task.items() if k not in ("TASK", "NODE", "GEMINI_SOCKET")} == wanted


def test_torchrun_inside_a_step_sets_its_own(site: Site) -> None:
    """One launcher a node, as torchrun is used: what it gives its workers is not ours, and theirs goes before."""
    inner = SHOW.replace(
        "bash -c", "env RANK=$((SLURM_NODEID*2+1)) WORLD_SIZE=6 LOCAL_RANK=1 MASTER_ADDR=me MASTER_PORT=1 bash -c"
    )
    script = (
        f"cat >launch-$SLURM_JOB_ID.sh <<'X'\n{inner}\nX\nsrun -n3 --ntasks-per-node=1 bash launch-$SLURM_JOB_ID.sh"
    )
    for task in run(site, script):
        assert (task["WORLD_SIZE"], task["MASTER_ADDR"], task["MASTER_PORT"]) == ("6", "me", "1")
        assert int(task["RANK"]) == int(task["NODE"]) * 2 + 1


def test_two_steps_at_once_do_not_share_a_port(site: Site) -> None:
    one = f"srun -n3 --ntasks-per-node=1 --overlap --mem=0 {SHOW}"
    tasks = run(site, f"{one} & {one} & wait")
    assert sorted(t["RANK"] for t in tasks) == ["0", "0", "1", "1", "2", "2"]
    assert len({t["MASTER_PORT"] for t in tasks}) == 2


def test_a_step_started_by_a_task_has_its_own_or_nothing(site: Site) -> None:
    """A task's RANK is not handed on to the step that it starts."""
    inner = f"srun -N1 -n1 --overlap --mem=0 {SHOW}"
    file = "inner-$SLURM_JOB_ID.sh"
    script = f"cat >{file} <<'X'\n{inner}\nX\nsrun -n3 --ntasks-per-node=1 --mem=0 bash {file}"
    assert all(unranked(t) for t in run(site, script))


@pytest.fixture
def apptainer(site: Site) -> Iterator[None]:
    """The packages' TaskProlog on all nodes."""
    slurm_conf = site.cluster.directory / "etc" / "slurm" / "slurm.conf"
    hook, text = slurm_conf.with_name("task_prolog"), slurm_conf.read_text()
    hook.write_bytes(TASK_PROLOG.read_bytes())
    hook.chmod(0o755)
    try:
        slurm_conf.write_text(f"{text}TaskProlog={hook}\n")
        assert site.cluster.run(["scontrol", "reconfigure"]).returncode == 0
        yield
    finally:
        slurm_conf.write_text(text)
        assert site.cluster.run(["scontrol", "reconfigure"]).returncode == 0
        hook.unlink()


@pytest.mark.usefixtures("apptainer")
def test_apptainers_containers_see_the_directory_of_their_job(site: Site) -> None:
    """The task prolog runs after the plugin, for batch scripts and steps; an unprotected job inherits no bind."""
    show = "bash -c 'echo TASK=0 BIND=$APPTAINER_BINDPATH JOB=$SLURM_JOB_ID END'"
    steps = f"APPTAINER_BINDPATH=/data srun -N1 -n1 {show}\nsrun -N1 -n1 {show}"
    batch, own, step = run(site, f"{show}\n{steps}")
    directory = f"/run/gemini-hpc/{batch['JOB']}"
    assert (batch["BIND"], own["BIND"], step["BIND"]) == (directory, f"/data,{directory}", directory)
    plain, inherited = site.cluster.locate_home("alice") / "plain-bind", {"APPTAINER_BINDPATH": f"/data,{directory}"}
    site.cluster.submit_job(["-N1", f"--output={plain}"], script=f"#!/bin/bash\n{show}\n", env=inherited)
    until(lambda: plain.exists() and "END" in plain.read_text(), 40, 0.1, what="the unprotected job's end")
    assert " BIND=/data JOB=" in plain.read_text()


@pytest.fixture
def broken(site: Site) -> Iterator[str]:
    """A node on which nothing is installed."""
    site.sh("n2", "mount -t tmpfs none /opt/gemini-hpc/venv")
    yield "n2"
    site.sh("n2", "umount /opt/gemini-hpc/venv")


def test_one_node_without_an_agent_and_no_map_anywhere(site: Site, broken: str) -> None:
    """Ranks as Slurm counts, the same on all nodes, and a port of its own for each step; no agent's socket."""
    site.configure(attach_timeout_s=2.0)
    whole = f"srun -n5 -m cyclic {SHOW}\nsrun -n6 --ntasks-per-node=2 {SHOW}"
    others = f"srun -N1 -n1 {SHOW}\nMASTER_PORT=29500 srun -n3 --ntasks-per-node=1 {SHOW}"
    tasks = run(site, f"{whole}\n{others}", f"-wn1,{broken},n3")
    five, six, rest = tasks[:5], tasks[5:11], tasks[11:]
    for step, world in ((five, "5"), (six, "6")):
        assert all(t["RANK"] == t["TASK"] and t["WORLD_SIZE"] == world for t in step), step
        assert sorted(t["RANK"] for t in step) == [str(k) for k in range(int(world))]
        (place,) = {(t["MASTER_ADDR"], t["MASTER_PORT"]) for t in step}
        assert place[0] == "n1"
        assert {t["NODE"] for t in step if t["LOCAL_WORLD_SIZE"] == "1"} == ({"2"} if step is five else set())
        assert len({(t["NODE"], t["LOCAL_RANK"]) for t in step}) == int(world)
    assert {t["MASTER_PORT"] for t in five} != {t["MASTER_PORT"] for t in six}
    assert unranked(rest[0]), "on a part of the nodes"
    assert [t.get("MASTER_PORT") for t in rest[1:]] == ["29500"] * 3
    assert all(set(t) == {"TASK", "NODE", "MASTER_PORT"} for t in rest[1:]), "never beside what is set"
    assert not any("GEMINI_SOCKET" in t for t in tasks)
    assert "drain" not in site.cluster.read_node_state(broken)


def test_a_step_of_a_job_that_asked_for_nothing_is_as_without_the_plugin(site: Site) -> None:
    """Byte for byte, but for what differs between any two steps."""
    out, fixed = site.cluster.locate_home("alice") / "plain-env", ["-N2", "--ntasks-per-node=1"]
    step = 'srun sh -c \'tr "\\0" "\\n" </proc/self/environ >env-$0-$SLURM_PROCID\' '
    script = f"#!/bin/bash\n{step} with\necho over\n"
    plugstack = site.cluster.directory / "etc" / "slurm" / "plugstack.conf"
    line = plugstack.read_text()
    shown: list[list[list[str]]] = []
    try:
        for text in (line, "\n"):
            plugstack.write_text(text)
            out.unlink(missing_ok=True)
            site.cluster.submit_job([*fixed, f"--output={out}"], script=script)
            until(lambda: out.exists() and "over" in out.read_text(), 40, 0.1, what="the script's end")
            files = [site.cluster.locate_home("alice") / f"env-with-{task}" for task in range(2)]
            shown.append([sorted(file.read_text().splitlines()) for file in files])
    finally:
        plugstack.write_text(line)
    for with_it, without in zip(*shown, strict=True):
        assert [names(x) for x in with_it] == [names(x) for x in without]
        assert not {names(x) for x in with_it} & set(NAMES.split("|"))
        differ = {names(x) for x in set(with_it) ^ set(without)}
        assert differ <= OF_EACH_STEP, differ
