// `torch::save` of modules whose registered parameters are shards is an error.

#include <string>
#include <string_view>

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/export.h>

#include "base/check.h"
#include "engine/flat_shard.h"
#include "engine/param.h"
#include "engine/tenant.h"
#include "nn/hidden_parameters.h"

namespace fsdp::nn {

namespace {

std::string_view last_part(std::string_view path) {
  const auto dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

/// [Note: what is saved of a module] An archive does not say what it was made of, a module or single tensors. But
/// `Module::save` writes a parameter under the name by which it is registered, which has no dots, while a tensor of its
/// own is "0", those of a vector are counted, and who writes pieces himself chooses the names.
void check_holds_no_shards(const torch::jit::Module& archive) {
  for (const auto& item : archive.named_parameters(/*recurse=*/false)) {
    const engine::Param* param = engine::param_of_shard(item.value);
    FSDP_CHECK(
        engine::flat_shard_of(item.value) == nullptr || item.name != hidden_parameters::kFlatName,
        "[torch::save] expected a module with whole parameters, got one with a flat parameter: the file would hold "
        "this rank's share of it. Save fsdp::full_state_dict(model), or in the scope of summon_full_params");
    FSDP_CHECK(
        param == nullptr || last_part(param->name()) != item.name,
        "[torch::save] expected a module with whole parameters, got one where '{}' is sharded: the file would hold "
        "this rank's piece of it. Save in the scope of `auto guard = fsdp::summon_full_params(model, {.writeback = "
        "false, .rank0_only = true});`, made on all ranks, on rank 0. (Pieces: torch::save(model->parameters(), file), "
        "a file a rank)",
        param->name());
  }
  for (const auto& child : archive.children()) {
    check_holds_no_shards(child);
  }
}

// LibTorch asks at the beginning of each export whether there are more files to write. At load time, when nothing else
// runs; a function that the program sets takes its place.
[[maybe_unused]] const bool installed = [] {
  torch::jit::SetExportModuleExtraFilesHook([](const torch::jit::Module& archive) {
    check_holds_no_shards(archive);
    return torch::jit::ExtraFilesMap();
  });
  return true;
}();

} // namespace

} // namespace fsdp::nn
