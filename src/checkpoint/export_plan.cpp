#include "checkpoint/export_plan.h"

#include <algorithm>
#include <cstdio>
#include <unordered_map>
#include <unordered_set>

#include <c10/util/accumulate.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "checkpoint/transposed.h"

namespace fsdp::disk {

namespace {

struct Planned {
  HeldTensor held{}; // as it lies in the file
  bool is_transposed = false;
};
using ByName = std::unordered_map<std::string, Planned>;

int64_t bytes_of(const HeldTensor& held) {
  return c10::multiply_integers(held.sizes) * static_cast<int64_t>(c10::elementSize(held.dtype()));
}

Planned in_file(const std::string& name, const HeldTensor& held, const ExportSafetensorsOptions& options) {
  if (!options.transposed || !options.transposed(name)) {
    return {held, false};
  }
  FSDP_CHECK(
      held.sizes.size() == 2,
      "[export_safetensors] '{}' has sizes {}, and only a matrix can be transposed: let `transposed` say so",
      name,
      c10::IntArrayRef(held.sizes));
  return {transposed(held), true};
}

std::string number_name(size_t number, size_t count) {
  if (count == 1) {
    return "model.safetensors";
  }
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", number + 1, count);
  return name;
}

void lay_out(ExportFile& file, const ByName& by_name) {
  file.header.metadata["format"] = "pt"; // which other readers ask for
  file.text = lay_out_safetensors(file.header, file.name);
  const uint64_t bytes = file.text.size();
  file.text.insert(0, reinterpret_cast<const char*>(&bytes), sizeof(bytes));
  for (const auto& tensor : file.header.tensors) {
    const auto& [held, is_transposed] = by_name.at(tensor.name);
    file.held.push_back(held);
    file.transposed.push_back(is_transposed);
  }
}

/// Takes the digits off, five or more.
bool take_digits(std::string_view& text) {
  const size_t count = std::min(text.find_first_not_of("0123456789"), text.size());
  text.remove_prefix(count);
  return count >= 5;
}

bool take(std::string_view& text, std::string_view begin) {
  const bool found = text.starts_with(begin);
  text.remove_prefix(found ? begin.size() : 0);
  return found;
}

} // namespace

bool is_file_of_export(std::string_view name) {
  if (name == "model.safetensors") {
    return true;
  }
  return take(name, "model-") && take_digits(name) && take(name, "-of-") && take_digits(name) && name == ".safetensors";
}

std::vector<ExportFile> plan_export(const ShardedStateDict& state, const ExportSafetensorsOptions& options) {
  FSDP_CHECK(
      options.max_shard_bytes > 0,
      "[export_safetensors] expected max_shard_bytes of 1 or more, got {}",
      options.max_shard_bytes);
  std::vector<ExportFile> files(1);
  ByName by_name;
  std::unordered_set<const c10::TensorImpl*> known;
  int64_t bytes = 0;
  for (const auto& item : state) {
    const HeldTensor& held = item.value();
    if (!known.insert(held.local.unsafeGetTensorImpl()).second) {
      continue; // tied to an earlier one
    }
    if (bytes > 0 && bytes + bytes_of(held) > options.max_shard_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += bytes_of(held);
    const std::string name = options.name_in_files ? options.name_in_files(item.key()) : item.key();
    const Planned there = in_file(item.key(), held, options);
    FSDP_CHECK(
        by_name.emplace(name, there).second,
        "[export_safetensors] name_in_files gives '{}' to two tensors, '{}' is one of them: give each its own",
        name,
        item.key());
    files.back().header.tensors.push_back({name, there.held.dtype(), there.held.sizes});
  }
  for (size_t i = 0; i < files.size(); ++i) {
    files[i].name = number_name(i, files.size());
    lay_out(files[i], by_name);
  }
  return files;
}

std::string weight_map(const std::vector<ExportFile>& files) {
  nlohmann::json names = nlohmann::json::object();
  int64_t bytes = 0;
  for (const auto& file : files) {
    for (const auto& tensor : file.header.tensors) {
      names[tensor.name] = file.name;
      bytes += tensor.bytes();
    }
  }
  const nlohmann::json whole{{"metadata", {{"total_size", bytes}}}, {"weight_map", std::move(names)}};
  return whole.dump(/*indent=*/2) + "\n";
}

} // namespace fsdp::disk
