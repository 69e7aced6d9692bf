"""Precision: what is cast, and when."""

import contextlib
import copy
import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.utils.checkpoint import checkpoint

from harness import on_ranks
from libfsdp import MixedPrecisionPolicy, fully_shard
from subjects import loss_of, mine, mlp, rows, seeded, shard_with, whole


@on_ranks(2)
def test_reduce_dtype_after_a_first_forward_with_everything_frozen():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen = []
    model = seeded(mlp)
    model.index = nn.Parameter(torch.arange(4), requires_grad=False)
    fully_shard(model, mp_policy=policy)
    model.set_all_reduce_hook(lambda gradient: seen.append(gradient.dtype))
    model.requires_grad_(False)
    model(mine(rows(0, 5)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != "index")
    loss_of(model, mine(rows(0, 5))).backward()
    assert set(seen) == {torch.float32}
    assert all(p.grad.dtype == torch.float32 for n, p in model.named_parameters() if n != "index")


@pytest.mark.parametrize("reshard", [True, False, 1])
@on_ranks(2)
def test_the_dtypes_of_computing_and_reducing(reshard):
    low, full = torch.bfloat16, torch.float32
    for param, reduce in itertools.product((None, low), (None, low, full)):
        computed, reduced = [], []
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        model = shard_with(fully_shard, seeded(mlp), mp_policy=policy, reshard_after_forward=reshard)
        model[2][0].register_forward_hook(lambda module, _, out: computed.append((module.weight.dtype, out.dtype)))
        for module in (model, model[0], model[2]):
            module.set_all_reduce_hook(lambda gradient: reduced.append(gradient.dtype))
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model, mine(rows(0, 5))).backward()
        optimizer.step()
        assert set(computed) == {(param or full, param or full)}
        assert set(reduced) == {reduce or (param if torch.__version__ < (2, 15) else None) or full}
        for p in model.parameters():
            assert p.dtype == p.grad.dtype == optimizer.state[p]["exp_avg"].dtype == full


@on_ranks(2)
def test_unsynchronized_gradients_add_in_the_reduce_dtype():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(1, 1, bias=False), mp_policy=policy)
    for i, x in enumerate((256.0, 1.0, 1.0)):  # in bfloat16 the ones would get lost
        model.set_requires_gradient_sync(i == 2)
        model(torch.full((1, 1), x)).sum().backward()
    assert whole(next(model.parameters()).grad).item() == 258.0


@on_ranks(2)
def test_the_given_reduce_dtype_outlives_a_conversion():
    model = seeded(mlp).bfloat16()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    model.to(torch.float32)
    seen = []
    model.set_all_reduce_hook(lambda gradient: seen.append(gradient.dtype))
    loss_of(model, mine(rows(0, 5))).backward()
    assert set(seen) == {torch.bfloat16} and next(model.parameters()).grad.dtype == torch.float32


class TwoInputs(nn.Module):
    """The second is made on the way."""

    def __init__(self, factory=lambda x: torch.ones_like(x, dtype=torch.float32)):
        super().__init__()
        self.outer, self.inner, self.seen = nn.Linear(4, 4), Inner(), factory

    def forward(self, x):
        return self.inner(self.outer(x), self.seen(x))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, other):
        self.dtypes = x.dtype, other.dtype
        return self.linear(x) + other


@on_ranks(2, comm=("shm",))
def test_inputs_are_cast_where_the_module_says_so():
    low = torch.float16
    for cast in (True, False):
        for shard in (fully_shard, torch_fsdp.fully_shard):
            model = TwoInputs()
            shard(model.inner, mp_policy=MixedPrecisionPolicy(param_dtype=low, cast_forward_inputs=cast))
            shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=low))
            with contextlib.nullcontext():
                model(torch.rand(2, 4))
            assert model.inner.dtypes == (low, low if cast else torch.float32), (cast, shard)
        alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(
            alone[1], mp_policy=MixedPrecisionPolicy(param_dtype=low, output_dtype=torch.float32, cast_forward_inputs=True)
        )
        fully_shard(alone)
        assert alone(torch.rand(2, 4)).dtype == torch.float32


@on_ranks(2, comm=("shm",))
def test_casts_are_repeated_in_a_recomputation():
    seen = []

    class Watches(nn.Linear):
        def forward(self, x):
            seen.append(x.dtype)
            return super().forward(x)

    model = nn.Sequential(Watches(4, 4), Watches(4, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model)
    out = checkpoint(model, torch.rand(2, 4), use_reentrant=False, early_stop=False)
    out.sum().backward()
    assert out.dtype == torch.float32 and seen == [torch.bfloat16] * 4


@on_ranks(2, comm=("shm",))
def test_casts_of_outputs_are_repeated_in_a_recomputation():
    seen = []

    class Watches(nn.Module):
        def forward(self, x):
            seen.append(x.dtype)
            return x * 1

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = nn.Sequential(fully_shard(nn.Linear(4, 4), mp_policy=policy), Watches())
    fully_shard(model)
    checkpoint(model, torch.rand(2, 4), use_reentrant=False, early_stop=False).sum().backward()
    assert seen == [torch.float32] * 2


@on_ranks(2, comm=("shm",))
def test_norms_in_low_precision():
    for dtype in (torch.bfloat16, torch.float16):
        layer_norm = nn.LayerNorm(4)
        for norm, shape in ((layer_norm, (2, 4)), (nn.BatchNorm1d(4), (3, 4)), (nn.BatchNorm2d(4), (2, 4, 3, 3))):
            gradients = []
            for shard in (fully_shard, torch_fsdp.fully_shard):
                model = nn.Sequential(copy.deepcopy(norm))
                shard(model[0], mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
                shard(model)
                try:
                    model(torch.rand(shape)).sum().backward()
                    gradients.append([p.grad.dtype for p in model.parameters()])
                except RuntimeError as error:  # running statistics keep full precision, which not every kernel takes
                    gradients.append(str(error))
            assert gradients[0] == gradients[1] and (gradients[0] == [torch.float32] * 2 or norm is not layer_norm)


class Promoting(nn.Module):
    """Operators of which PyTorch takes mixed dtypes."""

    def __init__(self):
        super().__init__()
        self.norm, self.queries = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(1, 1, 4, 8))

    def forward(self, x):
        normed = nn.functional.rms_norm(x.float(), (8,), self.norm)
        keys = x.view(1, 1, -1, 8)
        mask = torch.full((4, keys.shape[2]), 1 / 3)
        return normed, nn.functional.scaled_dot_product_attention(self.queries, keys, keys, attn_mask=mask)


@on_ranks(2, comm=("shm",))
def test_what_promotes_in_pytorch_promotes_here():
    outputs = []
    for shard in (fully_shard, torch_fsdp.fully_shard):
        model = shard(seeded(Promoting), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        outputs.append(model(rows(0, 8)))
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert outputs[0][0].dtype == torch.float32


@on_ranks(2, comm=("shm",))
def test_under_autocast_autocast_casts():
    outputs = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    for shard in (fully_shard, torch_fsdp.fully_shard):
        model = shard(seeded(lambda: nn.Linear(8, 8)), mp_policy=policy)
        with torch.autocast("cpu", torch.float16):
            outputs.append(model(rows(0, 8)))
    assert outputs[0].dtype == outputs[1].dtype == torch.float16 and torch.equal(*outputs)


@dataclasses.dataclass(frozen=True)
class NewerPolicy(MixedPrecisionPolicy):
    """As one of a PyTorch that has more."""

    another: str | None = None


@on_ranks(1, comm=("shm",))
def test_what_a_newer_policy_says_is_not_left_unheard():
    with pytest.raises(NotImplementedError, match="MixedPrecisionPolicy.another"):
        fully_shard(nn.Linear(2, 2), mp_policy=NewerPolicy(another="given"))
    fully_shard(nn.Linear(2, 2), mp_policy=NewerPolicy())
