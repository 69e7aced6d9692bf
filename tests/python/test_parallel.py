"""Together with tensor parallelism, and with parameters that are DTensors on one mesh for everything."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import libfsdp
from harness import on_ranks
from libfsdp import DataParallelMeshDims, fully_shard
from subjects import needs_mesh_dims, needs_mesh_of_a_parameter, seeded, whole

# PyTorch's function wants its own mesh, and DTensor's caches answer with the first one that was equal to it.
init_device_mesh = functools.cache(device_mesh.init_device_mesh)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


DATA_PARALLEL = ("replicate", "dp", "cp")  # names of mesh dimensions that the tests use so


def batch_of(mesh, step):
    """Of all ranks, and this one's part: by its place along the data parallel dimensions."""
    count, rank = 1, 0
    for name in mesh.mesh_dim_names:
        if name in DATA_PARALLEL:
            count, rank = count * mesh[name].size(), rank * mesh[name].size() + mesh[name].get_local_rank()
    rows = torch.randn(4 * count, 8, generator=torch.Generator().manual_seed(step))
    return rows, rows[rank * 4 : (rank + 1) * 4]


def tensor_parallel(mesh, make=lambda: seeded(MLP)):
    return parallelize_module(make(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def over_batch(mesh):
    """Rows along data parallel dimensions, the same along others."""
    return [Shard(0) if name in DATA_PARALLEL else Replicate() for name in mesh.mesh_dim_names]


def own_rows(out):
    """This rank's, of what a model gave."""
    return out.redistribute(placements=over_batch(out.device_mesh)).to_local() if isinstance(out, DTensor) else out


def check_as_unsharded(model, mesh, local_batch=lambda x: x):
    reference = seeded(MLP)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(2):
        rows, mine = batch_of(mesh, step)
        own_rows(model(local_batch(mine))).pow(2).mean().backward()
        reference(rows).pow(2).mean().backward()
        for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, msg=lambda m: f"{step} {name}: {m}")
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(whole(p), q.detach())


@on_ranks(4)
def test_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(mesh["tp"])
    fully_shard(model.up, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    placements = {name: p.placements for name, p in model.named_parameters()}
    assert placements == {
        "up.weight": (_StridedShard(0, split_factor=2), Shard(0)),
        "up.bias": (_StridedShard(0, split_factor=2), Shard(0)),
        "down.weight": (Shard(0), Shard(1)),
        "down.bias": (Shard(0), Replicate()),
    }
    assert all(p.device_mesh.mesh_dim_names == ("dp", "tp") for p in model.parameters())
    assert isinstance(model.up.weight, DTensor) and model.up.weight.device_mesh == mesh["tp"]
    check_as_unsharded(model, mesh)


@on_ranks(8, comm=("shm",))
def test_hybrid_with_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "dp", "tp"))
    model = tensor_parallel(mesh["tp"])
    for module in (model.up, model):
        fully_shard(module, mesh=mesh["replicate", "dp"])
    assert model.up._parameters["weight"].placements == (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
    assert model.up._parameters["weight"].device_mesh.mesh_dim_names == ("replicate", "dp", "tp")
    assert torch.equal(whole(model.up._parameters["weight"]), seeded(MLP).up.weight)
    check_as_unsharded(model, mesh)


@on_ranks(4)
def test_resharded_to_fewer_ranks_with_tensor_parallelism():
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(mesh["tp"])
    for module in (model.up, model):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=2)
    check_as_unsharded(model, mesh)


@on_ranks(4)
def test_as_pytorch_with_tensor_parallel():
    """Placements, local shards, norms, scaled losses: side by side with PyTorch's own."""
    world = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    mesh = world["dp", "tp"]
    other_dim = lambda p: Shard(1 if p.placements[0] == Shard(0) and p.ndim > 1 else 0)  # noqa: E731
    for options in ({}, dict(shard_placement_fn=other_dim), dict(reshard_after_forward=False)):
        models = []
        for shard in (fully_shard, torch_fsdp.fully_shard):
            model = tensor_parallel(mesh["tp"])
            for module in (model.up, model):
                shard(module, mesh=mesh["dp"], **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
            norms = []
            for step in range(2):
                scaler.scale(model(batch_of(mesh, step)[1]).pow(2).mean()).backward()
                scaler.unscale_(optimizer)
                norms.append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scaler.get_scale() == 32.0
            models.append((dict(model.named_parameters()), norms, model.state_dict()))
        (ours, norms, state), (theirs, expected, _) = models
        torch.testing.assert_close(norms, expected)
        for name, p in ours.items():
            q = theirs[name]
            assert p.placements == q.placements and p.device_mesh == q.device_mesh and p.stride() == q.stride(), name
            torch.testing.assert_close(p.to_local(), q.to_local(), msg=lambda m: f"{name}: {m}")
            torch.testing.assert_close(whole(p), whole(q), msg=lambda m: f"{name}: {m}")
            assert state[name].to_local().data_ptr() == p.to_local().data_ptr()


@on_ranks(4)
def test_a_frozen_parameter_thaws():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(mesh["tp"])
    for parameter in model.up.parameters():
        parameter.requires_grad_(False)
    fully_shard(model, mesh=mesh["dp"])
    model(batch_of(mesh, 0)[1]).pow(2).mean().backward()
    assert model.up._parameters["weight"].grad is None
    model.zero_grad()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    check_as_unsharded(model, mesh)


@on_ranks(4, comm=("shm",))
def test_a_mesh_whose_dimensions_are_in_another_order():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    models = []
    for shard in (fully_shard, torch_fsdp.fully_shard):
        models.append(shard(tensor_parallel(mesh["tp"]), mesh=mesh["dp"]))
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert p.placements == q.placements and p.device_mesh.mesh_dim_names == q.device_mesh.mesh_dim_names
        assert torch.equal(p.to_local(), q.to_local())
    check_as_unsharded(models[0], mesh)


@on_ranks(4, comm=("shm",))
def test_an_error_in_the_mesh_leaves_the_model_as_it_was():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(mesh["tp"])
    with pytest.raises(ValueError, match="slice of the mesh"):
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model, mesh=mesh["dp"])
    check_as_unsharded(model, mesh)


class Normed(MLP):
    """Its norm is not parallelized."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(super().forward(x))


@on_ranks(4)
def test_clipping_over_several_meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch, part = batch_of(mesh, 0)
    for norm_type in (1.0, 2.0, float("inf")):
        reference = seeded(Normed)
        model = fully_shard(tensor_parallel(mesh["tp"], lambda: seeded(Normed)), mesh=mesh["dp"])
        for module, rows in ((model, part), (reference, batch)):
            module(rows).pow(4).mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        norm = libfsdp.clip_grad_norm_(model, 0.01, norm_type)
        torch.testing.assert_close(norm, expected)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad)


@on_ranks(2)
def test_clipping_fsdp1s_parameters_beside_tensor_parallel_ones():
    mesh, rows = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.randn(4, 8, generator=torch.Generator())
    for norm_type in (1.0, 2.0, float("inf")):
        for use_orig_params in (False, True):
            unsharded = nn.ModuleList([seeded(MLP), seeded(lambda: nn.Linear(8, 8))])
            head = libfsdp.FullyShardedDataParallel(
                seeded(lambda: nn.Linear(8, 8)), use_orig_params=use_orig_params, device_id=torch.device("cpu")
            )
            model = nn.ModuleList([tensor_parallel(mesh), head])
            for layers in (unsharded, model):
                layers[1](layers[0](rows)).pow(4).mean().backward()
            expected = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.01, norm_type)
            twice = [*model.parameters(), *model.parameters()]
            torch.testing.assert_close(libfsdp.clip_grad_norm_(twice, 0.01, norm_type), expected)
            for p, q in zip(model[0].parameters(), unsharded[0].parameters(), strict=True):
                torch.testing.assert_close(whole(p.grad), q.grad)
            of_head = torch.nn.utils.get_total_norm([p.grad for p in unsharded[1].parameters()], norm_type)
            torch.testing.assert_close(head.clip_grad_norm_(float("inf"), norm_type), of_head)


class OneExpert(nn.Module):
    """A rank's rows go to one of them, or to none."""

    def __init__(self):
        super().__init__()
        self.expert, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x, uses_expert):
        x = self.head(x)
        return x @ self.expert.weight.to_local().T if uses_expert else x


@on_ranks(2)
def test_clipping_where_a_rank_has_no_gradients_on_a_mesh():
    world = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    for norm_type in (1.0, 2.0, float("inf")):
        model = seeded(OneExpert)
        cut = distribute_tensor(model.expert.weight.detach(), world["ep"], [Shard(0)])
        model.expert.weight = nn.Parameter(cut)
        fully_shard(model.expert, mesh=world["dp"])
        fully_shard(model.head, mesh=world["ep"])
        model(torch.ones(2, 8), uses_expert=dist.get_rank() == 0).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        assert (gradients[0] is None) == (dist.get_rank() == 1)
        own = torch.zeros(0) if gradients[0] is None else gradients[0].to_local().flatten()
        parts = [None, None]
        dist.all_gather_object(parts, own)
        every = torch.cat([*parts, *(whole(gradient).flatten() for gradient in gradients[1:])])
        expected = torch.linalg.vector_norm(every, norm_type)
        norm = libfsdp.clip_grad_norm_(model, 1e-2, norm_type)
        torch.testing.assert_close(norm, expected)


@on_ranks(4, comm=("shm",))
def test_summoned_parameters_lie_as_before_sharding():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, unsharded = fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["dp"]), tensor_parallel(mesh["tp"])
    model(batch_of(mesh, 0)[1]).pow(2).mean().backward()
    gradients = [whole(p.grad) for p in model.parameters()]
    with libfsdp.summon_full_params(model, with_grads=True), torch.no_grad():
        for p, q, gradient in zip(model.parameters(), unsharded.parameters(), gradients, strict=True):
            assert p.placements == q.placements and p.device_mesh == q.device_mesh and p.requires_grad
            assert torch.equal(whole(p), whole(q)) and torch.equal(whole(p.grad), gradient)
            p.mul_(2)
            p.grad.mul_(3)
    for p, q, gradient in zip(model.parameters(), unsharded.parameters(), gradients, strict=True):
        assert torch.equal(whole(p), whole(q) * 2) and torch.equal(whole(p.grad), gradient * 3)
    with libfsdp.summon_full_params(model, with_grads=True):
        for p in model.parameters():
            p.grad = p.grad * 2
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(whole(p.grad), gradient * 6)
    with libfsdp.summon_full_params(model, with_grads=True):
        model.zero_grad()
    assert not any(whole(p.grad).any() for p in model.parameters())


@on_ranks(4, comm=("shm",))
def test_what_is_assigned_in_place_of_summoned_parameters_is_written_back():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, unsharded = fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["dp"]), tensor_parallel(mesh["tp"])
    with libfsdp.summon_full_params(model), torch.no_grad():
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter * 2))
    for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q) * 2)
    owner, shape = next((m, m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear))
    with pytest.raises(ValueError, match="a plain tensor was put in its place: give it a DTensor that lies"):
        with libfsdp.summon_full_params(model):
            owner.weight = nn.Parameter(torch.zeros(shape))


@on_ranks(4)
def test_torchs_clip_reduces_once_for_each_mesh_dimension():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch, part = batch_of(mesh, 0)
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        model, reference = fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["dp"]), seeded(MLP)
        for module, rows in ((model, part), (reference, batch)):
            module(rows).pow(2).mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        with CommDebugMode() as counts:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type, foreach=True)
        assert counts.get_comm_counts() == {torch.ops.c10d_functional.all_reduce: mesh.ndim}
        torch.testing.assert_close(norm.full_tensor(), expected)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad)


@on_ranks(4, comm=("shm",))
def test_an_infinite_gradient_of_one_rank_skips_the_step_of_all():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["dp"])
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [whole(p).clone() for p in model.parameters()]
    scaler.scale(model(batch_of(mesh, 0)[1]).pow(2).mean()).backward()
    if dist.get_rank() == 0:
        next(model.parameters()).grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("hybrid", [False, True])
@on_ranks(4, comm=("shm",))
def test_tensor_parallel_state_dicts(hybrid):
    shape, data_parallel = ((2, 1, 2), ("replicate", "dp")) if hybrid else ((1, 2, 2), ("dp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp", "tp"))
    source, target = (fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh[data_parallel]) for _ in range(2))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(3)
    for name, value in source.state_dict().items():
        assert torch.equal(whole(value), 3 * seeded(MLP).state_dict()[name])
    for assign in (False, True):
        target.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=assign)
        x = batch_of(mesh, 0)[1]
        assert torch.equal(whole(target(x)), whole(source(x)))


@on_ranks(4, comm=("shm",))
def test_tensor_parallel_on_meta_and_in_another_dtype():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def on_meta():
        with torch.device("meta"):
            return MLP()

    model = tensor_parallel(mesh["tp"], on_meta)
    for module in (model.up, model):
        fully_shard(module, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p, q in zip(model.parameters(), seeded(MLP).parameters(), strict=True):
            p.copy_(distribute_tensor(q, p.device_mesh, p.placements))
    check_as_unsharded(model, mesh)
    assert model.to(torch.float64) is model
    out = model(batch_of(mesh, 0)[1].double())
    assert out.dtype == torch.float64
    out.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float64, name
    assert model.up.weight.dtype == model.up.weight.to_local().dtype == torch.float64
    assert model.up.weight._spec.tensor_meta.dtype == torch.float64


def on_whole_mesh(mesh, rest):
    model = seeded(MLP)
    rests = rest if isinstance(rest, dict) else {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            tp = rests.get((module is model.up, name), None if rests else rest)
            placements = [Replicate() if dim != "tp" else tp for dim in mesh.mesh_dim_names]
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    return model


@on_ranks(2, 4, comm=("shm",))
def test_one_mesh_for_everything():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for dims, placement in [(DataParallelMeshDims(shard="dp"), Shard(0)), (DataParallelMeshDims(replicate="dp"), None)]:
        model = on_whole_mesh(mesh, None)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        assert next(model.parameters()).placements == (placement or Replicate(),)
        assert next(model.parameters()).device_mesh == mesh
        check_as_unsharded(model, mesh, on_this_mesh(mesh))


COLUMNS_AND_ROWS = {
    (True, "weight"): Shard(0),
    (True, "bias"): Shard(0),
    (False, "weight"): Shard(1),
    (False, "bias"): Replicate(),
}


def on_this_mesh(mesh):
    """Activations are DTensors too."""
    return lambda x: DTensor.from_local(x, mesh, over_batch(mesh), run_check=False)


@on_ranks(4, comm=("shm",))
def test_one_mesh_with_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dims, cut in (
        (DataParallelMeshDims(shard="dp"), (_StridedShard(0, split_factor=2), Shard(0))),
        (DataParallelMeshDims(replicate="dp"), (Replicate(), Shard(0))),
    ):
        model = on_whole_mesh(mesh, COLUMNS_AND_ROWS)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        assert model.up._parameters["weight"].placements == cut
        assert model.up.weight.device_mesh == mesh and model.up.weight.placements == (Replicate(), Shard(0))
        assert all(p.device_mesh == mesh for p in model.parameters())
        check_as_unsharded(model, mesh, on_this_mesh(mesh))


@on_ranks(8, comm=("shm",))
def test_one_mesh_with_several_data_parallel_dimensions():
    hybrid = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "dp", "tp"))
    flattened = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    for mesh, dims in (
        (hybrid, DataParallelMeshDims(shard="dp", replicate="replicate")),
        (flattened, DataParallelMeshDims(shard=("dp", "cp"))),
        (flattened, DataParallelMeshDims(replicate=("dp", "cp"))),
    ):
        model = on_whole_mesh(mesh, COLUMNS_AND_ROWS)
        fully_shard(model.up, mesh=mesh, dp_mesh_dims=dims)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        for p, q in zip(model.parameters(), seeded(MLP).parameters(), strict=True):
            assert torch.equal(whole(p), q), (dims, p.placements, p.device_mesh)
        check_as_unsharded(model, mesh, on_this_mesh(mesh))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.12 has a placement more than later ones")
@on_ranks(4, comm=("shm",))
def test_one_mesh_as_pytorch_lays_it_out():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    right = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    flat = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp"))
    for mesh, dims in (
        (mesh, DataParallelMeshDims(shard="dp")),
        (right, DataParallelMeshDims(shard="dp")),
        (flat, DataParallelMeshDims(shard=("dp", "cp"))),
        (flat, DataParallelMeshDims(shard="cp", replicate="dp")),
    ):
        ours, theirs = on_whole_mesh(mesh, COLUMNS_AND_ROWS), on_whole_mesh(mesh, COLUMNS_AND_ROWS)
        for shard, model in ((fully_shard, ours), (torch_fsdp.fully_shard, theirs)):
            shard(model, mesh=mesh, dp_mesh_dims=dims)
        for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert p.placements == q.placements, (name, p.placements, q.placements)
            assert p.device_mesh.shape == q.device_mesh.shape, (name, p.device_mesh, q.device_mesh)
            assert torch.equal(p.to_local(), q.to_local()), name
        for p, q in zip(ours.parameters(), seeded(MLP).parameters(), strict=True):
            assert torch.equal(whole(p), q), (dims, p.placements)


@on_ranks(4, comm=("shm",))
def test_collectives_and_hooks_are_those_of_the_data_parallel_dimension():
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    model = on_whole_mesh(mesh, COLUMNS_AND_ROWS)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    sizes, hooked = [], []

    def gather(output_tensor, input_tensor, group, async_op):
        sizes.append(group.size())
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    model.set_custom_all_gather(gather)
    model.set_all_reduce_hook(lambda gradient: hooked.append(gradient.numel()), stream=torch.Stream("cpu"))
    check_as_unsharded(model, mesh, on_this_mesh(mesh))
    assert set(sizes) == {4} and hooked


@on_ranks(2, comm=("shm",))
def test_zeros_for_parameters_that_are_dtensors_and_unused():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = on_whole_mesh(mesh, COLUMNS_AND_ROWS)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    model.set_reduce_scatter_unused_params(True)
    x = on_this_mesh(mesh)(torch.ones(1, 8))
    whole(model.up(x)).sum().backward()
    gradient = model.down._parameters["weight"].grad
    assert isinstance(gradient, DTensor) and whole(gradient).abs().max() == 0
    assert whole(model.up._parameters["weight"].grad).abs().max() > 0


@on_ranks(1, comm=("shm",))
def test_meshes_on_different_kinds_of_devices():
    from torch.distributed.device_mesh import DeviceMesh

    other = DeviceMesh("meta", [0], _init_backend=False, mesh_dim_names=("tp",))
    module = nn.Linear(2, 2, bias=False)
    local = torch.rand(2, 2, device="meta")
    module.weight = nn.Parameter(DTensor.from_local(local, other, [Replicate()], run_check=False))
    with pytest.raises(ValueError, match="mesh of the same type as the FSDP mesh but got meta for DTensor and cpu"):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))


@on_ranks(2, comm=("shm",))
def test_wrong_meshes():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")
    with pytest.raises(ValueError, match="must be DTensors"):
        fully_shard(MLP(), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="not found in mesh.mesh_dim_names"):
        fully_shard(MLP(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="missing"))
    with pytest.raises(ValueError, match="same mesh"):
        fully_shard(on_whole_mesh(mesh["dp"], None), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(NotImplementedError, match="reshard_after_forward as int"):
        fully_shard(on_whole_mesh(mesh, Replicate()), mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)
    model = MLP()
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match="Expected Replicate"):
        fully_shard(model.up, mesh=mesh, dp_mesh_dims=dims)
    assert libfsdp.DataParallelMeshDims is DataParallelMeshDims


class Experts(nn.Module):
    """Between two linear modules, of which all ranks have all, experts of which each rank has some."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.rand(4, 8, 8))

    def forward(self, x):
        own = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        return self.after(torch.einsum("bi,eij->bj", torch.tanh(self.before(x)), own))


def check_experts_as_pytorch(world, among_experts):
    """All else is cut over all ranks."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    everyone = world._flatten("everyone")
    place = lambda p: ShardPlacementResult(Shard(1), among_experts) if isinstance(p, DTensor) else None  # noqa: E731
    for options in ({}, dict(reshard_after_forward=False)):
        models = []
        for shard in (fully_shard, torch_fsdp.fully_shard):
            model = seeded(Experts)
            model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), world["ep"], [Shard(0)]))
            shard(model, mesh=everyone, shard_placement_fn=place, **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
            for step in range(2):
                rows = torch.rand(4 * world.size(), 8, generator=torch.Generator().manual_seed(step))
                model(rows[dist.get_rank() * 4 :][:4]).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(dict(model.named_parameters()))
        for name, p in models[0].items():
            q = models[1][name]
            assert p.placements == q.placements and p.device_mesh == q.device_mesh, name
            torch.testing.assert_close(p.to_local(), q.to_local(), msg=lambda m: f"{name}: {m}")  # noqa: B023


@needs_mesh_of_a_parameter
@on_ranks(4)
def test_experts_on_a_mesh_of_their_own():
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    check_experts_as_pytorch(world, FSDPMeshInfo(world["dp"], shard_mesh_dim=0))


@needs_mesh_of_a_parameter
@on_ranks(8, comm=("shm",))
def test_experts_on_a_hybrid_mesh_of_their_own():
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "dp", "ep"))
    check_experts_as_pytorch(world, HSDPMeshInfo(world["replicate", "dp"], shard_mesh_dim=1, replicate_mesh_dim=0))
