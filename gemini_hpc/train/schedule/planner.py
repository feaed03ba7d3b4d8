"""Plan of one rank, made from its recorded iterations, the profiles of its holders, and its link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

import msgspec

from gemini_hpc.core import spans
from gemini_hpc.core.save_interval import Need, OverheadController, choose_frequency
from gemini_hpc.core.schedule import compute_transfer_s
from gemini_hpc.core.spans import Profile, Trace
from gemini_hpc.train.schedule.chunk_schedule import PAUSE_SHARES, Route, cut_beginnings, find_common_windows
from gemini_hpc.train.schedule.device_copies import DeviceCopies
from gemini_hpc.train.schedule.link_model import LinkMeter
from gemini_hpc.train.schedule.stats_reporter import CachedProfile
from gemini_hpc.train.schedule.traffic import Scheme, Traffic

BLOB_BYTES = 16384
_KEPT_SPANS = 384
_LEAST_TRACES = 3
_ROOM = 0.02  # share of an iteration
_SPARE = 1.1  # times a copy must fit where the beginnings of spans are left out
_RARE = 4  # iterations: from this j on, one iteration more matters less than the disturbance of each version
_LINK_DRIFT = 0.25
_SIZE_DRIFT = 0.3
_COST_DRIFT = 0.5  # share of the capture's cost, or of the ceiling
_CHUNK_S = 0.008  # longest chunk on slow links: others queue less, and both directions interleave better
_FINEST, _MOST_CHUNKS = 16, 1 << 16
# Unless the user sets a size, chunks are fitted to the link. Each costs some 0.3 ms of processors at both ends, at
# any size. On a fast link a chunk is therefore so large that its transfer takes several times as long. The paper's R
# is 128 MB in 4 parts.
LEAST_CHUNK_BYTES, MOST_BYTES = 1 << 20, 128 << 20
_WORTH_S = 0.0024  # eight times a chunk's fixed cost


class _Standing(msgspec.Struct, frozen=True, array_like=True):
    """A rank's message about its iterations.

    Attributes:
        profile: The rank's profile, if there is one.
        started_s: Beginning of the newest recorded iteration, in seconds after the end of the ranks' last round.
        version: Version of that iteration.
    """

    profile: Profile | None = None
    started_s: float = 0.0
    version: int = 0


class Planner:
    """The planner of one rank's versions: profile, route, j and s.

    Attributes:
        traffic: The user's settings.
        driver: Copies over NCCL that follow the plans; None: over the host.
    """

    driver: DeviceCopies | None = None

    def __init__(
        self,
        traffic: Traffic,
        rank: int,
        targets: Sequence[int],
        shard_bytes: int,
        meter: LinkMeter,
        kept: CachedProfile | None,
        *,
        whole: bool = False,
        on_host: bool = False,
    ) -> None:
        """Create a planner.

        Args:
            traffic: The user's settings.
            rank: The rank.
            targets: Ranks that this rank's copies go to.
            shard_bytes: Bytes of one copy.
            meter: Meter of the link.
            kept: Profile and link values of an earlier incarnation.
            whole: Whether chunks keep their size on a slow link, because each is cut to what is left of its span.
            on_host: Whether the training computes on the host. The beginnings of spans are then left out if possible,
                so as not to disturb it.
        """
        self._whole_chunks = whole
        self.traffic, self._rank, self._targets, self._C = traffic, rank, tuple(targets), shard_bytes
        self._meter, self._kept = meter, kept
        self._clean: dict[int, list[tuple[int, Trace]]] = {}
        self._others: list[tuple[Profile, float]] = []
        self._on_host, self._left_out = on_host, 0.0
        self._whole = False  # this rank's and all targets' profiles are known
        self.profile: Profile | None = None
        self.controller: OverheadController | None = None
        self.longest_s = 1.0  # the longest iteration of all ranks
        self.own_s = 0.0  # seconds of the training's thread that a version takes
        self.fixed_s = 0.0  # seconds between step() and seal in which nothing travels
        self.lag_s = 0.0  # seconds by which the latest versions are late
        self.seals_late = False  # j follows from the time to the seal more than from what travels

    @property
    def meter(self) -> LinkMeter:
        """Return the meter of the link that is planned for."""
        return self._meter

    def resize(self, shard_bytes: int) -> None:
        """Plan for copies of `shard_bytes` bytes from now on."""
        self._C = shard_bytes

    def adjust_size(self, least: int, most: int) -> bool:
        """Compare the sizes of the last copies with the planned size. Return whether the planned size has changed.

        A holder may already have a part of a copy, which is then not sent.

        Args:
            least: Fewest bytes that one of the last copies took on the network.
            most: Most bytes; 0 if unknown.
        """
        if not most or (most >= (1 - _SIZE_DRIFT) * self._C and least <= (1 + _SIZE_DRIFT) * self._C):
            return False
        self._C = max(1, most)
        return True

    # ---- profiling -------------------------------------------------------------------------------------

    def discard_iterations(self) -> None:
        """Discard the recorded iterations."""
        self._clean = {}

    def record_iteration(self, version: int, trace: Trace) -> None:
        """Record an iteration that had no traffic of ours before the optimizer."""
        self._clean.setdefault(spans.hash_pattern(trace.ops), []).append((version, trace))

    @property
    def _usual(self) -> list[tuple[int, Trace]]:
        return max(self._clean.values(), key=len, default=[])

    @property
    def clean(self) -> int:
        """Return the number of recorded iterations of the usual pattern."""
        return len(self._usual)

    # ---- exchange between ranks ------------------------------------------------------------------------

    def encode_kept(self) -> bytes:
        """Return the encoded profile of an earlier incarnation, for the other ranks."""
        return msgspec.msgpack.encode(_Standing(None if self._kept is None else self._kept.profile))

    def encode_standing(self, over_at: float) -> bytes:
        """Make the profile. Return it encoded for the other ranks.

        Args:
            over_at: Time at which the ranks' last round ended (CLOCK_MONOTONIC).
        """
        traces = self._usual
        self.profile = None
        if len(traces) >= _LEAST_TRACES:
            self.profile = spans.summarize_traces([trace for _, trace in traces], keep=_KEPT_SPANS)
        if self.profile is None:
            return msgspec.msgpack.encode(_Standing())
        version, trace = traces[-1]
        return msgspec.msgpack.encode(_Standing(self.profile, trace.started_s - over_at, version))

    def remember(self, blobs: Sequence[bytes]) -> bool:
        """Take over the profiles of an earlier incarnation. Return whether they make a plan on all ranks.

        A rank on a new node has no profile. It takes another rank's, provided that all known profiles are of one
        pattern.
        """
        known = [msgspec.msgpack.decode(blob, type=_Standing).profile for blob in blobs]
        profiles = [profile for profile in known if profile is not None]
        if not profiles or (len(profiles) < len(known) and len({p.pattern for p in profiles}) > 1):
            return False
        self._adopt_profiles(profiles)
        self._whole = True
        if self._kept is not None:
            self.profile, self._others = self._kept.profile, self._kept.others
            self._meter.seed(self._kept.B, self._kept.alpha)
        else:
            self.profile = profiles[0]
            self._others = [(known[rank] or profiles[0], 0.0) for rank in self._targets]
        return True

    def adopt_records(self, blobs: Sequence[bytes]) -> None:
        """Take over what all ranks have recorded."""
        standings = [msgspec.msgpack.decode(blob, type=_Standing) for blob in blobs]
        self._adopt_profiles([s.profile for s in standings if s.profile is not None])
        ranks = {rank: self._as_planned(s) for rank, s in enumerate(standings) if s.profile is not None}
        self.profile, self._others = None, []
        self._whole = all(rank in ranks for rank in (self._rank, *self._targets))
        if not self._whole:
            return
        self.profile, started_s, version = ranks[self._rank]
        shifts = {}
        for rank, (profile, at, number) in ranks.items():
            apart = (number - version) * self.profile.iteration_s
            shifts[rank] = 0.0 if profile.pattern == self.profile.pattern else at - started_s - apart
        # no version is sealed before all ranks' are: the first rank that waits for its seal waits for all
        gate_s = min(shifts[rank] + profile.gate_s for rank, (profile, _, _) in ranks.items())
        for rank in self._targets:
            self._others.append((replace(ranks[rank][0], gate_s=gate_s - shifts[rank]), shifts[rank]))

    def _as_planned(self, standing: _Standing) -> tuple[Profile, float, int]:
        """Return a rank's profile, and its newest iteration's start and number, as if it waited for no other rank.

        All ranks then take the same time: a rank with shorter iterations is taken to wait at the beginning of an
        iteration instead of at the optimizer.
        """
        assert standing.profile is not None
        lag_s = self.longest_s - standing.profile.iteration_s
        if lag_s <= _ROOM * self.longest_s:
            return standing.profile, standing.started_s, standing.version
        return spans.add_lag(standing.profile, lag_s), standing.started_s - lag_s, standing.version

    def _adopt_profiles(self, profiles: Sequence[Profile]) -> None:
        self.longest_s = max((p.iteration_s for p in profiles), default=1.0)

    def build_cached_profile(self) -> CachedProfile | None:
        """Return what the next incarnation needs; None if the plan or the link is unknown."""
        if self.profile is None or not self._whole or not self._meter.known:
            return None
        return CachedProfile(self.profile, self._others, self._meter.B, self._meter.alpha)

    # ---- planning --------------------------------------------------------------------------------------

    @property
    def cut(self) -> tuple[int, int]:
        """Return the largest size of a chunk in bytes, and the number of buffers of that size.

        On a slow link chunks get smaller and buffers more numerous. Their memory, R, stays the same.
        """
        p, B = self.traffic.buffers, self._meter.B
        size = self.traffic.chunk_bytes or self._choose_chunk_bytes(B, p)
        if self._whole_chunks:
            return size, p
        fine = 1
        finest = min(_FINEST, max(1, _MOST_CHUNKS * size // max(1, self._C)))
        while 2 * fine <= finest and self._meter.known and size / fine > _CHUNK_S * B:
            fine *= 2
        return max(1, size // fine), p * fine

    def _choose_chunk_bytes(self, B: float, p: int) -> int:
        """Return the power of two that is the best size of a chunk, given its startup cost.

        Args:
            B: Rate of the link, bytes per second.
            p: Number of chunks that must fit into R, and into a part of this rank's shard.
        """
        most = max(LEAST_CHUNK_BYTES, min(MOST_BYTES // p, self._C // (2 * p)))
        size = LEAST_CHUNK_BYTES
        while self._meter.known and 2 * size <= min(most, B * _WORTH_S):
            size *= 2
        return size

    def build_route(self, scheme: Scheme) -> Route | None:
        """Return the inputs of a plan; None without a profile or measurements of the link."""
        meter = self._meter
        if self.profile is None or not self._whole or not meter.known:
            return None
        size, p = self.cut
        R = size * p
        windows = find_common_windows(self.profile, self._others)
        return Route(
            profile=self.profile,
            windows=cut_beginnings(windows, self._left_out) if self._left_out else windows,
            C=self._C,
            m=len(self._targets) + 1,
            R=self._C if scheme == "naive" else R,
            p=p if scheme == "gemini" else 1,
            B=meter.B,
            alpha=meter.alpha,
            mu=self.traffic.mu,
        )

    def has_drifted(self, planned: Route | None) -> bool:
        """Return whether the link has changed too much for the plan."""
        return planned is not None and not 1 - _LINK_DRIFT < self._meter.B / planned.B < 1 + _LINK_DRIFT

    def choose_interval(self, j: int, *, fresh: bool) -> tuple[int, int]:
        """Return the j and s that this rank needs.

        Args:
            j: The j in effect.
            fresh: Whether the profile or the link has changed since the last call.
        """
        if fresh:
            self._choose_left_out()
        route, profile = self.build_route("gemini"), self.profile
        if route is None or profile is None:
            return max(1, self.traffic.every), 1
        need = self._build_need(route, profile)
        usual_s, ceiling = profile.iteration_s, self.traffic.overhead
        self.seals_late = need(1) > max(0.0, _derive_need(route)(1))
        known = self.controller
        if known is not None and abs(known.iteration_s / usual_s - 1) > ceiling / 2:
            known = None  # the apparent overhead was the training's own change of pace
        if known is not None and j > 1 and not fresh and not self.traffic.every and not known.extra_s + known.fixed_s:
            # the link may have been measured at a bad moment: with room to spare, save more often again
            roomy = choose_frequency(lambda s: need(s) + _ROOM * usual_s, usual_s, ceiling=ceiling, own_s=self.own_s)
            known = None if roomy.j < j else known
        if known is None:
            known = OverheadController(
                need, usual_s, ceiling=ceiling, forced=self.traffic.every or None, own_s=self.own_s
            )
        elif fresh or self._is_dearer(known) or self._is_slower(known, need):
            known.replan(need, usual_s, self.own_s)
        elif self.lag_s:
            known.add_extra(self.lag_s)
        self.lag_s = 0.0
        self.controller = known
        return known.frequency.j, known.frequency.s

    def _is_dearer(self, known: OverheadController) -> bool:
        """Return whether the capture's cost differs so much from the planned cost that a new plan is needed."""
        most_s = max(self.own_s, known.own_s, self.traffic.overhead * known.iteration_s)
        return abs(self.own_s - known.own_s) > _COST_DRIFT * most_s

    def _is_slower(self, known: OverheadController, need: Callable[[int], float]) -> bool:
        """Return whether seals come so much later than planned that the ceiling is exceeded."""
        j, s = known.frequency.j, known.frequency.s
        return need(s) - max(0.0, known.need(s)) > self.traffic.overhead * j * known.iteration_s

    def _build_need(self, route: Route, profile: Profile) -> Callable[[int], float]:
        """Return the function that gives the seconds by which a version is late when it may take s iterations.

        The delay comes either from what travels in idle windows, or from the whole time between step() and seal.
        """
        travels, iteration_s = _derive_need(route), profile.iteration_s
        whole_s = self.fixed_s + compute_transfer_s(route.C * (route.m - 1), route.B, route.start_s) - profile.gate_s
        known = self.fixed_s > 0

        def compute_late_s(s: int) -> float:
            return max(travels(s), whole_s - (s - 1) * iteration_s) if known else travels(s)

        return compute_late_s

    def _choose_left_out(self) -> None:
        """Choose how much of the beginnings of spans to leave out.

        Versions must remain as frequent and as soon, with time to spare: spans vary, and the training waits for what
        does not fit. Where versions are rare anyway, j may grow by one iteration.
        """
        self._left_out = 0.0
        if not self._on_host:
            return
        route, profile = self.build_route("gemini"), self.profile
        if route is None or profile is None:
            return
        usual_s, ceiling, forced = profile.iteration_s, self.traffic.overhead, self.traffic.every or None
        most = choose_frequency(_derive_need(route), usual_s, ceiling=ceiling, forced=forced, own_s=self.own_s)
        if not most.within:
            return
        rarer = 1 if not forced and most.j >= _RARE else 0
        for s in (most.s, *([most.j + 1] * rarer)):
            for share in PAUSE_SHARES:
                left = replace(route, windows=cut_beginnings(route.windows, share))
                if _derive_need(replace(left, C=ceil(_SPARE * left.C)))(s) > 0:
                    continue
                if (
                    s <= most.s
                    or choose_frequency(_derive_need(left), usual_s, ceiling=ceiling, own_s=self.own_s).j == s
                ):
                    self._left_out = share
                    return


def _derive_need(route: Route) -> Need:
    return Need.from_windows(route.usable, route.C, route.m, route.R, route.p, route.B, route.start_s, route.mu)
