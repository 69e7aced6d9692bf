"""What is read is what was written last, whether or not an operator showed the write; and a rank that looks at parameters
alone disturbs nobody."""

import ctypes
import io
import os
import shutil
import signal
import sysconfig
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import libfsdp
from harness import on_ranks
from libfsdp import _mesh, fully_shard
from subjects import check_same, loss_of, mine, reference_backward, rows, seeded, shard_with

RATE = 0.125  # a power of two: products with it are exact, however they are computed
WIDTH = 6  # which 2 and 3 ranks share evenly


class Stack(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )


def some_ranks_are_slower(step):
    if step % dist.get_world_size() == dist.get_rank():
        time.sleep(0.02)


def additions_have_one_order():
    return dist.get_world_size() == 2 or _mesh._shared_memory


def shard_blocks(model):
    return shard_with(fully_shard, model)


def shard_and_keep(model):
    return shard_with(fully_shard, model, reshard_after_forward=False)


def shard_and_keep_after_backward(model):
    model = shard_blocks(model)
    model.set_reshard_after_backward(False)
    return model


def check(make_step, make=Stack, shard=shard_blocks, steps=4, evaluates=False):
    """Training with steps that `make_step(model)` makes is training of the unsharded model with an ordinary optimizer, to
    the last bit; over Gloo with three ranks, which add in another order, to what float32 rounds."""
    tolerance = dict(rtol=0, atol=0) if additions_have_one_order() else dict(rtol=1e-5, atol=1e-6)
    reference, model = seeded(make), shard(seeded(make))
    ordinary, write = torch.optim.SGD(reference.parameters(), lr=RATE), make_step(model)
    for step in range(steps):
        batch = rows(step, WIDTH)
        loss, expected = loss_of(model, mine(batch)), loss_of(reference, mine(batch))
        torch.testing.assert_close(loss, expected, msg=lambda text: f"loss {step}: {text}", **tolerance)
        loss.backward()
        reference_backward(reference, loss_of, batch)
        some_ranks_are_slower(step)
        write()
        ordinary.step()
        if evaluates:
            with torch.no_grad():
                result, expected = (each(mine(batch)) for each in (model, reference))
            torch.testing.assert_close(result, expected, msg=lambda text: f"evaluation {step}: {text}", **tolerance)
        model.zero_grad(), reference.zero_grad()
    check_same(model, reference, exact=additions_have_one_order())


# Ways to the memory of a shard.


def numpy_of_local(parameter):
    return parameter.detach().to_local().numpy()


def numpy_behind_the_dtensor(parameter):
    return parameter._local_tensor.detach().numpy()


def address(parameter):
    local = parameter._local_tensor
    values = (ctypes.c_float * local.numel()).from_address(local.data_ptr())
    return np.frombuffer(values, np.float32).reshape(local.shape)


WAYS = pytest.mark.parametrize("way", [numpy_of_local, numpy_behind_the_dtensor, address])


def written_by(way):
    def make_step(model):
        def step():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    values = way(parameter)
                    values -= np.float32(RATE) * parameter.grad.to_local().numpy()

        return step

    return make_step


@WAYS
@on_ranks(2, 3)
def test_values_that_are_given_after_sharding(way):
    """As of a file, of which no operator tells."""
    for turn in range(2 * dist.get_world_size()):
        model = shard_blocks(Stack())
        some_ranks_are_slower(turn)
        for parameter in model.parameters():
            way(parameter).fill(1)
        with torch.set_grad_enabled(turn < dist.get_world_size()):
            assert torch.equal(model[0](torch.ones(2, WIDTH)), torch.full((2, WIDTH), WIDTH + 1.0)), turn


@on_ranks(2, 3, comm=("shm",))
def test_ranks_begin_with_different_models():
    models = [fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(dist.new_group(), "cpu")) for _ in range(2)]
    losses = {model: model(torch.ones(1, 4)).sum() for model in (models if dist.get_rank() == 0 else models[::-1])}
    for model in models:
        losses[model].backward()


@on_ranks(3, comm=("shm",))
def test_one_rank_reads_what_was_just_sharded():
    """One that has a part of it, and one that has none."""
    for reader in range(3):
        model = fully_shard(nn.Linear(1, 1))
        if dist.get_rank() == reader:
            with torch.no_grad():
                model(torch.ones(1, 1))
        dist.barrier()


@pytest.mark.meet(2)
@WAYS
@on_ranks(2, 3)
def test_steps_that_no_operator_shows(way):
    check(written_by(way))
    check(written_by(way), shard=shard_and_keep)


@pytest.mark.meet(2)
@WAYS
@on_ranks(2, 3)
def test_an_evaluation_after_a_step_that_no_operator_shows(way):
    check(written_by(way), evaluates=True)


@WAYS
@on_ranks(2)
def test_steps_that_no_operator_shows_where_parameters_stay_whole(way):
    def announced(model):
        write = written_by(way)(model)
        return lambda: (model.note_shard_writes(), write())

    check(announced, shard=shard_and_keep_after_backward)
    check(announced, shard=shard_and_keep_after_backward, evaluates=True)


@WAYS
@on_ranks(2, 3, comm=("shm",))
def test_steps_that_no_operator_shows_where_parameters_stay_whole_in_shared_memory(way):
    check(written_by(way), shard=shard_and_keep_after_backward, evaluates=True)


def can_compile():
    headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    return os.path.exists(headers) and any(map(shutil.which, [os.environ.get("CXX", "g++"), "g++", "clang++"]))


def compiled(model):
    from torch._inductor import config

    config.compile_threads = 1  # no processes beside this one
    return torch.compile(torch.optim.SGD(model.parameters(), lr=RATE).step, backend="inductor")


@pytest.mark.skipif(not can_compile(), reason="torch.compile needs a C++ compiler and Python's headers")
@on_ranks(2, comm=("shm",))
def test_a_step_that_was_compiled():
    check(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "it was compiled"


def add_one(values):
    values.detach().numpy().__iadd__(1)


@on_ranks(2)
def test_an_operator_that_is_defined_anew_to_write():
    """As when a notebook's cell is run again: the schema may lie where the former one did."""
    kernel = torch.library.Library("fresh_values", "IMPL")
    kernel.impl("add_one", add_one, "CPU")  # stays, and keeps the place
    model, other, x = fully_shard(nn.Linear(WIDTH, WIDTH)), fully_shard(nn.Linear(WIDTH, WIDTH)), torch.ones(2, WIDTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
        for schema, given, value in (("Tensor", other, 1), ("Tensor(a!)", model, 2)):
            library = torch.library.Library("fresh_values", "FRAGMENT")
            library.define(f"add_one({schema} values) -> ()")
            assert torch.equal(model(x), torch.full_like(x, WIDTH + 1))
            for parameter in given.parameters():
                torch.ops.fresh_values.add_one(parameter.to_local())
            assert torch.equal(model(x), torch.full_like(x, (WIDTH + 1) * value)), schema
            library._destroy()


@on_ranks(2, 3)
def test_collectives_on_shards():
    world, rank = dist.get_world_size(), dist.get_rank()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(world)))
    for layer in (*model, model):
        fully_shard(layer)
    x = torch.ones(1, WIDTH)

    def shards():
        return [parameter.detach().to_local() for parameter in model.parameters()]

    def values():
        """Of each layer's weight, from each rank's piece."""
        return torch.cat([layer(x) / WIDTH for layer in model]).view(world, world, -1).mean(-1).tolist()

    def gather():
        own = shards()
        dist.all_gather(own, torch.full_like(own[0], rank + 1.0))

    def scatter_from_last():
        for shard in shards():
            dist.scatter(shard, [torch.full_like(shard, 10.0 * each) for each in ranks] if rank == last else None, last)

    def reduce_scatter():
        for shard in shards():
            dist.reduce_scatter(shard, [torch.full_like(shard, 10.0 * each) for each in ranks])

    def from_first_to_each():
        for shard in shards():
            rows = shard.shape[0]
            sent = [torch.full_like(shard, 10.0 * each) for each in ranks] if rank == 0 else [shard.new_empty(0, WIDTH)]
            received, given = [rows, *[0] * last], [rows if rank == 0 else 0] * world
            dist.all_to_all_single(shard, torch.cat(sent), received, given)

    def whole_weights(collective, *arguments):
        for layer in model:
            collective(layer.weight, *arguments)

    def later(collective, *arguments):
        for work in [collective(shard, *arguments, async_op=True) for shard in shards()]:
            work.wait()

    ranks, last = range(world), world - 1
    total = [[world * (world + 1) / 2] * world] * world
    collectives = {
        "all_reduce": (lambda: [dist.all_reduce(shard) for shard in shards()], total),
        "all_reduce later": (lambda: later(dist.all_reduce), total),
        "broadcast": (lambda: [dist.broadcast(shard, last) for shard in shards()], [[world] * world] * world),
        "broadcast later": (lambda: later(dist.broadcast, last), [[world] * world] * world),
        "all_gather": (gather, [[each + 1] * world for each in ranks]),
        "scatter": (scatter_from_last, [[10 * each for each in ranks]] * world),
        "reduce_scatter": (reduce_scatter, [[10 * world * each for each in ranks]] * world),
        "all_to_all": (from_first_to_each, [[10 * each for each in ranks]] * world),
        "all_reduce of whole weights": (
            lambda: whole_weights(dist.all_reduce), [[world * (each + 1) for each in ranks]] * world
        ),
        "broadcast of whole weights": (
            lambda: whole_weights(dist.broadcast, last), [[each + 1 for each in ranks]] * world
        ),
    }
    with torch.no_grad():
        for step, (name, (collective, expected)) in enumerate([*collectives.items()] * 3):
            for shard in shards():
                shard.fill_(rank + 1)
            assert values() == [[each + 1 for each in ranks]] * world, f"before {name}"
            some_ranks_are_slower(step)
            collective()
            assert values() == expected, name


@on_ranks(2)
def test_a_forked_child_has_copies_that_were_made_before_and_writes_its_own():
    """Though they lie in memory that the ranks share, as big tensors do after the first step."""
    model = fully_shard(nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step():
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    copies = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
    expected = [copy.numpy().tobytes() for copy in copies]

    def are_as_they_were():
        return [copy.numpy().tobytes() for copy in copies] == expected

    go, told = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(200)  # a child that hangs is a failure
        try:
            os.read(go, 1)
            right = are_as_they_were()
            for copy in copies:
                copy.zero_()
            os._exit(0 if right and not any(copy.any() for copy in copies) else 1)
        finally:
            os._exit(1)
    for _ in range(3):
        step()
    os.write(told, b".")
    assert os.waitpid(child, 0)[1] == 0
    assert are_as_they_were()


def saved(parameter):
    file = io.BytesIO()
    torch.save(parameter._local_tensor, file)
    file.seek(0)
    return torch.load(file).numpy()


@pytest.mark.parametrize("way", [numpy_of_local, numpy_behind_the_dtensor, address, saved])
@on_ranks(2)
def test_a_shard_has_at_once_what_was_written_through_its_module(way):
    model = fully_shard(nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        for value in (7, 8):
            model.weight.fill_(value)
            model.bias.add_(1).fill_(value)
            for name, parameter in model.named_parameters():
                assert (way(parameter) == value).all(), (name, value)


@WAYS
@on_ranks(2, 3)
def test_announced_writes_between_evaluations(way):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for layer in (model[0], model):
        fully_shard(layer)
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        for value in range(1, 6):
            model(x)
            model.note_shard_writes()
            some_ranks_are_slower(value)
            for parameter in model.parameters():
                way(parameter)[...] = value
            hidden = WIDTH * value + value
            expected = torch.full_like(x, WIDTH * value * hidden + value)
            assert torch.equal(model(x), expected), value


def calls_that_change_shards(model, folder):
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    libfsdp.save(f"{folder}/run", model)
    libfsdp.export_safetensors(f"{folder}/weights", model)

    def write_in_a_guard():
        with libfsdp.summon_full_params(model):
            for parameter in model.parameters():
                parameter.add_(1)

    return {
        "load_state_dict": lambda: model.load_state_dict(state),
        "load": lambda: libfsdp.load(f"{folder}/run", model),
        "import_safetensors": lambda: libfsdp.import_safetensors(f"{folder}/weights", model),
        "a guard's end": write_in_a_guard,
    }


@WAYS
@on_ranks(2, 3)
def test_writes_that_no_operator_shows_after_calls_that_change_shards(way, folder=None):
    model = shard_with(fully_shard, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Linear(WIDTH, WIDTH)))
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        for value, (name, call) in enumerate(calls_that_change_shards(model, folder).items(), 1):
            model(x)
            call()
            some_ranks_are_slower(value)
            for parameter in model.parameters():
                way(parameter)[...] = value
            hidden = WIDTH * value + value
            assert torch.equal(model(x), torch.full_like(x, WIDTH * value * hidden + value)), name


class Looks(nn.Sequential):
    """One rank alone reads what is whole: the first layer, after another one's turn."""

    def __init__(self, after, always):
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.after, self.always = after, always

    def forward(self, x):
        looks = dist.get_rank() == 0 and (self.always or torch.is_grad_enabled())
        for number, layer in enumerate(self):
            x = torch.tanh(layer(x))
            if looks and number == self.after:
                with torch.no_grad():
                    self[0].weight.norm().item()
        return x


def keep_the_first(model):
    fully_shard(model[0], reshard_after_forward=False)
    for part in (model[1], model[2], model):
        fully_shard(part)
    return model


@pytest.mark.meet(2)
@pytest.mark.parametrize("after", range(4))
@on_ranks(2, 3)
def test_one_rank_looks_within_a_forward(after):
    def ordinary(model):
        return torch.optim.SGD(model.parameters(), lr=RATE).step

    for always in (True, False):
        for evaluates in (True, False):
            check(ordinary, lambda: Looks(after, always), keep_the_first, evaluates=evaluates)


@on_ranks(4, comm=("gloo",))
def test_a_share_that_an_evaluation_kept_does_not_outlive_a_step_that_no_operator_shows():
    reference, model = seeded(Stack), shard_with(fully_shard, seeded(Stack), reshard_after_forward=2)
    ordinary, write = torch.optim.SGD(reference.parameters(), lr=RATE), written_by(numpy_of_local)(model)
    for step in range(3):
        batch = rows(step, WIDTH)
        loss = loss_of(model, mine(batch))
        torch.testing.assert_close(loss, loss_of(reference, mine(batch)), msg=lambda text: f"loss {step}: {text}")
        loss.backward()
        reference_backward(reference, loss_of, batch)
        with torch.no_grad():
            model(mine(batch))
        write()
        ordinary.step()
        model.zero_grad(), reference.zero_grad()


@on_ranks(2)
def test_a_step_that_no_operator_shows_after_a_call_of_another_root():
    reference, model, other = seeded(Stack), shard_blocks(seeded(Stack)), shard_blocks(seeded(Stack))
    ordinary, write = torch.optim.SGD(reference.parameters(), lr=RATE), written_by(numpy_of_local)(model)
    for step in range(6):
        batch = rows(step, WIDTH)
        loss, expected = loss_of(model, mine(batch)), loss_of(reference, mine(batch))
        torch.testing.assert_close(loss, expected, rtol=0, atol=0, msg=lambda text: f"loss {step}: {text}")
        loss.backward()
        reference_backward(reference, loss_of, batch)
        others_loss = loss_of(other, mine(batch))
        some_ranks_are_slower(step)
        write()
        ordinary.step()
        with torch.no_grad():
            result, expected = (each(mine(batch)) for each in (model, reference))
        torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=lambda text: f"after step {step}: {text}")
        others_loss.backward()
        for each in (model, reference, other):
            each.zero_grad()


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(WIDTH, WIDTH), Stack(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))

    def loss(self, x):
        return self.last(self.blocks(self.first(x))).pow(2).mean()


class FrozenButForTheHead(nn.Sequential):
    """Of two ranks, one has a part of the head, and the other nothing that is trained."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self[0].requires_grad_(False)


class LittleUsed(nn.Sequential):
    """Only an embedding is trained, of which two rows are looked up: the first rank's."""

    def __init__(self):
        super().__init__(nn.Embedding(4 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self[2].requires_grad_(False)

    def forward(self, x):
        return super().forward((x[:, 0] > 0).long())


@on_ranks(2)
def test_steps_that_no_operator_shows_beside_a_model_that_is_never_trained():
    teacher = shard_blocks(seeded(Stack).requires_grad_(False))

    def make_step(model):
        def step():
            with torch.no_grad():
                teacher(rows(0, WIDTH))
            time.sleep(0.1 * (1 - dist.get_rank()))
            write()

        write = written_by(numpy_of_local)(model)
        return step

    for evaluates in (False, True):
        check(make_step, make=FrozenButForTheHead, evaluates=evaluates)


@pytest.mark.meet(2)
@pytest.mark.parametrize("make", [FrozenButForTheHead, LittleUsed])
@on_ranks(2, 3)
def test_evaluations_around_steps_that_change_nothing_on_some_ranks(make):
    def after_an_evaluation(model):
        def step():
            with torch.no_grad():
                model(rows(0, WIDTH))
            dist.barrier()
            write()

        write = written_by(numpy_of_local)(model)
        return step

    check(after_an_evaluation, make=make)
    check(written_by(numpy_of_local), make=make, evaluates=True)


@on_ranks(2, 3)
def test_an_evaluation_after_a_step_that_was_left_out_where_some_ranks_have_nothing_to_write():
    """As a gradient scaler does: what is reduced elsewhere then needs all of them."""
    model = shard_blocks(seeded(FrozenButForTheHead))
    for step in range(3):
        loss_of(model, mine(rows(step, WIDTH))).backward()
        with torch.no_grad():
            result = model(mine(rows(step, WIDTH))).sum()
        dist.all_reduce(result)


@on_ranks(2)
def test_steps_by_another_method_with_evaluations_by_a_call_in_between():
    reference, model = seeded(WithLoss), seeded(WithLoss)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    ordinary, write = torch.optim.SGD(reference.parameters(), lr=RATE), written_by(numpy_of_local)(model)
    for step in range(4):
        batch = rows(step, WIDTH)
        loss, expected = model.loss(mine(batch)), reference.loss(mine(batch))
        assert torch.equal(loss, expected), step
        loss.backward()
        reference_backward(reference, WithLoss.loss, batch)
        with torch.no_grad():
            model(mine(batch))
        dist.barrier()
        write()
        ordinary.step()
        model.zero_grad(), reference.zero_grad()
