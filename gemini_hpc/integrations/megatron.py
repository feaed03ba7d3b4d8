"""Megatron-Core's sharded state dicts in the agents' memory, beside `dist_checkpointing` on disk.

    from gemini_hpc.integrations import megatron as memory

    state = memory.load(sharded_state_dict(is_loading=True))  # None: nothing is in memory
    for iteration in ...:
        memory.save(sharded_state_dict(), iteration)

The sharded state dict is the one that `dist_checkpointing.save` and `load` take. Its `ShardedTensor`s, of the model
and of the distributed optimizer's flat buffers, become boxes of global tensors. `ShardedObject`s become encoded
values. Each rank keeps the rest (iteration, arguments, learning rates) as its own.
"""

from __future__ import annotations

from typing import Any

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

from gemini_hpc.integrations.dcp import GeminiReader, GeminiWriter, close, write_pickle

__all__ = ["close", "load", "save"]
_COMMON = ".common"  # key prefix of a rank's state beside its shards


def save(
    sharded_state_dict: dict[str, Any],
    iteration: int | None = None,
    *,
    name: str = "default",
    validate_access_integrity: bool = True,
) -> int:
    """Save the next version in memory, and return its number (collective).

    The number is 0 if the version was skipped, with one line that gives the reason. The state is copied, brought to
    the other holders and sealed before this returns. So it may be changed afterwards.

    Args:
        sharded_state_dict: Sharded state dict of this rank.
        iteration: Label of the version, see `GeminiReader.checkpoint_id`.
        name: Name of the training, if a job runs several.
        validate_access_integrity: As in `dist_checkpointing.save`, which raises CheckpointingException if the ranks'
            shards do not fit together.
    """
    writer = GeminiWriter(name)
    if not writer.protected:
        return 0
    sharded, common = save_preprocess(sharded_state_dict, validate_access_integrity)
    state = strategy.mcore_to_pyt_state_dict(
        strategy._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)[0]
    )
    state[f"{_COMMON}.{dist.get_rank()}"] = write_pickle(common)
    state_dict_saver.save(
        state,
        checkpoint_id=None if iteration is None else str(iteration),
        storage_writer=writer,
        planner=strategy.MCoreSavePlanner(flatten_state_dict=False),
    )
    return writer.version


def load(sharded_state_dict: dict[str, Any], *, name: str = "default") -> dict[str, Any] | None:
    """Return the newest saved state as `dist_checkpointing.load` does, or None if there is none (collective).

    Other numbers of ranks, and other parallel layouts, can load the state as far as the format of the sharded state
    dict allows. For a distributed optimizer, `dp_reshardable` allows other data-parallel sizes and
    `fully_reshardable` all layouts.

    Raises:
        CheckpointingException, KeyError, CheckpointException: The state does not fit. The last one is torch's.
    """
    reader = GeminiReader(name)
    if not reader.version:
        return None
    force_all_tensors_to_non_fp8(sharded_state_dict)
    wanted, own, factories = load_preprocess(sharded_state_dict)
    wanted, _ = extract_sharded_base(wanted)
    common: dict[str, Any] = reader.read_value(_find_common_key(reader))
    merge(common, own)
    merge(common, _load_shards(wanted, reader))
    loaded: dict[str, Any] = apply_factory_merges(common, factories)
    return loaded


def _find_common_key(reader: GeminiReader) -> str:
    """Return the key of this rank's own values, or of an earlier rank's if fewer ranks saved."""
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
