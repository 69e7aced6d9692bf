#include <map>
#include <string_view>
#include <utility>

#include <fsdp/saved_state.h>

#include "base/check.h"
#include "checkpoint/all_agree.h"
#include "checkpoint/background_save.h"
#include "checkpoint/check_model.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/names_in_index.h"
#include "checkpoint/open_index.h"
#include "checkpoint/piece_reader.h"
#include "checkpoint/progress.h"
#include "checkpoint/random_state.h"
#include "state/make_optim_state.h"

namespace fsdp {

namespace {

using namespace disk; // NOLINT: what it is made of

/// The rest of a name that begins so.
std::optional<std::string> after(const std::string& name, std::string_view begin) {
  return name.starts_with(begin) ? std::optional(name.substr(begin.size())) : std::nullopt;
}

/// A checkpoint as this rank needs it.
class Reading {
 public:
  explicit Reading(const std::string& folder) : folder_(folder), index_(read_index(folder)), reader_(folder, index_) {}

  const CheckpointIndex& index() const {
    return index_;
  }

  /// Of what is going to be read into `here`.
  int64_t bytes(const ShardedStateDict& here, bool with_optimizer) const {
    int64_t bytes = 0;
    for (const auto& [full_name, tensor] : index_.tensors) {
      const auto optimizer_name = with_optimizer ? after(full_name, kOptimizer) : std::nullopt;
      const auto name =
          optimizer_name ? optimizer_name->substr(0, optimizer_name->rfind('/')) : after(full_name, kModel);
      const HeldTensor* wanted = name ? here.find(*name) : nullptr;
      bytes += wanted != nullptr ? bytes_of(*wanted, tensor.dtype) : 0;
    }
    return bytes;
  }

  ShardedStateDict model(const ShardedStateDict& here, Progress& progress) {
    std::map<const c10::TensorImpl*, HeldTensor> read; // under another name
    ShardedStateDict state;
    for (const auto& [full_name, tensor] : index_.tensors) {
      const auto name = after(full_name, kModel);
      if (!name) {
        continue;
      }
      const HeldTensor* wanted = here.find(*name);
      if (wanted == nullptr) {
        state.insert(*name, HeldTensor{.name = *name, .sizes = tensor.sizes, .strides = tensor.strides});
        continue;
      }
      const auto* impl = wanted->local.unsafeGetTensorImpl();
      const auto known = read.find(impl);
      const bool again = known != read.end() && tensor.pieces == index_.tensors.at(kModel + known->second.name).pieces;
      HeldTensor there = again ? known->second : reader_.read(full_name, *wanted);
      there.name = *name;
      read.emplace(impl, there);
      progress.add(bytes_of(*wanted, tensor.dtype));
      state.insert(*name, std::move(there));
    }
    return state;
  }

  ShardedOptimStateDict optimizer(const ShardedStateDict& here, Progress& progress) {
    FSDP_CHECK(
        index_.optimizer,
        "[load] {} was saved without an optimizer: load the model alone, or another checkpoint",
        folder_);
    ShardedOptimStateDict dict;
    for (const auto& [name, scalars] : index_.optimizer->of_params) {
      dict.state.insert(name, {.scalars = scalars});
    }
    for (const auto& [full_name, tensor] : index_.tensors) {
      if (const auto name_and_key = after(full_name, kOptimizer)) {
        add_state(dict, full_name, *name_and_key, here, progress);
      }
    }
    for (const auto& group : index_.optimizer->groups) {
      dict.param_groups.push_back({group.params, group.options});
    }
    return dict;
  }

  std::map<std::string, c10::IValue> extra() {
    std::map<std::string, c10::IValue> extra = index_.extra;
    for (const auto& [full_name, tensor] : index_.tensors) {
      if (const auto name = after(full_name, kExtra)) {
        extra[*name] = reader_.read_whole(full_name);
      }
    }
    return extra;
  }

  std::map<std::string, at::Tensor> random_states(int rank) {
    std::map<std::string, at::Tensor> states;
    for (const auto& [full_name, tensor] : index_.tensors) {
      if (const auto device = after(full_name, random_name(rank, ""))) {
        states[*device] = reader_.read_whole(full_name);
      }
    }
    return states;
  }

 private:
  static int64_t bytes_of(const HeldTensor& wanted, c10::ScalarType dtype) {
    return wanted.extent.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  }

  void add_state(
      ShardedOptimStateDict& dict,
      const std::string& full_name,
      const std::string& name_and_key,
      const ShardedStateDict& here,
      Progress& progress) {
    const auto slash = name_and_key.rfind('/');
    FSDP_CHECK(
        slash != std::string::npos, "[load] {}: '{}' is no state's name: the index is damaged", folder_, full_name);
    const std::string name = name_and_key.substr(0, slash);
    if (!dict.state.contains(name)) {
      dict.state.insert(name, {});
    }
    if (const HeldTensor* param = here.find(name)) {
      dict.state[name].tensors[name_and_key.substr(slash + 1)] = reader_.read_as_saved(full_name, *param);
      progress.add(bytes_of(*param, index_.tensors.at(full_name).dtype));
    }
  }

  std::string folder_;
  CheckpointIndex index_;
  PieceReader reader_;
};

/// What has been read, before anything is changed.
struct Staged {
  LoadedState result{};
  std::map<std::string, at::Tensor> random_states{};
};

Staged stage(const std::string& folder, const StateTarget& target, const LoadOptions& options, int rank) {
  const auto here = target.model();
  Reading reading(folder);
  Staged staged{.result = {.path = folder, .step = reading.index().step, .extra = reading.extra()}};
  Progress progress(
      "loading step " + std::to_string(reading.index().step), reading.bytes(here, target.with_optimizer), rank == 0);
  StateOfRank read{.model = reading.model(here, progress)};
  staged.result.keys = check_model(folder, here, read.model, options.strict);
  if (target.with_optimizer) {
    read.optimizer = reading.optimizer(here, progress);
  }
  if (options.random_numbers) {
    staged.random_states = reading.random_states(rank);
    check_random_states(folder, staged.random_states, target.device);
  }
  try {
    target.prepare(std::move(read));
  } catch (const CommError&) {
    throw;
  } catch (const Error& error) {
    throw Error(
        folder + ": " + error.what() +
        (target.with_optimizer ? ". Where it is to be another one, load the model without the optimizer" : ""));
  }
  return staged;
}

} // namespace

LoadedState saved_state::load(const std::string& dir, const StateTarget& target, const LoadOptions& options) {
  const auto group = group_or_world(options.group);
  const Label label{"load", ""};
  BackgroundSave::settle(group);
  std::string folder;
  all_agree(*group, label, [&] {
    BackgroundSave::expect_settled(dir, label.operation);
    folder = group->rank() == 0 ? find_checkpoint(dir) : "";
  });
  folder = group->exchange(folder, label)[0];
  Staged staged;
  all_agree(*group, label, [&] { staged = stage(folder, target, options, group->rank()); });
  all_agree(*group, label, [&] {
    target.take_over();
    set_random_states(staged.random_states, target.device);
  });
  return staged.result;
}

LoadedState load(const std::string& dir, const StateToLoad& state, const LoadOptions& options) {
  ShardedStateDict model;
  std::optional<state::MadeState> optimizer;
  StateTarget target{.with_optimizer = state.optimizer != nullptr, .device = training_device()};
  target.model = [&] { return sharded_state_dict(state.model); };
  target.prepare = [&](StateOfRank read) {
    model = std::move(read.model);
    if (read.optimizer) {
      optimizer.emplace(state::make_optim_state(state.model, *state.optimizer, std::move(*read.optimizer)));
    }
  };
  target.take_over = [&] { // copies, of what has been compared and made
    load_state_dict(state.model, model, {.strict = options.strict});
    if (optimizer) {
      optimizer->give_to_optimizer();
    }
  };
  return saved_state::load(dir, target, options);
}

} // namespace fsdp
