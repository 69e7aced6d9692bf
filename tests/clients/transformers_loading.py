"""transformers: models that it shards itself while it loads them, and what it saves of them."""

import pathlib

import torch
import torch.distributed as dist
from training import Outcome, case, draws, train, whole
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

CONFIG = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
FOLDER = pathlib.Path("models")


def saved(model: torch.nn.Module) -> pathlib.Path:
    if dist.get_rank() == 0:
        model.save_pretrained(FOLDER / "whole")
    dist.barrier()
    return FOLDER / "whole"


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def qwen() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**CONFIG, head_dim=8, tie_word_embeddings=True))


def load(folder: pathlib.Path) -> torch.nn.Module:
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)


def train_loaded(model: torch.nn.Module) -> Outcome:
    model.train()

    def loss_at(step: int) -> torch.Tensor:
        tokens = torch.randint(3, 96, (2, 12), generator=draws(step))
        return model(input_ids=tokens, labels=tokens).loss

    return train(model, loss_at)


def train_and_save(model: torch.nn.Module, **options) -> Outcome:
    loaded = load(saved(model))
    outcome = train_loaded(loaded)
    loaded.save_pretrained(FOLDER / "trained", **options)
    dist.barrier()
    again = load(FOLDER / "trained")
    outcome.weights.update({f"again.{name}": whole(each) for name, each in again.named_parameters()})
    return outcome


@case
def untied() -> Outcome:
    return train_and_save(llama())


@case
def tied() -> Outcome:
    return train_and_save(qwen())


@case
def untied_by_shards() -> Outcome:
    return train_and_save(llama(), distributed_checkpoint=True)


@case
def tied_by_shards() -> Outcome:
    return train_and_save(qwen(), distributed_checkpoint=True)


@case
def tied_by_shards_before_a_forward() -> Outcome:
    loaded = load(saved(qwen()))
    loaded.save_pretrained(FOLDER / "trained", distributed_checkpoint=True)
    return train_loaded(loaded)
