"""Detection of replicated tensors that are no longer the same on all ranks that have them.

Ranks keep parts of a replicated tensor (of DDP, or of a part that HSDP has twice) for each other. This is right only
while the tensor is the same everywhere. Equality in the first `step()` proves little: a training with local steps
averages its replicas only now and then. A parameter that DDP does not reduce drifts apart. So the ranks compare a few
elements again in each round of words.

The words of a round describe samples taken when the round before began, because reading a device's memory must not
hold up the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import xxhash

from gemini_hpc.train.state.ownership import TensorEntry
from gemini_hpc.train.state.sample import sample_elements
from gemini_hpc.train.state.tensors import pass_bytes

_GROUPS = 8  # groups of ranks compared in one round
_TENSORS = 256  # tensors of a group compared in one round
_NOTHING = -(1 << 62)


class Divergence:
    """The comparison of replicated tensors on a rank.

    Every rank makes one from the same entries and calls it in the same rounds.
    """

    def __init__(self, gathered: Sequence[Sequence[TensorEntry]], alone: frozenset[str], rank: int) -> None:
        """Find the groups of ranks that have the same tensors.

        Args:
            gathered: The shared entries of all ranks. Entries lifted out of the small state are ignored, because
                ranks may have seen different versions of them last.
            alone: Keys of tensors that are each rank's own.
            rank: This rank.
        """
        holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for number, part in enumerate(gathered):
            for entry in part:
                if entry.print and entry.key not in alone and not entry.lifted:
                    holders.setdefault((entry.key, entry.offset, entry.size), []).append(number)
        groups: dict[tuple[int, ...], list[str]] = {}
        for (key, _, _), ranks in holders.items():
            if len(ranks) > 1:
                groups.setdefault(tuple(ranks), []).append(key)
        self._groups = sorted((ranks, sorted(keys)) for ranks, keys in groups.items())
        self._rank = rank
        self._round = 0
        self._samples: list[list[torch.Tensor] | None] = []
        self._event: torch.cuda.Event | None = None
        self._device: torch.device | None = None

    @property
    def count(self) -> int:
        """Return the number of words in a round."""
        return 2 * min(_GROUPS, len(self._groups))

    def compute_words(self, tensors: Mapping[str, torch.Tensor]) -> list[int]:
        """Return this rank's words for the round that starts now, and sample for the next round.

        Each group of ranks has two words. They are equal but for the sign where all its ranks have the same samples.

        Args:
            tensors: The present tensors by key, sampled for the next round.
        """
        digests = self._compute_digests()
        self._sample_tensors(tensors)
        return [word for digest in digests for word in ((digest, -digest) if digest else (_NOTHING, _NOTHING))]

    def _sample_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._samples, self._device, self._event = [], None, None
        number, self._round = self._round, self._round + 1
        for ranks, keys in self._choose_groups(number):
            if self._rank not in ranks:
                self._samples.append(None)
                continue
            every = -(-len(keys) // _TENSORS)
            sampled = [tensors[key] for key in keys[number % every :: every] if key in tensors]
            lines = [sample_elements(tensor, flat=tensor.is_contiguous()) for tensor in sampled]
            self._device = next((line.device for line in lines if line.is_cuda), self._device)
            kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for line in lines:
                kinds.setdefault((line.device, line.dtype), []).append(line)
            self._samples.append([torch.cat(found) for found in kinds.values()])
        if self._device is not None:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(self._device))

    def _choose_groups(self, number: int) -> list[tuple[tuple[int, ...], list[str]]]:
        """Return the groups that have their turn in this round."""
        if len(self._groups) <= _GROUPS:
            return self._groups
        first = number * _GROUPS % len(self._groups)
        return (self._groups + self._groups)[first : first + _GROUPS]

    def _compute_digests(self) -> list[int]:
        """Return the digests of the last samples, by group; 0 for groups without this rank."""
        if not self._samples:
            return [0] * min(_GROUPS, len(self._groups))
        stream = torch.cuda.Stream(self._device) if self._event is not None else None  # type: ignore[no-untyped-call]
        if stream is not None and self._event is not None:
            stream.wait_event(self._event)
        found = []
        with torch.cuda.stream(stream):
            for samples in self._samples:
                if samples is None:
                    found.append(0)
                    continue
                hasher = xxhash.xxh3_64()
                for sample in samples:
                    pass_bytes(sample, hasher.update)
                found.append(hasher.intdigest() >> 2 | 1)
        return found

    @staticmethod
    def shows_difference(words: Sequence[int]) -> bool:
        """Return whether the round has found a difference.

        Args:
            words: The largest value of each word over all ranks.
        """
        pairs = zip(words[::2], words[1::2], strict=True)
        return any(high != -low for high, low in pairs if high != _NOTHING)
