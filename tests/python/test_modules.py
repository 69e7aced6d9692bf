"""Unmodified modules of every kind train as they do unsharded."""

import collections
import copy
import dataclasses
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import libfsdp
from harness import on_ranks
from libfsdp import fully_shard
from libfsdp._state import map_tensors
from subjects import Methods, check_same, check_training, loss_of, mine, reference_backward, rows, seeded, whole


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.gru = nn.GRU(5, 4, batch_first=True)

    def forward(self, x):
        return self.gru(self.lstm(x)[0])[0]


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 4, 3, bias=False))

    def forward(self, x):
        return self.layers(x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 3, 3))

    def forward(self, x):
        return self.layers(x)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Linear(6, 3)})
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(6)) for _ in range(2))
        self.shifts = nn.ParameterDict({"x": nn.Parameter(torch.rand(6))})

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scales[0] + self.shifts["x"]
        return torch.cat([self.heads["a"](x), self.heads["b"](x * self.scales[1])], dim=-1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(7, 5, bias=False)
        self.middle = nn.Linear(7, 7)
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.relu(self.middle(x))) + self.embedding(x)


CASES = {
    "attention": (Attention, (3, 8), ["attention"]),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (3, 8), ["linear1"]),
    "recurrent": (Recurrent, (3, 6), ["lstm"]),
    "convolutions": (Convolutions, (3, 8, 8), ["layers"]),
    "convolutions with batch norm": (Normed, (3, 6, 6), ["layers.0"]),
    "lists": (Lists, (6,), ["blocks.0", "blocks.2", "heads.b"]),
    "tied": (Tied, (7,), ["middle"]),
    "tied across units": (Tied, (7,), ["embedding", "head"]),
}


@on_ranks(2, 3, comm=("shm",))
def test_modules_train_as_unsharded():
    for name, (make, shape, units) in CASES.items():
        reference, model = seeded(make), seeded(make)
        for path in units:
            fully_shard(model.get_submodule(path))
        fully_shard(model)
        try:
            check_training(model, reference, loss_of, shape, exact=True, steps=3)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@on_ranks(2)
def test_full_transformer():
    def make():
        return nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def transformer_loss(model, batch):
        return model(batch, batch.flip(1)).pow(2).mean()

    reference, model = seeded(make), seeded(make)
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        fully_shard(layer)
    fully_shard(model)
    check_training(model, reference, transformer_loss, (5, 16), exact=True, steps=2)


@on_ranks(2, comm=("shm",))
def test_batch_norm_keeps_its_own_statistics():
    def make():
        return nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))

    reference, model = seeded(make), seeded(make)
    fully_shard(model[0])
    fully_shard(model)
    batch = mine(rows(0, 3, 4))
    expected = reference(batch)
    assert torch.equal(model(batch), expected)
    assert torch.equal(model[1].running_mean, reference[1].running_mean)
    assert model[1].num_batches_tracked == 1
    model.eval(), reference.eval()
    assert torch.equal(model(batch), reference(batch))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_activation_checkpointing(reentrant):
    def checkpointed_loss(model, batch):
        return model(batch.clone().requires_grad_(True)).pow(2).mean()

    reference, model = seeded(lambda: Checkpointed(reentrant)), seeded(lambda: Checkpointed(reentrant))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    check_training(model, reference, checkpointed_loss, (6,), exact=True)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class WithFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5))
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return self.linear(Double.apply(x, self.scale))


@on_ranks(2, comm=("shm",))
def test_custom_autograd_functions():
    reference, model = seeded(WithFunction), seeded(WithFunction)
    fully_shard(model.linear)
    fully_shard(model)
    check_training(model, reference, loss_of, (5,), exact=True)


class ScaledByALayer(nn.Module):
    """A custom function is the first to read the layer's weight, and the layer is not called."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.LayerNorm(5, bias=False), nn.Linear(5, 5)

    def forward(self, x):
        return self.last(Double.apply(x, self.layer.weight))


@on_ranks(2)
def test_custom_functions_see_what_was_frozen_or_thawed():
    reference, model = seeded(ScaledByALayer), seeded(ScaledByALayer)
    fully_shard(model.layer)
    fully_shard(model)
    for step, trainable in enumerate((False, True, True, False, False, True)):
        for each in (reference, model):
            next(each.layer.parameters()).requires_grad_(trainable)
            each.zero_grad()
        loss_of(model, mine(rows(step, 5))).backward()
        reference_backward(reference, loss_of, rows(step, 5))
        check_same(model, reference, what="gradients")
        assert (next(model.layer.parameters()).grad is not None) == trainable


@dataclasses.dataclass
class Inner:
    value: torch.Tensor
    label: str


@dataclasses.dataclass
class Pair:
    inner: Inner
    others: list


Named = collections.namedtuple("Named", "first second")


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair, *, scale):
        out = self.linear(pair.inner.value) * scale["s"]
        self.seen = pair.inner.value.dtype, scale["s"].dtype, pair.others[0].dtype
        return Named(Pair(Inner(out, pair.inner.label), [out, 3]), {"out": (out, None)})


@dataclasses.dataclass
class Prepared:
    """Is more than what its initializer is given."""

    value: torch.Tensor
    scale: torch.Tensor = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        self.value = self.value * 2


@on_ranks(2, comm=("shm",))
def test_dataclasses_are_cast_as_they_are():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, prepared):
            self.given = prepared
            return self.linear(prepared.value * prepared.scale)

    model = fully_shard(Reads(), mp_policy=libfsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    prepared = Prepared(torch.ones(2, 4))
    prepared.scale = torch.full((1,), 3.0)
    assert model(prepared).dtype == torch.bfloat16
    assert model.given.value.dtype == model.given.scale.dtype == torch.bfloat16
    assert model.given.value.eq(2).all() and model.given.scale.eq(3).all()
    assert type(model.given) is Prepared and prepared.value.dtype == torch.float32


@on_ranks(2, comm=("shm",))
def test_packed_sequences_are_cast_and_trained_on():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, packed):
            self.given = packed
            return self.head(self.lstm(packed)[0].data)

    packed = nn.utils.rnn.pack_padded_sequence(mine(rows(0, 3, 4)), [3, 1, 3, 2], batch_first=True, enforce_sorted=False)
    model = fully_shard(seeded(Tagger), mp_policy=libfsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    out = model(packed)
    assert packed.data.dtype == torch.float32
    assert type(model.given) is type(packed) and model.given.data.dtype == torch.bfloat16
    assert model.given.batch_sizes.equal(packed.batch_sizes)
    assert model.given.unsorted_indices.equal(packed.unsorted_indices)
    assert out.equal(seeded(Tagger).bfloat16()(packed.to(torch.bfloat16)))
    out.float().pow(2).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(1)
def test_packed_sequences_go_to_a_device_with_their_indices():
    packed = nn.utils.rnn.pack_padded_sequence(torch.rand(3, 2, 4), [1, 3], enforce_sorted=False)
    moved = map_tensors(lambda tensor: tensor.to("meta"), packed)
    assert moved.data.is_meta and moved.sorted_indices.is_meta and moved.unsorted_indices.is_meta
    assert moved.batch_sizes.equal(packed.batch_sizes)
    in_order = nn.utils.rnn.pack_padded_sequence(torch.rand(3, 2, 4), [3, 1])
    assert map_tensors(lambda tensor: tensor.to("meta"), in_order).sorted_indices is None


@on_ranks(2, comm=("shm",))
def test_max_norm_is_refused_where_ranks_would_disagree():
    model = fully_shard(nn.Embedding(6, 4, max_norm=1.0))
    with pytest.raises(libfsdp.Error, match="max_norm renormalizes the rows of 'weight'"):
        model(torch.tensor([dist.get_rank()]))


@on_ranks(1)
def test_max_norm_of_one_rank():
    reference, model = (seeded(lambda: nn.Embedding(6, 4, max_norm=0.5)) for _ in range(2))
    fully_shard(model)
    rows_asked = torch.tensor([1, 3])
    assert torch.equal(model(rows_asked), reference(rows_asked))
    assert torch.equal(whole(next(model.parameters())), reference.weight)


@on_ranks(2, comm=("shm",))
def test_structured_inputs_and_outputs_are_cast():
    policy = libfsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = fully_shard(Structured(), mp_policy=policy)
    integers = torch.ones(2, dtype=torch.int64)
    out = model(Pair(Inner(torch.rand(2, 4), "x"), [integers]), scale={"s": torch.rand(1)})
    assert model.seen == (torch.bfloat16, torch.bfloat16, torch.int64)
    assert isinstance(out, Named) and out.first.inner.label == "x" and out.first.others[1] == 3
    assert out.first.inner.value.dtype == out.second["out"][0].dtype == torch.float64
    out.second["out"][0].sum().backward()
    assert model.linear.weight.dtype == torch.bfloat16
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


@on_ranks(2, comm=("shm",))
def test_any_method_and_any_submodule_may_be_called():
    reference, model = seeded(Methods), seeded(Methods)
    fully_shard(model.second)
    fully_shard(model)

    def encode_loss(module, batch):
        return (module.encode(batch) + module.second(batch)).pow(2).mean()

    check_training(model, reference, encode_loss, (5,), exact=True)


@on_ranks(2, comm=("shm",))
def test_methods_that_belong_to_one_object_can_be_registered():
    policy = libfsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = Methods()
    model.bound = types.MethodType(lambda self, x: self.first(x), model)
    model.plain = lambda x: model.second(x)
    fully_shard(model, mp_policy=policy)
    for name in ("bound", "plain", "encode"):
        assert getattr(model, name)(torch.rand(2, 5)).dtype == torch.bfloat16
        libfsdp.register_fsdp_forward_method(model, name)
        assert getattr(model, name)(torch.rand(2, 5)).dtype == torch.float64
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.first.bias.add_(1)
    x = torch.rand(2, 5)
    for name in ("bound", "encode"):
        assert not torch.equal(getattr(twin, name)(x), getattr(model, name)(x)), "a copy runs its own"


@on_ranks(2, comm=("shm",))
def test_registered_methods_have_the_boundary():
    policy = libfsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(Methods(), mp_policy=policy)
    assert model.encode(torch.rand(2, 5)).dtype == torch.bfloat16
    libfsdp.register_fsdp_forward_method(model, "encode")
    assert model.encode(torch.rand(2, 5)).dtype == torch.float32
    with pytest.raises(ValueError, match="does not have a method"):
        libfsdp.register_fsdp_forward_method(model, "missing")
    libfsdp.register_fsdp_forward_method(nn.Linear(2, 2), "missing")


class NormHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x):
        return self.norm(self.body(x))


@on_ranks(2)
def test_partial_forward_with_a_chunked_loss():
    reference, model = seeded(NormHead), seeded(NormHead)
    assert fully_shard([model.norm, model.head]) == [model.norm, model.head]
    fully_shard(model)

    def chunked_loss(module, batch):
        hidden = module(batch)
        return sum(module.head(chunk).pow(2).sum() for chunk in hidden.chunk(2)) / 16

    check_training(model, reference, chunked_loss, (6,), exact=True)


@on_ranks(2)
def test_several_forwards_before_one_backward():
    reference, model = seeded(Methods), seeded(Methods)
    fully_shard(model.first)
    fully_shard(model)

    def twice(module, batch):
        return module(batch).pow(2).mean() + module(batch * 2).mean() + module(module(batch)).mean()

    check_training(model, reference, twice, (5,), exact=True)


@on_ranks(2)
def test_unused_outputs_and_modules():
    reference, model = seeded(Methods), seeded(Methods)
    for module in (model.first, model.second, model):
        fully_shard(module)

    def unused(module, batch):
        return module.first(batch).pow(2).mean()

    unused(model, mine(rows(0, 5))).backward()
    reference_backward(reference, unused, rows(0, 5))
    assert model.second._parameters["weight"].grad is None
    check_same(model, reference, what="gradients")


FAST_PATHS = {
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), lambda m, x: m(x)),
    "padded encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
        lambda m, x: m(x, src_key_padding_mask=torch.arange(x.shape[1]).expand(x.shape[:2]) >= 2),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2),
        lambda m, x: m(x, src_key_padding_mask=torch.arange(x.shape[1]).expand(x.shape[:2]) >= 2),
    ),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, x: torch.cat([part.flatten() for part in m(x, x, x)]),
    ),
}


class FastKernels(TorchDispatchMode):
    """Counts them."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (
            torch.ops.aten._transformer_encoder_layer_fwd.default,
            torch.ops.aten._native_multi_head_attention.default,
        )
        return function(*args, **(kwargs or {}))


@on_ranks(2, 3)
def test_fast_paths_of_inference_give_the_same():
    """They read raw weights in kernels of their own."""
    for name, (make, call) in FAST_PATHS.items():
        reference, model = seeded(make).eval(), seeded(make).eval()
        for layer in getattr(model, "layers", ()):
            fully_shard(layer)
        fully_shard(model)
        for mode in (torch.inference_mode, torch.no_grad):
            for step in range(2):
                with mode():
                    batch = mine(rows(step, 3, 8))
                    assert torch.equal(call(model, batch), call(reference, batch)), (name, mode, step)
        for module in (model, reference):
            call(module.train(), mine(rows(0, 3, 8))).pow(2).sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.sub_(1)
        with torch.inference_mode(), FastKernels() as kernels:
            batch = mine(rows(2, 3, 8))
            assert torch.equal(call(model.eval(), batch), call(reference.eval(), batch)), name
        assert kernels.count > 0 and kernels.count % 2 == 0, f"{name}: {kernels.count}, of both modules"
