"""A small classifier with a data loader, a scheduler, epochs and an evaluation: what most training scripts have.

    python train_small.py                      # one process, without Slurm
    sbatch --gemini-replicas=2 job.sh          # with "srun python train_small.py" in job.sh

The lines marked "gemini:" protect it.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import gemini_hpc as gemini

EPOCHS, BATCH = 8, 16


def spirals(points: int, seed: int) -> TensorDataset:
    """Return noisy points of two interleaved spirals, and the spiral of each point."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(points) % 2
    turn = torch.rand(points, generator=generator) * 8 + 0.5
    angle = turn + label * torch.pi
    noise = torch.randn(points, 2, generator=generator) * 0.1
    return TensorDataset(turn[:, None] * torch.stack([angle.cos(), angle.sin()], 1) + noise, label)


def main() -> None:
    gemini.set_ranks()  # gemini: RANK and WORLD_SIZE, where nobody has set them
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(2, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )
    model = DistributedDataParallel(net)
    loader = gemini.StatefulLoader(spirals(1024, 1), BATCH, rank=rank, world=world)  # gemini: knows its position
    test_points, test_labels = spirals(512, 2).tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

    traffic = gemini.Traffic(every=1, overhead=0.5)  # for steps of milliseconds only: leave it out in your training
    ckpt = gemini.Checkpointer(
        model, optimizer, scheduler, loader=loader, traffic=traffic
    )  # gemini: all that changes
    ckpt.resume()  # gemini: from the newest save, or from the beginning
    while loader.epoch < EPOCHS:
        epoch = loader.epoch
        for points, labels in loader:  # after a resume: the rest of the epoch
            loss = F.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.step()  # gemini: the last statement of the loop
        model.eval()
        with torch.no_grad():
            correct = (net(test_points).argmax(1) == test_labels).float().mean()
        model.train()
        if rank == 0:
            print(f"epoch {epoch}: {correct:.1%} of the test points are right", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), "spirals.pt")
    ckpt.close()  # gemini: the training has succeeded
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
