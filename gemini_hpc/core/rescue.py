"""Bounds of a rescue from live replicas, alike for agents, ranks and the controller."""

from __future__ import annotations

LIMIT_S = 20.0  # ranks stand still, the step is not ended, and the job not requeued, for no longer
