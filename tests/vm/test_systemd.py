"""gemini-hpc on Debian 13 with systemd and cgroup v2, from the packages, in a virtual machine without KVM."""

from __future__ import annotations

import re
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


def test_a_killed_rank_and_a_lost_machine(site: Machine, start: Callable[[str], Machine]) -> None:
    """The step begins again; then the power of n2 is cut, and the job waits for it and resumes from n1's memory.

    The same when n2 is shut down in order. Slurm's slurmstepd.scope lasts for systemd's 90 s then, the agent's not.
    """
    other = start("n2")
    other.sh((HERE / "install.sh").read_text(), _INSTALL_S)
    job = site.sh(_JOB.format(nodes=2, output="two.txt")).splitlines()[-1]
    wait_for_version(site, job, 5)
    other.sh("pkill -KILL -f '[p]ython3 .*heat_mpi.py --log'")
    resumed, repeated = wait_for_resume(site, 1)
    assert resumed > 5 and repeated <= 1
    before = wait_for_version(site, job, resumed + 5)
    other.sh("sync")  # its system was not installed a minute ago, as here
    other.cut()
    other = back_to_its_job(site, start, job, 0)
    assert "cred_state: jobs that come back" in other.sh("journalctl -u gemini-hpc-boot")
    resumed, repeated = wait_for_resume(site, 2)
    assert resumed >= before and repeated <= 1
    before = wait_for_version(site, job, resumed + 5)
    shown = len(other.console.read_bytes())
    other.power_off()
    assert b"geminihpc" not in other.console.read_bytes()[shown:].partition(b"stop running")[2]
    other = back_to_its_job(site, start, job, 1)
    resumed, repeated = wait_for_resume(site, 3)
    assert resumed >= before and repeated <= 1
    site.sh(f'scancel {job}; while [ -n "$(squeue -h)" ]; do sleep 1; done')
    other.cut()


def back_to_its_job(site: Machine, start: Callable[[str], Machine], job: str, restart: int) -> Machine:
    """Wait until the job is requeued because n2 has gone, and start n2 again."""
    site.sh(f"for _ in $(seq 90); do [ $(squeue -h -j {job} -o %T) = PENDING ] && exit 0; sleep 2; done; exit 1")
    assert (
        site.sh("sinfo -h -R -n n2 -o %E")
        == f"gemini-hpc: no answer from slurmd and agent, job {job} restart {restart}"
    )
    back = start("n2")
    back.sh(
        "for _ in $(seq 90); do systemctl is-active slurmd && exit 0; sleep 1; done; journalctl -u slurmd; exit 1"
    )
    site.sh("scontrol update NodeName=n2 State=RESUME")
    return back


def wait_for_version(site: Machine, job: str, least: int) -> int:
    """Wait until a version above `least` is sealed, and return it."""
    saved = 'python3 -c \'import json, sys; d = json.load(sys.stdin); print(d["trainings"][0]["sealed"][1])\''
    ask = f"v=$({{ gemini-hpc inspect {job} --json | {saved}; }} 2>/dev/null)"
    ask += f" && [ $v -gt {least} ] && echo $v && exit 0"
    story = f"gemini-hpc inspect {job}; cat /home/alice/two.txt"
    return int(site.sh(f"for _ in $(seq 150); do {ask}; sleep 2; done; {story}; exit 1", 600.0))


def wait_for_resume(site: Machine, times: int) -> tuple[int, int]:
    """Wait until the job has resumed `times` times; return the version and the steps repeated at the last one."""
    said = f"[ $(grep -c 'resumed at' /home/alice/two.txt) -ge {times} ]"
    site.sh(f"for _ in $(seq 150); do {said} && exit 0; sleep 2; done; cat /home/alice/two.txt; exit 1", 600.0)
    lines = re.findall(
        r"resumed at version (\d+) from memory .*, (\w+) steps? repeated", site.sh("cat /home/alice/two.txt")
    )
    version, repeated = lines[-1]
    return int(version), 0 if repeated == "no" else int(repeated)


def test_removal_leaves_nothing(site: Machine) -> None:
    site.sh((HERE / "remove.sh").read_text())
