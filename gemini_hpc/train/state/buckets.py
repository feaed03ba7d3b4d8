"""DDP's gradient buckets after a resume: why a resumed run could differ in its last bits, and what we do.

DDP reduces its first synchronised backward pass in one bucket and then, once, rebuilds its buckets in the order in
which gradients arrived. A ring all-reduce of three or more ranks adds the ranks' numbers in an order that depends
on an element's place in its bucket; so the first iteration of a fresh process rounds differently from the same
iteration of the uninterrupted run. Therefore: the order of arrival of the first backward pass is part of the captured
state, and at resume one backward pass of zeros in that order makes DDP rebuild the same buckets before training
goes on.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


def rebuilds(ddp: DistributedDataParallel) -> bool:
    """True where DDP rebuilds its buckets in a way that `replay` can repeat."""
    return not (ddp.find_unused_parameters or ddp.static_graph or getattr(ddp, "mixed_precision", None) is not None)


def _reduced(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that DDP reduces, in its order (the order of `named_parameters`, each once)."""
    ignored = ddp.parameters_to_ignore
    return [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]


def _sparse(ddp: DistributedDataParallel) -> set[int]:
    """Return the ids of the parameters for which DDP expects sparse gradients, by the rule of its constructor: the
    first module that has a parameter decides."""
    first: dict[int, torch.nn.Module] = {}
    for module in ddp.module.modules():
        for p in module.parameters(recurse=False):
            first.setdefault(id(p), module)
    kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
    return {number for number, module in first.items() if isinstance(module, kinds) and module.sparse}


def _nothing(p: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    """Return a gradient of zeros; sparse: one without any rows, as an embedding would give it."""
    if not sparse:
        return torch.zeros_like(p)
    rows = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    values = torch.empty((0, *p.shape[1:]), dtype=p.dtype, device=p.device)
    return torch.sparse_coo_tensor(rows, values, p.shape, device=p.device, check_invariants=True, is_coalesced=True)


class ArrivalOrder:
    """Records in which order a DDP module's gradients arrive in its first synchronised backward pass."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self._params = _reduced(ddp)
        self._sparse = _sparse(ddp)
        self._seen: dict[int, None] = {}
        self._order: list[int] = []
        self._hooks: list[RemovableHandle] = []
        if rebuilds(ddp):
            me = weakref.ref(self)
            self._hooks = [
                p.register_post_accumulate_grad_hook(partial(_arrived, me, index))  # type: ignore[no-untyped-call]
                for index, p in enumerate(self._params)
            ]

    def _note(self, index: int) -> None:
        if self.ddp.require_backward_grad_sync and not self._order:
            self._seen[index] = None
            if len(self._seen) == len(self._params):
                self._order = list(self._seen)

    def stop(self) -> None:
        """Take the hooks away (no effect on what has been recorded)."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def order(self) -> list[int]:
        """Parameter indices in order of arrival; empty until a whole pass has been seen."""
        return self._order

    def replay(self, order: list[int]) -> bool:
        """Collective over the module's process group: make DDP rebuild its buckets as after a backward pass with
        this order of arrival. Gradients are left as they were. False where it does not apply."""
        if not rebuilds(self.ddp) or sorted(order) != list(range(len(self._params))):
            return False
        self.stop()
        kept = [p.grad for p in self._params]
        for p in self._params:
            p.grad = None
        with torch.enable_grad():
            self.ddp.reducer.prepare_for_backward([])
            for index in order:
                p = self._params[index]
                torch.autograd.backward(p, _nothing(p, sparse=id(p) in self._sparse))
            rebuilt = bool(self.ddp.reducer._rebuild_buckets())
        for p, grad in zip(self._params, kept, strict=True):
            p.grad = grad
        self._order = list(order)
        return rebuilt


def _arrived(recorder: weakref.ref[ArrivalOrder], index: int, _param: torch.Tensor) -> None:
    me = recorder()
    if me is not None:
        me._note(index)
