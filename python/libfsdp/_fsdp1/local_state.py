"""``LOCAL_STATE_DICT``: flat parameters as they are, each a one-dimensional ``ShardedTensor`` of the ranks' shares."""

from typing import TYPE_CHECKING, Any

import torch

from ._pytorch import Shard, ShardedTensor, init_from_local_shards
from .flat import FLAT_NAME, Flat, FlatState
from .places import own_params

if TYPE_CHECKING:
    from .module import FullyShardedDataParallel


def show_local(
    wrapper: "FullyShardedDataParallel", state_dict: dict[str, Any], prefix: str, offload_to_cpu: bool
) -> None:
    """What is padding is not saved. Shares its memory with the parameter. Collective."""
    flat = _flat_of(wrapper)
    if flat is None:
        return
    whole, valid = _numels(wrapper, flat)
    own = flat.parameter.detach()[:valid]
    shards = [Shard.from_tensor_and_offsets(own, [flat.parameter.numel() * wrapper.rank], wrapper.rank)] if valid else []
    value = init_from_local_shards(shards, whole, process_group=wrapper.process_group)
    state_dict[prefix + FLAT_NAME] = value.cpu() if offload_to_cpu else value


def take_local(wrapper: "FullyShardedDataParallel", state_dict: dict[str, Any], prefix: str) -> None:
    flat = _flat_of(wrapper)
    if flat is None:
        return
    value = state_dict.get(prefix + FLAT_NAME)
    if value is None:
        raise AssertionError("No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters")
    if not isinstance(value, ShardedTensor):
        raise AssertionError(
            f"Tensors in local_state_dict should be ShardedTensor, and '{prefix}{FLAT_NAME}' is {type(value)}"
        )
    whole, valid = _numels(wrapper, flat)
    shards = [shard.tensor for shard in value.local_shards()]
    if value.size().numel() != whole or sum(shard.numel() for shard in shards) != valid:
        raise ValueError(
            f"'{prefix}{FLAT_NAME}' has {value.size().numel()} elements, {[shard.numel() for shard in shards]} on this "
            f"rank, where {whole} and {valid} are needed: load it into the same wrapping on as many ranks"
        )
    share = torch.zeros_like(flat.parameter)
    if valid:
        share[:valid] = shards[0]
    state_dict[prefix + FLAT_NAME] = share


def _flat_of(wrapper: "FullyShardedDataParallel") -> Flat | None:
    state = wrapper._fsdp_state
    if wrapper._has_params and (not isinstance(state, FlatState) or wrapper._summoned):
        raise RuntimeError(
            "``local_state_dict`` can only be used when parameters are flatten and sharded: wrap with "
            "use_orig_params=False, or use StateDictType.SHARDED_STATE_DICT"
        )
    return state.flat if isinstance(state, FlatState) else None


def _numels(wrapper: "FullyShardedDataParallel", flat: Flat) -> tuple[int, int]:
    """Of all of the flat parameter, and of this rank's share, both without padding."""
    parts = {part for _, _, _, part in own_params(wrapper) if part.flat is flat}
    whole, share = sum(part.shape.numel() for part in parts), flat.parameter.numel()
    return whole, min(max(whole - share * wrapper.rank, 0), share)
