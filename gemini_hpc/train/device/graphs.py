"""CUDA graphs that contain optimizer steps: their optimizers, and callbacks before capture and replay.

A capture runs the training's Python once, optimizer hooks included, and computes nothing. A replay computes and runs
no Python. So `record_capture` records an optimizer whose hook fires during a capture. Watchers are called before each
capture and replay.

torch offers no hook for either. Methods of its graph classes are therefore wrapped, once in a process. They stay
wrapped, because another library may have wrapped them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Protocol

import torch

_cuda: Any = torch.cuda  # untyped

_STEPS = "_gemini_steps"  # an attribute of the graph, not a table here: graph and optimizers may refer to each other


class Watcher(Protocol):
    """A part of a training that is called by the thread that captures or replays a graph."""

    def on_capture(self) -> None:
        """Prepare for a capture that is about to begin."""

    def on_replay(self, graph: Any) -> None:
        """Prepare for a replay of a graph that is about to begin."""


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
_under_way: weakref.WeakSet[Any] = weakref.WeakSet()
_wrapped: set[type] = set()


def watch(watcher: Watcher) -> None:
    """Call the watcher before each capture and replay from now on. The watcher is not kept alive."""
    for kind in _list_kinds():
        if kind not in _wrapped:
            _wrapped.add(kind)
            _wrap(kind)
    _watchers.add(watcher)


def unwatch(watcher: Watcher) -> None:
    """Stop calling the watcher."""
    _watchers.discard(watcher)


def record_capture(optimizer: torch.optim.Optimizer) -> bool:
    """Record the optimizer if this thread captures a graph. Return whether the thread captures.

    During a capture the optimizer's step becomes part of the graph and computes nothing.
    """
    if not is_capturing():
        return False
    for graph in tuple(_under_way):
        steps = getattr(graph, _STEPS)
        if not any(known is optimizer for known in steps):
            steps.append(optimizer)
    return True


def find_optimizers(graph: Any) -> list[torch.optim.Optimizer] | None:
    """Return the optimizers whose steps a graph contains.

    Return None for a graph that was captured before anybody watched.
    """
    return getattr(graph, _STEPS, None)


def record_optimizers(graph: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Record a graph's optimizers, found another way because the graph was captured before anybody watched."""
    setattr(graph, _STEPS, list(optimizers))


def _is_capturing() -> bool:
    return bool(_cuda.is_initialized() and _cuda.is_current_stream_capturing())


# Returns whether this thread's work becomes part of a graph. Tests replace it.
is_capturing: Callable[[], bool] = _is_capturing


def _list_kinds() -> Iterator[type]:
    yield torch.cuda.CUDAGraph
    if hasattr(torch.accelerator, "Graph"):  # not in torch 2.6
        yield torch.accelerator.Graph


def _wrap(kind: Any) -> None:
    begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

    @wraps(begin)
    def capture_begin(graph: Any, *args: Any, **named: Any) -> Any:
        for watcher in tuple(_watchers):
            watcher.on_capture()
        result = begin(graph, *args, **named)
        setattr(graph, _STEPS, [])
        _under_way.add(graph)
        return result

    @wraps(end)
    def capture_end(graph: Any, *args: Any, **named: Any) -> Any:
        _under_way.discard(graph)
        return end(graph, *args, **named)

    @wraps(replay)
    def replay_watched(graph: Any, *args: Any, **named: Any) -> Any:
        for watcher in tuple(_watchers):
            watcher.on_replay(graph)
        return replay(graph, *args, **named)

    kind.capture_begin, kind.capture_end, kind.replay = capture_begin, capture_end, replay_watched
