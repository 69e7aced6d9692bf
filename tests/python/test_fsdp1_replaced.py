"""``FullyShardedDataParallel``: what users put in the places of parameters is seen by whatever reads them next."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy, StateDictType

import libfsdp
from fsdp1_subjects import FSDP, quietly, summoned
from harness import on_ranks
from subjects import seeded


def two_layers():
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 7))


def read_summoned(model):
    with summoned(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def read_state_dict(model):
    return model.state_dict()


def read_rows(model):
    with libfsdp.FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        rows = quietly(model.state_dict)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    quietly(model.load_state_dict, rows)
    return model.state_dict()


def load_and_read(model):
    model.load_state_dict({name: torch.full_like(value, 2) for name, value in two_layers().state_dict().items()})
    return model.state_dict()


def exchange_parameter(module, value):
    module.weight = nn.Parameter(torch.full((7, 5), value))


def exchange_data(module, value):
    module.weight.data = torch.full((7, 5), value)


@pytest.mark.parametrize("read", [read_summoned, read_state_dict, read_rows, load_and_read])
@on_ranks(1, 2, 3)
def test_replaced_parameters_are_seen_without_a_forward(read):
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for exchange in (exchange_parameter, exchange_data):
            model = quietly(FSDP, seeded(two_layers), sharding_strategy=strategy)
            exchange(model.module[1], 2.0)
            assert torch.equal(read(model)["1.weight"], torch.full((7, 5), 2.0))
            exchange(model.module[1], 3.0)
            model(torch.ones(1, 5)).sum().backward()
            assert sum(parameter.grad is not None for parameter in model.parameters()) == 4


@pytest.mark.parametrize("read", [read_summoned, read_state_dict, load_and_read])
@on_ranks(1, 2, 3)
def test_replaced_flat_parameters_are_seen_without_a_forward(read):
    for exchange in ("object", "data"):
        model = quietly(libfsdp.FullyShardedDataParallel, seeded(two_layers))
        value = torch.full_like(model.module._flat_param, 2)
        if exchange == "object":
            model.module._flat_param = nn.Parameter(value)
        else:
            model.module._flat_param.data = value
        assert all(torch.equal(value, torch.full_like(value, 2)) for value in read(model).values())


@on_ranks(2, 3)
def test_replaced_parameters_of_another_shape_are_an_error_on_the_ranks_that_have_them():
    for read in (read_summoned, read_state_dict):
        model = FSDP(seeded(two_layers))
        layer = model.module[min(model.rank, 1)]
        layer.weight = nn.Parameter(torch.ones(6, 8))
        with pytest.raises(RuntimeError, match="Cannot writeback when the parameter shape changes"):
            read(model)
