"""Ports of agents and ranks, derived from the job id so that no third party has to be asked."""

from __future__ import annotations

from gemini_hpc.config import Settings

PROBES = 16
_MASTER_BASE = 24000
_MASTER_BLOCKS = 500
_STEPS = 16


def list_candidates(settings: Settings, job: int) -> list[int]:
    """Return the TCP ports that a job's agent may listen on, in the order of its attempts."""
    count = max(PROBES, settings.agent_port_count)
    return [settings.agent_port_base + (job * PROBES + k) % count for k in range(PROBES)]


def compute_master_port(job: int, restart: int) -> int:
    """Return the base of MASTER_PORT of an incarnation, from 24000 to 31984.

    The plugin computes the same (`slurm/ports.h`).
    """
    return _MASTER_BASE + (job * 7 + restart) % _MASTER_BLOCKS * _STEPS


def compute_step_port(base: int, step: int) -> int:
    """Return MASTER_PORT of a step: 16 consecutive steps have different ports."""
    return base + step % _STEPS


def compute_attempt_port(first: int, attempt: int) -> int:
    """Return MASTER_PORT of an attempt in a step whose first attempt used `first`."""
    port = first + _STEPS * attempt
    return port if port < 65536 else 1024 + port % 64512
