"""Functions and events of PyTorch's own, given to modules that libfsdp sharded."""

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

import libfsdp
from harness import on_ranks
from libfsdp import MixedPrecisionPolicy, fully_shard
from subjects import Methods, check_same, check_training, even, loss_of, mine, mlp, reference_backward, rows, seeded, shard_with


@on_ranks(2, comm=("shm",))
def test_register_fsdp_forward_method():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    ours, theirs = seeded(Methods), seeded(Methods)
    for model, shard in ((ours, fully_shard), (theirs, torch_fsdp.fully_shard)):
        shard(model, mp_policy=policy)
        torch_fsdp.register_fsdp_forward_method(model, "encode")
    got, expected = (model.encode(mine(rows(0, 5)), scale=torch.ones(1)) for model in (ours, theirs))
    assert got.dtype == expected.dtype == torch.float64 and torch.equal(got, expected)


@on_ranks(2, comm=("shm",))
def test_share_comm_ctx():
    stages, references = ([seeded(even, seed) for seed in (1, 2, 3)] for _ in range(2))
    torch_fsdp.share_comm_ctx([shard_with(fully_shard, stage) for stage in stages])
    for step in range(2):
        batch = rows(step, 4)
        nn.Sequential(*stages)(mine(batch)).sum().backward()
        reference_backward(nn.Sequential(*references), lambda model, part: model(part).sum(), batch)
        for ours, theirs in zip(stages, references):
            check_same(ours, theirs, what="gradients")
            ours.zero_grad(), theirs.zero_grad()


@on_ranks(1, comm=("shm",))
def test_unshard_handles_are_pytorchs():
    handle = fully_shard(nn.Linear(2, 2)).unshard(async_op=True)
    assert isinstance(handle, torch_fsdp.UnshardHandle) and isinstance(handle, libfsdp.UnshardHandle)


@on_ranks(2, comm=("shm",))
def test_an_event_is_waited_for_once():
    import gc
    import weakref

    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    check_training(model, reference, loss_of, (5,), exact=True, steps=1)
    event = torch.Event(device="cpu")
    gone = weakref.ref(event)
    model.set_post_optim_event(event)
    del event
    assert gone() is not None, "until the next gathers"
    check_training(model, reference, loss_of, (5,), exact=True, steps=1)
    gc.collect()
    assert gone() is None
    model.set_post_optim_event(torch.cpu.current_stream().record_event())  # None
    check_training(model, reference, loss_of, (5,), exact=True, steps=1)
    for event in (torch.Event(device="cpu"), None):
        with pytest.raises(RuntimeError, match="is for the root"):
            model[0].set_post_optim_event(event)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_events_are_passed_on():
    from libfsdp._module import _as_plain_event

    torch.cuda._sleep(200_000_000)
    event = torch.cuda.Event()
    event.record()
    passed_on = _as_plain_event(event, torch.device("cuda", torch.cuda.current_device()))
    assert type(passed_on) is torch.Event and not passed_on.query()
    torch.cuda.synchronize()
    assert passed_on.query()


@on_ranks(2)
def test_none_takes_back_a_factor_and_a_hook():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    for module in (model, model[0], model[2]):
        module.set_gradient_divide_factor(7.0)
        module.set_all_reduce_hook(lambda tensor: tensor.mul_(3))
        module.set_gradient_divide_factor(None)
        module.set_all_reduce_hook(None)
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


class Container(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(5), nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 5)})

    def forward(self, x):
        return self.heads["a"](self.norm(x)) + self.heads["b"](x)


@on_ranks(2, comm=("shm",))
def test_containers_in_a_list():
    reference, ours, theirs = seeded(Container), seeded(Container), seeded(Container)
    for model, shard in ((ours, fully_shard), (theirs, torch_fsdp.fully_shard)):
        shard([model.norm, model.heads])
        shard(model)
    assert [type(m).__name__ for m in ours.modules()] == [type(m).__name__ for m in theirs.modules()]
    check_training(ours, reference, loss_of, (5,), exact=True, steps=2)
