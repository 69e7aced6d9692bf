"""The registered parameters: DTensors that share storage with the engine's shards, and follow what users do to them."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import libfsdp
from harness import on_ranks
from libfsdp import CPUOffloadPolicy, fully_shard
from subjects import check_same, check_training, loss_of, mine, mlp, reference_backward, rows, seeded, whole


def sharded_mlp(seed=1, **options):
    model = seeded(mlp, seed)
    for block in (model[0], model[2], model):
        fully_shard(block, **options)
    return model


@on_ranks(1, 3, comm=("shm",))
def test_shards_are_what_torch_would_cut():
    reference, model = seeded(mlp), sharded_mlp()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
        full = dict(reference.named_parameters())[name]
        assert parameter.placements == (Shard(0),)
        assert parameter.shape == full.shape and parameter.stride() == full.stride()
        chunks = torch.chunk(full, dist.get_world_size())
        expected = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else full[:0]
        assert torch.equal(parameter.to_local(), expected)
        assert torch.equal(whole(parameter), full)
    assert type(model[0].weight) is nn.Parameter and model[0].weight.shape == (7, 5)


@on_ranks(1, 2, 3, comm=("shm",))
def test_random_numbers_for_registered_parameters_are_those_of_the_whole():
    reference, model = nn.LSTM(4, 5, num_layers=2), fully_shard(nn.LSTM(4, 5, num_layers=2))
    for fill in (nn.LSTM.reset_parameters, lambda each: [nn.init.normal_(p) for p in each.parameters()]):
        for each in (reference, model):
            torch.manual_seed(3)
            fill(each)
        check_same(model, reference)


@on_ranks(2)
def test_state_dict_shares_storage_and_moves_nothing():
    model = sharded_mlp()
    saved = model.state_dict()
    for name, parameter in model.named_parameters():
        assert saved[name].to_local().data_ptr() == parameter.to_local().data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, mine(rows(0, 5))).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(saved[name].to_local(), parameter.to_local()), "the saved state follows the training"


@pytest.mark.parametrize("reshard", [None, True, False, 1])
@on_ranks(2, comm=("shm",))
def test_registered_parameters_are_the_shards_at_any_time(reshard):
    model, reference = sharded_mlp(reshard_after_forward=reshard), seeded(mlp)
    shards = list(model.parameters())
    handles = [model[0].weight, model[3].bias]

    def check():
        assert all(p is q for p, q in zip(model.parameters(), shards, strict=True))
        assert model[0].weight is handles[0] and model[3].bias is handles[1]
        check_same(model, reference)

    check()
    model.unshard()
    model[0].unshard(async_op=True).wait()
    check()
    loss = loss_of(model, mine(rows(0, 5)))
    check()
    model[0].reshard()
    loss.backward()
    check()


@on_ranks(4, comm=("shm",))
def test_loading_a_state_dict_writes_in_place():
    """Some ranks hold nothing of a small layer; their shards stay where they are as well."""
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for width in (2, 3, 4, 5):
        make = lambda: nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))  # noqa: B023, E731
        for options in ({}, dict(mesh=hybrid), dict(shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)):
            model, other = fully_shard(seeded(make), **options), fully_shard(seeded(make, 7), **options)
            where = [p.to_local().data_ptr() for p in model.parameters()]
            model.load_state_dict(other.state_dict())
            assert [p.to_local().data_ptr() for p in model.parameters()] == where
            check_same(model, seeded(make, 7))
            x = mine(rows(0, 4))
            assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2, 3)
def test_load_state_dict(assign):
    source, model = sharded_mlp(seed=7), sharded_mlp(seed=1)
    reference = seeded(mlp, 7)
    saved = {name: copy.copy(value.detach().clone()) for name, value in source.state_dict().items()}
    model.load_state_dict(saved, assign=assign)
    check_same(model, reference)
    check_training(model, reference, loss_of, (5,), exact=False, steps=2)
    partial = {name: value for name, value in source.state_dict().items() if name.startswith("0.")}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(partial, assign=assign)
    assert model.load_state_dict(partial, strict=False, assign=assign).missing_keys
    assert torch.equal(model(mine(rows(0, 5))), model(mine(rows(0, 5))))


@on_ranks(2, comm=("shm",))
def test_assigned_to_a_submodule():
    source, model = sharded_mlp(seed=7), sharded_mlp(seed=1)
    state = {name: value.detach().clone() for name, value in source[2].state_dict().items()}
    nn.Module.load_state_dict(model[2][0], {n.removeprefix("0."): v for n, v in state.items()}, assign=True)
    batch = mine(rows(0, 5))
    expected = seeded(mlp, 1)
    expected[2].load_state_dict(seeded(mlp, 7)[2].state_dict())
    assert torch.equal(model(batch), expected(batch))
    assert type(model[2][0].weight) is nn.Parameter and not isinstance(model[2][0].weight, DTensor)


@on_ranks(2, comm=("shm",))
def test_replaced_parameters_are_followed():
    model, reference = sharded_mlp(), seeded(mlp)
    fresh = torch.rand(7, 5, generator=torch.Generator().manual_seed(3))
    model[0].weight = nn.Parameter(fresh.clone())
    reference[0].weight = nn.Parameter(fresh.clone())
    batch = mine(rows(0, 5))
    assert torch.equal(model(batch), reference(batch))
    assert isinstance(model[0]._parameters["weight"], DTensor)
    model[0].weight = nn.Parameter(torch.rand(3, 3))
    with pytest.raises(ValueError, match="shape"):
        model(batch)


@on_ranks(1, 2)
def test_to_dtype():
    model, reference = sharded_mlp(), seeded(mlp).double()
    loss_of(model, mine(rows(0, 5))).backward()
    model.zero_grad()
    assert model.to(torch.float64) is model
    for parameter in model.parameters():
        assert parameter.dtype == parameter.to_local().dtype == parameter._spec.tensor_meta.dtype == torch.float64

    def double_loss(module, batch):
        return module(batch.double()).pow(2).mean()

    check_training(model, reference, double_loss, (5,), exact=True, steps=3)
    assert next(model.parameters()).grad is None


class AsksDtype(nn.Module):
    """As T5 does, and recurrent networks do, before any operator."""

    def __init__(self):
        super().__init__()
        self.linear, self.lstm = nn.Linear(5, 5), nn.LSTM(5, 5)

    def forward(self, x):
        return self.lstm(self.linear(x.to(self.linear.weight.dtype)))[0]


@on_ranks(1, 2)
def test_who_asks_before_any_operator_sees_the_dtype_that_is_there_now():
    def to_double(model):
        model.double()
        assert model.linear.weight.dtype == torch.float64

    def part_by_part(model):
        model.linear.double(), model.lstm.double()

    def load(model):
        state = {name: p.detach().double() for name, p in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert model.lstm.weight_ih_l0.dtype == torch.float64

    for convert in (to_double, part_by_part, load):
        model, reference = fully_shard(seeded(AsksDtype)), seeded(AsksDtype).double()
        convert(model)

        def double_loss(module, batch):
            return module(batch.double()).pow(2).mean()

        check_training(model, reference, double_loss, (5,), exact=True, steps=2)


@on_ranks(2, comm=("shm",))
def test_to_device_leaves_shards_that_are_there():
    model, reference = sharded_mlp(), seeded(mlp)
    shards = list(model.parameters())
    where = [p.to_local().data_ptr() for p in shards]
    for move in (model.cpu, lambda: model.to("cpu"), lambda: model[2].to(torch.device("cpu"))):
        move()
        assert all(p is q for p, q in zip(model.parameters(), shards, strict=True))
        assert [p.to_local().data_ptr() for p in shards] == where
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2)
def test_to_dtype_of_a_plain_submodule():
    model = sharded_mlp()
    model[2][0].to(torch.float64)
    assert model[2][0]._parameters["weight"].dtype == torch.float64
    assert model[2](torch.rand(2, 7).double()).dtype == torch.float64


def on_meta():
    with torch.device("meta"):
        return mlp()


def initialize(module):
    """The same values on all ranks, whatever the order of the modules."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear):
            torch.manual_seed(len(name) + each.out_features)
            each.reset_parameters()


@on_ranks(1, 2, 3)
def test_meta_device_initialization():
    model = on_meta()
    for block in (model[0], model[2], model):
        fully_shard(block)
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(RuntimeError, match="materialized from meta device.*0.weight"):
        model(torch.rand(2, 5))
    model.to_empty(device="cpu")
    initialize(model)
    reference = mlp()
    initialize(reference)
    check_same(model, reference)
    check_training(model, reference, loss_of, (5,), exact=False, steps=2)


@on_ranks(2, comm=("shm",))
def test_meta_device_initialization_module_by_module():
    model = on_meta()
    fully_shard(model)
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
        initialize(module) if isinstance(module, nn.Linear) else None
    reference = mlp()
    for module in reference.modules():
        initialize(module) if isinstance(module, nn.Linear) else None
    check_same(model, reference)


@on_ranks(2, comm=("shm",))
def test_meta_device_and_assigned_checkpoint():
    source, model = seeded(mlp, 4), on_meta()
    fully_shard(model[0])
    fully_shard(model)
    mesh = next(model.parameters()).device_mesh
    full = source.state_dict()
    shards = {name: distribute_tensor(full[name], mesh, p.placements) for name, p in model.named_parameters()}
    model.load_state_dict(shards, assign=True)
    check_same(model, source)
    check_training(model, source, loss_of, (5,), exact=True, steps=2)


@on_ranks(2)
def test_meta_device_and_a_checkpoint_in_pieces_for_shards_on_the_host():
    source = seeded(mlp, 4)
    model = on_meta()
    for block in (model[0], model[2], model):
        fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for name, parameter in list(model.named_parameters()):
        piece = {name: distribute_tensor(source.state_dict()[name], parameter.device_mesh, parameter.placements)}
        left = model.load_state_dict(piece, strict=False, assign=True)
        assert name not in left.missing_keys and not left.unexpected_keys
    check_same(model, source)
    check_training(model, source, loss_of, (5,), exact=True, steps=2)


@on_ranks(2)
def test_meta_device_and_a_parameter_that_is_replaced():
    """All before the first forward: some are made real, one is exchanged for another."""
    model, reference = on_meta(), mlp()
    for block in (model[0], model[2], model):
        fully_shard(block)
    for module in (model[0], model[2], model[3]):
        module.to_empty(device="cpu")
    initialize(model), initialize(reference)
    fresh = torch.full((3, 9), 0.25)
    reference[3].weight = nn.Parameter(fresh.clone())
    old = model[3]._parameters["weight"]
    model[3].weight = nn.Parameter(distribute_tensor(fresh, old.device_mesh, old.placements))
    check_training(model, reference, loss_of, (5,), exact=True, steps=2)


@on_ranks(2, 3)
def test_deepcopy_is_a_sharded_copy():
    model, reference = sharded_mlp(), seeded(mlp)
    model[0].bias.requires_grad_  # read, as users do
    twin = copy.deepcopy(model)
    assert type(twin) is type(model) and type(twin[2]) is type(model[2])
    before = {name: whole(p).clone() for name, p in model.named_parameters()}
    check_training(twin, reference, loss_of, (5,), exact=False, steps=2)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), before[name]), "the original is left alone"
        assert parameter.to_local().data_ptr() != dict(twin.named_parameters())[name].to_local().data_ptr() or (
            parameter.to_local().numel() == 0
        )


@on_ranks(2)
def test_state_dicts_are_saved_and_copied(folder=""):
    import os

    model = sharded_mlp()
    os.makedirs(folder, exist_ok=True)
    path = f"{folder}/{dist.get_rank()}.pt"
    torch.save(model.state_dict(), path)
    loaded = torch.load(path, weights_only=False)
    copied = copy.deepcopy(model.state_dict())
    for name, parameter in model.named_parameters():
        for state in (loaded, copied):
            assert torch.equal(state[name].to_local(), parameter.to_local())
            assert state[name].placements == parameter.placements
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert copied["0.weight"].to_local().abs().sum() > 0 or copied["0.weight"].to_local().numel() == 0


@on_ranks(1, comm=("shm",))
def test_pickling_is_refused():
    with pytest.raises(TypeError, match="cannot be pickled.*state_dict"):
        pickle.dumps(sharded_mlp())


@on_ranks(2)
def test_distributed_checkpoint(folder=""):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    def trained(shard, seed):
        model = seeded(mlp, seed)
        shard(model[0])
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, mine(rows(0, 5))).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    for i, (writer, reader) in enumerate(
        [(fully_shard, fully_shard), (fully_shard, torch_fully_shard), (torch_fully_shard, fully_shard)]
    ):
        model, optimizer = trained(writer, 1)
        saved_model, saved_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": saved_model, "optimizer": saved_optimizer}, checkpoint_id=f"{folder}/{i}")
        other, other_optimizer = trained(reader, 2)
        model_state, optimizer_state = get_state_dict(other, other_optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{i}")
        set_state_dict(other, other_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        for step in (1, 2):
            for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
                loss_of(each, mine(rows(step, 5))).backward()
                its_optimizer.step()
                its_optimizer.zero_grad()
        for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters()):
            torch.testing.assert_close(whole(p), whole(q), msg=lambda m: f"{i} {name}: {m}")


@on_ranks(2, comm=("shm",))
def test_full_state_dict_helper():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, reference = sharded_mlp(), seeded(mlp)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in reference.state_dict().items():
        assert torch.equal(full[name], value) and not isinstance(full[name], DTensor)


@on_ranks(2)
def test_whole_state_dicts_that_one_rank_has():
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    def stepped(model, step):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, mine(rows(step, 5))).backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    source, model = sharded_mlp(seed=7), sharded_mlp(seed=1)
    optimizers = stepped(source, 0), stepped(model, 1)
    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole_state = {name: value.full_tensor() for name, value in source.state_dict().items()}
    optimizer_state = copy.deepcopy(get_optimizer_state_dict(source, optimizers[0], options=on_rank_0))
    if dist.get_rank() != 0:
        whole_state, optimizer_state = {}, {}
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole_state, options=spread)
    set_optimizer_state_dict(model, optimizers[1], optimizer_state, options=spread)
    for each, optimizer in zip((source, model), optimizers, strict=True):
        loss_of(each, mine(rows(2, 5))).backward()
        optimizer.step()
    for p, q in zip(source.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


@on_ranks(2, 3)
def test_writes_wait_until_other_ranks_have_read():
    """However ranks write their shards, a rank that goes on at once reads what the others wrote, not what was there."""
    import time

    model = fully_shard(nn.Linear(4, 4, bias=False))
    x = torch.ones(1, 4)
    writes = {
        "in place": lambda p: p.add_(1.0),
        "through data": lambda p: p.data.mul_(2.0),
        "through detach": lambda p: p.detach().fill_(3.0),
        "local": lambda p: p.to_local().add_(1.0),
        "foreach": lambda p: torch._foreach_mul_([p], 2.0),
        "copy": lambda p: p.copy_(p.detach() + 1),
    }
    for name, write in writes.items():
        for _ in range(2):
            with torch.no_grad():
                model(x)
                if dist.get_rank() == 0:
                    time.sleep(0.05)
                write(next(model.parameters()))
                out = model(x)
                full = whole(next(model.parameters()))
                assert torch.equal(out, nn.functional.linear(x, full)), name


@on_ranks(2, 3)
def test_summon_full_params():
    model, reference = sharded_mlp(), seeded(mlp)
    loss_of(model, mine(rows(0, 5))).backward()
    reference_backward(reference, loss_of, rows(0, 5))
    with libfsdp.summon_full_params(model, with_grads=True):
        for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters()):
            assert isinstance(p, nn.Parameter) and not isinstance(p, DTensor)
            assert torch.equal(p, q), name
            torch.testing.assert_close(p.grad, q.grad)
        with torch.no_grad():
            model[0].weight.fill_(0.5)
            reference[0].weight.fill_(0.5)
    check_same(model, reference)
    with libfsdp.summon_full_params(model, writeback=False), torch.no_grad():
        next(model.parameters()).zero_()
    check_same(model, reference)
    with libfsdp.summon_full_params(model, recurse=False):
        assert isinstance(model[0]._parameters["weight"], DTensor)
        assert not isinstance(model[3]._parameters["weight"], DTensor)
    with pytest.raises(libfsdp.Error, match="rank0_only"):
        with libfsdp.summon_full_params(model, rank0_only=True):
            pass


@on_ranks(2, comm=("shm",))
def test_what_cannot_be_written_back_is_an_error():
    model, reference = sharded_mlp(), seeded(mlp)
    with pytest.raises(libfsdp.Error, match="'0.weight' has shape .*Write into it"):
        with libfsdp.summon_full_params(model), torch.no_grad():
            model[0]._parameters["weight"].set_(torch.zeros(3))
            for each in (model, reference):
                each[3].bias.fill_(5)
    check_same(model, reference)
    check_training(model, reference, loss_of, (5,), exact=True, steps=1)


@on_ranks(2, comm=("shm",))
def test_others_in_the_places_of_summoned_parameters_are_written_back():
    model, reference = sharded_mlp(), seeded(mlp)
    with libfsdp.summon_full_params(model):
        model[0].weight = nn.Parameter(torch.ones(7, 5))
    nn.init.ones_(reference[0].weight)
    check_training(model, reference, loss_of, (5,), exact=True, steps=1)


@on_ranks(2, comm=("shm",))
def test_summoned_parameters_that_change_places_are_written_back():
    model = nn.Sequential(fully_shard(nn.Linear(5, 5)), fully_shard(nn.Linear(5, 5)))
    first, second = whole(model[0]._parameters["weight"]).clone(), whole(model[1]._parameters["weight"]).clone()

    def members():
        model[0].weight, model[1].weight = model[1].weight, model[0].weight

    def aliases():
        kept = nn.Parameter(model[0].weight.data)
        model[0].weight = nn.Parameter(model[1].weight.detach())
        model[1].weight = kept

    def registered():
        model[0].weight, model[1].weight = (model[i]._parameters["weight"] for i in (1, 0))

    def data():
        a, b = (model[i]._parameters["weight"] for i in (0, 1))
        a.data, b.data = b.data, a.data

    for exchange in (members, aliases, registered, data):
        with libfsdp.summon_full_params(model):
            exchange()
        first, second = second, first
        assert torch.equal(whole(model[0]._parameters["weight"]), first), exchange.__name__
        assert torch.equal(whole(model[1]._parameters["weight"]), second), exchange.__name__


@on_ranks(2, comm=("shm",))
def test_describe():
    text = str(libfsdp.describe(sharded_mlp()))
    assert "(root)" in text and "float32" in text and "Mesh(2, cpu)" in text
    units = libfsdp.describe(sharded_mlp()).units
    assert [unit.name for unit in units] == ["(root)", "0", "2"]
    assert units[1].numel == 7 * 5 + 7
    with pytest.raises(ValueError, match="fully_shard"):
        libfsdp.describe(nn.Linear(2, 2))


@on_ranks(2, comm=("shm",))
def test_data_put_in_a_parameters_place_within_a_forward_are_an_error_in_backward():
    class Replaces(nn.Linear):
        def forward(self, x):
            self.weight.data = torch.ones(4, 4)
            return super().forward(x)

    model = fully_shard(Replaces(4, 4))
    with pytest.raises(libfsdp.Error, match="the data of 'weight' were replaced"):
        model(torch.ones(2, 4)).sum().backward()
