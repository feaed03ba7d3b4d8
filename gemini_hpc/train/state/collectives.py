"""The few collectives that the checkpointer itself needs: bytes from every rank to every rank. No pickle."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors for this group's collectives must live."""
    if "gloo" in str(dist.get_backend_config(group)) or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Collective: what every rank gave, in rank order. From the training's main thread only."""
    world = dist.get_world_size(group)
    device = _device(group)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(world)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(n.item()) for n in lengths]
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device="cpu")
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    padded = padded.to(device)
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return [part[:size].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def gather_word(value: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Collective: one 64-bit number from every rank."""
    device = _device(group)
    mine = torch.tensor([value], dtype=torch.int64, device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [int(part.item()) for part in parts]


class TorchRanks:
    """All ranks of torch.distributed's default group; one, where there is none. A `client.session.Ranks`."""

    def __init__(self) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world = dist.get_world_size() if distributed else 1

    def all(self, data: bytes) -> list[bytes]:
        """Collective: what every rank gave, by rank."""
        return gather_bytes(data)
