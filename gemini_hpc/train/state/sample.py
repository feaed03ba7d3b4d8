"""Samples of tensors: a few elements of each, spread over it.

Samples are cheap enough for every version. They are enough to see that a tensor was written as a whole behind the
version counter's back (through `.data`, as public EMA classes swap weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

MOST = 8
# Tensors take turns, as each costs a microsecond. Weights may be swapped for an evaluation, all of them at once.
PARAMETERS, OTHERS = 512, 128  # tensors of each kind that are sampled for one version
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample_elements(view: torch.Tensor, *, flat: bool) -> torch.Tensor:
    """Return a one-dimensional view, as integers, of about MOST elements, less than twice as many.

    Tensors of the same shape are sampled at the same places.

    Args:
        view: The tensor, or a view of it.
        flat: Spread the samples over all dimensions (for a contiguous view); else along the longest one.
    """
    line = view.detach()
    if flat or not view.numel():
        line = line.reshape(-1)
    else:
        longest = max(range(line.ndim), key=lambda dim: line.shape[dim])
        for dim in reversed(range(line.ndim)):
            if dim != longest:
                line = line.select(dim, line.shape[dim] // 2)
    count = line.numel()
    if count > MOST:  # at odd distances, so that the samples of a matrix are not all in one column
        line = line[:: (count - 1) // MOST | 1]
    try:
        if line.element_size() == 16:
            line = torch.view_as_real(line)[:, 0]
        return line.view(_AS_INTEGERS[line.element_size()])
    except RuntimeError:  # no integer view (odd bits, a conjugated view): not sampled
        return torch.empty(0, dtype=torch.uint8, device="cpu")


def have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of the same shape and type are equal, bit for bit.

    A zero has a sign here, and a NaN equals itself.
    """
    try:
        if a.element_size() == 16:
            return torch.equal(*(torch.view_as_real(t).view(torch.int64) for t in (a, b)))
        kind = _AS_INTEGERS[a.element_size()]
        return torch.equal(a.detach().view(kind), b.detach().view(kind))
    except RuntimeError:
        return False


class Places:
    """The sampled places of some tensors. Those of the same device and element size are read together."""

    def __init__(self, fews: Sequence[torch.Tensor], members: Iterable[int]) -> None:
        """Group the places.

        Args:
            fews: The sampled view of each tensor, see `sample_elements`.
            members: Numbers of the tensors to sample.
        """
        self._kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number in members:
            line = fews[number]
            if line.numel():
                self._kinds.setdefault((line.device, line.dtype), []).append(number)
        self.count = sum(map(len, self._kinds.values()))
        self._lines = [[fews[number] for number in numbers] for numbers in self._kinds.values()]

    def read(self) -> list[torch.Tensor]:
        """Return the present elements, by device and type."""
        return [torch.cat(lines) for lines in self._lines]

    def find_differing(self, read: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[int]:
        """Return the numbers of the tensors whose copies differ from the elements read.

        Args:
            read: The elements, as `read` returned them.
            targets: Samples of the copies in host memory, by number of the tensor.
        """
        found = []
        for numbers, taken in zip(self._kinds.values(), read, strict=True):
            then, now = taken.cpu(), torch.cat([targets[number] for number in numbers])
            if torch.equal(then, now):
                continue
            sizes = [targets[number].numel() for number in numbers]
            pairs = zip(numbers, torch.split(then, sizes), torch.split(now, sizes), strict=True)
            found += [number for number, a, b in pairs if not torch.equal(a, b)]
        return found


class Turns:
    """The places sampled, where tensors take turns."""

    def __init__(self, fews: Sequence[torch.Tensor], members: Sequence[int], most: int) -> None:
        """Deal the members into turns.

        Args:
            fews: The sampled view of each tensor.
            members: Numbers of the tensors that take turns.
            most: The most members whose turn it is in one version.
        """
        self._fews, self._members = fews, members
        self._every = max(1, -(-len(members) // most))
        self._made: dict[int, Places] = {}

    def choose_places(self, turn: int) -> Places:
        """Return the places of this turn."""
        turn %= self._every
        if turn not in self._made:
            self._made[turn] = Places(self._fews, self._members[turn :: self._every])
        return self._made[turn]
