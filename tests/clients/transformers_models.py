"""transformers: models of several architectures, each block sharded, with dropout where they have it."""

import torch
from training import Outcome, case, draws, lists_of, shard, train
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCABULARY, SEQUENCE = 97, 12


def tokens(step: int, count: int = SEQUENCE) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, count), generator=draws(step))


def train_on_tokens(model: torch.nn.Module, **options) -> Outcome:
    model.train()
    shard(model, lists_of(model), **options)
    return train(model, lambda step: model(input_ids=tokens(step), labels=tokens(step)).loss)


SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)


@case
def gpt2() -> Outcome:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    return train_on_tokens(GPT2LMHeadModel(config))


@case
def gpt2_with_gradient_checkpointing() -> Outcome:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    model = GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable()
    return train_on_tokens(model)


@case
def llama() -> Outcome:
    return train_on_tokens(LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)))


@case
def llama_in_bfloat16() -> Outcome:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2))
    return train_on_tokens(model, mp_policy=policy)


@case
def llama_generates() -> Outcome:
    model = LlamaForCausalLM(LlamaConfig(**SMALL, eos_token_id=None, pad_token_id=0))
    outcome = train_on_tokens(model)
    generated = model.eval().generate(tokens(9), max_new_tokens=6, do_sample=False)
    outcome.weights["generated"] = generated
    return outcome


@case
def qwen_with_tied_embeddings() -> Outcome:
    config = Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    return train_on_tokens(Qwen3ForCausalLM(config))


@case
def gemma() -> Outcome:
    config = Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8)
    return train_on_tokens(Gemma2ForCausalLM(config))


@case
def bert() -> Outcome:
    return train_on_tokens(BertForMaskedLM(BertConfig(**SMALL)))


@case
def bert_classifies() -> Outcome:
    model = BertForSequenceClassification(BertConfig(**SMALL)).train()
    shard(model, lists_of(model))
    return train(model, lambda step: model(input_ids=tokens(step), labels=torch.tensor([step % 2, 1])).loss)


@case
def t5() -> Outcome:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).train()
    shard(model, [*model.encoder.block, *model.decoder.block])
    return train(model, lambda step: model(input_ids=tokens(step), labels=tokens(step + 50)).loss)


@case
def mixtral() -> Outcome:
    config = MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    return train_on_tokens(MixtralForCausalLM(config))


@case
def vision_transformer() -> Outcome:
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    config = ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5)
    model = ViTForImageClassification(config).train()
    shard(model, lists_of(model))

    def loss_at(step: int) -> torch.Tensor:
        images = torch.randn(2, 3, 16, 16, generator=draws(step))
        return model(pixel_values=images, labels=torch.tensor([step % 5, 2])).loss

    return train(model, loss_at)


@case
def mamba() -> Outcome:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=2)
    return train_on_tokens(MambaForCausalLM(config))


@case
def whisper() -> Outcome:
    config = WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=10,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).train()
    shard(model, [*model.model.encoder.layers, *model.model.decoder.layers])

    def loss_at(step: int) -> torch.Tensor:
        return model(input_features=torch.randn(2, 8, 20, generator=draws(step)), labels=tokens(step)).loss

    return train(model, loss_at)
