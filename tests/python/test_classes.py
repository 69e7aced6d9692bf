"""Class swapping, states, and errors."""

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import Shard

import libfsdp
from harness import on_ranks
from libfsdp import FSDPModule, UnshardHandle, fully_shard


@on_ranks(1, comm=("shm",))
def test_class_swap():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model)
    assert type(model).__name__ == "FSDPSequential"
    assert isinstance(model, nn.Sequential) and isinstance(model, FSDPModule)
    assert isinstance(model, torch_fsdp.FSDPModule)
    assert not isinstance(model[0], FSDPModule)
    assert type(model[:1]) is nn.Sequential
    assert type(fully_shard(nn.Sequential(nn.Linear(2, 2)))) is type(model)


@on_ranks(1, comm=("shm",))
def test_states():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard([model[0], model[1]])
    fully_shard(model)
    assert fully_shard.state(model[0]) is fully_shard.state(model[1])
    assert fully_shard.state(model) is not fully_shard.state(model[0]) is not None
    assert fully_shard.state(model[2]) is None


@on_ranks(1, comm=("shm",))
def test_wrong_arguments():
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(AssertionError, match="only be applied to a module once"):
        fully_shard(model)
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(ValueError, match="containers that do not implement forward"):
            fully_shard(container)
    for wrong in ([1], [nn.Linear(2, 2), None]):
        with pytest.raises(ValueError, match="expects modules"):
            fully_shard(wrong)
    with pytest.raises(ValueError, match="fully_shard first, then torch.compile"):
        fully_shard(torch.compile(nn.Linear(2, 2), backend="eager"))
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scale.*1D tensor with numel equal to 1"):
        fully_shard(scalar)
    with pytest.raises(AssertionError, match="Shard dim 1 is invalid for 1D tensor"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda parameter: Shard(1))
    with pytest.raises(ValueError, match="should return a Shard"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda parameter: 1)
    with pytest.raises(ValueError, match="reshard_after_forward should be a bool"):
        model.set_reshard_after_forward(2)
    with pytest.raises(ValueError, match="Expects FSDPModule"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="Expects list of FSDPModules"):
        libfsdp.share_comm_ctx([nn.Linear(2, 2)])
    for wrong in (True, 1.5):
        with pytest.raises(TypeError, match="must be an int"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(ValueError, match="positive int"):
        model.set_reduce_scatter_max_input_buffers(0)
    with pytest.raises(ValueError, match="At least one"):
        libfsdp.DataParallelMeshDims()
    with pytest.raises(TypeError, match="expected a torch.Event"):
        model.set_post_optim_event("now")


@on_ranks(1, comm=("shm",))
def test_modules_without_parameters():
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    handle = model[0].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle) and handle.wait() is None
    model[0].reshard()
    model(torch.rand(1, 2)).sum().backward()


@on_ranks(2, comm=("shm",))
def test_what_pytorch_refuses():
    convolution = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    expected = convolution.weight.detach().clone()
    fully_shard(convolution)
    assert torch.equal(convolution._parameters["weight"].full_tensor(), expected)
    uneven = fully_shard(nn.Linear(3, 5), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    uneven(torch.rand(2, 3)).sum().backward()
    assert uneven._parameters["weight"].grad.full_tensor().shape == (5, 3)
    for dtype in (torch.uint8, torch.int64):
        mixed = nn.Linear(3, 3)
        mixed.table = nn.Parameter(torch.arange(7).to(dtype), requires_grad=False)
        fully_shard(mixed)
        assert torch.equal(mixed.table + 0, torch.arange(7).to(dtype))


@on_ranks(2, comm=("shm",))
def test_different_models_are_an_error():
    import torch.distributed as dist

    with pytest.raises(libfsdp.Error, match="shard differently"):
        fully_shard(nn.Linear(2, 2 + dist.get_rank()))
