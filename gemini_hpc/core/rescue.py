"""Bounds of a rescue from live replicas, equal for agents, ranks and the controller."""

from __future__ import annotations

LIMIT_S = 20.0  # longest time that a rescue pauses ranks and holds back the step's end or the requeue
