"""An administrator with scontrol and scancel, in the middle of whatever goes on.

His commands are done and saved in slurmctld at once; while none answers he tries again. His word counts: a node that
he has drained stays so until he says otherwise, a job that he has cancelled never comes back, one that he holds does
not run.

Of Slurm assumed, beyond what was seen of it: `scancel` of a job that completes on its way back to pending ends it; a
suspended job keeps its nodes to itself and is sent back when one of them is DOWN; `scontrol reboot` waits until no
job is on the node; a reservation of ours may not overlap one of MAINT, which itself may overlap anything; no job
starts on nodes that are reserved for later.
"""

from __future__ import annotations

from collections.abc import Callable

from gemini_hpc.slurm.facts import FAILED, PENDING, RUNNING

from .jobs import Wrong
from .kernel import Process
from .site import Site
from .slurmctld import SUSPENDED, Held, JobRecord
from .training import Training

ROOT = 0
LOOK_S = 0.5
ISSUED = "ISSUED"


class Admin:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self.site, self.ctld, self.rng = site, site.ctld, site.rng
        self.drained: dict[str, str] = {}  # nodes that he has drained, and his reasons
        self.cancelled: set[int] = set()
        self._maintenances = 0
        site.at(LOOK_S, self._look)

    def _look(self) -> None:
        self.site.at(LOOK_S, self._look)
        if self.ctld.charge is None:
            return
        nodes, jobs = self.ctld.state.nodes, self.ctld.state.jobs
        if undone := [name for name in self.drained if not nodes[name].drain]:
            self.site.fail(Wrong(f"administrator: {undone} are drained by him, and have been resumed"))
        if back := [n for n in self.cancelled if jobs[n].shown in (PENDING, RUNNING, SUSPENDED)]:
            self.site.fail(Wrong(f"administrator: {back} were cancelled by him, and have come back"))
        if run := [n for n, job in jobs.items() if job.held and job.state == RUNNING and job.start > job.held_since]:
            self.site.fail(Wrong(f"administrator: {run} are held by him, and run"))

    def _do(self, text: str, what: Callable[[], None]) -> None:
        """As soon as a slurmctld answers."""
        if self.ctld.charge is None:
            self.site.at(1.0, lambda: self._do(text, what))
            return
        self.site.tell(f"administrator: {text}")
        what()
        self.ctld.changed()
        self.ctld.save_all()

    # ---- nodes -----------------------------------------------------------------------------------------

    def drain(self, name: str) -> None:
        """`scontrol update nodename=... state=drain`."""

        def do() -> None:
            node = self.ctld.state.nodes[name]
            node.drain, node.reason, node.asap = True, f"fan of {name}", False  # no reboot ends this drain
            self.drained[name] = node.reason

        self._do(f"drains {name}", do)

    def resume(self, name: str) -> None:
        """`state=resume`."""

        def do() -> None:
            node = self.ctld.state.nodes[name]
            node.drain = node.down = False
            node.heard = self.ctld.now
            self.drained.pop(name, None)

        self._do(f"resumes {name}", do)

    def down(self, name: str) -> None:
        """`state=down`: its jobs go back. A node that answers comes back by itself (ReturnToService=2)."""

        def do() -> None:
            self.site.hit |= {job.raw_id for job in self.ctld.used_by(name)}
            self.ctld.state.nodes[name].reason = "looks odd"
            for training in self.site.trainings.values():
                training.gone(name)  # no epilog is run there
            self.ctld.set_down(name)

        self._do(f"sets {name} down", do)

    def reboot(self, name: str, *, asap: bool) -> None:
        """`scontrol reboot`, when nothing runs there any more."""

        def do() -> None:
            node = self.ctld.state.nodes[name]
            node.reboot, node.asap, node.drain = "REQUESTED", asap and not node.drain, node.drain or asap

        self._do(f"has {name} rebooted", do)
        self._when_idle(name)

    def _when_idle(self, name: str) -> None:
        node = self.ctld.state.nodes[name]
        if node.reboot != "REQUESTED":
            return
        if self.ctld.charge is None or self.ctld.used_by(name) or not self.site.nodes[name].host.up:
            self.site.at(1.0, lambda: self._when_idle(name))
            return
        node.reboot = ISSUED
        self.ctld.changed()
        self.site.power_off(name)
        self.site.at(self.rng.uniform(5.0, 25.0), lambda: self.site.power_on(name))

    def maintain(self, names: list[str], *, after_s: float, lasts_s: float) -> None:
        """A reservation of MAINT."""
        self._maintenances += 1
        name = f"maint_{self._maintenances}"

        def do() -> None:
            start = self.ctld.now + after_s
            self.ctld.state.reservations[name] = Held(name, list(names), ROOT, start, start + lasts_s, maint=True)

        self._do(f"reserves {','.join(names)} in {after_s:.0f} s for {lasts_s:.0f} s", do)

    # ---- jobs ------------------------------------------------------------------------------------------

    def _job(self, number: int) -> JobRecord:
        return self.ctld.state.jobs[number]

    def cancel(self, number: int) -> None:
        """`scancel`."""

        def do() -> None:
            job = self._job(number)
            if job.state in (PENDING, RUNNING, SUSPENDED, "CONFIGURING") or job.completing:
                self.cancelled.add(number)
                self.site.ended_by_admin.add(number)
                self.ctld.cancel(job)

        self._do(f"cancels job {number}", do)

    def requeue(self, number: int, *, hold: bool = False) -> None:
        """`scontrol requeue`, or `requeuehold`."""

        def do() -> None:
            job = self._job(number)
            if job.completing or job.state not in (RUNNING, SUSPENDED):
                return
            self._go_on(number)
            if hold:
                self._hold(job)
            self.ctld.kill_job(job, PENDING)

        self._do(f"{'requeueholds' if hold else 'requeues'} job {number}", do)

    def send_back(self, number: int) -> None:
        """The same of a job that has failed, by its user."""

        def do() -> None:
            job = self._job(number)
            if job.state == FAILED and not job.completing:
                job.ended, job.restarts = job.restarts, job.restarts + 1
                job.state, job.pending_since = PENDING, self.ctld.now
                job.begin = self.ctld.now + self.ctld.expire_s + 1.0

        self._do(f"requeues job {number}, which has failed", do)

    def _hold(self, job: JobRecord) -> None:
        job.held, job.held_since = "JobHeldAdmin", self.ctld.now

    def hold(self, number: int) -> None:
        """`scontrol hold`: of one that waits, or completes on its way to that."""

        def do() -> None:
            if self._job(number).state == PENDING:
                self._hold(self._job(number))

        self._do(f"holds job {number}", do)

    def release(self, number: int) -> None:
        """`scontrol release`."""

        def do() -> None:
            self._job(number).held = ""

        self._do(f"releases job {number}", do)

    def suspend(self, number: int) -> None:
        """`scontrol suspend`."""

        def do() -> None:
            job = self._job(number)
            if job.state == RUNNING and job.scripted and not job.completing:
                job.state = SUSPENDED
                for process in _processes(self.site.trainings[number]):
                    process.stop()

        self._do(f"suspends job {number}", do)

    def go_on(self, number: int) -> None:
        """`scontrol resume`."""
        self._do(f"resumes job {number}", lambda: self._go_on(number))

    def _go_on(self, number: int) -> None:
        job = self._job(number)
        if job.state == SUSPENDED and not job.completing:
            job.state = RUNNING
            for process in _processes(self.site.trainings[number]):
                process.resume()

    def restore(self) -> None:
        """All his work is done: he gives back, releases and resumes what he has taken."""
        for name, node in self.ctld.state.nodes.items():
            if node.reboot == "REQUESTED":
                node.reboot, node.drain = "", node.drain and not node.asap
            if name in self.drained:
                self.resume(name)
        for number in self.site.trainings:
            self.release(number)
            self.go_on(number)

        def do() -> None:
            for name in [n for n, r in self.ctld.state.reservations.items() if r.maint]:
                del self.ctld.state.reservations[name]

        self._do("ends all maintenance", do)


def _processes(training: Training) -> list[Process]:
    ranks = [rank.process for launch in training.launches[-1:] for rank in launch.ranks.values()]
    return [p for p in [training.script, *ranks] if p is not None and p.alive]
