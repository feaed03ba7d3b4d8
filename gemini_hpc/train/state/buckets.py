"""DDP's gradient buckets after a resume: a cause of different last bits, and its remedy.

DDP reduces its first synchronised backward pass in one bucket. Then it rebuilds its buckets once, in the order in
which gradients arrived. A ring all-reduce of three or more ranks adds the ranks' numbers in an order that depends on
an element's place in its bucket. So the first iteration of a fresh process rounds differently from the same iteration
of the uninterrupted run.

Therefore the order of arrival of the first backward pass is part of the captured state. At resume, one backward pass
of zeros in that order makes DDP rebuild the same buckets before training goes on.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


def rebuilds_buckets(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP rebuilds its buckets in a way that `replay` can repeat."""
    return not (ddp.find_unused_parameters or ddp.static_graph or getattr(ddp, "mixed_precision", None) is not None)


def _list_reduced(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters that DDP reduces, in its order (that of `named_parameters`, each once)."""
    ignored = ddp.parameters_to_ignore
    return [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]


def _find_sparse(ddp: DistributedDataParallel) -> set[int]:
    """Return the ids of the parameters for which DDP expects sparse gradients.

    The rule is that of DDP's constructor: the first module that has a parameter decides.
    """
    first: dict[int, torch.nn.Module] = {}
    for module in ddp.module.modules():
        for p in module.parameters(recurse=False):
            first.setdefault(id(p), module)
    kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
    return {number for number, module in first.items() if isinstance(module, kinds) and module.sparse}


def _build_zero_gradient(p: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    """Return a gradient of zeros, or a sparse one without any rows, as an embedding would give it."""
    if not sparse:
        return torch.zeros_like(p)
    rows = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    values = torch.empty((0, *p.shape[1:]), dtype=p.dtype, device=p.device)
    return torch.sparse_coo_tensor(rows, values, p.shape, device=p.device, check_invariants=True, is_coalesced=True)


class ArrivalOrder:
    """A recorder of the order in which a DDP module's gradients arrive in its first synchronised backward pass."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self._params = _list_reduced(ddp)
        self._sparse = _find_sparse(ddp)
        self._seen: dict[int, None] = {}
        self._order: list[int] = []
        self._hooks: list[RemovableHandle] = []
        if rebuilds_buckets(ddp):
            reference = weakref.ref(self)
            self._hooks = [
                p.register_post_accumulate_grad_hook(partial(_on_arrival, reference, index))  # type: ignore[no-untyped-call]
                for index, p in enumerate(self._params)
            ]

    def _record_arrival(self, index: int) -> None:
        if self.ddp.require_backward_grad_sync and not self._order:
            self._seen[index] = None
            if len(self._seen) == len(self._params):
                self._order = list(self._seen)

    def stop(self) -> None:
        """Remove the hooks. The recorded order stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def order(self) -> list[int]:
        """Return the parameter indices in order of arrival; empty before a whole pass was recorded."""
        return self._order

    def replay(self, order: list[int]) -> bool:
        """Make DDP rebuild its buckets as after a backward pass with this order of arrival.

        The call is collective over the module's process group. It leaves gradients as they were.

        Args:
            order: Parameter indices in order of arrival.

        Returns:
            False where the order does not apply to this module.
        """
        if not rebuilds_buckets(self.ddp) or sorted(order) != list(range(len(self._params))):
            return False
        self.stop()
        kept = [p.grad for p in self._params]
        for p in self._params:
            p.grad = None
        with torch.enable_grad():
            self.ddp.reducer.prepare_for_backward([])
            for index in order:
                p = self._params[index]
                torch.autograd.backward(p, _build_zero_gradient(p, sparse=id(p) in self._sparse))
            rebuilt = bool(self.ddp.reducer._rebuild_buckets())
        for p, grad in zip(self._params, kept, strict=True):
            p.grad = grad
        self._order = list(order)
        return rebuilt


def _on_arrival(recorder: weakref.ref[ArrivalOrder], index: int, _param: torch.Tensor) -> None:
    order = recorder()
    if order is not None:
        order._record_arrival(index)
