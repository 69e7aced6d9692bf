#include <map>
#include <string_view>
#include <utility>

#include <fsdp/save.h>

#include "base/check.h"
#include "checkpoint/all_agree.h"
#include "checkpoint/check_model.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/names_in_index.h"
#include "checkpoint/piece_reader.h"
#include "checkpoint/random_state.h"
#include "checkpoint/run_folder.h"
#include "state/make_optim_state.h"

namespace fsdp {

namespace {

using namespace disk; // NOLINT: what it is made of

std::string find_checkpoint(const std::string& dir) {
  if (is_file(dir + "/" + kIndexName)) {
    return dir;
  }
  const auto found = RunFolder(dir).latest();
  FSDP_CHECK(found, "[load] {} has no checkpoint, and is none: give the folder that save was given", dir);
  return *found;
}

CheckpointIndex read_index(const std::string& folder) {
  const std::string path = folder + "/" + kIndexName;
  return parse_index(read_text(path, kLongestIndex, File::Links::kRefuse), path);
}

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

  ShardedStateDict model(const ShardedStateDict& here) {
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
      state.insert(*name, std::move(there));
    }
    return state;
  }

  ShardedOptimStateDict optimizer(const ShardedStateDict& here) {
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
        add_state(dict, full_name, *name_and_key, here);
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
  void add_state(
      ShardedOptimStateDict& dict,
      const std::string& full_name,
      const std::string& name_and_key,
      const ShardedStateDict& here) {
    const auto slash = name_and_key.rfind('/');
    FSDP_CHECK(
        slash != std::string::npos, "[load] {}: '{}' is no state's name: the index is damaged", folder_, full_name);
    const std::string name = name_and_key.substr(0, slash);
    if (!dict.state.contains(name)) {
      dict.state.insert(name, {});
    }
    if (const HeldTensor* param = here.find(name)) {
      dict.state[name].tensors[name_and_key.substr(slash + 1)] = reader_.read(full_name, *param);
    }
  }

  std::string folder_;
  CheckpointIndex index_;
  PieceReader reader_;
};

/// What has been read, before anything is changed.
struct Staged {
  LoadedState result{};
  ShardedStateDict model{};
  std::optional<state::MadeState> optimizer{};
  std::map<std::string, at::Tensor> random_states{};
};

Staged stage(const std::string& folder, const StateToLoad& state, const LoadOptions& options, int rank) {
  const auto here = sharded_state_dict(state.model);
  Reading reading(folder);
  Staged staged{.result = {.path = folder, .step = reading.index().step, .extra = reading.extra()}};
  staged.model = reading.model(here);
  check_model(folder, here, staged.model, options.strict);
  if (state.optimizer != nullptr) {
    staged.optimizer.emplace(state::make_optim_state(state.model, *state.optimizer, reading.optimizer(here)));
  }
  if (options.random_numbers) {
    staged.random_states = reading.random_states(rank);
    check_random_states(folder, staged.random_states);
  }
  return staged;
}

/// Copies, of what has been compared and made.
void take_over(Staged& staged, const StateToLoad& state, const LoadOptions& options) {
  staged.result.keys = load_state_dict(state.model, staged.model, {.strict = options.strict});
  if (staged.optimizer) {
    staged.optimizer->give_to_optimizer();
  }
  set_random_states(staged.random_states);
}

} // namespace

LoadedState load(const std::string& dir, const StateToLoad& state, const LoadOptions& options) {
  const auto group = group_or_world(options.group);
  const Label label{"load", ""};
  std::string folder;
  all_agree(*group, label, [&] { folder = group->rank() == 0 ? find_checkpoint(dir) : ""; });
  folder = group->exchange(folder, label)[0];
  Staged staged;
  all_agree(*group, label, [&] { staged = stage(folder, state, options, group->rank()); });
  all_agree(*group, label, [&] { take_over(staged, state, options); });
  return staged.result;
}

} // namespace fsdp
