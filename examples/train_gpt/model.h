#pragma once

#include <torch/torch.h>

namespace train_gpt {

/// One token per byte.
constexpr int64_t kBytes = 256;

struct GPTConfig {
  bool gpt2 = false; ///< positions and GELU as GPT-2 has them
  int64_t vocabulary = kBytes; ///< of which those that are no bytes are not used
  int64_t width = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t sequence = 128;
  int64_t positions = 0; ///< that the model knows; 0: as many as a sequence has
  double dropout = 0; ///< of what each block adds
  bool checkpoint = false; ///< compute each block again in backward instead of keeping its intermediate results
};

/// Causal self-attention whose queries and keys are turned by their position, where there is a rotation.
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
  torch::nn::GELU gelu{nullptr};

 private:
  torch::Tensor drop(const torch::Tensor& x) const;

  double dropout_;
};
TORCH_MODULE(Block);

/// A decoder-only Transformer. Plain LibTorch: nothing in it knows that it will be sharded.
struct GPTImpl : torch::nn::Module {
  explicit GPTImpl(const GPTConfig& config);
  /// bytes [batch, sequence] -> logits of the next byte [batch, sequence, vocabulary]
  torch::Tensor forward(const torch::Tensor& bytes);
  /// The mean cross-entropy, in nats per byte.
  torch::Tensor loss(const torch::Tensor& bytes, const torch::Tensor& next);

  GPTConfig config;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Embedding positions{nullptr}; // of GPT-2
  torch::Tensor rotation; // buffer [positions, width / heads / 2, 2]: cosine and sine; else
};
TORCH_MODULE(GPT);

} // namespace train_gpt
