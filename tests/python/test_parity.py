"""Sharded training is unsharded training, whatever the ranks, the units and the policy."""

import pytest
import torch
from torch import nn

from harness import on_ranks
from libfsdp import FSDPModule, fully_shard
from subjects import check_training, mlp, seeded


def loss_of(model, batch):
    return model(batch).pow(2).mean()


def exact(means, ranks):
    """Gloo adds in another order as soon as there are more than two ranks."""
    return means == "shm" or ranks <= 2


@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(1, 2, 3, 4)
def test_units_of_blocks(reshard):
    import torch.distributed as dist

    reference, model = seeded(mlp), seeded(mlp)
    for block in (model[0], model[2], model):
        assert fully_shard(block, reshard_after_forward=reshard) is block
        assert isinstance(block, FSDPModule)
    check_training(model, reference, loss_of, (5,), exact(_means(), dist.get_world_size()))


def _means():
    from libfsdp import _mesh

    return "shm" if _mesh._shared_memory else "gloo"
