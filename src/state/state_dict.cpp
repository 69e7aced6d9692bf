#include <fsdp/state_dict.h>

#include <memory>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <fsdp/front_end.h>

#include "base/check.h"
#include "base/format.h"
#include "engine/at_work.h"
#include "engine/unit.h"
#include "engine/write_values.h"
#include "state/comparison.h"
#include "state/first_rank.h"
#include "state/named_tensors.h"

namespace fsdp {

namespace {

using engine::Param;
using engine::Unit;
using state::NamedTensor;

using Wholes = std::unordered_map<const Param*, at::Tensor>;

void put_together(Unit& unit, const FullStateDictOptions& options, bool wanted, Wholes& wholes) {
  unit.before_shard_read(); // what was written to handles is in the shards
  const engine::AtWork at_work(unit.runtime());
  Wholes of_unit = unit.put_together(options.offload_to_cpu ? c10::kCPU : unit.device(), "full_state_dict");
  if (wanted) {
    wholes.merge(of_unit);
  }
}

at::Tensor copy_of(const NamedTensor& entry, const FullStateDictOptions& options) {
  return entry.tensor.detach().to(
      options.offload_to_cpu ? c10::Device(c10::kCPU) : entry.tensor.device(),
      entry.saved_dtype(),
      /*non_blocking=*/false,
      /*copy=*/true);
}

void check_nothing_wrong(const std::string& wrong) {
  FSDP_CHECK(
      wrong.empty(),
      "[load_state_dict] the values are another model's, and none was loaded:\n{}\nBuild the model they were taken "
      "from, or set strict = false where names may differ",
      wrong);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  return lines;
}

void write(const NamedTensor& entry, const at::Tensor& piece) {
  engine::write_values(entry.leaf(), piece); // seen as every write
}

void load(const NamedTensor& entry, const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  write(entry, entry.param != nullptr ? fsdp::piece_of(entry.leaf(), value.detach()) : value);
}

void load(const NamedTensor& entry, const HeldTensor& there) {
  const c10::NoGradGuard no_grad;
  at::Tensor piece;
  {
    const engine::InternalScope scope;
    const HeldTensor here = fsdp::held(entry.leaf());
    piece = layout::taken_from(state::as_piece(there), state::as_piece(here));
  }
  write(entry, piece);
}

bool covers(const HeldTensor& there, const NamedTensor& entry) {
  const HeldTensor here = fsdp::held(entry.leaf());
  return there.sizes != here.sizes || layout::covers(state::as_piece(there), state::as_piece(here));
}

void check_materialized(const std::vector<NamedTensor>& entries) {
  for (const auto& entry : entries) {
    FSDP_CHECK(
        !entry.tensor.is_meta(),
        "[load_state_dict] '{}' is on the meta device, which has no memory for values: call fsdp::to_empty(model) "
        "first",
        entry.name);
  }
}

} // namespace

StateDict full_state_dict(ModuleRef given, const FullStateDictOptions& options) {
  const auto entries = state::named_tensors(given, "full_state_dict");
  const bool wanted = !options.rank0_only || state::is_first_rank(entries);
  Wholes wholes;
  for (const auto& unit : state::units_of(entries)) {
    put_together(*unit, options, wanted, wholes);
  }
  StateDict state;
  for (const auto& entry : entries) {
    if (wanted) {
      state.insert(entry.name, entry.param != nullptr ? wholes.at(entry.param) : copy_of(entry, options));
    }
  }
  return state;
}

IncompatibleKeys load_state_dict(ModuleRef given, const StateDict& state, const LoadStateDictOptions& options) {
  auto entries = state::named_tensors(given, "load_state_dict");
  check_materialized(entries);
  const auto first =
      options.broadcast_from_rank0 ? std::make_unique<state::FromFirstRank>(entries, "load_state_dict") : nullptr;
  IncompatibleKeys keys = state::compare(entries, state);
  std::string wrong = join(state::complaints(entries, state, keys, options.strict), "\n");
  if (first) {
    wrong = first->text(wrong);
    keys.missing = lines_of(first->text(join(keys.missing, "\n")));
    keys.unexpected = lines_of(first->text(join(keys.unexpected, "\n")));
  }
  check_nothing_wrong(wrong);
  const std::unordered_set<std::string> missing(keys.missing.begin(), keys.missing.end());
  std::erase_if(entries, [&](const auto& entry) { return missing.count(entry.name) != 0; });
  if (first) {
    first->check_alike(entries);
  }
  for (const auto& entry : entries) {
    const at::Tensor* mine = state.find(entry.name);
    load(entry, first ? first->values(entry.sizes(), entry.tensor.scalar_type(), mine) : *mine);
  }
  return keys;
}

ShardedStateDict sharded_state_dict(ModuleRef given) {
  const auto entries = state::named_tensors(given, "sharded_state_dict");
  for (const auto& unit : state::units_of(entries)) {
    unit->before_shard_read(); // what was written to handles is in the shards
  }
  const bool first_rank = state::is_first_rank(entries);
  ShardedStateDict state;
  for (const auto& entry : entries) {
    state.insert(entry.name, state::held(entry, first_rank));
  }
  return state;
}

IncompatibleKeys load_state_dict(ModuleRef given, const ShardedStateDict& state, const LoadStateDictOptions& options) {
  FSDP_CHECK(
      !options.broadcast_from_rank0,
      "[load_state_dict] of a sharded state dict each rank gives its own pieces: leave broadcast_from_rank0 out, or "
      "take a full_state_dict");
  const auto entries = state::named_tensors(given, "load_state_dict");
  check_materialized(entries);
  IncompatibleKeys keys = state::compare(entries, state);
  auto wrong = state::complaints(entries, state, keys, options.strict);
  for (const auto& entry : entries) {
    const HeldTensor* there = state.find(entry.name);
    if (there != nullptr && !covers(*there, entry)) {
      wrong.push_back(phrase(
          "'{}' is cut in another way: this rank needs elements that were on others (full_state_dict goes into any "
          "sharding)",
          entry.name));
    }
  }
  check_nothing_wrong(join(wrong, "\n"));
  for (const auto& entry : entries) {
    if (const HeldTensor* there = state.find(entry.name)) {
      load(entry, *there);
    }
  }
  return keys;
}

} // namespace fsdp
