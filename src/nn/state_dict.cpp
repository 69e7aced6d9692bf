#include <fsdp/state_dict.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <fsdp/group.h>

#include "base/check.h"
#include "base/format.h"
#include "engine/internal_scope.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/registry.h"
#include "nn/same_values.h"
#include "nn/slots.h"

namespace fsdp {

namespace {

using engine::Param;
using engine::Unit;

/// A parameter or buffer of the model.
struct Entry {
  std::string name;
  at::Tensor tensor; // as it is registered
  Param* param; // null unless it is sharded

  c10::IntArrayRef sizes() const {
    return param != nullptr ? c10::IntArrayRef(param->layout().sizes()) : tensor.sizes();
  }
};

// On some ranks perhaps: what they register then are plain tensors.
void check_not_summoned(const torch::nn::Module& module, const char* operation) {
  const auto unit = nn::registry::find(module);
  FSDP_CHECK(
      unit == nullptr || unit->held == 0,
      "[{}] the parameters are shown whole by summon_full_params: end that guard first, or read and write "
      "named_parameters(), which are whole now",
      operation);
}

std::vector<Entry> entries_of(ModuleRef given, const char* operation) {
  torch::nn::Module& module = given.for_operation(operation);
  nn::settle_replaced_shards(module);
  std::vector<Entry> entries;
  const auto add = [&](const std::string& path, const torch::OrderedDict<std::string, at::Tensor>& tensors) {
    for (const auto& item : tensors) {
      if (item.value().defined()) {
        const std::string name = path.empty() ? item.key() : path + "." + item.key();
        entries.push_back({name, item.value(), engine::param_of(item.value())});
      }
    }
  };
  for (const auto& [path, each] : nn::modules_of(module)) {
    check_not_summoned(*each, operation);
    add(path, nn::registered_parameters(*each));
    add(path, each->named_buffers(/*recurse=*/false));
  }
  return entries;
}

using Wholes = std::unordered_map<const Param*, at::Tensor>;

void put_together(Unit& unit, const FullStateDictOptions& options, bool wanted, Wholes& wholes) {
  unit.before_shard_read(); // what was written to handles is in the shards
  const engine::InternalScope scope;
  const auto lock = unit.runtime().lock();
  const auto copies = unit.put_together(options.offload_to_cpu ? c10::kCPU : unit.device(), "full_state_dict");
  for (size_t i = 0; wanted && i < copies.size(); ++i) {
    for (size_t j = 0; j < copies[i].size(); ++j) {
      wholes[unit.buckets()[i]->params()[j]] = copies[i][j];
    }
  }
}

at::Tensor copy_of(const at::Tensor& tensor, const FullStateDictOptions& options) {
  return tensor.detach().to(
      options.offload_to_cpu ? c10::Device(c10::kCPU) : tensor.device(),
      tensor.scalar_type(),
      /*non_blocking=*/false,
      /*copy=*/true);
}

bool is_first_rank(const std::vector<Entry>& entries) {
  for (const auto& entry : entries) {
    if (entry.param != nullptr) {
      const Mesh& mesh = entry.param->bucket().options().mesh;
      for (int dim = 0; dim < mesh.ndim(); ++dim) {
        if (mesh.coordinate(dim) != 0) {
          return false;
        }
      }
    }
  }
  return true;
}

// Empty if all can be loaded.
std::string complaint(
    const std::vector<Entry>& entries, const StateDict& state, const IncompatibleKeys& keys, bool strict) {
  std::vector<std::string> lines;
  if (strict && !keys.missing.empty()) {
    lines.push_back("missing: " + join(keys.missing));
  }
  if (strict && !keys.unexpected.empty()) {
    lines.push_back("unexpected: " + join(keys.unexpected));
  }
  for (const auto& entry : entries) {
    const at::Tensor* value = state.find(entry.name);
    if (value != nullptr && value->sizes() != entry.sizes()) {
      lines.push_back(phrase("'{}' has sizes {} in the model and {} there", entry.name, entry.sizes(), value->sizes()));
    }
  }
  return join(lines, "\n");
}

IncompatibleKeys compare(const std::vector<Entry>& entries, const StateDict& state) {
  IncompatibleKeys keys;
  std::unordered_set<std::string> known;
  for (const auto& entry : entries) {
    known.insert(entry.name);
    if (!state.contains(entry.name)) {
      keys.missing.push_back(entry.name);
    }
  }
  for (const auto& item : state) {
    if (known.count(item.key()) == 0) {
      keys.unexpected.push_back(item.key());
    }
  }
  return keys;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  return lines;
}

void load(const Entry& entry, const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  if (entry.param == nullptr) {
    at::Tensor(entry.tensor).copy_(value);
    return;
  }
  at::Tensor piece;
  {
    const engine::InternalScope scope;
    piece = entry.param->piece_of(value.detach());
  }
  at::Tensor(entry.param->shard()).copy_(piece); // seen as every write
}

/// Where one rank has all values: its word, and its tensors, go to the others.
class FromFirstRank {
 public:
  explicit FromFirstRank(const std::vector<Entry>& entries) {
    for (const auto& entry : entries) {
      if (entry.param == nullptr) {
        continue;
      }
      const Mesh& mesh = entry.param->bucket().options().mesh;
      FSDP_CHECK(
          !mesh_ || *mesh_ == mesh,
          "[load_state_dict] broadcast_from_rank0 needs all parameters on one mesh, but these lie on {} and {}: give "
          "the values on every rank",
          mesh_->str(),
          mesh.str());
      mesh_ = mesh;
    }
  }

  std::string text(std::string mine) const {
    for (int dim = mesh_ ? mesh_->ndim() - 1 : -1; dim >= 0; --dim) {
      mine = mesh_->group(dim)->exchange(mine, kLabel)[0];
    }
    return mine;
  }

  at::Tensor values(const Entry& entry, const at::Tensor* mine) const {
    if (!mesh_) {
      return mine != nullptr ? *mine : at::Tensor();
    }
    const auto options = entry.tensor.options().requires_grad(false).device(mesh_->device());
    at::Tensor whole = at::empty(entry.sizes(), options);
    if (mine != nullptr) {
      whole.copy_(*mine);
    }
    nn::broadcast_from_first(whole, *mesh_, kLabel);
    return whole;
  }

 private:
  inline static const Label kLabel{"load_state_dict", ""};
  std::optional<Mesh> mesh_;
};

void check_materialized(const std::vector<Entry>& entries) {
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
  const auto entries = entries_of(given, "full_state_dict");
  const bool wanted = !options.rank0_only || is_first_rank(entries);
  Wholes wholes;
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto& entry : entries) {
    if (entry.param != nullptr) {
      auto unit = entry.param->unit().shared_from_this();
      if (std::find(units.begin(), units.end(), unit) == units.end()) {
        put_together(*unit, options, wanted, wholes);
        units.push_back(std::move(unit));
      }
    }
  }
  StateDict state;
  for (const auto& entry : entries) {
    if (wanted) {
      state.insert(entry.name, entry.param != nullptr ? wholes.at(entry.param) : copy_of(entry.tensor, options));
    }
  }
  return state;
}

IncompatibleKeys load_state_dict(ModuleRef given, const StateDict& state, const LoadStateDictOptions& options) {
  const auto entries = entries_of(given, "load_state_dict");
  check_materialized(entries);
  const auto first = options.broadcast_from_rank0 ? std::make_unique<FromFirstRank>(entries) : nullptr;
  IncompatibleKeys keys = compare(entries, state);
  std::string wrong = complaint(entries, state, keys, options.strict);
  if (first) {
    wrong = first->text(wrong);
    keys.missing = lines_of(first->text(join(keys.missing, "\n")));
    keys.unexpected = lines_of(first->text(join(keys.unexpected, "\n")));
  }
  FSDP_CHECK(
      wrong.empty(),
      "[load_state_dict] the values are another model's, and none was loaded:\n{}\nBuild the model they were taken "
      "from, or set strict = false where names may differ",
      wrong);
  const std::unordered_set<std::string> missing(keys.missing.begin(), keys.missing.end());
  for (const auto& entry : entries) {
    if (missing.count(entry.name) == 0) {
      const at::Tensor* mine = state.find(entry.name);
      load(entry, first ? first->values(entry, mine) : *mine);
    }
  }
  return keys;
}

} // namespace fsdp
