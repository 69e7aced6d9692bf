"""TRL: supervised and preference training, whose trainers are transformers' on Accelerate's FSDP."""

import torch
from accelerate_on_cpu import shard_on_cpu
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from training import Outcome, case, whole_weights
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

shard_on_cpu()

WORDS = [f"w{i}" for i in range(90)]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def text(seed: int, words: int) -> str:
    indices = torch.randint(0, len(WORDS), (words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in indices)


def options(**more) -> dict:
    return dict(
        output_dir="trained", use_cpu=True, bf16=False, fsdp=True, report_to="none", disable_tqdm=True, max_steps=4,
        per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, save_strategy="no", max_length=16,
        **{"gradient_checkpointing": False, **more},
    )  # fmt: skip


def trained(trainer) -> Outcome:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Outcome(losses, whole_weights(trainer.model))


def supervised(peft_config=None, **more) -> Outcome:
    data = Dataset.from_list([dict(text=text(i, 10)) for i in range(32)])
    return trained(
        SFTTrainer(
            llama(), SFTConfig(**options(**more)), train_dataset=data, processing_class=tokenizer(), peft_config=peft_config
        )
    )


@case
def sft() -> Outcome:
    return supervised()


@case
def sft_with_packing() -> Outcome:
    return supervised(packing=True, packing_strategy="wrapped")


@case
def sft_of_adapters() -> Outcome:
    return supervised(peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


@case
def dpo() -> Outcome:
    data = [dict(prompt=text(i, 5), chosen=text(100 + i, 5), rejected=text(200 + i, 5)) for i in range(32)]
    arguments = DPOConfig(**options())
    data = Dataset.from_list(data)
    return trained(DPOTrainer(llama(), llama(), args=arguments, train_dataset=data, processing_class=tokenizer()))
