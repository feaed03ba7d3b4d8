"""Planner with one plan for all ranks: copies over NCCL go where the network of every rank is idle.

See `collective_schedule` for the program that follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gemini_hpc.core.spans import Profile
from gemini_hpc.train.nccl import collective_schedule
from gemini_hpc.train.nccl.collective_schedule import Joint, Terms
from gemini_hpc.train.nccl.driver import Driver
from gemini_hpc.train.schedule.chunk_schedule import Route
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.link_model import LinkMeter
from gemini_hpc.train.schedule.planner import Planner
from gemini_hpc.train.schedule.stats_reporter import CachedProfile
from gemini_hpc.train.schedule.traffic import Scheme, Traffic

_PAIRED = ("send", "recv_", "recv_any_source_")


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """A rank's message to all others.

    Attributes:
        standing: The encoded message of `planner`.
        B: Measured rate of its link, bytes per second; 0 if unknown.
        alpha: Measured startup time, seconds.
        refusal: Reason why its training cannot be followed; '' if there is none.
    """

    standing: bytes
    B: float = 0.0
    alpha: float = 0.0
    refusal: str = ""


class JointPlanner(Planner):
    """The planner for as long as all ranks use NCCL. After that it works like any other planner, for gloo."""

    def __init__(
        self,
        traffic: Traffic,
        rank: int,
        targets: Sequence[int],
        shard_bytes: int,
        meter: LinkMeter,
        kept: CachedProfile | None,
        *,
        driver: Driver,
        watch: CollectiveMonitor,
    ) -> None:
        super().__init__(traffic, rank, targets, shard_bytes, meter, kept)
        self.driver: Driver = driver
        self._watch = watch
        self._profiles: tuple[Profile, ...] = ()
        self._terms: Terms | None = None

    @property
    def meter(self) -> LinkMeter:
        """Return the meter of the link that is planned for."""
        return self._meter if self.driver.ended else self.driver.meter

    # ---- exchange between ranks ------------------------------------------------------------------------

    def encode_kept(self) -> bytes:
        """Return the encoded profile and link values of an earlier incarnation, for the other ranks."""
        kept = self._kept
        return self._pack(super().encode_kept(), kept.B if kept else 0.0, kept.alpha if kept else 0.0)

    def encode_standing(self, over_at: float) -> bytes:
        """Make the profile. Return it encoded for the other ranks, with the link values."""
        standing, meter = super().encode_standing(over_at), self.meter
        names = [self._watch.names.get(op.kind, "") for _, trace in self._usual[-1:] for op in trace.ops]
        unfit = check_operations(names, captured=self._watch.captured)
        return self._pack(standing, meter.B if meter.known else 0.0, meter.alpha, unfit)

    def _pack(self, standing: bytes, B: float, alpha: float, unfit: str = "") -> bytes:
        return standing if self.driver.ended else msgspec.msgpack.encode(_Word(standing, B, alpha, unfit))

    def remember(self, blobs: Sequence[bytes]) -> bool:
        """Take over the profiles of an earlier incarnation. Return whether they make one plan for all ranks."""
        words = [msgspec.msgpack.decode(blob, type=_Word) for blob in blobs]
        other, self._meter = self._meter, self.driver.meter  # the remembered link values are NCCL's
        try:
            whole = super().remember([word.standing for word in words])
        finally:
            self._meter = other
        if not whole or collective_schedule.check_alike(self._profiles):
            return False
        known = [word for word in words if word.B > 0]
        self._set_terms(
            min((word.B for word in known), default=0.0), max((word.alpha for word in known), default=0.0)
        )
        return self._terms is not None

    def adopt_records(self, blobs: Sequence[bytes]) -> None:
        """Take over what all ranks have recorded, or end NCCL on all ranks if one program cannot serve them."""
        if self.driver.ended:
            return super().adopt_records(blobs)
        words = [msgspec.msgpack.decode(blob, type=_Word) for blob in blobs]
        super().adopt_records([word.standing for word in words])
        self._terms = None
        unfit = next((word.refusal for word in words if word.refusal), "")
        if not unfit and len(self._profiles) == len(blobs):
            unfit = collective_schedule.check_alike(self._profiles)
            if not unfit:
                self._set_terms(min(word.B for word in words), max(word.alpha for word in words))
        if unfit:
            self.driver.end(unfit)
        return None

    def _adopt_profiles(self, profiles: Sequence[Profile]) -> None:
        super()._adopt_profiles(profiles)
        self._profiles = tuple(profiles)

    def _set_terms(self, B: float, alpha: float) -> None:
        traffic = self.traffic
        R = traffic.device_chunk_bytes * traffic.buffers
        m = len(self._targets) + 1
        self._terms = (
            Terms(self._profiles, self.driver.largest_bytes, m, R, traffic.buffers, B, alpha, traffic.mu)
            if B > 0
            else None
        )

    # ---- planning --------------------------------------------------------------------------------------

    def build_route(self, scheme: Scheme) -> Route | None:
        """Return the inputs of a plan; None without a profile or link values."""
        terms = self._terms
        if self.driver.ended or scheme != "gemini":
            return super().build_route(scheme)
        if terms is None or self.profile is None:
            return None
        return Joint(
            profile=self.profile,
            windows=collective_schedule.find_shared_windows(terms.profiles),
            C=terms.C,
            m=terms.m,
            R=terms.R,
            p=terms.p,
            B=terms.B,
            alpha=terms.alpha,
            mu=terms.mu,
            terms=terms,
        )

    def has_drifted(self, planned: Route | None) -> bool:
        """Return whether the link has changed too much for the plan; False for a program, which all ranks share.

        A rank whose link has changed does not plan anew alone.
        """
        return not isinstance(planned, Joint) and super().has_drifted(planned)

    def build_cached_profile(self) -> CachedProfile | None:
        """Return what the next incarnation needs; None if the plan is unknown."""
        if self.driver.ended:
            return super().build_cached_profile()
        if self.profile is None or self._terms is None:
            return None
        return CachedProfile(self.profile, self._others, self._terms.B, self._terms.alpha)


def check_operations(names: Sequence[str], *, captured: bool = False) -> str:
    """Return the reason why a training that launches these operations is unsuitable; '' if there is none.

    A send that precedes our operation on one rank may be a receive that follows our operation on another.

    Args:
        names: Names of the operations in torch's dispatcher.
        captured: Whether a CUDA graph has collectives.
    """
    if captured:
        return "collectives are replayed from a CUDA graph: nothing can be enqueued between them"
    paired = sorted({name for name in names if name in _PAIRED})
    if paired:
        return f"the training itself sends point to point ({', '.join(paired)}): replica copies would come in between"
    return ""
