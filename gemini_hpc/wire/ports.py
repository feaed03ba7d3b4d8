"""Where an agent listens: ports that follow from the job id, so that peers find each other without a third party."""

from __future__ import annotations

from gemini_hpc.config import Settings

PROBES = 16
_MASTER_BASE = 24000
_MASTER_BLOCKS = 500


def candidates(settings: Settings, job: int) -> list[int]:
    """TCP ports that a job's agent may listen on, in the order in which it tries them."""
    count = max(PROBES, settings.agent_port_count)
    return [settings.agent_port_base + (job * PROBES + k) % count for k in range(PROBES)]


def master_port(job: int, restart: int) -> int:
    """Base of MASTER_PORT of an incarnation; the SPANK plugin adds the step id modulo 16."""
    return _MASTER_BASE + (job * 7 + restart) % _MASTER_BLOCKS * PROBES
