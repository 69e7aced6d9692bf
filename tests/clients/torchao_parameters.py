"""torchao: optimizers whose states are quantized, and parameters that are gathered in fewer bits."""

import os
import shutil
import sysconfig

CAN_COMPILE = os.path.exists(f"{sysconfig.get_paths()['include']}/Python.h") and bool(shutil.which("g++"))
# Its optimizers compile their step, if that can be: without processes of their own beside the ranks.
os.environ.update({"TORCHINDUCTOR_COMPILE_THREADS": "1"} if CAN_COMPILE else {"TORCHDYNAMO_DISABLE": "1"})

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torchao.optim import AdamW4bit, AdamW8bit  # noqa: E402
from torchao.quantization import quantize_  # noqa: E402
from training import Outcome, case, draws, shard, train  # noqa: E402


def network(width: int = 64, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    parts = (nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
    return nn.Sequential(*parts).to(dtype)


def trained(model: nn.Sequential, make_optimizer=lambda model: None, width: int = 64, **options) -> Outcome:
    shard(model, [part for part in model if list(part.parameters())])

    def loss_at(step: int) -> torch.Tensor:
        x = torch.randn(8, width, generator=draws(step)).to(model[0].weight.dtype)
        return (model(x) - x).float().pow(2).mean()

    return train(model, loss_at, optimizer=make_optimizer(model), **options)


@case
def adamw_8bit() -> Outcome:
    return trained(network(dtype=torch.float32), lambda model: AdamW8bit(model.parameters(), lr=1e-2))


@case
def adamw_4bit() -> Outcome:
    return trained(network(dtype=torch.float32), lambda model: AdamW4bit(model.parameters(), lr=1e-2))


@case
def int8_mixed_precision() -> Outcome:
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    model = network()
    quantize_(model, int8_mixed_precision_training())
    return trained(model)


@case
def int8_weights() -> Outcome:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training

    model = network(dtype=torch.float32)
    quantize_(model, int8_weight_only_quantized_training())
    # Its gradients know no multiplication in place, and it no collective that would make it whole.
    return trained(model, lambda model: AdamW8bit(model.parameters(), lr=1e-2), clip=0, weights_of=lambda model: {})


class Adapted(nn.Module):
    """A frozen weight in four bits, and an adapter."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        self.weight = nn.Parameter(to_nf4(base.weight.detach()), requires_grad=False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight) + self.up(self.down(x))


@case
def nf4_with_adapters() -> Outcome:
    parts = [Adapted(part) if isinstance(part, nn.Linear) else part for part in network(256)]
    return trained(nn.Sequential(*parts), width=256)
