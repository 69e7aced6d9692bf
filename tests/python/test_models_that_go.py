"""Ranks may let go of a model at different times: a garbage collector comes when it likes."""

import gc

import torch
import torch.distributed as dist
from torch import nn

from fsdp1_subjects import FSDP
from harness import on_ranks
from libfsdp import fully_shard


def trained(wrap):
    model = wrap(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    return model


@on_ranks(2, 3)
def test_one_rank_lets_go_before_the_next_is_made():
    for wrap in (fully_shard, FSDP):
        for first in (0, 1):
            former = [trained(wrap)]
            if dist.get_rank() == first:
                former.clear()
                gc.collect()
            model = trained(wrap)
            former.clear()
            gc.collect()
            model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_a_process_group_of_its_own_may_end():
    for _ in range(2):
        group = dist.new_group([0, 1])
        model = FSDP(nn.Linear(4, 4), process_group=group)
        model(torch.ones(2, 4)).sum().backward()
        del model
        gc.collect()
        dist.barrier()
        dist.destroy_process_group(group)
