#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/front_end.h>
#include <fsdp/fsdp.h>

#include "engine/tenant.h"
#include "nn/make_unit.h"
#include "support/ranks.h"

/// Sharded training beside the unsharded training of the same model, which adds the ranks' gradients in rank order.
namespace fsdp::testing {

/// A model as the tests see it: what it is does not matter here.
struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(int rank, int step)> loss;
  /// The modules that become units of their own, besides the whole.
  std::vector<std::shared_ptr<torch::nn::Module>> parts;
};
using MakeSubject = std::function<Subject()>;

/// Where a rank's inputs go.
inline thread_local c10::Device device_of_inputs = c10::kCPU;

enum class Accumulate {
  kNone, ///< one backward a step
  kNoSync, ///< three, of which the last synchronizes
  kNoAllReduce, ///< three, of which all reduce-scatter and the last all-reduces too
};

struct Trial {
  MakeSubject make;
  FullyShardOptions options = {};
  Accumulate accumulate = Accumulate::kNone;
  int steps = 4;
  bool shard_parts = true;
  bool from_meta = false; ///< sharded without values, which it gets afterwards
  bool deferred = false; ///< sharded before its parameters have memory
  std::optional<nn::FlatCut> flat = std::nullopt; ///< each unit's parameters are cut as one
  /// Called with the sharded root before training.
  std::function<void(Subject&, FSDPModule&)> prepare = nullptr;
  std::function<void(Subject&, FSDPModule&, int step)> before_step = nullptr;
};

using NamedTensors = std::map<std::string, at::Tensor>;

/// What unsharded training gives: losses by step and rank, gradients by step, and the parameters at the end.
struct Reference {
  std::vector<std::vector<float>> losses;
  std::vector<NamedTensors> gradients;
  NamedTensors parameters;
  size_t tensors = 0; ///< some have several names
};

inline int backwards_of(Accumulate accumulate) {
  return accumulate == Accumulate::kNone ? 1 : 3;
}

/// The ranks of one replica add first, then the replicas: the order of a hybrid mesh.
struct Arrangement {
  int shards;
  int replicas = 1;
  int ranks() const {
    return shards * replicas;
  }
};

/// The whole of a sharded parameter. Collective.
inline at::Tensor whole_of(const torch::nn::Module& module, const std::string& name) {
  for (const auto& [path, shard] : named_parameters(module)) {
    if (path == name) {
      return sharded(shard).full_tensor();
    }
  }
  throw std::runtime_error("no parameter " + name);
}

inline at::Tensor plus(const at::Tensor& sum, const at::Tensor& next) {
  return !next.defined() ? sum : (sum.defined() ? sum + next : next.clone());
}

/// The same weights every time: ranks that are threads share one random number generator.
inline Subject make_seeded(const Trial& trial) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  torch::manual_seed(1);
  return trial.make();
}

/// The same to be sharded, as the trial wants it.
inline Subject make_to_shard(const Trial& trial) {
  return trial.deferred ? deferred_init([&] { return make_seeded(trial); }) : make_seeded(trial);
}

/// Gradients of one rank for the micro-batches [first, last) of a step, added up in the reduce dtype.
inline std::vector<at::Tensor> rank_gradients(
    const Trial& trial, Subject& subject, int rank, int first, int last, std::vector<float>& losses) {
  auto parameters = subject.module->parameters();
  std::vector<at::Tensor> gradients(parameters.size());
  for (int micro = first; micro < last; ++micro) {
    subject.module->zero_grad();
    auto loss = subject.loss(rank, micro);
    loss.backward();
    losses.push_back(loss.item<float>());
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (const auto& gradient = parameters[i].grad(); gradient.defined()) {
        gradients[i] =
            plus(gradients[i], gradient.to(trial.options.mp_policy.reduce_dtype.value_or(gradient.scalar_type())));
      }
    }
  }
  return gradients;
}

/// The sums over ranks in the order in which a hybrid mesh adds: the ranks of a replica, then the replicas.
inline std::vector<at::Tensor> step_gradients(
    const Trial& trial,
    Subject& subject,
    const Arrangement& arrangement,
    int step,
    std::vector<std::vector<float>>& losses) {
  const int backwards = backwards_of(trial.accumulate);
  // With reduce-scatters in between, each backward is added up over a replica's ranks before the next is added.
  const int together = trial.accumulate == Accumulate::kNoSync ? backwards : 1;
  const size_t count = subject.module->parameters().size();
  std::vector<at::Tensor> total(count);
  for (int replica = 0; replica < arrangement.replicas; ++replica) {
    std::vector<at::Tensor> of_replica(count);
    for (int first = 0; first < backwards; first += together) {
      std::vector<at::Tensor> sum(count);
      for (int shard = 0; shard < arrangement.shards; ++shard) {
        const int rank = replica * arrangement.shards + shard;
        const int begin = step * backwards + first;
        const auto gradients = rank_gradients(trial, subject, rank, begin, begin + together, losses[rank]);
        for (size_t i = 0; i < count; ++i) {
          sum[i] = plus(sum[i], gradients[i]);
        }
      }
      // A reduce-scatter's result is added to what was put off, or (without replicas) to the gradient that is there.
      for (size_t i = 0; i < count; ++i) {
        const bool divided = arrangement.replicas == 1 && sum[i].defined();
        const auto result = divided ? sum[i] / arrangement.ranks() : sum[i];
        of_replica[i] = plus(of_replica[i], result);
      }
    }
    for (size_t i = 0; i < count; ++i) {
      total[i] = plus(total[i], of_replica[i]);
    }
  }
  for (auto& gradient : total) {
    if (arrangement.replicas > 1 && gradient.defined()) {
      gradient = gradient / arrangement.ranks();
    }
  }
  return total;
}

// An optimizer could not write the elements of an expanded tensor one by one; a unit makes it dense.
inline at::Tensor dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

/// Where the optimizer works: a device's arithmetic is not the host's.
inline c10::Device place_of_masters(const Trial& trial) {
  const bool offloads = std::holds_alternative<CPUOffloadPolicy>(trial.options.offload_policy);
  return offloads ? c10::Device(c10::kCPU) : device_of_inputs;
}

inline Reference train_unsharded(const Trial& trial, const Arrangement& arrangement) {
  Subject subject = make_seeded(trial);
  subject.module->to(device_of_inputs);
  std::vector<at::Tensor> masters; // what the optimizer sees; the model computes with them, rounded to param_dtype
  std::vector<std::string> names;
  for (auto& item : subject.module->named_parameters()) {
    names.push_back(item.key());
    item.value().set_data(dense(item.value().detach()));
    const auto master = item.value().detach().to(place_of_masters(trial), item.value().scalar_type(), false, true);
    masters.push_back(master.set_requires_grad(item.value().requires_grad()));
    if (trial.options.mp_policy.param_dtype) {
      item.value().set_data(item.value().to(*trial.options.mp_policy.param_dtype));
    }
  }
  torch::optim::AdamW optimizer(masters, torch::optim::AdamWOptions(1e-2));
  Reference reference;
  std::set<const c10::TensorImpl*> tensors;
  for (const auto& parameter : subject.module->parameters()) {
    tensors.insert(parameter.unsafeGetTensorImpl());
  }
  reference.tensors = tensors.size();
  for (int step = 0; step < trial.steps; ++step) {
    std::vector<std::vector<float>> losses(arrangement.ranks());
    auto gradients = step_gradients(trial, subject, arrangement, step, losses);
    reference.gradients.emplace_back();
    for (size_t i = 0; i < masters.size(); ++i) {
      if (trial.flat && masters[i].requires_grad() && !gradients[i].defined()) {
        gradients[i] = torch::zeros_like(masters[i]); // there is one for all parameters of a unit, or for none
      }
      masters[i].mutable_grad() = gradients[i].defined() ? gradients[i].to(masters[i].options()) : at::Tensor();
      reference.gradients.back()[names[i]] = gradients[i].defined() ? masters[i].grad().cpu().clone() : at::Tensor();
    }
    optimizer.step();
    c10::AutoGradMode no_grad(false);
    auto parameters = subject.module->parameters();
    for (size_t i = 0; i < masters.size(); ++i) {
      parameters[i].copy_(masters[i]);
    }
    reference.losses.push_back({});
    for (const auto& of_rank : losses) {
      reference.losses.back().insert(reference.losses.back().end(), of_rank.begin(), of_rank.end());
    }
  }
  for (size_t i = 0; i < masters.size(); ++i) {
    reference.parameters[names[i]] = masters[i].detach().cpu();
  }
  return reference;
}

inline void expect_same(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  ASSERT_EQ(got.defined(), wanted.defined()) << what;
  if (!wanted.defined()) {
    return;
  }
  ASSERT_EQ(got.scalar_type(), wanted.scalar_type()) << what;
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  const auto exact = [](const at::Tensor& tensor) { return tensor.cpu().to(torch::kDouble); };
  const auto a = exact(got), b = exact(wanted);
  EXPECT_TRUE(torch::equal(a, b)) << what << " differs by " << (a - b).abs().max().item<double>();
}

/// The calling rank's, of all steps.
inline void expect_losses(const std::vector<at::Tensor>& losses, const Reference& reference, const Trial& trial) {
  const int backwards = backwards_of(trial.accumulate);
  for (int i = 0; i < static_cast<int>(losses.size()); ++i) {
    const int step = i / backwards, micro = i % backwards;
    const float got = losses[i].item<float>(), wanted = reference.losses[step][rank() * backwards + micro];
    ASSERT_EQ(got, wanted) << "loss of rank " << rank() << ", step " << step << ", micro-batch " << micro;
  }
}

/// This rank's gradients after a step. A look at them would make the host wait for a device.
inline NamedTensors keep_gradients(const torch::nn::Module& module) {
  NamedTensors kept;
  for (const auto& [name, shard] : named_parameters(module)) {
    const auto gradient = sharded(shard).grad();
    kept[name] = gradient.defined() ? gradient.detach().clone() : gradient;
  }
  return kept;
}

/// The calling rank's, of all steps.
inline void expect_gradients(
    const torch::nn::Module& module, const std::vector<NamedTensors>& kept, const Reference& reference) {
  for (const auto& [name, shard] : named_parameters(module)) {
    for (size_t step = 0; step < kept.size(); ++step) {
      const auto& whole = reference.gradients[step].at(name);
      const auto wanted = whole.defined() ? piece_of(shard, whole) : whole;
      expect_same(kept[step].at(name), wanted, "gradient of " + name + " after step " + std::to_string(step));
    }
  }
}

/// Parameters and buffers lose their values, which are returned.
inline NamedTensors move_to_meta(torch::nn::Module& module) {
  const c10::AutoGradMode no_grad(false);
  NamedTensors values;
  const auto move = [&](const std::string& name, const at::Tensor& tensor) {
    values[name] = tensor.detach().clone();
    engine::take_data(tensor, torch::empty_like(tensor, tensor.options().device(torch::kMeta)));
  };
  for (const auto& item : module.named_parameters()) {
    move(item.key(), item.value());
  }
  for (const auto& item : module.named_buffers()) {
    move(item.key(), item.value());
  }
  return values;
}

inline void give_memory_and_values(torch::nn::Module& module, const NamedTensors& values) {
  to_empty(module);
  const c10::AutoGradMode no_grad(false);
  const auto guard = summon_full_params(module);
  for (auto& item : module.named_parameters()) {
    item.value().copy_(values.at(item.key()));
  }
  for (auto& item : module.named_buffers()) {
    item.value().copy_(values.at(item.key()));
  }
}

inline FSDPModule shard(const Trial& trial, torch::nn::Module& module) {
  return trial.flat ? FSDPModule(nn::make_unit({&module}, trial.options, trial.flat))
                    : fully_shard(module, trial.options);
}

/// The sharded run, on the calling rank, against the reference.
inline void train_sharded(const Trial& trial, const Reference& reference) {
  Subject subject = make_to_shard(trial);
  barrier(); // nobody draws random numbers before all have their weights
  const NamedTensors values = trial.from_meta ? move_to_meta(*subject.module) : NamedTensors();
  if (trial.shard_parts) {
    for (auto& part : subject.parts) {
      shard(trial, *part);
    }
  }
  auto root = shard(trial, *subject.module);
  if (trial.from_meta) {
    give_memory_and_values(*subject.module, values);
  }
  if (trial.prepare) {
    trial.prepare(subject, root);
  }
  torch::optim::AdamW optimizer(parameters(*subject.module), torch::optim::AdamWOptions(1e-2));
  const int backwards = backwards_of(trial.accumulate);
  std::vector<at::Tensor> losses; // looked at later, as the gradients
  std::vector<NamedTensors> gradients;
  for (int step = 0; step < trial.steps; ++step) {
    if (trial.before_step) {
      trial.before_step(subject, root, step);
    }
    optimizer.zero_grad();
    for (int micro = 0; micro < backwards; ++micro) {
      const bool last = micro + 1 == backwards;
      if (trial.accumulate == Accumulate::kNoSync) {
        root.set_requires_gradient_sync(last);
      } else if (trial.accumulate == Accumulate::kNoAllReduce) {
        root.set_requires_all_reduce(last);
      }
      auto loss = subject.loss(rank(), step * backwards + micro);
      loss.backward();
      losses.push_back(loss.detach());
    }
    gradients.push_back(keep_gradients(*subject.module));
    optimizer.step();
  }
  expect_losses(losses, reference, trial);
  expect_gradients(*subject.module, gradients, reference);
  EXPECT_EQ(named_parameters(*subject.module).size(), reference.tensors);
  for (const auto& [name, shard] : named_parameters(*subject.module)) {
    ASSERT_TRUE(is_sharded(shard)) << name;
    const auto whole = sharded(shard);
    expect_same(whole.full_grad(), reference.gradients.back().at(name), "whole gradient of " + name);
    expect_same(whole.full_tensor(), reference.parameters.at(name), "parameter " + name);
  }
}

inline void expect_parity(const Trial& trial, int ranks) {
  SCOPED_TRACE(::testing::Message() << ranks << " ranks");
  const Arrangement arrangement{ranks};
  const auto reference = train_unsharded(trial, arrangement);
  on_threads(ranks, [&] { train_sharded(trial, reference); });
}

/// `choose` sets, on each rank, the options that only ranks can make: meshes.
inline void expect_parity_with(
    const Trial& trial, const Arrangement& arrangement, const std::function<void(FullyShardOptions&)>& choose) {
  SCOPED_TRACE(::testing::Message() << arrangement.replicas << " replicas x " << arrangement.shards << " shards");
  const auto reference = train_unsharded(trial, arrangement);
  on_threads(arrangement.ranks(), [&] {
    Trial mine = trial;
    choose(mine.options);
    train_sharded(mine, reference);
  });
}

inline void expect_parity_hybrid(const Trial& trial, const Arrangement& arrangement) {
  expect_parity_with(trial, arrangement, [&](FullyShardOptions& options) {
    options.mesh = init_device_mesh("cpu", {arrangement.replicas, arrangement.shards}, {"replicate", "shard"});
  });
}

} // namespace fsdp::testing
