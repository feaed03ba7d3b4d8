"""CUDA graphs without CUDA: the operations that are dispatched in a capture are kept, and done again at each replay.

As on a device, a capture changes no tensor and draws no random number, what is computed has its memory for good, and
nobody may ask for a value. All else is Python's, and runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gemini_hpc.train.device import graphs


class FakeGraph:
    """Stands where `torch.cuda.CUDAGraph` does."""

    under_way: ClassVar[FakeGraph | None] = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._recorder = _Recorder(self)
        self._generator = torch.empty(0)
        self.tell: Callable[[str], object] = lambda what: None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert FakeGraph.under_way is None
        self.tell("captured")
        self.calls, self._before, self._generator = [], {}, torch.get_rng_state()
        FakeGraph.under_way = self
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)
        FakeGraph.under_way = None
        for storage, before in self._before.values():
            storage.copy_(before)
        torch.set_rng_state(self._generator)

    def replay(self) -> None:
        assert FakeGraph.under_way is None
        self.tell("replayed")
        with torch.no_grad():
            for call in self.calls:
                call()

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep what is there: schemas do not name all that is written (batch_norm's statistics)."""
        storage = tensor.untyped_storage()
        self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = [t for t in tree_leaves((args, named)) if isinstance(t, torch.Tensor)]
        for tensor in given:
            self._graph.uses(tensor)
        known = {t.untyped_storage().data_ptr() for t in given}
        out = func(*args, **named)
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        new = [t for t in made if t.untyped_storage().data_ptr() not in known]
        if new or func._schema.is_mutable:

            def call() -> None:
                again = [t for t in tree_leaves(func(*args, **named)) if isinstance(t, torch.Tensor)]
                for into, tensor in zip(made, again, strict=True):
                    if any(into is one for one in new):
                        into.copy_(tensor)

            self._graph.calls.append(call)
        return out


@contextmanager
def capture(graph: Any) -> Iterator[None]:
    """Stands where `torch.cuda.graph` does."""
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def install(put: Callable[[Any, str, Any], None]) -> None:
    """Put a class of graphs that nobody has wrapped where torch has its own: with `setattr`, or a test's."""
    put(torch.cuda, "CUDAGraph", type("CUDAGraph", (FakeGraph,), {}))
    put(graphs, "is_capturing", lambda: FakeGraph.under_way is not None)
