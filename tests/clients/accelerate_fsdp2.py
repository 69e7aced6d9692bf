"""Accelerate: its FSDP2 plugin prepares model and optimizer, clips, saves, loads and gathers."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate_on_cpu import shard_on_cpu
from training import STEPS, Outcome, case, draws, whole_weights
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

shard_on_cpu()

CONFIG = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).train()


def qwen() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**CONFIG, head_dim=8, tie_word_embeddings=True)).train()


def accelerator_of(mixed_precision: str = "no", accumulation: int = 1, **options) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        **{"cpu_ram_efficient_loading": False, **options},
    )
    return Accelerator(
        cpu=True, fsdp_plugin=plugin, mixed_precision=mixed_precision, gradient_accumulation_steps=accumulation
    )


def prepared(accelerator: Accelerator, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(accelerator: Accelerator, model, optimizer, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + STEPS):
        tokens = torch.randint(3, 96, (2, 12), generator=draws(step))
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_prepared(model: torch.nn.Module, **options) -> Outcome:
    accelerator = accelerator_of(**options)
    model, optimizer = prepared(accelerator, model)
    losses = train(accelerator, model, optimizer)
    return Outcome(losses, whole_weights(model))


@case
def full_shard() -> Outcome:
    return train_prepared(llama())


@case
def tied_weights() -> Outcome:
    return train_prepared(qwen())


@case
def bfloat16() -> Outcome:
    return train_prepared(llama(), mixed_precision="bf16")


@case
def gradient_accumulation() -> Outcome:
    return train_prepared(llama(), accumulation=2)


@case
def activation_checkpointing() -> Outcome:
    return train_prepared(llama(), activation_checkpointing=True)


@case
def weights_from_rank_0() -> Outcome:
    return train_prepared(qwen(), cpu_ram_efficient_loading=True)


@case
def kept_after_forward() -> Outcome:
    return train_prepared(llama(), reshard_after_forward=False)


def train_across_a_save(state_dict_type: str) -> Outcome:
    accelerator = accelerator_of(state_dict_type=state_dict_type)
    model, optimizer = prepared(accelerator, llama())
    losses = train(accelerator, model, optimizer)
    accelerator.save_state("state", safe_serialization=False)
    train(accelerator, model, optimizer, first=20)
    accelerator.load_state("state")
    losses += train(accelerator, model, optimizer, first=40)
    return Outcome(losses, whole_weights(model))


@case
def state_is_saved_and_loaded() -> Outcome:
    return train_across_a_save("SHARDED_STATE_DICT")


@case
def whole_state_is_saved_and_loaded() -> Outcome:
    return train_across_a_save("FULL_STATE_DICT")
