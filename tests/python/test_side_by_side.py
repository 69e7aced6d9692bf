"""Options and setters beside PyTorch's own fully_shard, alone and together: losses, gradients and parameters of each step.

The model's widths divide by no number of ranks, so shards are uneven and some are empty.
"""

import dataclasses
import functools
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import libfsdp
from harness import on_ranks
from libfsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from selection import ALL
from subjects import is_sharded, mine, rows, seeded, whole

INPUTS = 5


class Layer(nn.Module):
    """Computes in its own dtype, and notes in what dtype its input comes."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen = inner, []

    def forward(self, x):
        self.seen.append(x.dtype)
        return torch.tanh(self.inner(x.to(self.inner.weight.dtype)))


class Model(nn.Module):
    def __init__(self, width=7, outputs=2):
        super().__init__()
        self.first = Layer(nn.Linear(INPUTS, width))
        self.blocks = nn.ModuleList(Layer(nn.Linear(width, width)) for _ in range(2))
        self.norm, self.head = Layer(nn.LayerNorm(width)), Layer(nn.Linear(width, outputs))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to shard and to train."""

    options: Callable[[nn.Module, int], dict] = lambda model, ranks: {}  # of fully_shard over so many ranks
    replicas: Callable[[int], int] | None = None  # on a hybrid mesh of so many ranks
    prepare: Callable[[nn.Module], None] = lambda model: None  # once it is sharded
    microbatch: Callable[[nn.Module, bool], None] = lambda model, last: None  # before each
    microbatches: int = 1
    make: Callable[[], nn.Module] = Model
    clip: float | None = None
    listed: bool = False  # whether norm and head are one unit, given as a list
    bound: float = 1e-5  # what another order of additions may change


def options(**given):
    return Case(options=lambda model, ranks: given)


def precision(**given):
    return dataclasses.replace(options(mp_policy=MixedPrecisionPolicy(**given)), bound=2e-2)


def setter(name, *arguments, **keywords):
    """Called on the root and on one block, where this PyTorch has it."""

    def prepare(model):
        for module in (model, model.blocks[1]):
            if hasattr(torch_fsdp.FSDPModule, name):
                getattr(module, name)(*arguments, **keywords)

    return Case(prepare=prepare)


def accumulates(*names, targets=("",), **keywords):
    """Two microbatches, of which the last one reduces."""

    def microbatch(model, last):
        for name in names:
            for path in targets:
                getattr(model.get_submodule(path), name)(last, **keywords)

    return Case(microbatch=microbatch, microbatches=2)


def largest_dim(parameter):
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


def even():
    """PyTorch cuts other dimensions than the first evenly or not at all."""
    return Model(width=12, outputs=12)


def to_fewer_ranks(model, ranks):
    return dict(reshard_after_forward=2 if ranks % 2 == 0 else ranks)


def in_bfloat16(model, ranks):
    """In which the order of additions shows."""
    return dict(mp_policy=MixedPrecisionPolicy(reduce_dtype=BFLOAT16))


def ignored(model, ranks):
    return dict(ignored_params={*model.norm.parameters(), *model.head.parameters()})


def divide(model):
    for module in (model, model.blocks[0]):
        if next(module.parameters()).device_mesh.size(-1) > 1:  # of one rank's gradients PyTorch divides sums twice
            module.set_force_sum_reduction_for_comms(True)  # without which it wants other reductions than Gloo has
    model.set_gradient_divide_factor(8.0)
    model.blocks[0].set_gradient_divide_factor(0.5)


def prefetch(model):
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0], model.first])


def halved(ranks):
    return 2 if ranks % 2 == 0 else 1


def double(gradient):
    gradient.mul_(2)


BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
LOW = dict(param_dtype=BFLOAT16, reduce_dtype=FLOAT32)

KINDS = {
    "reshard": {
        "keep": options(reshard_after_forward=False),
        "reshard": options(reshard_after_forward=True),
        "reshard to fewer": Case(options=to_fewer_ranks),
        "reshard to one": options(reshard_after_forward=1),
        "keep, then reshard": dataclasses.replace(
            options(reshard_after_forward=False), prepare=lambda model: model.set_reshard_after_forward(True)
        ),
    },
    "precision": {
        "bfloat16": precision(**LOW),
        "bfloat16, inputs as they are": precision(**LOW, cast_forward_inputs=False),
        "bfloat16, outputs in float32": precision(**LOW, output_dtype=FLOAT32),
        "bfloat16 reductions": precision(param_dtype=BFLOAT16),
        "float32, bfloat16 reductions": precision(reduce_dtype=BFLOAT16),
        "outputs in float64": precision(output_dtype=torch.float64),
    },
    "parameters": {
        "ignored": Case(options=ignored),
        "largest dimension": dataclasses.replace(options(shard_placement_fn=largest_dim), make=even),
        "a list": Case(listed=True),
    },
    "offload": {"offload": options(offload_policy=CPUOffloadPolicy(pin_memory=False))},
    "accumulation": {
        "not synchronized": accumulates("set_requires_gradient_sync"),
        "root not synchronized": accumulates("set_requires_gradient_sync", recurse=False),
        "blocks not synchronized": accumulates("set_requires_gradient_sync", targets=("blocks.0", "first")),
        "kept for the second": accumulates("set_reshard_after_backward"),
        "not waited for": accumulates("set_is_last_backward"),
    },
    "clipping": {"clipped": Case(clip=0.01)},
    "mesh": {
        "hybrid": Case(replicas=halved),
        "replicated": Case(replicas=lambda ranks: ranks),
        "hybrid, all-reduced later": dataclasses.replace(accumulates("set_requires_all_reduce"), replicas=halved),
        "hybrid, all-reduced and waited for later": dataclasses.replace(
            accumulates("set_requires_all_reduce", "set_is_last_backward"),
            replicas=halved,
            options=in_bfloat16,
            bound=2e-2,
        ),
    },
    "setters": {
        "divide": Case(prepare=divide),
        "sums": setter("set_force_sum_reduction_for_comms", True),
        "unused as zeros": setter("set_reduce_scatter_unused_params", True),
        "reductions in flight": setter("set_reduce_scatter_max_input_buffers", 3),
        "separate group": setter("set_separate_reduce_scatter_group"),
        "not gathered in backward": Case(prepare=lambda model: model.first.set_unshard_in_backward(False)),
        "whole after backward": setter("set_reshard_after_backward", False),
        "prefetch": Case(prepare=prefetch),
        "hook": setter("set_all_reduce_hook", double),
    },
}


def joined(cases):
    """All of them at once."""

    def all_options(model, ranks):
        return {name: value for case in cases for name, value in case.options(model, ranks).items()}

    def prepare(model):
        for case in cases:
            case.prepare(model)

    def microbatch(model, last):
        for case in cases:
            case.microbatch(model, last)

    return Case(
        options=all_options,
        replicas=next((case.replicas for case in cases if case.replicas), None),
        prepare=prepare,
        microbatch=microbatch,
        microbatches=max(case.microbatches for case in cases),
        make=even if any(case.make is even for case in cases) else Model,
        clip=next((case.clip for case in cases if case.clip), None),
        listed=any(case.listed for case in cases),
        bound=max(case.bound for case in cases),
    )


def together(count):
    """So many combinations of one case of each kind, or none of it; the same on all ranks."""
    choice = random.Random(7)
    for _ in range(count):
        chosen = [(kind, choice.choice([None, *cases])) for kind, cases in KINDS.items()]
        cases = [KINDS[kind][name] for kind, name in chosen if name]
        yield " + ".join(name for _, name in chosen if name), joined(cases)


@functools.cache
def hybrid_mesh(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def sharded(shard, case):
    model, ranks = seeded(case.make), dist.get_world_size()
    replicas = case.replicas(ranks) if case.replicas else 1
    given = case.options(model, ranks // replicas)
    if case.replicas:
        given = dict(given, mesh=hybrid_mesh(replicas, ranks // replicas))
    for module in (model.first, *model.blocks, *([[model.norm, model.head]] if case.listed else []), model):
        shard(module, **given)
    case.prepare(model)
    return model


def local(tensor):
    return tensor.to_local() if is_sharded(tensor) else tensor


def clipped(model, norm):
    """PyTorch's function takes DTensors or plain tensors, and not both."""
    return whole(torch.nn.utils.clip_grad_norm_(filter(is_sharded, model.parameters()), norm))


def over_shared_memory(shard, enabled):
    def over(module, **options):
        libfsdp.use_shared_memory(enabled)
        return shard(module, **options)

    return over


def check_step(case, models, step, same):
    *_, theirs = models
    for part in range(case.microbatches):
        batch = mine(rows(step * case.microbatches + part, INPUTS))
        outputs = []
        for model in models:
            case.microbatch(model, part == case.microbatches - 1)
            out = model(batch)
            outputs.append(out.detach())
            out.float().pow(2).mean().backward()
        same(outputs, f"outputs of {step}")
    for module in theirs.modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            module.reshard()  # PyTorch registers wholes meanwhile
    for name, parameters in by_name(models):
        *_, q = parameters
        for p in parameters:
            assert type(p) is type(q) and (p.grad is None) == (q.grad is None), name
            if is_sharded(p):
                assert p.placements == q.placements and p.device_mesh == q.device_mesh, name
        same([local(p.grad) for p in parameters], f"gradient of {name}, {step}")


def by_name(models):
    for named in zip(*(model.named_parameters() for model in models), strict=True):
        names, parameters = zip(*named)
        assert len(set(names)) == 1
        yield names[0], parameters


def check_as_pytorch(name, case, steps=2, exact=True):
    """Over shared memory and over the process group of PyTorch's own."""
    in_one_order = dist.get_world_size() <= 2  # two numbers can only be added in one
    bound = 0 if in_one_order and exact else case.bound

    def same(values, what):
        for means, value in zip(("shm", "gloo"), values):
            about = f"{name}, over {means}: {what}"
            torch.testing.assert_close(value, values[-1], rtol=bound, atol=bound, msg=lambda m: f"{about}: {m}")

    ours = [sharded(over_shared_memory(fully_shard, enabled), case) for enabled in (True, False)]
    models = [*ours, sharded(torch_fsdp.fully_shard, case)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(steps):
        check_step(case, models, step, same)
        if case.clip:
            same([clipped(model, case.clip) for model in models], f"norm of {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for path, parameters in by_name(models):
        same([local(p).detach() for p in parameters], path)
    if torch.__version__ < (2, 13):
        return  # there, of a list of modules, only what the last one returns is converted
    for modules in zip(*(model.modules() for model in models), strict=True):
        first, *others = [getattr(module, "seen", None) for module in modules]
        assert all(seen == first for seen in others), name


DEPEND_ON_RANKS = {
    1: ("reshard", "mesh"),
    2: tuple(KINDS),
    3: ("reshard", "parameters", "offload", "clipping", "mesh"),
    4: ("reshard", "parameters", "mesh"),
}


@on_ranks(1, 2, 3, 4, comm=("gloo",))
def test_each_option():
    for kind in KINDS if ALL else DEPEND_ON_RANKS[dist.get_world_size()]:
        for name, case in KINDS[kind].items():
            check_as_pytorch(name, case)


@on_ranks(1, 2, 3, 4, comm=("gloo",))
def test_options_together():
    for name, case in together(12 if ALL or dist.get_world_size() == 2 else 6):
        # Some combinations accumulate in bfloat16, which PyTorch rounds at other moments since 2.15.
        check_as_pytorch(name, case, exact=torch.__version__ < (2, 15) or case.bound < 1e-2)
