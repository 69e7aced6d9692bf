"""transformers' Trainer: its FSDP path, which goes through Accelerate's."""

import torch
from accelerate_on_cpu import shard_on_cpu
from torch.utils.data import Dataset
from training import Outcome, case, whole_weights
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

shard_on_cpu()

CONFIG = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


class Tokens(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict:
        tokens = torch.randint(3, 96, (12,), generator=torch.Generator().manual_seed(index))
        return dict(input_ids=tokens, labels=tokens)


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def qwen() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**CONFIG, head_dim=8, tie_word_embeddings=True))


def trainer_of(model: torch.nn.Module, fsdp_config: dict | None = None, **options) -> Trainer:
    arguments = TrainingArguments(
        output_dir="trained",
        use_cpu=True,
        fsdp=True,
        fsdp_config=fsdp_config or {},
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        **{"max_steps": 4, "save_strategy": "no", **options},
    )
    return Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def outcome_of(trainer: Trainer) -> Outcome:
    logged = trainer.state.log_history
    losses = [entry[name] for entry in logged for name in ("loss", "grad_norm", "eval_loss") if name in entry]
    return Outcome(losses, whole_weights(trainer.model))


def trained(model: torch.nn.Module, **options) -> Outcome:
    trainer = trainer_of(model, **options)
    trainer.train()
    return outcome_of(trainer)


@case
def full_shard() -> Outcome:
    return trained(llama())


@case
def tied_weights() -> Outcome:
    return trained(qwen())


@case
def bfloat16() -> Outcome:
    return trained(llama(), bf16=True)


@case
def gradient_accumulation() -> Outcome:
    return trained(llama(), gradient_accumulation_steps=2)


@case
def activation_checkpointing() -> Outcome:
    return trained(llama(), fsdp_config={"activation_checkpointing": True})


@case
def with_evaluation() -> Outcome:
    trainer = trainer_of(llama(), eval_strategy="steps", eval_steps=2)
    trainer.train()
    trainer.evaluate()
    return outcome_of(trainer)


@case
def resumed_from_shards() -> Outcome:
    steps = dict(save_strategy="steps", save_steps=2, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"})
    trainer_of(llama(), **steps).train()
    torch.manual_seed(5)
    second = trainer_of(llama(), max_steps=6, **steps)
    second.train(resume_from_checkpoint="trained/checkpoint-4")
    return outcome_of(second)
