"""The controller's journal on disk: its planned and completed actions, one JSON line each.

See requirements budget and one-controller. A line with phase `before` is on disk before its action starts. A
restarted controller reads from it which recoveries were left open and how many nodes were fenced lately.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, NamedTuple, TypeVar

import msgspec

from gemini_hpc import clock
from gemini_hpc.files import replace_file

T = TypeVar("T")
_COMPACT_BYTES = 1 << 20
_KEEP_S = clock.DAY_S  # a compacted journal keeps lines of the last day


NODES = "nodes"  # the key of lines that belong to no recovery


class JournalRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the journal.

    Attributes:
        t: Unix time in seconds.
        key: `raw job id.restart`, or `nodes`.
        step: For a recovery: open, reserve, take, down, requeue, pin, start, detach, delete, evict or close. For
            the key `nodes`: drain, resume or alert.
        phase: `before` or `after` the action; `withheld` if the mode forbids it, so that it only counts.
        data: Further facts of the step.
    """

    t: float
    key: str
    step: str
    phase: str
    data: dict[str, str | int | float | list[str]] = {}


_decoder = msgspec.json.Decoder(JournalRecord)


class Action(NamedTuple):
    """An action on a node: it was set DOWN, drained or resumed, or is about to be.

    `user_id` is the owner of the job; None if the action is for no job, and in lines of older versions.
    """

    t: float
    node: str
    user_id: int | None


def _parse_action(record: JournalRecord) -> Action:
    user_id = record.data.get("user_id")
    return Action(record.t, str(record.data.get("node", "")), user_id if isinstance(user_id, int) else None)


def read_records(path: str, decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    """Yield the lines of a file that can be decoded; none if there is no file."""
    with suppress(FileNotFoundError), open(path, "rb") as f:
        for line in f:
            with suppress(msgspec.MsgspecError):  # a line cut short by a crash
                yield decoder.decode(line)


def end_line(file: IO[bytes]) -> None:
    """End a line that a crash cut short. Otherwise the next line would be lost with it."""
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


class Journal:
    """An append-only file that one controller writes."""

    def __init__(self, path: str) -> None:
        self._path = path
        records = list(read_records(path, _decoder))
        self._actions: dict[str, list[Action]] = {"down": [], "drain": [], "resume": []}
        self._open: dict[str, list[JournalRecord]] = {}
        for record in records:
            self._apply_record(record)
        self._compact(records)
        self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115 (open for the life of the controller)
        end_line(self._file)

    def _apply_record(self, record: JournalRecord) -> None:
        if record.phase in ("before", "withheld") and record.step in self._actions:
            self._remember(record.step, _parse_action(record))
        if record.step == "open":
            # The recovery was opened again, now to act: resources held ahead must still be released.
            self._open[record.key] = [record, *self._open.get(record.key, ())]
        elif record.step == "close":
            self._open.pop(record.key, None)
        elif record.key in self._open:
            self._open[record.key].append(record)

    def _remember(self, step: str, action: Action) -> None:
        """Keep the actions of the last day, and of earlier ones each node's last."""
        actions, fresh = self._actions[step], clock.time() - _KEEP_S
        last = {a.node: a for a in [*actions, action]}
        self._actions[step] = [a for a in actions if a.t >= fresh or a is last[a.node]] + [action]

    def _compact(self, records: list[JournalRecord]) -> None:
        if not os.path.exists(self._path) or os.path.getsize(self._path) < _COMPACT_BYTES:
            return
        fresh = clock.time() - _KEEP_S
        kept = [r for r in records if r.t >= fresh or r.key in self._open]
        replace_file(self._path, b"".join(msgspec.json.encode(r) + b"\n" for r in kept), durable=True)

    def write_line(self, key: str, step: str, phase: str, **data: str | int | float | list[str]) -> None:
        """Append one line. The line is on disk on return."""
        record = JournalRecord(clock.time(), key, step, phase, data)
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self._apply_record(record)

    def count_fenced(self, window_s: float, *, user_id: int | None = None, without: str = "") -> int:
        """Return the number of nodes fenced (or about to be) within the last `window_s` seconds.

        With `user_id`, only nodes of that user's jobs count. The node `without` does not count.
        """
        since = clock.time() - window_s
        counted = {a.node for a in self._actions["down"] if a.t >= since and user_id in (None, a.user_id)}
        return len(counted - {without})

    def count_drained(self, window_s: float) -> int:
        """Return the number of nodes drained (or about to be) within the last `window_s` seconds."""
        since = clock.time() - window_s
        return len({a.node for a in self._actions["drain"] if a.t >= since})

    def read_fence_times(self) -> dict[str, float]:
        """Return the time at which each node was last fenced, in Unix seconds, as far as the journal goes back."""
        return dict(sorted(((a.node, a.t) for a in self._actions["down"]), key=lambda entry: entry[1]))

    def count_given_back(self, node: str, window_s: float) -> int:
        """Return how often a node was returned to service within the last `window_s` seconds."""
        since = clock.time() - window_s
        return sum(1 for a in self._actions["resume"] if a.node == node and a.t >= since)

    def read_open(self) -> dict[str, list[JournalRecord]]:
        """Return the recoveries without an end: their key and their lines."""
        return {key: list(records) for key, records in self._open.items()}

    def close(self) -> None:
        """Close the file."""
        self._file.close()
