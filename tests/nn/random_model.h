#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "nn/fused_linear.h"
#include "nn/random_draw.h"

/// Models of a small grammar: blocks of layers and blocks, each used in some way, some of them twice or not in each
/// step.
namespace fsdp::testing::random {

inline constexpr int64_t kRows = 2, kLength = 3, kVocabulary = 7;

enum class Kind {
  kLinear,
  kFunction,
  kWeightAlone,
  kPieces,
  kRow,
  kMean,
  kScalar,
  kNorm,
  kBatchNorm,
  kEmbedding,
  kTiedEmbedding,
  kConvolution,
  kLstm,
  kGru,
  kAttention,
  kSameWeight,
  kBlock
};
enum class Call { kOnce, kTwice, kNoGradFirst, kLookedAt, kBeside, kCheckpointed };

inline const char* name_of(Kind kind) {
  static constexpr const char* names[] = {
      "linear",
      "function",
      "weight alone",
      "pieces",
      "row",
      "mean",
      "scalar",
      "norm",
      "batchnorm",
      "embedding",
      "tied",
      "convolution",
      "lstm",
      "gru",
      "attention",
      "same weight as",
      "block"};
  return names[static_cast<int>(kind)];
}
inline const char* name_of(Call call) {
  static constexpr const char* names[] = {"", " twice", " no-grad first", " looked at", " beside", " checkpointed"};
  return names[static_cast<int>(call)];
}

/// One part of a block.
struct Part {
  Kind kind = Kind::kLinear;
  Call call = Call::kOnce;
  int every = 1; ///< used in steps that are multiples of it
  int ranks = 1; ///< and on ranks that are
  int again = -1; ///< the part of the same block whose module (or, for kSameWeight, weight) this one has
  std::vector<Part> parts = {}; ///< of a block

  std::string str() const {
    std::string text = name_of(kind);
    text += name_of(call);
    text += again < 0 ? "" : " (#" + std::to_string(again) + ")";
    text += every == 1 ? "" : " every " + std::to_string(every) + " steps";
    text += ranks == 1 ? "" : " on each " + std::to_string(ranks) + ". rank";
    if (kind == Kind::kBlock) {
      text += "[";
      for (const auto& part : parts) {
        text += (text.back() == '[' ? "" : ", ") + part.str();
      }
      text += "]";
    }
    return text;
  }
};

struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted") {}
};

/// Calls a part's function, on another stream for instance.
using CallBeside = std::function<at::Tensor(const std::function<at::Tensor(const at::Tensor&)>&, const at::Tensor&)>;

/// What the models of a rank are told beside their input.
struct Surroundings {
  int step = 0;
  int rank = 0;
  int parts_until_interrupt = -1; ///< then the forward throws, or the backward when it comes back there
  bool interrupts_forward = false;
  bool looks = false; ///< this rank looks at what was just used
  CallBeside beside = nullptr;
};
inline thread_local Surroundings surroundings;

struct LeafImpl : torch::nn::Cloneable<LeafImpl> {
  LeafImpl(Kind kind, int64_t width, std::shared_ptr<LeafImpl> source = nullptr)
      : kind(kind), width(width), source(std::move(source)) {
    LeafImpl::reset();
  }

  void reset() override {
    namespace nn = torch::nn;
    switch (kind) {
      case Kind::kScalar:
        scalar = register_parameter("scalar", torch::full({}, 0.7));
        own = register_parameter("uneven", torch::linspace(-1, 1, 3 * width + 1));
        register_parameter("unused", torch::ones({width}));
        break;
      case Kind::kNorm:
        norm = register_module("layer", nn::LayerNorm(nn::LayerNormOptions({width})));
        break;
      case Kind::kBatchNorm:
        batch_norm = register_module("layer", nn::BatchNorm1d(width));
        break;
      case Kind::kEmbedding:
      case Kind::kTiedEmbedding:
        embedding = register_module("layer", nn::Embedding(kVocabulary, width));
        break;
      case Kind::kConvolution:
        convolution = register_module("layer", nn::Conv1d(nn::Conv1dOptions(width, width, 3).padding(1)));
        break;
      case Kind::kLstm:
        lstm = register_module("layer", nn::LSTM(nn::LSTMOptions(width, width).batch_first(true)));
        break;
      case Kind::kGru:
        gru = register_module("layer", nn::GRU(nn::GRUOptions(width, width).num_layers(2).batch_first(true)));
        break;
      case Kind::kAttention:
        attention = register_module("layer", nn::MultiheadAttention(nn::MultiheadAttentionOptions(width, 1)));
        break;
      case Kind::kSameWeight:
        own = register_parameter("weight", source->weight());
        break;
      default:
        linear = register_module("layer", nn::Linear(width, width));
    }
  }

  /// The handle of one of its parameters, if it shows any.
  at::Tensor weight() const {
    switch (kind) {
      case Kind::kScalar:
      case Kind::kSameWeight:
        return own;
      case Kind::kNorm:
        return norm->weight;
      case Kind::kBatchNorm:
        return batch_norm->weight;
      case Kind::kEmbedding:
      case Kind::kTiedEmbedding:
        return embedding->weight;
      case Kind::kConvolution:
        return convolution->weight;
      case Kind::kLstm:
      case Kind::kGru: // keep theirs to themselves
        return own;
      case Kind::kAttention:
        return attention->in_proj_weight;
      default:
        return linear->weight;
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    namespace nn = torch::nn;
    switch (kind) {
      case Kind::kFunction:
        return FusedLinear::apply(x.flatten(0, 1), weight()).view_as(x);
      case Kind::kWeightAlone:
      case Kind::kSameWeight:
        return nn::functional::linear(x, weight());
      case Kind::kPieces: {
        std::vector<at::Tensor> products;
        for (const auto& piece : weight().split(2)) {
          products.push_back(torch::matmul(x, piece.t()));
        }
        return torch::cat(products, -1) + linear->bias.unsqueeze(0);
      }
      case Kind::kRow:
        return x * weight()[1].view({-1}) + weight().narrow(0, 0, 2).sum(0);
      case Kind::kMean:
        return x * linear->bias + weight().mean();
      case Kind::kScalar:
        return x * scalar + weight().pow(2).sum();
      case Kind::kNorm:
        return norm(x);
      case Kind::kBatchNorm:
        return batch_norm(x.transpose(1, 2)).transpose(1, 2);
      case Kind::kEmbedding:
        return x + embedding(words(x));
      case Kind::kTiedEmbedding:
        return torch::matmul(torch::tanh(torch::matmul(x + embedding(words(x)), weight().t())), weight());
      case Kind::kConvolution:
        return convolution(x.transpose(1, 2)).transpose(1, 2);
      case Kind::kLstm:
        return std::get<0>(lstm(x));
      case Kind::kGru:
        return std::get<0>(gru(x));
      case Kind::kAttention:
        return std::get<0>(attention(x, x, x));
      default:
        return linear(x);
    }
  }

  static at::Tensor words(const at::Tensor& x) {
    return torch::arange(kLength, torch::TensorOptions().dtype(torch::kLong)).to(x.device(), /*non_blocking=*/true);
  }

  Kind kind;
  int64_t width;
  std::shared_ptr<LeafImpl> source;
  at::Tensor own, scalar; // without a layer
  torch::nn::Linear linear{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::BatchNorm1d batch_norm{nullptr};
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Conv1d convolution{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::GRU gru{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
};

struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  BlockImpl(std::vector<Part> given, int64_t width) : parts(std::move(given)), width(width) {
    BlockImpl::reset();
  }

  void reset() override {
    leaves.assign(parts.size(), nullptr);
    blocks.assign(parts.size(), nullptr);
    for (size_t i = 0; i < parts.size(); ++i) {
      const std::string name = std::to_string(i);
      const Part& part = parts[i];
      if (part.kind == Kind::kBlock) {
        blocks[i] = register_module(name, std::make_shared<BlockImpl>(part.parts, width));
      } else if (part.kind == Kind::kSameWeight) {
        const auto source = leaves[static_cast<size_t>(part.again)];
        leaves[i] = register_module(name, std::make_shared<LeafImpl>(part.kind, width, source));
      } else if (part.again >= 0) {
        leaves[i] = register_module(name, leaves[static_cast<size_t>(part.again)]);
      } else {
        leaves[i] = register_module(name, std::make_shared<LeafImpl>(part.kind, width));
      }
    }
  }

  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const Part& part = parts[i];
      if (surroundings.step % part.every != 0 || surroundings.rank % part.ranks != 0) {
        continue;
      }
      interrupt(x);
      x = x / 2 + torch::tanh(use(part.call, i, x));
    }
    return x;
  }

  at::Tensor use(Call call, size_t i, const at::Tensor& x) {
    const std::function<at::Tensor(const at::Tensor&)> run = [leaf = leaves[i],
                                                              block = blocks[i]](const at::Tensor& in) {
      return leaf ? leaf->forward(in) : block->forward(in);
    };
    switch (call) {
      case Call::kTwice:
        return run(torch::tanh(run(x)));
      case Call::kNoGradFirst: {
        at::Tensor first;
        {
          const torch::NoGradGuard no_grad;
          first = run(x);
        }
        return run(x) + first;
      }
      case Call::kLookedAt: {
        auto y = run(x);
        if (surroundings.looks && leaves[i] && leaves[i]->weight().defined()) {
          const torch::NoGradGuard no_grad;
          leaves[i]->weight().norm();
        }
        return y;
      }
      case Call::kBeside:
        return surroundings.beside ? surroundings.beside(run, x) : run(x);
      case Call::kCheckpointed:
        // Recomputed, perhaps, on another thread.
        return checkpoint(
            [run, now = surroundings](const at::Tensor& in) {
              const auto former = std::exchange(surroundings, now);
              auto y = run(in);
              surroundings = former;
              return y;
            },
            x);
      default:
        return run(x);
    }
  }

  static void interrupt(const at::Tensor& x) {
    auto& count = surroundings.parts_until_interrupt;
    if (count < 0 || count-- > 0) {
      return;
    }
    if (surroundings.interrupts_forward || !x.requires_grad()) {
      throw Interrupted();
    }
    x.register_hook([](const at::Tensor&) -> at::Tensor { throw Interrupted(); });
  }

  std::vector<Part> parts;
  int64_t width;
  std::vector<std::shared_ptr<LeafImpl>> leaves;
  std::vector<std::shared_ptr<BlockImpl>> blocks;
};

/// What a trial may draw.
struct Grammar {
  std::vector<Kind> kinds;
  std::vector<Call> calls;
  bool ranks_differ = false; ///< in what they use
};

inline std::vector<Part> draw_parts(Draw& draw, const Grammar& grammar, int depth = 0) {
  std::vector<Part> parts;
  const int count = 1 + draw.below(4);
  for (int i = 0; i < count; ++i) {
    Part part;
    if (depth < 2 && draw.chance(25)) {
      part.kind = Kind::kBlock;
      part.parts = draw_parts(draw, grammar, depth + 1);
    } else {
      part.kind = draw.one_of(grammar.kinds);
    }
    if (draw.chance(40)) {
      part.call = draw.one_of(grammar.calls);
    }
    part.every = draw.chance(15) ? 2 + draw.below(2) : 1;
    part.ranks = grammar.ranks_differ && draw.chance(40) ? 2 + draw.below(2) : 1;
    const int other = i == 0 ? 0 : draw.below(i);
    const bool has_own = i > 0 && parts[static_cast<size_t>(other)].again < 0;
    if (has_own && part.kind != Kind::kBlock && draw.chance(20)) {
      const Kind source = parts[static_cast<size_t>(other)].kind;
      if (source != Kind::kBlock) {
        const bool same_weight = source == Kind::kLinear && draw.chance(50);
        part.kind = same_weight ? Kind::kSameWeight : source;
        part.again = other;
      }
    }
    parts.push_back(part);
  }
  return parts;
}

inline bool any_part(const std::vector<Part>& parts, const std::function<bool(const Part&)>& is) {
  return std::any_of(
      parts.begin(), parts.end(), [&](const Part& part) { return is(part) || any_part(part.parts, is); });
}

/// The leaves, each once.
inline std::vector<std::shared_ptr<LeafImpl>> leaves_of(const torch::nn::Module& model) {
  std::vector<std::shared_ptr<LeafImpl>> leaves;
  std::unordered_set<const torch::nn::Module*> seen;
  for (const auto& module : model.modules(/*include_self=*/false)) {
    auto leaf = std::dynamic_pointer_cast<LeafImpl>(module);
    if (leaf && seen.insert(leaf.get()).second) {
      leaves.push_back(std::move(leaf));
    }
  }
  return leaves;
}

} // namespace fsdp::testing::random
