// The index as JSON.

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/dtype_names.h"
#include "checkpoint/json_fields.h"
#include "checkpoint/plain_name.h"
#include "checkpoint/safetensors_header.h"
#include "checkpoint/value_json.h"
#include "layout/param_layout.h"

namespace fsdp::disk {

namespace {

using nlohmann::json;

constexpr const char* kFormat = "libfsdp checkpoint";
constexpr int64_t kVersion = 1;
constexpr size_t kDigits = 8; // of a checksum
// The index begins with the checksum of what it would be without.
constexpr std::string_view kBeforeChecksum = "{\"crc32c\":\"", kAfterChecksum = "\",";

std::string hexadecimal(const std::vector<uint32_t>& checksums) {
  std::string text;
  for (const uint32_t checksum : checksums) {
    for (int shift = 28; shift >= 0; shift -= 4) {
      text += "0123456789abcdef"[(checksum >> shift) & 0xf];
    }
  }
  return text;
}

std::vector<uint32_t> checksums_in(const std::string& text, const JsonFields& fields) {
  std::vector<uint32_t> checksums(text.size() / kDigits);
  bool sound = text.size() % kDigits == 0;
  for (size_t i = 0; i < checksums.size(); ++i) {
    const char* begin = text.data() + i * kDigits;
    const auto [end, error] = std::from_chars(begin, begin + kDigits, checksums[i], 16);
    sound &= error == std::errc() && end == begin + kDigits;
  }
  fields.check(sound, "has a crc32c that is none");
  return checksums;
}

json to_json(const StoredPiece& piece) {
  const Extent& extent = piece.extent;
  return {
      {"file", piece.file},
      {"offset", piece.offset},
      {"extent", {extent.first, extent.run, extent.stride, extent.count}},
      {"crc32c", hexadecimal(piece.checksums)}};
}

json to_json(const IndexedTensor& tensor) {
  json pieces = json::array();
  for (const auto& piece : tensor.pieces) {
    pieces.push_back(to_json(piece));
  }
  return {
      {"dtype", std::string(*name_of(tensor.dtype))},
      {"sizes", tensor.sizes},
      {"strides", tensor.strides},
      {"pieces", std::move(pieces)}};
}

json to_json(const NamedValues& values) {
  json object = json::object();
  for (const auto& [name, value] : values) {
    object[name] = json_of(value, name);
  }
  return object;
}

json to_json(const OptimizerNumbers& optimizer) {
  json params = json::object(), groups = json::array();
  for (const auto& [name, values] : optimizer.of_params) {
    params[name] = to_json(values);
  }
  for (const auto& group : optimizer.groups) {
    groups.push_back({{"params", group.params}, {"options", to_json(group.options)}});
  }
  return {{"params", std::move(params)}, {"groups", std::move(groups)}};
}

/// Reads what `to_json` has made, and checks it.
class IndexReader {
 public:
  explicit IndexReader(const std::string& path) : path_(path) {}

  CheckpointIndex read(const json& whole) {
    const JsonFields fields(whole, path_, "the index");
    fields.check(fields.text("format") == kFormat, "is of another format");
    const int64_t version = fields.integer("version");
    fields.check(version == kVersion, phrase("is of version {}, and this libfsdp reads {}", version, kVersion));
    index_.step = fields.integer("step");
    index_.block_bytes = fields.integer("block_bytes");
    fields.check(index_.block_bytes >= 16 && index_.block_bytes <= int64_t{1} << 30, "has a block_bytes out of range");
    for (const auto& item : fields.object("tensors").items()) {
      index_.tensors[item.key()] = tensor(item.value(), item.key());
    }
    index_.extra = values(fields.object("extra"));
    if (whole.contains("optimizer")) {
      index_.optimizer = optimizer(fields.object("optimizer"));
    }
    return std::move(index_);
  }

 private:
  static NamedValues values(const json& object) {
    NamedValues values;
    for (const auto& item : object.items()) {
      values[item.key()] = value_in(item.value(), item.key());
    }
    return values;
  }

  OptimizerNumbers optimizer(const json& object) const {
    const JsonFields fields(object, path_, "the optimizer");
    OptimizerNumbers numbers;
    for (const auto& item : fields.object("params").items()) {
      fields.check(item.value().is_object(), "has no numbers of '" + item.key() + "'");
      numbers.of_params[item.key()] = values(item.value());
    }
    for (const auto& item : fields.list("groups")) {
      const JsonFields group(item, path_, "a group of parameters");
      numbers.groups.push_back({group.texts("params"), values(group.object("options"))});
    }
    return numbers;
  }

  IndexedTensor tensor(const json& object, const std::string& name) const {
    const JsonFields fields(object, path_, "'" + name + "'");
    const auto dtype = dtype_named(fields.text("dtype"));
    fields.check(dtype.has_value(), "has a dtype that LibTorch does not have");
    IndexedTensor tensor{*dtype, fields.integers("sizes"), fields.integers("strides")};
    check_sizes(tensor, fields);
    for (const auto& item : fields.list("pieces")) {
      tensor.pieces.push_back(piece(item, tensor, name));
    }
    return tensor;
  }

  static void check_sizes(const IndexedTensor& tensor, const JsonFields& fields) {
    auto bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    bool too_many = tensor.sizes.size() > 64;
    for (const int64_t size : tensor.sizes) {
      too_many |= __builtin_mul_overflow(bytes, size, &bytes);
    }
    fields.check(!too_many, "has more than 2^63 bytes");
    fields.check(
        tensor.strides.size() == tensor.sizes.size() && layout::is_dense(tensor.sizes, tensor.strides),
        "has strides that leave gaps");
  }

  StoredPiece piece(const json& object, const IndexedTensor& tensor, const std::string& name) const {
    const JsonFields fields(object, path_, "a piece of '" + name + "'");
    const auto numbers = fields.integers("extent");
    fields.check(numbers.size() == 4, "has an extent that is none");
    StoredPiece piece{fields.text("file"), fields.integer("offset"), {numbers[0], numbers[1], numbers[2], numbers[3]}};
    fields.check(is_plain_name(piece.file), phrase("is in '{}', which is no file's name", shown(piece.file)));
    fields.check(lies_within(piece.extent, tensor.numel()), "has elements that the tensor does not have");
    const int64_t bytes = piece.extent.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    piece.checksums = checksums_in(fields.text("crc32c"), fields);
    const int64_t blocks = bytes / index_.block_bytes + (bytes % index_.block_bytes != 0 ? 1 : 0);
    fields.check(static_cast<int64_t>(piece.checksums.size()) == blocks, "has another number of checksums than blocks");
    return piece;
  }

  static bool lies_within(const Extent& extent, int64_t numel) {
    if (extent == Extent()) {
      return true;
    }
    int64_t last_run = 0, end = 0;
    const bool overflows = extent.run == 0 || extent.count == 0 || extent.stride < extent.run ||
                           __builtin_mul_overflow(extent.count - 1, extent.stride, &last_run) ||
                           __builtin_add_overflow(last_run, extent.first, &end) ||
                           __builtin_add_overflow(end, extent.run, &end);
    return !overflows && end <= numel;
  }

  const std::string& path_;
  CheckpointIndex index_{};
};

} // namespace

std::string to_text(const CheckpointIndex& index) {
  json tensors = json::object();
  for (const auto& [name, tensor] : index.tensors) {
    FSDP_CHECK(
        name_of(tensor.dtype).has_value(),
        "[save] '{}' is {}, for which files have no name: convert it",
        name,
        tensor.dtype);
    tensors[name] = to_json(tensor);
  }
  json whole{
      {"format", kFormat},
      {"version", kVersion},
      {"step", index.step},
      {"block_bytes", index.block_bytes},
      {"tensors", std::move(tensors)},
      {"extra", to_json(index.extra)}};
  if (index.optimizer) {
    whole["optimizer"] = to_json(*index.optimizer);
  }
  try {
    return with_checksum(whole.dump());
  } catch (const json::exception& error) {
    fail("[save] names and texts have to be UTF-8: {}", error.what());
  }
}

std::string with_checksum(const std::string& json) {
  std::string text(kBeforeChecksum);
  text += hexadecimal({crc32c(json.data(), json.size())});
  text += kAfterChecksum;
  return text += json.substr(1);
}

std::string without_checksum(const std::string& text, const std::string& path) {
  const size_t begin = kBeforeChecksum.size() + kDigits + kAfterChecksum.size();
  FSDP_CHECK(
      text.size() > begin && text.starts_with(kBeforeChecksum),
      "[load] {} does not begin as an index of libfsdp: it is damaged, or another program's",
      path);
  std::string json = "{" + text.substr(begin);
  FSDP_CHECK(
      text.compare(kBeforeChecksum.size(), kDigits, hexadecimal({crc32c(json.data(), json.size())})) == 0,
      "[load] {} is damaged: it is not what was saved. Load another checkpoint",
      path);
  return json;
}

CheckpointIndex parse_index(const std::string& text, const std::string& path) {
  const json whole = json::parse(without_checksum(text, path), /*callback=*/nullptr, /*allow_exceptions=*/false);
  FSDP_CHECK(!whole.is_discarded(), "[load] {} is no JSON: the index is damaged, or not libfsdp's", path);
  return IndexReader(path).read(whole);
}

} // namespace fsdp::disk
