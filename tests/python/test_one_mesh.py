"""Models all of whose tensors are DTensors on one mesh, inputs among them: beside PyTorch's ``fully_shard``."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import libfsdp
from harness import on_ranks
from libfsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from selection import ALL
from subjects import needs_mesh_dims, seeded, whole

# PyTorch's function wants its own mesh, and DTensor's caches answer with the first one that was equal to it.
init_device_mesh = functools.cache(device_mesh.init_device_mesh)

VOCABULARY, LENGTH, WIDTH, HEADS = 24, 6, 8, 2


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "out"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e4).triu(1), persistent=False)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) + self.mask.to(q.dtype)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = RMSNorm(), Attention()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.silu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = RMSNorm(), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.norm(self.down(F.silu(self.up(self.norm(x)))))  # a weight that is used twice


CUT_BY_TENSOR_PARALLELISM = {
    "tokens.weight": Shard(1),
    "q.weight": Shard(0),
    "k.weight": Shard(0),
    "v.weight": Shard(0),
    "out.weight": Shard(1),
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
    "head.weight": Shard(0),
}


def tensor_parallel_placement(name):
    return next((cut for ending, cut in CUT_BY_TENSOR_PARALLELISM.items() if name.endswith(ending)), Replicate())


def on_mesh(model, mesh):
    """Its parameters and buffers become DTensors."""
    for path, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None:
                    continue
                tp = tensor_parallel_placement(f"{path}.{name}")
                placements = [tp if dim == "tp" else Replicate() for dim in mesh.mesh_dim_names]
                placed = distribute_tensor(tensor.detach(), mesh, placements)
                kind[name] = nn.Parameter(placed) if kind is module._parameters else placed
    return model


def dims_of(mesh):
    names = mesh.mesh_dim_names
    return DataParallelMeshDims(
        shard="dp" if "dp" in names else None, replicate="replicate" if "replicate" in names else None
    )


def sharded(shard, mesh, make, **options):
    model = on_mesh(seeded(make), mesh)
    parts = [model.up] if isinstance(model, Layers) else getattr(model, "blocks", [])
    for module in (*parts, model):
        shard(module, mesh=mesh, dp_mesh_dims=dims_of(mesh), **options)
    return model


def side_by_side(mesh, make, **options):
    return [sharded(shard, mesh, make, **options) for shard in (fully_shard, torch_fsdp.fully_shard)]


def over_batch(mesh):
    """Rows along the data parallel dimensions, the same along others."""
    return [Replicate() if name == "tp" else Shard(0) for name in mesh.mesh_dim_names]


def tokens(mesh, step):
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(VOCABULARY, (2 * mesh.size(), LENGTH + 1), generator=generator)
    both = (drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
    return [distribute_tensor(each, mesh, over_batch(mesh)) for each in both]


def decoder_loss(model, mesh, step):
    inputs, labels = tokens(mesh, step)
    return F.cross_entropy(model(inputs).float().flatten(0, 1), labels.flatten(0, 1))


def rows(mesh, step, placements=None):
    drawn = torch.randn(2 * mesh.size(), WIDTH, generator=torch.Generator().manual_seed(step))
    return distribute_tensor(drawn, mesh, placements or over_batch(mesh))


def layers_loss(model, mesh, step):
    return model(rows(mesh, step)).float().pow(2).mean()


def run_backward(loss):
    loss.backward()
    return whole(loss.detach())


def assert_alike(ours, theirs, what):
    """Lying alike, with values alike."""
    assert ours.placements == theirs.placements and ours.device_mesh == theirs.device_mesh, what
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, what
    torch.testing.assert_close(ours.to_local(), theirs.to_local(), msg=lambda m: f"{what}: {m}")


def check_gradients(models, what):
    for (name, p), (_, q) in zip(*(model.named_parameters() for model in models), strict=True):
        assert_alike(p.grad, q.grad, f"gradient of {name} {what}")


def check_training(models, mesh, loss_of=layers_loss, backward=None):
    """Losses, gradients, norms that clip them, parameters."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True) for model in models]
    backward = backward or (lambda model, step: run_backward(loss_of(model, mesh, step)))
    for step in range(2):
        torch.testing.assert_close(*(backward(model, step) for model in models))
        check_gradients(models, f"in step {step}")
        norms = [whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)) for model in models]
        torch.testing.assert_close(*norms)
        check_gradients(models, f"clipped in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), (_, q) in zip(*(model.state_dict().items() for model in models), strict=True):
        assert_alike(p, q, name)


DECODERS = {2: [("dp",)], 3: [("dp",)], 4: [("replicate", "dp"), ("dp", "tp")]}


@needs_mesh_dims
@on_ranks(2, 3, 4, comm=("shm",))
def test_a_decoder_trains_as_pytorchs():
    for names in DECODERS[dist.get_world_size()]:
        mesh = init_device_mesh("cpu", (2, 2) if len(names) == 2 else (dist.get_world_size(),), mesh_dim_names=names)
        check_training(side_by_side(mesh, Decoder), mesh, decoder_loss)


def initialized(model):
    """Through what its modules read."""
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.5)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Attention):
            module.mask = placed_as(torch.full((LENGTH, LENGTH), -1e4).triu(1), module.mask)
    return model


def placed_as(tensor, other):
    return distribute_tensor(tensor, other.device_mesh, other.placements) if isinstance(other, DTensor) else tensor


@on_ranks(2, comm=("shm",))
def test_a_decoder_as_large_trainers_shard_it():
    """Made on meta, the head with its norm, recomputed blocks, gradients that are sums: as the model on one rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = on_mesh(Decoder(), mesh)
    for modules in (model.tokens, [model.norm, model.head], *model.blocks, model):
        fully_shard(modules, mesh=mesh, dp_mesh_dims=dims_of(mesh))
    for module in model.modules():
        if isinstance(module, libfsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
    reference = initialized(Decoder())
    initialized(model.to_empty(device="cpu"))
    model.blocks[0].forward = functools.partial(checkpoint, model.blocks[0].forward, use_reentrant=False)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (model, reference)]
    for step in range(2):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q.detach())
        inputs, labels = tokens(mesh, step)
        logits = reference(whole(inputs))
        expected = run_backward(F.cross_entropy(logits.flatten(0, 1), whole(labels).flatten()))
        torch.testing.assert_close(run_backward(decoder_loss(model, mesh, step)), expected)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Positions(nn.Module):
    """Each row of the batch has a weight of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, WIDTH))

    def forward(self, x):
        return x * self.weight


@on_ranks(2, comm=("shm",))
def test_gradients_that_are_cut_along_a_data_parallel_dimension():
    """PyTorch's fully_shard fails there."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, reference = sharded(fully_shard, mesh, Positions), seeded(Positions)
    model.set_gradient_divide_factor(1.0)
    model(rows(mesh, 0)).pow(2).sum().backward()
    reference(whole(rows(mesh, 0))).pow(2).sum().backward()
    torch.testing.assert_close(whole(model._parameters["weight"].grad), reference.weight.grad)


MESHES = {
    2: [("dp",), ("replicate",)],
    3: [("dp",), ("replicate",)],
    4: [("replicate", "dp"), ("dp", "tp"), ("tp", "dp"), ("replicate", "tp")],
}


def meshes():
    for names in MESHES[dist.get_world_size()]:
        yield init_device_mesh("cpu", (2, 2) if len(names) == 2 else (dist.get_world_size(),), mesh_dim_names=names)


@needs_mesh_dims
@on_ranks(2, 3, 4, comm=("shm", "gloo") if ALL else ("shm",))
def test_layers_train_as_pytorchs():
    for mesh in meshes():
        check_training(side_by_side(mesh, Layers), mesh)


@needs_mesh_dims
@on_ranks(4, comm=("gloo",))
def test_layers_train_as_pytorchs_over_gloo():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check_training(side_by_side(mesh, Layers), mesh)


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2)] + ALL * [(2, 1, 2)])
@needs_mesh_dims
@on_ranks(4, comm=("shm",))
def test_three_dimensions(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp", "tp"))
    check_training(side_by_side(mesh, Layers), mesh)


@needs_mesh_dims
@on_ranks(2, 4, comm=("shm",))
def test_what_a_module_reads():
    for mesh in meshes():
        seen = []
        for model in side_by_side(mesh, Layers):
            model.up.register_forward_pre_hook(
                lambda module, _, seen=seen: seen.append((module.weight, module.weight.to_local().shape))
            )
            model(rows(mesh, 0))
            with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
                model(rows(mesh, 0).to_local())
        (ours, our_shape), (theirs, their_shape) = seen
        assert isinstance(ours, DTensor) and isinstance(ours, nn.Parameter) and ours.requires_grad
        assert ours.device_mesh == theirs.device_mesh == mesh and ours.placements == theirs.placements
        assert our_shape == their_shape and ours.shape == theirs.shape and ours.stride() == theirs.stride()


SUMS_IN_PARAM_DTYPE = (2, 13) <= torch.__version__ < (2, 15)
"""PyTorch, of a parameter's uses and over ranks of tensor parallelism, as we: before and after, it rounds otherwise."""
MIXED_PRECISION = [] if not SUMS_IN_PARAM_DTYPE else [
    dict(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    dict(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), offload_policy=CPUOffloadPolicy(pin_memory=False)),
]
OPTIONS = [dict(reshard_after_forward=False), *MIXED_PRECISION]


@needs_mesh_dims
@on_ranks(4, comm=("shm",))
def test_options():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for options in OPTIONS:
        check_training(side_by_side(mesh, Layers, **options), mesh)


def accumulating(mesh, sync_first):
    def backward(model, step):
        model.set_requires_gradient_sync(sync_first)
        first = run_backward(layers_loss(model, mesh, 2 * step))
        model.set_requires_gradient_sync(True)
        return first + run_backward(layers_loss(model, mesh, 2 * step + 1))

    return backward


@needs_mesh_dims
@on_ranks(4, comm=("shm",))
def test_accumulated_gradients():
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    alone = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    cases = [(False, mesh, {}), *((True, alone, mixed) for mixed in MIXED_PRECISION[:1])]
    for sync_first, mesh_of_all, options in cases + ALL * [(not first, *case) for first, *case in cases]:
        models = side_by_side(mesh_of_all, Layers, **options)
        check_training(models, mesh_of_all, backward=accumulating(mesh_of_all, sync_first))


@needs_mesh_dims
@on_ranks(2, comm=("shm",))
def test_gradients_that_all_ranks_have_whole():
    """Batches that are the same everywhere, and losses that are: nothing is to be added up."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    models = side_by_side(mesh, Layers)
    for model in models:
        model(rows(mesh, 0, [Replicate()])).pow(2).mean().backward()
    check_gradients(models, "of batches that are the same")
    reference = seeded(Layers)
    reference(whole(rows(mesh, 0))).pow(2).mean().backward()
    for p, q in zip(models[0].parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)


@needs_mesh_dims
@on_ranks(4, comm=("shm",))
def test_only_the_engine_reduces_along_data_parallel_dimensions():
    """Each rank's part of the sequence gives the norm's weight a part of its gradient: PyTorch adds along that dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    models = side_by_side(mesh, RMSNorm)
    sequences = distribute_tensor(torch.rand(4, 6, WIDTH), mesh, [Shard(0), Shard(1)])
    for model in models:
        loss = model(sequences).to_local().pow(2).sum()
        with CommDebugMode() as counts:
            loss.backward()
        assert counts.get_comm_counts()[torch.ops.c10d_functional.all_reduce] == 1
    check_gradients(models, "of parts of a sequence")


@needs_mesh_dims
@on_ranks(4, comm=("shm",))
def test_state_dicts():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    source, target = side_by_side(mesh, Layers), side_by_side(mesh, lambda: seeded(Layers, 2))
    for assign in (False, True):
        for model, other in zip(source, target, strict=True):
            state = {name: value.clone() for name, value in model.state_dict().items()}
            other.load_state_dict(state, assign=assign)
            for name, value in other.state_dict().items():
                assert_alike(value, state[name], name)
        check_training(target, mesh)


@on_ranks(4, comm=("shm",))
def test_summoned_parameters_lie_as_before_sharding():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, unsharded = sharded(fully_shard, mesh, Layers), on_mesh(seeded(Layers), mesh)
    layers_loss(model, mesh, 0).backward()
    gradients = [whole(p.grad) for p in model.parameters()]
    with libfsdp.summon_full_params(model, with_grads=True), torch.no_grad():
        for p, q, gradient in zip(model.parameters(), unsharded.parameters(), gradients, strict=True):
            assert_alike(p, q, "a summoned parameter")
            assert torch.equal(whole(p.grad), gradient)
            p.mul_(2)
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert torch.equal(whole(p), 2 * whole(q))


@on_ranks(2, comm=("shm",))
def test_what_a_module_reads_can_be_written():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = sharded(fully_shard, mesh, Layers)
    with torch.no_grad():
        model.up.weight.fill_(3)
        model.up.bias.copy_(distribute_tensor(torch.arange(2.0 * WIDTH), mesh, [Replicate()]))
    assert torch.equal(whole(model.up._parameters["weight"]), torch.full((2 * WIDTH, WIDTH), 3.0))
    assert torch.equal(whole(model.up._parameters["bias"]), torch.arange(2.0 * WIDTH))
    assert torch.equal(whole(model.up.weight), torch.full((2 * WIDTH, WIDTH), 3.0))


@on_ranks(2, comm=("shm",))
def test_clipping_needs_nothing_of_dtensors():
    """Where nothing but fully_shard cuts, the engine adds, in float64."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = sharded(fully_shard, mesh, Layers)
    layers_loss(model, mesh, 0).backward()
    squares = sum(whole(p.grad).double().pow(2).sum() for p in model.parameters())
    with CommDebugMode() as counts:
        norm = libfsdp.clip_grad_norm_(model, 1e-2)
    assert type(norm) is torch.Tensor and counts.get_total_counts() == 0
    torch.testing.assert_close(norm.double(), squares.sqrt(), rtol=1e-7, atol=0)
