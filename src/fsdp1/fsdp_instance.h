#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/state_dict_type.h>

#include "engine/unit.h"

namespace fsdp {

/// What all copies of an instance share: the unit's, which it keeps as little as the module.
struct FSDPInstance::Impl final : engine::Unit::Companion {
  std::weak_ptr<engine::Unit> weak_unit;
  std::weak_ptr<torch::nn::Module> weak_module; // of which the unit was made
  FSDPOptions options; // without functions of the user's, which may keep the model
  ShardingStrategy strategy; // not the one asked for where there is one rank
  int running_calls = 0; // where it is the root
  int no_sync_guards = 0;
  struct Synced {
    std::weak_ptr<engine::Unit> unit;
    bool gradients, across_replicas;
  };
  std::vector<Synced> before_no_sync;
  bool is_initialized = false; // as the root's first call does
  bool has_comm_hook = false;
  bool full_precision_in_eval = false;
  std::optional<bool> in_full_precision = std::nullopt; ///< of the root; unset before the first call
  StateDictSettings state_dict_settings = {};

  /// An Error of this operation's if the model is gone.
  std::shared_ptr<engine::Unit> unit(const char* operation) const;
  torch::nn::Module& module(const char* operation) const;
};

namespace instances {

/// Null for a unit that `fully_shard` made.
std::shared_ptr<FSDPInstance::Impl> find(const std::shared_ptr<engine::Unit>& unit);
/// Those of a module and of all below it, parents first.
std::vector<std::shared_ptr<FSDPInstance::Impl>> below(torch::nn::Module& module);

} // namespace instances

} // namespace fsdp
