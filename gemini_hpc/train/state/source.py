"""A tensor of which a rank keeps pieces, as found last."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gemini_hpc.train.state.sample import have_same_bits, sample_elements
from gemini_hpc.train.state.tensors import select_box


class StateChangedError(Exception):
    """The training state no longer has the planned shape."""


@dataclass
class TensorSource:
    """A tensor with pieces in this rank's shard."""

    key: str
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]  # (offset in the local tensor, size)
    first_piece: int
    shape: torch.Size
    dtype: torch.dtype
    parameter: bool
    may_stay: bool = False  # see `Leaf.may_stay`
    eager: bool = False  # copied at step()
    ptr: int = -1
    base: torch.Tensor | None = None  # the tensor's part in this process
    whole: torch.Tensor | None = None  # the same tensor, or the DTensor around it
    views: list[torch.Tensor] = field(default_factory=list)
    flats: list[bool] = field(default_factory=list)  # is each view contiguous
    fews: list[torch.Tensor] = field(default_factory=list)  # the sampled places of each view
    staging: list[torch.Tensor] = field(default_factory=list)
    since: int = 0  # the version with which the tensor changed last; 0: unknown
    token: tuple[int, ...] = ()  # its version counters at that version

    def bind(self, tensor: torch.Tensor) -> None:
        """Use this tensor from now on.

        Raises:
            StateChangedError: The tensor has another shape or type.
        """
        if not self.fits(tensor):
            raise StateChangedError(self.describe_mismatch(tensor))
        self.ptr, self.base, self.token = tensor.data_ptr(), tensor, ()
        detached = tensor.detach()
        self.views = [select_box(detached, offset, size) for offset, size in self.boxes]
        self.flats = [view.is_contiguous() for view in self.views]
        self.fews = [sample_elements(view, flat=flat) for view, flat in zip(self.views, self.flats, strict=True)]

    def is_at(self, tensor: torch.Tensor) -> bool:
        """Return whether the source has the memory of this tensor, maybe through another object."""
        base = self.base
        return base is not None and self.ptr == tensor.data_ptr() and base.stride() == tensor.stride()

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether this tensor has the planned shape and type."""
        return tensor.shape == self.shape and tensor.dtype == self.dtype

    def describe_mismatch(self, tensor: torch.Tensor) -> str:
        """Return the reason why this tensor does not fit."""
        return f"{self.key} was {tuple(self.shape)} {self.dtype}, is {tuple(tensor.shape)} {tensor.dtype} now"

    def copy_to_staging(self, version: int, *, compare: bool) -> None:
        """Copy the tensor into staging memory now.

        Args:
            version: The version.
            compare: Copy only pieces that have changed, and leave `since` as it is if none has. Pieces on a device
                count as changed.
        """
        if not self.staging:
            self.staging, self.since = [view.contiguous().clone() for view in self.views], version
            return
        for stage, view in zip(self.staging, self.views, strict=True):
            if not compare or view.is_cuda or not have_same_bits(stage, view):
                self.since = version
                stage.copy_(view)
