"""``module.weight``: what users do to the whole parameter reaches the one that is registered."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import libfsdp
from harness import on_ranks
from libfsdp import MixedPrecisionPolicy, fully_shard
from subjects import (
    BATCH,
    check_training,
    even,
    loss_of,
    mine,
    mlp,
    reference_backward,
    rows,
    seeded,
    shard_with,
    whole,
)


def backward(model, step=0):
    loss_of(model, mine(rows(step, 5))).backward()


@on_ranks(2)
def test_freezing_it_freezes_the_registered_one():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    for each in (reference, model):
        assert each[0].weight.requires_grad_(False) is each[0].weight
        assert not each[0].weight.requires_grad and not each[0]._parameters["weight"].requires_grad
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)
    for each in (reference, model):
        each[0].weight.requires_grad_()
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2)
def test_hooks_that_wait_for_its_gradient_are_given_the_registered_one():
    model, seen = shard_with(fully_shard, seeded(mlp)), []
    hook = model[0].weight.register_post_accumulate_grad_hook(seen.append)
    backward(model)
    assert len(seen) == 1 and seen[0] is model[0]._parameters["weight"] and seen[0].grad is not None
    hook.remove()
    backward(model)
    assert len(seen) == 1


@on_ranks(2)
def test_hooks_on_its_gradient_see_that_of_this_rank():
    reference, model, seen = seeded(mlp), shard_with(fully_shard, seeded(mlp)), []

    def double(gradient):
        seen.append(gradient.clone())
        return gradient * 2

    hook = model[0].weight.register_hook(double)
    for step in range(2):
        backward(model, step)
        expected = torch.autograd.grad(loss_of(reference, mine(rows(step, 5))), reference[0].weight)[0]
        assert torch.equal(seen[step], expected)
    hook.remove()
    backward(model, 2)
    for step in range(3):
        for part in rows(step, 5).split(BATCH):
            (loss_of(reference, part) * (2 if step < 2 else 1) / dist.get_world_size()).backward()
    torch.testing.assert_close(whole(model[0]._parameters["weight"].grad), reference[0].weight.grad)
    assert len(seen) == 2


@on_ranks(1, 2)
def test_hooks_from_before_sharding_stay():
    reference, model = seeded(even), seeded(even)
    stepped, kept = [], []
    for each in (reference, model):
        weight = each[0].weight
        kept.append([weight.register_hook(lambda gradient: gradient * 2), weight.register_hook(lambda gradient: None)])
        each[0].bias.register_post_accumulate_grad_hook(lambda parameter: stepped.append(parameter.grad is not None))
    shard_with(fully_shard, model)
    for step in range(4):
        if step == 1:
            for each in (reference, model):
                each[0].weight.register_hook(lambda gradient: gradient + gradient)
        elif step == 2:
            for hooks in kept:
                hooks[0].remove()
        reference.zero_grad(), model.zero_grad()
        loss_of(model, mine(rows(step, 4))).backward()
        reference_backward(reference, loss_of, rows(step, 4))
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, msg=lambda text: f"{step} {name}: {text}")
    assert stepped == [True] * len(stepped) and len(stepped) >= 8


@on_ranks(1, 2)
def test_hooks_of_registered_parameters_are_given_the_reduced_gradient():
    model, seen = shard_with(fully_shard, seeded(even)), []
    plain = shard_with(fully_shard, seeded(even))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient) or gradient.clamp(-(2**-10), 2**-10))
    for step in range(2):
        for each in (model, plain):
            loss_of(each, mine(rows(step, 4))).backward()
    for parameter, other in zip(model.parameters(), plain.parameters()):
        assert parameter.grad.placements == parameter.placements
        assert whole(parameter.grad).abs().max() <= 2**-9 < 2 * whole(other.grad).abs().max()
    assert len(seen) == 2 * len(list(model.parameters()))
    assert sum(whole(gradient).abs().sum() for gradient in seen[: len(seen) // 2]) > 0


@on_ranks(1, 2)
def test_hooks_from_before_are_called_where_it_was_frozen_when_it_was_sharded():
    for kept in (True, False):
        model, seen = seeded(even), []
        hook = model[0].weight.register_hook(seen.append)
        if not kept:
            hook.remove()
        model[0].weight.requires_grad_(False)
        shard_with(fully_shard, model)
        loss_of(model, mine(rows(0, 4))).backward()
        model[0].weight.requires_grad_()
        model[0].weight.register_hook(seen.append)
        loss_of(model, mine(rows(0, 4))).backward()
        assert len(seen) == (2 if kept else 1)
        assert model[0]._parameters["weight"].grad is not None


@on_ranks(1, 2)
def test_what_hooks_of_registered_parameters_return_is_checked():
    model = shard_with(fully_shard, seeded(even))
    for wrong in (lambda gradient: gradient.full_tensor(), lambda gradient: gradient.redistribute(placements=[Replicate()])):
        hook = model[0]._parameters["weight"].register_hook(wrong)
        with pytest.raises(libfsdp.Error, match=r"expected a DTensor with the parameter's placements, \(Shard\(dim=0\),\)"):
            loss_of(model, mine(rows(0, 4))).backward()
        hook.remove()
        model.reset_iter_state()
        model.zero_grad()
    loss_of(model, mine(rows(0, 4))).backward()


@on_ranks(1, 2)
def test_hooks_and_attributes_stay_when_the_dtype_changes():
    model, stepped, seen = seeded(even), [], []
    model[0].weight.note = "kept"
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: stepped.append(parameter.grad.dtype))
    shard_with(fully_shard, model)
    model[0]._parameters["bias"].register_hook(lambda gradient: seen.append(gradient.dtype))
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        loss_of(model, mine(rows(0, 4)).to(dtype)).backward()
        assert model[0]._parameters["weight"].note == "kept"
        model.zero_grad()
    assert stepped == seen == [torch.float64, torch.float32]


@on_ranks(1, 2)
def test_attributes_of_parameters_are_found_on_the_registered_ones():
    model = seeded(even)
    model[0].weight._no_weight_decay = True
    model[0].weight._optim = {"lr": 0.5}
    shard_with(fully_shard, model)
    registered = dict(model.named_parameters())["0.weight"]
    assert registered._no_weight_decay and registered._optim == {"lr": 0.5}
    assert not hasattr(dict(model.named_parameters())["0.bias"], "_no_weight_decay")
    assert model[0].weight._no_weight_decay


@on_ranks(2)
def test_its_gradient_is_the_registered_ones():
    model = shard_with(fully_shard, seeded(mlp))
    backward(model)
    with pytest.raises(libfsdp.Error, match=r"is on the shard that parameters\(\) gives"):
        model[0].weight.grad.norm()
    with pytest.raises(libfsdp.Error, match=r"is on the shard that parameters\(\) gives"):
        torch.optim.SGD([model[0].weight], lr=0.1).step()
    backward(model)


@on_ranks(2)
def test_writing_it_writes_the_shards():
    writes = {
        "data": lambda weight: weight.data.fill_(2),
        "detached": lambda weight: weight.detach().fill_(2),
        "initializer": lambda weight: nn.init.constant_(weight, 2),
        "copy": lambda weight: weight.copy_(torch.full_like(weight, 2)),
        "rows": lambda weight: [row.fill_(2) for row in weight],
        "foreach": lambda weight: torch._foreach_mul_([weight.fill_(1)], 2),
    }
    for name, write in writes.items():
        model = shard_with(fully_shard, seeded(mlp), reshard_after_forward=False)
        backward(model)
        with torch.no_grad():
            write(model[3].weight)
            assert torch.equal(whole(model[3]._parameters["weight"]), torch.full((3, 9), 2.0)), name
            expected = nn.functional.linear(torch.ones(1, 9), torch.full((3, 9), 2.0), model[3].bias)
            assert torch.equal(model[3](torch.ones(1, 9)), expected), name


@on_ranks(2, comm=("shm",))
def test_deleting_it_deletes_the_registered_one():
    model = shard_with(fully_shard, seeded(mlp))
    del model[3].bias
    assert not hasattr(model[3], "bias") and "3.bias" not in dict(model.named_parameters())
    model[3].bias = None
    backward(model)
    model[2][0].register_parameter("bias", None)
    assert model[2][0].bias is None
    backward(model)


@on_ranks(2, comm=("shm",))
def test_with_tensor_parallelism():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model, seen, waited = nn.Sequential(nn.Linear(4, 4)), [], []
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    model[0].weight.register_hook(seen.append)
    model[0].weight.register_post_accumulate_grad_hook(waited.append)
    for _ in range(2):
        model(torch.rand(2, 4)).sum().backward()
    assert len(seen) == 2 and all(isinstance(gradient, DTensor) for gradient in seen)
    assert [parameter is model[0]._parameters["weight"] for parameter in waited] == [True, True]
    model[0].weight.requires_grad_(False)
    assert not model[0]._parameters["weight"].requires_grad


@on_ranks(2, comm=("shm",))
def test_saving_and_copying_it_while_it_is_whole(folder=""):
    model, expected = fully_shard(seeded(mlp)), seeded(mlp)[0].weight
    model.unshard()
    path = f"{folder}{dist.get_rank()}"
    torch.save(model[0].weight, path)
    loaded = torch.load(path, weights_only=True)
    for each in (loaded, copy.deepcopy(model[0].weight)):
        assert type(each) is nn.Parameter and torch.equal(each, expected) and not vars(each)


@on_ranks(2)
def test_freezing_it_by_assignment_freezes_the_registered_one():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    backward(model)
    model.zero_grad()
    for wanted in (False, True):
        for each in (reference, model):
            each[0].weight.requires_grad = wanted
        check_training(model, reference, loss_of, (5,), exact=True, steps=2)
        assert model[0]._parameters["weight"].requires_grad is wanted
    model[0]._parameters["weight"].requires_grad = False
    backward(model)
    assert not model[0].weight.requires_grad


@on_ranks(2, 3)
def test_summoned_ones_have_their_own_dtype():
    masters = seeded(mlp)
    model = shard_with(fully_shard, seeded(mlp), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.no_grad(), libfsdp.summon_full_params(model):
        for p, q in zip(model.parameters(), masters.parameters(), strict=True):
            assert torch.equal(p, q)
            p.mul_(1.001)
        assert model[0].weight.dtype == torch.float32 and torch.equal(model[0].weight, masters[0].weight * 1.001)
        model[0].weight.add_(1)
        assert torch.equal(model[0]._parameters["weight"], masters[0].weight * 1.001 + 1)
        model(mine(rows(0, 5)))
    assert model[0].weight.dtype == torch.bfloat16
    assert torch.equal(whole(model[0]._parameters["weight"]), masters[0].weight * 1.001 + 1)
    assert torch.equal(whole(model[3]._parameters["bias"]), masters[3].bias * 1.001)
    backward(model)


def cut_in_two_ways():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = seeded(mlp)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


@pytest.mark.parametrize("writeback", (True, False))
@on_ranks(2)
def test_freezing_summoned_ones_freezes_the_registered_ones(writeback):
    for model in (shard_with(fully_shard, seeded(mlp)), cut_in_two_ways()):
        for wanted in (False, True):
            with libfsdp.summon_full_params(model, writeback=writeback):
                model[0].requires_grad_(wanted)
            assert [parameter.requires_grad for parameter in model[0].parameters()] == [wanted, wanted]
            model.zero_grad()
            backward(model)
            assert [parameter.grad is not None for parameter in model[0].parameters()] == [wanted, wanted]
            assert all(parameter.grad is not None for parameter in model[3].parameters())


@on_ranks(2, comm=("shm",))
def test_summoned_ones_have_their_own_dtype_with_tensor_parallelism():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.fill_(1.001)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.no_grad(), libfsdp.summon_full_params(model):
        for each in (model[0].weight, model[0]._parameters["weight"]):
            assert each.dtype == torch.float32 and torch.equal(whole(each), torch.full((4, 4), 1.001))
        model[0].weight.mul_(2)
    assert model[0].weight.dtype == torch.bfloat16
    with torch.no_grad(), libfsdp.summon_full_params(model):
        assert torch.equal(whole(model[0]._parameters["weight"]), torch.full((4, 4), 1.001) * 2)
    model(torch.rand(2, 4)).sum().backward()


@on_ranks(1, 2)
def test_optimizers_that_take_products_over_all_parameters():
    """``DTensor`` sums what LBFGS multiplies over the ranks, where these share the rows evenly (else it throws). Its loss
    has to be the same on every rank."""
    batch = rows(0, 4).double()
    reference, model = seeded(even).double(), shard_with(fully_shard, seeded(even).double())
    for line_search in (None, "strong_wolfe"):
        options = dict(lr=0.1, max_iter=5, history_size=3, line_search_fn=line_search)
        ours, theirs = (torch.optim.LBFGS(each.parameters(), **options) for each in (model, reference))

        def close(optimizer, loss_on_rank, average):
            optimizer.zero_grad()
            loss = loss_on_rank()
            loss.backward()
            loss = loss.detach()
            if average:
                dist.all_reduce(loss)
                loss /= dist.get_world_size()
            return loss

        def loss_of_doubles(model, batch):
            return model(batch).pow(2).mean()

        for _ in range(3):
            ours.step(lambda: close(ours, lambda: loss_of_doubles(model, mine(batch)), True))
            theirs.step(lambda: close(theirs, lambda: loss_of_doubles(reference, batch), False))
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(whole(p), q, rtol=1e-8, atol=1e-8)


@on_ranks(1, 2)
def test_what_was_written_to_it_stays_when_its_gradient_is_asked_for():
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    with torch.no_grad():
        model.weight.fill_(7)
    with pytest.raises(RuntimeError, match="gradient of a sharded parameter's handle"):
        model.weight.grad.norm()
    assert (whole(dict(model.named_parameters())["weight"]) == 7).all()
    assert (model.weight == 7).all()


@on_ranks(2)
def test_to_write_within_a_guard_that_drops_writes_is_an_error():
    model = shard_with(fully_shard, seeded(mlp))
    wrapped = libfsdp.FullyShardedDataParallel(seeded(lambda: nn.Linear(5, 3)), use_orig_params=True)
    summon, summon_wrapped = libfsdp.summon_full_params, libfsdp.FullyShardedDataParallel.summon_full_params
    part_of_a_unit = model[2][0]
    for each, within, inner in (
        (model, model, summon),
        (model, part_of_a_unit, summon),
        (wrapped, wrapped, summon),
        (wrapped, wrapped, summon_wrapped),
    ):
        with summon(each, writeback=False):
            with pytest.raises(RuntimeError, match="already shown by a guard with writeback = false"), inner(within):
                pass
            with inner(within, writeback=False):
                pass
    check_training(model, seeded(mlp), loss_of, (5,), exact=True, steps=1)


@on_ranks(2)
def test_a_call_within_a_guard_after_an_assignment_loses_nothing():
    model, x = shard_with(fully_shard, seeded(mlp)), mine(rows(0, 5))
    with libfsdp.summon_full_params(model), torch.no_grad():
        model[0].weight = nn.Parameter(torch.full_like(model[0]._parameters["weight"], 2.0))
        former = model(x)
        dict(model.named_parameters())["0.bias"].fill_(7)
        assert not torch.equal(model(x), former)
        model[0].bias.add_(1)
    parameters = dict(model.named_parameters())
    assert (whole(parameters["0.weight"]) == 2).all() and (whole(parameters["0.bias"]) == 8).all()
    with torch.no_grad():
        assert not torch.equal(model(x), former)


@on_ranks(2)
def test_ranks_that_are_shown_nothing_do_not_wait_for_one_that_is():
    model = shard_with(fully_shard, seeded(mlp))
    with libfsdp.summon_full_params(model, writeback=False, rank0_only=True):
        for each in (model, model[2][0]):
            with pytest.raises(RuntimeError, match="already shown on one rank"):
                with libfsdp.summon_full_params(each, writeback=False):
                    pass


@on_ranks(2)
def test_what_a_plain_parent_was_given_is_taken_over_before_it_is_shown():
    model, source = nn.Sequential(seeded(mlp)), seeded(mlp, 7)
    fully_shard(model[0])
    sharded = dict(shard_with(fully_shard, seeded(mlp, 7)).named_parameters())
    model.load_state_dict({f"0.{name}": value.detach().clone() for name, value in sharded.items()}, assign=True)
    with libfsdp.summon_full_params(model, writeback=False):
        for name, parameter in model[0].named_parameters():
            assert torch.equal(parameter, source.get_parameter(name)) and not isinstance(parameter, DTensor)
        assert torch.equal(model[0](mine(rows(0, 5))), source(mine(rows(0, 5))))


@pytest.mark.parametrize("registered", ["before", "after"])
@on_ranks(2)
def test_a_weight_tied_to_a_module_that_nobody_has_sharded_is_shown_there_too(registered):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    former = model[0].weight.detach().clone()
    fully_shard(model[0])
    if registered == "after":
        model[1].weight = dict(model[0].named_parameters())["weight"]
    there = model[1]._parameters["weight"]
    with libfsdp.summon_full_params(model), torch.no_grad():
        assert [name for name, _ in model.named_parameters()] == ["0.weight"]
        for name, parameter in model.named_parameters(remove_duplicate=False):
            assert torch.equal(parameter, former) and not isinstance(parameter, DTensor), name
        model[1].weight.add_(1)
    assert model[1]._parameters["weight"] is there
    assert torch.equal(whole(dict(model[0].named_parameters())["weight"]), former + 1)


@on_ranks(2, comm=("shm",))
def test_a_dtensor_tied_to_a_module_that_nobody_has_sharded_is_shown_there_too():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    values = torch.arange(16.0).view(4, 4)
    model[0].weight = model[1].weight = nn.Parameter(distribute_tensor(values, mesh["tp"], [Replicate()]))
    there = model[1]._parameters["weight"]
    fully_shard(model[0], mesh=mesh["dp"])
    with libfsdp.summon_full_params(model):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            assert torch.equal(whole(parameter), values) and parameter.device_mesh == mesh["tp"], name
    assert model[1]._parameters["weight"] is there
