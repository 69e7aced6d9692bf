#include "checkpoint/safetensors_sax.h"

#include <limits>
#include <utility>

#include "base/check.h"
#include "checkpoint/dtype_names.h"

namespace fsdp::disk {

namespace {

constexpr const char* kMetadataName = "__metadata__";
constexpr size_t kMostDimensions = 64; // those that LibTorch's operators take
constexpr size_t kOffsets = 2;

} // namespace

void SafetensorsSax::refuse(const std::string& what) const {
  const std::string where = entry_.empty() ? "" : ", '" + shown(entry_) + "'";
  fail("[safetensors] {}{}: {}; the file is damaged, or no safetensors file", path_, where, what);
}

bool SafetensorsSax::null() {
  refuse("null where a header has none");
}

bool SafetensorsSax::boolean(bool /*value*/) {
  refuse("a truth value where a header has none");
}

bool SafetensorsSax::number_integer(int64_t value) {
  refuse(phrase("{}, where a number has to be 0 or more", value));
}

bool SafetensorsSax::number_float(double /*value*/, const std::string& text) {
  refuse(phrase("{}, where a number has to be whole, and less than 2^63", shown(text)));
}

bool SafetensorsSax::binary(nlohmann::json::binary_t& /*value*/) {
  refuse("bytes that are no text");
}

bool SafetensorsSax::number_unsigned(uint64_t value) {
  if (place_ != Place::kSizes && place_ != Place::kOffsets) {
    refuse("a number where a header has none");
  }
  if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    refuse(phrase("{}, where a number has to be less than 2^63", value));
  }
  auto& numbers = place_ == Place::kSizes ? tensor_.sizes : offsets_;
  if (numbers.size() == (place_ == Place::kSizes ? kMostDimensions : kOffsets)) {
    refuse(place_ == Place::kSizes ? "more than 64 dimensions" : "more than two data_offsets");
  }
  numbers.push_back(static_cast<int64_t>(value));
  return true;
}

bool SafetensorsSax::string(std::string& value) {
  if (place_ == Place::kMetadata) {
    if (!header_.metadata.emplace(field_, std::move(value)).second) {
      refuse(phrase("'{}' is there twice", shown(field_)));
    }
    return true;
  }
  if (place_ != Place::kTensor || field_ != "dtype") {
    refuse("a text where a header has none");
  }
  const auto dtype = dtype_named(value);
  if (!dtype) {
    refuse(phrase("its dtype is '{}', which LibTorch does not have", shown(value)));
  }
  tensor_.dtype = *dtype;
  return true;
}

bool SafetensorsSax::start_object(size_t /*elements*/) {
  if (place_ == Place::kOutside) {
    place_ = Place::kNames;
  } else if (place_ == Place::kNames) {
    place_ = entry_ == kMetadataName ? Place::kMetadata : Place::kTensor;
  } else {
    refuse("an object within a value");
  }
  return true;
}

void SafetensorsSax::begin_entry(const std::string& name) {
  entry_ = name;
  if (name == kMetadataName && std::exchange(has_metadata_, true)) {
    refuse("is there twice");
  }
  tensor_ = StoredTensor{.name = name};
  offsets_.clear();
  has_dtype_ = has_sizes_ = has_offsets_ = false;
}

void SafetensorsSax::begin_field(const std::string& name) {
  bool* has = name == "dtype" ? &has_dtype_ : name == "shape" ? &has_sizes_ : nullptr;
  has = name == "data_offsets" ? &has_offsets_ : has;
  if (has == nullptr) {
    refuse(phrase("'{}', which no tensor has", shown(name)));
  }
  if (std::exchange(*has, true)) {
    refuse(phrase("'{}' is there twice", name));
  }
}

bool SafetensorsSax::key(std::string& name) {
  if (place_ == Place::kNames) {
    begin_entry(name);
  } else {
    field_ = name;
    if (place_ == Place::kTensor) {
      begin_field(name);
    }
  }
  return true;
}

void SafetensorsSax::end_tensor() {
  if (!has_dtype_ || !has_sizes_ || offsets_.size() != kOffsets) {
    refuse("dtype, shape or data_offsets are missing");
  }
  tensor_.begin = offsets_[0];
  tensor_.end = offsets_[1];
  header_.tensors.push_back(std::move(tensor_));
}

bool SafetensorsSax::end_object() {
  if (place_ == Place::kTensor) {
    end_tensor();
  }
  place_ = place_ == Place::kNames ? Place::kOutside : Place::kNames;
  return true;
}

bool SafetensorsSax::start_array(size_t /*elements*/) {
  const bool is_sizes = field_ == "shape";
  if (place_ != Place::kTensor || (!is_sizes && field_ != "data_offsets")) {
    refuse("a list where a header has none");
  }
  place_ = is_sizes ? Place::kSizes : Place::kOffsets;
  return true;
}

bool SafetensorsSax::end_array() {
  place_ = Place::kTensor;
  return true;
}

bool SafetensorsSax::parse_error(
    size_t position, const std::string& /*last*/, const nlohmann::json::exception& /*error*/) {
  refuse(phrase("the header is no JSON from its letter {} on", position));
}

} // namespace fsdp::disk
