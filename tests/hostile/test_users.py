"""Users' and administrators' mistakes: one clear line, nothing queued, nothing lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import LITE
from waiting import until

from gemini_hpc.node.prolog import ARGUMENTS

from .conftest import ALICE, PYTHON, Site, one_line

pytestmark = pytest.mark.cluster


def queued(site: Site) -> int:
    return len(site.cluster.run(["squeue", "-h", "-a"]).stdout.splitlines())


@pytest.mark.witness("a wrong option is refused at submission, in one line")
def test_replicas_are_checked_at_submission(site: Site) -> None:
    before = queued(site)
    for value in ("0", "-1", "x", "99", "", "1.5", "2;reboot", "4294967298", " 2", "0x2"):
        options = [f"--gemini-replicas={value}", "--wrap=true", "-N2"]
        done = site.cluster.run(["sbatch", *options], user="alice", timeout_s=20)
        assert done.returncode != 0 and done.stdout == "", value
        ours = [line for line in done.stderr.splitlines() if "gemini-hpc" in line]
        assert len(ours) == 1, done.stderr
        assert f"wanted a whole number from 1 to 32, found '{value}'" in ours[0]
    assert queued(site) == before


def test_more_replicas_than_nodes_are_refused_at_submission(site: Site) -> None:
    before = queued(site)
    script = site.cluster.locate_home("alice") / "few.sh"
    script.write_text("#!/bin/sh\n#SBATCH --requeue -N 2\ntrue\n")
    for command in ("sbatch -N2", "sbatch", "salloc -N1-2", "srun --nodes=2"):
        tool, *options = command.split()
        what = [str(script), "-N9"] if tool == "sbatch" else ["true"]
        done = site.cluster.run([tool, "--gemini-replicas=3", *options, *what], user="alice", timeout_s=20)
        assert done.returncode != 0 and done.stdout == "", command
        ours = [line for line in done.stderr.splitlines() if "gemini-hpc" in line]
        told = "--nodes asks for 2: ask for more nodes or fewer replicas"
        assert len(ours) == 1 and told in ours[0], f"{command}: {done.stderr}"
    assert queued(site) == before


def test_spares_without_no_kill_are_refused_and_each_spelling_is_understood(site: Site) -> None:
    options = ["--gemini-replicas=2", "-N3", "--hold", "--parsable", "--wrap=true"]
    refused = site.cluster.run(["sbatch", "--gemini-spares", "1", *options], user="alice", timeout_s=20)
    assert refused.returncode != 0 and "--gemini-spares needs --no-kill" in refused.stderr
    for words in (
        ["--gemini-spares", "1", "--no-kill"],
        ["--gemini-spares=1", "-k"],
        ["--no-kill", "--gemini-spares=1"],
    ):
        done = site.cluster.run(["sbatch", *words, *options], user="alice", timeout_s=20)
        assert done.returncode == 0 and not done.stderr, (words, done.stderr)
        site.cluster.run(["scancel", done.stdout.strip()])


def test_no_kill_is_told_at_submission(site: Site) -> None:
    options = ["--gemini-replicas=2", "-N2", "--no-kill", "--hold", "--parsable", "--wrap=true"]
    done = site.cluster.run(["sbatch", *options], user="alice", timeout_s=20)
    assert done.returncode == 0, done.stderr
    site.cluster.run(["scancel", done.stdout.strip()])
    (line,) = done.stderr.splitlines()
    assert "--no-kill: Slurm does not requeue such a job when it loses a node" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gemini-replicas=2", "--no-requeue"], "with --no-requeue a lost node ends the job"),
        (["--gemini-replicas=1"], "--gemini-replicas=1 keeps no copy on another node"),
        (["--gemini-replicas=2", "--gemini-hang=5"], "--gemini-hang=5: the step starts again when one rank"),
        (["--gemini-replicas=2", "--gemini-tier=/nonexist"], "--gemini-tier=/nonexist does not exist on this host"),
    ],
)
def test_what_is_accepted_and_will_surprise_is_noted_once(site: Site, options: list[str], words: str) -> None:
    argv = ["sbatch", *options, "-N2", "--hold", "--parsable", "--wrap=true"]
    done = site.cluster.run(argv, user="alice", timeout_s=20)
    assert done.returncode == 0, done.stderr
    site.cluster.run(["scancel", done.stdout.strip()])
    (line,) = done.stderr.splitlines()
    assert f"note: {words}" in line


def test_more_replicas_than_nodes(site: Site) -> None:
    out = site.cluster.locate_home("alice") / "toomany"
    script = "#!/bin/sh\necho ran\n"
    # The number of nodes follows from the tasks: it is not known at submission.
    job = site.cluster.submit_job(
        ["-n2", "--ntasks-per-node=1", "--gemini-replicas=3", f"--output={out}"], script=script
    )
    until(lambda: _over(site, job), 30, 0.1, what="the job ends")
    assert site.cluster.read_job(job)["ExitCode"] == "78:0"
    (line,) = out.read_text().splitlines()
    assert "--gemini-replicas=3 wants 3 nodes, one per copy, and this job has 2" in line
    assert not any("drain" in s or "down" in s for s in site.cluster.read_node_states().values())


def _over(site: Site, job: int) -> bool:
    return site.cluster.read_job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED")


def test_not_enough_memory_for_the_replicas(site: Site) -> None:
    home = site.cluster.locate_home("alice")
    (home / "large.py").write_text(LITE.read_text())
    script = f"#!/bin/sh\nsrun python {home}/large.py {home}/large.log 10 0.1 {64 << 20}\necho step $?\nsleep 60\n"
    options = ["-N2", "--ntasks-per-node=1", "--gemini-replicas=2", f"--output={home}/large.out"]
    job = site.cluster.submit_job(options, script=script)
    out = home / "large.out"
    try:
        until(lambda: out.exists() and "step " in out.read_text(), 40, 0.1, what="the step ends")
        said = [line for line in out.read_text().splitlines() if "not enough memory for the replicas" in line]
        assert said and "wanted 128 MiB" in said[0] and "its cap of 32 MiB" in said[0], out.read_text()

        def noted() -> Any:
            done = site.gemini("inspect", str(job), "--json")
            assert done.returncode == 0, done.stderr
            return [n for s in json.loads(done.stdout)["trainings"] for n in s["notes"] if "wanted 128 MiB" in n]

        until(noted, 10, 0.2, what="inspect shows it")
        assert "not enough memory" in " ".join(site.gemini("inspect", str(job)).stdout.split())
    finally:
        site.cluster.run(["scancel", str(job)])


# ---- inspect -------------------------------------------------------------------------------------------


def test_inspect_of_what_is_not_yours_or_not_there(site: Site) -> None:
    job = str(site.job.id)
    theirs = one_line(site.gemini("inspect", job, user="bob"), status=1)
    for unknown in ("987654", "4294967295", "4294967296", "9999999999"):
        none = one_line(site.gemini("inspect", unknown, user="bob"), status=1)
        assert none.replace(unknown, job) == theirs, "no difference between forbidden and unknown"
        assert one_line(site.gemini("inspect", unknown), status=1) == none
    assert "unknown, or not yours" in theirs
    assert site.gemini("inspect", job).returncode == 0


def test_inspect_of_no_number(site: Site) -> None:
    for word in ("x", "", "1.5", "1e3", "99999999999", "../1", "1_", "\u0663", "1\n2"):
        one_line(site.gemini("inspect", "--", word), "is not a job id", status=2, case=repr(word))


def test_inspect_without_a_controller(site: Site) -> None:
    site.cluster.stop_controller()
    try:
        done = site.gemini("inspect", str(site.job.id))
        assert done.returncode == 0 and "asked: agents" in done.stdout
        theirs = one_line(site.gemini("inspect", str(site.job.id), user="bob"), "unknown, or not yours", status=1)
        none = one_line(site.gemini("inspect", "987654", user="bob"), status=1)
        assert none.replace("987654", str(site.job.id)) == theirs
    finally:
        site.cluster.start_controller()


def test_run_without_a_command(site: Site) -> None:
    one_line(site.gemini("run"), "wanted a command", status=2)
    one_line(site.gemini("run", "--"), "wanted a command", status=2)
    one_line(site.gemini("run", "--", "/no/such/program"), "No such file", status=127)
    one_line(site.gemini("run", "--", "/"), "Permission denied", status=127)


# ---- gemini.toml ---------------------------------------------------------------------------------------

BAD: dict[str, tuple[str | bytes, str]] = {
    "unknown key": ("heartbeat = 1", "unknown key 'heartbeat'; did you mean heartbeat_s?"),
    "wrong type": ('heartbeat_s = "fast"', "heartbeat_s: wanted a number, found 'fast'"),
    "not TOML": ("heartbeat_s = = 1", "not valid TOML"),
    "not text": (b"\xff\xfe\x00", "not UTF-8"),
}


@pytest.fixture
def settings_file(site: Site) -> Iterator[Path]:
    path = site.cluster.directory / "etc" / "gemini-hpc" / "gemini.toml"
    good = path.read_bytes()
    yield path
    path.write_bytes(good)


def test_bad_settings(site: Site, settings_file: Path) -> None:
    node, where = site.nodes[0], "/etc/gemini-hpc/gemini.toml"
    agent = [
        PYTHON,
        "-I",
        "-m",
        "gemini_hpc.agent",
        "--job",
        "1",
        "--uid",
        str(ALICE),
        "--node",
        node,
        "--dir",
        "/tmp",
    ]
    given = {"job": "999", "uid": str(ALICE), "restart": "0", "replicas": "2", "node": node, "nodelist": "n[1-2]"}
    prolog = [PYTHON, "-I", "-m", "gemini_hpc.node.prolog", *[given.get(name, "") for name in ARGUMENTS]]
    for kind, (content, words) in BAD.items():
        settings_file.write_bytes(content if isinstance(content, bytes) else content.encode())
        one_line(site.gemini("inspect", str(site.job.id)), where, words, status=1, case=kind)
        one_line(site.gemini("controller", "--daemon", user=None), where, words, status=2, case=kind)
        one_line(site.gemini("controller", user=None), where, words, status=2, case=kind)
        one_line(site.cluster.exec(node, agent, user="alice"), where, words, status=2, case=kind)
        done = site.cluster.exec(node, prolog)
        assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), f"{kind}: {done.stderr}"
        assert words in done.stderr and done.stderr.startswith("gemini-hpc: prolog: job=999 not protected: "), kind


@pytest.mark.witness("a mistake in the site's settings costs protection and no job")
def test_bad_settings_cost_protection_and_not_the_job(site: Site, settings_file: Path) -> None:
    settings_file.write_text("heartbeat = 1")
    out = site.cluster.locate_home("alice") / "plain"
    script = '#!/bin/sh\nsrun sh -c "echo socket=$GEMINI_SOCKET ran"\necho step $?\n'
    job = site.cluster.submit_job(
        ["-N2", "--ntasks-per-node=1", "--gemini-replicas=2", f"--output={out}"], script=script
    )
    until(lambda: _over(site, job), 30, 0.1, what="the job ends")
    assert site.cluster.read_job(job)["JobState"] == "COMPLETED"
    assert out.read_text().count("socket= ran") == 2 and "step 0" in out.read_text()
    assert not any("drain" in s or "down" in s for s in site.cluster.read_node_states().values())


def test_a_prolog_that_cannot_protect_says_so_in_the_jobs_output(site: Site) -> None:
    """The installation is missing on one node: its reason, and what its peers made of it, which name that node."""
    cluster, out = site.cluster, site.cluster.locate_home("alice") / "unprotected-out"
    assert cluster.exec("n2", ["mount", "-t", "tmpfs", "none", "/opt/gemini-hpc"]).returncode == 0
    try:
        script = "#!/bin/sh\nsrun sh -c 'echo $SLURMD_NODENAME has: $GEMINI_UNPROTECTED'\n"
        job = cluster.submit_job(["-N3", "-wn1,n2,n3", "--gemini-replicas=2", f"--output={out}"], script=script)
        until(lambda: _over(site, job), 60, 0.1, what="the job ends")
        log = cluster.exec("n2", ["cat", "/run/gemini-hpc.unprotected/log"]).stdout
    finally:
        cluster.exec("n2", ["umount", "/opt/gemini-hpc"])
    text = out.read_text()
    assert "this job is not protected on n2: /opt/gemini-hpc/venv/bin/python3 is missing on this node" in text
    assert text.count("gemini-hpc: ") == 2 and "this job is not protected: no agent answers on n2\n" in text
    assert "n2 has: /opt/gemini-hpc/venv/bin/python3 is missing" in text
    assert "n1 has: no agent answers on n2" in text and "n3 has: the agents of the job's nodes did not" in text
    assert f"job={job} restart=0 /opt/gemini-hpc/venv/bin/python3 is missing on this node" in log
