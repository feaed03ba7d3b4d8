"""The few collectives that the checkpointer itself needs: bytes from every rank to every rank. No pickle."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from gemini_hpc import clock

_CPU = torch.device("cpu")
# Of our own groups: each use has a bound of its own. A receive may wait for as long as an iteration takes, and gloo
# closes the link when one times out.
_FOREVER = timedelta(days=1)
_RETURN_S, _RETURN_POLL_S = 1.0, 5e-5  # gloo lets go within microseconds, unless its thread has no processor
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


def _get_default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _choose_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which tensors for this group's collectives must be."""
    if _CPU in group._device_types or not torch.cuda.is_available():
        return _CPU
    return torch.device("cuda", torch.cuda.current_device())


class LentTensors:
    """CPU tensors that one collective of gloo uses, from before its start until gloo has let go of them.

    gloo's own thread drops its references after the collective is over, and needs the interpreter's lock for that. A
    process that ends in between aborts ("terminate called without an active exception") and loses its exit status.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = self._count_references()

    def _count_references(self) -> list[tuple[int, int]]:
        """Return the references of Python and of C++ to each tensor. torch's release decides which are gloo's."""
        return [(sys.getrefcount(tensor), tensor._use_count()) for tensor in self._tensors]  # type: ignore[attr-defined]

    def await_return(self, patience_s: float = _RETURN_S) -> bool:
        """Wait until gloo has let go of the tensors, and return whether it has."""
        deadline = clock.monotonic() + patience_s
        while any(
            python > python_before or native > native_before
            for (python, native), (python_before, native_before) in zip(
                self._count_references(), self._before, strict=True
            )
        ):
            if clock.monotonic() > deadline:
                return False
            clock.sleep(_RETURN_POLL_S)
        return True


def _gather_tensors(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    lent = LentTensors([tensor, *parts] if tensor.device == _CPU else [])
    group.allgather([parts], [tensor]).wait()
    lent.await_return()
    return parts


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the data of every rank, in rank order.

    The call is collective, and only the training's main thread may make it.
    """
    group = group if group is not None else _get_default_group()
    device = _choose_device(group)
    lengths = _gather_tensors(torch.tensor([len(data)], dtype=torch.int64, device=device), group)
    sizes = [int(n.item()) for n in lengths]
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device="cpu")
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = _gather_tensors(padded.to(device), group)
    return [part[:size].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def gather_word(value: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return a 64-bit number from every rank, in rank order. The call is collective."""
    group = group if group is not None else _get_default_group()
    parts = _gather_tensors(torch.tensor([value], dtype=torch.int64, device=_choose_device(group)), group)
    return [int(part.item()) for part in parts]


def build_own_group(within: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Make a gloo group of our own, of the ranks of a group.

    The call is collective over these ranks only, and torch.distributed does not know the new group. `dist.new_group`
    instead requires every rank of the world to make the same groups.

    Args:
        within: The group whose ranks take part; None for all ranks.
    """
    base = within if within is not None else _get_default_group()
    number = next(_made.setdefault(base, itertools.count()))
    store = PrefixStore(f"gemini/{number}", dist.distributed_c10d._get_process_group_store(base))
    rank, size, kind = base.rank(), base.size(), dist.ProcessGroup.BackendType.GLOO
    made = dist.ProcessGroup(store, rank, size)
    made._set_default_backend(kind)
    made._register_backend(_CPU, kind, dist.ProcessGroupGloo(store, rank, size, _FOREVER))
    return made


class TorchRanks:
    """The ranks of a torch.distributed process group, as `client.session.Ranks`.

    The default is the default group; without torch.distributed, a single rank.

    Attributes:
        members: Rank of each member in the world.
    """

    subject = "training"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.world, self.members = 0, 1, [0]
        if dist.is_available() and dist.is_initialized():
            self.group = group if group is not None else _get_default_group()
            self.rank, self.world = self.group.rank(), self.group.size()
            self.members = dist.get_process_group_ranks(self.group)

    def gather_data(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, by rank. The call is collective."""
        return gather_bytes(data, self.group)

    def exit_process(self, status: int) -> NoReturn:
        """End this process with a status."""
        raise SystemExit(status)
