"""Rejecting what was loaded: all ranks meet before the first collective, so that who calls it alone hears of it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from gemini_hpc.client.agent_connection import AgentClient, AgentLost, AgentRefused
from gemini_hpc.wire import local

MEET_S = 60.0  # within which all ranks call it
TIMEOUT_S = 30.0
MOST_TEXT = 300


def meet(rank: int, world: int, call: str, occasion: str, within_s: float) -> None:
    """Return when all ranks have made this call, on the same occasion. Over the store of the process group, which
    waits for nobody's collectives. Raises RuntimeError where some have not come in time."""
    if world == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    keys = [f"gemini/{call}-{occasion}/{other}" for other in range(world)]
    store.set(keys[rank], "here")
    try:
        store.wait(keys, timedelta(seconds=within_s))
    except RuntimeError:  # DistStoreError
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        if not missing:  # the last one has come in this moment, and goes on
            return
        store.delete_key(keys[rank])
        raise RuntimeError(
            f"{call} is collective: rank {', '.join(missing[:8]) or 'of another call'} did not call it within "
            f"{within_s:g} s"
        ) from None


def record(client: AgentClient | None, message: local.Reject) -> tuple[bool, str]:
    """Whether this rank's agent has written it down, and if it will not, why; "" where there is no agent now."""
    if client is None:
        return False, ""
    try:
        client.request(message, timeout_s=TIMEOUT_S)
    except AgentRefused as error:
        return False, str(error)
    except AgentLost:
        return False, ""
    return True, ""
