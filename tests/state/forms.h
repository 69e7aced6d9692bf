#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "nn/make_unit.h"
#include "nn/subjects.h"
#include "support/ranks.h"

/// One model in all forms in which it may be trained.
namespace fsdp::testing {

/// Ties, 0-dim and odd sizes (some ranks get nothing of some), another memory order, frozen and unused parameters, one
/// left unsharded, a buffer.
struct OddNetImpl : torch::nn::Module {
  explicit OddNetImpl(double begin = 0) {
    first = register_module("first", torch::nn::Linear(5, 7));
    last = register_module("last", torch::nn::Linear(7, 5));
    spare = register_module("spare", torch::nn::Linear(3, 2)); // not used
    scale = register_parameter("scale", torch::zeros({}));
    own = register_parameter("own", torch::zeros({3}));
    frozen = register_parameter("frozen", torch::zeros({2, 3}), /*requires_grad=*/false);
    turned = register_parameter("turned", torch::zeros({4, 3}).t());
    tied = register_parameter("tied", last->bias);
    count = register_buffer("count", torch::zeros({2}));
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.copy_(torch::sin(torch::arange(parameter.numel()).view(parameter.sizes()) + (begin += 100)));
    }
    count.fill_(begin);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::tanh(first(x))) * scale + tied + frozen.sum() + (turned * turned).sum();
  }
  /// Ranks have the same gradient of what is not sharded.
  torch::Tensor loss(int rank, int step) {
    return forward(subjects::data(rank, step, {4, 5})).pow(2).mean() + own.pow(2).sum();
  }
  torch::nn::Linear first = nullptr, last = nullptr, spare = nullptr;
  torch::Tensor scale, own, frozen, turned, tied, count;
};
TORCH_MODULE(OddNet);

/// Flat: cut as one; shown: as one tensor too.
enum class Form { kUnsharded, kRows, kColumns, kFlat, kAligned, kShown, kHybrid, kHybridFlat, kHybridShown };

inline const char* name_of(Form form) {
  constexpr std::array kNames{
      "unsharded", "rows", "columns", "flat", "aligned", "shown", "hybrid", "hybrid flat", "hybrid shown"};
  return kNames[static_cast<int>(form)];
}

inline bool is_hybrid(Form form) {
  return form == Form::kHybrid || form == Form::kHybridFlat || form == Form::kHybridShown;
}

inline bool is_shown_as_one(Form form) {
  return form == Form::kShown || form == Form::kHybridShown;
}

inline bool is_flat(Form form) {
  return form == Form::kFlat || form == Form::kAligned || form == Form::kHybridFlat || is_shown_as_one(form);
}

/// Those that so many ranks can have.
inline std::vector<Form> forms(int ranks) {
  std::vector<Form> forms{Form::kUnsharded, Form::kRows, Form::kColumns, Form::kFlat, Form::kAligned, Form::kShown};
  if (ranks == 4) {
    forms.insert(forms.end(), {Form::kHybrid, Form::kHybridFlat, Form::kHybridShown});
  }
  return forms;
}

inline void shard(OddNet& net, Form form) {
  if (form == Form::kUnsharded) {
    return;
  }
  FullyShardOptions options;
  options.ignored_params = {net->own};
  if (is_shown_as_one(form)) { // which is trainable as a whole, or frozen
    options.ignored_params.push_back(net->frozen);
  }
  if (form == Form::kColumns) {
    options.shard_placement_fn = [](const at::Tensor& parameter, const std::string&) {
      return ShardPlacement{.dim = std::max<int64_t>(0, parameter.dim() - 1)};
    };
  }
  if (is_hybrid(form)) {
    options.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
  }
  const fsdp::nn::FlatCut cut{.alignment = form == Form::kAligned ? 16 : 1, .shown_as_one = is_shown_as_one(form)};
  const auto flat = is_flat(form) ? std::optional(cut) : std::nullopt;
  fsdp::nn::make_unit({net->first.get()}, options, flat);
  fsdp::nn::make_unit({net->spare.get()}, options, flat);
  fsdp::nn::make_unit({net.get()}, options, flat);
}

/// By a name that some unit might have taken.
inline bool is_sharded_in(Form form, const std::string& name) {
  const bool left_alone = name == "own" || (name == "frozen" && is_shown_as_one(form));
  return form != Form::kUnsharded && !left_alone;
}

inline OddNet make(Form form, double begin) {
  OddNet net(begin);
  shard(net, form);
  return net;
}

} // namespace fsdp::testing
