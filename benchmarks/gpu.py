"""`python -m benchmarks.gpu`: what one GPU shows of the paths for GPUs. No cluster, no Slurm, no root; some minutes.

This script has not been run on a GPU so far. It checks bytes and measures:

    memory    device to replica memory (a memfd, pinned in place) against torch's pinned memory, and unpinned; at
              once, and as versions are copied: in pieces, on a stream of our own
    spans     the share of a version's bytes that goes in idle spans of the device, which the host runs ahead of; the
              device's wait at the optimizer; what that costs an iteration (see `gpuspans`)
    step      the host's time for the marks at collectives, optimizer and step()
    self      messages of our own NCCL communicator, of one rank to itself: bytes, rate, time of a launch
    exchange  the exchange's program on real streams: a training saves versions to itself, every byte is compared
    snapshot  what a copy of the state in each iteration costs the training: with `host` (in pieces, at once; into
              pinned and unpinned memory), with `nccl` lazily, beside the training, and eagerly, at step()

A section that fails is named, and the others go on. Not shown by one GPU: whether two ranks keep one order, and what
the network does: the collectives of `spans` are copies on the device.
Exit status: 0 if all bytes were right; 1 if not, or where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks import gpuspans
from gemini_hpc.train.device import cuda
from gemini_hpc.train.device.host_copy import HostCopies
from gemini_hpc.train.device.interface import Broken, Message
from gemini_hpc.train.device.memory import Slot
from gemini_hpc.train.device.streams import Streams
from gemini_hpc.train.nccl import capability_check
from gemini_hpc.train.nccl.collective_schedule import Chunk, Place, Program
from gemini_hpc.train.nccl.communicator import NcclCommunicator
from gemini_hpc.train.nccl.exchange import Exchange, Links, Save
from gemini_hpc.train.nccl.library import Library
from gemini_hpc.train.nccl.own_copy import OwnCopy, Piecework
from gemini_hpc.train.nccl.progress import Progress
from gemini_hpc.train.nccl.source import Piece, Tensors

MB = 1 << 20
CHUNK_BYTES, BUFFERS = 8 * MB, 4
WARM, LAYERS, WIDTH, BATCH = 3, 6, 4096, 2048
GATHERED_BYTES = 1 << 30  # copied in about a millisecond


class Wrong(Exception):
    """Bytes are not what they should be."""


def row(name: str, value: str) -> None:
    print(f"{name:<58}{value:>18}", flush=True)


def seconds(work: Callable[[], object], times: int = 5) -> float:
    """Median time of the device, from when it is idle."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def replica_memory(size_bytes: int) -> Slot:
    """As an agent gives it out."""
    fd = os.memfd_create("gemini:gpu", os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    slot = Slot(fd, size_bytes)
    slot.populate()
    return slot


def memory(size_bytes: int) -> None:
    source = torch.randint(0, 255, (size_bytes,), dtype=torch.uint8, device="cuda")
    slot = replica_memory(size_bytes)

    def rate(into: torch.Tensor) -> str:
        took_s = seconds(lambda: into.copy_(source, non_blocking=True))
        if not torch.equal(into, source.cpu()):
            raise Wrong("a copy to host memory differs")
        return f"{size_bytes / took_s / 1e9:.2f} GB/s"

    copies = HostCopies(cuda.CudaDevice(), lambda tensor: tensor.is_cuda)

    def in_pieces() -> str:
        slot.bytes.zero_()
        took_s = seconds(lambda: copies.bring(copies.mark(), [(slot.bytes, source)]))
        if not torch.equal(slot.bytes, source.cpu()):
            raise Wrong("a copy to host memory in pieces differs")
        return f"{size_bytes / took_s / 1e9:.2f} GB/s"

    row("memory: device to a memfd, not pinned", rate(slot.bytes))
    row("memory: the same in pieces", in_pieces())
    began = time.perf_counter()
    pinned = cuda.Pinned(slot.bytes)
    row("memory: pinning it", f"{(time.perf_counter() - began) / size_bytes * 2**30 * 1e3:.0f} ms/GiB")
    row("memory: device to a memfd, pinned in place", rate(slot.bytes))
    row("memory: the same in pieces", in_pieces())
    pinned.release()
    row("memory: device to torch's pinned memory", rate(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)))


def communicator(library: Library) -> NcclCommunicator:
    made = NcclCommunicator(library, 0, 1, cuda.handle)
    began = time.perf_counter()
    made.connect(library.unique_id(), 60.0)
    row("self: making the communicator", f"{(time.perf_counter() - began) * 1e3:.0f} ms")
    return made


def to_self(made: NcclCommunicator, size_bytes: int) -> None:
    stream = cuda.CudaDevice().stream()
    for size in (64 << 10, MB, CHUNK_BYTES, size_bytes):
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
        into = torch.zeros_like(source)
        launches = []

        def once(source: torch.Tensor = source, into: torch.Tensor = into, launches: list[float] = launches) -> None:
            began = time.perf_counter()
            made.exchange(stream, [Message(0, source)], [Message(0, into)])
            launches.append(time.perf_counter() - began)

        torch.cuda.synchronize()
        once()  # the first one connects
        took_s = seconds(once)
        if not torch.equal(source, into):
            raise Wrong(f"a message of {size} bytes differs")
        launch_us = statistics.median(launches) * 1e6
        row(f"self: {size >> 10} KiB, launched in {launch_us:.0f} us", f"{size / took_s / 1e9:.2f} GB/s")


class Training:
    """Matrix products and an optimizer; parameters of `size_bytes` together."""

    def __init__(self, size_bytes: int) -> None:
        width = min(WIDTH, int((size_bytes / 4 / LAYERS) ** 0.5) // 64 * 64)
        layers: list[torch.nn.Module] = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(BATCH, width, device="cuda")
        pieces: list[Piece] = []
        self.bytes = 0
        for parameter in self.model.parameters():
            pieces.append(Piece(self.bytes, parameter))
            self.bytes += parameter.nbytes
        self.tensors = Tensors(pieces)

    def pairs(self, into: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter, with its place in host memory before it."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = 0
        for parameter in self.model.parameters():
            found.append((into[at : at + parameter.nbytes].view(parameter.dtype).view_as(parameter), parameter))
            at += parameter.nbytes
        return found

    def now(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in self.model.parameters()])

    def compute(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()


class Ears:
    """What became of the exchange's operations."""

    def __init__(self) -> None:
        self.landings: list[int] = []

    def measured(self, size: int, seconds: float) -> None:
        pass

    def sent(self, version: int, whole: bool) -> None:
        pass

    def landed(self, version: int, rank: int) -> None:
        self.landings.append(version)

    def failed(self, version: int, drained: bool) -> None:
        raise Wrong(f"version {version} did not arrive")


def to_itself(size_bytes: int) -> Program:
    """Two chunks before the first of three launches, two after it, the rest at the gate."""
    chunks = [
        Chunk(number, 0, at, min(CHUNK_BYTES, size_bytes - at))
        for number, at in enumerate(range(0, size_bytes, CHUNK_BYTES))
    ]
    places = [Place(0, False, 0 if n < 2 else 1) if n < 4 else Place(0, True, 0) for n in range(len(chunks))]
    return Program(tuple(places), tuple(chunks), 1, size_bytes, 0.0, 0)


def exchange(made: NcclCommunicator, size_bytes: int, versions: int) -> None:
    device, training, ears = cuda.CudaDevice(), Training(size_bytes), Ears()
    links = Links(((0,),), (training.bytes,))
    progress = Progress(made, links.sizes, ears, print)
    pipeline = Exchange(device, made, 0, links, BUFFERS, CHUNK_BYTES, progress)
    own = OwnCopy(device, pipeline.copies)
    pipeline.follow(to_itself(training.bytes))
    progress.start()
    work = tuple(Piecework(n % 4 - 1, *cut) for n, cut in enumerate(_cuts(training.bytes)))
    work = tuple(sorted(work, key=lambda w: (w.after < 0, w.after)))
    slots, pins, right = {}, [], {}
    for name in ("own", "other"):
        slots[name] = replica_memory(training.bytes)
        pins.append(cuda.Pinned(slots[name].bytes))
    waits = []
    for version in range(1, versions + 1):
        copied = own.begin(training.tensors, slots["own"].bytes, work)
        right[version] = training.now().cpu() if version == versions else None
        pipeline.step(Save(version, training.tensors, copied, lambda rank: slots["other"].bytes))
        for number in range(3):
            pipeline.launching()
            own.launching(number)
            training.compute()
            pipeline.launched("none", None)
        began = time.perf_counter()
        own.gate()
        pipeline.gate()
        waits.append(time.perf_counter() - began)
        training.optimizer.step()
    pipeline.finish()
    ended = progress.stop(30.0)
    torch.cuda.synchronize()
    for name, slot in slots.items():
        if not ended or ears.landings[-1:] != [versions] or not torch.equal(slot.bytes, right[versions]):
            raise Wrong(f"the {name} slot is not version {versions}: {progress.problem or ears.landings}")
    for pin in pins:
        pin.release()
    row(f"exchange: {versions} versions of {training.bytes // MB} MB, all bytes right", "yes")
    row("exchange: host's time at the gate", f"{statistics.median(waits) * 1e6:.0f} us")


def _cuts(size_bytes: int) -> list[tuple[int, int]]:
    return [(at, min(CHUNK_BYTES, size_bytes - at)) for at in range(0, size_bytes, CHUNK_BYTES)]


class Layers:
    """For `gpuspans`: matrix products, and after each layer a collective of one rank: a copy on the device."""

    layers = 6

    def __init__(self, training: Training, gathered_bytes: int) -> None:
        self._training = training
        self._part = torch.zeros(gathered_bytes, dtype=torch.uint8, device="cuda")
        self._whole = torch.empty_like(self._part)

    def compute(self) -> None:
        self._training.compute()

    def collective(self) -> None:
        dist.all_gather_into_tensor(self._whole, self._part)

    def optimizer(self) -> None:
        self._training.optimizer.step()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def in_spans(size_bytes: int, iterations: int) -> None:
    """With the default transport's parts, over a link that only takes the time."""
    training = Training(size_bytes)
    slot = replica_memory(training.bytes)
    pinned = cuda.Pinned(slot.bytes)
    dist.init_process_group("nccl", rank=0, world_size=1, store=HashStore())
    try:
        copies, pairs = HostCopies(cuda.CudaDevice(), lambda tensor: tensor.is_cuda), training.pairs(slot.bytes)
        load = Layers(training, GATHERED_BYTES)
        found = gpuspans.measure(load, Streams(), copies, pairs, iterations)
        right = training.now().cpu()
        copies.bring(copies.mark(), pairs)
        if not torch.equal(slot.bytes, right):
            raise Wrong("the slot is not the state")
        gpuspans.rows(found, row)
    finally:
        dist.destroy_process_group()
        torch.cuda.synchronize()
        pinned.release()


def snapshot(size_bytes: int, iterations: int) -> None:
    device, training = cuda.CudaDevice(), Training(size_bytes)
    slot, other = replica_memory(training.bytes), replica_memory(training.bytes)
    pinned = cuda.Pinned(slot.bytes)
    lane: Any = device.stream()
    host = HostCopies(device, lambda tensor: tensor.is_cuda)
    cuts = _cuts(training.bytes)
    targets = {"host": training.pairs(slot.bytes), "host, not pinned": training.pairs(other.bytes)}

    def iteration(mode: str) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        own = OwnCopy(device, lane)
        with ExitStack() as ends:
            if mode in targets:
                thread = threading.Thread(target=host.bring, args=(host.mark(), targets[mode]))
                thread.start()
                ends.callback(thread.join)
            elif mode != "none":
                after = 0 if mode == "lazy" else -1
                own.begin(training.tensors, slot.bytes, tuple(Piecework(after, *cut) for cut in cuts))
            if mode == "eager":
                own.gate()
            own.launching(0)
            for _ in range(3):
                training.compute()
        own.gate()
        training.optimizer.step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    times: dict[str, list[float]] = {mode: [] for mode in ("none", *targets, "lazy", "eager")}
    for n in range(WARM + iterations):
        for mode, found in times.items():  # in turn, so that a change of clocks is in all of them
            took_s = iteration(mode)
            if n >= WARM:
                found.append(took_s)
    pinned.release()
    usual_s = statistics.median(times["none"])
    row("snapshot: an iteration without", f"{usual_s * 1e3:.2f} ms")
    for mode in list(times)[1:]:
        row(f"snapshot: {mode}, {training.bytes // MB} MB", f"{statistics.median(times[mode]) / usual_s - 1:+.2%}")


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=int, default=512, metavar="N", help="size of the state (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="measured (default: %(default)s)")
    args = parser.parse_args()
    if args.mb < 64 or args.iterations < 3:
        parser.error("at least 64 MB and 3 iterations are wanted")
    if not torch.cuda.is_available():
        print(
            "benchmarks.gpu: there is no CUDA device here that torch can use: nothing was measured", file=sys.stderr
        )
        return 1
    size_bytes, wrong = args.mb * MB, 0

    def section(name: str, work: Callable[[], None]) -> None:
        nonlocal wrong
        began = time.perf_counter()
        try:
            work()
        except (Wrong, Broken, gpuspans.NotMeasured, RuntimeError, OSError) as error:
            wrong += 1
            print(f"benchmarks.gpu: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        row(f"{name}: took", f"{time.perf_counter() - began:.0f} s")

    library, missing = capability_check.library()
    row(torch.cuda.get_device_name(), f"NCCL {library.version if library is not None else 'is not there'}")
    row("torch", str(torch.__version__))
    section("memory", lambda: memory(size_bytes))
    section("spans", lambda: in_spans(size_bytes, args.iterations))
    section("snapshot", lambda: snapshot(size_bytes, args.iterations))
    reason = missing or capability_check.environment()
    if reason or library is None:
        print(f"benchmarks.gpu: self, exchange: {reason}", file=sys.stderr)
        return 1
    section("nccl", lambda: over_nccl(library, size_bytes, args.iterations))
    return 1 if wrong else 0


def over_nccl(library: Library, size_bytes: int, versions: int) -> None:
    """Self and exchange."""
    made = communicator(library)
    try:
        to_self(made, size_bytes)
        exchange(made, size_bytes, versions)
    finally:
        made.abort()


if __name__ == "__main__":
    sys.exit(main())
