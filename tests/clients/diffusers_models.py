"""diffusers: a conditional UNet and a diffusion transformer, each trained to tell the noise."""

import torch
from diffusers import AutoencoderKL, DDPMScheduler, DiTTransformer2DModel, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from training import Outcome, case, draws, shard, train, whole


def noised(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    images, noise = torch.randn(2, 2, 4, size, size, generator=draws(step))
    times = torch.randint(0, 1000, (2,), generator=draws(step + 100))
    return DDPMScheduler().add_noise(images, noise, times), noise, times


def unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=12, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
    ).train()  # fmt: skip


def unet_loss(model: UNet2DConditionModel, step: int) -> torch.Tensor:
    images, noise, times = noised(step)
    text = torch.randn(2, 5, 12, generator=draws(step + 200))
    return torch.nn.functional.mse_loss(model(images, times, encoder_hidden_states=text).sample, noise)


@case
def conditional_unet() -> Outcome:
    model = unet()
    shard(model, [*model.down_blocks, model.mid_block, *model.up_blocks])
    return train(model, lambda step: unet_loss(model, step))


@case
def checkpointed_unet() -> Outcome:
    model = unet()
    model.enable_gradient_checkpointing()
    shard(model, [*model.down_blocks, model.mid_block, *model.up_blocks])
    return train(model, lambda step: unet_loss(model, step))


@case
def averaged_unet() -> Outcome:
    model = unet()
    shard(model, [*model.down_blocks, model.mid_block, *model.up_blocks])
    average = EMAModel(model.parameters(), decay=0.5)

    def loss_at(step: int) -> torch.Tensor:
        average.step(model.parameters())
        return unet_loss(model, step)

    outcome = train(model, loss_at)
    outcome.weights.update({f"average.{i}": whole(each) for i, each in enumerate(average.shadow_params)})
    return outcome


@case
def diffusion_transformer() -> Outcome:
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4,
        num_embeds_ada_norm=1000,
    ).train()  # fmt: skip
    shard(model, model.transformer_blocks[1:])  # the model's own forward reads the first one's embedding

    def loss_at(step: int) -> torch.Tensor:
        images, noise, times = noised(step)
        classes = torch.randint(0, 1000, (2,), generator=draws(step + 200))
        return torch.nn.functional.mse_loss(model(images, times, classes).sample[:, :4], noise)

    return train(model, loss_at)


@case
def autoencoder() -> Outcome:
    model = AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).train()  # fmt: skip
    shard(model, [model.encoder, model.decoder])

    def loss_at(step: int) -> torch.Tensor:
        images = torch.randn(2, 3, 8, 8, generator=draws(step))
        return torch.nn.functional.mse_loss(model(images).sample, images)

    return train(model, loss_at)
