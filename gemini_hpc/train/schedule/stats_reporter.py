"""Reports of a rank's traffic to its agent, and the profile that is kept there for the next incarnation."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gemini_hpc import clock
from gemini_hpc.client import stats_messages
from gemini_hpc.client.agent_connection import AgentClient
from gemini_hpc.client.summary_sender import SummarySender
from gemini_hpc.core.spans import Profile
from gemini_hpc.train.schedule.overhead_monitor import Pictured
from gemini_hpc.wire import local

DRAW_EVERY_S = 30.0  # a picture is some kilobytes, and `report` shows the newest only


@dataclass(frozen=True)
class CachedProfile:
    """The profile and link values with which the next incarnation can begin.

    Attributes:
        profile: The rank's profile.
        others: Profiles of the holders with their shifts in seconds (see `spans.intersect_profiles`).
        B: Rate of the link, bytes per second.
        alpha: Startup time of a chunk, seconds.
    """

    profile: Profile
    others: list[tuple[Profile, float]]
    B: float
    alpha: float


class StatsReporter(SummarySender):
    """The reporter of one rank's traffic, used by the training's thread.

    Only `recall` waits for the agent.
    """

    def __init__(self, client: AgentClient, training_name: str, rank: int, key: str) -> None:
        """Create a reporter.

        Args:
            client: Connection to the agent.
            training_name: Name of the training.
            rank: The rank.
            key: Key of the profile, see `stats_messages.build_profile_key`.
        """
        super().__init__(client, training_name, rank)
        self._key, self._drawn_at = key, -1e9
        self._drawn: Pictured | None = None

    def rename(self, key: str) -> None:
        """Use another key from now on, because the state is distributed anew and the profile is another one."""
        self._key = key

    def send_event(self, name: str, version: int, why: str) -> None:
        """Send an entry for the job's event log."""
        self._client.queue_event(name, version, f"rank {self._rank}: {why}")

    def draw(self, picture: Pictured | None, profile: Profile | None, names: dict[int, str]) -> None:
        """Send one iteration with all its chunks and copies to the agent, every `DRAW_EVERY_S` seconds."""
        at = clock.monotonic()
        if picture is None or picture is self._drawn or at - self._drawn_at < DRAW_EVERY_S:
            return
        self._drawn, self._drawn_at = picture, at
        trace = picture.trace
        began = trace.started_s
        waits = [(trace.gate_s, trace.gate_s + picture.waited_s)] if picture.waited_s > 1e-3 else []
        state = stats_messages.build_timeline(
            version=picture.version,
            iteration_s=trace.length_s,
            gate_s=trace.gate_s,
            ops=[(names.get(op.kind, "collective"), op.start_s, op.end_s, op.bytes) for op in trace.ops],
            chunks=[
                (c.sent_at - began, c.acked_at - began, c.size, c.replica)
                for c in picture.chunks
                if c.acked_at > began and c.sent_at < began + trace.length_s
            ],
            copies=[(a - began, b - began, size) for a, b, size in picture.copies if b > began],
            waits=waits,
            spans=[(s.start_s, s.end_s) for s in profile.spans] if profile is not None else [],
        )
        self._client.post(local.Timeline(self._training_name, self._rank, state))

    def send_profile(self, kept: CachedProfile) -> None:
        """Send the profile to the agent, which keeps it for the next incarnation."""
        message = stats_messages.build_cache_bytes(
            self._training_name, self._rank, self._key, msgspec.msgpack.encode(kept)
        )
        if message is not None:
            self._client.post(message)

    def recall(self) -> CachedProfile | None:
        """Ask the agent for the profile of an earlier incarnation of the training; None if there is none."""
        data = self._client.recall(self._training_name, self._rank, self._key)
        if data is None:
            return None
        try:
            return msgspec.msgpack.decode(data, type=CachedProfile)
        except msgspec.MsgspecError:
            return None
