"""A run: what it sees, what is left of it. This machine's own files stand for the root of another release."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from . import run

pytestmark = pytest.mark.slow

TOP = Path(__file__).resolve().parents[2]
_CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever has the tests run in the background ignores it
from pathlib import Path
from tests.releases import run
stage, bound, *command = sys.argv[1:]
sys.exit(run.run(Path("/"), Path.cwd(), command, [Path(bound)], stage=Path(stage)))
"""


def start(tmp_path: Path, *command: str) -> subprocess.Popen[str]:
    """The tool in a process group of its own, as a shell starts it."""
    bound = tmp_path / "bound"
    bound.mkdir(exist_ok=True)
    argv = [sys.executable, "-c", _CODE, str(tmp_path / "stage"), str(bound), *command]
    return subprocess.Popen(
        argv, cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def left(tool: subprocess.Popen[str]) -> list[str]:
    """Processes in the run's cgroups, and these."""
    found = []
    for top in run._hierarchies():
        for procs in top.glob(f"gemini-releases-{tool.pid}/**/cgroup.procs"):
            found += [str(procs.parent), *procs.read_text().split()]
    return found


def until_inside(tool: subprocess.Popen[str]) -> None:
    """Until process 1 has entered a cgroup of the run."""
    deadline = time.monotonic() + 30.0
    while not [pid for pid in left(tool) if pid.isdigit()]:
        assert time.monotonic() < deadline and tool.poll() is None
        time.sleep(0.02)


def mounted(tmp_path: Path) -> bool:
    return str(tmp_path) in Path("/proc/self/mountinfo").read_text()


def test_a_command_in_a_copy_that_is_gone_afterwards(tmp_path: Path) -> None:
    script = f"""set -e
    pwd; [ "$(cat /proc/1/comm)" = enter.sh ]
    (setsid sh -c 'sleep 0.2 & echo $! >/tmp/orphan' &) ; sleep 1
    ! [ -e /proc/$(cat /tmp/orphan) ] && echo reaped
    touch /etc/left-behind gemini_hpc/left-behind {tmp_path}/bound/kept
    .venv/bin/python -I -c 'import gemini_hpc, torch; print(gemini_hpc.__file__)'
    touch /var/lib/gemini-devcluster-is-writable
    exit 7"""
    tool = start(tmp_path, "bash", "-c", script)
    out, _ = tool.communicate(timeout=200.0)
    assert tool.returncode == 7, out
    assert {"/srv/gemini-hpc", "reaped"} <= set(out.splitlines())
    assert "/srv/gemini-hpc/.venv/lib/" in out
    assert (tmp_path / "bound" / "kept").exists()
    for path in ("/etc/left-behind", "/var/lib/gemini-devcluster-is-writable", str(TOP / "gemini_hpc/left-behind")):
        assert not os.path.exists(path)
    assert left(tool) == [] and not mounted(tmp_path) and list((tmp_path / "stage").iterdir()) == []


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_ended(tmp_path: Path, sig: signal.Signals) -> None:
    tool = start(tmp_path, "sleep", "300")
    until_inside(tool)
    if sig == signal.SIGINT:
        os.killpg(tool.pid, sig)  # as Ctrl-C does
    else:
        tool.send_signal(sig)
    tool.communicate(timeout=60.0)
    assert tool.returncode != 0
    deadline = time.monotonic() + 20.0
    while [pid for pid in left(tool) if pid.isdigit()]:
        assert time.monotonic() < deadline, f"still there: {left(tool)}"
        time.sleep(0.05)
    if sig == signal.SIGKILL:
        run._sweep()  # as the next run does
    assert left(tool) == [] and not mounted(tmp_path) and list((tmp_path / "stage").iterdir()) == []
