"""Sharded training is unsharded training, whatever the ranks, the units and the policy."""

import torch.distributed as dist

from harness import on_ranks
from libfsdp import FSDPModule, _mesh, fully_shard
from subjects import check_training, loss_of, mlp, seeded


def order_is_fixed():
    """Gloo adds in another order as soon as there are more than two ranks."""
    return _mesh._shared_memory or dist.get_world_size() <= 2


@on_ranks(1, 2, 3, 4)
def test_units_of_blocks():
    for reshard in (None, True, False):
        reference, model = seeded(mlp), seeded(mlp)
        for block in (model[0], model[2], model):
            assert fully_shard(block, reshard_after_forward=reshard) is block
            assert isinstance(block, FSDPModule)
        check_training(model, reference, loss_of, (5,), order_is_fixed())
