"""What there is on GPUs only. Of the other tests, those of `on_gpus.FILES` run there too: FSDP_TEST_DEVICE=cuda."""

import functools

import on_gpus
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.utils.checkpoint import checkpoint

import libfsdp
from fsdp1_subjects import BOTH, quietly, summoned
from harness import on_ranks
from libfsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from libfsdp.sharded_grad_scaler import ShardedGradScaler
from subjects import check_training, loss_of, mine, mlp, rows, seeded, shard_with, whole

pytestmark = pytest.mark.skipif(not on_gpus.WANTED, reason="for GPUs: FSDP_TEST_DEVICE=cuda")
on_gpu_ranks = functools.partial(on_ranks, comm=("nccl",))
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        loss_of(model, mine(rows(step, 5))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16])
@on_gpu_ranks(1, 2)
def test_no_operator_of_a_step_waits_for_the_gpu(policy):
    wrapped = functools.partial(FullyShardedDataParallel, use_orig_params=True)
    flat = functools.partial(FullyShardedDataParallel, use_orig_params=False)
    models = [shard_with(functools.partial(fully_shard, mp_policy=policy), seeded(mlp)), wrapped(seeded(mlp)), flat(seeded(mlp))]
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        train(model, optimizer, 3)
        batches = [mine(rows(step, 5)) for step in range(3)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("pin_memory", [True, False])
@on_gpu_ranks(1, 2)
def test_offloaded_shards_lie_on_the_host(pin_memory):
    offloaded = functools.partial(fully_shard, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
    model = shard_with(offloaded, seeded(mlp))
    for parameter in model.parameters():
        assert parameter.to_local().is_cpu and parameter.to_local().is_pinned() == pin_memory
    assert model[0].weight.is_cuda
    loss_of(model, mine(rows(0, 5))).backward()
    for parameter in model.parameters():
        assert parameter.grad.to_local().is_cpu


@on_gpu_ranks(1, 2)
def test_a_model_made_on_the_host_is_moved():
    with torch.device("cpu"):
        models = [mlp() for _ in range(3)]
    here = torch.device("cuda", torch.cuda.current_device())
    fully_shard(models[0])
    FullyShardedDataParallel(models[1], device_id=here)
    FullyShardedDataParallel(models[2], device_id=here, use_orig_params=True)
    for model in models:
        assert all(parameter.device == here for parameter in model.parameters())
        assert loss_of(model, mine(rows(0, 5))).isfinite()


@on_gpu_ranks(1, 2)
def test_random_numbers_of_the_gpu_go_on_from_a_checkpoint(folder=""):
    def noisy():
        return nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.5)), nn.Linear(9, 3))

    def made(seed):
        model = shard_with(fully_shard, seeded(noisy, seed))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    begun, optimizer = made(1)
    train(begun, optimizer, 2)
    libfsdp.save(folder, begun, optimizer, step=2)
    train(begun, optimizer, 2, first=2)
    resumed, optimizer = made(2)
    libfsdp.load(folder, resumed, optimizer)
    train(resumed, optimizer, 2, first=2)
    for ours, theirs in zip(resumed.parameters(), begun.parameters(), strict=True):
        assert torch.equal(whole(ours), whole(theirs))


@on_gpu_ranks(1, 2)
def test_checkpointed_activations_draw_the_same_random_numbers():
    class Noisy(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            self.first, self.second, self.checkpointed = nn.Linear(5, 64), nn.Linear(64, 3), checkpointed

        def body(self, x):
            return self.second(nn.functional.dropout(self.first(x).relu(), 0.5))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)

    gradients = []
    for checkpointed in (False, True):
        model = seeded(lambda: Noisy(checkpointed))
        fully_shard(model.first), fully_shard(model)
        torch.manual_seed(5)
        loss_of(model, mine(rows(0, 5))).backward()
        gradients.append([whole(parameter.grad) for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@on_gpu_ranks(1, 2)
def test_half_precision_with_a_scaler():
    for kind in ("fully_shard", "flat", "original"):
        model = seeded(mlp)
        if kind == "fully_shard":
            shard_with(functools.partial(fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)), model)
            scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        else:
            precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
            model = FullyShardedDataParallel(model, mixed_precision=precision, use_orig_params=kind == "original")
            scaler = ShardedGradScaler(init_scale=2.0**10)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(6):
            loss = loss_of(model, mine(rows(0, 5)))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0], kind
        assert scaler.get_scale() == 2.0**10, kind


@on_gpu_ranks(1, 2)
def test_autocast():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))

    def loss(of, batch):
        with torch.autocast("cuda", torch.bfloat16):
            return of(batch).float().pow(2).mean()

    check_training(model, reference, loss, (5,), exact=True, steps=3)


@on_gpu_ranks(1, 2)
def test_compiled_models_train_as_the_others():
    torch.set_default_device(None)
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    compiled = torch.compile(model, backend="aot_eager")
    check_training(model, reference, lambda of, batch: loss_of(compiled if of is model else of, batch), (5,), exact=False, steps=3)


@on_gpu_ranks(2)
def test_memory_is_that_of_shards_between_steps():
    def deep():
        return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])

    begin = torch.cuda.memory_allocated()
    model = seeded(deep)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert torch.cuda.memory_allocated() - begin <= shards + 2**20
    for _ in range(3):
        model(torch.ones(2, 1024)).sum().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    workspaces = 2 * 33 * 2**20  # of matrix products, on both threads
    assert torch.cuda.memory_allocated() - begin <= shards + workspaces + 2**20


@on_gpu_ranks(2)
def test_what_is_written_and_not_to_be_kept_where_nothing_is_sharded():
    """Offloaded, it is in what PyTorch's class shows, or not, and so in ours."""
    seen = []
    for wrap in BOTH:
        model = quietly(wrap, seeded(lambda: nn.Linear(5, 3)), sharding_strategy=ShardingStrategy.NO_SHARD, cpu_offload=CPUOffload(True))
        with summoned(model, writeback=False), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        seen.append({name: value.cpu() for name, value in quietly(model.state_dict).items()})
    for name, value in seen[1].items():
        assert torch.equal(seen[0][name], value), name


@on_gpu_ranks(2)
def test_streams_of_the_program():
    reference, model = seeded(mlp), shard_with(fully_shard, seeded(mlp))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check_training(model, reference, loss_of, (5,), exact=True, steps=4)


@on_gpu_ranks(1, 2)
def test_a_capture_into_a_graph_is_an_error():
    model, x = shard_with(fully_shard, seeded(mlp)), mine(rows(0, 5))
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        model(x)
    torch.cuda.synchronize()
    with pytest.raises(libfsdp.Error, match="captured into a CUDA graph"), torch.no_grad():
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            model(x)
    check_training(model, seeded(mlp), loss_of, (5,), exact=True)
