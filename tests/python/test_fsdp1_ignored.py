"""``FullyShardedDataParallel``: modules that are left alone may be others on each rank."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import libfsdp
from fsdp1_subjects import FSDP, check_training
from harness import on_ranks
from subjects import seeded

FLAT = libfsdp.FullyShardedDataParallel


class Scale(nn.Module):
    """Frozen, and of no consequence: what is trained is the same with as many as one likes."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return x * self.factor[0]


def layers(scales):
    return nn.Sequential(nn.Linear(5, 7), *(Scale() for _ in range(scales)), nn.Tanh(), nn.Linear(7, 3))


def wrapped(wrap, scales):
    model = seeded(functools.partial(layers, scales))
    return wrap(model, ignored_modules=[each for each in model if isinstance(each, Scale)])


@pytest.mark.parametrize("wrap", [FSDP, FLAT])
@on_ranks(2, 3)
def test_ranks_may_ignore_other_modules(wrap):
    model = wrapped(wrap, dist.get_rank())
    reference = seeded(functools.partial(layers, dist.get_rank()))
    if wrap is FSDP:
        check_training(model, reference, exact=libfsdp._mesh._shared_memory)
    last = f"{2 + dist.get_rank()}.weight"
    assert last in model.state_dict() and last in dict(reference.named_parameters())


@pytest.mark.parametrize("wrap", [FSDP, FLAT])
@on_ranks(2)
def test_optimizer_states_where_ranks_ignore_other_modules(wrap):
    model = wrapped(wrap, 2 * dist.get_rank())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FLAT.state_dict_type(model, kind):
            state = FLAT.optim_state_dict(model, optimizer)
            assert f"{2 + 2 * dist.get_rank()}.weight" in state["state"]
            before = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in trained]
            optimizer.load_state_dict(FLAT.optim_state_dict_to_load(model, optimizer, state))
            for old, parameter in zip(before, trained):
                if parameter.numel() == 0:
                    continue
                for key, value in old.items():
                    assert torch.equal(optimizer.state[parameter][key], value)


@on_ranks(2)
def test_ranks_that_shard_other_sizes_are_an_error():
    with pytest.raises(libfsdp.Error, match="shard differently"):
        FSDP(nn.Linear(5, 7 + dist.get_rank()))


@on_ranks(2)
@pytest.mark.parametrize("state_dict_type", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
def test_ignored_parameters_that_are_dtensors_are_loaded_as_they_are_saved(state_dict_type):
    def made(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parallelize_module(model[1], init_device_mesh("cpu", (2,)), ColwiseParallel())
        return FLAT(model, ignored_states=list(model[1].parameters()))

    first, second = made(0), made(1)
    for model in (first, second):
        FLAT.set_state_dict_type(model, state_dict_type)
    second.load_state_dict(first.state_dict())
    for each, other in zip(first.module[1].parameters(), second.module[1].parameters(), strict=True):
        assert isinstance(other, DTensor) and other.full_tensor().equal(each.full_tensor())
    with FLAT.summon_full_params(first), FLAT.summon_full_params(second):
        assert first.module[0].weight.equal(second.module[0].weight)
