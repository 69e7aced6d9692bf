#include "model.h"

#include <cmath>

#include <fsdp/checkpoint.h>

namespace train_gpt {
namespace {

namespace F = torch::nn::functional;

torch::Tensor rotation_table(int64_t positions, int64_t pairs) {
  auto frequency = torch::pow(10000.0, -torch::arange(pairs, torch::kFloat) / static_cast<double>(pairs));
  auto angle = torch::outer(torch::arange(positions, torch::kFloat), frequency);
  return torch::stack({angle.cos(), angle.sin()}, -1);
}

/// Turns each pair of features by an angle that grows with the position. x: [batch, heads, sequence, features]
torch::Tensor rotate(const torch::Tensor& x, const torch::Tensor& table) {
  auto halves = x.chunk(2, -1);
  auto cosine = table.select(-1, 0).to(x.scalar_type());
  auto sine = table.select(-1, 1).to(x.scalar_type());
  return torch::cat({halves[0] * cosine - halves[1] * sine, halves[0] * sine + halves[1] * cosine}, -1);
}

} // namespace

AttentionImpl::AttentionImpl(const GPTConfig& config) : heads(config.heads) {
  qkv = register_module("qkv", torch::nn::Linear(config.width, 3 * config.width));
  out = register_module("out", torch::nn::Linear(config.width, config.width));
}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x, const torch::Tensor& rotation) {
  auto split = qkv(x).unflatten(-1, {3, heads, -1}).permute({2, 0, 3, 1, 4});
  auto query = rotation.defined() ? rotate(split[0], rotation) : split[0];
  auto key = rotation.defined() ? rotate(split[1], rotation) : split[1];
  auto mixed =
      torch::scaled_dot_product_attention(query, key, split[2], /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true);
  return out(mixed.transpose(1, 2).flatten(2));
}

BlockImpl::BlockImpl(const GPTConfig& config) : dropout_(config.dropout) {
  torch::nn::LayerNormOptions norm({config.width});
  attention_norm = register_module("attention_norm", torch::nn::LayerNorm(norm));
  attention = register_module("attention", Attention(config));
  mlp_norm = register_module("mlp_norm", torch::nn::LayerNorm(norm));
  widen = register_module("widen", torch::nn::Linear(config.width, 4 * config.width));
  narrow = register_module("narrow", torch::nn::Linear(4 * config.width, config.width));
  gelu = register_module("gelu", torch::nn::GELU(torch::nn::GELUOptions().approximate(config.gpt2 ? "tanh" : "none")));
}

torch::Tensor BlockImpl::forward(torch::Tensor x, const torch::Tensor& rotation) {
  x = x + drop(attention(attention_norm(x), rotation));
  return x + drop(narrow(gelu(widen(mlp_norm(x)))));
}

torch::Tensor BlockImpl::drop(const torch::Tensor& x) const {
  return dropout_ > 0 ? torch::dropout(x, dropout_, is_training()) : x;
}

GPTImpl::GPTImpl(const GPTConfig& config) : config(config) {
  embedding = register_module("embedding", torch::nn::Embedding(config.vocabulary, config.width));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks->push_back(Block(config));
  }
  norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
  const int64_t longest = config.positions > 0 ? config.positions : config.sequence;
  if (config.gpt2) {
    positions = register_module("positions", torch::nn::Embedding(longest, config.width));
  } else {
    rotation = register_buffer("rotation", rotation_table(longest, config.width / config.heads / 2));
  }

  torch::NoGradGuard no_grad;
  embedding->weight.normal_(0, 0.02);
  if (config.gpt2) {
    positions->weight.normal_(0, 0.02);
  }
  for (auto& block : *blocks) {
    // Each block adds twice to the same stream: smaller steps keep its size as the model grows deeper.
    double scale = 1 / std::sqrt(2.0 * config.layers);
    block->as<Block>()->attention->out->weight.mul_(scale);
    block->as<Block>()->narrow->weight.mul_(scale);
  }
}

torch::Tensor GPTImpl::forward(const torch::Tensor& bytes) {
  auto x = embedding(bytes);
  if (config.gpt2) {
    x = x + positions(torch::arange(bytes.size(1), bytes.options()));
  }
  auto turn = config.gpt2 ? torch::Tensor() : rotation.narrow(0, 0, bytes.size(1));
  for (auto& module : *blocks) {
    auto* block = module->as<Block>();
    bool again = config.checkpoint && torch::GradMode::is_enabled();
    auto forward = [block, turn](const torch::Tensor& x) { return block->forward(x, turn); };
    x = again ? fsdp::checkpoint(forward, x) : forward(x);
  }
  return F::linear(norm(x), embedding->weight); // the same weights read and write bytes
}

torch::Tensor GPTImpl::loss(const torch::Tensor& bytes, const torch::Tensor& next) {
  return F::cross_entropy(forward(bytes).flatten(0, 1).to(torch::kFloat), next.flatten());
}

} // namespace train_gpt
