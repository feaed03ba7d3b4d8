"""One rank of a training of Megatron-Core on CPUs, over gloo: a small GPTModel of the local spec with Megatron's DDP
and its distributed optimizer; a `program` of tests/train/worker.py."""

from __future__ import annotations

import gc
import json
import os
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from tests.train.worker import digest_of

LENGTH, WORDS = 16, 64


def no_cuda() -> None:
    """Megatron-Core asks for the current CUDA device, its optimizers take CUDA tensors only, its dropout has
    generators there: here the CPU answers to that name, and there is no dropout."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    kind = torch.Tensor.type
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.Tensor.type = lambda self, *a, **k: (  # type: ignore[method-assign,assignment]
        kind(self, *a, **k) if a or k else kind(self).replace("torch.", "torch.cuda.")
    )
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign,assignment]
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()

    def on_cpu(make: Any) -> Any:
        return lambda *a, **k: make(*a, **({**k, "device": "cpu"} if k.get("device") == "cuda" else k))

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def main(o: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    no_cuda()
    no_step_wanted()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = train(o)
    print(json.dumps(told), flush=True)
    if o.get("die_at"):
        os._exit(3)
    gc.collect()
    dist.destroy_process_group()


def build(o: dict[str, Any]) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=o.get("tensor", 1))
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
    )
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=4096), model.bfloat16()
    )
    ddp.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=0.01, weight_decay=0.0, bf16=True, use_distributed_optimizer=True, clip_grad=0.0
        ),
        [ddp],
    )
    # Of torch's Adam, without Apex or Transformer Engine, Megatron-Core makes a state dict only when it has state.
    for part in optimizer.chained_optimizers:
        part._init_optimizer_states_with_dummy_values()  # no weight decay: nothing moves
    return ddp, optimizer


def sharded(model: Any, optimizer: Any, iteration: int, kind: str, *, is_loading: bool = False) -> dict[str, Any]:
    """As Megatron-LM makes it."""
    metadata = {"distrib_optim_sharding_type": kind}
    state = {"model": model.module.sharded_state_dict(metadata=metadata), "iteration": iteration}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    state["own"] = {"rank": dist.get_rank()}
    return state


def own_steps(optimizer: Any) -> None:
    """Where Megatron-Core 0.16 loads into torch's Adam, all parameters share one step counter, which each counts up,
    and `dp_reshardable` leaves it as it was; the group knows it. (Apex's and Transformer Engine's keep it there.)"""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                part.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))


def no_step_wanted() -> None:
    """Nor does `fully_reshardable` have the counter of torch's Adam, which its loader then misses."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    put = DistributedOptimizer._set_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = lambda self, parameter, tensors: put(
        self, parameter, {"step": torch.zeros(()), **tensors}
    )


def digest_of_all(model: Any, optimizer: Any) -> str:
    found = [*model.parameters()]
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                found += [parameter, *(v for v in part.optimizer.state[parameter].values() if torch.is_tensor(v))]
    return digest_of(found)


def values_of_all_ranks(optimizer: Any) -> str:
    """Digest of parameters and moments, however their elements are dealt to the data-parallel ranks."""
    mine: dict[str, list[torch.Tensor]] = {"parameter": [], "exp_avg": [], "exp_avg_sq": []}
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                mine["parameter"].append(parameter.detach().flatten())
                for name in ("exp_avg", "exp_avg_sq"):
                    mine[name].append(part.optimizer.state[parameter][name].flatten())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: torch.cat(tensors) for name, tensors in mine.items()})
    return digest_of([torch.cat([part[name] for part in parts]).sort().values for name in mine])


def train(o: dict[str, Any]) -> dict[str, Any]:
    from gemini_hpc.integrations import megatron as memory

    torch.manual_seed(o.get("seed", 0))
    model, optimizer = build(o)
    rank, kind = dist.get_rank(), o.get("kind", "dp_reshardable")
    data_parallel = rank // o.get("tensor", 1)
    state = memory.load(sharded(model, optimizer, 0, kind, is_loading=True))
    start = 0
    if state is not None:
        start = state["iteration"]
        with torch.no_grad():
            model.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    own_steps(optimizer)
    loaded = values_of_all_ranks(optimizer)
    own = state["own"]["rank"] if state is not None else rank
    losses, saved = {}, []
    positions = torch.arange(LENGTH).expand(2, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    for step in range(start + 1, o["steps"] + 1):
        numbers = torch.Generator().manual_seed(1000 * step + data_parallel)
        tokens = torch.randint(0, WORDS, (2, LENGTH + 1), generator=numbers)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.param_groups[0]["lr"] = 0.01 / step
        optimizer.step()
        losses[step] = loss.item().hex()
        saved.append(memory.save(sharded(model, optimizer, step, kind), step))
        if step == o.get("die_at"):
            break
    if not o.get("die_at"):
        memory.close()
    told = {"rank": rank, "start": start, "losses": losses, "saved": saved, "own": own, "loaded": loaded}
    return {**told, "digest": digest_of_all(model, optimizer), "values": values_of_all_ranks(optimizer)}
