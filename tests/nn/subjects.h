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

template <typename Loss>
Subject subject_of(
    std::shared_ptr<torch::nn::Module> module, Loss loss, std::vector<std::shared_ptr<torch::nn::Module>> parts = {}) {
  return {std::move(module), std::move(loss), std::move(parts)};
}

inline Subject convolutions() {
  namespace nn = torch::nn;
  nn::Sequential model(
      nn::Conv2d(nn::Conv2dOptions(3, 5, 3).padding(1)),
      nn::GroupNorm(nn::GroupNormOptions(5, 5)),
      nn::BatchNorm2d(5),
      nn::ReLU(),
      nn::ConvTranspose2d(nn::ConvTranspose2dOptions(5, 2, 2)),
      nn::Flatten(),
      nn::Linear(2 * 49, 3),
      nn::PReLU());
  return subject_of(
      model.ptr(),
      [model](int rank, int step) mutable {
        return model->forward(data(rank, step, {2, 3, 6, 6})).pow(2).mean();
      },
      {model[0], model[2], model[6]});
}

struct RecurrentImpl : torch::nn::Module {
  RecurrentImpl() {
    namespace nn = torch::nn;
    embedding = register_module("embedding", nn::Embedding(9, 5));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(5, 6).num_layers(2).batch_first(true)));
    gru = register_module("gru", nn::GRU(nn::GRUOptions(6, 4).batch_first(true).bidirectional(true)));
    head = register_module("head", nn::Linear(8, 9));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::GRU gru{nullptr};
  torch::nn::Linear head{nullptr};
};

inline Subject recurrent() {
  auto net = std::make_shared<RecurrentImpl>();
  return subject_of(
      net,
      [net](int rank, int step) {
        auto ids = tokens(rank, step, {2, 6}, 9);
        auto x = std::get<0>(net->lstm(net->embedding(ids)));
        auto scores = net->head(std::get<0>(net->gru(x)));
        return torch::nn::functional::cross_entropy(scores.flatten(0, 1), ids.flatten());
      },
      {net->lstm.ptr(), net->gru.ptr()});
}

/// Parameters that other systems refuse: 0-dim, transposed, channels-last, with gaps, expanded, integer, boolean,
/// double, of eight bits, frozen, empty, and one nobody uses.
struct OddImpl : torch::nn::Module {
  OddImpl() {
    scalar = register_parameter("scalar", torch::full({}, 0.7));
    transposed = register_parameter("transposed", torch::randn({5, 3}).t());
    channels_last =
        register_parameter("channels_last", torch::randn({4, 2, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast));
    with_gaps = register_parameter("with_gaps", torch::randn({4, 6}).slice(1, 0, 6, 2));
    expanded = register_parameter("expanded", torch::randn({3, 1}).expand({3, 2}));
    wide = register_parameter("wide", torch::randn({2, 3}, torch::kDouble));
    unused = register_parameter("unused", torch::randn({6}));
    empty = register_parameter("empty", torch::zeros({0, 4}));
    table = register_frozen("table", torch::arange(5));
    bytes = register_frozen("bytes", torch::arange(5, torch::kByte));
    mask = register_frozen("mask", torch::arange(5).remainder(2).eq(0));
    eighth = register_frozen("eighth", torch::randn({7}).to(torch::kFloat8_e4m3fn));
    frozen = register_frozen("frozen", torch::randn({7}));
  }
  at::Tensor register_frozen(const std::string& name, const at::Tensor& value) {
    return register_parameter(name, value, /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = torch::conv2d(x, channels_last).mean({2, 3}) * scalar; // {n, 4}
    auto v = torch::matmul(torch::matmul(y, with_gaps), expanded); // {n, 2}
    y = torch::matmul(y.narrow(1, 0, 3), transposed).index_select(1, table); // {n, 5}
    auto z = torch::matmul(y.narrow(1, 0, 2).to(torch::kDouble), wide).to(torch::kFloat);
    auto masked = (y * bytes).masked_fill(mask, 0.5);
    return y.sum() + z.pow(2).sum() + v.pow(2).sum() + masked.pow(2).sum() +
           ((frozen + eighth.to(torch::kFloat)) * scalar).sum() + empty.sum();
  }
  at::Tensor scalar, transposed, channels_last, with_gaps, expanded, wide, unused, empty;
  at::Tensor table, bytes, mask, eighth, frozen;
};

inline Subject odd() {
  auto net = std::make_shared<OddImpl>();
  return subject_of(net, [net](int rank, int step) { return net->forward(data(rank, step, {2, 2, 4, 4})); });
}

} // namespace fsdp::testing::subjects
