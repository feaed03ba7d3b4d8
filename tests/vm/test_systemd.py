"""gemini-hpc on Debian 13 with systemd and cgroup v2, from the packages, in a virtual machine without KVM."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.releases import machine as host
from tests.releases import root
from tests.vm.machine import Kernel, Machine

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
RELEASE = "24.11"
PACKAGES = (
    *("slurmd", "slurmctld", "slurm-client", "munge", "libmunge2", "python3", "python3-numpy", "logrotate"),
    *("iproute2", "procps", "systemd-sysv", "dbus", "udev", "kmod", "libpam-systemd", "linux-image-cloud-amd64"),
    *("python3-mpi4py", "openmpi-bin"),
)
WIRE = 17077
_MAKING_S = 900.0  # packages and image, each
_INSTALL_S = 900.0  # 293 s were seen beside a load of 16 on 2 cores
_TRAINS = "pgrep -f '[p]ython3 .*heat_mpi.py --log'"  # the brackets: the shell that asks does not match itself
_JOB = """
cd /home/alice
runuser -u alice -- env PYTHONPATH=/opt/gemini-hpc/venv/lib/python3.13/site-packages \
  LAUNCH='srun --kill-on-bad-exit --mpi=pmix' sbatch --parsable -N{nodes} --gemini-replicas={nodes} -o {output} \
  heat_mpi.sh --n 64 --steps 100000 --step-s 1 --every 1
"""


def made(script: str, *arguments: object) -> None:
    argv = [*root.NAMESPACES, str(HERE / script), *map(str, arguments)]
    subprocess.run(argv, check=True, timeout=_MAKING_S)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Machine]]:
    """Start a machine by its name; the next start of the same name finds its disk as it was."""
    at = tmp_path_factory.mktemp("vm")
    for name in ("stage", "packages", "programs"):
        (at / name).mkdir()
    for name in ("heat_mpi.py", "heat_mpi.sh"):
        (at / "programs" / name).write_bytes((TOP / "examples" / name).read_bytes())
    with root.held(root.CACHE, root.recipe(RELEASE, TOP, None)) as builder:
        made("build.sh", builder, at / "stage", TOP, at / "packages")
    started: list[Machine] = []
    with root.held(root.CACHE, root.Recipe(RELEASE, host.mirror(), PACKAGES)) as guest:
        made("image.sh", guest, at / "stage", at / "packages", at / "programs", at / "base.raw")
        kernel = Kernel(next(guest.glob("boot/vmlinuz-*")))

        def run(name: str) -> Machine:
            disk = at / f"{name}.qcow2"
            if not disk.exists():
                argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", at / "base.raw", disk]
                subprocess.run(argv, check=True, timeout=60.0)
            started.append(Machine(name, at, kernel, disk, WIRE))
            started[-1].booted()
            return started[-1]

        try:
            yield run
        finally:
            for machine in started:
                machine.cut()


@pytest.fixture(scope="module")
def site(start: Callable[[str], Machine]) -> Machine:
    """A machine that is a whole site, with gemini-hpc installed by its packages."""
    machine = start("n1")
    machine.sh((HERE / "install.sh").read_text(), _INSTALL_S)
    return machine


def test_an_agent_lives_in_a_scope_outside_of_its_job(site: Machine) -> None:
    job = site.sh(_JOB.format(nodes=1, output="one.txt")).splitlines()[-1]
    site.sh(f"for _ in $(seq 120); do {_TRAINS} && exit 0; sleep 1; done; cat /home/alice/one.txt; exit 1")
    agent = site.sh(f"pgrep -o -f '^/opt/gemini-hpc/.*gemini_hpc.agent --job {job} '")
    assert site.sh(f"cat /proc/{agent}/cgroup") == f"0::/geminihpc.slice/geminihpc-{job}-{agent}.scope"
    scope = f"/sys/fs/cgroup/geminihpc.slice/geminihpc-{job}-{agent}.scope"
    assert site.sh(f"cat {scope}/memory.max").isdigit()
    assert site.sh(f"cat {scope}/memory.swap.max {scope}/pids.max").split() == ["0", "512"]
    assert f"/job_{job}/" in site.sh("cat /proc/$(pgrep -o -f 'python3 /home/alice/heat_mpi.py --log')/cgroup")
    site.sh(f"systemctl restart slurmd; kill -0 {agent}")
    site.sh(f"scancel {job}; while pgrep -f '^/opt/gemini-hpc/.*gemini_hpc.agent --job {job} '; do sleep 1; done")
    site.sh(f"for n in $(seq 30); do [ -e {scope} ] || exit 0; sleep 1; done; exit 1")


def test_removal_leaves_nothing(site: Machine) -> None:
    site.sh((HERE / "remove.sh").read_text())
