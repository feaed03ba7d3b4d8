"""The event log of each job: `state_dir/jobs/<raw id>.jsonl`, of bounded size.

Text from agents is bounded and escaped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from gemini_hpc import clock
from gemini_hpc.controller.journal import end_line, read_records
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.files import replace_file
from gemini_hpc.wire.inspect_schema import EventRecord
from gemini_hpc.wire.sanitize import bound_event

log = logging.getLogger("gemini_hpc.controller")

MAX_LOG_BYTES = 1 << 20
TOLD_S = 60.0  # dropped events are reported at most once in this time
KEPT_S = 14 * clock.DAY_S  # older logs are removed when the controller starts
MAX_EVENTS_AT_ONCE = 256
_CLOCK_SKEW_S = 3600.0  # an agent's time further from ours is replaced by ours
_HEAD = "owner"
_decoder = msgspec.json.Decoder(EventRecord)


def _build_head(owner: int) -> EventRecord:
    return EventRecord(clock.time(), _HEAD, "", 0, owner, "events of a job of the user with this number")


def sanitize_event(event: EventRecord, host: str) -> EventRecord:
    """Return an agent's event in a form that may be kept.

    It has the agent's own host name, bounded printable text, and a time near ours.
    """
    now = clock.time()
    return msgspec.structs.replace(bound_event(event, host), t=event.t if abs(event.t - now) < _CLOCK_SKEW_S else now)


def estimate_bytes(events: Iterable[EventRecord]) -> int:
    """Return the approximate size of these events in the file."""
    return sum(100 + len(e.name) + len(e.host) + len(e.detail) for e in events)


class EventLogs:
    """The event logs of all jobs below one directory.

    The first line of each log names the job's owner, because Slurm reuses job ids. An event that cannot be written
    is dropped and reported in the service's own log: a full disk stops no recovery.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._foreign: set[int] = set()  # jobs whose file belongs to an earlier job and could not be replaced
        self._left_out, self._reported_s = 0, -TOLD_S
        os.makedirs(directory, mode=0o700, exist_ok=True)
        old = clock.time() - KEPT_S
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            if name.endswith(".jsonl") and os.path.getmtime(path) < old:
                os.unlink(path)

    def _build_path(self, job: int) -> str:
        return os.path.join(self._directory, f"{int(job)}.jsonl")

    def claim_log(self, job: int, owner: int) -> None:
        """Ensure that the job's log belongs to this owner.

        A log of another owner is of an earlier job and is replaced.
        """
        path = self._build_path(job)
        if self._read_owner(path) != owner:
            self._foreign.add(job)
            try:
                replace_file(path, msgspec.json.encode(_build_head(owner)) + b"\n")
            except OSError as exc:
                self._leave_out(job, 0, exc)
                return
        self._foreign.discard(job)

    def find_owner(self, job: int) -> int | None:
        """Return the owner in the job's log, or None if there is no log."""
        return self._read_owner(self._build_path(job))

    def list_newest(self, most: int, since: float) -> list[tuple[int, int]]:
        """Return (job, owner) of the logs written after `since` (Unix time), newest first, at most `most`."""
        found: list[tuple[float, int]] = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                name, _, suffix = entry.name.partition(".")
                if suffix == "jsonl" and (job := parse_number(name)):
                    with suppress(FileNotFoundError):
                        found.append((entry.stat(follow_symlinks=False).st_mtime, job))
        newest = [job for t, job in sorted(found, reverse=True) if t >= since][:most]
        return [(job, owner) for job in newest if (owner := self.find_owner(job)) is not None]

    @staticmethod
    def _read_owner(path: str) -> int | None:
        with suppress(OSError, msgspec.MsgspecError), open(path, "rb") as f:
            first = _decoder.decode(f.readline(1024))
            if first.name == _HEAD and not first.host:
                return first.version
        return None

    def append_events(self, job: int, events: Iterable[EventRecord]) -> None:
        """Append events. A log that has grown too long loses its older half."""
        events = list(events)
        if job in self._foreign:
            return
        try:
            self._append(self._build_path(job), b"".join(msgspec.json.encode(e) + b"\n" for e in events))
        except OSError as exc:
            self._leave_out(job, len(events), exc)

    def _leave_out(self, job: int, events: int, exc: OSError) -> None:
        self._left_out += events
        if clock.monotonic() - self._reported_s > TOLD_S:
            self._reported_s = clock.monotonic()
            log.error("job=%d event=events-not-kept so_far=%d detail=%s", job, self._left_out, exc)

    @staticmethod
    def _append(path: str, data: bytes) -> None:
        with open(path, "a+b") as f:
            end_line(f)
            f.write(data)
            size = f.tell()
        if size > MAX_LOG_BYTES:
            with open(path, "rb") as f:
                head = f.readline(1024)
                f.seek(size - MAX_LOG_BYTES // 2)
                f.readline()
                rest = f.read()
            replace_file(path, head + rest)

    def read_events(self, job: int, owner: int) -> tuple[EventRecord, ...]:
        """Return all events of a job in order of time; none if the log does not belong to this owner."""
        path = self._build_path(job)
        events = list(read_records(path, _decoder)) if self._read_owner(path) == owner else []
        return tuple(sorted(events[1:], key=lambda e: e.t))
