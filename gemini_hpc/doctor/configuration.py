"""The configuration that slurmctld runs with, as `scontrol show config` tells it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemini_hpc.doctor.finding import Unavailable

_RELEASE = re.compile(r"([0-9]{2})\.([0-9]{1,2})(?:\.([0-9]{1,3}))?")
_UNLIMITED = frozenset(("UNLIMITED", "INFINITE", "65534", "4294967294"))


@dataclass(frozen=True, slots=True, order=True)
class Release:
    """A release of Slurm."""

    major: int
    minor: int
    micro: int

    @classmethod
    def parse(cls, text: str) -> Release:
        """From `slurm-wlm 22.05.8` or the like. Raises `Unavailable`."""
        found = _RELEASE.search(text)
        if not found:
            raise Unavailable(f"cannot find Slurm's release in {text[:60]!r}")
        return cls(int(found[1]), int(found[2]), int(found[3] or 0))

    @property
    def series(self) -> tuple[int, int]:
        """What a plugin must be built for."""
        return self.major, self.minor

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02}.{self.micro}"


class Configuration:
    """Keys and values; a key that this release does not print is empty."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> str:
        return self._values.get(key, "")

    def all(self, key: str) -> list[str]:
        """The values of `Key` or, as later releases print several, of `Key[0]`, `Key[1]`, ..."""
        found = [v for k, v in self._values.items() if re.fullmatch(rf"{key}(\[[0-9]+\])?", k)]
        return [v for v in found if v]

    def words(self, key: str) -> dict[str, str]:
        """A list of `word` and `word=value`, separated by commas (or semicolons); words in lower case."""
        parts = [p.strip() for p in re.split(r"[,;]", self[key]) if p.strip()]
        return {name.lower(): value for name, _, value in (p.partition("=") for p in parts)}

    def number(self, key: str) -> float | None:
        """A number, such as that of `60 sec`; infinite where it is without limit, None where it is not there."""
        first = self[key].split()[0] if self[key].split() else ""
        if first.upper() in _UNLIMITED:
            return float("inf")
        return float(first) if re.fullmatch(r"[0-9]{1,15}", first) else None

    @property
    def controllers(self) -> list[str]:
        """Short names of the hosts of slurmctld, the primary first."""
        return [host.partition("(")[0].partition(".")[0] for host in self.all("SlurmctldHost")]

    @property
    def release(self) -> Release:
        """slurmctld's. Raises `Unavailable`."""
        return Release.parse(self["SLURM_VERSION"])
