"""Tensor subclasses that say themselves how they are gathered, beside PyTorch's own fully_shard."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import libfsdp
from harness import on_ranks
from libfsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from subclasses import HalfOnTheWire, OlderPair, Pair, Scaled, ScaledOnTheWire, Wrapper, plain, wrapped
from subjects import check_hollow, mine, rows, seeded


class Block(nn.Module):
    def __init__(self, width=8, bias=False):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=bias), nn.Linear(2 * width, width, bias=bias)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def blocks(width=8, bias=False):
    return nn.Sequential(Block(width, bias), Block(width, bias))


def sharded(kind, shard=fully_shard, make=blocks, **options):
    model = wrapped(seeded(make), kind)
    for block in model:
        shard(block, **options)
    return shard(model, **options)


def loss_of(model, batch):
    return model(batch).pow(2).sum()


def number(loss):
    return plain(loss)[0].item()


def train(model, steps=3, width=8, accumulate=1):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            model.set_requires_gradient_sync(part == accumulate - 1)
            loss = loss_of(model, mine(rows(step + 10 * part, width)))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(number(loss))
    with torch.no_grad():
        losses.append(number(loss_of(model, mine(rows(steps, width)))))
    return losses


def check_as_pytorch(ours, theirs, exact, **options):
    got, expected = train(ours, **options), train(theirs, **options)
    assert got == expected if exact else got == pytest.approx(expected, rel=1e-5)
    for module in theirs.modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            module.reshard()  # PyTorch registers wholes meanwhile
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert type(p.to_local()) is type(q.to_local()) and p.placements == q.placements, name
        for a, b in zip(plain(p.to_local()), plain(q.to_local()), strict=True):
            bounds = dict(rtol=0, atol=0) if exact else {}
            torch.testing.assert_close(a, b[: len(a)], msg=lambda m: f"{name}: {m}", **bounds)


@pytest.mark.parametrize("kind", [Pair, OlderPair, HalfOnTheWire])
@on_ranks(2)
def test_trains_as_pytorch(kind):
    offload = dict(offload_policy=CPUOffloadPolicy(pin_memory=False))
    for options in ({}, dict(reshard_after_forward=True), dict(reshard_after_forward=False), offload):
        check_as_pytorch(sharded(kind, **options), sharded(kind, torch_fsdp.fully_shard, **options), exact=True)


@on_ranks(2)
def test_accumulates_as_pytorch():
    for kind in (Pair, HalfOnTheWire):
        check_as_pytorch(sharded(kind), sharded(kind, torch_fsdp.fully_shard), exact=True, accumulate=2)


@on_ranks(2)
def test_frozen_and_trainable_in_turns():
    for kind, frozen_first in itertools.product((Pair, HalfOnTheWire), (True, False)):
        model = wrapped(seeded(blocks), kind)
        model[0].up.weight.requires_grad_(not frozen_first)
        fully_shard(model)
        first, *others = model.parameters()
        for trainable in (not frozen_first, frozen_first, not frozen_first):
            first.requires_grad_(trainable)
            model(mine(rows(0, 8))).pow(2).sum().backward()
            assert (first.grad is not None) == trainable, (kind, frozen_first, trainable)
            assert all(p.grad is not None for p in others)
            model.zero_grad()


@on_ranks(2)
def test_hooks_on_the_gradient_of_the_whole():
    for kind in (Pair, HalfOnTheWire):
        model, expected, seen = sharded(kind), sharded(kind), []
        for step in range(3):
            for each in (model, expected):
                each(mine(rows(step, 8))).pow(2).sum().backward()
            model[0].up.weight.register_hook(lambda gradient: seen.append(gradient.shape))
        assert len(seen) == 3, kind
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad.to_local(), q.grad.to_local())


@on_ranks(2)
def test_activation_checkpoints():
    for reentrant in (True, False):
        model, expected = sharded(Pair), sharded(Pair)
        for each in (model, expected):
            out = mine(rows(0, 8)).requires_grad_()
            for block in each:
                out = block(out) if each is expected else checkpoint(block, out, use_reentrant=reentrant)
            out.pow(2).sum().backward()
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad.to_local(), q.grad.to_local())


@on_ranks(2, comm=("shm",))
def test_models_are_freed_by_reference_counting():
    for kind in (Pair, HalfOnTheWire, ScaledOnTheWire):
        gc.collect()
        gc.disable()
        model = sharded(kind)
        loss_of(model, mine(rows(0, 8))).backward()
        gone = [weakref.ref(model), weakref.ref(model[0].up), weakref.ref(fully_shard.state(model[0]))]
        del model
        assert [reference() for reference in gone] == [None] * 3, kind
        gc.enable()


@on_ranks(4, comm=("gloo",))
def test_hybrid_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for kind in (Pair, HalfOnTheWire):
        ours, theirs = sharded(kind, mesh=mesh), sharded(kind, torch_fsdp.fully_shard, mesh=mesh)
        check_as_pytorch(ours, theirs, exact=False)


@on_ranks(2)
def test_param_dtype():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours, theirs = (sharded(Pair, shard, mp_policy=policy) for shard in (fully_shard, torch_fsdp.fully_shard))
    check_as_pytorch(ours, theirs, exact=False)
    assert ours[0].up.weight.a.dtype == torch.bfloat16


class One:
    def size(self):
        return 1


def coarse(weight, kind):
    """What one rank alone would send, and make of it."""
    sent, _ = kind(weight.detach()).fsdp_pre_all_gather(One(), weight.shape, None, None, None)
    return sent[0].float() * (sent[1] if len(sent) > 1 else 1)


def check_computes_with_the_coarse(kind, width):
    """What is computed with is what the hooks make of the shards, and gradients are those of that."""
    make = lambda: blocks(width)  # noqa: E731
    model, reference = sharded(kind, make=make), seeded(make)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, reference)]
    for step in range(3):
        batch = rows(step, width)
        expected = copy.deepcopy(reference)
        for weight in expected.parameters():
            weight.data = coarse(weight, kind)
        loss = loss_of(model, mine(batch))
        torch.testing.assert_close(loss, loss_of(expected, mine(batch)))
        loss.backward()
        for part in batch.split(4):
            loss_of(expected, part).backward()
        for p, q, r in zip(model.parameters(), expected.parameters(), reference.parameters(), strict=True):
            r.grad = q.grad / dist.get_world_size()
            torch.testing.assert_close(p.grad.full_tensor(), r.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


@on_ranks(2, 4)
def test_a_whole_in_eight_bits():
    model = check_computes_with_the_coarse(ScaledOnTheWire, 8)
    assert type(model[0].up.weight) is Scaled and isinstance(model[0].up.weight, nn.Parameter)


@on_ranks(1, 3)
def test_uneven_shards_are_padded():
    check_computes_with_the_coarse(HalfOnTheWire, 5)


@on_ranks(2)
def test_wholes_have_no_memory_between_their_uses():
    for kind, parts in ((Pair, ("a", "b")), (ScaledOnTheWire, ("data_", "scale"))):
        model = sharded(kind, make=lambda: nn.Sequential(Block(), Block(), Block()), reshard_after_forward=True)
        train(model)  # the schedule is known then
        loss = loss_of(model, mine(rows(0, 8)))
        for part in parts:
            assert getattr(model[2].up.weight, part).sum(dtype=torch.float32).isfinite()
            check_hollow(getattr(model[0].up.weight, part), "0.up.weight")
        loss.backward()
        check_hollow(getattr(model[2].up.weight, parts[0]), "2.up.weight")


class Checks(Pair):
    """Looks at all that its hook is given."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.mesh_dim_names == ("shard",) and mp_policy.param_dtype == torch.bfloat16
        assert tuple(outer_size) == (module.out_features, module.in_features)
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


@on_ranks(4, comm=("gloo",))
def test_what_hooks_are_given_on_a_hybrid_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(Checks, mesh=mesh, mp_policy=low)
    loss_of(model, mine(rows(0, 8))).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(2)
def test_any_write_to_a_shard_ends_what_was_gathered():
    writes = {
        "in place": lambda p: p.mul_(0.5),
        "local": lambda p: p.to_local().mul_(0.5),
        "inner": lambda p: [tensor.mul_(0.5) for tensor in plain(p.to_local())],
        "data": lambda p: p.data.mul_(0.5),
    }
    model, batch = sharded(HalfOnTheWire, make=lambda: nn.Sequential(nn.Linear(4, 4, bias=False))), torch.ones(1, 4)
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        before = model(batch)
        for name, write in writes.items():
            for parameter in model.parameters():
                write(parameter)
            before = before * 0.5
            assert torch.equal(model(batch), before), name


@on_ranks(2)
def test_meta_device_and_hooks_that_come_later():
    """The shards get their values, and only then their hooks, which belong to one tensor and to no class."""
    with torch.device("meta"):
        model = wrapped(blocks(), Bare)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="materialized from meta device.*up.weight"):
        model(torch.ones(1, 8))
    model.to_empty(device="cpu")
    for i, parameter in enumerate(model.parameters()):
        torch.manual_seed(i)
        nn.init.uniform_(parameter)
    with pytest.raises(NotImplementedError, match="up.weight.*Bare.*no fsdp_pre_all_gather"):
        model(torch.ones(1, 8))
    model.reset_iter_state()
    for parameter in model.parameters():
        local = parameter._local_tensor
        for hook in (HalfOnTheWire.fsdp_pre_all_gather, HalfOnTheWire.fsdp_post_all_gather):
            setattr(local, hook.__name__, hook.__get__(local))
    assert all(map(lambda loss: loss > 0, train(model)))
    assert model[0].up.weight.dtype == torch.float32


class Bare(Wrapper):
    """No hooks."""


@on_ranks(2)
def test_state_dict():
    source, model = sharded(Pair), sharded(Pair)
    train(source)
    state = {name: value.detach().clone() for name, value in source.state_dict().items()}
    for assign in (False, True):
        model.load_state_dict(state, assign=assign)
        with torch.no_grad():
            assert number(loss_of(model, mine(rows(9, 8)))) == number(loss_of(source, mine(rows(9, 8))))


@on_ranks(2)
def test_to_dtype():
    model = sharded(Pair)
    train(model)
    model.to(torch.float64)
    out = model(mine(rows(0, 8)).double())
    assert out.dtype == torch.float64 and model[0].up.weight.a.dtype == torch.float64
    out.sum().backward()
    assert all(p.grad.dtype == torch.float64 for p in model.parameters())


@on_ranks(2, comm=("shm",))
def test_tied_and_mixed_with_plain_parameters():
    def make():
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
        model[2].weight = model[0].weight
        return model

    model, reference = seeded(make), seeded(make)
    shared = nn.Parameter(HalfOnTheWire(model[0].weight.detach().clone()))
    model[0].weight = model[2].weight = shared
    fully_shard(model[0])
    fully_shard(model)
    assert model[0]._parameters["weight"] is model[2]._parameters["weight"]
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(p.bfloat16() if p.ndim == 2 and p is not reference[1].weight else p)
    loss = loss_of(model, mine(rows(0, 6)))
    loss.backward()
    for part in rows(0, 6).split(4):
        loss_of(reference, part).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad / 2)
    norm = libfsdp.clip_grad_norm_(model.parameters(), 1e9)
    assert norm.item() == pytest.approx(torch.cat([q.grad.flatten() / 2 for q in reference.parameters()]).norm().item())


@on_ranks(2, comm=("shm",))
def test_what_cannot_be():
    model = sharded(Pair)
    train(model)
    with pytest.raises(TypeError, match="deepcopy.*Pair"):
        copy.deepcopy(model)
    with pytest.raises(libfsdp.Error, match="up.weight.*cannot be written or summoned"):
        with libfsdp.summon_full_params(model):
            pass
    with pytest.raises(libfsdp.Error, match="up.weight.*cannot be written or summoned"), torch.no_grad():
        model[0].up.weight.zero_()

    class Half(torch.Tensor):
        def fsdp_pre_all_gather(self, mesh):
            raise AssertionError

    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.rand(2, 2).as_subclass(Half))
    with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather"):
        fully_shard(module)

    class ThreeArguments(Pair):
        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride):
            raise AssertionError

    with pytest.raises(AssertionError, match="Invalid fsdp_pre_all_gather of 'up.weight'"):
        fully_shard(wrapped(Block(), ThreeArguments))(torch.rand(1, 8))


@on_ranks(3)
def test_ranks_that_send_different_sizes_are_told():
    model = fully_shard(wrapped(Block(5), OlderPair))
    with pytest.raises(libfsdp.Error, match=r"(?s)same sizes.*up.weight: .[24], 5. .*against\nup.weight: .[24], 5. .*pad"):
        model(torch.rand(1, 5))
