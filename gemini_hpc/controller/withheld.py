"""The acts that the site's mode withheld, and how Slurm itself judged each of them later.

Such an act is *confirmed* if Slurm found the same fault: the node went DOWN or booted, or the job failed. It is
*refuted* if node or job lived on: a false alarm. Until then it is *open*. `doctor` prints the score.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from gemini_hpc import clock
from gemini_hpc.files import replace_file
from gemini_hpc.slurm import SlurmError
from gemini_hpc.slurm.api import SlurmReading, find_job
from gemini_hpc.slurm.facts import CANCELLED, COMPLETED, FAILED, NODE_FAIL, SLURMD_TIMEOUT_S, Job, Node

log = logging.getLogger("gemini_hpc.controller")

FILE = "withheld.json"
FENCE, REQUEUE, DRAIN = "fence", "requeue", "drain"
OPEN, CONFIRMED, REFUTED = "open", "confirmed", "refuted"
VERDICTS = (CONFIRMED, REFUTED, OPEN)
WORDS = {FENCE: "fenced", REQUEUE: "requeued for", DRAIN: "drained"}
LOOK_S = 10.0  # a job's end is visible for MinJobAge, 300 s by default
WINDOW_S = 3 * SLURMD_TIMEOUT_S  # by then Slurm itself has set a dead node DOWN
DRAIN_WINDOW_S = clock.DAY_S  # sick hardware is found by its next jobs
KEPT_S = 90 * clock.DAY_S  # the first month and what came before
MOST = 2000
MOST_BYTES = 4 << 20
_WHY_CHARS = 200


class WithheldAct(msgspec.Struct, frozen=True):
    """An act that was not done.

    Attributes:
        t: Unix time in seconds.
        act: `fence`, `requeue` or `drain`.
        job: Slurm's id of the job.
        restart: Restart count of the job.
        node: The node.
        why: The reason for the act.
        verdict: `open`, `confirmed` or `refuted`.
        evidence: The reason for the verdict.
        judged_at: Unix time of the verdict in seconds; 0.0 while it is open.
    """

    t: float
    act: str
    job: int
    restart: int
    node: str
    why: str
    verdict: str = OPEN
    evidence: str = ""
    judged_at: float = 0.0

    def is_same(self, act: str, job: int, restart: int, node: str) -> bool:
        """Return whether this is the same act: a node's drain is the same for all of its jobs while it is open."""
        if act == DRAIN:
            return (self.act, self.node, self.verdict) == (act, node, OPEN)
        return (self.act, self.job, self.restart, self.node) == (act, job, restart, node)


_decoder = msgspec.json.Decoder(list[WithheldAct])


def read_acts(path: str) -> list[WithheldAct]:
    """Return the acts, oldest first.

    Raises:
        OSError: The file could not be read; FileNotFoundError if there is none yet.
        msgspec.MsgspecError: The file is not valid.
    """
    with open(path, "rb") as f:
        return _decoder.decode(f.read(MOST_BYTES))


def count_verdicts(acts: Iterable[WithheldAct]) -> dict[str, int]:
    """Return the number of acts by verdict."""
    counts = Counter(a.verdict for a in acts)
    return {verdict: counts[verdict] for verdict in VERDICTS}


def judge_withheld(act: WithheldAct, node: Node | None, job: Job | None, now: float) -> tuple[str, str]:
    """Return Slurm's verdict on an act, and the evidence. Pure.

    Args:
        act: The act.
        node: The node as Slurm has it; None if Slurm does not know it any more.
        job: The job as Slurm has it; None if Slurm does not know it any more.
        now: Unix time in seconds.
    """
    if node is not None and node.is_down:
        return CONFIRMED, f"Slurm has {act.node} {node.state}"
    if node is not None and node.boot_time > act.t:
        return CONFIRMED, f"{act.node} has booted since"
    if act.act == DRAIN:
        if node is not None and "DRAIN" in node.flags:
            return CONFIRMED, f"{act.node} was drained"
        if now - act.t < DRAIN_WINDOW_S:
            return OPEN, ""
        return REFUTED, f"{act.node} was in service a day later"
    of_job = _judge_by_job(act, job)
    if of_job[0] != OPEN or now - act.t < WINDOW_S:
        return of_job
    if node is None:
        return CONFIRMED, f"Slurm does not know {act.node} any more"
    if "NOT_RESPONDING" in node.flags:
        return CONFIRMED, f"{act.node} does not answer Slurm"
    return REFUTED, f"{act.node} was {node.state} {WINDOW_S / 60:.0f} minutes later"


def _judge_by_job(act: WithheldAct, job: Job | None) -> tuple[str, str]:
    if job is None or job.state == CANCELLED:
        return OPEN, ""
    if job.restarts == act.restart and job.state in (FAILED, NODE_FAIL):
        return CONFIRMED, f"job {act.job} ended {job.state}"
    if job.restarts == act.restart and job.state == COMPLETED:
        return REFUTED, f"job {act.job} ended {job.state}"
    if act.act == REQUEUE and job.restarts > act.restart:
        return CONFIRMED, f"job {act.job} was requeued"
    return OPEN, ""


class Withheld:
    """The record of one controller. It survives restarts."""

    def __init__(self, directory: str, say: Callable[[int, int, str, str, str], None]) -> None:
        """Read the record.

        Args:
            directory: The setting `state_dir`.
            say: Writes job, restart, event, host and detail to a job's event log.
        """
        self._path, self._say = os.path.join(directory, FILE), say
        self._logged: set[tuple[str, int, int]] = set()
        self.acts: list[WithheldAct] = []
        try:
            self.acts = read_acts(self._path)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as exc:
            log.warning("event=withheld-not-read path=%s %s", self._path, exc)

    def record_act(self, act: str, job: int, restart: int, node: str, why: str, mode: str) -> bool:
        """Record an act that was not done; return False if it is known already.

        Args:
            act: `fence`, `requeue` or `drain`.
            job: Slurm's id of the job.
            restart: Restart count of the job.
            node: The node.
            why: The reason for the act. No text of a user.
            mode: The reason why it was not done.
        """
        if any(known.is_same(act, job, restart, node) for known in self.acts):
            return False
        self.acts.append(WithheldAct(clock.time(), act, job, restart, node, why[:_WHY_CHARS]))
        self._save()
        self._say(job, restart, "withheld", node, f"would have {WORDS[act]} {node}: {why}; {mode}")
        return True

    def log_once(self, job: int, restart: int, act: str, mode: str) -> None:
        """Log, once for each incarnation, an act that is not scored because Slurm has judged already."""
        if (act, job, restart) in self._logged:
            return
        if len(self._logged) >= MOST:
            self._logged.clear()
        self._logged.add((act, job, restart))
        self._say(job, restart, "withheld", "", f"would have {act}; {mode}")

    async def run(self, slurm: SlurmReading) -> None:
        """Judge the open acts every few seconds until cancelled."""
        while True:
            try:
                await self.judge_open(slurm)
            except SlurmError as exc:
                log.warning("withheld acts: %s", exc)
            await asyncio.sleep(LOOK_S)

    async def judge_open(self, slurm: SlurmReading) -> None:
        """Ask Slurm for nodes and jobs of the open acts, and record its verdicts.

        Raises:
            SlurmError: Slurm did not answer.
        """
        if not (pending := [a for a in self.acts if a.verdict == OPEN]):
            return
        nodes = await slurm.read_nodes()  # all nodes are read: a query for a removed node is an error
        jobs = {raw_id: await find_job(slurm, raw_id) for raw_id in {a.job for a in pending}}
        for act in pending:
            verdict, evidence = judge_withheld(act, nodes.get(act.node), jobs[act.job], clock.time())
            if verdict == OPEN:
                continue
            done = msgspec.structs.replace(act, verdict=verdict, evidence=evidence, judged_at=clock.time())
            self.acts[self.acts.index(act)] = done
            self._save()
            self._say(act.job, act.restart, "judged", act.node, f"{verdict}: {evidence}")

    def _save(self) -> None:
        since = clock.time() - KEPT_S
        self.acts = [a for a in self.acts if a.t >= since][-MOST:]
        try:
            replace_file(self._path, msgspec.json.encode(self.acts))
        except OSError as exc:
            log.warning("event=withheld-not-kept path=%s %s", self._path, exc.strerror)
