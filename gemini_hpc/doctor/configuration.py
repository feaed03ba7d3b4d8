"""The configuration that slurmctld runs with, from `scontrol show config`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemini_hpc.doctor.finding import Unavailable

_RELEASE = re.compile(r"([0-9]{2})\.([0-9]{1,2})(?:\.([0-9]{1,3}))?")
_UNLIMITED = frozenset(("UNLIMITED", "INFINITE", "65534", "4294967294"))


@dataclass(frozen=True, slots=True, order=True)
class SlurmRelease:
    """A release of Slurm."""

    major: int
    minor: int
    micro: int

    @classmethod
    def parse(cls, text: str) -> SlurmRelease:
        """Return the release in a text such as `slurm-wlm 22.05.8`. Raises `Unavailable`."""
        found = _RELEASE.search(text)
        if not found:
            raise Unavailable(f"cannot find Slurm's release in {text[:60]!r}")
        return cls(int(found[1]), int(found[2]), int(found[3] or 0))

    @property
    def series(self) -> tuple[int, int]:
        """Return the major and minor number, for which a plugin must be built."""
        return self.major, self.minor

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02}.{self.micro}"


class Configuration:
    """The keys and values of a configuration; a key that this release does not print is empty."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> str:
        return self._values.get(key, "")

    def list_values(self, key: str) -> list[str]:
        """Return the values of `Key`, or of `Key[0]`, `Key[1]`, ... as printed by later releases."""
        found = [v for k, v in self._values.items() if re.fullmatch(rf"{key}(\[[0-9]+\])?", k)]
        return [v for v in found if v]

    def parse_words(self, key: str) -> dict[str, str]:
        """Return a list of `word` and `word=value`, separated by commas or semicolons; words in lower case."""
        parts = [p.strip() for p in re.split(r"[,;]", self[key]) if p.strip()]
        return {name.lower(): value for name, _, value in (p.partition("=") for p in parts)}

    def parse_number(self, key: str) -> float | None:
        """Return a number, such as that of `60 sec`; infinity if it is unlimited, None if it is absent."""
        first = self[key].split()[0] if self[key].split() else ""
        if first.upper() in _UNLIMITED:
            return float("inf")
        return float(first) if re.fullmatch(r"[0-9]{1,15}", first) else None

    @property
    def controllers(self) -> list[str]:
        """Return the short names of slurmctld's hosts, the primary first."""
        return [host.partition("(")[0].partition(".")[0] for host in self.list_values("SlurmctldHost")]

    @property
    def release(self) -> SlurmRelease:
        """Return slurmctld's release. Raises `Unavailable`."""
        return SlurmRelease.parse(self["SLURM_VERSION"])
