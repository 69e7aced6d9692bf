#pragma once

#include <torch/torch.h>

namespace bench {

constexpr int64_t kVocabulary = 8192;
constexpr int64_t kHeadWidth = 64;

struct GPTConfig {
  int64_t width = 0;
  int64_t layers = 0;
  int64_t sequence = 0;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, widen{nullptr}, narrow{nullptr};
};
TORCH_MODULE(Block);

/// The model of bench/gpt.py: the same parameters in the same order, the same operators.
struct GPTImpl : torch::nn::Module {
  explicit GPTImpl(const GPTConfig& config);
  /// tokens [batch, sequence + 1] -> the mean cross-entropy of each token given those before it
  torch::Tensor loss(const torch::Tensor& tokens);

  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(GPT);

/// All parameters, one after another in float32, as bench/gpt.py saved them.
void load_weights(torch::nn::Module& model, const std::string& file);

/// [steps, ranks, micro-batches, batch, sequence + 1], as the driver has written them.
torch::Tensor load_tokens(const std::string& file, const std::vector<int64_t>& shape);

} // namespace bench
