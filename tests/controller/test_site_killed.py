"""Requirements administrators-resume, one-controller: the controller is killed between any two of its actions, at
every one of them, and started again."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from .conftest import PYTHON, Site

pytestmark = pytest.mark.cluster

MOST = 64  # boundaries that are tried; a recovery has about half as many


def node_words(site: Site, node: str) -> str:
    return site.cluster.run(["scontrol", "show", "node", "-o", node]).stdout


class Trial:
    """One recovery on a cluster that is used again and again."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.cluster = site.cluster
        self.dying = self.cluster.directory / "dying.py"
        shutil.copy(Path(__file__).parent / "dying.py", self.dying)
        self.dying.chmod(0o644)

    def run(self, at: int) -> tuple[list[str], bool]:
        """The boundaries that were passed, and whether the controller was killed."""
        site, cluster = self.site, self.cluster
        log = cluster.log_directory / f"boundaries-{at}"
        log.touch()
        log.chmod(0o666)
        with (cluster.log_directory / "controller.log").open("a") as out:
            argv = [PYTHON, "-I", str(self.dying), str(at), str(log)]
            process = cluster.start_command(argv, user="slurm", stdout=out, stderr=out)
        job = site.submit("-N3", "--requeue", "--exclusive")
        site.running(job)
        hosts = site.nodes(job)
        site.agents(job, 0, hosts)
        cluster.cut_power(hosts[1])
        try:
            self._recovered(job, hosts, process, log)
        finally:
            killed = process.poll() is not None
            process.kill()
            process.wait()
            if cluster.find_controller_pid() is not None:
                cluster.stop_controller()
            self._restore(hosts[1])
        return [line.split(" ", 1)[1] for line in log.read_text().splitlines()], killed

    def _recovered(self, job: int, hosts: list[str], process: Any, log: Path) -> None:
        site, cluster = self.site, self.cluster

        def over() -> bool:
            return process.poll() is not None or "after journal close" in log.read_text()

        until(over)
        time.sleep(0.5)  # the last boundary and the death at it are two moments
        if process.poll() is not None:
            time.sleep(0.3)
            cluster.start_controller()
        facts = site.running(job, restart=1, timeout_s=90)
        assert hosts[1] not in site.nodes(job), facts
        until(lambda: not site.reservations())
        for node in cluster.node_names:
            if node != hosts[1]:
                assert "gemini-hpc" not in node_words(site, node) and "DRAIN" not in node_words(site, node)
        assert "DRAIN" in node_words(site, hosts[1]) and "gemini-hpc" in node_words(site, hosts[1])
        if process.poll() is None:
            return
        # A pin can be taken from a job only when it waits again; then it must be.
        cluster.run(["scontrol", "requeuehold", str(job)])
        until(lambda: cluster.read_job(job)["ReqNodeList"] == "(null)")

    def _restore(self, node: str) -> None:
        self.site.end_agents()
        self.cluster.run(["scancel", "--user=alice"])
        if not self.cluster.is_on(node):
            self.cluster.restore_power(node)
        self.cluster.resume(node)
        until(lambda: not self.cluster.run(["squeue", "-h", "-u", "alice"]).stdout.strip())
        self.cluster.wait_idle()


def make_trial(make_site: Callable[..., Site]) -> Trial:
    return Trial(make_site(controller=False, settings={"fence_budget_nodes": 1000}))


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_controller_killed_between_any_two_actions(make_site: Callable[..., Site]) -> None:
    trial = make_trial(make_site)
    places, _ = trial.run(0)
    for at in range(int(os.environ.get("GEMINI_FIRST_BOUNDARY", "1")), len(places) + 1):
        print(f"killed at {at} of {len(places)}: {places[at - 1]}", flush=True)
        trial.run(at)


def test_controller_stopped_in_mid_recovery_leaves_what_it_holds(site: Site) -> None:
    """SIGTERM, as at an upgrade: the reservation stands until the next controller has steered the job."""
    job = site.submit("-N3", "--requeue", "--exclusive")
    site.running(job)
    hosts = site.nodes(job)
    site.agents(job, 0, hosts)
    site.cluster.cut_power(hosts[1])
    until(lambda: site.event(job, "pinned"))  # not its start: on a busy machine the job would run before the next one
    held = site.reservations()
    assert held and site.cluster.stop_controller(signal.SIGTERM)
    assert site.reservations() == held
    site.cluster.start_controller()
    site.running(job, restart=1, timeout_s=60)
    assert {hosts[0], hosts[2]} < set(site.nodes(job)) and site.event(job, "taken_over")
    until(lambda: not site.reservations())
