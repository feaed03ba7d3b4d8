"""A few elements of each tensor, spread over it: cheap enough for every version, and enough to see that a tensor was
written as a whole behind the version counter's back (through `.data`, as public EMA classes swap weights)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

MOST = 8
# Tensors take turns, as each costs a microsecond. Weights are what is swapped for an evaluation, all of them at once.
PARAMETERS, OTHERS = 512, 128  # that are sampled for one version
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def few(view: torch.Tensor, *, flat: bool) -> torch.Tensor:
    """A one-dimensional view, as integers, of about MOST elements, less than twice as many. flat: spread over all
    dimensions (of a contiguous view), else along the longest one. Tensors of one shape are sampled at the same
    places."""
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
    except RuntimeError:  # bits of a kind that cannot be seen as integers, a conjugated view: not sampled
        return torch.empty(0, dtype=torch.uint8, device="cpu")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and type are the same, bit for bit (a zero has a sign, a NaN is itself)."""
    try:
        if a.element_size() == 16:
            return torch.equal(*(torch.view_as_real(t).view(torch.int64) for t in (a, b)))
        kind = _AS_INTEGERS[a.element_size()]
        return torch.equal(a.detach().view(kind), b.detach().view(kind))
    except RuntimeError:
        return False


class Places:
    """Where some tensors are sampled. Those of one device and element size are read together."""

    def __init__(self, fews: Sequence[torch.Tensor], members: Iterable[int]) -> None:
        """fews: of each tensor; members: numbers of those that count."""
        self._kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number in members:
            line = fews[number]
            if line.numel():
                self._kinds.setdefault((line.device, line.dtype), []).append(number)
        self.count = sum(map(len, self._kinds.values()))
        self._lines = [[fews[number] for number in numbers] for numbers in self._kinds.values()]

    def read(self) -> list[torch.Tensor]:
        """What is there now, by kind."""
        return [torch.cat(lines) for lines in self._lines]

    def differing(self, read: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[int]:
        """Numbers of the tensors of which `targets`, the samples of copies in host memory, are not what was read."""
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
    """The places of one version after the other, of some of the tensors."""

    def __init__(self, fews: Sequence[torch.Tensor], members: Sequence[int], most: int) -> None:
        """most: of the members that have their turn in one version."""
        self._fews, self._members = fews, members
        self._every = max(1, -(-len(members) // most))
        self._made: dict[int, Places] = {}

    def of(self, version: int) -> Places:
        """Those of this version."""
        turn = version % self._every
        if turn not in self._made:
            self._made[turn] = Places(self._fews, self._members[turn :: self._every])
        return self._made[turn]
