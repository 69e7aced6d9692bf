"""What programs that were written for PyTorch's ``fully_shard`` do with a sharded model, beside training it."""

import collections
import contextlib
import copy
import dataclasses
import gc
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import libfsdp
from harness import on_ranks
from libfsdp import MixedPrecisionPolicy, fully_shard
from subclasses import Coded
from subjects import (
    BATCH,
    TORCH_IS_OLD,
    check_hollow,
    check_same,
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


@contextlib.contextmanager
def standard_error():
    """What the process writes there meanwhile, C++ included: a list of its lines."""
    lines = []
    with tempfile.TemporaryFile("w+") as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += file.read().splitlines()


def profiled(run, **options):
    """The shapes of what each operator was given, and the lines that were written meanwhile."""
    with standard_error() as said, torch.profiler.profile(record_shapes=True, **options) as profile:
        run()
    shapes = collections.Counter()
    for event in profile.events():
        if event.name in ("aten::linear", "aten::addmm", "aten::mm"):
            shapes[event.name, str(event.input_shapes)] += 1
    return shapes, said


@on_ranks(2)
def test_a_profiler_that_records_shapes_reads_nothing():
    reference, model = seeded(even), shard_with(fully_shard, seeded(even))
    for each in (reference, model):
        loss_of(each, mine(rows(0, 4))).backward()
    expected, _ = profiled(lambda: loss_of(reference, mine(rows(0, 4))).backward())
    for options in ({}, {"with_flops": True}):
        shapes, said = profiled(lambda: loss_of(model, mine(rows(0, 4))).backward(), **options)
        assert shapes == expected
        assert not [line for line in said if "raw access" in line or "exhausted" in line], said
    loss_of(model, mine(rows(0, 4))).backward()
    check_hollow(model[0].weight.detach(), "0.weight")


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A dictionary of its fields, as Hugging Face's ``ModelOutput``."""

    logits: torch.Tensor | None = None
    hidden: tuple | None = None
    loss: torch.Tensor | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        function, _, *rest = super().__reduce__()
        return function, tuple(getattr(self, field.name) for field in dataclasses.fields(self)), *rest

    def to_tuple(self):
        return tuple(self[key] for key in self.keys())


class GivesOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, given=None):
        self.given = given
        out = self.linear(x)
        return Output(out, (out, out * 2))


@on_ranks(2)
def test_outputs_that_are_dictionaries_and_dataclasses():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for shard in (torch_fully_shard, fully_shard):
        model = shard(seeded(GivesOutput), mp_policy=policy)
        out = model(torch.ones(2, 4), given=Output(torch.ones(2, 4), (torch.ones(1),)))
        tensors = [out.logits, out["logits"], out[0], out.to_tuple()[0], *out.hidden, *out["hidden"], *out[1]]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}, shard
        assert out.logits is out["logits"] is out[0] and type(out) is Output and list(out) == ["logits", "hidden"]
        assert out.loss is None
        given = [model.given.logits, model.given["logits"], *model.given[1]]
        assert {tensor.dtype for tensor in given} == {torch.bfloat16}, shard


@on_ranks(2, comm=("gloo",))
def test_an_all_reduce_hook_is_given_what_pytorchs_is():
    seen = {}
    for shard in (torch_fully_shard, fully_shard):
        model = shard_with(shard, seeded(mlp))
        calls = []
        for name in ("", "0", "2"):
            hook = lambda gradient, name=name, calls=calls: calls.append((name, gradient.clone(), gradient.mul_(3)))  # noqa: E731
            model.get_submodule(name).set_all_reduce_hook(hook)
        loss_of(model, mine(rows(0, 5))).backward()
        seen[shard] = {name: gradient for name, gradient, _ in calls}
        assert len(calls) == 3, calls
        seen[shard, "gradients"] = [p.grad.to_local() for p in model.parameters()]
    for name, gradient in seen[torch_fully_shard].items():
        torch.testing.assert_close(seen[fully_shard][name], gradient)
    torch.testing.assert_close(seen[fully_shard, "gradients"], seen[torch_fully_shard, "gradients"])


@on_ranks(2)
def test_a_whole_parameter_has_what_a_dtensor_has():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    for step in range(2):
        for name, parameter in model.named_parameters():
            read = model.get_parameter(name)
            assert not isinstance(read, DTensor)
            assert read.placements == parameter.placements and read.device_mesh == parameter.device_mesh
            assert read._local_tensor is parameter._local_tensor
            assert torch.equal(read.to_local(), parameter.to_local())
            assert torch.equal(read.full_tensor(), dict(reference.named_parameters())[name])
            assert torch.equal(read.redistribute(placements=[Replicate()]).to_local(), read.full_tensor())
        for each in (reference, model):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(2)
        if step == 0:  # other data behind it
            model.to(torch.float64), reference.to(torch.float64)
    check_training(model, reference, lambda m, x: m(x.double()).pow(2).mean(), (5,), exact=True, steps=2)


@pytest.mark.skipif(TORCH_IS_OLD, reason="torch 2.11 cannot say more than that there is no address")
@on_ranks(1, comm=("shm",))
def test_whether_two_parameters_are_one_is_asked_by_address():
    model = shard_with(fully_shard, seeded(even))
    with pytest.raises(NotImplementedError, match="'0.weight'.*sharded at this moment"):
        model[0].weight.data_ptr()
    model[0].unshard()
    assert model[0].weight.data_ptr() == model[0].weight.detach().data_ptr() != 0


@on_ranks(1, comm=("shm",))
def test_exporting_is_refused():
    with pytest.raises(NotImplementedError, match="torch.export does not see through the gathers"):
        torch.export.export(fully_shard(seeded(even)), (torch.ones(2, 4),))


@on_ranks(2)
def test_requires_grad_is_set_on_what_the_module_reads():
    for shard in (torch_fully_shard, fully_shard):
        model = shard_with(shard, seeded(even))
        model[0].weight.requires_grad = False
        trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        assert trainable == [name for name, _ in model.named_parameters() if name != "0.weight"], shard
        loss_of(model, mine(rows(0, 4))).backward()
        assert [name for name, p in model.named_parameters() if p.grad is not None] == trainable
        model[0].weight.requires_grad = True
        assert all(p.requires_grad for p in model.parameters())


@on_ranks(2, comm=("shm",))
def test_the_gradient_of_a_whole_parameter_says_where_it_is():
    model = shard_with(fully_shard, seeded(even))
    assert model[0].weight.grad is None
    loss_of(model, mine(rows(0, 4))).backward()
    with pytest.raises(libfsdp.Error, match="gradient of '0.weight'"):
        model[0].weight.grad.norm()


class LowRank(nn.Module):
    """A linear module with an adapter, which can be added to its weight for good, as PEFT's."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

    def merge(self, sign=1):
        delta = self.up.weight @ self.down.weight  # with a graph
        self.base.weight.data += sign * delta

    def merge_safely(self):
        merged = self.base.weight.data.clone()
        merged += self.up.weight @ self.down.weight
        self.base.weight.data = merged


def adapted():
    return nn.Sequential(LowRank(4, 6), nn.ReLU(), LowRank(6, 4))


def sharded_adapted():
    model = seeded(adapted)
    return seeded(adapted), shard_with(fully_shard, nn.Sequential(model[0], nn.ReLU(), model[2]))


@on_ranks(2)
def test_adapters_are_merged_into_weights():
    for before in ("nothing", "evaluation", "training", "a forward whose graph is gone"):
        reference, model = sharded_adapted()
        for each in (reference, model):
            if before == "training":
                loss_of(each, rows(0, 4)).backward()
                each.zero_grad()
            elif before == "a forward whose graph is gone":
                each(rows(0, 4))
            elif before == "evaluation":
                with torch.no_grad():
                    each(rows(0, 4))
            each[0].merge(), each[2].merge()
        check_same(model, reference)
        with libfsdp.summon_full_params(model):
            assert torch.equal(model[0].base.weight, reference[0].base.weight)
        for each in (reference, model):
            each[0].merge(sign=-1), each[2].merge(sign=-1)
        check_training(model, reference, loss_of, (4,), exact=True, steps=2)


@on_ranks(2)
def test_adapters_are_merged_by_other_data():
    reference, model = sharded_adapted()
    for each in (reference, model):
        each[0].merge_safely()
    assert torch.equal(whole(model.state_dict()["0.base.weight"]), reference[0].base.weight)
    for each in (reference, model):
        each[2].merge_safely()
    check_training(model, reference, loss_of, (4,), exact=True, steps=2)


@on_ranks(2, comm=("shm",))
def test_writes_that_a_graph_would_miss_are_refused_all_the_same():
    _, model = sharded_adapted()
    model[0].base.weight.requires_grad_(True)
    loss = loss_of(model, mine(rows(0, 4)))
    with pytest.raises(libfsdp.Error, match="between the beginning of a forward and the end of its backward"):
        model[0].merge()
    loss.backward()
    model[0].merge()
    product = (model[0].base.weight * model[0].base.weight).sum()  # no module was called
    with torch.no_grad():
        model[0].base.weight.data += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def compared_with_itself(model, batch):
    """The loss of a model beside its own outputs without adapters, as TRL's preference training makes it with PEFT's."""
    out = model(batch)
    adapters = [layer for each in (model[0], model[2]) for layer in (each.down, each.up)]
    for layer in adapters:
        layer.requires_grad_(False)
    with torch.no_grad():
        known = model(batch)
    for layer in adapters:
        layer.requires_grad_(True)
    return (out * known).sum() / len(batch)


@pytest.mark.parametrize("hooked", [False, True])
@on_ranks(2)
def test_what_is_frozen_for_another_forward_gets_its_gradients(hooked):
    reference, model = sharded_adapted()
    if hooked:
        for each in (reference, model):
            each[0].down.weight.register_hook(lambda gradient: None)
    check_training(model, reference, compared_with_itself, (4,), exact=True, steps=2)


class Head(nn.Module):
    """Two modules with one bias, tied as BERT's are: ``tie`` gives it other data of the same values."""

    def __init__(self):
        super().__init__()
        self.body, self.decoder = nn.Linear(4, 6), nn.Linear(6, 6)
        self.decoder.bias = self.body.bias

    def tie(self, more=0):
        self.decoder.bias.data = nn.functional.pad(self.decoder.bias.data, (0, more), "constant", 0)

    def forward(self, x):
        return self.decoder(self.body(x))


@on_ranks(2)
def test_a_parameter_is_given_other_data():
    reference, model = seeded(Head), seeded(Head)
    fully_shard(model.body), fully_shard(model)
    check_training(model, reference, loss_of, (4,), exact=True, steps=1)
    for each in (reference, model):
        each.tie()
    check_training(model, reference, loss_of, (4,), exact=True, steps=2)
    for each in (reference, model):
        each.body.weight.data = torch.full((6, 4), 0.5)
        each.tie()
    check_same(model, reference)
    check_training(model, reference, loss_of, (4,), exact=True, steps=2)
    assert model.decoder.bias is model.body.bias


@pytest.mark.parametrize("inner", [False, True])
@on_ranks(2)
def test_a_parameter_is_given_other_data_after_a_forward_without_backward(inner):
    """The graph of the forward is gone; as long as it is there, it needs the former values."""
    reference, model = seeded(Head), seeded(Head)
    fully_shard(model.body), fully_shard(model)
    check_training(model, reference, loss_of, (4,), exact=True, steps=1)
    loss = loss_of(model, mine(rows(0, 4)))
    for each in (reference, model):
        module = each.body if inner else each.decoder
        module.weight.data = torch.full(module.weight.shape, 0.5)
    with pytest.raises(RuntimeError, match="was written between the beginning of a forward"):
        loss_of(model, mine(rows(0, 4)))
    del loss
    gc.collect()
    check_training(model, reference, loss_of, (4,), exact=True, steps=2)


@on_ranks(2)
def test_a_parameter_is_given_another_ones_data():
    reference, model = seeded(Head), seeded(Head)
    fully_shard(model.body), fully_shard(model)
    for each in (reference, model):
        each.decoder.weight.data = torch.eye(6)
    model.body.bias.data = model.decoder.weight.data[0]
    reference.body.bias.data = torch.eye(6)[0]
    check_training(model, reference, loss_of, (4,), exact=True, steps=2)


@on_ranks(2)
def test_other_data_in_low_precision_leave_shards_as_precise_as_they_were():
    model = seeded(Head)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    before = [whole(p).clone() for p in model.parameters()]
    model.tie()
    model(torch.ones(2, 4))
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(parameter), was)


@on_ranks(2)
def test_resizing_what_is_sharded_is_refused():
    model = seeded(Head)
    fully_shard(model)
    model.tie(more=2)
    with pytest.raises(libfsdp.Error, match="'body.bias' has sizes.*given data of sizes.*before fully_shard"):
        model(torch.ones(2, 4))


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


@pytest.mark.parametrize("tied_before", [True, False])
@on_ranks(1, 2)
def test_a_loader_finds_shards_while_there_are_no_values(tied_before):
    """As transformers' does: by ``getattr``, piece by piece, tied ones once."""
    source = seeded(TiedModel)
    for shard in (torch_fully_shard, fully_shard):
        with torch.device("meta"):
            model = TiedModel()
        if not tied_before:
            model.head.weight = nn.Parameter(torch.empty_like(model.embed.weight))
        if shard is fully_shard and not tied_before:
            shard(model.embed)  # two units, which PyTorch does not tie
        shard(model.block), shard(model)
        for path, tensor in source.state_dict().items():
            owner, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
            found = getattr(owner, name)
            assert isinstance(found, DTensor), (shard, path)
            assert found is owner._parameters[name]
            if path != "head.weight":
                local = distribute_tensor(tensor, found.device_mesh, found.placements).to_local()
                assert found._local_tensor.shape == local.shape
                loaded = DTensor.from_local(
                    local, found.device_mesh, found.placements, shape=found.shape, stride=found.stride()
                )
                setattr(owner, name, nn.Parameter(loaded))
        model.head.weight = model.embed.weight
        assert model.head.weight is model.embed.weight
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter), dict(source.named_parameters())[name])
        x = torch.arange(BATCH * dist.get_world_size()).view(-1, 1) % 8
        model(mine(x))
        if shard is fully_shard:
            assert model.head.weight is model.embed.weight
            check_same(model, source)
            for part in x.split(BATCH):
                loss_of(source, part).backward()
            loss_of(model, mine(x)).backward()
            gradient = dict(model.named_parameters())["embed.weight"].grad
            torch.testing.assert_close(whole(gradient) * dist.get_world_size(), source.embed.weight.grad)


@on_ranks(2, comm=("shm",))
def test_values_that_come_module_by_module_are_shown():
    with torch.device("meta"):
        model = TiedModel()
    model.head.weight = model.embed.weight
    fully_shard(model)
    assert isinstance(model.block.weight, DTensor) and model.block.weight.is_meta
    with pytest.raises(libfsdp.Error, match="materialized from meta device.*embed.weight.*block.weight"):
        model(torch.zeros(1, 1, dtype=torch.long))
    model.block.to_empty(device="cpu")
    assert not isinstance(model.block.weight, DTensor) and isinstance(model.embed.weight, DTensor)
    model.embed.to_empty(device="cpu")
    assert model.head.weight is model.embed.weight and not isinstance(model.head.weight, DTensor)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight


def coded(model, table):
    for module in (model[0], model[3]):
        module.weight = nn.Parameter(Coded.of(module.weight, table), requires_grad=False)
    return model


@on_ranks(2)
def test_a_subclass_that_can_only_be_split_and_shares_a_table():
    table = torch.linspace(-0.5, 0.5, 16)
    reference = seeded(even)
    for module in (reference[0], reference[3]):
        values = Coded.of(module.weight, table)
        module.weight = nn.Parameter(values.table[values.codes.long()], requires_grad=False)
    model = shard_with(fully_shard, coded(seeded(even), table))
    for step in range(3):
        with torch.no_grad():
            assert torch.equal(model(mine(rows(step, 4))), reference(mine(rows(step, 4))))
        for parameter in (p for p in model.parameters() if isinstance(p._local_tensor, Coded)):
            assert torch.equal(parameter._local_tensor.table, table)
        loss = loss_of(model, mine(rows(step, 4)))
        loss.backward()
        reference_backward(reference, loss_of, rows(step, 4))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(whole(parameter.grad), dict(reference.named_parameters())[name].grad)
        model.zero_grad(), reference.zero_grad()
    whole_table = model[0].weight.table
    check_hollow(model[0].weight.codes, "0.weight.*")
    assert torch.equal(whole_table, table), "it stays where it is"


@on_ranks(1, 2)
def test_what_a_loader_notes_on_parameters_is_found_by_the_modules_code():
    """As transformers', which initializes what has no note."""
    for shard in (torch_fully_shard, fully_shard):
        with torch.device("meta"):
            model = mlp()
        shard(model[0]), shard(model)
        model.to_empty(device="cpu")
        for parameter in model.state_dict(keep_vars=True).values():
            parameter.needs_no_initialization = True
        for read in (model[0].weight, model[2][0].bias):
            assert read.needs_no_initialization, shard
            assert not hasattr(read, "another_note") and not hasattr(read, "_fsdp_sharded")
        assert isinstance(model[0].weight, nn.Parameter)
