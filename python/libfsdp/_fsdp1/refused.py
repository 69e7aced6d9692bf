"""What PyTorch's class has and libfsdp's has not yet."""

from collections.abc import Callable
from typing import Any, NoReturn

NAMES = (
    "full_optim_state_dict",
    "sharded_optim_state_dict",
    "shard_full_optim_state_dict",
    "flatten_sharded_optim_state_dict",
    "scatter_full_optim_state_dict",
    "rekey_optim_state_dict",
    "optim_state_dict",
    "optim_state_dict_to_load",
)


def refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"libfsdp's FullyShardedDataParallel does not have {name} yet: save the optimizer's own state_dict() on each "
            "rank, for the same number of ranks, or use fully_shard with torch.distributed.checkpoint"
        )

    return refuse
