"""Keep one rank running: start it again, with all others of its step, when any of them has failed.

The launcher asks the node's agent in which attempt the ranks of the step are to be (`local.LaunchRequest`), and waits
for that and for its rank's end, whatever comes first. A rank that fails ends the attempt for all: each launcher kills
its own rank, and forks the next one. The agents agree on what that resumes from, as for any launch. While a node is
dead or silent nobody begins another attempt: then Slurm requeues the job.
"""

from __future__ import annotations

import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress

import msgspec

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, ask_verdict, connect
from gemini_hpc.client.joining import ATTEMPT_ENV, STEP_ENV, step_name
from gemini_hpc.client.ranks import number
from gemini_hpc.client.restart_limit import Reached, RestartLimit
from gemini_hpc.core.culprits import Cause
from gemini_hpc.launch.import_log import ImportLog
from gemini_hpc.launch.placing import rank_environment, spares
from gemini_hpc.launch.rank_process import RankProcess
from gemini_hpc.launch.signals import SENT, Signals
from gemini_hpc.node.health_check import find_problem
from gemini_hpc.wire import local, ports

WAIT_S = 20.0
RETRY_S = 0.2
HEEDED_S = 60.0
LATER_S = 0.5  # until a signal that was sent to all processes of the step is here, too
TOLD_S = 2.0  # for the last word to the agent
HEALTHY_LOOK_S = 0.1
LEAVE_S = 0.5  # until the job has gone on without this node, if it does
SUSPECT_S = 30.0  # until a silent node is known to be dead, or is back


class Launcher:
    """Of one rank. start: begins a rank with this environment; it raises `Forked` in the new process."""

    def __init__(
        self,
        path: str,
        environ: Mapping[str, str],
        most: int,
        start: Callable[[Mapping[str, str]], RankProcess],
        imports: ImportLog,
    ) -> None:
        self._path, self._environ, self._start, self._imports = path, environ, start, imports
        self._step = step_name(environ)
        self._rank = environ.get("RANK") or environ.get("SLURM_PROCID") or "0"
        self._limit = RestartLimit(most)
        self._most = most
        self._spares = spares(environ) > 0
        self._attempt = -1 if self._spares else 0
        self._place: local.Place | None = None
        self._status = 0  # of the last rank
        self._signals = Signals()
        self._sock: socket.socket | None = None
        self._asked = False
        self._retry_at = 0.0

    # ---- life ------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until the rank has ended with success, or is not to be started again; the exit status."""
        self._signals.begin()
        try:
            while True:
                if self._spares and not self._trains():
                    status = self._wait()
                else:
                    self._limit.begin(self._reached())
                    status = self._attend(self._start(self._environment()))
                if status is not None:
                    return status
        finally:  # in the new process, too: it has no part in this connection
            self._hang_up()
            self._signals.close()

    def _environment(self) -> dict[str, str]:
        """Of this attempt. The ranks of the one before may still be there for a moment: they meet elsewhere."""
        env = rank_environment(self._environ, self._place) if self._place is not None else {}
        self._rank = env.get("RANK", self._rank)
        if not self._attempt:
            return env
        env |= {STEP_ENV: f"{self._step}+{self._attempt}", ATTEMPT_ENV: str(self._attempt)}
        port = env.get("MASTER_PORT", self._environ.get("MASTER_PORT", ""))
        if port.isascii() and port.isdigit():
            env["MASTER_PORT"] = str(ports.of_attempt(int(port), self._attempt))
        return env

    def _trains(self) -> bool:
        return self._place is not None and self._place.node_rank >= 0

    def _wait(self) -> int | None:
        """In a job with spares, without a rank: until this node is to train in another attempt, or none follows."""
        while self._signals.last is None:
            state = self._hear(None)
            if state is not None and (state.over or state.done):
                if state.over:
                    _say(f"ending: {state.over}")
                return 0 if state.left_out else self._status
            if state is not None and state.attempt > self._attempt and state.place is not None:
                self._attempt, self._place = state.attempt, state.place
                return None
        return 128 + self._signals.last[0]

    def _attend(self, rank: RankProcess) -> int | None:
        """Until this attempt is over; the exit status, or None where another attempt begins."""
        while True:
            state = self._hear(rank)
            self._signals.pass_on(rank.pid)
            if rank.ended():
                assert rank.status is not None
                return self._after(rank.status, rank)
            if state is None:
                continue
            if state.over:
                return self._end(rank, state)
            if state.attempt > self._attempt and (state.place is not None or not self._spares):
                why_not, _ = self._limit.failed(0, self._reached())
                if why_not and state.reason.startswith(local.HUNG):  # no launcher has asked itself that
                    self._tell(over=f"{state.reason}; {why_not}")
                    continue
                self._next(rank, state)
                return None

    def _end(self, rank: RankProcess, state: local.LaunchState) -> int:
        """No other attempt follows. A rank that somebody has sent a signal has a minute to end by itself."""
        if not state.left_out:
            self._ended_by(LATER_S)
        while not rank.ended():
            if state.left_out or self._ended_by() is None:
                _say(f"rank {self._rank}: ending: {state.over}")
                rank.kill()
            else:
                due_s = self._signals.due_s()
                select.select([rank.fd, self._signals.fd], [], [], 1.0 if due_s is None else due_s)
                self._signals.pass_on(rank.pid)
        return 0 if state.left_out else rank.status or 0

    def _next(self, rank: RankProcess, state: local.LaunchState) -> None:
        rank.kill()
        if rank.raised is not None:  # it was about to end by itself
            self._ask(self._said(rank.raised))
        if state.reason.startswith(f"{local.HUNG}{self._environ.get('SLURMD_NODENAME')}: "):
            self._check(state)
        self._attempt, self._place = state.attempt, state.place

    # ---- the rank's end --------------------------------------------------------------------------------

    def _after(self, status: int, rank: RankProcess) -> int | None:
        if status == 0:
            self._tell(done=True)
            return 0
        ended = f"rank {self._rank} ended with {_told(status)}"
        if sent := self._ended_by(LATER_S if status - 128 in SENT else 0.0):
            self._tell(over=f"{ended}: somebody sent {sent.name}")
            return status
        if not self._healthy():
            return status
        if self._spares and self._is_past(rank.cause):  # it has failed of a lost node, and a spare is there
            self._status, self._place = status, None
            return None
        reached = self._reached()
        why_not, note = self._limit.failed(status, reached)
        ended += f" ({note})" if note else ""
        if why_not:
            _say(f"{ended}; not starting the ranks again: {why_not}")
            self._tell(over=f"{ended}; {why_not}", cause=rank.cause)
            return status
        _say(f"{ended}; starting all ranks again: restart {self._limit.restarts} of {self._most}")
        state = self._tell(failed=ended, cause=rank.cause)
        if state is None:
            _say("no agent answers; not starting the ranks again")
            return status
        self._check(state)
        if self._spares:  # the place may be another one
            self._status, self._place = status, None
            return None
        if state.over or state.attempt <= self._attempt:
            _say(f"not starting the ranks again: {state.over or 'the agents do not agree'}")
            return status
        rank.kill()
        self._attempt, self._place = state.attempt, state.place
        return None

    def _check(self, state: local.LaunchState) -> None:
        """A rank has failed on this node: is the node healthy? The agents hear of it if it is not."""
        if not state.check or state.left_out:
            return
        problem = find_problem(state.check, lambda: self._signals.last is not None, _say)
        if problem is not None:
            _say(f"this node is not healthy: {problem.text}")
            self._ask(msgspec.structs.replace(self._said(None), unhealthy=problem.text))
            clock.sleep(LEAVE_S)

    def _said(self, cause: Cause | None) -> local.LaunchRequest:
        """What the end of the rank in this attempt shows."""
        return local.LaunchRequest(self._step, self._attempt, rank=number(self._rank), cause=cause)

    def _is_past(self, cause: Cause | None) -> bool:
        """Whether the agents have begun a later attempt already."""
        state = self._ask(self._said(cause))
        return state is not None and not state.over and state.attempt > self._attempt

    def _ended_by(self, wait_s: float = 0.0) -> signal.Signals | None:
        """The signal that somebody has ended the step with: this process gets it, too, perhaps a little later."""
        deadline = clock.monotonic() + wait_s
        while self._signals.last is None and clock.monotonic() < deadline:
            clock.sleep(RETRY_S / 10)
        last = self._signals.last
        if last is not None and clock.monotonic() - last[1] < HEEDED_S:
            return last[0]
        return None

    def _healthy(self) -> bool:
        """Wait while a node is silent; False where one is dead, or nobody can tell: then it is not for launchers."""
        said, deadline = False, clock.monotonic() + SUSPECT_S
        while self._signals.last is None and clock.monotonic() < deadline:
            verdict = ask_verdict(self._path)
            if verdict is not None and verdict.dead and not verdict.spared:
                _say(f"rank {self._rank}: {', '.join(verdict.dead)[:200]} dead: not starting the ranks again")
                return False
            if verdict is not None and not verdict.suspect and not verdict.dead:
                return True
            if not said:
                said = True
                silent = () if verdict is None else verdict.dead or verdict.suspect
                why = "the agent does not answer" if verdict is None else f"{', '.join(silent)[:200]} silent"
                _say(f"rank {self._rank}: waiting before another attempt: {why}")
            clock.sleep(HEALTHY_LOOK_S)
        return False

    def _reached(self) -> Reached | None:
        verdict = ask_verdict(self._path)
        return None if verdict is None else Reached(verdict.sealed, verdict.begun)

    # ---- the agent -------------------------------------------------------------------------------------

    def _hear(self, rank: RankProcess | None) -> local.LaunchState | None:
        """Wait for the rank's end, or for what the agent says of its step."""
        try:
            sock = self._connected()
            if not self._asked:
                ask = local.LaunchRequest(self._step, self._attempt, wait_s=WAIT_S, idle=rank is None)
                sock.sendall(local.encode(ask))
                self._asked = True
        except (AgentLost, OSError):
            self._hang_up()
            sock = None
        poll = select.poll()
        if rank is not None:
            poll.register(rank.fd, select.POLLIN)
        if sock is not None:
            poll.register(sock, select.POLLIN)
        poll.register(self._imports.fd, select.POLLIN)
        if self._signals.fd >= 0:
            poll.register(self._signals.fd, select.POLLIN)
        waits_s = [s for s in (self._imports.due_s(), self._signals.due_s()) if s is not None]
        most_s = min([*waits_s, WAIT_S if sock is not None else RETRY_S])
        ready = {fd for fd, _ in poll.poll(most_s * 1000)}
        if self._imports.fd in ready:
            self._imports.read()
        elif not ready and self._imports.due_s() == 0.0:
            self._imports.take_one()
        if sock is None or sock.fileno() not in ready:
            return None
        self._asked = False
        with suppress(OSError, msgspec.MsgspecError):
            data = sock.recv(local.MAX_PACKET_BYTES)
            reply = local.reply_decoder.decode(data) if data else None
            if isinstance(reply, local.LaunchState):
                return reply
        self._hang_up()
        clock.sleep(RETRY_S)  # an agent that is of another incarnation, or is being started again
        return None

    def _connected(self) -> socket.socket:
        if self._sock is None:
            self._sock = connect(self._path)
            self._asked = False
        return self._sock

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None

    def _tell(
        self, *, failed: str = "", over: str = "", done: bool = False, cause: Cause | None = None
    ) -> local.LaunchState | None:
        """The rank's end, for all; what the agent says, None where none answers in time."""
        wait_s = 0.0 if done or over else TOLD_S
        said = self._said(cause)
        return self._ask(
            msgspec.structs.replace(said, failed=failed[:200], done=done, over=over[:200], wait_s=wait_s)
        )

    def _ask(self, message: local.LaunchRequest) -> local.LaunchState | None:
        """On a connection of its own; None where no agent answers in time."""
        deadline = clock.monotonic() + TOLD_S
        while True:
            try:
                with closing(connect(self._path, TOLD_S)) as sock:
                    sock.settimeout(2 * TOLD_S)
                    sock.sendall(local.encode(message))
                    reply = local.reply_decoder.decode(sock.recv(local.MAX_PACKET_BYTES))
                    return reply if isinstance(reply, local.LaunchState) else None
            except (AgentLost, OSError, msgspec.MsgspecError):
                if clock.monotonic() > deadline:
                    return None
            clock.sleep(RETRY_S)


def _told(status: int) -> str:
    if status > 128:
        with suppress(ValueError):
            return signal.Signals(status - 128).name
    return f"status {status}"


def _say(text: str) -> None:
    print(f"gemini-hpc: launch: {text}", file=sys.stderr, flush=True)
