"""The nodes of a job that have not died, and which of them can be pinned now.

A pin to a node that does not answer makes the job hang. A pin to a node that Slurm would not allocate (drained, in
another reservation, ...) makes the job wait although other nodes are idle. Such a node is left out, and its copies
are pulled from it. It is taken in again when the obstacle is over. This module takes no action on a node: `fencing`
judges that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gemini_hpc import clock
from gemini_hpc.controller import probe
from gemini_hpc.controller.fencing import Port
from gemini_hpc.controller.probe import ProbeHistory, Target
from gemini_hpc.controller.requeue_rules import explain_bar
from gemini_hpc.controller.reservation import Say
from gemini_hpc.slurm.facts import Job, Node, Reservation

Fence = Callable[[str, ProbeHistory], Awaitable[bool]]


@dataclass
class Survivors:
    """The survivors of one recovery.

    Attributes:
        build_target: Return the addresses at which a node is probed.
        is_vouched: Return whether an agent on the node has just sent a message.
        fence_node: Judge a silent node and fence it if that follows. Return whether the node is dead then.
    """

    names: list[str]
    log_event: Say
    build_target: Callable[[Node], Target]
    is_vouched: Callable[[str], bool]
    confirm_s: float
    fence_node: Fence | None = None
    dead: list[str] = field(default_factory=list)
    is_surveyed: bool = False
    _seen: dict[str, ProbeHistory] = field(default_factory=dict)
    _fine: set[str] = field(default_factory=set)
    _barred: dict[str, str] = field(default_factory=dict)
    _reported: dict[str, str] = field(default_factory=dict)

    def exclude_nodes(
        self,
        job: Job,
        nodes: Mapping[str, Node],
        partitions: Mapping[str, str],
        reservations: Iterable[Reservation],
        length_s: float,
    ) -> None:
        """Take over from Slurm which survivors are barred.

        Args:
            job: The job.
            nodes: All nodes by name.
            partitions: State of each partition by name.
            reservations: Reservations that are not the job's own.
            length_s: The job's length in seconds.
        """
        others, ends_at = list(reservations), clock.time() + length_s
        known = {n: explain_bar(job, nodes[n], partitions, others, ends_at) for n in self.names if n in nodes}
        self._barred = {n: why for n, why in known.items() if why}

    async def probe_survivors(self, nodes: Mapping[str, Node]) -> None:
        """Probe once the survivors for which no agent vouches. Judge those that have been silent."""
        began = clock.monotonic()
        targets: dict[str, Target] = {}
        for name in self.names:
            if self.is_vouched(name):
                self._fine.add(name)
                self._seen.pop(name, None)
            elif name in nodes:
                targets[name] = self.build_target(nodes[name])
        for name, found in (await probe.probe_nodes(targets)).items():
            self._seen.setdefault(name, ProbeHistory(self.confirm_s)).add_result(found, began)
            if found.slurmd is Port.ANSWERS:
                self._fine.add(name)
        self.is_surveyed = True
        for name, seen in list(self._seen.items()):
            if name not in self.names or seen.silent_s < self.confirm_s or self.fence_node is None:
                continue
            if await self.fence_node(name, seen):
                self.names.remove(name)
                self.dead.append(name)
                self._seen.pop(name)

    def list_left_out(self, *, is_patient: bool) -> dict[str, str]:
        """Return the survivors that must not be pinned now, with the reasons.

        With `is_patient`, a short silence of a node that has answered before is tolerated.
        """
        out = dict(self._barred)
        for name, seen in self._seen.items():
            patience_s = self.confirm_s if is_patient and name in self._fine else 0.0
            if name in self.names and seen.slurmd_silent_s > patience_s:
                out.setdefault(name, "no answer from slurmd")
        return {n: why for n, why in out.items() if n in self.names}

    def list_pinnable(self, *, is_patient: bool) -> tuple[str, ...]:
        """Return the survivors that a pin may name. Log the changes."""
        out = self.list_left_out(is_patient=is_patient)
        for name in self.names:
            why, reported = out.get(name, ""), self._reported.get(name, "")
            if why and not reported:
                self.log_event("survivor_left_out", name, why)
            elif reported and not why:
                self.log_event("survivor_back", name, "")
            self._reported[name] = why
        return tuple(n for n in self.names if n not in out)
