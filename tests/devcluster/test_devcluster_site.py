"""Plugin, prolog, epilog and controller service as `up` installs them."""

from __future__ import annotations

import pwd
import signal
from pathlib import Path

import pytest

from gemini_hpc.devcluster import Cluster, DevclusterError, services, sitefiles

from .conftest import Trace, tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

PLUGIN = """\
#include <slurm/spank.h>
SPANK_PLUGIN(toy, 1)
int slurm_spank_init(spank_t sp, int ac, char **av)
{
    struct spank_option option = {"toy", "N", "a toy", 1, 0, 0};
    (void) ac; (void) av;
    return spank_option_register(sp, &option);
}
"""
MAKEFILE = "gemini_spank.so: toy.c\n\tcc -shared -fPIC -o $@ $<\n"
SCRIPT = "#!/bin/sh\nid -u >/run/gemini-hpc/{0}\nstat -c '%U %a' \"$0\" >>/run/gemini-hpc/{0}\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Site files of our own, so that the way they are installed is tested apart from what they do."""
    for part, files in (
        ("slurm", {"Makefile": MAKEFILE, "toy.c": PLUGIN}),
        ("prolog_epilog", {"prolog": SCRIPT.format("prolog"), "epilog": SCRIPT.format("epilog")}),
    ):
        (tmp_path / part).mkdir()
        for file, text in files.items():
            (tmp_path / part / file).write_text(text)
    monkeypatch.setattr(sitefiles, "find_source", lambda: tmp_path)
    return tmp_path


def test_site_files_are_built_installed_and_used(name: str, source: Path) -> None:
    with Cluster.bring_up(name, nodes=2, controller=False) as cluster:
        shown = cluster.read_status()
        assert (shown.plugin, shown.prolog, shown.epilog) == (True, True, True)
        assert "--toy=N" in cluster.run(["sbatch", "--help"], user="alice").stdout
        assert cluster.run(["srun", "-N2", "--toy=1", "true"], user="alice").returncode == 0
        for node in cluster.node_names:
            assert cluster.exec(node, ["cat", "/run/gemini-hpc/prolog"]).stdout == "0\nroot 755\n"


def test_a_plugin_that_does_not_build_is_an_error(name: str, source: Path) -> None:
    (source / "slurm" / "toy.c").write_text("int x = ;\n")
    with pytest.raises(DevclusterError, match=r"plugin did not build: .*libslurm-dev"):
        Cluster.bring_up(name, nodes=1, controller=False)
    Trace.of(name).assert_gone()


def test_the_product_s_own_site_files_load(name: str) -> None:
    with Cluster.bring_up(name, nodes=2, controller=False) as cluster:
        shown = cluster.read_status()
        assert (shown.plugin, shown.prolog, shown.epilog) == (True, True, True)
        assert "--gemini-replicas" in cluster.run(["sbatch", "--help"], user="alice").stdout
        assert cluster.run(["srun", "-N2", "true"], user="alice").returncode == 0
        done = cluster.run(["sinfo", "-h", "-o", "%T"])
        assert "drain" not in done.stdout


def test_settings_from_the_command_line(name: str) -> None:
    options = ["--nodes=1", "--no-site", "--no-controller", "--set", "heartbeat_s=0.75", "--set", "interface=eth0"]
    assert tool("up", "--name", name, *options).returncode == 0
    text = Cluster.attach(name).run(["cat", "/etc/gemini-hpc/gemini.toml"]).stdout
    assert "heartbeat_s = 0.75\n" in text and 'interface = "eth0"\n' in text


def test_the_controller_service_starts_and_stops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a service of the standard library in its place: how it is run is tested here, not what it does."""
    monkeypatch.setattr(services, "CONTROLLER_MODULE", "http.server")
    monkeypatch.setattr(services, "has_controller", lambda: True)
    with Cluster.bring_up(name, nodes=1, site=False) as cluster:
        pid = cluster.find_controller_pid()
        assert pid is not None
        uid = pwd.getpwnam("slurm").pw_uid
        assert f"\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in Path(f"/proc/{pid}/status").read_text()
        assert cluster.run(["ps", "-o", "args=", "-u", "slurm"]).stdout.count("python -I -m http.server") == 1
        assert (cluster.log_directory / "controller.log").exists()
        # A cluster tool of a later day finds it too.
        assert Cluster.attach(name).read_status().controller_pid == pid
        assert cluster.stop_controller(signal.SIGKILL)
        assert cluster.find_controller_pid() is None
        assert not cluster.stop_controller()
        assert cluster.start_controller() == cluster.find_controller_pid() != pid
        with pytest.raises(DevclusterError, match="already runs"):
            cluster.start_controller()
        assert cluster.stop_controller()
        cluster.start_controller()
        trace = Trace.of(name)
    trace.assert_gone()


def test_a_controller_service_that_fails_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "CONTROLLER_MODULE", "no_such_module")
    monkeypatch.setattr(services, "has_controller", lambda: True)
    with pytest.raises(DevclusterError, match="No module named no_such_module"):
        Cluster.bring_up(name, nodes=1, site=False)
    Trace.of(name).assert_gone()
