"""Finding trainings that hang on living nodes, and ending the hang. The rules are in `core.standstill`.

Each agent looks at the pages of its ranks once a second. While none of them advances, the agent reports so to its
parent. The root has all reports and judges. The root's decision goes down the tree.

The agent of the rank that holds the others up then requests that rank's Python stack and logs the event. The step is
started again if there is a process to do so: its launchers, or `gemini-hpc run` when the rank is killed. Otherwise
the hang is only logged.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from gemini_hpc import clock
from gemini_hpc.agent.launches import Launches
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.core.standstill import HangStanding, Judge, describe_hang, shorten_stack
from gemini_hpc.wire import control_page, peer
from gemini_hpc.wire.local_server import LocalClient
from gemini_hpc.wire.sanitize import MAX_DETAIL

LOOK_S = 1.0  # hangs last minutes, and a look reads the pages of all ranks
_QUIET = 0.25  # fraction of the least patience after which a silence is reported
_FRESH_S = 3.5  # the agents below report every second: three reports may be lost
_MOST_BELOW = 4096  # limit of standings: no tree has more
_STOPPED_S = 5.0  # an agent that has not looked for so long was stopped itself, perhaps with its ranks
_STACK_S = 2.0  # a rank that runs Python writes its stack within milliseconds
_STACK_CHARS, _LEAST_CHARS = 120, 60
_KEPT_STACKS = 4  # files, each as large as a stack can be
_SHOWN = (control_page.STATE_PROTECTED, control_page.STATE_DEGRADED)


class Hangs:
    """An agent's search for trainings that hang."""

    def __init__(
        self,
        context: AgentContext,
        trainings: Trainings,
        launches: Launches,
        on_culprit: Callable[[Incarnation, HangStanding], None],
        now: Callable[[], float] = clock.monotonic,
    ) -> None:
        """Create the search.

        Args:
            context: The agent's context.
            trainings: The agent's trainings.
            launches: Restarts the ranks of a step.
            on_culprit: Called at the root with each hang.
            now: Clock in seconds, for tests.
        """
        self._node, self._site_s, self._membership = context.node, context.settings.hang_s, context.membership
        self._log, self._spawn = context.log, context.spawn
        self._trainings, self._launches, self._on_culprit, self._now = trainings, launches, on_culprit, now
        self._looked_at = 0.0
        self._round = (-1, 0)
        # by training and child, with the time of the report
        self._below: dict[tuple[str, str], tuple[float, HangStanding]] = {}
        self._loud: set[str] = set()  # trainings that have been reported to the parent
        self._judges: dict[str, Judge] = {}
        self._acted: set[str] = set()
        self._directory, self._stacks = context.identity.directory, 0
        self._kept: dict[str, str] = {}  # by training: the file with the stack of its rank

    @property
    def hang_s(self) -> float:
        """Return the least patience in seconds. 0 disables the search."""
        incarnation = self._membership.incarnation
        asked = incarnation.attach.hang if incarnation is not None else None
        return self._site_s if asked is None else float(asked)

    def check_progress(self, now: float) -> None:
        """Look at the ranks' progress, and report or judge. Called a few times a second."""
        incarnation, hang_s = self._membership.training, self.hang_s
        if incarnation is None or not hang_s or now - self._looked_at < LOOK_S:
            return
        stopped = now - self._looked_at > _STOPPED_S
        self._looked_at = now
        self._enter_round(incarnation)
        for training in self._trainings:
            if training.ranks.read_pages(now, stopped=stopped):
                training.hung = ""
                self._acted.discard(training.name)
        self._below = {key: report for key, report in self._below.items() if now - report[0] < _FRESH_S}
        for name in {training.name for training in self._trainings} | {name for name, _ in self._below}:
            standing = self._join_standings(name, now)
            if incarnation.leads:
                judge = self._judges.setdefault(name, Judge(hang_s))
                if judge.is_hung(standing) and standing is not None:
                    self._on_culprit(incarnation, standing)
                    self._on_hang(incarnation, name, standing)
                continue
            quiet = standing is not None and standing.silent_s > _QUIET * hang_s
            if standing is not None and (quiet or name in self._loud) and incarnation.rounds.parent is not None:
                incarnation.send(incarnation.rounds.parent, peer.StandingUp(self._round[1], name, standing))
            (self._loud.add if quiet else self._loud.discard)(name)

    def _enter_round(self, incarnation: Incarnation) -> None:
        """Enter a new round: reports from before no longer count."""
        at = incarnation.restart, incarnation.rounds.round
        if at == self._round:
            return
        self._round = at
        self._below.clear()
        self._loud.clear()
        self._acted.clear()
        self._kept.clear()
        for judge in self._judges.values():
            judge.begin_launch()

    def _join_standings(self, name: str, now: float) -> HangStanding | None:
        """Return the joint standing of all ranks here, and below in the tree, that have reported."""
        standings = [standing for (training_name, _), (_, standing) in self._below.items() if training_name == name]
        training = self._trainings.get(name)
        if training is not None and training.page.state in _SHOWN and not training.left:
            own_standing = training.ranks.build_standing(self._node, training.world, now)
            standings += [own_standing] if own_standing is not None else []
        whole = None
        for standing in standings:
            whole = standing if whole is None else whole.join(standing)
        return whole

    # ---- peers -----------------------------------------------------------------------------------------

    def on_message(self, incarnation: Incarnation, host: str, m: peer.StandingUp | peer.HungDown) -> None:
        """Handle a child's report that its ranks stand still, or the root's decision."""
        rounds = incarnation.rounds
        if m.round != rounds.round or not incarnation.live or not self._trainings.may_have(m.training):
            return
        if isinstance(m, peer.HungDown) and host == rounds.parent:
            self._on_hang(incarnation, m.training, m.standing)
        elif isinstance(m, peer.StandingUp) and host in rounds.children:
            self._enter_round(incarnation)
            if len(self._below) < _MOST_BELOW:
                self._below[m.training, host] = self._now(), m.standing

    def _on_hang(self, incarnation: Incarnation, name: str, standing: HangStanding) -> None:
        incarnation.send_down(peer.HungDown(incarnation.rounds.round, name, standing))
        training = self._trainings.get(name)
        if training is None or training.ranks.compute_silent_s(self._now()) < _QUIET * self.hang_s:
            return  # a rank here has advanced meanwhile
        kept = self._kept.get(name)
        training.hung = f"{standing.least.host}: {describe_hang(standing)}{f'; its stack: {kept}' if kept else ''}"
        if standing.least.host == self._node and name not in self._acted:
            self._acted.add(name)
            self._spawn(self._end_rank(incarnation, training, standing))

    # ---- the rank that holds the others up -------------------------------------------------------------

    async def _end_rank(self, incarnation: Incarnation, training: Training, standing: HangStanding) -> None:
        rank, number = standing.least.rank, incarnation.rounds.round
        client = training.present.get(rank)
        text = await self._request_stack(training, rank, client) if client is not None else ""
        what, stack = describe_hang(standing), "its stack could not be read"
        if text:
            where = self._write_stack(training.name, text)
            room = MAX_DETAIL - len(what) - len(where) - 4
            stack = shorten_stack(text, max(_LEAST_CHARS, min(_STACK_CHARS, room))) + (f"; {where}" if where else "")
        self._log("hung", version=standing.least.version, detail=f"{what}; {stack}")
        if incarnation.rounds.round != number or self._membership.training is not incarnation or not training.hung:
            return
        launched = self._launches.record_hang(incarnation.rounds.launch, rank, what)
        if not launched and client is not None and rank in training.restarts:
            client.signal(signal.SIGKILL)

    async def _request_stack(self, training: Training, rank: int, client: LocalClient) -> str:
        """Return the rank's Python stack, or "" if the rank does not answer."""
        number = training.ranks.find_signal(rank)
        if not number or not _catches(client.pid, number):
            return ""
        begin = training.ranks.find_stacks_end(rank)
        client.signal(number)
        deadline, text = self._now() + _STACK_S, ""
        while self._now() < deadline:
            await asyncio.sleep(0.05)
            before, text = text, training.ranks.read_stacks(rank, begin)
            if text and text == before:
                break
        return text

    def _write_stack(self, name: str, text: str) -> str:
        """Write a stack to a file, which may replace an older one, and return its path.

        Return "" if there is no room.
        """
        path = f"{self._directory}/hung-{self._stacks % _KEPT_STACKS}"
        self._stacks += 1
        try:
            Path(path).write_text(text, errors="replace")
        except OSError as exc:
            self._log("error", detail=f"the stack of a rank that hangs cannot be kept in {path}: {exc.strerror}")
            return ""
        self._kept[name] = path
        return path


def _catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal. Without a handler the signal would end it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
