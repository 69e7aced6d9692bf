"""PEFT: adapters on a sharded model, trained, merged into its weights and taken out again."""

import torch
from peft import LoraConfig, get_peft_model
from training import Outcome, case, draws, lists_of, shard, train, whole_weights
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).train()


def lora(**options) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options)


def train_adapted(config) -> tuple[torch.nn.Module, Outcome]:
    model = get_peft_model(llama(), config)
    shard(model, lists_of(model))

    def loss_at(step: int) -> torch.Tensor:
        tokens = torch.randint(3, 97, (2, 12), generator=draws(step))
        return model(input_ids=tokens, labels=tokens).loss

    return model, train(model, loss_at)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(12).view(1, 12)).logits


@case
def lora_is_trained() -> Outcome:
    return train_adapted(lora(lora_dropout=0.1))[1]


@case
def dora_is_trained() -> Outcome:
    return train_adapted(lora(use_dora=True))[1]


@case
def lora_beside_whole_modules() -> Outcome:
    return train_adapted(lora(modules_to_save=["lm_head"]))[1]


@case
def lora_is_merged() -> Outcome:
    model, outcome = train_adapted(lora())
    model.merge_adapter()
    outcome.weights["merged"] = logits(model)
    model.unmerge_adapter()
    outcome.weights["unmerged"] = logits(model)
    return outcome


@case
def lora_is_merged_for_good() -> Outcome:
    model, outcome = train_adapted(lora())
    return Outcome(outcome.losses, whole_weights(model.merge_and_unload()))


@case
def lora_is_merged_for_good_safely() -> Outcome:
    model, outcome = train_adapted(lora())
    return Outcome(outcome.losses, whole_weights(model.merge_and_unload(safe_merge=True)))


@case
def an_adapter_is_disabled() -> Outcome:
    model, outcome = train_adapted(lora())
    with model.disable_adapter():
        outcome.weights["without"] = logits(model)
    return outcome
