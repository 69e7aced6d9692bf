#include "gpt.h"

#include <c10/util/accumulate.h>

namespace bench {

namespace F = torch::nn::functional;

BlockImpl::BlockImpl(int64_t width) {
  const torch::nn::LayerNormOptions norm({width});
  attention_norm = register_module("attention_norm", torch::nn::LayerNorm(norm));
  qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
  out = register_module("out", torch::nn::Linear(width, width));
  mlp_norm = register_module("mlp_norm", torch::nn::LayerNorm(norm));
  widen = register_module("widen", torch::nn::Linear(width, 4 * width));
  narrow = register_module("narrow", torch::nn::Linear(4 * width, width));
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x) {
  const auto split = qkv(attention_norm(x)).unflatten(-1, {3, -1, kHeadWidth}).permute({2, 0, 3, 1, 4});
  const auto mixed = torch::scaled_dot_product_attention(
      split[0], split[1], split[2], /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true);
  const auto attended = x + out(mixed.transpose(1, 2).flatten(2));
  return attended + narrow(F::gelu(widen(mlp_norm(attended))));
}

GPTImpl::GPTImpl(const GPTConfig& config) {
  tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, config.width));
  positions = register_module("positions", torch::nn::Embedding(config.sequence, config.width));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks->push_back(Block(config.width));
  }
  norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
  head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(config.width, kVocabulary).bias(false)));
}

torch::Tensor GPTImpl::loss(const torch::Tensor& ids) {
  const int64_t length = ids.size(1) - 1;
  auto x = tokens(ids.narrow(1, 0, length)) + positions->weight;
  for (auto& block : *blocks) {
    x = block->as<Block>()->forward(x);
  }
  const auto logits = head(norm(x)).flatten(0, 1).to(torch::kFloat);
  return F::cross_entropy(logits, ids.narrow(1, 1, length).flatten());
}

void load_weights(torch::nn::Module& model, const std::string& file) {
  torch::NoGradGuard no_grad;
  int64_t numel = 0;
  for (const auto& parameter : model.parameters()) {
    numel += parameter.numel();
  }
  const auto saved = torch::from_file(file, /*shared=*/false, numel, torch::kFloat);
  int64_t begin = 0;
  for (auto& parameter : model.parameters()) {
    parameter.copy_(saved.narrow(0, begin, parameter.numel()).view_as(parameter));
    begin += parameter.numel();
  }
}

torch::Tensor load_tokens(const std::string& file, const std::vector<int64_t>& shape) {
  const int64_t numel = c10::multiply_integers(shape);
  return torch::from_file(file, /*shared=*/false, numel, torch::kLong).view(shape);
}

} // namespace bench
