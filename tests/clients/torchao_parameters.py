"""torchao: optimizers whose states are quantized, and parameters that are gathered in fewer bits."""

import torch
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit
from torchao.quantization import quantize_
from training import Outcome, case, draws, shard, train


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)).to(torch.bfloat16)


def trained(model: nn.Sequential, make_optimizer=lambda model: None, steps: int = 4, **options) -> Outcome:
    shard(model, [part for part in model if list(part.parameters())], **options)

    def loss_at(step: int) -> torch.Tensor:
        x = torch.randn(8, 64, generator=draws(step)).to(torch.bfloat16)
        return (model(x) - x).float().pow(2).mean()

    return train(model, loss_at, steps=steps, optimizer=make_optimizer(model))


@case
def adamw_8bit() -> Outcome:
    return trained(network(), lambda model: AdamW8bit(model.parameters(), lr=1e-2))


@case
def adamw_4bit() -> Outcome:
    return trained(network(), lambda model: AdamW4bit(model.parameters(), lr=1e-2))


@case
def int8_mixed_precision() -> Outcome:
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    model = network()
    quantize_(model, int8_mixed_precision_training())
    return trained(model)


@case
def int8_weights() -> Outcome:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training

    model = network()
    quantize_(model, int8_weight_only_quantized_training())
    return trained(model)


@case
def nf4_with_adapters() -> Outcome:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear):
            super().__init__()
            self.weight = nn.Parameter(to_nf4(base.weight.detach(), 64, 1), requires_grad=False)
            self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.to(x.dtype)) + self.up(self.down(x))

    parts = [Adapted(part) if isinstance(part, nn.Linear) else part for part in network()]
    return trained(adapted_in_bfloat16(parts))


def adapted_in_bfloat16(parts: list[nn.Module]) -> nn.Sequential:
    for part in parts:
        for name in ("down", "up"):
            if hasattr(part, name):
                getattr(part, name).to(torch.bfloat16)
    return nn.Sequential(*parts)
