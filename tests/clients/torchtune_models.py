"""torchtune: its Llama sharded by shard_model, full and with LoRA, loaded from a whole state and gathered again."""

import torch
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from torchtune.training import gather_cpu_state_dict, get_shard_conditions, load_from_full_model_state_dict, shard_model
from training import Outcome, case, draws, train

SIZES = dict(vocab_size=96, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=32, intermediate_dim=48)


def conditions() -> list:
    return [lambda name, module: get_shard_conditions(name, module)]


def trained(make, prepare=lambda model: None) -> Outcome:
    state = make().state_dict()
    with torch.device("meta"):
        model = make()
    prepare(model)
    shard_model(model, conditions(), cpu_offload=False)
    for module in model.modules():
        if hasattr(module, "rope_init"):
            module.rope_init()
    load_from_full_model_state_dict(model, state, torch.device("cpu"))

    def loss_at(step: int) -> torch.Tensor:
        tokens = torch.randint(0, 96, (2, 13), generator=draws(step))
        logits = model(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    outcome = train(model, loss_at)
    gathered = gather_cpu_state_dict(model, is_rank_zero=True, device=torch.device("cpu"))
    outcome.weights.update({f"gathered.{name}": tensor for name, tensor in gathered.items()})
    return outcome


@case
def full() -> Outcome:
    return trained(lambda: llama3(**SIZES))


@case
def lora() -> Outcome:
    make = lambda: lora_llama3(["q_proj", "v_proj"], lora_rank=4, lora_alpha=8, **SIZES)  # noqa: E731
    return trained(make, lambda model: set_trainable_params(model, get_adapter_params(model)))
