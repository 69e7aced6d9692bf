"""TorchTitan: its Llama, sharded by its own parallelize function."""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its attention is compiled, which needs a compiler

import torch  # noqa: E402
import torchtitan.distributed.parallel_dims as parallel_dims  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3 import llama3_configs, parallelize_llama  # noqa: E402
from training import Outcome, case, draws, train  # noqa: E402

parallel_dims.device_type = "cpu"  # without an accelerator it takes CUDA for granted


def causal(query, key, value, *, enable_gqa, scale=None, **_):
    """In place of flex attention, which has no backward on the CPU; of one document."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


FlexAttention._compiled_flex_attn = staticmethod(causal)


def sharded(training: dict, **parallelism) -> torch.nn.Module:
    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.vocab_size = 2048
    config.layers = config.layers[:2]
    with torch.device("meta"):
        model = config.build()
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1, world_size=2, spmd_backend="partial_dtensor"
    )
    parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(**training),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # or PyTorch's has Gloo scale, which it cannot
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()
    return model.train()


def trained(training: dict, **parallelism) -> Outcome:
    model = sharded(training, **parallelism)
    positions = torch.arange(16).expand(2, 16)

    def loss_at(step: int) -> torch.Tensor:
        tokens = torch.randint(0, 2048, (2, 17), generator=draws(step))
        logits = model(tokens[:, :-1], positions, model.get_attention_masks(positions))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return train(model, loss_at)


@case
def llama_in_float32() -> Outcome:
    return trained(dict(mixed_precision_param="float32"))


@case
def llama_in_bfloat16() -> Outcome:
    return trained(dict(mixed_precision_param="bfloat16"))


@case
def llama_always_resharded() -> Outcome:
    return trained(dict(mixed_precision_param="float32"), fsdp_reshard_after_forward="always")
