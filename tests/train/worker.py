"""A training process for the tests, one per rank, environment as torchrun's (forked by zygote.py).

Prints one JSON line at the end: losses by step, digest of the final state, the checkpointer's report.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import gemini_hpc as gemini
from gemini_hpc.client import agent_connection, mapped_slots
from gemini_hpc.format import shard_manifest
from gemini_hpc.tier import names
from gemini_hpc.train import checkpointer, meeting
from gemini_hpc.train.device import host_copy, pins, streams
from gemini_hpc.train.device.host_copy import HostCopies
from gemini_hpc.train.restorer import Restorer
from gemini_hpc.train.state import inner
from tests.train import watched
from tests.train.timed_device import LaggingDevice

if TYPE_CHECKING:
    from tests.train import fake_gpu


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 50, (9,), generator=generator)
        return tokens[:-1], tokens[1:]


class Compute(torch.autograd.Function):
    """Stands for a GPU's work: takes time, changes nothing, leaves the processor alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        Compute.work(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        Compute.work(2 * ctx.seconds)
        return grads[0], None

    work = staticmethod(time.sleep)


WRAPPERS: dict[str, Any] = {
    "": lambda block: block,
    "checkpoint": checkpoint_wrapper,
    "compile": lambda block: torch.compile(block, backend="eager"),
}


class Average:
    """Of parameters that may be sharded; no module."""

    def __init__(self, model: nn.Module, *, begun: bool = True) -> None:
        self.model = model
        self.shadow: list[torch.Tensor] = []
        if begun:
            self.begin()

    def begin(self) -> None:
        self.shadow = [p.detach().clone() for p in self.model.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        for slow, p in zip(self.shadow, self.model.parameters(), strict=False):
            slow.lerp_(p, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = list(state["shadow"])


class History:
    """One element more in each step, once there is a first."""

    def __init__(self, first: int) -> None:
        self.values = torch.zeros(first)

    def add(self, value: float) -> None:
        if self.values.numel():
            self.values = torch.cat([self.values, torch.tensor([value])])

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class Fickle(torch.optim.SGD):
    """With state of ever another shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            mine = self.state[p]
            count = mine["count"] = mine.get("count", 0) + 1
            recent = mine["recent"] = torch.full((count // 8 + 1,), 0.5 * count)
            p.sub_(0.0001 * float(recent.sum()))


class Replay:
    """Many small values in a container: what a capture of them takes is all the encoder's."""

    def __init__(self, entries: int) -> None:
        self.entries = [((0.5, float(n), 0.25), n, 1.0, False) for n in range(entries)]

    def state_dict(self) -> dict[str, Any]:
        return {"entries": self.entries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = state["entries"]


class Growing:
    """Small state that outgrows its place in the slot."""

    data = b""

    def state_dict(self) -> dict[str, bytes]:
        return {"data": self.data}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        self.data = state["data"]


class Net(nn.Module):
    """Dropout, batch statistics, tied weights, a frozen tensor, layers used in another order than defined."""

    def __init__(self, width: int, batchnorm: bool, compute_s: float = 0.0) -> None:
        super().__init__()
        self.compute_s = compute_s
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width) if batchnorm else nn.LayerNorm(width)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.seen = nn.Buffer(torch.zeros(0))

    def add_large(self) -> None:
        """One buffer that each forward pass writes to, and one that stays."""
        self.seen = torch.zeros(32768)
        self.register_buffer("mask", torch.linspace(0.9, 1.1, 32768), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) * self.frozen
        for i in (2, 0, 3, 1):
            h = h + self.drop(torch.tanh(self.blocks[i](h)))
            if self.compute_s:
                h = Compute.apply(h, self.compute_s)
        flat = h.flatten(0, 1)
        if self.seen.numel():
            with torch.no_grad():
                self.seen.mul_(0.9).add_(flat.mean() * self.mask)
            flat = flat + 0.1 * self.seen.mean()
        return self.head(self.norm(flat))


def arguments(told: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpointer's arguments, from JSON: what belongs to its traffic stands there by its own name.

    A busy machine leaves no version out: each one is saved, but where a test says how often, or how much a training
    may lose.
    """
    mine = {field.name for field in dataclasses.fields(gemini.Traffic)}
    rest = {name: value for name, value in told.items() if name not in mine}
    traffic = {"overhead": 0.9, **{name: told[name] for name in mine & told.keys()}}
    if "overhead" not in told:
        traffic.setdefault("every", 1)
    return {**rest, "traffic": gemini.Traffic(**traffic)}


def fail_once() -> None:
    """The first copy of a resume cannot be had: all ranks join a second time."""
    fetch, failed = Restorer._fetch, list[int]()

    def fails(self: Any, rank: int) -> Any:
        if not failed:
            failed.append(rank)
            raise agent_connection.AgentRefused("not this time")
        return fetch(self, rank)

    Restorer._fetch = fails  # type: ignore[method-assign]


def lag(gpu: fake_gpu.FakePlatform, collective_s: float) -> None:
    """The training runs ahead of a device, to which its copies and collectives belong."""
    lagging = LaggingDevice(collective_s)
    Compute.work = staticmethod(lagging.compute)
    streams.choose_streams = lambda on_device: lambda: lagging
    host_copy.create_copies = lambda device: HostCopies(gpu.find_device(), lambda tensor: True)
    pins.choose_pin = lambda device: gpu.pin


def stand_still(directory: Path, step: int, rank: int) -> None:
    """Wait until the test lets this rank go on: see `Pause` in conftest.py."""
    (directory / f"{step}.{rank}").touch()
    while not (directory / f"{step}.go").exists():
        time.sleep(0.005)


def keep_torch_busy(seconds: float) -> None:
    """Without the interpreter's lock for most of that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        torch.zeros(1 << 20)


def wait_armed(ckpt: gemini.Checkpointer) -> None:
    """Bounded, too: a short training would be over before its memory is there."""
    deadline = time.monotonic() + 20
    while ckpt._session.client and not ckpt._session.verdict.vote and time.monotonic() < deadline:
        time.sleep(0.01)


def wait_for_seal(ckpt: gemini.Checkpointer, version: int) -> None:
    """Bounded: not where nothing protects, or what is wrong is what the test wants to see."""
    client = ckpt._session.client
    deadline = time.monotonic() + 20
    while client is not None and not client.lost and client.page.sealed[1] < version and time.monotonic() < deadline:
        time.sleep(0.001)


def wait_for_names(training: str, wanted: Iterable[str]) -> None:
    """Wait until the tier has the named versions of a training: a busy machine saves late. Bounded, too."""
    deadline = time.monotonic() + 60
    while not set(wanted) <= set(names.find_training_names(training)) and time.monotonic() < deadline:
        time.sleep(0.05)


def wait_for_the_last(ckpt: gemini.Checkpointer) -> None:
    """Wait until no version is on its way: on a busy machine the next one is skipped otherwise. Bounded, too."""
    client, engine, deadline = ckpt._session.client, ckpt._engine, time.monotonic() + 20
    while client is not None and not client.lost and engine.running is not None and time.monotonic() < deadline:
        if not engine.under_way and client.page.sealed[1] >= engine.running.replicator._last_saved:
            return
        time.sleep(0.001)


@contextmanager
def dies_at_tensor(number: int) -> Iterator[None]:
    """An optimizer step: its tensors before this one are changed, those behind it are not."""
    write, seen = torch.Tensor.addcdiv_, list[int]()

    def writes(self: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        if len(seen) == number:
            os._exit(1)
        seen.append(number)
        return write(self, *args, **named)

    torch.Tensor.addcdiv_ = writes  # type: ignore[assignment, method-assign]
    yield
    torch.Tensor.addcdiv_ = write  # type: ignore[method-assign]


def compress(model: nn.Module, **options: Any) -> None:
    """PowerSGD after three iterations."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=0.5, **options)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # type: ignore[operator]


def look_at(model: nn.Module) -> None:
    """An evaluation, of which nothing is left but what FSDP2 keeps of it."""
    states = torch.get_rng_state()
    model.eval()
    with torch.no_grad():
        model(torch.zeros(2, 8, dtype=torch.int64))
    model.train()
    torch.set_rng_state(states)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                tensors += [part for _, part in inner.list_parts(value)] if inner.is_composed(value) else [value]
    return digest_of(tensors)


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    for tensor in tensors:
        t = tensor.detach()
        whole = t.full_tensor() if hasattr(t, "full_tensor") else t
        hasher.update(whole.contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def main(o: dict[str, Any]) -> None:
    if "stack" in o:
        from tests.integrations import stacks

        stacks.main(o)
        return
    if "programs" in o:
        watched.main(o)
        return
    if "program" in o:
        importlib.import_module(o["program"]).main(o)
        return
    torch.set_num_threads(1)
    grouped = o.get("kind", "plain") != "plain"
    if grouped:
        dist.init_process_group("gloo")
    told = train(o)
    if told is None:
        return
    print(json.dumps(told), flush=True)
    if grouped:
        # The model is gone by now: where DDP's reducer is the last to let go of a group, it waits for gloo's threads
        # with the interpreter's lock, and they may need it to let go of their last operation.
        gc.collect()
        dist.destroy_process_group()


def train(o: dict[str, Any]) -> dict[str, Any] | None:
    """What the process tells; None: it leaves as it is."""
    kind = o.get("kind", "plain")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    peeked = gemini.peek() if o.get("peek") else None
    seed = o.get("seed", 0) + 100 * rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    if kind == "hsdp":
        torch.manual_seed(o.get("seed", 0))  # replicas begin alike, which nobody else sees to
    net = Net(o.get("width", 32), o.get("norm", "batch") == "batch", o.get("compute_s", 0.0))
    if o.get("unlike"):
        with torch.no_grad():
            net.head.weight.add_(0.01 * rank)
    torch.manual_seed(seed)
    if o.get("large"):
        net.add_large()
    if o.get("adapter"):  # only two small tensors are trained
        for p in net.parameters():
            p.requires_grad_(False)
        for p in (net.blocks[0].bias, net.blocks[1].bias):
            p.requires_grad_(True)
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(net)
        if "powersgd" in o:
            compress(model, **o["powersgd"])
    elif kind in ("fsdp2", "hsdp"):  # hsdp: each rank has all of it, in DTensors
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        if kind == "hsdp":
            mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
        for i, block in enumerate(net.blocks):
            net.blocks[i] = fully_shard(WRAPPERS[o.get("wrap", "")](block), mesh=mesh)
        model = fully_shard(net, mesh=mesh)
    else:
        model = net
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    if o.get("zero"):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    if o.get("torchao"):
        import torchao.optim

        torch.compile = lambda function, **_: function
        optimizer = getattr(torchao.optim, o["torchao"])(params, lr=0.01)
    if o.get("fickle"):
        optimizer = Fickle(params, lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5) * math.cos(n / 40))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3) if o.get("scaler") else None
    loader = gemini.StatefulLoader(
        Numbers(o.get("samples", 70 * world)), 4, seed=7, rank=rank, world=world, num_workers=o.get("workers", 0)
    )
    kwargs = arguments(o.get("kwargs", {}))
    if "not_yet_s" in o:
        agent_connection.NOT_YET_S = o["not_yet_s"]
    if "close_s" in o:
        checkpointer.CLOSE_TIMEOUT_S = o["close_s"]
    if "populates_s" in o:
        mapped_slots.MappedSlot.populate = (  # type: ignore[method-assign]
            lambda self, awaited=True: keep_torch_busy(o["populates_s"])  # type: ignore[misc]
        )
    if o.get("no_manifest_on") == rank:
        shard_manifest.pack = lambda manifest: [].pop()
    if "gpu" in o or "lagging" in o:
        from tests.train import fake_gpu
    gpu = fake_gpu.install(o["gpu"], rank) if "gpu" in o else None
    if "lagging" in o:
        gpu = gpu or fake_gpu.FakePlatform(o["lagging"], rank)
        lag(gpu, o["lagging"]["collective_s"])
    alone = dist.new_group([1]) if o.get("alone_on") == 1 else None
    if o.get("evaluate_unbuilt"):
        look_at(model)
    growing = Growing()
    average = Average(model, begun="average_from" not in o) if o.get("average") else None
    history = History(o.get("history", 0))
    extra = {"growing": growing, "history": history, **({"average": average} if average else {})}
    if "replay" in o:
        extra["replay"] = Replay(o["replay"][rank])
    ckpt = gemini.Checkpointer(model, optimizer, scheduler, scaler, loader, extra=extra, **kwargs)
    if o.get("fetch_fails") == rank:
        fail_once()
    if o.get("evaluate_first"):
        look_at(model)
    start = ckpt.resume()
    rejected: list[int] = []
    for _ in range(o.get("reject_first", 0)):  # once something has been computed with what was loaded
        model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
        optimizer.step()
        rejected.append(start)
        start = ckpt.reject("the loss is NaN", fresh=o.get("fresh", False))
    losses: dict[int, str] = {}
    kept: dict[str, bool] = {}
    behind: list[int] = []
    batches = loader.iterate_forever()
    accumulate = o.get("accumulate", 1)
    log = open(f"{o['log']}.{rank}", "a", buffering=1) if "log" in o else None  # noqa: SIM115
    done = start // accumulate if o.get("micro_steps") else start
    for step in range(done + 1, o["steps"] + 1):
        if step == o.get("thaw_at"):
            net.frozen.requires_grad_(True)
            optimizer.param_groups[0]["params"].append(net.frozen)
        if step == o.get("touch_at"):
            with torch.no_grad():
                net.blocks[0].weight.mul_(1.0)
        total = 0.0
        optimizer.zero_grad()
        for micro in range(accumulate):
            x, y = next(batches)
            noise = random.random() + float(np.random.rand())
            if kind == "ddp":
                model.require_backward_grad_sync = micro == accumulate - 1 and step < o.get("apart_from", math.inf)
            loss = nn.functional.cross_entropy(model(x), y.flatten()) * (1 + 0.01 * noise) / accumulate
            if scaler is not None:
                if step == o.get("inf_at"):
                    loss = loss * math.inf
                scaler.scale(loss).backward()
            else:
                loss.backward()
            total += loss.item()
            if o.get("micro_steps") and micro < accumulate - 1:
                ckpt.step()
                if step == o.get("die_within") and micro == accumulate // 2:
                    os._exit(1)
        if step == o.get("swap_at"):  # between two versions, and unseen by the version counter
            net.blocks[1].weight.data.mul_(0.5)
        if step == o.get("tamper_at"):
            net.blocks[0].weight.data.mul_(1.0)  # no version bump
            net.blocks[0].weight.data[0, 0] += 1.0
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        dies = step - done == 3 and rank == 1 and "die_at_tensor" in o
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            with dies_at_tensor(o["die_at_tensor"]) if dies else nullcontext():
                optimizer.step()
        if o.get("micro_steps"):  # how far the newest sealed version was behind the one before this step
            sealed = ckpt._session.client.page.sealed if ckpt._session.client is not None else None
            behind.append(ckpt.version - accumulate + 1 - (sealed[1] if sealed else 0))
        scheduler.step()
        losses[step] = total.hex()
        if average is not None:
            if step == o.get("average_from"):
                average.begin()
            average.update()
        history.add(total)
        if step == o.get("grow_at"):
            growing.data = bytes(1_500_000)
        if o.get("twice_at") == step:
            ckpt.step()
        if o.get("evaluate_before"):
            with torch.no_grad():
                model(x)
        if step == o.get("flip_at") and rank == world - 1:  # one element, in one replica
            net.blocks[1].weight.data[5, 7] += 0.5
        # beside other tests a seal may take longer than the optimizer waits for it
        if step - done > 2 and (step <= o.get("sealed_until", 0) or step == o.get("die_at")):
            wait_for_seal(ckpt, step - 1)
        ckpt.step()
        if o.get("armed") and step == done + 1:
            wait_armed(ckpt)
        if (name := o.get("keep", {}).get(str(step))) and rank in o.get("keepers", range(world)):
            kept[name] = ckpt.keep(name)
            if at := o.get("kept_at_once"):
                wait_for_seal(ckpt, step)
                wait_for_names(at, [name])
        if start and step == o.get("reject_at") and rank in o.get("rejecters", range(world)):
            meeting.SOON_S = o.get("meet_s", meeting.SOON_S)
            ckpt.reject("the loss is NaN", fresh=o.get("fresh", False))
        if log is not None:
            log.write(f"{start} {step} {losses[step]}\n")
        if step == o.get("pause_at") and rank in o.get("pausing", range(world)):
            if o.get("pause_sealed"):
                wait_for_seal(ckpt, step)
            if at := o.get("pause_kept"):
                wait_for_names(at, o["keep"].values())
            time.sleep(o.get("pause_s", 0.0))
        if step in o.get("stands_at", ()):
            stand_still(Path(o["stands_in"]), step, rank)
        if o.get("sleep_s"):
            time.sleep(o["sleep_s"])
        if step == o.get("interrupt_at") and ckpt._engine.transport is not None:
            ckpt._engine.transport.interrupt()
        if step == o.get("die_at"):
            print(json.dumps({"rank": rank, "losses": losses, "report": ckpt.report()}), flush=True)
            os._exit(1)
        if step == o.get("report_at"):
            print(json.dumps({"rank": rank, "report": ckpt.report()}), flush=True)
        if step == o.get("raise_at"):
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
        if step == o.get("leave_at"):
            print(json.dumps({"rank": rank, "losses": losses}), flush=True)
            return None
        if alone is not None and rank == 1:
            dist.all_reduce(torch.ones(4), group=alone)
        if o.get("pass_on"):
            work = dist.isend(torch.ones(4), (rank + 1) % world)
            dist.recv(torch.ones(4), (rank - 1) % world)
            work.wait()
        if step == o.get("stray_at") and rank == 1 and (running := ckpt._engine.running) and running.driver:
            fake_gpu.stray(running.driver._exchange)
        if step == o.get("fence_at"):
            ckpt.fence()
            with torch.no_grad():
                net.blocks[0].weight.mul_(0.5)
        if step >= o.get("more_from", math.inf):
            dist.all_reduce(torch.ones(4))
        if o.get("evaluate_every") and step % o["evaluate_every"] == 0:
            with torch.no_grad():
                model(x)
        if str(step) in o.get("schemes", {}):
            ckpt.scheme = o["schemes"][str(step)]
    final = digest(net, optimizer)
    if average is not None:
        final += digest_of(average.shadow)
    final += digest_of([history.values]) if o.get("history") else ""
    driver = ckpt._engine.running.driver if ckpt._engine.running is not None else None
    launches = list(driver._exchange.log.newest) if o.get("launches") and driver is not None else []
    report = ckpt.report()
    ckpt.close()
    if gpu is not None:
        report["gpu"] = {"pinned": gpu.pinned}
        report["gpu"] |= {"pins": gpu.pins} if "lagging" in o else {}
        report["gpu"] |= {"exchanges": gpu.communicator.count if gpu.communicator else 0} if "gpu" in o else {}
    told = {"start": start, "losses": losses, "digest": final, "report": report, "launches": launches}
    told |= {"unsealed_at_gate": behind} if behind else {}
    told |= {"kept": kept} if kept else {}
    told |= {"rejected": rejected} if rejected else {}
    told |= {"peeked": peeked} if peeked is not None else {}
    told |= {"nccl": [name for name in sys.modules if name.startswith("gemini_hpc.train.nccl")]}
    return {"rank": rank, **told}
