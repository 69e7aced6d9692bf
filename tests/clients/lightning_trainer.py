"""Lightning: ModelParallelStrategy, whose models shard themselves, in a Trainer and in Fabric."""

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from training import STEPS, Outcome, case, draws, whole_weights


def network() -> nn.Module:
    inner = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), inner, nn.Linear(16, 4))


def shard_parts(model: nn.Module, mesh) -> nn.Module:
    for part in model:
        if list(part.parameters()):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def rows() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=4)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses = network(), []

    def configure_model(self) -> None:
        if not isinstance(self.model, torch.distributed.fsdp.FSDPModule):
            shard_parts(self.model, self.device_mesh["data_parallel"])

    def training_step(self, batch, _index):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer_of(steps: int, save_distributed_checkpoint: bool = True, **options) -> lightning.Trainer:
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=save_distributed_checkpoint
    )
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    return lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, **quiet, **options)


def fitted(**options) -> Outcome:
    model = Regression()
    trainer_of(STEPS, **options).fit(model, rows())
    return Outcome(model.losses, whole_weights(model))


@case
def trainer() -> Outcome:
    return fitted()


@case
def trainer_in_bfloat16() -> Outcome:
    return fitted(precision="bf16-mixed")


@case
def trainer_with_accumulation() -> Outcome:
    return fitted(accumulate_grad_batches=2)


def resumed(**options) -> Outcome:
    first, second = Regression(), Regression()
    trainer = trainer_of(STEPS, **options)
    trainer.fit(first, rows())
    trainer.save_checkpoint("checkpoint")
    trainer_of(STEPS + 2, **options).fit(second, rows(), ckpt_path="checkpoint")
    return Outcome(first.losses + second.losses, whole_weights(second))


@case
def trainer_resumed_from_shards() -> Outcome:
    return resumed()


@case
def trainer_resumed_from_wholes() -> Outcome:
    return resumed(save_distributed_checkpoint=False)


@case
def fabric() -> Outcome:
    strategy = FabricStrategy(shard_parts_of_fabric, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(network())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step in range(STEPS):
        x, y = torch.randn(4, 8, generator=draws(step)), torch.randn(4, 4, generator=draws(step + 50))
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(losses, whole_weights(model))


def shard_parts_of_fabric(model: nn.Module, mesh) -> nn.Module:
    return shard_parts(model, mesh["data_parallel"])
