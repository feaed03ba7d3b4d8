"""The launcher, which keeps one rank running and restarts it with all ranks of its step when any has failed.

The launcher asks the node's agent for the attempt in which the ranks of the step belong (`local.LaunchRequest`). It
waits for the answer and for its rank's end, whichever comes first. A failed rank ends the attempt for all: each
launcher kills its own rank and forks the next one. The agents agree on the version to resume from, as for any launch.
While a node is dead or silent no launcher begins another attempt, because Slurm then requeues the job.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from gemini_hpc import clock, lines
from gemini_hpc.client.agent_connection import AgentLost, ask_once, ask_verdict, connect
from gemini_hpc.client.joining import ATTEMPT_ENV, FAILED_ENV, STEP_ENV, derive_step_name
from gemini_hpc.client.restart_limit import Reached, RestartLimit
from gemini_hpc.core.attempts import NOTHING, End
from gemini_hpc.core.culprits import Cause
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.launch.import_log import ImportLog
from gemini_hpc.launch.placing import build_rank_environment, count_spares
from gemini_hpc.launch.rank_end import Report, describe, describe_status
from gemini_hpc.launch.rank_process import RankProcess
from gemini_hpc.launch.signals import SENT, SIGNAL_EFFECT_S, Signals, explains_status
from gemini_hpc.node.health_check import find_problem
from gemini_hpc.node.out_of_memory import OutOfMemory
from gemini_hpc.wire import local, ports

WAIT_S = 20.0  # the agent answers a waiting request by then, and is asked again
RETRY_S = 0.2  # pause before an agent that is restarting is asked again
LATER_S = 0.5  # by then a signal sent to all processes of the step has arrived here as well
TOLD_S = 2.0  # for the last message to the agent
HEALTHY_LOOK_S = 0.1  # pause between two checks whether silent nodes are back
LEAVE_S = 0.5  # for the job to continue without this node, if it does
SUSPECT_S = 30.0  # by then a silent node is declared dead, or is back


class Launcher:
    """The launcher of one rank."""

    def __init__(
        self,
        path: str,
        environ: Mapping[str, str],
        most: int,
        start: Callable[[Mapping[str, str]], RankProcess],
        imports: ImportLog,
    ) -> None:
        """Create a launcher.

        Args:
            path: Path of the agent's socket.
            environ: Environment of the step.
            most: Restarts without a newer sealed version.
            start: Starts a rank with these variables; raises `Forked` in the new process.
            imports: Log of the rank's imports.
        """
        self._path, self._environ, self._start, self._imports = path, environ, start, imports
        self._step = derive_step_name(environ)
        self._rank = environ.get("RANK") or environ.get("SLURM_PROCID") or "0"
        self._limit = RestartLimit(most)
        self._most = most
        self._spares = count_spares(environ) > 0
        self._attempt = -1 if self._spares else 0
        self._place: local.Place | None = None
        self._status = 0  # exit status of the last rank
        self._failed_at = 0.0  # Unix time at which the last attempt here was over; 0.0: none was
        self._memory = OutOfMemory()
        self._report = Report(self._fetch_ends, _say)
        self._signals = Signals()
        self._sock: socket.socket | None = None
        self._asked = False

    # ---- life ------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until the rank has succeeded or must not be restarted; return the exit status."""
        self._signals.install_handlers()
        try:
            while True:
                if self._spares and not self._trains():
                    status = self._wait()
                else:
                    self._limit.record_start(self._ask_reached())
                    self._memory.begin_attempt()
                    status = self._attend(self._start(self._build_environment()))
                if status is not None:
                    self._report.flush(wait=True)
                    self._signals.end()
                    return status
        finally:  # also in the new process, which must not share this connection
            self._hang_up()
            self._signals.close()

    def _build_environment(self) -> dict[str, str]:
        """Return the environment of this attempt.

        Ranks of the previous attempt may still exist for a moment, so this attempt's ranks meet at another port.
        """
        env = build_rank_environment(self._environ, self._place) if self._place is not None else {}
        self._rank = env.get("RANK", self._rank)
        if not self._attempt:
            return env
        env |= {STEP_ENV: f"{self._step}+{self._attempt}", ATTEMPT_ENV: str(self._attempt)}
        env[FAILED_ENV] = f"{self._failed_at:.3f}"
        port = env.get("MASTER_PORT", self._environ.get("MASTER_PORT", ""))
        if (number := parse_number(port, -1)) >= 0:
            env["MASTER_PORT"] = str(ports.compute_attempt_port(number, self._attempt))
        return env

    def _trains(self) -> bool:
        return self._place is not None and self._place.node_rank >= 0

    def _wait(self) -> int | None:
        """Wait without a rank until this node trains in another attempt, or none follows.

        Only jobs with spares have launchers without a rank. Signals are for ranks, and the agent reports their
        effect. Without an agent, a signal that asks a process to end ends the launcher.
        """
        while True:
            state = self._wait_for_message(None)
            self._signals.forget()
            if self._sock is None and self._signals.asked is not None:
                return 128 + self._signals.asked[0]
            self._report.flush()
            if state is not None and (state.over or state.done):
                if state.over:
                    _say(f"ending: {state.over}")
                return 0 if state.left_out else self._status
            if state is not None and state.attempt > self._attempt and state.place is not None:
                self._attempt, self._place = state.attempt, state.place
                return None

    def _attend(self, rank: RankProcess) -> int | None:
        """Wait until this attempt is over; return the exit status, or None if another attempt begins."""
        looked = clock.monotonic()
        while True:
            state = self._wait_for_message(rank)
            now = clock.monotonic()
            if self._signals.was_asked_since(looked) and self._has_dead_node():
                self._signals.hurry()
            looked = now  # a signal that arrives during the question counts in the next turn
            self._signals.pass_on(rank.pid)
            self._report.flush()
            self._failed_at = clock.time()
            if rank.has_ended():
                assert rank.status is not None
                return self._decide_after(rank.status, rank)
            if state is None:
                continue
            if state.over:
                return self._wait_for_end(rank, state)
            if state.attempt > self._attempt and (state.place is not None or not self._spares):
                return self._begin_next_attempt(rank, state)

    def _wait_for_end(self, rank: RankProcess, state: local.LaunchState) -> int:
        """Wait for the rank's end when no other attempt follows; return the exit status.

        A rank that received a signal has a minute to end by itself.
        """
        if not state.left_out:
            self._find_ending_signal(LATER_S)
        _say(f"rank {self._rank}: ending: {state.over}")
        while not rank.has_ended():
            if state.left_out or self._find_ending_signal() is None:
                rank.kill()
            else:
                due_s = self._signals.compute_wait_s()
                select.select([rank.fd, self._signals.fd], [], [], 1.0 if due_s is None else due_s)
                self._signals.pass_on(rank.pid)
        return 0 if state.left_out else _derive_status(rank, state)

    def _begin_next_attempt(self, rank: RankProcess, state: local.LaunchState) -> int | None:
        """Begin another attempt, or return the exit status if that attempt would end in the same way."""
        rank.kill()
        end = self._describe_end(rank) if rank.raised is not None else NOTHING  # the rank was about to end by itself
        if end.text:
            state = self._ask(self._build_request(end)) or state
        again, first = end.repeats(state.before), state.first
        if first.cause is Cause.HUNG and first.host == self._environ.get("SLURMD_NODENAME"):
            self._check_health(state)
        why_not = self._limit.judge_failure(self._ask_reached(), again=again, memory=first.memory)
        over = bool(why_not) and (again or first.cause is Cause.HUNG)  # no launcher has decided this yet
        if end.text:
            line = f"{end.text}; not starting the ranks again: {why_not}" if over else ""
            self._report.add(self._attempt, end, rank, line)
        if over:
            self._report_end(over=why_not)
            state = self._ask(self._build_request(None)) or state
        if state.over:
            return self._wait_for_end(rank, state)
        self._attempt, self._place = state.attempt, state.place
        return None

    # ---- the rank's end --------------------------------------------------------------------------------

    def _decide_after(self, status: int, rank: RankProcess) -> int | None:
        if status == 0:
            self._report_end(done=True)
            return 0
        ended = f"rank {self._rank} ended with {describe_status(status)}"
        sent = self._find_ending_signal(LATER_S if status - 128 in SENT else 0.0)
        if sent is not None and explains_status(sent, status):
            end = End(ended, Cause.CONSEQUENCE, parse_number(self._rank), min(status, 255))
            self._report.add(self._attempt, end, rank, "")
            state = self._report_end(end, over=f"{sent.name} was sent to the step", given_up=False)
            return _derive_status(rank, state)
        if not self._wait_until_healthy():
            self._report.add(self._attempt, NOTHING, rank, "")
            return status
        reached = self._ask_reached()
        end = self._describe_end(rank, reached)
        # A rank that fails because of another one reports after that rank, and then has nothing to report.
        wait_s = TOLD_S if end.cause is Cause.CONSEQUENCE else 0.0
        state = self._ask(msgspec.structs.replace(self._build_request(end), wait_s=wait_s))
        if state is not None and state.over:
            self._report.add(self._attempt, end, rank, "")
            return self._wait_for_end(rank, state)
        begun = state is not None and state.attempt > self._attempt
        again = state is not None and end.repeats(state.before if begun else state.first)
        if self._spares and begun and not again:  # the cause is a lost node, and a spare exists
            self._report.add(self._attempt, end, rank, "")
            self._status, self._place = status, None
            return None
        memory = end.memory or (begun and state is not None and state.first.memory)
        why_not = self._limit.judge_failure(reached, again=again, memory=memory)
        if why_not and not (begun and not again):
            self._report.add(self._attempt, end, rank, f"{end.text}; not starting the ranks again: {why_not}")
            self._report_end(end, over=why_not)
            self._report.flush(wait=True)
            return self._fetch_ends(self._attempt)[0].status or status
        if not begun:
            state = self._report_end(end, failed=True)
        follows = state is not None and not state.over and state.attempt > self._attempt
        line = f"{end.text}; starting all ranks again: restart {self._limit.restarts} of {self._most}"
        self._report.add(self._attempt, end, rank, line if follows else "")
        if state is None:
            _say(f"{end.text}; not starting the ranks again: no agent answers")
            return status
        self._check_health(state)
        if self._spares:  # the node's place may have changed
            self._status, self._place = status, None
            return None
        if not follows:
            _say(f"not starting the ranks again: {state.over or 'the agents do not agree'}")
            return _find_last_end(state).status or status
        rank.kill()
        self._attempt, self._place = state.attempt, state.place
        return None

    def _describe_end(self, rank: RankProcess, reached: Reached | None = None) -> End:
        """Return the evidence of the rank's end in this attempt."""
        host = self._environ.get("SLURMD_NODENAME", "")
        return describe(
            rank, parse_number(self._rank), host, reached or self._ask_reached(), self._memory, spares=self._spares
        )

    def _fetch_ends(self, attempt: int) -> tuple[End, End]:
        """Return the first end of an attempt, as the agents know it, and that of the attempt before."""
        state = self._ask(local.LaunchRequest(self._step, attempt))
        if state is None:
            return NOTHING, NOTHING
        ends = [state.last, state.first, state.before, NOTHING, NOTHING]
        back = max(0, min(state.attempt - attempt, 3))
        return ends[back], ends[back + 1]

    def _check_health(self, state: local.LaunchState) -> None:
        """Check the node's health after its rank has failed, and report a problem to the agents."""
        if not state.check or state.left_out:
            return
        began = clock.monotonic()
        problem = find_problem(state.check, lambda: self._signals.was_asked_since(began), _say)
        if problem is not None:
            _say(f"{self._environ.get('SLURMD_NODENAME', 'this node')} is not healthy: {problem.text}")
            self._ask(msgspec.structs.replace(self._build_request(None), unhealthy=problem.text))
            clock.sleep(LEAVE_S)

    def _build_request(self, end: End | None) -> local.LaunchRequest:
        """Return a request that reports this attempt."""
        cause = end.cause if end is not None else None
        return local.LaunchRequest(self._step, self._attempt, rank=parse_number(self._rank), cause=cause, end=end)

    def _find_ending_signal(self, wait_s: float = 0.0) -> signal.Signals | None:
        """Return the signal that ended the step, or None.

        This process receives the signal as well, perhaps a little later.
        """
        deadline = clock.monotonic() + wait_s
        while self._signals.last is None and clock.monotonic() < deadline:
            clock.sleep(RETRY_S / 10)
        last = self._signals.last
        if last is not None and clock.monotonic() - last[1] < SIGNAL_EFFECT_S:
            return last[0]
        return None

    def _wait_until_healthy(self) -> bool:
        """Wait while a node is silent; return False if a node is dead or no agent can tell.

        Launchers do not restart ranks then.
        """
        reported, began = False, clock.monotonic()
        while not self._signals.was_asked_since(began) and clock.monotonic() < began + SUSPECT_S:
            verdict = ask_verdict(self._path)
            if verdict is not None and verdict.dead and not verdict.spared:
                dead = ", ".join(verdict.dead)[:200]
                _say(f"rank {self._rank}: {dead} dead: not starting the ranks again before the job is requeued")
                return False
            if verdict is not None and not verdict.suspect and not verdict.dead:
                return True
            if not reported:
                reported = True
                silent = () if verdict is None else verdict.dead or verdict.suspect
                why = "the agent does not answer" if verdict is None else f"{', '.join(silent)[:200]} silent"
                _say(f"rank {self._rank}: waiting before another attempt: {why}")
            clock.sleep(HEALTHY_LOOK_S)
        return False

    def _has_dead_node(self) -> bool:
        """Return whether Slurm ends the step because of a dead node that no spare replaces."""
        verdict = ask_verdict(self._path, 0.5)
        return verdict is not None and bool(verdict.dead) and not verdict.spared

    def _ask_reached(self) -> Reached | None:
        verdict = ask_verdict(self._path)
        return None if verdict is None else Reached(verdict.sealed, verdict.begun)

    # ---- the agent -------------------------------------------------------------------------------------

    def _wait_for_message(self, rank: RankProcess | None) -> local.LaunchState | None:
        """Wait for the rank's end or the agent's message about its step; return the message."""
        try:
            sock = self._ensure_socket()
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
        dues_s = (self._imports.compute_wait_s(), self._signals.compute_wait_s(), self._report.compute_wait_s())
        waits_s = [s for s in dues_s if s is not None]
        most_s = min([*waits_s, WAIT_S if sock is not None else RETRY_S])
        ready = {fd for fd, _ in poll.poll(most_s * 1000)}
        if self._imports.fd in ready:
            self._imports.read()
        elif not ready and self._imports.compute_wait_s() == 0.0:
            self._imports.import_next()
        if sock is None or sock.fileno() not in ready:
            return None
        self._asked = False
        with suppress(OSError, msgspec.MsgspecError):
            data = sock.recv(local.MAX_PACKET_BYTES)
            reply = local.reply_decoder.decode(data) if data else None
            if isinstance(reply, local.LaunchState):
                return reply
        self._hang_up()
        clock.sleep(RETRY_S)  # the agent belongs to another incarnation or is restarting
        return None

    def _ensure_socket(self) -> socket.socket:
        if self._sock is None:
            self._sock = connect(self._path)
            self._asked = False
        return self._sock

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None

    def _report_end(
        self,
        end: End | None = None,
        *,
        failed: bool = False,
        over: str = "",
        given_up: bool = True,
        done: bool = False,
    ) -> local.LaunchState | None:
        """Report the rank's end to the agents; return the agent's answer, or None without a timely one."""
        report = msgspec.structs.replace(
            self._build_request(end),
            failed=end.text if failed and end is not None else "",
            done=done,
            over=over[:200],
            given_up=bool(over) and given_up and self._most > 0,
            wait_s=0.0 if done or over else TOLD_S,
        )
        return self._ask(report)

    def _ask(self, message: local.LaunchRequest) -> local.LaunchState | None:
        """Send a request on a connection of its own; return None if no agent answers in time."""
        deadline = clock.monotonic() + TOLD_S
        while True:
            try:
                reply = ask_once(self._path, message, 2 * TOLD_S)
                return reply if isinstance(reply, local.LaunchState) else None
            except AgentLost:
                if clock.monotonic() > deadline:
                    return None
            clock.sleep(RETRY_S)


def _find_last_end(state: local.LaunchState) -> End:
    """Return the end of the last attempt; another attempt may have begun before that one was judged."""
    return state.last if state.last.text else state.first


def _derive_status(rank: RankProcess, state: local.LaunchState | None) -> int:
    """Return the exit status if no other attempt follows.

    A victim's own status would hide the cause. srun ends the remaining ranks with SIGTERM after one has failed.
    """
    status = rank.status or 0
    victim = rank.killed or rank.cause is Cause.CONSEQUENCE or status - 128 in SENT
    first = _find_last_end(state).status if state is not None and victim else 0
    return first or status


def _say(text: str) -> None:
    lines.write_line(f"launch: {text}")
