#include "checkpoint/safetensors_header.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "base/format.h"
#include "checkpoint/dtype_names.h"
#include "checkpoint/safetensors_sax.h"

namespace fsdp::disk {

namespace {

constexpr size_t kAlignment = 4096; // of the first tensor: other hosts may write it, and hosts write whole pages

void check_names_differ(const SafetensorsHeader& header, const std::string& path) {
  std::unordered_set<std::string_view> names;
  for (const auto& tensor : header.tensors) {
    FSDP_CHECK(
        names.insert(tensor.name).second && tensor.name != "__metadata__",
        "[safetensors] {}: two tensors cannot have the name '{}': give each its own",
        path,
        shown(tensor.name));
  }
}

int64_t checked_bytes(const StoredTensor& tensor, const std::string& path) {
  auto bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  bool too_many = false;
  for (const int64_t size : tensor.sizes) {
    too_many |= __builtin_mul_overflow(bytes, size, &bytes);
  }
  FSDP_CHECK(
      !too_many,
      "[safetensors] {}: '{}' of sizes [{}] would have more than 2^63 bytes; the file is damaged",
      path,
      shown(tensor.name),
      join(tensor.sizes));
  return bytes;
}

void check_place(const StoredTensor& tensor, int64_t expected_begin, const std::string& path) {
  FSDP_CHECK(
      tensor.begin == expected_begin && tensor.begin <= tensor.end,
      "[safetensors] {}: '{}' lies at [{}, {}) of the data, but what lies before it ends at {}: tensors overlap or "
      "leave a gap; the file is damaged",
      path,
      shown(tensor.name),
      tensor.begin,
      tensor.end,
      expected_begin);
  const int64_t bytes = checked_bytes(tensor, path);
  FSDP_CHECK(
      tensor.bytes() == bytes,
      "[safetensors] {}: '{}' of sizes [{}] and {} has {} bytes, but {} are there; the file is damaged",
      path,
      shown(tensor.name),
      join(tensor.sizes),
      tensor.dtype,
      bytes,
      tensor.bytes());
}

std::string dump(const nlohmann::json& json, const std::string& path) {
  try {
    return json.dump();
  } catch (const nlohmann::json::exception& error) {
    fail("[safetensors] {}: names have to be UTF-8: {}", path, error.what());
  }
}

std::string entry_of(const StoredTensor& tensor, const std::string& path) {
  const nlohmann::json value{
      {"dtype", *name_of(tensor.dtype)}, {"shape", tensor.sizes}, {"data_offsets", {tensor.begin, tensor.end}}};
  return dump(tensor.name, path) + ":" + value.dump();
}

void check_has_name(const StoredTensor& tensor, const std::string& path) {
  FSDP_CHECK(
      name_of(tensor.dtype).has_value(),
      "[safetensors] {}: '{}' is {}, for which the format has no name: convert it",
      path,
      shown(tensor.name),
      tensor.dtype);
}

} // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes, const std::string& path) {
  SafetensorsSax sax(path);
  nlohmann::json::sax_parse(text, &sax);
  SafetensorsHeader header = std::move(sax.header());
  check_names_differ(header, path);
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t end = 0;
  for (const auto& tensor : header.tensors) {
    check_place(tensor, end, path);
    end = tensor.end;
  }
  FSDP_CHECK(
      end == data_bytes,
      "[safetensors] {}: its tensors have {} bytes, but {} follow the header: the file is cut short or damaged",
      path,
      end,
      data_bytes);
  return header;
}

std::string lay_out_safetensors(SafetensorsHeader& header, const std::string& path) {
  check_names_differ(header, path);
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
  });
  std::vector<std::string> entries;
  if (!header.metadata.empty()) {
    entries.push_back("\"__metadata__\":" + dump(header.metadata, path));
  }
  int64_t end = 0;
  for (auto& tensor : header.tensors) {
    check_has_name(tensor, path);
    tensor.begin = end;
    tensor.end = end += checked_bytes(tensor, path);
    entries.push_back(entry_of(tensor, path));
  }
  std::string text = "{" + join(entries, ",") + "}";
  text.append((kAlignment - (kSafetensorsLengthBytes + text.size()) % kAlignment) % kAlignment, ' ');
  return text;
}

std::string shown(std::string_view name) {
  constexpr size_t kMost = 200;
  std::string text(name.substr(0, kMost));
  std::replace_if(
      text.begin(), text.end(), [](unsigned char letter) { return letter < ' ' || letter == 0x7f; }, '?');
  return name.size() > kMost ? text + "..." : text;
}

} // namespace fsdp::disk
