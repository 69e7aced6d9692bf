#include "state/comparison.h"

#include <unordered_set>

#include "base/check.h"
#include "base/format.h"
#include "base/phrase.h"

namespace fsdp::state {

namespace {

const at::Tensor& elements_of(const at::Tensor& whole) {
  return whole;
}
const at::Tensor& elements_of(const HeldTensor& piece) {
  return piece.local;
}

} // namespace

bool has_values(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_meta();
}

void check_has_values(
    const at::Tensor& tensor, const std::string& key, const std::string& name, const char* operation) {
  FSDP_CHECK(
      has_values(tensor),
      "[{}] '{}' of '{}' is no dense tensor with values: sparse, or on the meta device",
      operation,
      key,
      name);
}

template <typename Values>
IncompatibleKeys compare(const std::vector<NamedTensor>& entries, const Values& state) {
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

template <typename Values>
std::vector<std::string> complaints(
    const std::vector<NamedTensor>& entries, const Values& state, const IncompatibleKeys& keys, bool strict) {
  std::vector<std::string> lines;
  if (strict && !keys.missing.empty()) {
    lines.push_back("missing: " + join(keys.missing));
  }
  if (strict && !keys.unexpected.empty()) {
    lines.push_back("unexpected: " + join(keys.unexpected));
  }
  for (const auto& entry : entries) {
    const auto* value = state.find(entry.name);
    if (value != nullptr && sizes_of(*value) != entry.sizes()) {
      lines.push_back(
          phrase("'{}' has sizes {} in the model and {} there", entry.name, entry.sizes(), sizes_of(*value)));
    } else if (value != nullptr && !has_values(elements_of(*value))) {
      lines.push_back(phrase("'{}' is no dense tensor with values there: sparse, or on the meta device", entry.name));
    }
  }
  return lines;
}

template IncompatibleKeys compare(const std::vector<NamedTensor>&, const StateDict&);
template IncompatibleKeys compare(const std::vector<NamedTensor>&, const ShardedStateDict&);
template std::vector<std::string> complaints(
    const std::vector<NamedTensor>&, const StateDict&, const IncompatibleKeys&, bool);
template std::vector<std::string> complaints(
    const std::vector<NamedTensor>&, const ShardedStateDict&, const IncompatibleKeys&, bool);

} // namespace fsdp::state
