"""No controller: a survivor's epilog holds the survivors."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import until

from .conftest import PYTHON, Site

pytestmark = pytest.mark.cluster

EPILOG = f"""#!/bin/sh
python={PYTHON}
t0=$(date +%s.%N)
env -i PATH=/usr/bin:/bin SLURM_CONF="$SLURM_CONF" $python -I -m gemini_hpc.controller.epilog_fallback \\
  --job "$SLURM_JOB_ID" \\
  --restart "${{SLURM_JOB_RESTART_COUNT:-0}}" --node "$SLURMD_NODENAME" --nodes "$SLURM_NODELIST" </dev/null
echo "$SLURMD_NODENAME rc=$? $(date +%s.%N) - $t0" >>"$0.log"
exit 0
"""

# What a node has said before its end is dealt with: it would set a node that is DOWN "returned to service".
SPOKEN_S = 1.5


def install(tmp: Path) -> str:
    path = tmp / "epilog"
    path.write_text(EPILOG)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return str(path)


@pytest.fixture
def place() -> Iterator[Path]:
    """Of the epilog: there as long as the cluster, which has jobs to end before it ends. Ask for it before it."""
    directory = Path(f"/var/lib/gemini-hold-test-{os.getpid()}")
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def test_epilog_holds_the_survivors_on_a_busy_cluster(place: Path, make_site: Callable[..., Site]) -> None:
    site = make_site(controller=False, slurm_conf=[f"Epilog={install(place)}"])
    job = site.submit("-N3", "--requeue", "--exclusive")
    site.running(job)
    short = "#!/bin/sh\nsrun sleep 3\n"
    for _ in range(12):
        site.submit("-N1", "--exclusive", user="bob", script=short)
    site.cluster.cut_power("n2")
    time.sleep(SPOKEN_S)
    cut = time.time()
    site.cluster.run(["scontrol", "update", "nodename=n2", "state=down", "reason=slurm"])
    seen: set[str] = set()

    def again() -> bool:
        seen.update(site.cluster.run(["squeue", "-h", "-u", "bob", "-t", "R,CG", "-o", "%N"]).stdout.split())
        facts = site.cluster.read_job(job)
        return (facts["Restarts"], facts["JobState"]) == ("1", "RUNNING")

    until(again)
    print(f"again after {time.time() - cut:.2f} s; epilogs:\n{(place / 'epilog.log').read_text()}")
    assert {"n1", "n3"} < set(site.nodes(job))
    assert not seen & {"n1", "n3"}, f"bob's jobs ran on {seen}"
    until(lambda: not site.reservations())


def test_nothing_is_held_when_no_node_is_dead(place: Path, make_site: Callable[..., Site]) -> None:
    site = make_site(controller=False, slurm_conf=[f"Epilog={install(place)}"])
    job = site.submit("-N3", "--requeue", "--exclusive")
    site.running(job)
    site.cluster.run(["scontrol", "requeue", str(job)])
    until(lambda: site.cluster.read_job(job)["JobState"] == "PENDING")
    assert site.cluster.read_job(job)["ReqNodeList"] == "(null)"
    assert site.reservations() == []


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_hold_that_ends_before_the_job_can_start_leaves_no_pin(place: Path, make_site: Callable[..., Site]) -> None:
    """The replacement comes after the hold's minute, when a survivor has been drained."""
    site = make_site(controller=False, nodes=6, slurm_conf=[f"Epilog={install(place)}"])
    cluster = site.cluster
    job = site.submit("-N3", "--requeue", "--exclusive")
    site.running(job)
    hosts = site.nodes(job)
    others = [n for n in cluster.node_names if n not in hosts]
    cluster.run(["scontrol", "update", f"nodename={','.join(others)}", "state=drain", "reason=test"])
    cluster.cut_power(hosts[1])
    time.sleep(SPOKEN_S)
    cluster.run(["scontrol", "update", f"nodename={hosts[1]}", "state=down", "reason=slurm"])
    until(lambda: cluster.read_job(job)["ReqNodeList"] != "(null)")
    until(lambda: cluster.read_job(job)["ReqNodeList"] == "(null)", 80)
    facts = cluster.read_job(job)
    assert facts["JobState"] == "PENDING" and site.reservations() == [facts["Reservation"]], facts
    cluster.run(["scontrol", "update", f"nodename={hosts[0]}", "state=drain", "reason=test"])
    for node in others:
        cluster.resume(node)
    site.running(job, restart=1, timeout_s=60)
    assert hosts[2] in site.nodes(job) and hosts[0] not in site.nodes(job)
    cluster.run(["scontrol", "update", f"JobId={job}", "ReservationName="])
    for name in site.reservations():
        cluster.run(["scontrol", "delete", f"ReservationName={name}"])
