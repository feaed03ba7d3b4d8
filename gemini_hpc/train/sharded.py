"""DTensors in the state of an object that is no module, an EMA of sharded parameters for instance.

Each rank keeps its part. It comes back into a DTensor like the one that the object has now, so on as many ranks as it
was saved from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor

from gemini_hpc.train.encode import Part


def has_parts(saved: Any) -> bool:
    """Whether there are parts of DTensors in a decoded state."""
    if isinstance(saved, Part):
        return True
    values = saved.values() if isinstance(saved, Mapping) else saved if isinstance(saved, (list, tuple)) else ()
    return any(has_parts(value) for value in values)


def whole(saved: Any, now: Any, where: str) -> Any:
    """The saved state with DTensors in place of their parts; `now`: the object's state at present. Raises ValueError
    where it has none there, or one whose part has another shape."""
    if isinstance(saved, Part):
        if not isinstance(now, DTensor):
            raise ValueError(f"{where} was a DTensor in the saved run, and is none now")
        if now._local_tensor.shape != saved.tensor.shape:
            was, is_ = tuple(saved.tensor.shape), tuple(now._local_tensor.shape)
            raise ValueError(
                f"{where} had a part of {was} on this rank, has {is_} now: it can only be loaded on as many ranks as "
                "it was saved from"
            )
        part = saved.tensor.to(now._local_tensor.device)
        made: DTensor = DTensor.from_local(
            part, now.device_mesh, now.placements, run_check=False, shape=now.shape, stride=now.stride()
        )
        return made
    if isinstance(saved, Mapping):
        known = now if isinstance(now, Mapping) else {}
        items = {key: whole(value, known.get(key), f"{where}[{key!r}]") for key, value in saved.items()}
        return type(saved)(items)  # type: ignore[call-arg]
    if isinstance(saved, (list, tuple)):
        there = now if isinstance(now, (list, tuple)) and len(now) == len(saved) else [None] * len(saved)
        return type(saved)(whole(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(saved, there, strict=True)))
    return saved
