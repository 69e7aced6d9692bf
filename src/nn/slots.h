#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <fsdp/front_end.h>

#include "engine/param.h"

namespace torch::jit {
struct Module;
}

namespace fsdp::nn {

/// What a module has registered itself: no copy, as all public ways to it make one.
torch::OrderedDict<std::string, at::Tensor>& registered_parameters(torch::nn::Module& module);
const torch::OrderedDict<std::string, at::Tensor>& registered_parameters(const torch::nn::Module& module);

/// All parameter slots of a module and its children, in the order of registration, as if no parameter were hidden. Tied
/// parameters have several. They cannot be replaced where a module reads its registered parameters itself.
std::vector<Slot> slots_of(torch::nn::Module& module, const std::string& prefix = "");
std::vector<Slot> slots_of(const torch::jit::Module& module);

/// The units of the parameters in these slots, each once.
std::vector<std::shared_ptr<engine::Unit>> units_of(const std::vector<Slot>& slots);

/// Of the flat shards that stand in modules in place of parameters, which `slots_of` gives.
std::vector<Slot> flat_slots_of(torch::nn::Module& module);
/// What stands in a sharded parameter's place: its shard, or nothing where users see a flat one.
at::Tensor shown_in_place_of(const engine::Param& param);

/// A module and all below it with their paths, parents first, as `named_modules` lists them. By reference: a module on
/// the stack has no pointer to itself.
std::vector<std::pair<std::string, torch::nn::Module*>> modules_of(torch::nn::Module& module);

/// Shards that were given other data (`module.to(dtype)`, `set_data`) are known again, before any operator. Collective
/// where there are any.
void settle_replaced_shards(torch::nn::Module& module);
/// Of all its shards, which are new.
void expect_first_values(torch::nn::Module& module, const char* operation);

/// A parameter ends when no member of a module holds it, though a shard of it is registered.
void check_not_left(const at::Tensor& parameter, const std::string& name, const char* operation);

} // namespace fsdp::nn
