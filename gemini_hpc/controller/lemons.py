"""The controller's record of nodes that were repeatedly fenced, drained or left. It survives restarts.

An entry counts for `lemon_days`. The record alone decides nothing: such nodes are chosen last as replacements, and
`doctor` and `inspect` show them.
"""

from __future__ import annotations

import logging
import os

import msgspec

from gemini_hpc import clock
from gemini_hpc.files import replace_file
from gemini_hpc.wire.inspect_schema import LemonRow

log = logging.getLogger("gemini_hpc.controller")

FILE = "lemons.json"
MOST_NODES, MOST_VISITS = 1024, 16
AGAIN = 2  # this many entries are worth a warning
MOST_BYTES = 8 << 20
_WHY_CHARS = 150


class Visit(msgspec.Struct, frozen=True):
    """An entry of a node.

    Attributes:
        t: Unix time in seconds.
        what: `fenced` or `unhealthy`.
        job: Slurm's id of the job that ran there.
        why: The reason.
    """

    t: float
    what: str
    job: int
    why: str


Visits = dict[str, list[Visit]]
_decoder = msgspec.json.Decoder(Visits)


def read_visits(path: str, since: float) -> Visits:
    """Return the entries after `since` by node, oldest first.

    Raises:
        OSError: The file could not be read; FileNotFoundError if there is none yet.
        msgspec.MsgspecError: The file is not valid.
    """
    with open(path, "rb") as f:
        found = _decoder.decode(f.read(MOST_BYTES))
    return {node: fresh for node, visits in found.items() if (fresh := [v for v in visits if v.t >= since])}


class Lemons:
    """The record of one controller. Entries count for `days`; with 0, none count."""

    def __init__(self, directory: str, days: float) -> None:
        self._path, self._days = os.path.join(directory, FILE), days
        self._visits: Visits = {}
        if not days:
            return
        try:
            self._visits = read_visits(self._path, self._compute_since())
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as exc:
            log.warning("event=lemons-not-read path=%s %s", self._path, exc)

    def _compute_since(self) -> float:
        return clock.time() - self._days * clock.DAY_S

    def add_visit(self, node: str, kind: str, job: int, why: str) -> None:
        """Add an entry. A node that is red after several lives of one job counts once for that job."""
        visits = self._visits.get(node, [])
        if not self._days or (kind != "fenced" and any((v.what, v.job) == (kind, job) for v in visits)):
            return
        self._visits[node] = [*visits, Visit(clock.time(), kind, job, why[:_WHY_CHARS])][-MOST_VISITS:]
        while len(self._visits) > MOST_NODES:
            del self._visits[min(self._visits, key=lambda name: self._visits[name][-1].t)]
        try:
            fresh = {n: visits for n in self._visits if (visits := self._list_fresh(n))}
            replace_file(self._path, msgspec.json.encode(fresh))
        except OSError as exc:
            log.warning("event=lemons-not-kept path=%s %s", self._path, exc.strerror)

    def _list_fresh(self, node: str) -> list[Visit]:
        since = self._compute_since()
        return [visit for visit in self._visits.get(node, ()) if visit.t >= since]

    def count_visits(self, node: str) -> int:
        """Return the number of entries of a node, at most `MOST_VISITS`."""
        return len(self._list_fresh(node))

    def list_rows(self, nodes: tuple[str, ...]) -> tuple[LemonRow, ...]:
        """Return the rows of those nodes that have entries, worst first, without any text about other jobs."""
        found = [(node, visits) for node in nodes if (visits := self._list_fresh(node))]
        found.sort(key=lambda entry: (-len(entry[1]), entry[0]))
        return tuple(LemonRow(n, len(v), v[-1].t, tuple(visit.what for visit in v)) for n, v in found)
