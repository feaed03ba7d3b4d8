"""Files that others could change (CVE-2016-10030, CVE-2023-41914), settings, versions: broken one by one."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
from pathlib import Path

import pytest

from gemini_hpc import paths
from gemini_hpc.doctor.finding import combine_outcomes, report_ok, report_warning, report_wrong

from .conftest import Patient, Report

pytestmark = pytest.mark.cluster

ALICE = 5001
VERB = "import sys; sys.path.insert(0, '{place}'); from gemini_hpc.cli.main import main; sys.exit(main())"


def test_cve_2016_10030_what_root_runs(patient: Patient) -> None:
    cases: list[tuple[str, str, dict[str, int], str]] = [
        ("files.settings", "etc/gemini-hpc/gemini.toml", {"mode": 0o666}, "0666"),
        ("files.settings", "etc/gemini-hpc/gemini.toml", {"owner": ALICE}, "alice"),
        ("files.settings", "etc/gemini-hpc", {"mode": 0o777}, "0777"),
        ("files.scripts", "site/prolog_epilog/prolog", {"mode": 0o757}, "0757"),
        ("files.scripts", "site/prolog_epilog", {"owner": ALICE}, "alice"),
        ("files.plugin", "site/slurm/gemini_spank.so", {"owner": ALICE}, "alice"),
        ("files.plugin", "etc/slurm/plugstack.conf", {"mode": 0o646}, "0646"),
        ("files.python", "opt/venv/bin", {"owner": ALICE}, "alice"),
        ("files.python", "opt/venv/lib/{python}/site-packages", {"mode": 0o777}, "0777"),
    ]
    for case in cases:
        check, name, change, words = case
        path = patient.directory / name.format(python=f"python{sys.version_info[0]}.{sys.version_info[1]}")
        with patient.access(path, **change):
            report = patient.doctor(node="n1")
        assert report.news == {check: "wrong"} and report.code == 1, case
        assert words in report[check]["found"], case
        if check == "files.python" and path.name == "bin":
            # Root does not even run it to ask for its version.
            assert report["files.version"]["status"] == "skipped", case


def test_cve_2016_10030_a_link_through_a_users_home(patient: Patient) -> None:
    python, home = patient.venv / "bin/python3", patient.cluster.locate_home("alice")
    target = os.readlink(python)
    (home / "python3").symlink_to(target)
    python.unlink()
    python.symlink_to(home / "python3")
    try:
        report = patient.doctor(node="n1")
    finally:
        python.unlink()
        python.symlink_to(target)
        (home / "python3").unlink()
    assert report["files.python"]["status"] == "wrong" and str(home) in report["files.python"]["found"]
    assert set(report.news) == {"files.python", "files.access"}, "nor can anyone else run it through her home"


def test_cve_2016_10030_a_file_among_the_packages(patient: Patient) -> None:
    (packages,) = patient.venv.glob("lib/python3*/site-packages")
    evil = packages / "evil.pth"
    evil.write_text("")
    evil.chmod(0o666)
    try:
        assert patient.doctor(node="n1").news == {"files.python": "wrong"}
    finally:
        evil.unlink()


def test_what_a_tier_needs(patient: Patient) -> None:
    """A warning where nobody has to have one, wrong where all jobs do."""
    (packages,) = patient.venv.glob("lib/python3*/site-packages")
    (packages / "h5py").rename(packages / "h5py-away")
    try:
        report = patient.doctor(node="n1")
        assert report.news == {"files.tier": "warning"} and "has no h5py" in report["files.tier"]["found"]
        with patient.file(patient.settings, patient.settings.read_text() + 'tier = "/lustre/{user}"\n'):
            report = patient.doctor(node="n1")
        assert report.news == {"files.tier": "wrong"} and "/lustre/{user}" in report["files.tier"]["wanted"]
    finally:
        (packages / "h5py-away").rename(packages / "h5py")


def test_settings_that_cannot_be_used(patient: Patient) -> None:
    cases: list[tuple[str, str]] = [("bogus = 1\n", "unknown key"), ("x = [", "not valid TOML")]
    for case in cases:
        text, words = case
        with patient.file(patient.settings, text):
            report = patient.doctor(node="n1")
        assert report.code == 2 == report.document["status"] and words in report.errors, case
        assert report.news == {"files.settings": "wrong"} and words in report["files.settings"]["found"], case
        assert report["plugin.run-dir"]["status"] == "skipped", case
        assert report["slurm.unkillable"]["status"] == "ok", "what needs no settings is looked at all the same"


def test_no_settings_file(patient: Patient) -> None:
    with patient.mounted("n3", "-t", "tmpfs", "none", "/etc/gemini-hpc"):
        report = patient.doctor(node="n3")
    assert report["files.settings"]["status"] == "warning"
    assert report["slurm.cluster-name"]["status"] == "warning"


def test_another_version(patient: Patient) -> None:
    """Beside the interpreter of the scripts is an older package; this command itself runs from elsewhere."""
    old = patient.directory / "old"
    old.mkdir()
    (old / "__init__.py").write_text('__version__ = "0.0.9"\n')
    code = VERB.format(place=str(patient.directory / "opt/src"))
    argv = ["/opt/gemini-hpc/venv/bin/python", "-I", "-B", "-c", code, "doctor", "--json", "--only", "files"]
    try:
        with patient.mounted("n3", "-o", "bind,ro", str(old), "/opt/gemini-hpc/src/gemini_hpc"):
            done = patient.cluster.exec("n3", argv)
    finally:
        shutil.rmtree(old)
    report = Report(done.returncode, json.loads(done.stdout), done.stderr)
    assert report.news == {"files.version": "wrong"}
    assert "0.0.9" in report["files.version"]["found"]


def test_run_dir(patient: Patient) -> None:
    def run(*argv: str) -> None:
        done = patient.cluster.exec("n1", argv)
        assert done.returncode == 0, done.stderr

    with patient.with_settings(run_dir="/run/other") as path:

        def report() -> Report:
            return patient.doctor("--config", str(path), "--only", "files", node="n1")

        assert report().news == {}, "the first protected job's prolog makes it"
        run("mkdir", "/run/other")
        assert report().news == {}
        for change, words in (
            (["chmod", "0777", "/run/other"], "0777"),
            (["chmod", "0700", "/run/other"], "users cannot reach"),
            (["chown", "alice", "/run/other"], "5001"),
            (["sh", "-c", "rmdir /run/other && mkdir /run/real && ln -s /run/real /run/other"], "link"),
        ):
            run(*change)
            broken = report()
            assert broken.news == {"files.run-dir": "wrong"} and words in broken["files.run-dir"]["found"]
        run("sh", "-c", "rm /run/other && rmdir /run/real")
    with patient.with_settings(run_dir="/tmp/other") as path:
        broken = patient.doctor("--config", str(path), "--only", "files", node="n1")
        assert broken.news == {"files.run-dir": "wrong"} and "/tmp has mode 1777" in broken["files.run-dir"]["found"]


def test_state_dir(patient: Patient) -> None:
    with patient.access(patient.state, mode=0o755):
        report = patient.doctor()
        assert report.news == {"files.state-dir": "warning"} and report.code == 0
    with patient.access(patient.state, mode=0o777):
        assert patient.doctor().news == {"files.state-dir": "wrong"}
    with patient.access(patient.state, owner=ALICE):
        assert patient.doctor().news == {"files.state-dir": "wrong"}
    with patient.with_settings(state_dir=str(patient.directory / "nowhere")) as path:
        report = patient.doctor("--config", str(path), "--only", "files")
        assert report.news == {"files.state-dir": "wrong"}


# ---- the walk itself, on this machine's own files ------------------------------------------------------


def chain(path: Path, trusted: Path) -> list[str]:
    """Weaknesses below a directory that counts as good."""
    return [w for w in paths.find_weaknesses(str(path), frozenset((os.geteuid(), 0))) if str(trusted) in w]


def test_links_are_followed_as_the_kernel_does(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir(mode=0o755)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad").chmod(0o777)
    (tmp_path / "bad/file").touch(mode=0o644)
    (tmp_path / "good/direct").touch(mode=0o644)
    (tmp_path / "good/link").symlink_to("../bad/file")
    (tmp_path / "good/up").symlink_to("../bad/../good/direct")
    (tmp_path / "good/loop").symlink_to("loop")
    assert chain(tmp_path / "good/direct", tmp_path) == []
    assert any("/bad has mode 0777" in w for w in chain(tmp_path / "good/link", tmp_path))
    assert any("/bad has mode 0777" in w for w in chain(tmp_path / "good/up", tmp_path))
    with pytest.raises(OSError):
        chain(tmp_path / "good/loop", tmp_path)
    assert paths.find_weaknesses("relative/file")
    assert [path for path, _ in paths.walk_path(str(tmp_path / "good/link"))][-1] == str(tmp_path / "bad/file")


def test_groups(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o664)
    os.chown(path, 0, 0)
    assert paths.find_weakness(str(path), path.lstat(), frozenset((0,))) == ""
    os.chown(path, 0, pwd.getpwnam("nobody").pw_gid)
    assert "0664" in paths.find_weakness(str(path), path.lstat(), frozenset((0,)))


def test_the_worst_rules() -> None:
    assert combine_outcomes([report_ok("a"), report_ok("b")]) == report_ok("a; b")
    assert combine_outcomes(
        [report_ok("a"), report_warning("b", "w", "f"), report_wrong("c", "x", "y"), report_wrong("d", "", "")]
    ) == report_wrong("c; d", "x", "y")
