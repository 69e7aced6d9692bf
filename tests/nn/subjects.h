#pragma once

#include <torch/torch.h>

#include "nn/parity.h"

/// Small models of every kind that the tests train.
namespace fsdp::testing::subjects {

inline at::Tensor data(int rank, int step, std::vector<int64_t> sizes) {
  auto generator = at::detail::createCPUGenerator(1000 + rank * 100 + step);
  return at::randn(sizes, generator).to(device_of_inputs, /*non_blocking=*/true);
}

inline at::Tensor tokens(int rank, int step, std::vector<int64_t> sizes, int64_t vocabulary) {
  auto generator = at::detail::createCPUGenerator(1000 + rank * 100 + step);
  return at::randint(vocabulary, sizes, generator).to(device_of_inputs, /*non_blocking=*/true);
}

/// Sizes that no rank count divides; some ranks get nothing of the last bias.
inline Subject mlp() {
  auto model = torch::nn::Sequential(
      torch::nn::Linear(7, 13),
      torch::nn::GELU(),
      torch::nn::Linear(13, 5),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})),
      torch::nn::Linear(5, 1));
  Subject subject{model.ptr(), {}, {model[0], model[2]}};
  subject.loss = [model](int rank, int step) mutable { return model->forward(data(rank, step, {4, 7})).pow(2).mean(); };
  return subject;
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        fc(register_module("fc", torch::nn::Linear(width, 3 * width))),
        out(register_module("out", torch::nn::Linear(3 * width, width))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + out(torch::gelu(fc(norm(x))));
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear fc, out;
};
TORCH_MODULE(Block);

/// Embedding, blocks, tied head: the root's unit is used first and last.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(int depth = 3, bool checkpointed = false) : checkpointed(checkpointed) {
    embedding = register_module("embedding", torch::nn::Embedding(11, 6));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < depth; ++i) {
      blocks->push_back(Block(6));
    }
    scale = register_parameter("scale", torch::full({}, 1.5));
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = embedding(ids) * scale;
    for (const auto& module : *blocks) {
      auto* block = module->as<Block>();
      x = checkpointed ? checkpoint([block](const at::Tensor& in) { return block->forward(in); }, x)
                       : block->forward(x);
    }
    return torch::matmul(x, embedding->weight.t());
  }
  bool checkpointed;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Tied);

inline Subject tied(bool checkpointed = false) {
  Tied model(3, checkpointed);
  Subject subject{model.ptr(), {}, {}};
  for (const auto& block : *model->blocks) {
    subject.parts.push_back(block);
  }
  subject.loss = [model](int rank, int step) mutable {
    auto ids = tokens(rank, step, {2, 5}, 11);
    return torch::nn::functional::cross_entropy(model->forward(ids).flatten(0, 1), ids.flatten());
  };
  return subject;
}

} // namespace fsdp::testing::subjects
