#include "checkpoint/check_model.h"

#include <vector>

#include "base/check.h"
#include "base/format.h"

namespace fsdp::disk {

namespace {

std::vector<std::string> names_missing_in(const ShardedStateDict& some, const ShardedStateDict& others) {
  std::vector<std::string> names;
  for (const auto& item : others) {
    if (!some.contains(item.key())) {
      names.push_back(item.key());
    }
  }
  return names;
}

} // namespace

IncompatibleKeys check_model(
    const std::string& file, const ShardedStateDict& here, const ShardedStateDict& there, bool strict) {
  for (const auto& item : here) {
    FSDP_CHECK(
        !item.value().local.is_meta(),
        "[load] '{}' is on the meta device, which has no memory for values: give it some first (fsdp::to_empty(model), "
        "in Python model.to_empty(device=...))",
        item.key());
  }
  IncompatibleKeys keys{names_missing_in(there, here), names_missing_in(here, there)};
  FSDP_CHECK(
      !strict || (keys.missing.empty() && keys.unexpected.empty()),
      "[load] {} is of another model. It lacks: {}; and has besides: {}. Build the model that was saved, or load "
      "without `strict` where names may differ",
      file,
      join(keys.missing),
      join(keys.unexpected));
  return keys;
}

} // namespace fsdp::disk
