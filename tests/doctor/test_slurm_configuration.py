"""slurm.conf, the scripts and the plugin's line, broken on a real cluster: that check turns, and only that."""

from __future__ import annotations

import pytest

from .conftest import EXPLAINED, Patient

pytestmark = pytest.mark.cluster

# check, lines for slurm.conf, keys taken out of it, status, what the finding names
SLURM_CONF = [
    ("slurm.prolog-flags", [], ["PrologFlags"], "wrong", "(none)"),
    ("slurm.job-requeue", ["JobRequeue=0"], [], "warning", "JobRequeue=0"),
    ("slurm.unkillable", ["UnkillableStepTimeout=5"], [], "wrong", "=5"),
    ("slurm.prolog-failures", ["SchedulerParameters=bf_interval=1"], [], "warning", "nohold_on_prolog_fail"),
    ("slurm.prolog-timeout", ["PrologEpilogTimeout=5"], [], "wrong", "=5"),
    ("slurm.prolog-timeout", ["PrologEpilogTimeout=30"], [], "warning", "=30"),
    ("slurm.proctrack", ["ProctrackType=proctrack/linuxproc"], [], "warning", "linuxproc"),
    ("slurm.over-memory-kill", ["JobAcctGatherParams=OverMemoryKill"], [], "wrong", "OverMemoryKill"),
    ("slurm.detection", ["SlurmdTimeout=0"], [], "warning", "SlurmdTimeout=0"),
    ("network.slurm-ports", ["SrunPortRange=18000-18999"], [], "wrong", "SrunPortRange=18000-18999"),
    ("network.slurm-ports", ["SrunPortRange=25000-25999"], [], "wrong", "MASTER_PORT"),
    ("scripts.prolog", [], ["Prolog"], "wrong", "not set"),
    ("scripts.epilog", ["Epilog=/bin/true"], [], "wrong", "/bin/true does not call"),
]


@pytest.mark.witness("`doctor` finds a good site good")
def test_a_good_cluster_is_green(patient: Patient) -> None:
    for host, role in ((None, "controller"), ("n1", "node")):
        for user in (None, "alice"):
            report = patient.doctor(node=host, user=user)
            assert report.code == 0 and report.document["status"] == 0
            assert report.document["roles"] == [role]
            assert report.news == {}
            assert report["slurm.cred-expire"]["status"] == "warning"  # of the fast profile
    assert patient.doctor()["files.state-dir"]["status"] == "ok"


def test_slurm_conf(patient: Patient) -> None:
    for case in SLURM_CONF:
        check, lines, without, status, words = case
        with patient.conf(*lines, without=without):
            report = patient.doctor()
        assert report.news == {check: status}, case
        assert words in report[check]["found"], case
        assert report[check]["wanted"] and report[check]["fix"], case
        assert report.code == (1 if status == "wrong" else 0), case


def test_cred_expire_is_told(patient: Patient) -> None:
    assert EXPLAINED["slurm.cred-expire"] == patient.doctor()["slurm.cred-expire"]["status"]
    with patient.conf(without=["AuthInfo"]):
        assert patient.doctor()["slurm.cred-expire"]["status"] == "ok"


def test_over_memory_kill_with_a_remedy(patient: Patient) -> None:
    for remedy in ("UsePss", "NoShared", "NoShare"):
        with patient.conf(f"JobAcctGatherParams=OverMemoryKill,{remedy}"):
            assert patient.doctor().news == {}


def test_notes_are_told(patient: Patient) -> None:
    with patient.conf("ReturnToService=1", "SlurmdTimeout=77"):
        report = patient.doctor()
    assert report.news == {}
    assert "ReturnToService=1" in report["slurm.return-to-service"]["found"]
    assert "77" in report["slurm.detection"]["found"]
    assert "has none" in report["slurm.expedited-requeue"]["found"]


def test_a_container_that_hides_run(patient: Patient) -> None:
    conf = patient.slurm_conf.parent / "job_container.conf"
    text = "AutoBasePath=true\nBasePath=/tmp/containers\n"
    for extra, status in (("Dirs=/tmp,/run\n", "wrong"), ("", "ok")):
        conf.write_text(text + extra)
        try:
            with patient.conf("JobContainerType=job_container/tmpfs", "PrologFlags=Alloc,Contain"):
                report = patient.doctor()
        finally:
            conf.unlink()
        assert report["slurm.job-container"]["status"] == status
        assert set(report.news) <= {"slurm.job-container"}


@pytest.mark.witness("`doctor` names a setting that does not fit the site")
def test_slurm_user(patient: Patient) -> None:
    with patient.with_settings(slurm_user="bob") as path:
        report = patient.doctor("--config", str(path))
    assert report["slurm.user"]["status"] == "wrong" and "'bob'" in report["slurm.user"]["found"]
    # Bob cannot answer as the controller, and owns none of its files.
    related = {"slurm.user", "network.controller", "files.state-dir", "controller.runs", "controller.journal"}
    assert set(report.news) <= related


def test_cluster_name(patient: Patient) -> None:
    with patient.with_settings(cluster_name="another") as path:
        report = patient.doctor("--config", str(path))
    assert report["slurm.cluster-name"]["status"] == "warning"
    assert "refuses" in report["network.controller"]["found"]
    assert set(report.news) == {"slurm.cluster-name", "network.controller"}


def test_no_slurmctld(patient: Patient) -> None:
    conf = patient.slurm_conf.read_text().replace("SlurmctldPort=6817", "SlurmctldPort=6899")
    with patient.written("other.conf", conf) as path:
        report = patient.doctor(env={"SLURM_CONF": str(path)})
    assert report.code == 1
    assert report["slurm.answers"]["status"] == "wrong"
    assert set(report.news) == {"slurm.answers"}
    assert report["slurm.unkillable"]["status"] == "skipped"
    assert "controller" in report.document["roles"], "from what runs here, and the settings"


def test_a_site_prolog_that_calls_ours(patient: Patient) -> None:
    ours = patient.directory / "site/prolog_epilog/prolog"
    with patient.written("site-prolog", f"#!/bin/sh\n{ours} || exit 1\nexit 0\n", 0o755) as path:
        with patient.conf(f"Prolog={path}"):
            for host in (None, "n1"):
                report = patient.doctor(node=host)
                assert report.news == {"scripts.prolog": "warning"} and report.code == 0
                assert str(ours) in report["scripts.prolog"]["found"]
        commented = f"#!/bin/sh\n# {ours}\nexit 0\n"
        with patient.file(path, commented), patient.conf(f"Prolog={path}"):
            assert patient.doctor(node="n1").news == {"scripts.prolog": "wrong"}


@pytest.mark.parametrize(
    ("line", "warns"),
    [
        ("pkill -KILL -U $SLURM_UID", True),
        ('killall -9 -u "$SLURM_JOB_USER"', True),
        ("loginctl terminate-user $SLURM_JOB_USER", True),
        ("# pkill -KILL -U $SLURM_UID", False),
        ("pkill -USR1 nscd; ps -u root", False),
        ("/usr/bin/pkill -USR1 nscd", False),
        ("pgrep -U $SLURM_UID | spare /geminihpc.slice/ | xargs pkill -U $SLURM_UID", False),
    ],
)
def test_a_clean_up_that_ends_agents(patient: Patient, line: str, warns: bool) -> None:
    ours = patient.directory / "site/prolog_epilog/epilog"
    with (
        patient.written("clean", f"#!/bin/sh\n{line}\n", 0o755) as clean,
        patient.written("site-epilog", f"#!/bin/sh\n{clean}\nexec {ours}\n", 0o755) as path,
        patient.conf(f"Epilog={path}"),
    ):
        report = patient.doctor(node="n1")
        news = {"scripts.epilog": "warning", **({"scripts.clean-up": "warning"} if warns else {})}
        assert report.news == news
        assert not warns or f"{clean} ({line})" in report["scripts.clean-up"]["found"]


def test_a_prolog_that_is_not_on_this_node(patient: Patient) -> None:
    empty = patient.directory / "empty"
    empty.mkdir()
    try:
        with patient.mounted("n2", "--bind", str(empty), str(patient.directory / "site/prolog_epilog")):
            report = patient.doctor(node="n2")
            assert report["scripts.prolog"]["status"] == report["scripts.epilog"]["status"] == "wrong"
            assert report["files.scripts"]["status"] == "wrong"
            assert set(report.news) == {"scripts.prolog", "scripts.epilog", "files.scripts"}
            assert patient.doctor(node="n1").news == {}
    finally:
        empty.rmdir()


PLUGSTACK = [
    ("plugin.line", "", "wrong", "does not name"),
    ("plugin.line", "# optional {plugin}\n", "wrong", "does not name"),
    ("plugin.line", "optional {plugin}.gone/gemini_spank.so\n", "wrong", "does not exist"),
    ("plugin.line", "required {plugin}\n", "warning", "required"),
    ("plugin.run-dir", "optional {plugin} run_dir=/run/elsewhere\n", "wrong", "/run/elsewhere"),
    ("plugin.run-dir", "optional {plugin} rundir=/run/gemini-hpc\n", "wrong", "refuses its argument"),
]


def test_plugstack(patient: Patient) -> None:
    for case in PLUGSTACK:
        check, text, status, words = case
        plugin = patient.directory / "site/slurm/gemini_spank.so"
        with patient.file(patient.plugstack, text.format(plugin=plugin)):
            report = patient.doctor(node="n1")
        assert report.news == {check: status}, case
        assert words in report[check]["found"], case


def test_a_plugin_that_is_included(patient: Patient) -> None:
    line = patient.plugstack.read_text()
    with patient.written("etc/slurm/more.conf", line), patient.file(patient.plugstack, "include more.*\n"):
        assert patient.doctor(node="n1").news == {}


def test_a_plugin_of_another_release(patient: Patient) -> None:
    plugin = patient.directory / "site/slurm/gemini_spank.so"
    built = plugin.read_bytes()
    number = bytes((8, 5, 22, 0))  # 22.05.8, as plugin_version has it
    assert built.count(number) >= 1
    with patient.file(plugin, built.replace(number, bytes((1, 11, 24, 0)))):
        report = patient.doctor(node="n1")
        assert report.news == {"plugin.release": "wrong"} and report.code == 1
        assert "24.11.1" in report["plugin.release"]["found"]
        # This is what it is about: nobody is told, and the option is not there.
        done = patient.cluster.run(["sbatch", "--help"], user="alice")
        assert "gemini" not in done.stdout
    with patient.file(plugin, b"\x7fELF and nothing behind it"):
        assert patient.doctor(node="n1").news == {"plugin.release": "wrong"}
    assert patient.doctor(node="n1").news == {}
