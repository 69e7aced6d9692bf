#pragma once

#include <algorithm>
#include <map>
#include <memory>

#include "state/forms.h"
#include "support/selected.h"

/// A model in each form, its optimizer, and their states.
namespace fsdp::testing {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using Groups = std::vector<OptimizerParamGroup>;

enum class Kind { kSGD, kAdam, kAdamW, kAdagrad, kRMSprop, kFusedAdamW };
inline constexpr std::array kKinds{
    Kind::kSGD, Kind::kAdam, Kind::kAdamW, Kind::kAdagrad, Kind::kRMSprop, Kind::kFusedAdamW};

/// Into which the state of one form goes: for one optimizer into all; of others only what they keep differs.
inline std::vector<Form> forms_after(Form from, Kind kind) {
  const auto all = forms(world_size());
  if (kind == Kind::kAdam || wants_all_combinations()) {
    return all;
  }
  const auto next = std::find(all.begin(), all.end(), from) + 1;
  return {Form::kUnsharded, next == all.end() ? Form::kRows : *next};
}

template <typename Class, typename Options>
std::unique_ptr<Optimizer> build(
    const std::vector<std::vector<at::Tensor>>& groups, const Options& options, double lr) {
  Groups with_options;
  with_options.emplace_back(groups[0], std::make_unique<Options>(options));
  auto other = std::make_unique<Options>(options);
  other->lr(lr / 2);
  with_options.emplace_back(groups[1], std::move(other));
  return std::make_unique<Class>(with_options, options);
}

// One layer's, and the rest with another learning rate; tied parameters once.
inline std::vector<std::vector<at::Tensor>> groups_of(OddNet& net) {
  std::vector<std::vector<at::Tensor>> groups(2);
  for (const auto& [name, tensor] : named_parameters(*net)) {
    groups[name.starts_with("first.") ? 0 : 1].push_back(tensor);
  }
  return groups;
}

inline std::unique_ptr<Optimizer> make_optimizer(Kind kind, OddNet& net, double lr = 0.02) {
  using namespace torch::optim; // NOLINT: a list of its names
  const auto groups = groups_of(net);
  switch (kind) {
    case Kind::kSGD:
      return build<SGD>(groups, SGDOptions(lr).momentum(0.9).weight_decay(0.1).nesterov(lr == 0.02), lr);
    case Kind::kAdam:
      return build<Adam>(groups, AdamOptions(lr).amsgrad(true).betas({0.8, lr * 40}), lr);
    case Kind::kAdamW:
      return build<AdamW>(groups, AdamWOptions(lr).weight_decay(0.1).betas({0.8, lr * 40}), lr);
    case Kind::kAdagrad:
      return build<Adagrad>(groups, AdagradOptions(lr).lr_decay(0.1).initial_accumulator_value(lr), lr);
    case Kind::kRMSprop:
      return build<RMSprop>(groups, RMSpropOptions(lr).momentum(0.5).centered(true), lr);
    case Kind::kFusedAdamW:
      return build<fsdp::optim::AdamW>(groups, AdamWOptions(lr).weight_decay(0.1).amsgrad(true), lr);
  }
  return nullptr;
}

using Gradients = std::map<std::string, at::Tensor>;

inline Gradients gradients_of(OddNet& net, int rank, int step) {
  net->zero_grad();
  net->loss(rank, step).backward();
  Gradients gradients;
  for (const auto& item : net->named_parameters()) {
    gradients[item.key()] = item.value().grad();
  }
  net->zero_grad();
  return gradients;
}

inline Gradients sum(const Gradients& a, const Gradients& b) {
  Gradients total;
  for (const auto& [name, gradient] : a) {
    total[name] = plus(gradient, b.at(name));
  }
  return total;
}

// As `arrangement` adds them: the ranks of a replica, then the replicas.
inline Gradients sum_over_ranks(OddNet& net, Form arrangement, int step) {
  const int ranks = world_size(), together = is_hybrid(arrangement) ? ranks / 2 : ranks;
  std::optional<Gradients> total;
  for (int first = 0; first < ranks; first += together) {
    Gradients of_replica = gradients_of(net, first, step);
    for (int rank = first + 1; rank < first + together; ++rank) {
      of_replica = sum(of_replica, gradients_of(net, rank, step));
    }
    total = total ? sum(*total, of_replica) : of_replica;
  }
  return *total;
}

/// A model in training; unsharded, each rank computes what all ranks would together.
struct Training {
  Training(Form form, Kind kind, double begin, double lr = 0.02)
      : form(form), net(make(form, begin)), optimizer(make_optimizer(kind, net, lr)) {}

  float step(int index, Form arrangement) {
    if (form == Form::kUnsharded) {
      return step_unsharded(index, arrangement);
    }
    const auto loss = net->loss(rank(), index);
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    return loss.item<float>();
  }

  float step_unsharded(int index, Form arrangement) {
    const float loss = net->loss(rank(), index).item<float>();
    const auto total = sum_over_ranks(net, arrangement, index);
    const auto own = gradients_of(net, rank(), index).at("own").clone();
    for (auto& item : net->named_parameters()) {
      if (total.at(item.key()).defined()) {
        item.value().mutable_grad() = item.key() == "own" ? own : total.at(item.key()) / world_size();
      }
    }
    optimizer->step();
    optimizer->zero_grad();
    return loss;
  }

  std::vector<float> steps(int first, int last, Form arrangement) {
    std::vector<float> losses;
    for (int index = first; index < last; ++index) {
      losses.push_back(step(index, arrangement));
    }
    return losses;
  }

  OptimStateDict state() {
    return full_optim_state_dict(net, *optimizer);
  }

  Form form;
  OddNet net;
  std::unique_ptr<Optimizer> optimizer;
};

std::vector<std::string> keys_of(const auto& map) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : map) {
    keys.push_back(key);
  }
  return keys;
}

inline void expect_equal(
    const std::map<std::string, c10::IValue>& got, const std::map<std::string, c10::IValue>& wanted) {
  ASSERT_EQ(keys_of(got), keys_of(wanted));
  for (const auto& [key, value] : wanted) {
    EXPECT_EQ(got.at(key), value) << key;
  }
}

inline std::vector<std::string> sorted(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  return names;
}

inline void expect_equal(const OptimStateDict& got, const OptimStateDict& wanted) {
  ASSERT_EQ(got.state.keys(), wanted.state.keys());
  for (const auto& item : wanted.state) {
    const auto& state = got.state[item.key()];
    expect_equal(state.scalars, item.value().scalars);
    ASSERT_EQ(keys_of(state.tensors), keys_of(item.value().tensors)) << item.key();
    for (const auto& [key, tensor] : item.value().tensors) {
      expect_same(state.tensors.at(key), tensor, key + " of " + item.key());
    }
  }
  ASSERT_EQ(got.param_groups.size(), wanted.param_groups.size());
  for (size_t i = 0; i < wanted.param_groups.size(); ++i) {
    EXPECT_EQ(sorted(got.param_groups[i].params), sorted(wanted.param_groups[i].params));
    expect_equal(got.param_groups[i].options, wanted.param_groups[i].options);
  }
}

} // namespace fsdp::testing
