"""Protected jobs, and what recoveries and dead agents leave behind: made on a real cluster, and seen."""

from __future__ import annotations

import re
import time

import pytest
from waiting import until

from .conftest import Patient

pytestmark = pytest.mark.cluster


def test_a_node_without_an_agent(patient: Patient) -> None:
    with patient.job() as job:
        until(
            lambda: patient.doctor("--only", "jobs.agents")["jobs.agents"]["found"].startswith(
                "protected jobs that run: 1"
            )
        )
        for pid in patient.pids("n2", f"gemini_hpc.agent --job {job} "):
            patient.cluster.exec("n2", ["kill", "-9", pid])
        time.sleep(max(0.0, 10.5 - patient_age(patient, job)))
        for kwargs in ({}, {"node": "n1"}, {"user": "alice"}):
            report = patient.doctor("--only", "jobs", "leftovers", **kwargs)
            assert report.news == {"jobs.agents": "wrong"} and report.code == 1
            assert f"job {job} of alice: no agent on n2" in report["jobs.agents"]["found"]
        patient.cluster.stop_controller()
        try:
            report = patient.doctor("--only", "jobs")
        finally:
            patient.cluster.start_controller()
        assert f"job {job} of alice: no agent on n2" in report["jobs.agents"]["found"], "from the agents themselves"
        # Bob learns nothing of alice's jobs.
        report = patient.doctor("--only", "jobs", user="bob")
        assert report.news == {} and str(job) not in report["jobs.agents"]["found"]
    # Its supervisor was killed as well: only the prolog of a later job would remove this.
    patient.cluster.exec("n2", ["rm", "-r", f"/run/gemini-hpc/{job}"])


def patient_age(patient: Patient, job: int) -> float:
    """Seconds since the job's start."""
    start = patient.cluster.run(["date", "-d", patient.cluster.read_job(job)["StartTime"], "+%s"]).stdout
    return time.time() - int(start)


def test_a_job_without_any_agent(patient: Patient) -> None:
    """The prolog fails everywhere: neither the controller nor any node knows of the job, slurmctld's records do."""
    with patient.conf("Prolog=/bin/true"):
        job = patient.submit()
        until(lambda: patient.cluster.read_job(job)["JobState"] == "RUNNING")
        until(lambda: patient_age(patient, job) > 10.5)
        report = patient.doctor("--only", "jobs")
        patient.cluster.run(["scancel", str(job)])
    assert report.news == {"jobs.agents": "wrong"}
    assert f"job {job} of alice: no agent at all" in report["jobs.agents"]["found"]
    until(lambda: not patient.cluster.run(["squeue", "-h"]).stdout.strip())


def test_a_plugin_that_does_not_load_on_one_node(patient: Patient) -> None:
    with (
        patient.written("empty.conf", "") as empty,
        patient.mounted("n2", "--bind", str(empty), str(patient.plugstack)),
        patient.job() as job,
    ):
        until(lambda: patient.pids("n2", "^/usr/bin/sleep 300") or patient.pids("n2", "^sleep 300"))
        report = patient.doctor(node="n2")
        assert report["jobs.tasks"]["status"] == "wrong" and f"of job {job}" in report["jobs.tasks"]["found"]
        assert set(report.news) == {"jobs.tasks", "plugin.line"}
        assert patient.doctor(node="n1").news == {}
        assert patient.doctor(node="n2", user="alice")["jobs.tasks"]["status"] == "skipped"


def test_not_requeueable(patient: Patient) -> None:
    with patient.job("--no-requeue") as job:
        report = patient.doctor()
        assert report.news == {"jobs.requeue": "warning"} and report.code == 0
        assert f"job {job} of alice: this job was submitted without --requeue" in report["jobs.requeue"]["found"]
    # One that has never run: only slurmctld knows that it asked for protection.
    waiting = patient.submit("--no-requeue", "--hold")
    unprotected = patient.cluster.submit_job(["-N1", "--no-requeue", "--hold"], script="#!/bin/sh\ntrue\n")
    report = patient.doctor()
    for job in (waiting, unprotected):
        patient.cluster.run(["scancel", str(job)])
    assert report.news == {"jobs.requeue": "warning"}
    assert f"job {waiting} " in report["jobs.requeue"]["found"]
    assert f"job {unprotected} " not in report["jobs.requeue"]["found"]


def test_reservations(patient: Patient) -> None:
    def slurm(*argv: str) -> None:
        done = patient.cluster.run(["scontrol", *argv])
        assert done.returncode == 0, done.stderr

    name = "gemini_4242_0123456789ab"
    reserve = (
        "create",
        "reservation",
        "users=alice",
        "starttime=now",
        "duration=5",
        "nodes=n3",
        "flags=ignore_jobs,flex",
    )
    slurm(*reserve, f"reservationname={name}")
    report = patient.doctor()
    slurm("delete", f"reservationname={name}")
    assert report.news == {"leftovers.reservations": "wrong"} and name in report["leftovers.reservations"]["found"]
    slurm(*reserve, "reservationname=maintenance")
    report = patient.doctor()
    slurm("delete", "reservationname=maintenance")
    assert report.news == {}
    job = patient.submit("--hold")
    name = f"gemini_{job}_0123456789ab"
    slurm(*reserve, f"reservationname={name}")
    report = patient.doctor()
    slurm("delete", f"reservationname={name}")
    patient.cluster.run(["scancel", str(job)])
    assert report.news == {}, "its job waits"


def test_a_fenced_node(patient: Patient) -> None:
    reason = "gemini-hpc: no answer from slurmd and agent, job 1 restart 0 \x1b[31m"
    try:
        # DOWN passes by itself here: slurmd answers, and ReturnToService is 2.
        for state, words in (("drain", r"n3 IDLE\+DRAIN"), ("down", r"n3 (DOWN|IDLE)\+DRAIN")):
            patient.cluster.run(["scontrol", "update", "nodename=n3", f"state={state}", f"reason={reason}"])
            report = patient.doctor()
            assert report.news == {"leftovers.nodes": "warning"} and report.code == 0
            assert re.search(rf"{words} for [\d.]+ s", report["leftovers.nodes"]["found"])
    finally:
        patient.cluster.resume("n3")
    patient.cluster.run(["scontrol", "update", "nodename=n3", "state=drain", "reason=a fan"])
    report = patient.doctor()
    patient.cluster.resume("n3")
    assert report.news == {}, "not ours"
    patient.cluster.wait_idle()


def test_a_stale_pin(patient: Patient) -> None:
    with patient.job() as job:
        nodes = patient.cluster.read_job(job)["NodeList"]
        patient.cluster.run(["scontrol", "requeuehold", str(job)])
        until(lambda: patient.cluster.read_job(job)["JobState"] == "PENDING")
        assert patient.doctor().news == {}
        done = patient.cluster.run(["scontrol", "update", f"JobId={job}", f"ReqNodeList={nodes}"])
        assert done.returncode == 0, done.stderr
        report = patient.doctor()
        assert (
            report.news == {"leftovers.pins": "warning"}
            and f"job {job} waits for n" in report["leftovers.pins"]["found"]
        )
        patient.cluster.run(["scontrol", "update", f"JobId={job}", "ReqNodeList="])
        assert patient.doctor().news == {}


def test_leftover_directories(patient: Patient) -> None:
    def run(*argv: str, node: str = "n1") -> None:
        done = patient.cluster.exec(node, argv)
        assert done.returncode == 0, done.stderr

    # A job that is cancelled while it waits to run again gets no epilog: the stale pin's is such a one. Later tests
    # would be told of its directories.
    for name in patient.cluster.node_names:
        run("sh", "-c", "umount /run/gemini-hpc/*; rm -rf /run/gemini-hpc/*", node=name)
    run("mkdir", "/run/gemini-hpc/4242")
    assert patient.doctor(node="n1").news == {}, "too young to be told"
    run("touch", "-d", "5 minutes ago", "/run/gemini-hpc/4242")
    report = patient.doctor(node="n1")
    run("rmdir", "/run/gemini-hpc/4242")
    assert report.news == {"leftovers.directories": "warning"} and "4242" in report["leftovers.directories"]["found"]
    run("touch", "/run/gemini-hpc/\x1b[31mevil")
    report = patient.doctor(node="n1")
    shown = patient.cluster.exec("n1", ["gemini-hpc", "doctor", "--only", "leftovers"]).stdout
    run("rm", "/run/gemini-hpc/\x1b[31mevil")
    assert report.news == {"leftovers.directories": "warning"}
    assert "\x1b" not in shown and "?[31mevil" in shown
