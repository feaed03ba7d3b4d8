"""`python -m benchmarks.gpu`: what one GPU shows of the paths for GPUs. No cluster, no Slurm, no root; some minutes.

It was run on one H100 in November 2026, without the sections `graphs` and `digest`; `--fake` only shows that it runs.
It checks bytes and measures:

    memory    device to replica memory (a memfd, pinned in place) against torch's pinned memory, and unpinned; at
              once, and as versions are copied: in pieces, on a stream of our own
    digest    digests of a slot's pieces, made from the tensors on the device: that they are the processor's digests
              of the slot's bytes; rate; an iteration with and without them, in turns; Triton is needed
    spans     the share of a version's bytes that goes in idle spans of the device, which the host runs ahead of; the
              device's wait at the optimizer; what that costs an iteration (see `gpuspans`)
    step      the host's time for the marks at collectives, optimizer and step()
    self      messages of our own NCCL communicator, of one rank to itself: bytes, rate, time of a launch
    exchange  the exchange's program on real streams: a training saves versions to itself, every byte is compared
    snapshot  what a copy of the state in each iteration costs the training: with `host` (in pieces, at once; into
              pinned and unpinned memory), with `nccl` lazily, beside the training, and eagerly, at step()
    graphs    a training whose whole step is one CUDA graph, killed and resumed: every loss, weight and optimizer
              state is compared

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

from benchmarks import gpugraphs, gpuspans
from benchmarks.gpudevice import Fake, Gpu, Machine
from benchmarks.gpudigest import PieceDigests, Placed
from benchmarks.gpudigest import read_digests as device_digests
from gemini_hpc.core.digest import PIECE_BYTES, PIECE_DIGEST_BYTES, Digest
from gemini_hpc.train.device.host_copy import HostCopies
from gemini_hpc.train.device.interface import Broken, Communicator, Message
from gemini_hpc.train.device.memory import TensorSlot
from gemini_hpc.train.nccl.collective_schedule import Chunk, Place, Program
from gemini_hpc.train.nccl.exchange import Exchange, Links, Save
from gemini_hpc.train.nccl.own_copy import OwnCopy, Piecework
from gemini_hpc.train.nccl.progress import Progress
from gemini_hpc.train.nccl.source import Piece, Tensors

MB = 1 << 20
CHUNK_BYTES, BUFFERS = 8 * MB, 4
WARM, LAYERS, WIDTH = 3, 6, 4096
LEAST_DIGESTED_BYTES = 4 * MB
LEAST_MB, LEAST_FAKE_MB, LEAST_ITERATIONS = 64, 1, 3


class Wrong(Exception):
    """Bytes are not what they should be."""


def seconds(on: Machine, work: Callable[[], object], times: int = 5) -> float:
    """Median time of the device, from when it is idle."""
    found = []
    for _ in range(times):
        on.synchronize()
        began = time.perf_counter()
        work()
        on.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def replica_memory(size_bytes: int) -> TensorSlot:
    """As an agent gives it out."""
    fd = os.memfd_create("gemini:gpu", os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    slot = TensorSlot(fd, size_bytes)
    slot.populate()
    return slot


def memory(on: Machine, size_bytes: int) -> None:
    source = torch.randint(0, 255, (size_bytes,), dtype=torch.uint8, device=on.place)
    slot = replica_memory(size_bytes)

    def rate(into: torch.Tensor) -> str:
        took_s = seconds(on, lambda: into.copy_(source, non_blocking=True))
        if not torch.equal(into, source.cpu()):
            raise Wrong("a copy to host memory differs")
        return f"{size_bytes / took_s / 1e9:.2f} GB/s"

    copies = HostCopies(on.device(), lambda tensor: True)

    def in_pieces() -> str:
        slot.bytes.zero_()
        took_s = seconds(on, lambda: copies.bring(copies.record_mark(), [(slot.bytes, source)]))
        if not torch.equal(slot.bytes, source.cpu()):
            raise Wrong("a copy to host memory in pieces differs")
        return f"{size_bytes / took_s / 1e9:.2f} GB/s"

    on.row("memory: device to a memfd, not pinned", rate(slot.bytes))
    on.row("memory: the same in pieces", in_pieces())
    began = time.perf_counter()
    pinned = on.pin(slot.bytes)
    on.row("memory: pinning it", f"{(time.perf_counter() - began) / size_bytes * 2**30 * 1e3:.0f} ms/GiB")
    on.row("memory: device to a memfd, pinned in place", rate(slot.bytes))
    on.row("memory: the same in pieces", in_pieces())
    pinned.release()
    on.row("memory: device to torch's pinned memory", rate(on.pinned(size_bytes)))


def digests(on: Machine, size_bytes: int, iterations: int) -> None:
    """Measure digests made by the device. The fake device gets pieces enough, too."""
    if reason := on.undigested():
        raise Wrong(reason)
    training = Training(on, max(size_bytes, LEAST_DIGESTED_BYTES))
    slot = replica_memory(training.bytes)
    for into, source in training.pairs(slot.bytes):
        into.copy_(source)
    placed, at = [], 0
    for parameter in training.model.parameters():
        placed.append(Placed(at, parameter))
        at += parameter.nbytes
    made = PieceDigests(placed, placed[0].tensor.device)
    hasher = Digest()
    hasher.update(slot.bytes.numpy().data)
    right = hasher.pieces[: len(made.numbers) * PIECE_DIGEST_BYTES]
    if b"".join(device_digests(made.begin())) != right:
        raise Wrong("the device's digests are not those of the slot")
    on.row(f"digest: {len(made.numbers)} pieces, equal to the processor's", "yes")
    on.row("digest: rate", f"{len(made.numbers) * PIECE_BYTES / seconds(on, made.begin) / 1e9:.1f} GB/s")

    def iteration(with_digests: bool) -> float:
        on.synchronize()
        began = time.perf_counter()
        if with_digests:
            on.beside(made.begin)
        for _ in range(3):
            training.compute()
        on.synchronize()  # the optimizer waits for the digests
        training.optimizer.step()
        on.synchronize()
        return time.perf_counter() - began

    times: dict[bool, list[float]] = {False: [], True: []}
    for n in range(WARM + iterations):
        for mode, found in times.items():  # in turn, so that a change of clocks is in both
            took_s = iteration(mode)
            if n >= WARM:
                found.append(took_s)
    usual_s = statistics.median(times[False])
    on.row("digest: an iteration without", f"{usual_s * 1e3:.2f} ms")
    on.row(f"digest: with, {training.bytes // MB} MB", f"{statistics.median(times[True]) / usual_s - 1:+.2%}")


def communicator(on: Machine) -> Communicator:
    began = time.perf_counter()
    made = on.connect()
    on.row("self: making the communicator", f"{(time.perf_counter() - began) * 1e3:.0f} ms")
    return made


def to_self(on: Machine, made: Communicator, size_bytes: int) -> None:
    stream = on.device().create_stream()
    for size in (64 << 10, MB, CHUNK_BYTES, size_bytes):
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=on.place)
        into = torch.zeros_like(source)
        launches: list[float] = []

        def once(source: torch.Tensor = source, into: torch.Tensor = into, launches: list[float] = launches) -> None:
            began = time.perf_counter()
            made.exchange(stream, [Message(0, source)], [Message(0, into)])
            launches.append(time.perf_counter() - began)

        on.synchronize()
        once()  # the first one connects
        took_s = seconds(on, once)
        if not torch.equal(source, into):
            raise Wrong(f"a message of {size} bytes differs")
        launch_us = statistics.median(launches) * 1e6
        on.row(f"self: {size >> 10} KiB, launched in {launch_us:.0f} us", f"{size / took_s / 1e9:.2f} GB/s")


class Training:
    """Matrix products and an optimizer; parameters of `size_bytes` together."""

    def __init__(self, on: Machine, size_bytes: int) -> None:
        width = min(WIDTH, int((size_bytes / 4 / LAYERS) ** 0.5) // 64 * 64)
        layers: list[torch.nn.Module] = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers).to(on.place)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(on.batch, width, device=on.place)
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

    def on_measured(self, size: int, seconds: float) -> None:
        pass

    def on_sent(self, version: int) -> None:
        pass

    def on_landed(self, version: int, rank: int) -> None:
        self.landings.append(version)

    def on_failed(self, version: int, drained: bool) -> None:
        raise Wrong(f"version {version} did not arrive")


def to_itself(size_bytes: int) -> Program:
    """Two chunks before the first of three launches, two after it, the rest at the gate."""
    chunks = [
        Chunk(number, 0, at, min(CHUNK_BYTES, size_bytes - at))
        for number, at in enumerate(range(0, size_bytes, CHUNK_BYTES))
    ]
    places = [Place(0, False, 0 if n < 2 else 1) if n < 4 else Place(0, True, 0) for n in range(len(chunks))]
    return Program(tuple(places), tuple(chunks), 1, size_bytes, 0.0, 0)


def exchange(on: Machine, made: Communicator, size_bytes: int, versions: int) -> None:
    device, training, ears = on.device(), Training(on, size_bytes), Ears()
    links = Links(((0,),), (training.bytes,))
    progress = Progress(made, links.sizes, ears, print)
    pipeline = Exchange(device, made, 0, links, BUFFERS, CHUNK_BYTES, progress)
    own = OwnCopy(device, pipeline.copies)
    pipeline.set_program(to_itself(training.bytes))
    progress.start()
    work = tuple(Piecework(n % 4 - 1, *cut) for n, cut in enumerate(_cuts(training.bytes)))
    work = tuple(sorted(work, key=lambda w: (w.after < 0, w.after)))
    slots: dict[str, TensorSlot] = {}
    pins, right = [], torch.empty(0)
    for name in ("own", "other"):
        slots[name] = replica_memory(training.bytes)
        pins.append(on.pin(slots[name].bytes))
    waits = []
    for version in range(1, versions + 1):
        copied = own.begin_copy(training.tensors, slots["own"].bytes, work)
        right = training.now().cpu() if version == versions else right
        pipeline.step(Save(version, training.tensors, copied, lambda rank: slots["other"].bytes))
        for number in range(3):
            pipeline.on_launching()
            own.on_launching(number)
            training.compute()
            pipeline.on_launched("none", None)
        began = time.perf_counter()
        own.enqueue_rest()
        pipeline.prepare_for_gate()
        waits.append(time.perf_counter() - began)
        training.optimizer.step()
    pipeline.finish()
    ended = progress.stop(30.0)
    on.synchronize()
    for name, slot in slots.items():
        if not ended or ears.landings[-1:] != [versions] or not torch.equal(slot.bytes, right):
            raise Wrong(f"the {name} slot is not version {versions}: {progress.problem or ears.landings}")
    for pin in pins:
        pin.release()
    on.row(f"exchange: {versions} versions of {training.bytes // MB} MB, all bytes right", "yes")
    on.row("exchange: host's time at the gate", f"{statistics.median(waits) * 1e6:.0f} us")


def _cuts(size_bytes: int) -> list[tuple[int, int]]:
    return [(at, min(CHUNK_BYTES, size_bytes - at)) for at in range(0, size_bytes, CHUNK_BYTES)]


class Layers:
    """For `gpuspans`: matrix products, and after each layer a collective of one rank: a copy on the device."""

    layers = 6

    def __init__(self, on: Machine, training: Training) -> None:
        self._on, self._training = on, training
        self._part = torch.zeros(on.gathered_bytes, dtype=torch.uint8, device=on.place)
        self._whole = torch.empty_like(self._part)

    def compute(self) -> None:
        self._training.compute()
        self._on.lasts(0.015)

    def collective(self) -> None:
        dist.all_gather_into_tensor(self._whole, self._part)

    def optimizer(self) -> None:
        self._training.optimizer.step()
        self._on.lasts(0.002)

    def synchronize(self) -> None:
        self._on.synchronize()


def in_spans(on: Machine, size_bytes: int, iterations: int) -> None:
    """With the default transport's parts, over a link that only takes the time."""
    training = Training(on, size_bytes)
    slot = replica_memory(training.bytes)
    pinned = on.pin(slot.bytes)
    dist.init_process_group(on.backend, rank=0, world_size=1, store=HashStore())
    try:
        copies, pairs = HostCopies(on.device(), lambda tensor: True), training.pairs(slot.bytes)
        load = Layers(on, training)
        found = gpuspans.measure(load, on.progress(), copies, pairs, iterations)
        right = training.now().cpu()
        copies.bring(copies.record_mark(), pairs)
        if not torch.equal(slot.bytes, right):
            raise Wrong("the slot is not the state")
        gpuspans.rows(found, on.row)
    finally:
        dist.destroy_process_group()
        on.synchronize()
        pinned.release()


def snapshot(on: Machine, size_bytes: int, iterations: int) -> None:
    device, training = on.device(), Training(on, size_bytes)
    slot, other = replica_memory(training.bytes), replica_memory(training.bytes)
    pinned = on.pin(slot.bytes)
    lane: Any = device.create_stream()
    host = HostCopies(device, lambda tensor: True)
    cuts = _cuts(training.bytes)
    targets = {"host": training.pairs(slot.bytes), "host, not pinned": training.pairs(other.bytes)}

    def iteration(mode: str) -> float:
        on.synchronize()
        began = time.perf_counter()
        own = OwnCopy(device, lane)
        with ExitStack() as ends:
            if mode in targets:
                thread = threading.Thread(target=host.bring, args=(host.record_mark(), targets[mode]))
                thread.start()
                ends.callback(thread.join)
            elif mode != "none":
                after = 0 if mode == "lazy" else -1
                own.begin_copy(training.tensors, slot.bytes, tuple(Piecework(after, *cut) for cut in cuts))
            if mode == "eager":
                own.enqueue_rest()
            own.on_launching(0)
            for _ in range(3):
                training.compute()
        own.enqueue_rest()
        training.optimizer.step()
        on.synchronize()
        return time.perf_counter() - began

    times: dict[str, list[float]] = {mode: [] for mode in ("none", *targets, "lazy", "eager")}
    for n in range(WARM + iterations):
        for mode, found in times.items():  # in turn, so that a change of clocks is in all of them
            took_s = iteration(mode)
            if n >= WARM:
                found.append(took_s)
    pinned.release()
    usual_s = statistics.median(times["none"])
    on.row("snapshot: an iteration without", f"{usual_s * 1e3:.2f} ms")
    for mode in list(times)[1:]:
        on.row(f"snapshot: {mode}, {training.bytes // MB} MB", f"{statistics.median(times[mode]) / usual_s - 1:+.2%}")


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=int, default=512, metavar="N", help="size of the state (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="measured (default: %(default)s)")
    parser.add_argument(
        "--fake", action="store_true", help="on a device of the tests: all of it runs, and no figure is a GPU's"
    )
    args = parser.parse_args()
    least_mb = LEAST_FAKE_MB if args.fake else LEAST_MB
    if args.mb < least_mb or args.iterations < LEAST_ITERATIONS:
        parser.error(f"at least {least_mb} MB and {LEAST_ITERATIONS} iterations are wanted")
    if not (args.fake or torch.cuda.is_available()):
        print(
            "benchmarks.gpu: there is no CUDA device here that torch can use: nothing was measured", file=sys.stderr
        )
        return 1
    on: Machine = Fake() if args.fake else Gpu()
    size_bytes, wrong = args.mb * MB, 0

    def section(name: str, work: Callable[[], None]) -> None:
        nonlocal wrong
        began = time.perf_counter()
        try:
            work()
        except (Wrong, Broken, gpuspans.NotMeasured, gpugraphs.NotResumed, RuntimeError, OSError) as error:
            wrong += 1
            print(f"benchmarks.gpu: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        on.row(f"{name}: took", f"{time.perf_counter() - began:.0f} s")

    for name, value in on.names().items():
        on.row(name, value)
    on.row("torch", str(torch.__version__))
    section("memory", lambda: memory(on, size_bytes))
    section("digest", lambda: digests(on, size_bytes, args.iterations))
    section("spans", lambda: in_spans(on, size_bytes, args.iterations))
    section("snapshot", lambda: snapshot(on, size_bytes, args.iterations))
    section("graphs", lambda: gpugraphs.measure(on.row, fake=args.fake, width=64 if args.fake else 1024))
    if reason := on.lacking():
        print(f"benchmarks.gpu: self, exchange: {reason}", file=sys.stderr)
        return 1
    section("nccl", lambda: over_nccl(on, size_bytes, args.iterations))
    return 1 if wrong else 0


def over_nccl(on: Machine, size_bytes: int, versions: int) -> None:
    """Self and exchange."""
    made = communicator(on)
    try:
        to_self(on, made, size_bytes)
        exchange(on, made, size_bytes, versions)
    finally:
        made.abort()


if __name__ == "__main__":
    sys.exit(main())
