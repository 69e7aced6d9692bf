#pragma once

#include <torch/torch.h>

namespace train_gpt {

/// One token per byte.
constexpr int64_t kVocabulary = 256;

struct GPTConfig {
  int64_t width = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t sequence = 128;
  bool checkpoint = false; ///< compute each block again in backward instead of keeping its intermediate results
};

/// Causal self-attention whose queries and keys are turned by their position.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const GPTConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& rotation);

  int64_t heads;
  torch::nn::Linear qkv{nullptr}, out{nullptr};
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GPTConfig& config);
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& rotation);

  torch::nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  Attention attention{nullptr};
  torch::nn::Linear widen{nullptr}, narrow{nullptr};
};
TORCH_MODULE(Block);

/// A decoder-only Transformer. Plain LibTorch: nothing in it knows that it will be sharded.
struct GPTImpl : torch::nn::Module {
  explicit GPTImpl(const GPTConfig& config);
  /// bytes [batch, sequence] -> logits of the next byte [batch, sequence, 256]
  torch::Tensor forward(const torch::Tensor& bytes);
  /// The mean cross-entropy, in nats per byte.
  torch::Tensor loss(const torch::Tensor& bytes, const torch::Tensor& next);

  GPTConfig config;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::Tensor rotation; // buffer [sequence, width / heads / 2, 2]: cosine and sine
};
TORCH_MODULE(GPT);

} // namespace train_gpt
