"""Megatron-Core's sharded state dicts over the agents' memory, beside `dist_checkpointing` on disk.

    from gemini_hpc.integrations import megatron as memory

    state = memory.load(sharded_state_dict(is_loading=True))  # None: nothing is in memory
    for iteration in ...:
        memory.save(sharded_state_dict(), iteration)

The sharded state dict is the one that `dist_checkpointing.save` and `load` take. Its `ShardedTensor`s, of the model
and of the distributed optimizer's flat buffers, become boxes of global tensors; `ShardedObject`s are encoded
values; what is in neither (iteration, arguments, learning rates) is kept on each rank as its own.
"""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

try:
    from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
    from megatron.core.dist_checkpointing.strategies import torch as strategy
    from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
except ImportError as error:
    raise ImportError(
        f"gemini_hpc.integrations.megatron: pip install 'megatron-core>=0.16,<0.17' packaging ({error})"
    ) from error

from gemini_hpc.integrations.dcp import GeminiReader, GeminiWriter, close

__all__ = ["close", "load", "save"]
_COMMON = ".common"  # key of what a rank has beside shards


def save(
    sharded_state_dict: dict[str, Any],
    iteration: int | None = None,
    *,
    name: str = "default",
    validate_access_integrity: bool = True,
) -> int:
    """Collective: the next version in memory. Its number; 0 where it was skipped, with one line that says why.

    The state is copied, brought to the other holders and sealed before this returns, so nothing of it has to stay as
    it is afterwards. iteration: a label, see `GeminiReader.checkpoint_id`. validate_access_integrity: as in
    `dist_checkpointing.save`, which raises CheckpointingException where ranks' shards do not fit together.
    """
    writer = GeminiWriter(name)
    if not writer.protected:
        return 0
    sharded, common = save_preprocess(sharded_state_dict, validate_access_integrity)
    state = strategy.mcore_to_pyt_state_dict(
        strategy._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)[0]
    )
    state[f"{_COMMON}.{dist.get_rank()}"] = _pickled(common)
    state_dict_saver.save(
        state,
        checkpoint_id=None if iteration is None else str(iteration),
        storage_writer=writer,
        planner=strategy.MCoreSavePlanner(flatten_state_dict=False),
    )
    return writer.version


def load(sharded_state_dict: dict[str, Any], *, name: str = "default") -> dict[str, Any] | None:
    """Collective: the state that was saved last, as `dist_checkpointing.load` gives it; None where there is none.

    Other numbers of ranks, and other parallel layouts, load what the sharded state dict's format allows: of a
    distributed optimizer, `dp_reshardable` other data-parallel sizes, `fully_reshardable` all of them.

    Raises CheckpointingException, KeyError or torch's CheckpointException where it does not fit.
    """
    reader = GeminiReader(name)
    if not reader.version:
        return None
    force_all_tensors_to_non_fp8(sharded_state_dict)
    wanted, own, factories = load_preprocess(sharded_state_dict)
    wanted, _ = extract_sharded_base(wanted)
    common: dict[str, Any] = reader.value(_common_key(reader))
    merge(common, own)
    merge(common, _load_shards(wanted, reader))
    loaded: dict[str, Any] = apply_factory_merges(common, factories)
    return loaded


def _common_key(reader: GeminiReader) -> str:
    """This rank's own, or that of one before it where there were fewer."""
    known = sum(key.startswith(f"{_COMMON}.") for key in reader.metadata.state_dict_metadata)
    return f"{_COMMON}.{dist.get_rank() % known}"


def _load_shards(wanted: dict[str, Any], reader: GeminiReader) -> dict[str, Any]:
    tensors = [value for value in nested_values(wanted) if isinstance(value, ShardedTensor)]
    flat, paths, names = strategy._replace_state_dict_keys_with_sharded_keys(wanted)
    state = strategy.mcore_to_pyt_state_dict(flat, is_loading=True)
    planner = strategy.MCoreLoadPlanner(
        shapes_validation_sharded_tensors=[tensor for tensor in tensors if not tensor.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
    )
    state_dict_loader.load(state, storage_reader=reader, planner=planner)
    filled = {key: strategy._unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
    found: dict[str, Any] = strategy._replace_sharded_keys_with_state_dict_keys(filled, paths, names)
    strategy._restore_dict_types(found, wanted)
    return found


def _pickled(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    return file
